"""Hidden states layer by layer: how far a backend's are from the original's, and both from a float32 forward.

In bfloat16 both are away from float32, and a few rows, which amplify every rounding, hold most of a pooled distance.
So the ratio of the two is taken row by row, and a layer's is the geometric mean: rounding more than the original moves
it, chance hardly does. A fault in few rows does not move it either: no prompt's rows may be off several times as far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .cases import Case
from .observe import Observed

# Of the backend's distance to the float32 forward over the original's own: of a typical row, and of a prompt's rows.
RATIO, PROMPT_RATIO = 1.05, 4.0
# Of the distance to the original in float32, where it has none of its own.
FLOAT32_DISTANCE = 1e-4
# Added to both squares of a row, in their mean: equal rows have a ratio too.
_LEAST = 1e-6


@dataclass
class _Layer:
    """Sums of squares over one layer's states, of the golden's and of differences, and what its rows say."""

    golden: float = 0.0
    original: float = 0.0
    backend: float = 0.0
    between: float = 0.0
    logarithms: float = 0.0
    rows: int = 0
    # Ratio by prompt; in float32 the distance itself.
    prompts: dict[str, float] = field(default_factory=dict)


class Distances:
    """Distances by layer, over every case that was added.

    in_float32: the original's states are the golden ones.
    """

    def __init__(self, layer_types: tuple[str, ...], in_float32: bool):
        self._types, self._in_float32 = layer_types, in_float32
        self._layers = [_Layer() for _ in layer_types]

    def add(
        self, layer: int, case: Case, backend: torch.Tensor, original: Observed, golden: Observed | None
    ) -> None:
        """A case's distinct rows after one layer, in order of prompts; golden: None where the original's is."""
        pool, found = self._layers[layer], backend.double()
        theirs = original.states[layer].to(found.device).double()
        exact = theirs if golden is None else golden.states[layer].to(found.device).double()
        ours, others = ((x - exact).square().sum(1) for x in (found, theirs))
        pool.golden += exact.square().sum().item()
        pool.between += (found - theirs).square().sum().item()
        pool.backend += ours.sum().item()
        pool.original += others.sum().item()
        least = _LEAST * others.mean()
        pool.logarithms += 0.5 * ((ours + least) / (others + least)).log().sum().item()
        pool.rows += len(found)
        by_prompt = zip(*(x.split(case.own_sizes) for x in (ours, others)), strict=True)
        for index, (of_backend, of_original) in enumerate(by_prompt):
            if len(of_backend):
                over = 1.0 if self._in_float32 else of_original.sum().item()
                pool.prompts[f"{case.name}: {case.candidate(index)}"] = _root(of_backend.sum().item(), over)

    def rows(self) -> list[dict[str, Any]]:
        """A row per layer; distances are relative L2 over all its states."""
        found = []
        for index, (kind, pool) in enumerate(zip(self._types, self._layers, strict=True)):
            # What is not a number is the furthest.
            furthest = max(pool.prompts, key=lambda name: _or_infinite(pool.prompts[name]))
            row: dict[str, Any] = {
                "layer": index,
                "kind": kind,
                "relative_l2": _root(pool.between, pool.golden),
                "furthest_prompt": furthest,
            }
            if self._in_float32:
                row["passed"] = row["relative_l2"] <= FLOAT32_DISTANCE
            else:
                row |= {
                    "original_to_float32": _root(pool.original, pool.golden),
                    "backend_to_float32": _root(pool.backend, pool.golden),
                    "ratio": float(torch.tensor(pool.logarithms / pool.rows).exp()),
                    "furthest_ratio": pool.prompts[furthest],
                }
                row["passed"] = row["ratio"] <= RATIO and row["furthest_ratio"] <= PROMPT_RATIO
            found.append(row)
        return found


def _or_infinite(value: float) -> float:
    return float("inf") if math.isnan(value) else value


def _root(squares: float, over: float) -> float:
    """Root of a ratio of sums of squares; both 0 counts as equal."""
    if over:
        return (squares / over) ** 0.5
    return float("inf") if squares else 0.0
