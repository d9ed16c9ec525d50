"""The output gate of full attention."""

from __future__ import annotations

import torch

from openjev_fast_plugin.ops._library import define


def gate_mul_ref(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The readable twin of :func:`gate_mul`: same arguments, same rounding points."""
    factor = torch.sigmoid(gate.float()).to(x.dtype).float()
    return (x.float() * factor).to(x.dtype).flatten(1)


def _portable(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (x * torch.sigmoid(gate)).flatten(1)


def _fake(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * x.shape[2])


_op = define("gate_mul(Tensor x, Tensor gate) -> Tensor", portable=_portable, fake=_fake)


def gate_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x * round(sigmoid(gate))``, heads laid side by side.

    x: [M, HQ, D], model dtype (bfloat16 or float32): the attention output; rows and heads may be strided.
    gate: [M, HQ, D], model dtype; rows and heads may be strided (a slice of the fused projection).

    Returns [M, HQ * D] of the model dtype. The sigmoid is rounded, the product is rounded: the points of
    ``Qwen3_5Attention.forward`` of Transformers 5.10.2.
    """
    return _op(x, gate)
