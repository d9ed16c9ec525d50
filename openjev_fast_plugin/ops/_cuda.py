"""CUDA implementations of the public ops that have a hand-written kernel.

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
from openjev_fast_plugin.ops._library import NAMESPACE

# Names in torch.ops.openjev_fast_cuda.
_KERNELS = (
    "add_rms_norm",
    "attention_prepare",
    "delta_prepare",
    "delta_rule",
    "gate_mul",
    "gated_rms_norm",
    "head_score",
    "linear_sm90",
    "silu_mul",
    "tree_attention",
)
_LIBRARY = torch.library.Library(NAMESPACE, "IMPL", "CUDA")


@functools.cache
def load() -> dict[str, Callable]:
    """Build the kernels if this user has not yet, load them, and return them by op name.

    Raises build.BuildError where they cannot be built.
    """
    torch.ops.load_library(str(build.build()))
    kernels = torch.ops.openjev_fast_cuda
    return {name: getattr(kernels, name).default for name in _KERNELS}


def _register(name: str) -> None:
    module = import_module(f"openjev_fast_plugin.ops.{name}")
    portable, takes = module._portable, getattr(module, "_kernel_takes", None)

    def implementation(*arguments):
        if arguments[0].dtype is torch.float32 or (takes is not None and not takes(*arguments)):
            return portable(*arguments)
        return load()[name](*arguments)

    _LIBRARY.impl(name, implementation)


def _register_linear(name: str, portable: Callable, silu: bool) -> None:
    def implementation(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tile = linear._kernel_tile_of(x, weight, silu) if x.dtype is torch.bfloat16 else None
        return portable(x, weight) if tile is None else load()["linear_sm90"](x, weight, silu, *tile)

    _LIBRARY.impl(name, implementation)


for _name in _KERNELS:
    if _name != "linear_sm90":
        _register(_name)
_register_linear("linear", F.linear, silu=False)
_register_linear("linear_silu_mul", linear._portable_silu_mul, silu=True)
