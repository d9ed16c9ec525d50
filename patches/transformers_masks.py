"""transformers: attention masks that never look at the values of a tensor.

Targets, as in Transformers 5.10.2: `masking_utils._ignore_causal_mask_sdpa`, which `sdpa_mask` finds through
its module (nothing imports it by name), and `_update_linear_attn_mask` of
`models.qwen3_5.modeling_qwen3_5.Qwen3_5TextModel`.

Both ask whether anything is padded, which stops the host until the device has answered, only to skip a mask
that would have masked nothing. Here a padding mask that is given is always used, so the maths is the same.
Without one, and for a cache that goes on, both decide from shapes and Python state and are left to it.
Applied around the original modules by whoever runs them without synchronisation, and undone after; the change
is seen by the whole process meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from . import Changes, Known, UnknownUpstream

IGNORE_CAUSAL_MASK = Known(
    "transformers.masking_utils._ignore_causal_mask_sdpa",
    positional=("padding_mask", "query_length", "kv_length", "kv_offset", "local_attention_size"),
    defaults={"local_attention_size": None},
)
UPDATE_LINEAR_MASK = Known(
    "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5TextModel._update_linear_attn_mask",
    positional=("self", "attention_mask", "past_key_values"),
)


def apply() -> Callable[[], None]:
    """Replace both and return the undo. UnknownUpstream, with nothing changed, if either is not as known."""
    from transformers import masking_utils
    from transformers.models.qwen3_5 import modeling_qwen3_5

    text_model: Any = getattr(modeling_qwen3_5, "Qwen3_5TextModel", None)
    if text_model is None:
        raise UnknownUpstream(UPDATE_LINEAR_MASK.target, str(UPDATE_LINEAR_MASK), "no class Qwen3_5TextModel")
    ignore_causal_mask = vars(masking_utils).get("_ignore_causal_mask_sdpa")
    update_linear_mask = vars(text_model).get("_update_linear_attn_mask")
    IGNORE_CAUSAL_MASK.verify(ignore_causal_mask)
    UPDATE_LINEAR_MASK.verify(update_linear_mask)
    assert ignore_causal_mask is not None and update_linear_mask is not None

    @functools.wraps(ignore_causal_mask)
    def ignore_only_without_padding_mask(
        padding_mask, query_length, kv_length, kv_offset, local_attention_size=None
    ):
        if padding_mask is not None:
            return False
        return ignore_causal_mask(None, query_length, kv_length, kv_offset, local_attention_size)

    @functools.wraps(update_linear_mask)
    def keep_linear_mask(self, attention_mask, past_key_values):
        if past_key_values is not None and past_key_values.has_previous_state():
            return None
        return attention_mask

    with Changes() as changes:
        changes.replace(masking_utils, "_ignore_causal_mask_sdpa", ignore_only_without_padding_mask)
        changes.replace(text_model, "_update_linear_attn_mask", keep_linear_mask)
    return changes.undo


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """The patch for the length of a `with` block."""
    undo = apply()
    try:
        yield
    finally:
        undo()
