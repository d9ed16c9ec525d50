"""Prefixes kept from one forward to the next: a request about a text that was just sent computes what is new alone.

What is kept of a prefix is what rows after it read: of every Gated DeltaNet layer the state at its end and the last
three rows of the convolution's input, of every attention layer the keys and values of its rows. All of it lies in
memory taken once, at the start, so a captured graph can read and write any of it: which prefixes, where they lie and
where new ones go are numbers in the layout's tables. Half of the bytes hold states, half rows.

`PrefixCache` is the bookkeeping on the host. Prefixes are found by comparing token ids. Any number of threads may plan;
`take` and `settle` are called around a forward, one at a time, and nothing else lets go of a prefix. A plan made before
its prefix was let go of, or before what it computes was kept, is no longer `current` and must be made again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from openjev_fast_plugin.forest import Forest, continue_forest
from openjev_fast_plugin.layout import CONVOLUTION_ROWS, Layout
from openjev_fast_plugin.weights import Shapes

_log = logging.getLogger("openjev_fast")


class KeptStates(NamedTuple):
    """Of one Gated DeltaNet layer: states [P, HV, V, K] float32, transposed; conv [P + 1, 3, C].

    States are numbered from 0; rows of the convolution's input by the same number plus 1: 0 is for what nobody keeps.
    """

    states: torch.Tensor
    conv: torch.Tensor


class KeptRows(NamedTuple):
    """Of one attention layer: keys, after norm and rotation, and values, [R + 1, HKV, D]; rows are numbered from 1."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Capacity:
    """How much is kept. slots: prefixes. rows: rows of all prefixes together. spare_bytes: of what nobody keeps."""

    slots: int
    rows: int
    slot_bytes: int
    row_bytes: int
    spare_bytes: int

    @property
    def total_bytes(self) -> int:
        """What the tensors take."""
        return self.slots * self.slot_bytes + self.rows * self.row_bytes + self.spare_bytes

    @classmethod
    def of(cls, shapes: Shapes, dtype: torch.dtype, most_bytes: int, least_rows: int) -> Capacity:
        """As much as fits in a number of bytes.

        ValueError, naming what it takes, where no prefix of `least_rows` rows fits, and for layers of one type alone.
        """
        linear = shapes.layer_types.count("linear_attention")
        attention = len(shapes.layer_types) - linear
        if not linear or not attention:
            raise ValueError(
                f"prefixes are kept of models with layers of both types, not of {shapes.layer_types}"
            )
        conv = linear * CONVOLUTION_ROWS * shapes.conv_channels * dtype.itemsize
        slot = linear * 4 * shapes.value_heads * shapes.value_dim * shapes.key_dim + conv
        row = attention * 2 * shapes.kv_heads * shapes.head_dim * dtype.itemsize
        half = most_bytes // 2
        slots, rows = (half - conv) // slot, half // row - 1
        if slots < 1 or rows < least_rows:
            least = 2 * max(slot + conv, (least_rows + 1) * row)
            raise ValueError(
                f"{most_bytes} bytes hold no prefix of this model, of which {least} bytes hold the first"
            )
        return cls(slots, rows, slot, row, conv + row)

    def allocate(
        self, shapes: Shapes, dtype: torch.dtype, device: torch.device
    ) -> list[KeptStates | KeptRows]:
        """Zeros for every layer, in one piece of memory: allocators round each piece up, some to 2 MiB."""
        memory = torch.zeros(self.total_bytes, dtype=torch.uint8, device=device)
        linear = shapes.layer_types.count("linear_attention")
        heads = (shapes.value_heads, shapes.value_dim, shapes.key_dim)
        states = (linear, self.slots, *heads)
        conv = (linear, self.slots + 1, CONVOLUTION_ROWS, shapes.conv_channels)
        rows = (len(shapes.layer_types) - linear, 2, self.rows + 1, shapes.kv_heads, shapes.head_dim)
        # States come first: they are what kernels read at multiples of 16 bytes.
        sizes = (4 * prod(states), dtype.itemsize * prod(conv), dtype.itemsize * prod(rows))
        parts = memory.split(sizes)
        of_linear = zip(
            parts[0].view(torch.float32).view(states), parts[1].view(dtype).view(conv), strict=True
        )
        of_attention = iter(parts[2].view(dtype).view(rows))
        return [
            KeptStates(*next(of_linear)) if kind == "linear_attention" else KeptRows(*next(of_attention))
            for kind in shapes.layer_types
        ]


