"""Matrix products with the model's weights: alone, with the MLP's gated activation, and before a residual add.

How a product is computed is chosen per device and number of rows (`_choices`, filled by `openjev_fast_plugin.tuner`);
without a choice it is the kernel of csrc/linear_sm90.cuh for few rows on Hopper, else PyTorch's `F.linear`. Every way
sums in float32 and rounds where the ops below say, so ways differ by the order of their sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from openjev_fast_plugin.ops import _choices
from openjev_fast_plugin.ops._choices import PYTORCH, Choice, Product
from openjev_fast_plugin.ops._library import define
from openjev_fast_plugin.ops.silu_mul import silu_mul, silu_mul_ref

# What csrc/linear_sm90.cu has kernels for: weight rows of a block's tile and blocks that share a tile's columns.
TILES = ((40, 1), (64, 1), (80, 1), (112, 1), (136, 1), (64, 2), (80, 2))
SILU_TILES = ((48, 1), (96, 1), (136, 1))
# The most rows it takes; more are faster in cuBLAS (bench/LOG.md).
KERNEL_ROWS = 128
# Weight rows of a tile and tiles across the rows of x, of those that cuBLAS computes 129 to 384 rows with.
_BAND_TILES, _BANDS_ACROSS = (128, 192, 256), (1, 2, 3)
# Columns of one step of the kernel.
_STEP = 64
# What a wave of blocks costs besides reading, in rows read (bench/LOG.md).
_WAVE_ROWS = 32
# Partial sums that `add_rms_norm` and `head_score` take.
PARTIALS = (2, 4)
# Orders of the operands in csrc/cublaslt_binding.cpp.
FORMS = 2
# Rows and pointers of kernel and cuBLASLt start at multiples of this many bytes; so many bfloat16 elements.
_ALIGNMENT, _STEP_OF_ROWS = 16, 8


def kernel_tiles(rows: int, features: int, columns: int, silu: bool = False) -> list[tuple[int, int]]:
    """The kernel's tiles and parts that can compute x [rows, columns] times a weight [features, columns].

    silu: for :func:`linear_silu_mul`.
    """
    if not 1 <= rows <= KERNEL_ROWS or features % (16 if silu else 8):
        return []
    return [
        (tile, parts) for tile, parts in (SILU_TILES if silu else TILES) if columns % (_STEP * parts) == 0
    ]


def kernel_tile(
    rows: int, features: int, columns: int, multiprocessors: int, silu: bool = False
) -> tuple[int, int] | None:
    """The tile and parts of `kernel_tiles` that should be fastest; None where there are none.

    Blocks that run at once divide the weight between them; the best tile is the one whose blocks read least, of
    weight and x together. multiprocessors: blocks that run at once.
    """
    pieces = 2 if silu else 1

    def costs() -> Iterator[tuple[int, int, int]]:
        for tile, parts in kernel_tiles(rows, features, columns, silu):
            blocks = -(-features // pieces // tile) * parts
            waves = -(-blocks // multiprocessors)
            yield waves * (pieces * tile + rows + _WAVE_ROWS) * columns // parts, tile, parts

    best = min(costs(), default=None)
    return None if best is None else best[1:]


def bands(features: int, multiprocessors: int) -> list[int]:
    """Weight rows of one call, where computing a product of so many features in several calls may be faster.

    A call whose tiles are one for each multiprocessor leaves none of them idle at its end; all features at once may
    need one tile more than that (bench/LOG.md). At least a quarter of the features, fewer than all of them.
    """
    fitting = {multiprocessors // across * tile for across in _BANDS_ACROSS for tile in _BAND_TILES}
    return sorted(band for band in fitting if features <= 4 * band < 4 * features)


def default_choice(product: Product, capability: tuple[int, int], multiprocessors: int) -> Choice:
    """How a product is computed on such a device where nothing else is chosen."""
    if capability != (9, 0):
        return PYTORCH
    silu = product.op == "linear_silu_mul"
    found = kernel_tile(product.rows, product.features, product.columns, multiprocessors, silu)
    return PYTORCH if found is None else Choice("kernel", tile=found[0], parts=found[1], fused=silu)


def choice_of(product: Product, device: torch.device) -> Choice:
    """How a product that has ways is to be computed on a CUDA device; noted as wanted where nothing is chosen."""
    if not product.rows:
        return PYTORCH
    choices = _choices.installed(device.index)
    found = None if choices is None else choices.find(product)
    if found is None:
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        found = default_choice(product, torch.cuda.get_device_capability(device), multiprocessors)
    return found


def has_ways(weight: torch.Tensor) -> bool:
    """Whether products of contiguous rows with a weight on a CUDA device have other ways than PyTorch's."""
    return (
        weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and weight.shape[1] % _STEP_OF_ROWS == 0
        and weight.data_ptr() % _ALIGNMENT == 0
    )


