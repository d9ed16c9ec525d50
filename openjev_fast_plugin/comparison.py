"""How far two tensors are apart, in the units the ops' tolerances are given in."""

from __future__ import annotations

import torch


def relative_l2(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in float64."""
    difference = (found.double() - expected.double()).norm()
    return (difference / expected.double().norm()).item()


def bfloat16_ulp(x: torch.Tensor) -> torch.Tensor:
    """The distance between neighbouring bfloat16 values at |x|, float32; at least that of the smallest normal."""
    _, exponent = torch.frexp(x.float().abs().clamp(min=2.0**-126))
    return torch.ldexp(torch.ones_like(x, dtype=torch.float32), exponent - 8)
