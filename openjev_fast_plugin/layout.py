"""A forest as the tensors one forward reads: built on the host, moved to the model's device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from openjev_fast_plugin.forest import Forest
from openjev_fast_plugin.ops import AttentionPlan, DeltaPlan, plan_attention, plan_delta_rule

# Rows before its own that a row's convolution reads.
CONVOLUTION_ROWS = 3
_CHUNK_SIZES = (64, 32, 16)
# Tables that the portable ops loop over on the host; all others belong on the model's device.
_HOST_TABLES = frozenset(
    ("step_start", "step_kept", "kept_source", "kept_target")
    + ("block_query", "block_own", "block_range", "range_rows")
)
# Tables start at multiples of this many int32, so that kernels can read 16 bytes at a time.
ALIGNMENT = 4


@dataclass(frozen=True)
class Bucket:
    """Sizes are rounded up to multiples of these, so that requests share matmul sizes and captured graphs."""

    rows: int = 1
    nodes: int = 1
    reads: int = 1


class Reuse(NamedTuple):
    """Where a forward finds what was kept of P prefixes, and puts what is kept of T of its own; tables are int32.

    Places of prefixes and kept rows are numbered from 1: what is put at 0 nobody keeps. Keys and values that queries
    see are those of G kept rows, then the N packed ones.

    kept_place: [P], places of the prefixes whose last rows the last 3 P packed rows stand for in a convolution.
    kept_row: [G], kept rows of these prefixes, one prefix after the other; the last one is repeated.
    keep_place: [T]. keep_last: [3 T], the last three packed rows of each.
    keep_from: [U], rows that queries see, of one after the other; the last one is repeated. keep_row: [U], where to.
    """

    kept_place: torch.Tensor
    kept_row: torch.Tensor
    keep_place: torch.Tensor
    keep_last: torch.Tensor
    keep_from: torch.Tensor
    keep_row: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """N packed rows, M read rows, C candidates; tables are int32.

    token: [N], token id of each row. position: [N], depth of each row on its path, from 0.
    predecessor: [N, 3], rows 1, 2 and 3 steps back on the path, -1 before its start.
    delta: nodes of the delta rule. attention: every row as a query. read_attention: the read rows as queries.
    read_row: [M], rows the head reads. candidate_read: [C], index into read_row of each candidate.
    reuse: prefixes it starts from or keeps; None: there are none.
    """

    token: torch.Tensor
    position: torch.Tensor
    predecessor: torch.Tensor
    delta: DeltaPlan
    attention: AttentionPlan
    read_attention: AttentionPlan
    read_row: torch.Tensor
    candidate_read: torch.Tensor
    reuse: Reuse | None = None

    @property
    def rows(self) -> int:
        return self.token.shape[0]

    @property
    def reads(self) -> int:
        return self.read_row.shape[0]

    @property
    def tile_queries(self) -> tuple[int, int]:
        """Queries of a tile of attention: of every row, and of the read rows."""
        return self.attention.tile_queries, self.read_attention.tile_queries

    def keeping(self, node: np.ndarray, place: np.ndarray, row: np.ndarray) -> Layout:
        """The same layout, on the host, that keeps its prefixes; this one stays as it is.

        node, place: [T], the nodes they end with and their places, from 1. row: [sum of their rows], kept rows of one
        after the other, from 1. 0 is for what is not to be kept.
        """
        assert self.reuse is not None
        keep_row = _repeat_last(row, len(self.reuse.keep_row))
        reuse = self.reuse._replace(
            keep_place=torch.from_numpy(place).int(), keep_row=torch.from_numpy(keep_row).int()
        )
        return replace(self, delta=self.delta.keeping(node, place - 1), reuse=reuse)

    def to(self, device: torch.device) -> Layout:
        """The same layout with its device tables on `device`, moved in one copy."""
        if device.type == "cpu":
            return self
        packed = self.pack(pinned=device.type == "cuda")
        return self.unpack(packed.to(device, non_blocking=True))

    def pack(self, pinned: bool = False) -> torch.Tensor:
        """Every device table in one int32 tensor [total], each at a 16-byte boundary; what lies between is undefined.

        pinned: in page-locked memory, from which a CUDA device copies without the host waiting.
        """
        starts = self._starts
        packed = torch.empty(starts[-1], dtype=torch.int32, pin_memory=pinned)
        flat = packed.numpy()
        for table, start in zip(self._tables, starts, strict=False):
            flat[start : start + table.numel()] = table.numpy().reshape(-1)
        return packed

    def unpack(self, packed: torch.Tensor) -> Layout:
        """This layout's shape over the tables in `packed`, which `pack` of a layout of the same shape filled."""
        starts = iter(self._starts)

        def moved(table: torch.Tensor) -> torch.Tensor:
            start = next(starts)
            return packed[start : start + table.numel()].view(table.shape)

        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, torch.Tensor):
                changed[field.name] = moved(value)
            else:
                tables = {name: moved(table) for name, table in _device_tables(value).items()}
                changed[field.name] = value._replace(**tables)
        return replace(self, **changed)

    def shape_key(self) -> tuple[Any, ...]:
        """What a captured graph depends on: the shapes of the device tables and the plans' numbers."""
        return self._shape_key

    @cached_property
    def _shape_key(self) -> tuple[Any, ...]:
        key: list[Any] = [tuple(table.shape) for table in self._tables]
        for plan in (self.delta, self.attention, self.read_attention):
            key += [value for value in plan if isinstance(value, int)]
        return tuple(key)

    @cached_property
    def _tables(self) -> list[torch.Tensor]:
        """Device tables, in the order in which they are packed."""
        tables: list[torch.Tensor] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                tables += [value] if isinstance(value, torch.Tensor) else _device_tables(value).values()
        return tables

    @cached_property
    def _starts(self) -> list[int]:
        """Where each device table starts in the packed tensor; the last number is the tensor's size."""
        return [0, *accumulate(round_up(table.numel(), ALIGNMENT) for table in self._tables)]


