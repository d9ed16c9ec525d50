import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5MLP

from openjev_fast_plugin.ops import silu_mul, silu_mul_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, width", [(1, 8), (0, 8), (3, 37), (280, 3072)])
def test_op_matches_reference(rows, width, dtype):
    torch.manual_seed(width)
    gate_up = (4 * torch.randn(rows, 2 * width)).to(dtype)
    found, expected = silu_mul(gate_up), silu_mul_ref(gate_up)
    assert found.shape == (rows, width) and found.dtype == dtype
    # Two roundings: a flip of the first moves the product by one unit, and its own rounding by another.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-9)
    assert (found == expected).float().mean() >= 0.98 or found.numel() == 0 or dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_is_what_the_upstream_mlp_feeds_its_down_projection(dtype):
    torch.manual_seed(0)
    mlp = Qwen3_5MLP(Qwen3_5TextConfig(hidden_size=32, num_hidden_layers=1), 48).to(dtype)
    x = torch.randn(5, 32).to(dtype)
    seen = []
    mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        mlp(x)
        gate_up = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=1)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(silu_mul_ref(gate_up), seen[0], rtol=tolerance, atol=1e-9)
