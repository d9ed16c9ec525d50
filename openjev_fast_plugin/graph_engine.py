"""The graph backend's engine: the original modules, adapters merged, one CUDA Graph per shape of a padded batch."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from openjev_fast_plugin import weights as model_weights
from openjev_fast_plugin.engine import (
    Scores,
    as_logits,
    check_unchanged,
    encode,
    free_memory,
    row_bytes,
    rows_within,
)
from openjev_fast_plugin.graphs import CapturedAtOnce
from openjev_fast_plugin.padded import PaddedBatch, padded_forward, split_padded
from openjev_fast_plugin.prompts import PromptEncoder
from openjev_fast_plugin.settings import Settings

from .patches import UnknownUpstream, transformers_masks

# Of one query and key: what the causal and the padding mask are made from, then the mask and its bfloat16 copies.
_MASK_BYTES = 5


def refusal(model: Any) -> str | None:
    """Why this loaded model cannot be taken, naming the value and the remedy; None when it can."""
    try:
        _check(model)
    except model_weights.UnsupportedModel as reason:
        return str(reason)
    return None


def _check(model: Any) -> model_weights.Shapes:
    shapes = model_weights.check(model.backbone, model.head)
    device, wanted = model.head.weight.device, CapturedAtOnce.device_type
    if device.type != wanted:
        raise model_weights.UnsupportedModel(
            f"the model is on {device}, CUDA Graphs need a CUDA device: load it on one, or serve it with backend "
            "'fast', which runs on any"
        )
    attention = model_weights.text_model(model.backbone).config._attn_implementation
    if attention != "sdpa":
        raise model_weights.UnsupportedModel(
            f"attn_implementation is {attention!r}, whose masks may wait for the device: load the model with 'sdpa', "
            "as Open-Jev does"
        )
    try:
        transformers_masks.apply()()
    except UnknownUpstream as unknown:
        raise model_weights.UnsupportedModel(
            f"Transformers {transformers.__version__} makes its masks in a way that is not known here ({unknown}): "
            "install a version that the plugin is tested with"
        ) from unknown
    return shapes


class GraphEngine:
    """Scores requests of one model on its own modules: every prompt padded to the longest, whole batches replayed.

    A request's prompts, in order, form as few batches as `max_rows` padded rows allow; Open-Jev's batch size plays no
    part. A batch's scores are those of the merged modules, run eagerly on it with the mask patches, bit for bit.

    model: a loaded `DecisionModel`; its backbone is a `MergedBackbone` afterwards. The model owns the engine, not
        the other way round: it has to be kept as long as the engine scores.

    Raises UnsupportedModel, with the model unchanged, where `refusal` has a reason.
    """

    def __init__(self, model: Any, settings: Settings):
        from jev.api import candidate_prompts

        shapes = _check(model)
        self._model = weakref.proxy(model)
        self._encoder = PromptEncoder(model.tokenizer, candidate_prompts)
        self._pad = model.tokenizer.pad_token_id
        merged = model_weights.merge_adapters(model.backbone)
        self._backbone = model.backbone = model_weights.MergedBackbone(merged)
        self._head = [parameter.data_ptr() for parameter in model.head.parameters()]
        self._device, self._dtype = model.head.weight.device, merged.embed_tokens.weight.dtype
        self._kernels = kernels(merged)
        self._max_rows, self._memory = settings.max_rows, free_memory(self._device) // 4
        self._row_bytes = row_bytes(shapes, self._dtype.itemsize)
        self._graphs: CapturedAtOnce[PaddedBatch] = CapturedAtOnce(
            partial(padded_forward, merged, model.head), self._device
        )

    @property
    def max_rows(self) -> int:
        """Padded rows of one forward: the setting, else what memory allows, but never less than the longest prompt."""
        longest = self._model.max_length
        fitting = rows_within(self._memory, self._row_bytes + _MASK_BYTES * longest)
        return self._max_rows or max(fitting, longest)

    def describe(self) -> dict[str, Any]:
        """Facts for an answer's metadata and for /health; they change only with the model's `max_length`.

        kernels: what the captured graphs are made of.
        """
        return {
            "kernels": self._kernels,
            "device": str(self._device),
            "dtype": str(self._dtype).removeprefix("torch."),
            "max_rows": self.max_rows,
        }

    def score(self, records: list[dict[str, Any]]) -> Scores:
        """Logits of every record of a request, computed without autograd.

        records: as `jev.api.compile_request` returns them, at least one.

        Stats: graph_replays, graph_captures: how many of the forwards were replayed, and how many were the first of
        their shape and took the time of a capture; any others ran eagerly, being too large to capture.

        Raises ValueError when a prompt is longer than the model's `max_length`, or longer than `max_rows` alone;
        RuntimeError when the model's backbone or head is no longer what was taken over.
        """
        check_unchanged(self._model, self._backbone, self._head)
        groups = encode(self._encoder, records, self._model.max_length)
        prompts = [sequence for group in groups for sequence in group]
        lengths = [len(sequence) for sequence in prompts]
        flat, rows_computed, done = [], 0, Counter[str]()
        for span in split_padded(lengths, self.max_rows):
            batch = PaddedBatch.of(prompts[span], self._pad)
            with torch.inference_mode():
                scores, how = self._graphs(batch)
            flat.append(scores.cpu().numpy())
            rows_computed += batch.rows
            done[how] += 1
        pieces = np.split(np.concatenate(flat), np.cumsum([len(group) for group in groups])[:-1])
        logits = [as_logits(record, [piece]) for record, piece in zip(records, pieces, strict=True)]
        stats = {
            "rows_asked": sum(lengths),
            "rows_computed": rows_computed,
            "forwards": len(flat),
            "graph_replays": done["replays"],
            "graph_captures": done["captures"],
        }
        return Scores(logits, sum(lengths), stats)


def kernels(model: Any) -> str:
    """What a text model's forward runs beside PyTorch's own: where its delta rule and its convolution come from."""
    linear = [layer.linear_attn for layer in model.layers if hasattr(layer, "linear_attn")]
    parts = []
    for what, ours, attribute in (
        ("delta rule", "torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"),
        ("convolution", "causal_conv1d_fn", "causal_conv1d_fn"),
    ):
        # Up to Transformers 5.12 each module holds its functions, later on they are the model file's own.
        homes = {_home(getattr(module, attribute, getattr(upstream, ours, None))) for module in linear}
        parts += [f"{what} {' and '.join(sorted(homes))}"] if homes else []
    return ", ".join([f"transformers {transformers.__version__}", *parts])


def _home(function: Any) -> str:
    """The package a function comes from, `pytorch` for what Transformers does with PyTorch alone."""
    if function is None:
        return "pytorch"
    if inspect.isfunction(function):
        # Later versions wrap the function they found under the name of the one in PyTorch.
        function = inspect.getclosurevars(function).nonlocals.get("implementation", function)
    package = function.__module__.partition(".")[0]
    return "pytorch" if package == "transformers" else package
