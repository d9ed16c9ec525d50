"""Records to logits through the host's own model: what a user's request costs."""

from __future__ import annotations

import argparse
import gc
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import interleaved, row, summary
from jev.api import candidate_prompts, compile_request
from jev.model import DecisionModel
from models import image_text_model, use_delta_rule
from transformers import AutoModelForImageTextToText
from workload import request_for

from openjev_fast_plugin import Settings
from openjev_fast_plugin.checkpoint import make_checkpoint, train_tokenizer
from openjev_fast_plugin.console import say, step
from openjev_fast_plugin.prompts import PromptEncoder
from openjev_fast_plugin.takeover import accelerate
from openjev_fast_plugin.weights import text_model

CASES = {
    "cpu": ("example", "choice_32x512"),
    "cuda": ("example", "noul_70", "noul_1500"),
}
# Each mode has its own copy of the weights: --mode asks for others.
MODES = {"cpu": ("torch", "fast"), "cuda": ("fla", "fast")}
ORIGINALS = ("torch", "fla")


def prompt_lengths(request: dict[str, Any], model: DecisionModel) -> list[int]:
    """Tokens of every prompt of a request, by the model's own tokenizer."""
    records = compile_request(request["state"], request["questions"])
    groups = PromptEncoder(model.tokenizer, candidate_prompts).encode(records)
    return [len(sequence) for group in groups for sequence in group]


def decision_model(
    profile: str, device: torch.device, seed: int = 0, layers: int | None = None
) -> DecisionModel:
    """The host's own `DecisionModel` of random weights, drawn on the device instead of read from a disk."""

    def from_pretrained(*args: Any, **options: Any) -> Any:
        return image_text_model(profile, device, seed, layers)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(AutoModelForImageTextToText, "from_pretrained", from_pretrained),
    ):
        train_tokenizer(8192).save_pretrained(folder)
        model = DecisionModel(folder, f"random-{profile}", device=str(device), max_length=32_768)
    return model.eval()


def bench_case(
    case: str, models: dict[str, DecisionModel], profile: str, repeats: int, warmups: int
) -> list[dict[str, Any]]:
    """Rows of one case, one per mode, timed in turn."""
    some = next(iter(models.values()))
    request = request_for(case, lambda request: max(prompt_lengths(request, some)))
    records = compile_request(request["state"], request["questions"])

    def run(model: DecisionModel) -> list[torch.Tensor]:
        with torch.inference_mode():
            return model(records)

    probabilities = {
        mode: torch.cat([scores.float().softmax(0) for scores in run(model)]).cpu()
        for mode, model in models.items()
    }
    with step(f"{case}: {warmups} warm-up and {repeats} timed rounds"):
        times = interleaved(
            {mode: (lambda model=model: run(model)) for mode, model in models.items()},
            repeats=repeats,
            warmups=warmups,
            synchronize=torch.cuda.synchronize if some.head.weight.is_cuda else lambda: None,
            progress=say,
        )
    lengths = prompt_lengths(request, some)
    found = []
    for mode, model in models.items():
        # The original computes every prompt padded to the longest.
        computed = len(lengths) * max(lengths) if mode in ORIGINALS else model.last_stats["rows_computed"]
        difference = (probabilities[mode] - probabilities[next(iter(models))]).abs().max().item()
        found.append(
            row(
                profile=profile,
                case=case,
                mode=mode,
                scope="e2e",
                **summary(times[mode]),
                rows_asked=sum(lengths),
                rows_computed=computed,
                largest_probability_difference=round(difference, 6),
                samples=repeats,
            )
        )
    return found


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of every case and mode asked for.

    Every mode has its own copy of one checkpoint; where none is given one is made, on a GPU of weights drawn there.
    load_peak: the most memory allocated from loading to handing over, over what is allocated then.
    """
    device = torch.device(args.device)
    with ExitStack() as stack:
        checkpoint = args.checkpoint
        if checkpoint is None and device.type == "cpu":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            with step(f"making a {args.profile} checkpoint"):
                checkpoint = make_checkpoint(args.profile, Path(folder) / args.profile)
        models, peaks = {}, {}
        for mode in args.mode or MODES[device.type]:
            with step(f"loading the model for mode {mode}"):
                peak = MemoryPeak(device)
                if checkpoint is None:
                    models[mode] = decision_model(args.profile, device, layers=args.layers)
                else:
                    models[mode] = DecisionModel.load(checkpoint, args.device)
                if mode in ORIGINALS:
                    use_delta_rule(text_model(models[mode].backbone), mode)
                else:
                    accelerate(models[mode], mode, Settings())
                    peaks[mode] = peak.ratio()
    found: list[dict[str, Any]] = []
    for case in args.case or CASES[device.type]:
        for one in bench_case(case, models, args.profile, args.repeats, args.warmups):
            found.append(one | {"load_peak": peaks.get(one["mode"])})
    return found


class MemoryPeak:
    """Device memory allocated since this was made, at the most and now; nothing is known of a host's memory."""

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def ratio(self) -> float | None:
        """The most over what is allocated now, to three places; None on the CPU."""
        if self._device.type != "cuda":
            return None
        gc.collect()
        most = torch.cuda.max_memory_allocated(self._device) - self._before
        return round(most / (torch.cuda.memory_allocated(self._device) - self._before), 3)
