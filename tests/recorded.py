"""CUDA Graphs on the CPU: a stand-in that reads and writes the same buffers, so that all around them can be tested."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from openjev_fast_plugin.graphs import CapturedGraphs, _Captured


def record_instead_of_capture(patch: pytest.MonkeyPatch) -> None:
    """Make every class of `graphs` take the CPU, where a replay calls the forward on the graph's own buffers."""

    def captured(self, inputs):
        forward, packed = self._forward, inputs.pack()
        on_device = inputs.unpack(packed)
        scores = forward(on_device)
        graph = SimpleNamespace(replay=lambda: scores.copy_(forward(on_device)))
        return _Captured(graph, packed, scores, packed.nbytes)

    patch.setattr(CapturedGraphs, "device_type", "cpu")
    patch.setattr(CapturedGraphs, "_captured", captured)
    patch.setattr(CapturedGraphs, "_pinned", lambda self, inputs: inputs.pack())
    patch.setattr(CapturedGraphs, "_on_device", lambda self: nullcontext())
    patch.setattr(CapturedGraphs, "_mark", lambda self: lambda: True)
