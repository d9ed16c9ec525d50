"""What a model of Transformers computes for the prompts of a request: hidden states, scores, and the ids it read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from openjev_fast_plugin.weights import text_model

from .cases import Case, candidates

# Prompts that Open-Jev puts into one forward by default.
BATCH = 32


@dataclass
class Observed:
    """What one forward said about a case, on the host.

    scores: [C] float64, one per prompt.
    states: the distinct rows after every layer, the last one's after the final norm, each [rows, hidden] in the order
        of the prompts; empty where states were not asked for.
    wrong_ids: what a forward read instead of a prompt's ids, None where it read them.
    """

    scores: np.ndarray
    states: list[torch.Tensor]
    wrong_ids: str | None


def observe_original(model: Any, case: Case, with_states: bool) -> Observed:
    """A `DecisionModel`'s own forward over a case, in batches of at most 32 prompts, as Open-Jev makes them."""

    miscounted: list[str] = []

    def scores(start: int, stop: int) -> torch.Tensor:
        records = part(case.records, start, stop)
        logits = model(records)
        tokens = sum(map(len, case.sequences[start:stop]))
        if model.last_input_tokens != tokens:
            miscounted.append(
                f"prompts {start} to {stop - 1}: Open-Jev reads {model.last_input_tokens} tokens, not {tokens}"
            )
        return flat_scores(records, logits)

    observed = observe(text_model(model.backbone), scores, case, with_states)
    # A prompt that is longer than ours begins with the same ids.
    observed.wrong_ids = observed.wrong_ids or next(iter(miscounted), None)
    return observed


def observe(text: Any, scores: Callable[[int, int], torch.Tensor], case: Case, with_states: bool) -> Observed:
    """Run a case in batches and record it. text: the text model that `scores(start, stop)` runs, on those prompts."""
    layers = len(text.layers)
    rows: list[list[torch.Tensor]] = [[] for _ in range(layers)]
    found, wrong = [], None
    for start in range(0, len(case.sequences), BATCH):
        stop = min(start + BATCH, len(case.sequences))
        own = [slice(case.new_from[index], len(case.sequences[index])) for index in range(start, stop)]
        ids: list[torch.Tensor] = []

        def keep_rows(index: int, hidden: torch.Tensor, own: list[slice] = own) -> None:
            new = [hidden[row, span] for row, span in enumerate(own)]
            rows[index].append(torch.cat(new).cpu())

        with ExitStack() as stack:
            hook = text.embed_tokens.register_forward_pre_hook(
                lambda module, given, ids=ids: ids.append(given[0])
            )
            stack.callback(hook.remove)
            if with_states:
                # The last layer's states are read where the final norm has been.
                for index, layer in enumerate([*text.layers[:-1], text.norm]):
                    hook = layer.register_forward_hook(
                        lambda module, given, output, index=index: keep_rows(index, _tensor(output))
                    )
                    stack.callback(hook.remove)
            with torch.inference_mode():
                found.append(scores(start, stop).double().cpu())
        wrong = wrong or _wrong_ids(case, start, ids[0].cpu().numpy())
    return Observed(
        torch.cat(found).numpy(), [torch.cat(parts) for parts in rows] if with_states else [], wrong
    )


def _tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _wrong_ids(case: Case, start: int, read: np.ndarray) -> str | None:
    """read: [prompts, longest], padded on the right."""
    for row, ids in enumerate(read):
        wanted = case.sequences[start + row]
        differs = np.flatnonzero(ids[: len(wanted)] != wanted)
        if len(differs):
            at = int(differs[0])
            return f"{case.candidate(start + row)}: token {at} is {wanted[at]}, Open-Jev reads {ids[at]}"
    return None


def part(records: list[dict[str, Any]], start: int, stop: int) -> list[dict[str, Any]]:
    """The records that hold candidates start to stop of a request, cut where they hold others too."""
    found, first = [], 0
    for record in records:
        count = candidates(record)
        low, high = max(start - first, 0), min(stop - first, count)
        if low < high:
            whole = record["kind"] == "noul" or (low, high) == (0, count)
            cut = {name: record[name][low:high] for name in ("options", "answer_keys")} if not whole else {}
            found.append({**record, **cut})
        first += count
    return found


def flat_scores(records: list[dict[str, Any]], logits: list[torch.Tensor]) -> torch.Tensor:
    """One score per prompt [C], of logits as `DecisionModel.forward` returns them."""
    pairs = zip(records, logits, strict=True)
    return torch.cat([row[1:] if record["kind"] == "noul" else row for record, row in pairs])


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Inside, a `DecisionModel` computes in float32, whatever its dtype: the golden forward of the same weights.

    One layer at a time holds float32 copies of its weights, which the way back restores bit for bit. The delta rule is
    PyTorch's: other kernels multiply float32 as tf32.
    """
    text = text_model(model.backbone)
    before = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, before)
        torch.set_float32_matmul_precision("highest")
        stack.enter_context(_pytorch_delta_rule(text))
        hook = text.embed_tokens.register_forward_hook(lambda module, given, output: output.float())
        stack.callback(hook.remove)
        for layer in text.layers:
            kept: dict[str, torch.dtype] = {}
            for hook in (
                layer.register_forward_pre_hook(lambda module, given, kept=kept: _widen(module, kept)),
                layer.register_forward_hook(
                    lambda module, given, output, kept=kept: _restore(module, kept), always_call=True
                ),
            ):
                stack.callback(hook.remove)
        yield


def _widen(layer: torch.nn.Module, kept: dict[str, torch.dtype]) -> None:
    kept.update((name, parameter.dtype) for name, parameter in layer.named_parameters())
    layer.float()


def _restore(layer: torch.nn.Module, kept: dict[str, torch.dtype]) -> None:
    for name, parameter in layer.named_parameters():
        parameter.data = parameter.data.to(kept[name])


@contextmanager
def _pytorch_delta_rule(text: Any) -> Iterator[None]:
    """The delta rule of Transformers without other packages, in every linear-attention layer."""
    # Later versions than 5.12 wrap it around what they found; up to there each module holds its own.
    pytorch = inspect.unwrap(upstream.torch_chunk_gated_delta_rule)
    owners: list[tuple[Any, str]] = [
        (layer.linear_attn, "chunk_gated_delta_rule")
        for layer in text.layers
        if hasattr(getattr(layer, "linear_attn", None), "chunk_gated_delta_rule")
    ] or [(upstream, "torch_chunk_gated_delta_rule")]
    before = [getattr(owner, name) for owner, name in owners]
    for owner, name in owners:
        setattr(owner, name, pytorch)
    try:
        yield
    finally:
        for (owner, name), function in zip(owners, before, strict=True):
            setattr(owner, name, function)
