import pytest
import torch
from comparison import assert_close
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from openjev_fast_plugin.ops import gated_rms_norm, gated_rms_norm_ref

# Far larger than the models', so that it shows.
EPS = 1e-2


def test_reference_is_the_upstream_norm_in_float32():
    # In bfloat16 the upstream module rounds before its weight and FLA's does not; the reference follows FLA.
    torch.manual_seed(0)
    x, z = torch.randn(2, 9, 4, 32)
    norm = Qwen3_5RMSNormGated(32, eps=EPS)
    norm.weight.data.normal_()
    expected = norm(x.reshape(-1, 32), z.reshape(-1, 32)).reshape(9, -1).detach()
    assert_close(gated_rms_norm_ref(x, z, norm.weight.detach(), EPS), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, heads, dim", [(1, 1, 16), (0, 2, 16), (5, 3, 24), (280, 16, 64)])
def test_op_matches_reference_with_strided_gate(rows, heads, dim, dtype):
    torch.manual_seed(rows)
    x = torch.randn(rows, heads, dim).to(dtype)
    z = torch.randn(rows, heads * dim + 13).to(dtype)[:, 5 : 5 + heads * dim].unflatten(1, (heads, dim))
    weight = torch.randn(dim).to(dtype)
    found = gated_rms_norm(x, z, weight, EPS)
    assert found.shape == (rows, heads * dim) and found.dtype == dtype
    # One rounding: at most one unit in the last place.
    assert_close(
        found,
        gated_rms_norm_ref(x, z, weight, EPS),
        rtol=2**-7 if dtype == torch.bfloat16 else 2e-6,
        atol=1e-6,
    )
