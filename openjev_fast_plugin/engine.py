"""The fast backend's engine: a loaded Open-Jev model in, logits of whole requests from packed forwards out."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openjev_fast_plugin import weights as model_weights
from openjev_fast_plugin.forest import build_forest, split_to_fit
from openjev_fast_plugin.forward import forward
from openjev_fast_plugin.graphs import GraphedForward
from openjev_fast_plugin.layout import Bucket, Layout, build_layout
from openjev_fast_plugin.ops import _cuda
from openjev_fast_plugin.ops.delta_rule import KERNEL_DIM as DELTA_RULE_DIM
from openjev_fast_plugin.ops.tree_attention import KERNEL_DIMS as ATTENTION_DIMS
from openjev_fast_plugin.prompts import PromptEncoder
from openjev_fast_plugin.settings import Settings

# Rows in eights keep cuBLAS on its fast kernels (bench/LOG.md); nodes and reads in eights let requests share graphs.
CUDA_BUCKET = Bucket(rows=8, nodes=8, reads=8)
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Scores:
    """What an engine returns for one request.

    logits: one float32 tensor per record, as Open-Jev's `DecisionModel.forward` returns them.
    input_tokens: sum of the prompts' lengths, as Open-Jev counts them.
    stats: rows_asked, rows_computed, forwards and whatever else an engine reports in an answer's metadata.
    """

    logits: list[torch.Tensor]
    input_tokens: int
    stats: dict[str, Any] = field(default_factory=dict)


def refusal(model: Any) -> str | None:
    """Why this loaded model cannot be taken, naming the value; None when it can."""
    return model_weights.refusal(model.backbone, model.head)


class FastEngine:
    """Scores requests of one model whose weights it owns: every candidate of a request in one packed forward.

    model: a loaded `DecisionModel`; its backbone is a `ReleasedBackbone` afterwards. The model owns the engine, not
        the other way round: it has to be kept as long as the engine scores.

    Raises UnsupportedModel, with the model unchanged, where `refusal` has a reason, and BuildError where the kernels
    cannot be built.
    """

    def __init__(self, model: Any, settings: Settings):
        from jev.api import candidate_prompts

        self._model = weakref.proxy(model)
        self._encoder = PromptEncoder(model.tokenizer, candidate_prompts)
        shapes = model_weights.check(model.backbone, model.head)
        original = model_weights.text_model(model.backbone)
        self._portable = portable_ops(shapes, original.embed_tokens.weight)
        if self._portable != ["all"]:
            _cuda.load()
        self._weights = model_weights.take_weights(model.backbone, model.head)
        self._backbone = model_weights.ReleasedBackbone(original.config, self._weights.backbone_tensors())
        model.backbone = self._backbone
        self._max_rows, self._default_max_rows = settings.max_rows, default_max_rows(self._weights)
        self._bucket, self._graphs = Bucket(), None
        if not self._portable:
            # No op synchronises, so a forward can be captured.
            self._bucket = CUDA_BUCKET
            self._graphs = GraphedForward(partial(forward, self._weights), self._weights.device)

    @property
    def weights(self) -> model_weights.Weights:
        """What the forwards of this engine read."""
        return self._weights

    @property
    def max_rows(self) -> int:
        """Rows of one forward: the setting, else what memory allows, but never less than the longest prompt."""
        return self._max_rows or max(self._default_max_rows, self._model.max_length)

    def describe(self) -> dict[str, Any]:
        """Facts for an answer's metadata and for /health; they change only with the model's `max_length`.

        kernels: what runs the ops; matrix products, embedding and gathers are PyTorch's in any case.
        """
        device = self._weights.device
        kernels = "pytorch"
        if self._portable != ["all"]:
            major, minor = torch.cuda.get_device_capability(device)
            kernels = ", ".join([f"cuda sm_{major}{minor}", *(f"pytorch {op}" for op in self._portable)])
        return {
            "kernels": kernels,
            "device": str(device),
            "dtype": str(self._weights.dtype).removeprefix("torch."),
            "max_rows": self.max_rows,
        }

    def score(self, records: list[dict[str, Any]]) -> Scores:
        """Logits of every record of a request, computed without autograd.

        records: as `jev.api.compile_request` returns them, at least one.

        Raises ValueError when a prompt is longer than the model's `max_length`, or longer than `max_rows` alone;
        RuntimeError when the model's backbone or head is no longer what was taken over.
        """
        self._check_unchanged()
        sequences = encode(self._encoder, records, self._model.max_length)
        parts = split_to_fit(sequences, self.max_rows)
        scores: list[list[torch.Tensor]] = [[] for _ in records]
        rows_computed = replayed = 0
        for part in parts:
            wanted = [sequence for group, span in part for sequence in sequences[group][span]]
            layout = build_layout(build_forest(wanted), self._bucket, portable=bool(self._portable))
            with torch.inference_mode():
                flat, was_replayed = self._run(layout)
            flat = flat[: len(wanted)]
            rows_computed += layout.rows
            replayed += was_replayed
            sizes = [len(sequences[group][span]) for group, span in part]
            for (group, _), piece in zip(part, flat.split(sizes), strict=True):
                scores[group].append(piece)
        # torch.cat copies: outside inference mode what leaves here is an ordinary tensor.
        logits = [
            as_logits(record, torch.cat(pieces)) for record, pieces in zip(records, scores, strict=True)
        ]
        total = sum(len(sequence) for group in sequences for sequence in group)
        stats = {"rows_asked": total, "rows_computed": rows_computed, "forwards": len(parts)}
        if self._graphs is not None:
            stats["graph_replays"] = replayed
        return Scores(logits, total, stats)

    def _check_unchanged(self) -> None:
        read = [self._weights.head_weight.data_ptr(), self._weights.head_bias.data_ptr()]
        check_unchanged(self._model, self._backbone, read)

    def _run(self, layout: Layout) -> tuple[torch.Tensor, bool]:
        """Scores of a layout on the host, and whether a captured graph was replayed."""
        if self._graphs is not None:
            return self._graphs(layout)
        return forward(self._weights, layout.to(self._weights.device)), False


def portable_ops(shapes: model_weights.Shapes, weight: torch.Tensor) -> list[str]:
    """Ops that run as PyTorch operations, for want of a kernel for the heads or for the weights' dtype or device."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return ["all"]
    missing = []
    if not shapes.key_dim == shapes.value_dim == DELTA_RULE_DIM:
        missing.append("delta_rule")
    if shapes.head_dim not in ATTENTION_DIMS:
        missing.append("tree_attention")
    return missing


