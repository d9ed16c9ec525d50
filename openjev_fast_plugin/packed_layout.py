"""Token sequences to what a forward of the kernels reads, by compiled code: csrc/layout.cpp, built with the kernels.

A replay waits for its layout, and with cold caches the many small steps of `forest` and `layout` take longer than a
percent of a forward. They say what the tables are, and make them where there is no compiler, or prefixes are kept or
read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import numpy as np
import torch

from openjev_fast_plugin.forest import check_ids, flatten
from openjev_fast_plugin.layout import ALIGNMENT, Bucket, Layout, round_up
from openjev_fast_plugin.ops import AttentionPlan, DeltaPlan, _cuda
from openjev_fast_plugin.ops.tree_attention import NO_BLOCKS

# Tables of the portable delta rule, which a layout for the kernels leaves empty: on the device, and on the host.
_NO_CHUNKS = ((0,),) * 4
_NO_STEPS = torch.zeros(0, dtype=torch.int32)
_NONE_KEPT = _NO_STEPS.view(0, 2)


class PackedLayout:
    """A layout for the kernels as one buffer: `Layout.pack` of the layout that `build_layout` makes.

    rows, reads, tile_queries: as of a `Layout`.
    """

    def __init__(self, packed: torch.Tensor, sizes: Sequence[int]):
        """packed: int32 on the host. sizes: those of `LayoutSizes` in csrc/layout.h, in its order."""
        rows, nodes, chunks, tiles, ranges, reads, read_tiles, read_ranges, candidates, *numbers = sizes
        self.rows: int = rows
        self.reads: int = reads
        self.tile_queries: tuple[int, int] = (numbers[-2], numbers[-1])
        self._packed, self._numbers = packed, numbers
        # Of the tables in the order in which `Layout.pack` has them.
        self._shapes = (
            *((rows,), (rows,), (rows, 3)),
            *(*_NO_CHUNKS, (nodes, 8), (chunks, 4)),
            *((rows,), (rows,), (tiles, 4), (ranges, 4)),
            *((reads,), (reads,), (read_tiles, 4), (read_ranges, 4)),
            *((reads,), (candidates,)),
        )
        self._shape_key = (*self._shapes, 0, 0, *numbers)

    def shape_key(self) -> tuple[object, ...]:
        """That of the `Layout`."""
        return self._shape_key

    def pack(self, pinned: bool = False) -> torch.Tensor:
        """The buffer, which nobody may write to; in page-locked memory or not, as it was made."""
        return self._packed

    def unpack(self, packed: torch.Tensor) -> Layout:
        """The layout over the values in `packed`, filled from a layout of the same shape."""
        table = self._tables(packed)
        node_tiles, node_slots, tile_queries, read_tile_queries = self._numbers

        def attention(queries: int) -> AttentionPlan:
            query_row, query_first = next(table), next(table)
            return AttentionPlan(
                query_row,
                query_first,
                **NO_BLOCKS,
                tile=next(table),
                tile_range=next(table),
                tile_queries=queries,
            )

        token, position, predecessor = next(table), next(table), next(table)
        chunks = (next(table), next(table), next(table), next(table))
        return Layout(
            token=token,
            position=position,
            predecessor=predecessor,
            delta=DeltaPlan(
                *chunks,
                _NO_STEPS,
                _NO_STEPS,
                0,
                0,
                _NONE_KEPT,
                _NONE_KEPT,
                next(table),
                next(table),
                node_tiles,
                node_slots,
            ),
            attention=attention(tile_queries),
            read_attention=attention(read_tile_queries),
            read_row=next(table),
            candidate_read=next(table),
        )

    def _tables(self, packed: torch.Tensor) -> Iterator[torch.Tensor]:
        lengths = [prod(shape) for shape in self._shapes]
        starts = accumulate((round_up(length, ALIGNMENT) for length in lengths), initial=0)
        for shape, start, length in zip(self._shapes, starts, lengths, strict=False):
            yield packed[start : start + length].view(shape)


def pack_layout(
    sequences: Sequence[np.ndarray], bucket: Bucket, few_queries: int, pinned: bool
) -> PackedLayout:
    """The layout of the sequences' forest for the kernels, its sizes rounded up to the bucket's multiples.

    sequences and errors: as for `build_forest`. few_queries: as for `build_layout`. pinned: in page-locked memory, from
    which a CUDA device copies without the host waiting. Raises BuildError where the kernels cannot be built.
    """
    packed, sizes = _cuda.load()["packed_layout"](
        *_flat(sequences), bucket.rows, bucket.nodes, bucket.reads, few_queries, pinned
    )
    return PackedLayout(packed, sizes)


def count_rows(sequences: Sequence[np.ndarray]) -> int:
    """What `forest.count_rows` returns, and raises. Raises BuildError where the kernels cannot be built."""
    return _cuda.load()["count_rows"](*_flat(sequences))


def _flat(sequences: Sequence[np.ndarray]) -> tuple[torch.Tensor, list[int]]:
    """As `flatten` returns, in int32; of those ids the compiled code looks for negative ones."""
    tokens, bounds = flatten(sequences)
    if tokens.dtype != np.int32:
        check_ids(tokens)
        tokens = tokens.astype(np.int32)
    return torch.from_numpy(tokens), bounds
