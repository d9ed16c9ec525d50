"""transformers: attention masks that never look at the values of a tensor.

Targets: `masking_utils._ignore_causal_mask_sdpa`, which `sdpa_mask` finds through its module (nothing imports
it by name), and what makes the mask of the linear layers in `models.qwen3_5.modeling_qwen3_5`: up to
Transformers 5.12 `Qwen3_5TextModel._update_linear_attn_mask`, from 5.13 on `create_recurrent_attention_mask`,
imported there by name. Tested with 5.10.2 and 5.24.0.

Both ask whether anything is padded, which stops the host until the device has answered, only to skip a mask
that would have masked nothing. Here a padding mask that is given is always used, so the maths is the same.
Without one, and for a cache that goes on, both decide from shapes and Python state and are left to it.
Applied around the original modules by whoever runs them without synchronisation, and undone after; the change
is seen by the whole process until the last of those who applied it has undone it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from . import Changes, Known, UnknownUpstream, verify_any

IGNORE_CAUSAL_MASK = (
    Known(
        "transformers.masking_utils._ignore_causal_mask_sdpa",
        positional=("padding_mask", "query_length", "kv_length", "kv_offset", "local_attention_size"),
        defaults={"local_attention_size": None},
    ),
    # From 5.14 on.
    Known(
        "transformers.masking_utils._ignore_causal_mask_sdpa",
        positional=("padding_mask", "q_length", "kv_length", "q_offset", "kv_offset", "local_attention_size"),
        defaults={"local_attention_size": None},
    ),
)
UPDATE_LINEAR_MASK = Known(
    "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5TextModel._update_linear_attn_mask",
    positional=("self", "attention_mask", "past_key_values"),
)
# The cache is called `cache` from 5.24 on.
CREATE_RECURRENT_MASK = tuple(
    Known(
        "transformers.models.qwen3_5.modeling_qwen3_5.create_recurrent_attention_mask",
        positional=("config", "inputs_embeds", "attention_mask", cache),
        defaults={cache: None},
        starred=("**kwargs",),
    )
    for cache in ("past_key_values", "cache")
)

_lock = threading.Lock()
_users = 0
_changes = Changes()


def apply() -> Callable[[], None]:
    """Replace both and return the undo. UnknownUpstream, with nothing changed, if either is not as known.

    Who applies it while it is applied shares it: the last undo, from whichever thread, takes it out."""
    global _users
    with _lock:
        if _users == 0:
            _replace()
        _users += 1
    return functools.partial(_release, [True])


def _release(held: list[bool]) -> None:
    global _users
    with _lock:
        if held and held.pop():
            _users -= 1
            if _users == 0:
                _changes.undo()


def _replace() -> None:
    from transformers import masking_utils
    from transformers.models.qwen3_5 import modeling_qwen3_5

    text_model: Any = getattr(modeling_qwen3_5, "Qwen3_5TextModel", None)
    if text_model is None:
        raise UnknownUpstream(UPDATE_LINEAR_MASK.target, str(UPDATE_LINEAR_MASK), "no class Qwen3_5TextModel")
    ignore_causal_mask = vars(masking_utils).get("_ignore_causal_mask_sdpa")
    verify_any(IGNORE_CAUSAL_MASK, ignore_causal_mask)
    create_mask = vars(modeling_qwen3_5).get("create_recurrent_attention_mask")
    update_mask = vars(text_model).get("_update_linear_attn_mask")
    if create_mask is None:
        UPDATE_LINEAR_MASK.verify(update_mask)
    else:
        # Without what renames an argument's old name.
        create_mask = getattr(create_mask, "__wrapped__", create_mask)
        verify_any(CREATE_RECURRENT_MASK, create_mask)
        if "is_tracing" not in create_mask.__code__.co_names:
            raise UnknownUpstream(CREATE_RECURRENT_MASK[0].target, "a call of is_tracing", "none")

    with _changes:
        _changes.replace(
            masking_utils, "_ignore_causal_mask_sdpa", _ignore_without_padding(ignore_causal_mask)
        )
        if create_mask is None:
            _changes.replace(text_model, "_update_linear_attn_mask", _keep_mask(update_mask))
        else:
            _changes.replace(modeling_qwen3_5, "create_recurrent_attention_mask", _as_if_traced(create_mask))


def _ignore_without_padding(original: Any) -> Callable:
    @functools.wraps(original)
    def ignore_causal_mask(padding_mask, *shape, **more):
        return padding_mask is None and original(None, *shape, **more)

    return ignore_causal_mask


def _keep_mask(original: Any) -> Callable:
    @functools.wraps(original)
    def update_linear_attn_mask(self, attention_mask, past_key_values):
        if past_key_values is not None and past_key_values.has_previous_state():
            return None
        return attention_mask

    return update_linear_attn_mask


def _as_if_traced(original: types.FunctionType) -> Callable:
    """The same function, told that it is being traced, when it must not look at values either."""
    names = {**original.__globals__, "is_tracing": lambda *_: True}
    return functools.update_wrapper(
        types.FunctionType(original.__code__, names, original.__name__, original.__defaults__), original
    )


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """The patch for the length of a `with` block."""
    undo = apply()
    try:
        yield
    finally:
        undo()