@dataclass(frozen=True, eq=False)
class Prefix:
    """A prefix that is kept. tokens: its ids [L]. place: from 1, as in `Reuse`. rows: [L], kept rows, from 1."""

    tokens: np.ndarray
    place: int
    rows: np.ndarray


@dataclass(frozen=True)
class Plan:
    """A forest over kept prefixes, and which of its nodes end where a prefix to be kept does.

    used: the kept prefixes that the forest's are, in its order. keep: tokens of each prefix to be kept. node: [n], the
    node that ends there. path: for each, the kept prefix its path continues, -1 for none, and the packed rows after it.
    """

    forest: Forest
    used: tuple[Prefix, ...]
    keep: tuple[np.ndarray, ...]
    node: tuple[int, ...]
    path: tuple[tuple[int, np.ndarray], ...]

    @property
    def rows_reused(self) -> int:
        return sum(len(prefix.tokens) for prefix in self.used)


@dataclass(frozen=True)
class Planned:
    """What a forward is prepared from, its plan, and the layout of it that keeps nothing."""

    sequences: list[np.ndarray]
    roots: list[np.ndarray | None]
    shared: bool
    plan: Plan
    layout: Layout

    @property
    def rows(self) -> int:
        """How many rows the forward computes."""
        return self.layout.rows

    def shape_key(self) -> tuple[Any, ...]:
        """What a captured graph of the layout depends on."""
        return self.layout.shape_key()


