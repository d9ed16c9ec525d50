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

from openjev_fast_plugin import build
from openjev_fast_plugin.ops._library import NAMESPACE

_OPS = (
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
_LIBRARY = torch.library.Library(NAMESPACE, "IMPL", "CUDA")


@functools.cache
def load() -> dict[str, Callable]:
    """Build the kernels if this user has not yet, load them, and return them by op name.

    Raises build.BuildError where they cannot be built.
    """
    torch.ops.load_library(str(build.build()))
    kernels = torch.ops.openjev_fast_cuda
    return {name: getattr(kernels, name).default for name in _OPS}


def _register(name: str) -> None:
    module = import_module(f"openjev_fast_plugin.ops.{name}")
    portable, takes = module._portable, getattr(module, "_kernel_takes", None)

    def implementation(*arguments):
        if arguments[0].dtype is torch.float32 or (takes is not None and not takes(*arguments)):
            return portable(*arguments)
        return load()[name](*arguments)

    _LIBRARY.impl(name, implementation)


for _name in _OPS:
    _register(_name)
