import pytest
import torch
from comparison import assert_close
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from openjev_fast_plugin.ops import add_rms_norm, add_rms_norm_ref

# Far larger than the models', so that it shows.
EPS = 1e-2
SIZES = [(1, 64), (5, 97), (280, 1024), (0, 64)]


def inputs(rows: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + hidden)
    residual, update = torch.randn(2, rows, hidden).to(dtype)
    return residual, update, torch.randn(hidden).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_is_the_upstream_norm_after_the_residual_add(dtype):
    residual, update, weight = inputs(7, 96, dtype)
    norm = Qwen3_5RMSNorm(96, eps=EPS).to(dtype)
    norm.weight.data.copy_(weight)
    hidden, normed = add_rms_norm_ref(residual, update, weight, EPS)
    assert torch.equal(hidden, residual + update)
    assert torch.equal(normed, norm(residual + update).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, hidden", SIZES)
@pytest.mark.parametrize("partials", [None, 0, 1, 2, 4], ids=lambda p: f"partials_{p}")
def test_op_matches_reference(rows, hidden, dtype, partials):
    residual, update, weight = inputs(rows, hidden, dtype)
    given = {None: None, 0: update}.get(partials, torch.randn(partials or 1, rows, hidden))
    hidden_out, normed = add_rms_norm(residual, given, weight, EPS)
    hidden_ref, normed_ref = add_rms_norm_ref(residual, given, weight, EPS)
    assert torch.equal(hidden_out, hidden_ref)
    assert hidden_out.dtype == normed.dtype == dtype
    # One rounding: bfloat16 may differ by one unit in the last place where float32 sums in another order.
    assert_close(normed, normed_ref, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_rows_may_be_strided_and_inputs_stay_as_they_are():
    wide = torch.randn(6, 200)
    residual, weight = wide[:, 40:136], torch.randn(96)
    before = wide.clone()
    hidden, normed = add_rms_norm(residual, residual, weight, EPS)
    hidden_ref, normed_ref = add_rms_norm_ref(residual.contiguous(), residual.contiguous(), weight, EPS)
    assert torch.equal(hidden, hidden_ref)
    assert_close(normed, normed_ref, rtol=1e-6, atol=1e-6)
    assert torch.equal(wide, before)
