"""Comparisons shared by the tests of the ops."""

from __future__ import annotations

import torch


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, *, rtol: float, atol: float, what: str = ""
) -> None:
    """Like torch.testing.assert_close, for tensors of any float dtype; NaN never passes."""
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    torch.testing.assert_close(found.float(), expected.float(), rtol=rtol, atol=atol, equal_nan=False)


def relative_l2(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in float64."""
    difference = (found.double() - expected.double()).norm()
    return (difference / expected.double().norm()).item()


def bfloat16_ulp(x: torch.Tensor) -> torch.Tensor:
    """The distance between neighbouring bfloat16 values at |x|, float32; at least that of the smallest normal."""
    _, exponent = torch.frexp(x.float().abs().clamp(min=2.0**-126))
    return torch.ldexp(torch.ones_like(x, dtype=torch.float32), exponent - 8)
