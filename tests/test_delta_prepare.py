import pytest
import torch
import torch.nn.functional as F
from comparison import assert_close
from transformers.models.qwen3_5.modeling_qwen3_5 import l2norm

from openjev_fast_plugin.ops import delta_prepare, delta_prepare_ref

NAMES = ("q", "k", "v", "g", "beta")


def path_predecessors(rows: int) -> torch.Tensor:
    """One sequence: the rows before, -1 before its start."""
    steps = torch.arange(rows)[:, None] - torch.arange(1, 4)
    return steps.clamp(min=-1).int()


def inputs(
    rows: int, key_heads: int, key_dim: int, value_heads: int, value_dim: int, dtype: torch.dtype
) -> dict:
    torch.manual_seed(rows + value_heads)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    # A slice of a fused projection: rows are strided.
    fused = torch.randn(rows, channels + 2 * value_heads + 7).to(dtype)
    return {
        "qkv": fused[:, :channels],
        "b": fused[:, channels + 3 : channels + 3 + value_heads],
        "a": 3 * fused[:, channels + 3 + value_heads : channels + 3 + 2 * value_heads],
        "predecessor": path_predecessors(rows),
        "conv_weight": torch.randn(channels, 4).to(dtype),
        "a_log": torch.randn(value_heads).to(dtype),
        "dt_bias": torch.randn(value_heads).to(dtype),
        "key_heads": key_heads,
        "key_dim": key_dim,
    }


def test_reference_is_the_upstream_sequence_in_float32():
    given = inputs(11, 2, 16, 6, 8, torch.float32)
    q, k, v, g, beta = delta_prepare_ref(**given)
    x = given["qkv"].t()[None]
    conv = F.conv1d(x, given["conv_weight"][:, None], padding=3, groups=x.shape[1])[:, :, :11]
    mixed = F.silu(conv)[0].t()
    assert_close(q, l2norm(mixed[:, :32].reshape(11, 2, 16)), rtol=1e-5, atol=1e-6)
    assert_close(k, l2norm(mixed[:, 32:64].reshape(11, 2, 16)), rtol=1e-5, atol=1e-6)
    assert_close(v, mixed[:, 64:].reshape(11, 6, 8), rtol=1e-5, atol=1e-6)
    assert torch.equal(g, -given["a_log"].exp() * F.softplus(given["a"] + given["dt_bias"]))
    assert_close(beta, given["b"].sigmoid(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 65])
def test_op_matches_reference(rows, dtype):
    given = inputs(rows, 2, 16, 6, 24, dtype)
    # v rounds once; q and k round before and after their norm: at most two units in the last place.
    rtol = 2**-6 if dtype == torch.bfloat16 else 1e-5
    for name, found, expected in zip(NAMES, delta_prepare(**given), delta_prepare_ref(**given), strict=True):
        assert found.dtype == expected.dtype
        assert_close(found, expected, rtol=rtol, atol=1e-6, what=name)


@pytest.mark.parametrize("prepare", [delta_prepare, delta_prepare_ref])
def test_short_heads_stay_short(prepare):
    given = inputs(9, 2, 16, 4, 8, torch.float32)
    given["qkv"] = given["qkv"] * 1e-4
    q, k, v, _, _ = prepare(**given)
    conv = F.conv1d(given["qkv"].t()[None], given["conv_weight"][:, None], padding=3, groups=96)[:, :, :9]
    mixed = F.silu(conv)[0].t()
    expected = l2norm(mixed[:, :64].reshape(9, 4, 16))
    assert expected.norm(dim=-1).max() < 0.95
    assert_close(torch.cat([q, k], dim=1), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("prepare", [delta_prepare, delta_prepare_ref])
def test_beta_is_rounded_to_the_model_dtype(prepare):
    given = inputs(65, 2, 16, 6, 24, torch.bfloat16)
    beta = prepare(**given)[4]
    assert beta.dtype == torch.float32 and torch.equal(beta, beta.bfloat16().float())
    # A sigmoid next to the middle of two values may round either way.
    assert_close(beta, given["b"].float().sigmoid(), rtol=2**-8, atol=0)


def test_rows_take_their_predecessors_from_the_tree():
    # Rows 0-4 are a node; rows 5-6 and 7-8 are its children.
    tree = inputs(9, 2, 16, 4, 8, torch.float32)
    tree["predecessor"] = torch.tensor(
        [
            [-1, -1, -1],
            [0, -1, -1],
            [1, 0, -1],
            [2, 1, 0],
            [3, 2, 1],
            [4, 3, 2],
            [5, 4, 3],
            [4, 3, 2],
            [7, 4, 3],
        ],
        dtype=torch.int32,
    )
    found = delta_prepare(**tree)
    for path in ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 7, 8]):
        alone = {**tree, "qkv": tree["qkv"][path], "b": tree["b"][path], "a": tree["a"][path]}
        alone["predecessor"] = path_predecessors(len(path))
        for name, packed, single in zip(NAMES, found, delta_prepare(**alone), strict=True):
            # Vector and scalar exponentials of the CPU differ in the last place.
            assert_close(packed[path], single, rtol=1e-6, atol=1e-7, what=name)
