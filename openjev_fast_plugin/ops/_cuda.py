"""CUDA implementations of the public ops: hand-written kernels, and for products whichever way is chosen.

The kernels take bfloat16. float32 tensors on CUDA go to the op's portable implementation by design: float32
is the precision of golden comparisons, not one to serve in. So do shapes that a kernel has no instance for, as
`_kernel_takes` of the op's module says. Any other dtype reaches the kernel's checks, and they refuse it. The
library is built and loaded when the first such tensor arrives, or through :func:`load`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module

import torch
import torch.nn.functional as F

from openjev_fast_plugin import build
from openjev_fast_plugin.ops import linear
from openjev_fast_plugin.ops._choices import Choice
from openjev_fast_plugin.ops._library import NAMESPACE
from openjev_fast_plugin.ops.silu_mul import silu_mul

# Names in torch.ops.openjev_fast_cuda: of the public ops of the same names, and of what `compute` chooses from.
_KERNELS = (
    "add_rms_norm",
    "attention_prepare",
    "delta_prepare",
    "delta_rule",
    "gate_mul",
    "gated_rms_norm",
    "head_score",
    "silu_mul",
    "tree_attention",
)
_PRODUCTS = (
    "cublaslt_accepts",
    "cublaslt_algorithms",
    "cublaslt_matmul",
    "cublaslt_version",
    "linear_sm90",
)
# What prepares a forward on the host.
_HOST = ("packed_layout",)
_LIBRARY = torch.library.Library(NAMESPACE, "IMPL", "CUDA")


@functools.cache
def load() -> dict[str, Callable]:
    """Build the kernels if this user has not yet, load them, and return them by op name.

    Raises build.BuildError where they cannot be built.
    """
    torch.ops.load_library(str(build.build()))
    kernels = torch.ops.openjev_fast_cuda
    return {name: getattr(kernels, name).default for name in (*_KERNELS, *_PRODUCTS, *_HOST)}


def compute(op: str, choice: Choice, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One op of `ops.linear` in one way. x: [N, K], weight: [O, K], bfloat16 on one CUDA device."""
    if choice.way == "kernel":
        product = load()["linear_sm90"](x, weight, choice.fused, choice.tile, choice.parts)
    elif choice.way == "cublaslt":
        product = load()["cublaslt_matmul"](
            x, weight, choice.form, choice.partials, choice.algorithm, choice.workspace
        )
    elif choice.band:
        product = _by_bands(x, weight, choice.band)
    else:
        product = F.linear(x, weight)
    return silu_mul(product) if op == "linear_silu_mul" and not choice.fused else product


def _by_bands(x: torch.Tensor, weight: torch.Tensor, band: int) -> torch.Tensor:
    """`F.linear` of so many rows of the weight at a time, each call into its columns of one product."""
    product = x.new_empty(len(x), len(weight))
    for part, columns in zip(weight.split(band), product.split(band, dim=1), strict=True):
        torch.mm(x, part.t(), out=columns)
    return product


def _register(name: str) -> None:
    module = import_module(f"openjev_fast_plugin.ops.{name}")
    portable, takes = module._portable, getattr(module, "_kernel_takes", None)

    def implementation(*arguments):
        if arguments[0].dtype is torch.float32 or (takes is not None and not takes(*arguments)):
            return portable(*arguments)
        return load()[name](*arguments)

    _LIBRARY.impl(name, implementation)


def _product(op: str) -> Callable:
    def implementation(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return compute(op, linear._choice(op, x, weight), x, weight)

    return implementation


def _linear_update(x: torch.Tensor, weight: torch.Tensor, partials: int) -> torch.Tensor:
    choice = linear._choice("linear_update", x, weight)
    if choice.partials != partials:
        # The op was called with a number of its own, or tensors that the way chosen for their shape does not take.
        return linear._portable_update(x, weight, partials)
    return compute("linear_update", choice, x, weight)


for _name in _KERNELS:
    _register(_name)
for _name in ("linear", "linear_silu_mul"):
    _LIBRARY.impl(_name, _product(_name))
_LIBRARY.impl("linear_update", _linear_update)
