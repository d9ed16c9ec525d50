"""What a forward computes and the least it moves, counted from shapes: the numerators of TFLOP/s and GB/s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openjev_fast_plugin.layout import Layout
from openjev_fast_plugin.weights import Shapes

_BYTES = 2


@dataclass(frozen=True)
class Work:
    """Floating-point operations, a multiply and an add counted as two, and bytes of one forward.

    matmul: the projections and the MLP of the rows computed. attention: the two products with keys and values of every
    query and key it sees. delta: the recurrence's three products with the state for every row and value head, whatever
    the chunked form adds to them. bytes: every weight of a matmul read once, in bfloat16, and each matmul's input and
    output written once and read once. Norms, gates, states, embeddings and the head are left out of both.
    """

    matmul: int
    attention: int
    delta: int
    bytes: int

    def tflops(self, ms: float) -> float:
        """10^12 operations a second in a forward of `ms` milliseconds."""
        return (self.matmul + self.attention + self.delta) / ms / 1e9

    def gb_s(self, ms: float) -> float:
        """10^9 bytes a second in a forward of `ms` milliseconds."""
        return self.bytes / ms / 1e6


def packed_work(shapes: Shapes, layout: Layout) -> Work:
    """The packed forward: every row once; in the last layer what the read rows need."""
    seen, read = layout.position + 1, layout.read_row
    last_seen = seen.index_select(0, read)
    return _work(shapes, layout.rows, len(read), int(seen.sum()), int(last_seen.sum()))


def padded_work(shapes: Shapes, candidates: int, length: int) -> Work:
    """The original: every candidate padded to the longest, every row in every layer."""
    rows, seen = candidates * length, candidates * length * (length + 1) // 2
    return _work(shapes, rows, rows, seen, seen)


def _work(shapes: Shapes, rows: int, read: int, seen: int, last_seen: int) -> Work:
    """rows, read: rows of all layers, and of what the last computes for read rows alone. seen: keys of all queries."""
    matmul = moved = attention = delta = 0
    for index, kind in enumerate(shapes.layer_types):
        last = index == len(shapes.layer_types) - 1
        for count, wide, out in _matmuls(shapes, kind, rows, read if last else rows):
            matmul += 2 * count * wide * out
            moved += _BYTES * (wide * out + 2 * count * (wide + out))
        if kind == "linear_attention":
            delta += 6 * rows * shapes.value_heads * shapes.key_dim * shapes.value_dim
        else:
            attention += 4 * shapes.query_heads * shapes.head_dim * (last_seen if last else seen)
    return Work(matmul, attention, delta, moved)


def _matmuls(shapes: Shapes, kind: str, rows: int, read: int) -> Iterator[tuple[int, int, int]]:
    """Rows, input and output columns of one layer's matmuls, the projections of one input fused."""
    if kind == "linear_attention":
        mixed = shapes.value_heads * shapes.value_dim
        every, some = shapes.conv_channels + 2 * shapes.value_heads, mixed
    else:
        mixed = shapes.query_heads * shapes.head_dim
        every, some = 2 * shapes.kv_heads * shapes.head_dim, 2 * mixed
    if rows == read:
        yield rows, shapes.hidden, every + some
    else:
        yield rows, shapes.hidden, every
        yield read, shapes.hidden, some
    yield read, mixed, shapes.hidden
    yield read, shapes.hidden, 2 * shapes.intermediate
    yield read, shapes.intermediate, shapes.hidden
