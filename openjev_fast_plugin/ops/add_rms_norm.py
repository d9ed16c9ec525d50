"""Residual add followed by RMS norm with the weight stored around zero, as Qwen3.5 does it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from openjev_fast_plugin.ops._library import define


def add_rms_norm_ref(
    residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The readable twin of :func:`add_rms_norm`: same arguments, same rounding points."""
    hidden = residual
    if update is not None:
        added = update.float().sum(0) if update.dim() == 3 else update.float()
        hidden = (residual.float() + added).to(residual.dtype)
    x = hidden.float()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return hidden, (x * scale * (1.0 + weight.float())).to(residual.dtype)


def _portable(
    residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if update is None:
        hidden = residual.clone()
    elif update.dim() == 3:
        hidden = (residual.float() + update.sum(0)).to(residual.dtype)
    else:
        hidden = residual + update
    x = hidden.float()
    return hidden, F.rms_norm(x, x.shape[-1:], 1.0 + weight.float(), eps).to(residual.dtype)


def _fake(
    residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)


_op = define(
    "add_rms_norm(Tensor residual, Tensor? update, Tensor weight, float eps) -> (Tensor hidden, Tensor normed)",
    portable=_portable,
    fake=_fake,
)


def add_rms_norm(
    residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``hidden = residual + update``; ``normed = hidden * rsqrt(mean(hidden^2) + eps) * (1 + weight)``.

    residual: [N, H], model dtype (bfloat16 or float32).
    update: [N, H] of the model dtype, or [S, N, H] float32 split-K partial sums, or None (hidden = residual).
    weight: [H], model dtype; the norm multiplies by 1 + weight.
    eps: added to the mean of squares.

    Returns (hidden [N, H], normed [N, H]), both new tensors of the model dtype. Rounds the sum once, then the norm
    once; all arithmetic between is float32. The maths is ``Qwen3_5RMSNorm`` of Transformers 5.10.2 after the
    decoder layer's residual add.
    """
    return _op(residual, update, weight, eps)