def encode(encoder: PromptEncoder, records: list[dict[str, Any]], max_length: int) -> list[list[np.ndarray]]:
    """Token sequences of every record's prompts; refuses what Open-Jev's `DecisionModel.forward` does, as it does."""
    if not records:
        raise IndexError("there are no records to score")
    sequences = encoder.encode(records)
    longest = max(len(sequence) for group in sequences for sequence in group)
    if longest > max_length:
        raise ValueError(f"Input length {longest} exceeds max_length={max_length}; no silent truncation")
    return sequences


def check_unchanged(model: Any, backbone: Any, head: list[int]) -> None:
    """RuntimeError unless a model has this backbone still, and its head's parameters are at these addresses."""
    if (
        model.backbone is not backbone
        or [parameter.data_ptr() for parameter in model.head.parameters()] != head
    ):
        raise RuntimeError(
            "the backbone or the head of this model was replaced, converted or moved after a backend took it over; "
            "change the model first, then hand it over"
        )


def as_logits(record: dict[str, Any], scores: torch.Tensor) -> torch.Tensor:
    """One logit per option; a noul's no has logit 0, as Open-Jev defines it."""
    return torch.cat([torch.zeros_like(scores), scores]) if record["kind"] == "noul" else scores


def default_max_rows(weights: model_weights.Weights) -> int:
    """Rows whose activations fit in a quarter of the memory there is now, between 4,096 and 262,144."""
    return rows_within(
        free_memory(weights.device) // 4, row_bytes(weights.shapes, weights.embedding.element_size())
    )


def rows_within(memory: int, bytes_per_row: int) -> int:
    """Rows that fit in so many bytes, between 4,096 and 262,144."""
    return max(4096, min(memory // bytes_per_row, 262_144))


def row_bytes(shapes: model_weights.Shapes, item: int) -> int:
    """Bytes of a row's activations at the widest point of a layer; item: bytes of one weight."""
    mixer = shapes.conv_channels + shapes.value_heads * shapes.value_dim
    attention = 2 * (shapes.query_heads + shapes.kv_heads) * shapes.head_dim
    # Live there: residual and norm, the fused projection, and float32 working copies.
    return 4 * shapes.hidden * item + max(3 * shapes.intermediate * item, max(mixer, attention) * (item + 16))


def free_memory(device: torch.device) -> int:
    """Bytes of a device's memory that nobody uses; of the host's, what is to be had without swapping."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_memory()


def _available_memory() -> int:
    """Bytes of host memory to be had without swapping, as Linux estimates them; elsewhere half of what there is."""
    if MEMINFO.exists():
        values = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return int(values["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
