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

# Names in torch.ops.openjev_fast_cuda: of the public ops of the same names, and of what products are computed with.
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
    "product",
)
# The loop over the layers of a forward, which `compiled_layers` calls.
_LOOP = ("layers",)
# What prepares a forward on the host.
HOST = (
    "count_rows",
    "packed_layout",
)
_LIBRARY = torch.library.Library(NAMESPACE, "IMPL", "CUDA")


@functools.cache
def load() -> dict[str, Callable]:
    """Build the kernels if this user has not yet, load them, and return them by op name.

    Raises build.BuildError where they cannot be built.
    """
    torch.ops.load_library(str(build.build()))
    kernels = torch.ops.openjev_fast_cuda
    return {name: getattr(kernels, name).default for name in (*_KERNELS, *_PRODUCTS, *_LOOP, *HOST)}


def compute(op: str, choice: Choice, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One op of `ops.linear` in one way. x: [N, K], weight: [O, K], bfloat16 on one CUDA device."""
    return load()["product"](x, weight, op == "linear_silu_mul", choice.encoded())


def _register(name: str) -> None:
    module = import_module(f"openjev_fast_plugin.ops.{name}")
    portable, takes = module._portable, getattr(module, "_kernel_takes", None)

    def implementation(*arguments):
        if arguments[0].dtype is torch.float32 or (takes is not None and not takes(*arguments)):
            return portable(*arguments)
        return load()[name](*arguments)

    _LIBRARY.impl(name, implementation)


def _product(op: str, portable: Callable) -> Callable:
    def implementation(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:
            return portable(x, weight)
        return compute(op, linear._choice(op, x, weight), x, weight)

    return implementation


def _linear_update(x: torch.Tensor, weight: torch.Tensor, partials: int) -> torch.Tensor:
    choice = linear._choice("linear_update", x, weight)
    if x.dtype is torch.float32 or choice.partials != partials:
        # Golden precision, a number of the caller's own, or tensors that the way chosen for their shape does not take.
        return linear._portable_update(x, weight, partials)
    return compute("linear_update", choice, x, weight)


for _name in _KERNELS:
    _register(_name)
_LIBRARY.impl("linear", _product("linear", F.linear))
_LIBRARY.impl("linear_silu_mul", _product("linear_silu_mul", linear._portable_silu_mul))
_LIBRARY.impl("linear_update", _linear_update)
