import pytest
import torch
from comparison import bfloat16_ulp
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, apply_rotary_pos_emb

from openjev_fast_plugin.layout import rotary_tables
from openjev_fast_plugin.ops import attention_prepare, attention_prepare_ref

# Far larger than the models', so that it shows.
EPS = 1e-2


def inputs(queries: int, rows: int, dtype: torch.dtype) -> list:
    """4 query and 2 key heads of 32, the first 16 dims rotated; q and k are strided slices."""
    torch.manual_seed(rows)
    q = torch.randn(queries, 4, 64).to(dtype)[..., :32]
    k = torch.randn(rows, 100).to(dtype)[:, 9:73].unflatten(1, (2, 32))
    weights = [torch.randn(32).to(dtype) for _ in range(2)]
    position = torch.randint(0, 3000, (rows,))
    k_tables = rotary_tables(position, 8, 1e7, dtype)
    q_tables = tuple(table[:queries] for table in k_tables)
    return [q, k, *weights, *q_tables, *k_tables]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_is_the_upstream_norm_and_rotation(dtype):
    q, k, q_weight, k_weight, _, _, cos, sin = inputs(13, 13, dtype)
    q_norm, k_norm = (Qwen3_5RMSNorm(32, eps=EPS).to(dtype) for _ in range(2))
    q_norm.weight.data.copy_(q_weight)
    k_norm.weight.data.copy_(k_weight)
    full_cos, full_sin = (torch.cat([table, table], dim=-1)[None] for table in (cos, sin))
    with torch.no_grad():
        expected_q, expected_k = apply_rotary_pos_emb(
            q_norm(q).transpose(0, 1)[None], k_norm(k).transpose(0, 1)[None], full_cos, full_sin
        )
    found_q, found_k = attention_prepare_ref(q, k, q_weight, k_weight, cos, sin, cos, sin, EPS)
    assert torch.equal(found_q, expected_q[0].transpose(0, 1))
    assert torch.equal(found_k, expected_k[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries, rows", [(0, 1), (1, 1), (3, 17), (130, 130)])
def test_op_matches_reference(queries, rows, dtype):
    given = inputs(queries, rows, dtype)
    for found, expected, source in zip(
        attention_prepare(*given, EPS), attention_prepare_ref(*given, EPS), given[:2], strict=True
    ):
        assert found.is_contiguous() and found.shape == source.shape and found.dtype == dtype
        difference = (found.float() - expected.float()).abs()
        if dtype == torch.float32:
            assert torch.all(difference <= 2e-6 * expected.abs().clamp(min=1))
        elif found.numel():
            # Roundings chain: a flip of the norm moves both products; two units of the largest operand bound it.
            largest = expected.float().abs().amax(-1, keepdim=True)
            assert torch.all(difference <= 2 * bfloat16_ulp(largest))


def test_rotary_tables_are_the_upstream_ones():
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    rope = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    embedding = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(head_dim=256, rope_parameters=rope))
    position = torch.tensor([[0, 1, 7, 500, 2679, 16383]])
    for dtype in (torch.float32, torch.bfloat16):
        expected = embedding(torch.zeros(1, dtype=dtype), position)
        for found, full in zip(rotary_tables(position[0], 32, 1e7, dtype), expected, strict=True):
            assert torch.equal(found, full[0, :, :32])
            assert torch.equal(found, full[0, :, 32:])
