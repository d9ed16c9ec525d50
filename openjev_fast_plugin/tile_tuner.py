"""Finds up to how many queries attention is faster in small tiles than in large ones on a device, and keeps it.

Small tiles are more blocks, large ones read each key for more queries. Both are timed in turn over a grid of numbers of
queries, on a root with tails and on one root, every row a query. All of it is cut into pieces of some milliseconds, so
that a server can measure while it is idle.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby

import numpy as np
import torch

from openjev_fast_plugin.layout import Layout
from openjev_fast_plugin.ops import AttentionPlan, plan_attention, tree_attention
from openjev_fast_plugin.ops._choices import Choices, Heads
from openjev_fast_plugin.ops.tree_attention import (
    LARGE_TILE,
    SMALL_TILE,
    default_few_queries,
    multiprocessors_of,
    tile_queries_for,
)
from openjev_fast_plugin.packed_layout import PackedLayout
from openjev_fast_plugin.replay_timer import BEATEN_BELOW, LEAST_CALLS, WARM_ROUNDS, Timer, calls_for
from openjev_fast_plugin.tables import AttentionFacts, Sample, Store, TileEntry

QUERIES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Rows of a tail: an option and what follows it.
_TAIL = 21
_ROUNDS = 11


def _one_root(rows: int) -> list[tuple[int, int]]:
    return [(rows, -1)]


def _root_with_tails(rows: int) -> list[tuple[int, int]]:
    root = rows // 2
    return [(root, -1), *((min(_TAIL, rows - first), 0) for first in range(root, rows, _TAIL))]


# Forests of so many rows: nodes as (length, parent).
FORMS: dict[str, Callable[[int], list[tuple[int, int]]]] = {
    "root": _one_root,
    "root with tails": _root_with_tails,
}


def choose_few_queries(samples: Sequence[Sample], default: int) -> int:
    """The most queries to plan in small tiles: where the samples, in total, take least.

    samples: ascending by queries. The cost of a threshold is the logarithm of the time taken, averaged over the forms
    and summed over the numbers of queries, so that each number counts alike. The threshold is the default unless
    another one is clearly cheaper, by what a matmul must save at one number of rows (`BEATEN_BELOW`). Then it is the
    last number that small tiles are to have, 0 where they are to have none.
    """
    queries, gains = [], []
    for count, several in groupby(samples, key=lambda sample: sample.queries):
        queries.append(count)
        gains.append(statistics.mean(math.log(sample.small_us / sample.large_us) for sample in several))
    # Of the first numbers in small tiles, against all in large ones.
    costs = list(accumulate(gains, initial=0.0))
    kept = bisect_right(queries, default)
    best = min(range(len(costs)), key=lambda first: (costs[first], abs(first - kept)))
    if costs[best] >= costs[kept] + math.log(BEATEN_BELOW):
        return default
    return queries[best - 1] if best else 0


@dataclass
class TileTuner:
    """Measures the tile sizes of attention with some heads; the timer is of the device.

    Everything runs with the device current and under `torch.inference_mode()`.
    """

    heads: Heads
    device: torch.device
    timer: Timer

    @property
    def default(self) -> int:
        """The most queries in small tiles where nothing is measured."""
        return default_few_queries(multiprocessors_of(self.device), self.heads)

    def measure(self) -> Generator[None, None, TileEntry]:
        """Time every number of queries; yields after every piece of work, at most some milliseconds each."""
        given = self._inputs(max(QUERIES))
        samples: list[Sample] = []
        yield
        for queries in QUERIES:
            for form, nodes in FORMS.items():
                calls = [self._call(given, nodes(queries), tile) for tile in (SMALL_TILE, LARGE_TILE)]
                several = [self.timer.record([call] * LEAST_CALLS) for call in calls]
                yield
                # Before the first, longer: an idle device has lowered its clocks.
                for _ in range(1 if samples else WARM_ROUNDS):
                    us = self.timer.round(several)
                    yield
                several = [self.timer.record([call] * calls_for(min(us))) for call in calls]
                yield
                rounds = []
                for _ in range(_ROUNDS):
                    rounds.append(self.timer.round(several))
                    yield
                small, large = (round(statistics.median(spans), 3) for spans in zip(*rounds, strict=True))
                samples.append(Sample(form, queries, small, large))
        return TileEntry(choose_few_queries(samples, self.default), self.default, tuple(samples))

    def _inputs(self, rows: int) -> tuple[torch.Tensor, ...]:
        """q, k, v and gate of so many rows; v and gate are slices of wider rows, as in a forward."""
        query_heads, kv_heads, dim = self.heads
        draw = torch.Generator(self.device).manual_seed(rows)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=self.device).to(torch.bfloat16)

        keys_values = normal(rows, 2 * kv_heads, dim)
        gate = normal(rows, query_heads, 2 * dim)[..., dim:]
        return normal(rows, query_heads, dim), keys_values[:, :kv_heads], keys_values[:, kv_heads:], gate

    def _call(
        self, given: tuple[torch.Tensor, ...], nodes: list[tuple[int, int]], tile_queries: int
    ) -> Callable[[], torch.Tensor]:
        length, parent = np.array(nodes).T
        start = np.cumsum(length) - length
        rows = int(length.sum())
        # The kernel reads no other tables.
        portable = self.device.type != "cuda"
        plan = plan_attention(
            start,
            length,
            parent,
            np.arange(rows),
            np.repeat(np.arange(len(nodes)), length),
            self.device,
            tile_queries,
            portable,
        )
        return partial(_attend, plan, *(tensor[:rows] for tensor in given))


def _attend(
    plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    return tree_attention(q, k, v, gate, q.shape[2] ** -0.5, plan)


class TileTuning:
    """The tile sizes of a model's attention: those in force, where they are kept, and the tuner.

    What the shipped and the user's own table have for this device is in force when this returns; entries: that, by
    heads, and what is measured later.
    """

    def __init__(self, tuner: TileTuner, choices: Choices, store: Store[AttentionFacts, Heads, TileEntry]):
        self.tuner, self.store = tuner, store
        self._choices = choices
        self.entries = store.known()
        for heads, entry in self.entries.items():
            choices.few_queries[heads] = entry.few_queries

    @property
    def heads(self) -> Heads:
        return self.tuner.heads

    @property
    def wanted(self) -> bool:
        """Whether nothing is measured for these heads; another model on the device may have done it."""
        return self.heads not in self._choices.few_queries

    @property
    def few_queries(self) -> int:
        """The most queries planned in small tiles from now on."""
        return self._choices.few_queries.get(self.heads, self.tuner.default)

    def lays_out(self, layout: Layout | PackedLayout) -> bool:
        """Whether a layout has the tiles that it would have now."""
        few = self.few_queries
        return layout.tile_queries == (
            tile_queries_for(layout.rows, few),
            tile_queries_for(layout.reads, few),
        )

    def tune(self) -> Generator[None, None, TileEntry]:
        """Measure, put the threshold in force and keep it; yields as `TileTuner.measure` does.

        OSError where it could not be kept; it is in force all the same.
        """
        entry = yield from self.tuner.measure()
        self.entries[self.heads] = entry
        self._choices.few_queries[self.heads] = entry.few_queries
        self.store.add({self.heads: entry})
        return entry
