"""Times calls on a CUDA device by replaying graphs of them in turn: what the tuners measure with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from openjev_fast_plugin.graphs import ONE_CAPTURE

# The default stays unless the best takes less than this share of its time: a median of one run repeats to a percent.
BEATEN_BELOW = 0.985
# A replay makes calls for this many microseconds, at least, and two calls: less is lost in the gaps between graphs.
_LEAST_US, LEAST_CALLS, _MOST_CALLS = 200.0, 2, 64
# Rounds of the default alone before anything is timed: an idle device has lowered its clocks.
WARM_ROUNDS = 10


@dataclass(frozen=True)
class Recording:
    """calls: how many a replay makes. replay: enqueues them on the device."""

    calls: int
    replay: Callable[[], Any]


class Timer(Protocol):
    def record(self, calls: Sequence[Callable[[], Any]]) -> Recording:
        """Make the first call, then prepare all of them for replay. RuntimeError where the device refuses one."""

    def round(self, recordings: Sequence[Recording]) -> list[float]:
        """Replay each once, in this order; microseconds of a call of each."""


class GraphTimer:
    """Records CUDA graphs. A round is one queue of replays with events between, so that the host is never waited for.

    Graphs share memory: what a replay computes is overwritten by the next.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # The pool lives as long as one of its graphs.
        anchor = torch.zeros(1, device=device)
        self._anchor = self.record([anchor.zero_])

    def record(self, calls: Sequence[Callable[[], Any]]) -> Recording:
        # Libraries initialise at a first call, which must not happen under capture.
        calls[0]()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        # Not torch.cuda.graph: it empties the allocator's cache, which takes longer than all the rest.
        with ONE_CAPTURE, torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return Recording(len(calls), graph.replay)

    def round(self, recordings: Sequence[Recording]) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(recordings) + 1)]
        # While the first runs untimed, the others are enqueued.
        recordings[0].replay()
        events[0].record()
        for recording, event in zip(recordings, events[1:], strict=True):
            recording.replay()
            event.record()
        events[-1].synchronize()
        return [
            1e3 * before.elapsed_time(after) / recording.calls
            for recording, before, after in zip(recordings, events, events[1:], strict=False)
        ]


def calls_for(us: float) -> int:
    """Calls of a recording, where one takes so many microseconds."""
    return max(LEAST_CALLS, min(_MOST_CALLS, -(-int(_LEAST_US) // max(int(us), 1))))