class PrefixCache:
    """Prefixes by their tokens, the least recently used let go of where there is no room for a new one.

    least_rows: shorter prefixes are not kept; at least 3.
    layers: what a forward of the model reads and writes, None once memory was needed elsewhere; then nothing is kept
    any more.
    """

    def __init__(
        self,
        shapes: Shapes,
        dtype: torch.dtype,
        device: torch.device,
        capacity: Capacity,
        least_rows: int,
    ):
        self.capacity = capacity
        self.layers: list[KeptStates | KeptRows] | None = capacity.allocate(shapes, dtype, device)
        self.counts = dict.fromkeys(("hits", "rows_reused", "kept", "evictions"), 0)
        self._least_rows = least_rows
        self._lock = threading.Lock()
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()
        self._let_go_of_all()

    @property
    def held_bytes(self) -> int:
        """What the prefixes that are kept now take."""
        with self._lock:
            rows = sum(len(prefix.rows) for prefix in self._prefixes.values())
            return len(self._prefixes) * self.capacity.slot_bytes + rows * self.capacity.row_bytes

    @property
    def held(self) -> int:
        """How many prefixes are kept now."""
        return len(self._prefixes)

    @property
    def total_bytes(self) -> int:
        """What the tensors take, however much of them is used."""
        return 0 if self.layers is None else self.capacity.total_bytes

    def plan(self, sequences: list[np.ndarray], roots: Sequence[np.ndarray | None]) -> Plan | None:
        """The forest of sequences over the longest kept prefix of each one's root, cut where a root is to be kept.

        sequences: as for `build_forest`. roots: [C], ids that each sequence begins with and other requests may begin
        with too, None for none; a sequence that does not begin with its root, or is not longer, is taken without.
        Returns None where nothing is used and nothing to be kept.
        """
        found: dict[int, Prefix | None] = {}
        used: list[Prefix] = []
        prefix: list[int] = []
        keep: dict[bytes, tuple[int, np.ndarray]] = {}
        for candidate, (sequence, root) in enumerate(zip(sequences, roots, strict=True)):
            chosen = -1
            if root is not None and _begins(sequence, root) and self.layers is not None:
                if id(root) not in found:
                    found[id(root)] = self._find(root)
                kept = found[id(root)]
                if kept is not None:
                    if kept not in used:
                        used.append(kept)
                    chosen = used.index(kept)
                if self._worth_keeping(root, kept):
                    keep.setdefault(_key(root), (candidate, root))
            prefix.append(chosen)
        if not used and not keep:
            return None
        forest = continue_forest(sequences, prefix, [len(each.tokens) for each in used])
        for candidate, root in keep.values():
            forest = forest.cut(candidate, len(root))
        nodes = tuple(forest.node_at(candidate, len(root) - 1) for candidate, root in keep.values())
        return Plan(
            forest,
            tuple(used),
            tuple(root for _, root in keep.values()),
            nodes,
            tuple((forest.kept_prefix(node), forest.path(node)) for node in nodes),
        )

    def current(self, plan: Plan) -> bool:
        """Whether everything a plan uses is still kept, and nothing that it is to keep has been kept since."""
        with self._lock:
            return (
                self.layers is not None
                and all(self._prefixes.get(_key(prefix.tokens)) is prefix for prefix in plan.used)
                and not any(_key(tokens) in self._prefixes for tokens in plan.keep)
            )

    def take(self, planned: Planned) -> tuple[Layout, list[Prefix]]:
        """The layout of a forward that starts now by a current plan, and the prefixes it keeps once it is settled.

        What it keeps has its room from now on; what there is no room for is not kept.
        """
        plan = planned.plan
        with self._lock:
            for prefix in plan.used:
                self._prefixes.move_to_end(_key(prefix.tokens))
            self.counts["hits"] += len(plan.used)
            self.counts["rows_reused"] += plan.rows_reused
            made = [self._make_room(tokens, plan.used) for tokens in plan.keep]
        if not plan.keep:
            return planned.layout, []
        places = [0 if prefix is None else prefix.place for prefix in made]
        rows = [
            np.zeros(len(tokens), dtype=np.int32) if prefix is None else prefix.rows
            for tokens, prefix in zip(plan.keep, made, strict=True)
        ]
        layout = planned.layout.keeping(np.array(plan.node), np.array(places), np.concatenate(rows))
        return layout, [prefix for prefix in made if prefix is not None]

    def settle(self, made: list[Prefix], sound: bool) -> None:
        """The forward of a `take` has run: what it made can be found from now on, unless it is not sound."""
        with self._lock:
            for prefix in made:
                if sound:
                    self._prefixes[_key(prefix.tokens)] = prefix
                    self.counts["kept"] += 1
                else:
                    self._free(prefix)

    def drop(self) -> None:
        """Let go of every prefix, those of a forward that runs too: it failed."""
        with self._lock:
            self._let_go_of_all()

    def release(self) -> None:
        """Give the memory back, for good."""
        with self._lock:
            self._let_go_of_all()
            if self.layers is not None:
                self.layers = None
                _log.warning(
                    "openjev-fast: a forward found no memory: no prefixes are kept any more, which gives %d bytes back",
                    self.capacity.total_bytes,
                )

    # With the lock held

    def _let_go_of_all(self) -> None:
        self._prefixes.clear()
        self._free_places = list(range(self.capacity.slots, 0, -1))
        self._free_rows = np.arange(self.capacity.rows, 0, -1, dtype=np.int32)

    def _make_room(self, tokens: np.ndarray, used: Sequence[Prefix]) -> Prefix | None:
        oldest = [prefix for prefix in self._prefixes.values() if prefix not in used]
        # Nothing is let go of in vain.
        rows = len(self._free_rows) + sum(len(prefix.rows) for prefix in oldest)
        if len(tokens) > rows or not (self._free_places or oldest):
            return None
        while not self._free_places or len(self._free_rows) < len(tokens):
            prefix = oldest.pop(0)
            del self._prefixes[_key(prefix.tokens)]
            self._free(prefix)
            self.counts["evictions"] += 1
        taken, self._free_rows = self._free_rows[-len(tokens) :], self._free_rows[: -len(tokens)]
        # The order matters to nobody, and neighbours are copied faster.
        return Prefix(tokens.copy(), self._free_places.pop(), np.sort(taken))

    def _free(self, prefix: Prefix) -> None:
        self._free_places.append(prefix.place)
        self._free_rows = np.concatenate([self._free_rows, prefix.rows[::-1]])

    # Without it

    def _find(self, root: np.ndarray) -> Prefix | None:
        """The longest kept prefix that a root begins with."""
        with self._lock:
            whole = self._prefixes.get(_key(root))
            if whole is not None:
                return whole
            shorter = [prefix for prefix in self._prefixes.values() if _begins(root, prefix.tokens)]
        return max(shorter, key=lambda prefix: len(prefix.tokens), default=None)

    def _worth_keeping(self, root: np.ndarray, kept: Prefix | None) -> bool:
        already = 0 if kept is None else len(kept.tokens)
        return len(root) - already >= self._least_rows and len(root) <= self.capacity.rows


def _key(tokens: np.ndarray) -> bytes:
    """What tells prefixes apart: their ids themselves."""
    return tokens.astype(np.int32, copy=False).tobytes()


def _begins(sequence: np.ndarray, prefix: np.ndarray) -> bool:
    """Whether a longer sequence begins with a prefix."""
    return len(sequence) > len(prefix) and np.array_equal(sequence[: len(prefix)], prefix)
