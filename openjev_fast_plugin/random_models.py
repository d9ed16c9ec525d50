"""Random-weight models of the released shapes, drawn on the device, for measurements that need no checkpoint."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, Qwen3_5TextConfig, Qwen3_5VisionConfig
from transformers.initialization import no_init_weights
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from openjev_fast_plugin.checkpoint import PROFILES, text_settings, train_tokenizer

# Tokens of the released models.
VOCABULARY = 248_320


def text_config(profile: str, layers: int | None = None, vocabulary: int = VOCABULARY) -> Qwen3_5TextConfig:
    """The configuration of a profile, with fewer layers or a smaller vocabulary where memory asks for it."""
    shapes = PROFILES[profile]
    shapes = replace(shapes, vocab=vocabulary, layers=layers or shapes.layers)
    config = Qwen3_5TextConfig(**text_settings(shapes))
    config._attn_implementation = "sdpa"
    return config


def text_model(
    config: Qwen3_5TextConfig, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16
) -> upstream.Qwen3_5TextModel:
    """A model whose parameters are drawn on the device, spread so that rounding anywhere reaches the output."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights(), torch.device(device):
            model = upstream.Qwen3_5TextModel(config)
    finally:
        torch.set_default_dtype(default)
    # Buffers are computed in __init__; a freshly made rotary table must be float32 whatever the default was.
    model.rotary_emb.inv_freq, _ = model.rotary_emb.compute_default_rope_parameters(config, device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(np.log(0.05), np.log(8.0), generator=generator)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-5.0, 1.0, generator=generator)
            elif parameter.dim() == 1:
                parameter.normal_(1.0 if ".linear_attn.norm" in name else 0.0, 0.2, generator=generator)
            else:
                scale = 0.5 if "conv1d" in name or "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, scale, generator=generator)
    return model.eval().requires_grad_(False)


def head(hidden: int, device: torch.device, seed: int) -> torch.nn.Linear:
    """A float32 scalar head."""
    generator = torch.Generator(device).manual_seed(seed)
    layer = torch.nn.Linear(hidden, 1, device=device)
    with torch.no_grad():
        layer.weight.normal_(0.0, hidden**-0.5, generator=generator)
        layer.bias.zero_()
    return layer.requires_grad_(False)


def image_text_model(
    profile: str, device: torch.device, seed: int, layers: int | None = None, vocabulary: int = VOCABULARY
) -> Any:
    """What Open-Jev loads before it takes the text model and two rows of the vocabulary head: all of it on the device.

    The vision tower is Transformers' default one, as wide as the text model at its end.
    """
    config = text_config(profile, layers, vocabulary)
    language_model = text_model(config, device, seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with no_init_weights(), torch.device(device):
            visual = upstream.Qwen3_5VisionModel(Qwen3_5VisionConfig(out_hidden_size=config.hidden_size))
            lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    finally:
        torch.set_default_dtype(default)
    generator = torch.Generator(device).manual_seed(seed + 1)
    torch.nn.init.normal_(lm_head.weight, 0.0, config.hidden_size**-0.5, generator=generator)
    return SimpleNamespace(
        model=SimpleNamespace(language_model=language_model, visual=visual), lm_head=lm_head
    )


def decision_model(
    profile: str, device: torch.device, seed: int = 0, layers: int | None = None, vocabulary: int = VOCABULARY
) -> Any:
    """The host's own `DecisionModel` of random weights, without an adapter, drawn on the device."""
    from jev.model import DecisionModel

    def from_pretrained(*args: Any, **options: Any) -> Any:
        return image_text_model(profile, device, seed, layers, vocabulary)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(AutoModelForImageTextToText, "from_pretrained", from_pretrained),
    ):
        train_tokenizer(PROFILES[profile].vocab).save_pretrained(folder)
        model = DecisionModel(folder, f"random-{profile}", device=str(device), max_length=32_768)
    return model.eval()
