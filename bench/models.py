"""Random-weight text models of the released shapes, built on the device, for benchmarks that need no checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import Qwen3_5TextConfig, Qwen3_5VisionConfig
from transformers.initialization import no_init_weights
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from openjev_fast_plugin.checkpoint import PROFILES, text_settings

# Tokens of a prompt that it shares with no other, where a case says no more.
_TAIL = 21


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


def best_delta_rule() -> str:
    """What Transformers takes by itself: `fla` where it is installed, else `torch`."""
    return "torch" if upstream.chunk_gated_delta_rule is None else "fla"


def use_delta_rule(model: upstream.Qwen3_5TextModel, mode: str) -> None:
    """Switch a model's linear attention to FLA's kernels (`fla`) or to PyTorch, as without FLA (`torch`)."""
    if mode == "fla" and upstream.chunk_gated_delta_rule is None:
        raise RuntimeError("mode fla needs flash-linear-attention")
    for layer in model.layers:
        if layer.layer_type != "linear_attention":
            continue
        delta = layer.linear_attn
        if mode == "fla":
            delta.chunk_gated_delta_rule = upstream.chunk_gated_delta_rule
            norm = upstream.FusedRMSNormGated(
                delta.head_v_dim, eps=delta.layer_norm_epsilon, activation=delta.activation
            )
        else:
            delta.chunk_gated_delta_rule = upstream.torch_chunk_gated_delta_rule
            norm = upstream.Qwen3_5RMSNormGated(delta.head_v_dim, eps=delta.layer_norm_epsilon)
        norm.weight = delta.norm.weight
        delta.norm = norm


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


def prompts(case: str, vocabulary: int, seed: int = 0) -> list[np.ndarray]:
    """Token sequences of a case: random ids with the lengths and the sharing of the request it is named after.

    case: `example`; `noul_N`, one prompt of N tokens; `choice_CxN`, C prompts of N tokens that differ in the last
        21; `root_N`, one of N; `root_N_tails_C`, C prompts of 21 tokens after N that they share. ValueError otherwise.
    """
    draw = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return draw.integers(0, vocabulary, count).astype(np.int32)

    if case == "example":
        # 7 prompts, 539 tokens, the longest 82, 277 distinct rows: a routing of 3, a yes or no, an urgency of 3.
        root, routing, refund, urgency = tokens(30), tokens(21), tokens(16), tokens(20)
        found = [np.concatenate([root, routing, tokens(length)]) for length in (31, 29, 27)]
        found.append(np.concatenate([root, refund, tokens(23)]))
        return found + [np.concatenate([root, urgency, tokens(length)]) for length in (28, 27, 25)]
    named = re.fullmatch(r"(?:noul|root)_(\d+)|choice_(\d+)x(\d+)|root_(\d+)_tails_(\d+)", case)
    if named is None:
        raise ValueError(f"no case is named {case!r}")
    single, choices, length, shared, tails = (int(number or 0) for number in named.groups())
    if single:
        return [tokens(single)]
    root = tokens(shared or length - _TAIL)
    return [np.concatenate([root, tokens(_TAIL)]) for _ in range(tails or choices)]
