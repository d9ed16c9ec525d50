"""A forest as the tensors one forward reads: built on the host, moved to the model's device in one copy."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from openjev_fast_plugin.forest import Forest
from openjev_fast_plugin.ops import AttentionPlan, DeltaPlan, plan_attention, plan_delta_rule

_CHUNK_SIZES = (64, 32, 16)
# Tables that the portable ops loop over on the host; all others belong on the model's device.
_HOST_TABLES = frozenset(("step_start", "step_kept", "block_query", "block_own", "block_range", "range_rows"))
# Tables start at multiples of this many int32, so that kernels can read 16 bytes at a time.
ALIGNMENT = 4


@dataclass(frozen=True)
class Bucket:
    """Sizes are rounded up to multiples of these, so that requests share matmul sizes and captured graphs."""

    rows: int = 1
    nodes: int = 1
    reads: int = 1


@dataclass(frozen=True)
class Layout:
    """N packed rows, M read rows, C candidates; tables are int32.

    token: [N], token id of each row. position: [N], depth of each row on its path, from 0.
    predecessor: [N, 3], rows 1, 2 and 3 steps back on the path, -1 before its start.
    delta: nodes of the delta rule. attention: every row as a query. read_attention: the read rows as queries.
    read_row: [M], rows the head reads. candidate_read: [C], index into read_row of each candidate.
    """

    token: torch.Tensor
    position: torch.Tensor
    predecessor: torch.Tensor
    delta: DeltaPlan
    attention: AttentionPlan
    read_attention: AttentionPlan
    read_row: torch.Tensor
    candidate_read: torch.Tensor

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
            tables += [value] if isinstance(value, torch.Tensor) else _device_tables(value).values()
        return tables

    @cached_property
    def _starts(self) -> list[int]:
        """Where each device table starts in the packed tensor; the last number is the tensor's size."""
        return [0, *accumulate(round_up(table.numel(), ALIGNMENT) for table in self._tables)]


def _device_tables(plan: DeltaPlan | AttentionPlan) -> dict[str, torch.Tensor]:
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
) -> Layout:
    """The layout of one forest on the host, its sizes rounded up to the bucket's multiples.

    portable: False leaves out the tables that only the portable ops read.
    few_queries: the most queries that attention plans in small tiles: for its kernel what `few_queries_for` says.

    Padding rows form a root of their own, so they are computed like any others and no real row sees them; padding
    nodes have no rows; the last read row and the first candidate are repeated.
    """
    rows, nodes = len(forest.token), len(forest.node_start)
    extra = -rows % bucket.rows

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
    delta = plan_delta_rule(*tables, chunk_size_for(node_length, node_level) if portable else None, host)
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
        attention=plan_attention(*tables, np.arange(len(token)), node, host, **plan),
        read_attention=plan_attention(*tables, read_row, node[read_row], host, **plan),
        read_row=torch.from_numpy(read_row),
        candidate_read=torch.from_numpy(candidate_read),
    )


def _chain(first: int, count: int) -> np.ndarray:
    """Predecessors [count, 3] of a root of `count` rows that starts at row `first`."""
    back = np.arange(count, dtype=np.int32)[:, None] - np.arange(1, 4, dtype=np.int32)
    return np.where(back < 0, -1, first + back).astype(np.int32)


def _with_empty_entries(table: torch.Tensor, multiple: int) -> torch.Tensor:
    """A table [K, columns] with zero rows added up to a multiple."""
    return torch.cat([table, table.new_zeros(-len(table) % multiple, table.shape[1])])


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
