"""Query and key norms and partial rotary embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from openjev_fast_plugin.ops._library import define


def _rotated(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Norm over the head dim with 1 + weight, then rotate-half on the leading 2 R dims. x: [N, H, D]."""
    normed = F.rms_norm(x.float(), x.shape[-1:], 1.0 + weight.float(), eps).to(x.dtype)
    half = cos.shape[1]
    first, second = normed[..., :half], normed[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    # In bfloat16 each product and each sum rounds, as the original's elementwise kernels do.
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*rotated, normed[..., 2 * half :]], dim=-1)


def attention_prepare_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_cos: torch.Tensor,
    q_sin: torch.Tensor,
    k_cos: torch.Tensor,
    k_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The readable twin of :func:`attention_prepare`: same arguments, same rounding points."""

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(q.dtype).float()

    def prepare(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x, cos, sin = x.float(), cos.float()[:, None], sin.float()[:, None]
        half = cos.shape[-1]
        normed = rounded(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float()))
        first, second, rest = normed[..., :half], normed[..., half : 2 * half], normed[..., 2 * half :]
        low = rounded(rounded(first * cos) - rounded(second * sin))
        high = rounded(rounded(second * cos) + rounded(first * sin))
        return torch.cat([low, high, rest], dim=-1).to(q.dtype)

    return prepare(q, q_weight, q_cos, q_sin), prepare(k, k_weight, k_cos, k_sin)


def _portable(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_cos: torch.Tensor,
    q_sin: torch.Tensor,
    k_cos: torch.Tensor,
    k_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotated(q, q_weight, q_cos, q_sin, eps), _rotated(k, k_weight, k_cos, k_sin, eps)


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_cos: torch.Tensor,
    q_sin: torch.Tensor,
    k_cos: torch.Tensor,
    k_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


_op = define(
    "attention_prepare(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor q_cos, Tensor q_sin, "
    "Tensor k_cos, Tensor k_sin, float eps) -> (Tensor q_out, Tensor k_out)",
    portable=_portable,
    fake=_fake,
)


def attention_prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_cos: torch.Tensor,
    q_sin: torch.Tensor,
    k_cos: torch.Tensor,
    k_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rope(rms_norm(x) * (1 + weight))`` for queries and keys.

    q: [M, HQ, D], model dtype (bfloat16 or float32); rows and heads may be strided (a slice of the projection).
    k: [N, HKV, D], model dtype; rows and heads may be strided.
    q_weight, k_weight: [D], model dtype; the norms multiply by 1 + weight.
    q_cos, q_sin: [M, R], k_cos, k_sin: [N, R], model dtype: cosine and sine of position * theta^(-2 i / 2R);
        dim i is rotated with dim i + R for i < R, dims from 2 R on pass unchanged.
    eps: added to the mean of squares.

    Returns (q [M, HQ, D], k [N, HKV, D]), contiguous. Rounds after the norm, after each product and after the sum
    (three roundings on the rotated dims). The maths is ``Qwen3_5Attention.forward`` of Transformers 5.10.2 with
    ``apply_rotary_pos_emb``.
    """
    return _op(q, k, q_weight, k_weight, q_cos, q_sin, k_cos, k_sin, eps)
