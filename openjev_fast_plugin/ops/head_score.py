"""The last residual add, the final norm and the scalar head, for the rows the head reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from openjev_fast_plugin.ops._library import define


def head_score_ref(
    residual: torch.Tensor,
    update: torch.Tensor,
    rows: torch.Tensor,
    norm_weight: torch.Tensor,
    head_weight: torch.Tensor,
    head_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The readable twin of :func:`head_score`: same arguments, same rounding points."""
    added = update.float().sum(0) if update.dim() == 3 else update.float()
    x = (residual.float() + added).to(residual.dtype).float()[rows.long()]
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + norm_weight.float())
    return (normed.to(residual.dtype).float() * head_weight).sum(-1) + head_bias


def _portable(
    residual: torch.Tensor,
    update: torch.Tensor,
    rows: torch.Tensor,
    norm_weight: torch.Tensor,
    head_weight: torch.Tensor,
    head_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    added = update.sum(0) if update.dim() == 3 else update
    x = (residual + added).to(residual.dtype).index_select(0, rows).float()
    normed = F.rms_norm(x, x.shape[-1:], 1.0 + norm_weight.float(), eps).to(residual.dtype)
    return normed.float() @ head_weight + head_bias


def _fake(
    residual: torch.Tensor,
    update: torch.Tensor,
    rows: torch.Tensor,
    norm_weight: torch.Tensor,
    head_weight: torch.Tensor,
    head_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    return residual.new_empty(rows.shape[0], dtype=torch.float32)


_op = define(
    "head_score(Tensor residual, Tensor update, Tensor rows, Tensor norm_weight, Tensor head_weight, "
    "Tensor head_bias, float eps) -> Tensor",
    portable=_portable,
    fake=_fake,
)


def head_score(
    residual: torch.Tensor,
    update: torch.Tensor,
    rows: torch.Tensor,
    norm_weight: torch.Tensor,
    head_weight: torch.Tensor,
    head_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """``head(rms_norm(residual + update)[rows])``.

    residual: [M, H], model dtype (bfloat16 or float32).
    update: [M, H] of the model dtype, or [S, M, H] float32 split-K partial sums.
    rows: [C] int32, the row of each candidate; rows may repeat.
    norm_weight: [H], model dtype; the norm multiplies by 1 + weight.
    head_weight: [H] float32; head_bias: [] float32.
    eps: added to the mean of squares.

    Returns [C] float32. Rounds the sum and the norm to the model dtype; the dot product is float32. The maths is
    the final norm of ``Qwen3_5TextModel`` (Transformers 5.10.2) and Open-Jev's scalar head.
    """
    return _op(residual, update, rows, norm_weight, head_weight, head_bias, eps)
