"""The gated activation of the MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from openjev_fast_plugin.ops._library import define


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """The readable twin of :func:`silu_mul`: same argument, same rounding points."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = (gate * torch.sigmoid(gate)).to(gate_up.dtype)
    return (activated.float() * up).to(gate_up.dtype)


def _portable(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _fake(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


_op = define("silu_mul(Tensor gate_up) -> Tensor", portable=_portable, fake=_fake)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``round(silu(gate)) * up`` for ``gate_up = [gate | up]``.

    gate_up: [N, 2 I], model dtype (bfloat16 or float32).

    Returns [N, I] of the same dtype. SiLU is evaluated in float32 and rounded, the product is rounded again: the
    two roundings of ``Qwen3_5MLP`` in Transformers 5.10.2.
    """
    return _op(gate_up)
