import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from openjev_fast_plugin.ops import head_score, head_score_ref

# Far larger than the models', so that it shows.
EPS = 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_is_final_norm_and_head(dtype):
    torch.manual_seed(0)
    residual, update = torch.randn(2, 6, 48).to(dtype)
    norm = Qwen3_5RMSNorm(48, eps=EPS).to(dtype)
    norm.weight.data.normal_()
    head = torch.nn.Linear(48, 1)
    rows = torch.tensor([5, 0, 0, 3], dtype=torch.int32)
    with torch.no_grad():
        expected = head(norm(residual + update)[rows.long()].float()).squeeze(-1)
        found = head_score_ref(residual, update, rows, norm.weight, head.weight[0], head.bias[0], EPS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "rows, candidates, partials", [(1, 1, 0), (4, 255, 0), (33, 33, 2), (5, 0, 0), (3, 2, 4)]
)
def test_op_matches_reference(rows, candidates, partials, dtype):
    torch.manual_seed(rows)
    residual = torch.randn(rows, 97).to(dtype)
    update = torch.randn(partials, rows, 97) if partials else torch.randn(rows, 97).to(dtype)
    which = torch.randint(0, rows, (candidates,), dtype=torch.int32)
    weights = (torch.randn(97).to(dtype), torch.randn(97), torch.randn(()))
    found = head_score(residual, update, which, *weights, EPS)
    expected = head_score_ref(residual, update, which, *weights, EPS)
    assert found.shape == (candidates,) and found.dtype == torch.float32
    # A norm element that rounds the other way moves the sum by at most a unit of it times its weight.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)
