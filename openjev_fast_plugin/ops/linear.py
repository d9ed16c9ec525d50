"""Matrix products with the model's weights, alone and with the MLP's gated activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from openjev_fast_plugin.ops._library import define
from openjev_fast_plugin.ops.silu_mul import silu_mul, silu_mul_ref

# What csrc/linear_sm90.cu has kernels for: weight rows of a block's tile and blocks that share a tile's columns.
_TILES = ((40, 1), (64, 1), (80, 1), (112, 1), (136, 1), (64, 2), (80, 2))
_SILU_TILES = ((48, 1), (96, 1), (136, 1))
# More rows are faster in cuBLAS (bench/LOG.md).
KERNEL_ROWS = 128
# Columns of one step of the kernel.
_STEP = 64
# What a wave of blocks costs besides reading, in rows read (bench/LOG.md).
_WAVE_ROWS = 32


def kernel_tile(
    rows: int, features: int, columns: int, multiprocessors: int, silu: bool = False
) -> tuple[int, int] | None:
    """The kernel's tile and parts for x [rows, columns] and a weight [features, columns]; None where it has none.

    Blocks that run at once divide the weight between them; the best tile is the one whose blocks read least, of
    weight and x together. multiprocessors: blocks that run at once. silu: for :func:`linear_silu_mul`.
    """
    pieces = 2 if silu else 1
    if not 1 <= rows <= KERNEL_ROWS or features % (8 * pieces):
        return None

    def costs() -> Iterator[tuple[int, int, int]]:
        for tile, parts in _SILU_TILES if silu else _TILES:
            if columns % (_STEP * parts) == 0:
                blocks = -(-features // pieces // tile) * parts
                waves = -(-blocks // multiprocessors)
                yield waves * (pieces * tile + rows + _WAVE_ROWS) * columns // parts, tile, parts

    best = min(costs(), default=None)
    return None if best is None else best[1:]


def _kernel_tile_of(x: torch.Tensor, weight: torch.Tensor, silu: bool) -> tuple[int, int] | None:
    if torch.cuda.get_device_capability(x.device) != (9, 0):
        return None
    if weight.dtype != x.dtype or not weight.is_contiguous() or x.stride(1) != 1 or x.stride(0) % 8:
        return None
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    features, columns = weight.shape
    return kernel_tile(x.shape[0], features, columns, multiprocessors, silu)


def linear_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The readable twin of :func:`linear`: summed in float32, rounded once."""
    return (x.float() @ weight.float().t()).to(x.dtype)


def linear_silu_mul_ref(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The readable twin of :func:`linear_silu_mul`: same rounding points."""
    return silu_mul_ref(linear_ref(x, gate_up))


def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _portable_silu_mul(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return silu_mul(linear(x, gate_up))


def _fake_silu_mul(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], gate_up.shape[0] // 2)


_op = define("linear(Tensor x, Tensor weight) -> Tensor", portable=F.linear, fake=_fake)
_op_silu_mul = define(
    "linear_silu_mul(Tensor x, Tensor gate_up) -> Tensor", portable=_portable_silu_mul, fake=_fake_silu_mul
)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T``.

    x: [N, K], weight: [O, K], model dtype (bfloat16 or float32). The weight must not be written by kernels that may
    still run: where few rows make reading it the cost, it is fetched before x is there.

    Returns [N, O] of the same dtype, summed in float32 and rounded once. bfloat16 on compute capability 9.0 with up
    to 128 rows and sizes that are multiples of 64 (K) and 8 (O) runs csrc/linear_sm90.cuh, all else PyTorch's
    ``F.linear``.
    """
    return _op(x, weight)


def linear_silu_mul(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """``silu_mul(linear(x, gate_up))``, in one kernel where :func:`linear` has a kernel of its own.

    x: [N, K], gate_up: [2 I, K], model dtype; as for :func:`linear`, with 2 I a multiple of 16.

    Returns [N, I] of the same dtype. Gate and up are rounded before the activation, as when computed one by one.
    """
    return _op_silu_mul(x, gate_up)
