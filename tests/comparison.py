"""Comparisons shared by the tests of the ops."""

from __future__ import annotations

import torch

from openjev_fast_plugin.comparison import bfloat16_ulp, relative_l2

__all__ = ["assert_close", "bfloat16_ulp", "relative_l2"]


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, *, rtol: float, atol: float, what: str = ""
) -> None:
    """Like torch.testing.assert_close, for tensors of any float dtype; NaN never passes."""
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    torch.testing.assert_close(found.float(), expected.float(), rtol=rtol, atol=atol, equal_nan=False)
