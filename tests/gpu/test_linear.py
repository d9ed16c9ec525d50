"""The products for few rows against float64, next to cuBLAS' own error, and against what they are made of."""

import pytest
import torch
import torch.nn.functional as F

# The parent folder is on the path through its conftest.py.
from comparison import relative_l2

from openjev_fast_plugin.ops import _cuda, add_rms_norm, linear, linear_silu_mul, silu_mul
from openjev_fast_plugin.ops._choices import PYTORCH
from openjev_fast_plugin.ops.linear import KERNEL_ROWS, SILU_TILES, TILES, _choice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

ROWS = [1, 7, 8, 63, 64, 65, 72, 127, 128]
# Weights of the released models, a width no tile divides, and fewer columns than a block's stages hold.
SHAPES = [(16480, 5120), (5120, 17408), (4096, 4096), (8224, 2048), (200, 512), (96, 64)]


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, device="cuda")).bfloat16()


def kernel(x: torch.Tensor, weight: torch.Tensor, silu: bool, tile: int, parts: int) -> torch.Tensor:
    """The kernel's output, computed into memory that held NaN."""
    run = _cuda.load()["linear_sm90"]
    run(x, weight, silu, tile, parts).fill_(torch.nan)
    # The allocator hands the freed, NaN-filled block to the second call.
    return run(x, weight, silu, tile, parts)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


@pytest.mark.parametrize("features, columns", SHAPES)
@pytest.mark.parametrize("tile, parts", TILES)
def test_products_err_no_more_than_cublas(tile, parts, features, columns):
    if columns % (64 * parts):
        pytest.skip("parts of whole steps only")
    weight = normal(features, columns, scale=columns**-0.5)
    for rows in ROWS:
        x = normal(rows, columns + 64)[:, :columns]
        exact = x.double() @ weight.double().t()
        found = kernel(x, weight, False, tile, parts)
        assert torch.isfinite(found).all(), rows
        assert relative_l2(found, exact) <= 1.05 * relative_l2(F.linear(x, weight), exact), rows
        assert torch.equal(found, kernel(x, weight, False, tile, parts)), rows


@pytest.mark.parametrize("width, columns", [(17408, 5120), (12288, 4096), (6144, 2048), (200, 512), (8, 64)])
@pytest.mark.parametrize("tile, parts", SILU_TILES)
def test_gated_products_err_no_more_than_one_by_one(tile, parts, width, columns):
    gate_up = normal(2 * width, columns, scale=columns**-0.5)
    for rows in ROWS:
        x = normal(rows, columns)
        product = x.double() @ gate_up.double().t()
        exact = F.silu(product[:, :width]) * product[:, width:]
        found = kernel(x, gate_up, True, tile, parts)
        one_by_one = silu_mul(F.linear(x, gate_up))
        assert torch.isfinite(found).all(), rows
        assert relative_l2(found, exact) <= 1.05 * relative_l2(one_by_one, exact), rows
        # The same roundings: only sums in another order differ.
        assert (found == one_by_one).float().mean() > 0.95, rows


def test_rows_of_x_do_not_reach_each_other():
    weight, x = normal(1024, 512), normal(72, 512)
    expected = linear(x, weight)
    x[3] = torch.nan
    found = linear(x, weight)
    others = torch.arange(72, device="cuda") != 3
    assert torch.equal(found[others], expected[others]) and torch.isnan(found[3]).all()


@pytest.mark.parametrize("op", [linear, linear_silu_mul])
def test_what_the_kernel_does_not_take_is_pytorchs(op):
    weight, silu, name = normal(64, 128), op is linear_silu_mul, op.__name__
    for x, w in (
        (normal(KERNEL_ROWS + 1, 128), weight),
        (normal(8, 130)[:, 1:129], weight),
        (normal(8, 256)[:, ::2], weight),
        (normal(8, 128), normal(128, 64).t()),
        (normal(8, 72), normal(64, 72)),
    ):
        assert _choice(name, x, w) == PYTORCH
        expected = F.linear(x, w)
        assert torch.equal(op(x, w), silu_mul(expected) if silu else expected)
    assert _choice(name, normal(8, 128), weight).way == "kernel"


def test_products_wait_for_what_they_multiply():
    """A chain in which every product starts before the norm before it has ended, eagerly and in a graph."""
    hidden, rows = 1024, 72
    up = [normal(2 * hidden, hidden, scale=hidden**-0.5) for _ in range(8)]
    down = [normal(hidden, hidden, scale=hidden**-0.5) for _ in range(8)]
    norm, x = normal(hidden, scale=0.1), normal(rows, hidden)

    def chain(product, gated) -> torch.Tensor:
        residual, update = x, None
        for wide, narrow in zip(up, down, strict=True):
            residual, normed = add_rms_norm(residual, update, norm, 1e-6)
            update = product(gated(normed, wide), narrow)
        return add_rms_norm(residual, update, norm, 1e-6)[1]

    def synchronized(op):
        def run(*arguments):
            torch.cuda.synchronize()
            return op(*arguments)

        return run

    expected = chain(synchronized(linear), synchronized(linear_silu_mul))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain(linear, linear_silu_mul)
    for _ in range(50):
        assert torch.equal(chain(linear, linear_silu_mul), expected)
        replayed.fill_(torch.nan)
        graph.replay()
        assert torch.equal(replayed, expected)
