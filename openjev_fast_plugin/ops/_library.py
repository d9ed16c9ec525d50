"""Registration of the plugin's public ops in ``torch.ops.openjev_fast``.

Every op has one schema, a shape-only (fake) implementation for tracing, and a portable PyTorch implementation
that serves any device without a kernel of its own; a CUDA kernel registers itself for the CUDA key on top.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

NAMESPACE = "openjev_fast"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(schema: str, *, portable: Callable, fake: Callable) -> Callable:
    """Define ``openjev_fast::<schema>`` and return the callable op.

    schema: the op's name and signature in the schema language of torch.library.
    portable: implementation in PyTorch operations, used where no kernel is registered.
    fake: implementation on meta tensors; allocates outputs and computes nothing.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, portable, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.openjev_fast, name).default
