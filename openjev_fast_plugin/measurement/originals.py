"""The original forward with one delta rule or the other: FLA's kernels, or PyTorch as without FLA."""

from __future__ import annotations

import inspect
from typing import Any

from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

# Modes that run the original's own modules.
ORIGINALS = ("torch", "fla")

# Up to Transformers 5.12 each module holds its delta rule; later versions wrap PyTorch's around what they found.
_HELD = hasattr(upstream, "chunk_gated_delta_rule")
_FOUND = upstream.torch_chunk_gated_delta_rule
_PYTORCH = inspect.unwrap(_FOUND)


def best_delta_rule() -> str:
    """What Transformers takes by itself: `fla` where it is installed, else `torch`."""
    if _HELD:
        return "torch" if upstream.chunk_gated_delta_rule is None else "fla"
    implementation = inspect.getclosurevars(_FOUND).nonlocals.get("implementation", _PYTORCH)
    return "torch" if implementation.__module__.startswith("transformers.") else "fla"


def use_delta_rule(model: Any, mode: str) -> None:
    """Switch a text model's linear attention to FLA's kernels (`fla`) or to PyTorch, as without FLA (`torch`).

    With Transformers after 5.12 every model of the process is switched. RuntimeError for `fla` without it.
    """
    if mode == "fla" and best_delta_rule() != "fla":
        raise RuntimeError("mode fla needs flash-linear-attention")
    if not _HELD:
        upstream.torch_chunk_gated_delta_rule = _FOUND if mode == "fla" else _PYTORCH
        return
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
            delta.chunk_gated_delta_rule = _PYTORCH
            norm = upstream.Qwen3_5RMSNormGated(delta.head_v_dim, eps=delta.layer_norm_epsilon)
        norm.weight = delta.norm.weight
        delta.norm = norm
