import pytest
import torch
import torch.nn.functional as F

from openjev_fast_plugin.checkpoint import PROFILES
from openjev_fast_plugin.ops import linear, linear_ref, linear_silu_mul, linear_silu_mul_ref
from openjev_fast_plugin.ops.linear import _SILU_TILES, _TILES, kernel_tile

MULTIPROCESSORS = 132


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_off_the_gpu_are_pytorchs(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24).to(dtype), torch.randn(12, 24).to(dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    torch.testing.assert_close(linear(x, weight), linear_ref(x, weight))
    torch.testing.assert_close(linear_silu_mul(x, weight), linear_silu_mul_ref(x, weight))


def test_shapes_are_known_without_computing():
    x, weight = torch.empty(5, 24, device="meta"), torch.empty(12, 24, device="meta")
    assert linear(x, weight).shape == (5, 12)
    assert linear_silu_mul(x, weight).shape == (5, 6)


@pytest.mark.parametrize("rows", [1, 8, 72, 128])
@pytest.mark.parametrize("profile", ["2b", "9b", "27b"])
def test_every_weight_of_a_released_model_is_divided_over_the_device(profile, rows):
    shapes = PROFILES[profile]
    keys, values = (
        shapes.linear_key_heads * shapes.linear_head_dim,
        shapes.linear_value_heads * shapes.linear_head_dim,
    )
    queries = shapes.heads * shapes.head_dim
    weights = {
        "linear_in": (2 * keys + 2 * values + 2 * shapes.linear_value_heads, shapes.hidden),
        "attention_in": (2 * queries + 2 * shapes.kv_heads * shapes.head_dim, shapes.hidden),
        "linear_out": (shapes.hidden, values),
        "attention_out": (shapes.hidden, queries),
        "down": (shapes.hidden, shapes.mlp),
    }
    for name, (features, columns) in weights.items():
        tile, parts = kernel_tile(rows, features, columns, MULTIPROCESSORS)
        assert (tile, parts) in _TILES, name
        # One wave, of more than a third of the multiprocessors: memory is shared by all of them.
        assert MULTIPROCESSORS / 3 < -(-features // tile) * parts <= MULTIPROCESSORS, name
    tile, parts = kernel_tile(rows, 2 * shapes.mlp, shapes.hidden, MULTIPROCESSORS, silu=True)
    assert (tile, parts) in _SILU_TILES and shapes.mlp / tile <= MULTIPROCESSORS


@pytest.mark.parametrize(
    "rows, features, columns, silu",
    [(0, 64, 64, False), (129, 64, 64, False), (8, 60, 64, False), (8, 72, 64, True), (8, 64, 96, False)],
)
def test_what_the_kernel_cannot_take(rows, features, columns, silu):
    assert kernel_tile(rows, features, columns, MULTIPROCESSORS, silu) is None


def test_parts_need_columns_of_their_own():
    assert kernel_tile(8, 4096, 128, MULTIPROCESSORS)[1] == 2
    assert kernel_tile(8, 4096, 192, MULTIPROCESSORS)[1] == 1
