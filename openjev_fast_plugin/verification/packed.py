"""A packed forward, op by op, watched from outside: every op's call, and the hidden states between layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openjev_fast_plugin import engine as fast_engine
from openjev_fast_plugin.compiled_layers import compiles
from openjev_fast_plugin.forest import Forest
from openjev_fast_plugin.forward import forward, forward_by_ops
from openjev_fast_plugin.layout import Bucket, Layout, build_layout
from openjev_fast_plugin.ops import add_rms_norm_ref
from openjev_fast_plugin.ops._library import NAMESPACE
from openjev_fast_plugin.ops.tree_attention import few_queries_for
from openjev_fast_plugin.weights import Weights

from .ops import Call, Measure, OpResult, measures
from .preparation import path_rows

# (index of the layer they come after, states [rows, hidden]); (op, arguments, outputs).
OnState = Callable[[int, torch.Tensor], None]
OnCall = Callable[[str, tuple[Any, ...], tuple[torch.Tensor, ...]], None]


def checked_layers(layer_types: tuple[str, ...]) -> list[int]:
    """The first, the middle and the last layer of each type."""
    chosen = set()
    for kind in set(layer_types):
        those = [index for index, each in enumerate(layer_types) if each == kind]
        chosen |= {those[0], those[len(those) // 2], those[-1]}
    return sorted(chosen)


class PackedRun:
    """Packed forwards of one model's weights, laid out as the engine lays them out.

    layers: those whose ops are checked. results: what the checks found, by op. failures: op, layer and request, and
        the figure that is out of bounds, in the order of the calls.
    """

    def __init__(self, weights: Weights, layers: list[int]):
        self.layers = layers
        self.results: dict[str, OpResult] = {}
        self.failures: list[tuple[str, str, Measure]] = []
        self._weights = weights
        self._portable = fast_engine.portable_ops(weights.shapes, weights.embedding)
        self._bucket = Bucket() if self._portable else fast_engine.CUDA_BUCKET
        self._starts = {layer.input_norm.data_ptr(): index for index, layer in enumerate(weights.layers)}
        self._roles = {}
        for index, layer in enumerate(weights.layers):
            mixer = layer.mixer
            named = {
                "project": mixer.project,
                "output": mixer.output,
                "gate_up": layer.gate_up,
                "down": layer.down,
            }
            for name, weight in named.items():
                self._roles[weight.untyped_storage().data_ptr()] = f"{name} of layer {index}"

    def check_ops(self, name: str, forest: Forest) -> None:
        """Hold every op of a forward against its reference, in the layers to check. name: the request's."""
        layer = 0

        def on_call(op: str, arguments: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
            nonlocal layer
            layer = self._started(op, arguments) or layer
            if layer in self.layers:
                place = f"layer {layer}"
                if op in ("linear", "linear_silu_mul", "linear_update"):
                    place = self._roles.get(arguments[1].untyped_storage().data_ptr(), place)
                portable = self._portable == ["all"] or op in self._portable
                self._note(op, f"{place}, {name}", measures(Call(op, arguments, outputs, forest, portable)))

        layout, scores = self._run(forest, on_call)
        if compiles(self._weights, layout):
            # What serves is the compiled loop over the same ops.
            with torch.inference_mode():
                different = int((forward(self._weights, layout) != scores).sum())
            measure = Measure("scores", "elements different from op by op", different, 0)
            self._note("forward", name, [measure])

    def _note(self, op: str, place: str, found: Iterable[Measure]) -> None:
        """Count one call of an op, and what was measured of it."""
        result = self.results.setdefault(op, OpResult())
        result.calls += 1
        for measure in found:
            result.add(place, measure)
            if not measure.passed:
                self.failures.append((op, place, measure))

    def read_states(self, forest: Forest, on_state: OnState) -> None:
        """Hand over every packed row's state after every layer, the last one's after the final norm: [rows, hidden].

        All rows are read, where a request's forward reads its prompts' last rows alone.
        """
        rows, last = len(forest.token), len(self._weights.layers) - 1
        all_read = replace(
            forest,
            read_row=np.arange(rows, dtype=forest.read_row.dtype),
            candidate_read=forest.read_row[forest.candidate_read],
        )

        def on_call(op: str, arguments: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
            if started := self._started(op, arguments):
                on_state(started - 1, outputs[0][:rows])
            if op == "head_score":
                residual, update, _, norm_weight, _, _, eps = arguments
                on_state(last, add_rms_norm_ref(residual, update, norm_weight, eps)[1][:rows])

        self._run(all_read, on_call)

    def _started(self, op: str, arguments: tuple[Any, ...]) -> int | None:
        """The layer whose first call this is."""
        return self._starts.get(arguments[2].data_ptr()) if op == "add_rms_norm" else None

    def _run(self, forest: Forest, on_call: OnCall) -> tuple[Layout, torch.Tensor]:
        """The layout on the model's device, and the scores of its candidates."""
        few = few_queries_for(self._weights.device, self._weights.shapes.heads)
        layout = build_layout(forest, self._bucket, bool(self._portable), few).to(self._weights.device)
        with torch.inference_mode(), _Watch(on_call):
            return layout, forward_by_ops(self._weights, layout)


class _Watch(TorchDispatchMode):
    """Calls back for every op of ours that runs inside, with what it was given and what it returned."""

    def __init__(self, on_call: OnCall):
        super().__init__()
        self._on_call = on_call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func.namespace == NAMESPACE:
            several = outputs if isinstance(outputs, tuple) else (outputs,)
            self._on_call(func._schema.name.partition("::")[2], args, several)
        return outputs


def own_rows(new_from: list[int], forest: Forest) -> list[np.ndarray]:
    """For each prompt the packed rows of its tokens from `new_from` on."""
    found = []
    for index, first in enumerate(new_from):
        read = int(forest.read_row[forest.candidate_read[index]])
        found.append(path_rows(forest.predecessor, read)[first:])
    return found
