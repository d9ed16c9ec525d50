import pytest
import torch
import torch.nn.functional as F

from openjev_fast_plugin.checkpoint import PROFILES
from openjev_fast_plugin.ops import (
    add_rms_norm,
    linear,
    linear_ref,
    linear_silu_mul,
    linear_silu_mul_ref,
    linear_update,
    linear_update_ref,
)
from openjev_fast_plugin.ops._choices import PYTORCH, Choice, Choices, Product
from openjev_fast_plugin.ops.linear import (
    SILU_TILES,
    TILES,
    bands,
    default_choice,
    kernel_tile,
    kernel_tiles,
)

MULTIPROCESSORS = 132


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_off_the_gpu_are_pytorchs(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24).to(dtype), torch.randn(12, 24).to(dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    torch.testing.assert_close(linear(x, weight), linear_ref(x, weight))
    torch.testing.assert_close(linear_silu_mul(x, weight), linear_silu_mul_ref(x, weight))
    assert torch.equal(linear_update(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("partials", [2, 4])
def test_partial_sums_are_of_equal_parts_and_not_rounded(partials):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24).bfloat16(), torch.randn(16, 24).bfloat16()
    found = torch.ops.openjev_fast.linear_update(x, weight, partials)
    assert found.shape == (partials, 5, 16) and found.dtype == torch.float32
    torch.testing.assert_close(found, linear_update_ref(x, weight, partials))
    width = 24 // partials
    torch.testing.assert_close(found[-1], x[:, -width:].float() @ weight[:, -width:].float().t())
    torch.testing.assert_close(found.sum(0), x.float() @ weight.float().t())
    # The norm adds them up where the product would have been rounded first.
    residual, norm = torch.randn(5, 16).bfloat16(), torch.randn(16).bfloat16()
    torch.testing.assert_close(
        add_rms_norm(residual, found, norm, 1e-6)[0],
        (residual.float() + x.float() @ weight.float().t()).bfloat16(),
    )


def test_columns_that_do_not_divide_are_refused():
    x, weight = torch.randn(2, 6), torch.randn(8, 6)
    with pytest.raises(ValueError, match="6 columns cannot be summed in 4 equal parts"):
        torch.ops.openjev_fast.linear_update(x, weight, 4)


def test_shapes_are_known_without_computing():
    x, weight = torch.empty(5, 24, device="meta"), torch.empty(12, 24, device="meta")
    assert linear(x, weight).shape == (5, 12)
    assert linear_silu_mul(x, weight).shape == (5, 6)
    assert linear_update(x, weight).shape == (5, 12)
    found = torch.ops.openjev_fast.linear_update(x.bfloat16(), weight.bfloat16(), 2)
    assert found.shape == (2, 5, 12) and found.dtype == torch.float32


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
        assert (tile, parts) in TILES, name
        # One wave, of more than a third of the multiprocessors: memory is shared by all of them.
        assert MULTIPROCESSORS / 3 < -(-features // tile) * parts <= MULTIPROCESSORS, name
    tile, parts = kernel_tile(rows, 2 * shapes.mlp, shapes.hidden, MULTIPROCESSORS, silu=True)
    assert (tile, parts) in SILU_TILES and shapes.mlp / tile <= MULTIPROCESSORS


@pytest.mark.parametrize(
    "rows, features, columns, silu",
    [(0, 64, 64, False), (129, 64, 64, False), (8, 60, 64, False), (8, 72, 64, True), (8, 64, 96, False)],
)
def test_what_the_kernel_cannot_take(rows, features, columns, silu):
    assert kernel_tile(rows, features, columns, MULTIPROCESSORS, silu) is None


def test_parts_need_columns_of_their_own():
    assert kernel_tile(8, 4096, 128, MULTIPROCESSORS)[1] == 2
    assert kernel_tile(8, 4096, 192, MULTIPROCESSORS)[1] == 1


def test_tiles_that_can_compute_a_product_hold_the_fastest():
    every = kernel_tiles(72, 5120, 6144)
    assert kernel_tile(72, 5120, 6144, MULTIPROCESSORS) in every and set(every) == set(TILES)
    # One step of columns cannot be divided.
    assert set(kernel_tiles(72, 5120, 64)) == {tile for tile in TILES if tile[1] == 1}
    assert set(kernel_tiles(72, 5120, 64, silu=True)) == set(SILU_TILES)


def test_bands_are_whole_waves_of_tiles_and_no_small_part_of_the_weight():
    # 66 tiles of 256 rows by half of x, 132 multiprocessors: two such bands and 1,024 rows.
    assert 66 * 256 in bands(34816, MULTIPROCESSORS)
    for features in (5120, 16480, 34816):
        found = bands(features, MULTIPROCESSORS)
        assert found == sorted(set(found)) and all(features / 4 <= band < features for band in found)
    # Fewer than one tile a multiprocessor.
    assert bands(512, MULTIPROCESSORS) == []


def test_the_default_way():
    few = Product("linear", 72, 5120, 6144)
    assert default_choice(few, (8, 0), MULTIPROCESSORS) == PYTORCH
    found = default_choice(few, (9, 0), MULTIPROCESSORS)
    assert found.way == "kernel" and not found.fused
    assert (found.tile, found.parts) == kernel_tile(72, 5120, 6144, MULTIPROCESSORS)
    gated = default_choice(Product("linear_silu_mul", 72, 34816, 5120), (9, 0), MULTIPROCESSORS)
    assert gated.way == "kernel" and gated.fused and (gated.tile, gated.parts) in SILU_TILES
    assert default_choice(few._replace(rows=136), (9, 0), MULTIPROCESSORS) == PYTORCH


def test_choices_note_what_is_wanted_and_count_changes_by_rows():
    known, other = Product("linear", 8, 64, 64), Product("linear", 16, 64, 64)
    kernel = Choice("kernel", tile=64)
    choices = Choices({known: kernel})
    assert choices.find(known) == kernel and not choices.wanted
    for product in (other, other._replace(features=32), other):
        assert choices.find(product) is None
    assert list(choices.wanted) == [other, other._replace(features=32)]
    before = choices.state((8, 16))
    # The default, found best, changes nothing that a forward computes.
    choices.choose(other, PYTORCH, default=PYTORCH)
    assert choices.state((8, 16)) == before and other not in choices.wanted and choices.find(other) == PYTORCH
    choices.choose(other, kernel, default=PYTORCH)
    assert choices.state((8, 16)) != before and choices.state((8,)) == before[:1]


def test_what_is_wanted_does_not_grow_without_end():
    choices = Choices()
    for rows in range(1, 6000):
        choices.find(Product("linear", 8 * rows, 64, 64))
    assert len(choices.wanted) == 4096