def _choice(op: str, x: torch.Tensor, weight: torch.Tensor) -> Choice:
    """How an op on these tensors, which are on a CUDA device, is to be computed."""
    if not has_ways(weight) or x.dtype is not torch.bfloat16:
        return PYTORCH
    if x.stride(1) != 1 or x.stride(0) % _STEP_OF_ROWS or x.data_ptr() % _ALIGNMENT:
        return PYTORCH
    return choice_of(Product(op, x.shape[0], weight.shape[0], weight.shape[1]), x.device)


def _partials(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Partial sums of the way chosen for :func:`linear_update`, by shape alone; 1 where there are none."""
    choices = _choices.installed(x.device.index) if x.device.type == "cuda" else None
    if choices is None or x.dtype is not torch.bfloat16 or not len(x):
        return 1
    found = choices.find(Product("linear_update", x.shape[0], weight.shape[0], weight.shape[1]))
    return 1 if found is None else found.partials


def linear_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The readable twin of :func:`linear`: summed in float32, rounded once."""
    return (x.float() @ weight.float().t()).to(x.dtype)


def linear_silu_mul_ref(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The readable twin of :func:`linear_silu_mul`: same rounding points."""
    return silu_mul_ref(linear_ref(x, gate_up))


def linear_update_ref(x: torch.Tensor, weight: torch.Tensor, partials: int = 1) -> torch.Tensor:
    """The readable twin of :func:`linear_update`, with the number of partial sums given."""
    if partials == 1:
        return linear_ref(x, weight)
    pieces = zip(x.float().chunk(partials, dim=1), weight.float().chunk(partials, dim=1), strict=True)
    return torch.stack([part @ weight_part.t() for part, weight_part in pieces])


def _portable_silu_mul(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return silu_mul(F.linear(x, gate_up))


def _portable_update(x: torch.Tensor, weight: torch.Tensor, partials: int) -> torch.Tensor:
    if weight.shape[1] % partials:
        raise ValueError(f"{weight.shape[1]} columns cannot be summed in {partials} equal parts")
    return F.linear(x, weight) if partials == 1 else linear_update_ref(x, weight, partials)


def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_silu_mul(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], gate_up.shape[0] // 2)


def _fake_update(x: torch.Tensor, weight: torch.Tensor, partials: int) -> torch.Tensor:
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape) if partials == 1 else x.new_empty(partials, *shape, dtype=torch.float32)


_op = define("linear(Tensor x, Tensor weight) -> Tensor", portable=F.linear, fake=_fake)
_op_silu_mul = define(
    "linear_silu_mul(Tensor x, Tensor gate_up) -> Tensor", portable=_portable_silu_mul, fake=_fake_silu_mul
)
_op_update = define(
    "linear_update(Tensor x, Tensor weight, int partials) -> Tensor",
    portable=_portable_update,
    fake=_fake_update,
)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T``.

    x: [N, K], weight: [O, K], model dtype (bfloat16 or float32). The weight must not be written by kernels that may
    still run: where few rows make reading it the cost, it is fetched before x is there.

    Returns [N, O] of the same dtype, summed in float32 and rounded once. On CUDA, bfloat16 rows and pointers at
    multiples of 16 bytes are computed in the way chosen for the size, all else by PyTorch's ``F.linear``.
    """
    return _op(x, weight)


def linear_silu_mul(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """``silu_mul(linear(x, gate_up))``, in one kernel where that is the way chosen.

    x: [N, K], gate_up: [2 I, K], model dtype; as for :func:`linear`.

    Returns [N, I] of the same dtype. Gate and up are rounded before the activation, as when computed one by one.
    """
    return _op_silu_mul(x, gate_up)


def linear_update(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` as what :func:`add_rms_norm` or :func:`head_score` adds to the residual stream.

    x: [N, K], weight: [O, K], model dtype; as for :func:`linear`.

    Returns [N, O] of the same dtype, rounded once, or [S, N, O] float32, S = 2 or 4: sums over S equal parts of the
    columns, not rounded, where that is the way chosen for the size. ``torch.ops.openjev_fast.linear_update`` is given S
    as its last argument, 1 for a rounded product.
    """
    return _op_update(x, weight, _partials(x, weight))
