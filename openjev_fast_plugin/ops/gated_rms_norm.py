"""RMS norm of the delta rule's output, gated by SiLU of z."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from openjev_fast_plugin.ops._library import define


def gated_rms_norm_ref(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The readable twin of :func:`gated_rms_norm`: same arguments, same rounding point."""
    o, gate = x.float(), z.float()
    normed = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * gate * torch.sigmoid(gate)).to(x.dtype).flatten(1)


def _portable(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return normed.mul_(F.silu(z.float())).to(x.dtype).flatten(1)


def _fake(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * x.shape[2])


_op = define(
    "gated_rms_norm(Tensor x, Tensor z, Tensor weight, float eps) -> Tensor", portable=_portable, fake=_fake
)


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight * silu(z)`` per head.

    x: [N, HV, V], model dtype (bfloat16 or float32): the delta rule's output.
    z: [N, HV, V], model dtype; rows may be strided (a slice of the fused projection).
    weight: [V], model dtype; used as it is, not as 1 + weight.
    eps: added to the mean of squares.

    Returns [N, HV * V] of the model dtype, rounded once; everything inside is float32, as in FLA's
    ``FusedRMSNormGated`` (fla-core 0.5.2). Transformers' ``Qwen3_5RMSNormGated`` also rounds before its weight.
    """
    return _op(x, z, weight, eps)