def _device_tables(plan: DeltaPlan | AttentionPlan | Reuse) -> dict[str, torch.Tensor]:
    """The tables of a plan that belong on the model's device, by name."""
    return {
        name: value
        for name, value in plan._asdict().items()
        if isinstance(value, torch.Tensor) and name not in _HOST_TABLES
    }


def rotary_tables(
    position: torch.Tensor, pairs: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position * theta^(-i / pairs) for i < pairs; angles in float32, rounded to dtype once.

    position: [N] integers. Returns two [N, pairs] tensors.
    """
    exponent = torch.arange(0, 2 * pairs, 2, dtype=torch.int64, device=position.device).float() / (2 * pairs)
    angle = position.float()[:, None] * (1.0 / theta**exponent)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def chunk_size_for(node_length: np.ndarray, node_level: np.ndarray) -> int:
    """The chunk size of the portable delta rule that is cheapest for these nodes.

    node_length, node_level: [K] integers. In units of one row, a padded row costs 1 + size / 256 and a step of the
    recurrence 8: fitted to timings on one CPU core (bench/LOG.md).
    """

    def cost(size: int) -> float:
        chunks = -(-node_length // size)
        steps = sum(int(chunks[node_level == level].max()) for level in range(int(node_level.max()) + 1))
        return int(chunks.sum()) * size * (1 + size / 256) + 8 * steps

    return min(_CHUNK_SIZES, key=cost)


def build_layout(
    forest: Forest,
    bucket: Bucket = Bucket(),  # noqa: B008
    portable: bool = True,
    few_queries: int = 0,
    kept: Sequence[tuple[int, np.ndarray]] = (),
    keep: Sequence[tuple[int, int, np.ndarray]] = (),
) -> Layout:
    """The layout of one forest on the host, its sizes rounded up to the bucket's multiples.

    portable: False leaves out the tables that only the portable ops read.
    few_queries: the most queries that attention plans in small tiles: for its kernel what `few_queries_for` says.
    kept: of each kept prefix of the forest, its place and its rows, from 1.
    keep: of each prefix to be kept, the node it ends with, the kept prefix its path continues, -1 for none, and the
        packed rows of the path; `Layout.keeping` says later where to.

    Padding rows form a root of their own, so they are computed like any others and no real row sees them; padding
    nodes have no rows; the last read row and the first candidate are repeated.
    """
    rows, nodes = len(forest.token), len(forest.node_start)
    # The last rows of the padding stand for the last ones of kept prefixes.
    standing = CONVOLUTION_ROWS * len(kept)
    extra = standing + -(rows + standing) % bucket.rows

    def padded(values: np.ndarray, count: int, fill: int) -> np.ndarray:
        """`values` [n] with `count` more entries of `fill`."""
        if not count:
            return values
        more = np.empty(len(values) + count, dtype=values.dtype)
        more[: len(values)], more[len(values) :] = values, fill
        return more

    token = padded(forest.token, extra, 0)
    position, predecessor = forest.position, forest.predecessor
    if extra:
        position = np.concatenate([position, np.arange(extra, dtype=position.dtype)])
        predecessor = np.concatenate([predecessor, _chain(rows, extra)])
    if kept:
        first_standing = rows + extra - standing
        predecessor = np.where(predecessor < -1, first_standing - 2 - predecessor, predecessor)
        predecessor = predecessor.astype(np.int32)
    node = padded(forest.node, extra, nodes)
    node_start, node_length, node_parent, node_level = (
        forest.node_start,
        forest.node_length,
        forest.node_parent,
        forest.node_level,
    )
    if extra:
        node_start, node_length = padded(node_start, 1, rows), padded(node_length, 1, extra)
        node_parent, node_level = padded(node_parent, 1, -1), padded(node_level, 1, 0)
    read_row = padded(forest.read_row, -len(forest.read_row) % bucket.reads, forest.read_row[-1])
    candidates = forest.candidate_read
    candidate_read = padded(candidates, -len(candidates) % bucket.reads, candidates[0])

    tables = (node_start, node_length, node_parent)
    host = torch.device("cpu")
    plan: dict[str, Any] = {"portable": portable, "few_queries": few_queries}
    chunk_size = chunk_size_for(node_length, node_level) if portable else None
    query_row, query_node, seen, reuse = np.arange(len(token)), node, tables, None
    if kept or keep:
        kept_source, kept_target = _kept_states(forest, kept, keep)
        delta = plan_delta_rule(*tables, chunk_size, host, kept_source, kept_target)
        reuse = _reuse(predecessor, kept, keep)
        seen = _behind_kept_rows(forest, tables, len(reuse.kept_row))
        query_row, query_node = query_row + len(reuse.kept_row), node + len(kept)
    else:
        delta = plan_delta_rule(*tables, chunk_size, host)
    return Layout(
        token=torch.from_numpy(token),
        position=torch.from_numpy(position),
        predecessor=torch.from_numpy(predecessor),
        # Entries without rows are skipped by the kernel; the portable implementation does not read these tables.
        delta=delta._replace(
            node=_with_empty_entries(delta.node, bucket.nodes),
            node_chunk=_with_empty_entries(delta.node_chunk, bucket.nodes),
            node_tiles=round_up(delta.node_tiles, bucket.nodes),
            node_slots=round_up(delta.node_slots, bucket.nodes),
        ),
        attention=plan_attention(*seen, query_row, query_node, host, **plan),
        read_attention=plan_attention(*seen, query_row[read_row], query_node[read_row], host, **plan),
        read_row=torch.from_numpy(read_row),
        candidate_read=torch.from_numpy(candidate_read),
        reuse=reuse,
    )


def _kept_states(
    forest: Forest,
    kept: Sequence[tuple[int, np.ndarray]],
    keep: Sequence[tuple[int, int, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """`kept_source` and `kept_target` of `plan_delta_rule`."""
    assert forest.node_kept is not None
    roots = np.flatnonzero(forest.node_kept >= 0)
    places = np.array([place for place, _ in kept], dtype=np.int64)
    nodes = np.array([node for node, _, _ in keep], dtype=np.int64)
    sources = np.stack([roots, places[forest.node_kept[roots]] - 1], axis=1)
    return sources, np.stack([nodes, np.full_like(nodes, -1)], axis=1)


def _reuse(
    predecessor: np.ndarray,
    kept: Sequence[tuple[int, np.ndarray]],
    keep: Sequence[tuple[int, int, np.ndarray]],
) -> Reuse:
    """The tables of what is read of kept prefixes and of what is to be kept, which goes nowhere yet."""
    first = np.cumsum([0, *(len(rows) for _, rows in kept)])
    kept_row = np.concatenate([np.empty(0, dtype=np.int32), *(rows for _, rows in kept)])
    kept_row = _repeat_last(kept_row, _round_coarsely(len(kept_row)))
    last, seen = [], []
    for _, prefix, path in keep:
        last.append([predecessor[path[-1], 1], predecessor[path[-1], 0], path[-1]])
        if prefix >= 0:
            seen.append(np.arange(first[prefix], first[prefix + 1]))
        seen.append(path + len(kept_row))
    keep_from = np.concatenate([np.empty(0, dtype=np.int32), *seen])
    keep_from = _repeat_last(keep_from, _round_coarsely(len(keep_from)))

    def table(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int32).reshape(-1))

    return Reuse(
        kept_place=table([place for place, _ in kept]),
        kept_row=table(kept_row),
        keep_place=torch.zeros(len(keep), dtype=torch.int32),
        keep_last=table(last),
        keep_from=table(keep_from),
        keep_row=torch.zeros(len(keep_from), dtype=torch.int32),
    )


def _behind_kept_rows(
    forest: Forest, tables: tuple[np.ndarray, np.ndarray, np.ndarray], kept_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, lengths and parents of nodes as queries see them: kept prefixes, then the nodes behind all kept rows."""
    start, length, parent = tables
    assert forest.node_kept is not None
    kept_length = np.array(forest.kept_length, dtype=np.int64)
    prefixes = len(kept_length)
    node_kept = np.concatenate([forest.node_kept, np.full(len(parent) - len(forest.node_kept), -1)])
    above = np.where(parent >= 0, parent + prefixes, node_kept)
    return (
        np.concatenate([np.cumsum(kept_length) - kept_length, start + kept_rows]),
        np.concatenate([kept_length, length]),
        np.concatenate([np.full(prefixes, -1), above]),
    )


def _repeat_last(values: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([values, np.repeat(values[-1:], count - len(values))])


def _round_coarsely(value: int) -> int:
    """Up to one of four sizes between two powers of two, so that few sizes differ; 0 stays 0."""
    step = 1 << max(value.bit_length() - 3, 0)
    return round_up(value, step)


def _chain(first: int, count: int) -> np.ndarray:
    """Predecessors [count, 3] of a root of `count` rows that starts at row `first`."""
    back = np.arange(count, dtype=np.int32)[:, None] - np.arange(1, 4, dtype=np.int32)
    return np.where(back < 0, -1, first + back).astype(np.int32)


def _with_empty_entries(table: torch.Tensor, multiple: int) -> torch.Tensor:
    """A table [K, columns] with zero rows added up to a multiple."""
    return torch.cat([table, table.new_zeros(-len(table) % multiple, table.shape[1])])


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
