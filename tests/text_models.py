"""A text model of the smallest shapes that have every kind of layer."""

from __future__ import annotations

import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel


def smallest_text_model() -> Qwen3_5TextModel:
    """Two layers of each type, float32, the same weights at every call."""
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return Qwen3_5TextModel(config).float().eval()
