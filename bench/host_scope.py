"""Records to logits through the host's own model: what a user's request costs."""

from __future__ import annotations

import argparse
import gc
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from harness import row
from jev.model import DecisionModel
from workload import request_for

from openjev_fast_plugin.checkpoint import make_checkpoint
from openjev_fast_plugin.console import say, step
from openjev_fast_plugin.loading import load_original
from openjev_fast_plugin.measurement.originals import ORIGINALS
from openjev_fast_plugin.measurement.run import Loaded, largest_difference, measure, take_over
from openjev_fast_plugin.random_models import decision_model
from openjev_fast_plugin.verification.cases import Case, compile_requests, tokenize

CASES = {
    "cpu": ("example", "choice_32x512"),
    "cuda": ("example", "noul_70", "noul_1500"),
}
# Each mode has its own copy of the weights: --mode asks for others.
MODES = {"cpu": ("torch", "fast"), "cuda": ("fla", "fast")}


def longest_prompt(request: dict[str, Any], model: DecisionModel) -> int:
    """Tokens of a request's longest prompt, by the model's own tokenizer."""
    return max(map(len, case_of("request", request, model).sequences))


def case_of(name: str, request: dict[str, Any], model: DecisionModel) -> Case:
    """A request as it is measured."""
    return tokenize(compile_requests([(name, request)]), model.tokenizer, model.max_length)[0]


def bench_case(
    name: str, loaded: list[Loaded], device: torch.device, profile: str, repeats: int, warmups: int
) -> list[dict[str, Any]]:
    """Rows of one case, one per mode, timed in turn."""
    some = loaded[0].model
    case = case_of(name, request_for(name, lambda request: longest_prompt(request, some)), some)
    with step(f"{name}: {warmups} warm-up and {repeats} timed rounds"):
        measured = measure(loaded, case, device, repeats, warmups, progress=say)
    base = next(iter(measured.values()))[1]
    return [
        row(profile=profile, case=name, mode=mode, **figures, **largest_difference(case, scores, base))
        for mode, (figures, scores) in measured.items()
    ]


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
        loaded, peaks = [], {}
        for mode in args.mode or MODES[device.type]:
            with step(f"loading the model for mode {mode}"):
                peak = MemoryPeak(device)
                if checkpoint is None:
                    model = decision_model(args.profile, device, layers=args.layers)
                else:
                    model = load_original(checkpoint, args.device)
                loaded.append(Loaded((mode,), take_over(model, mode)))
                if mode not in ORIGINALS:
                    peaks[mode] = peak.ratio()
    found: list[dict[str, Any]] = []
    for case in args.case or CASES[device.type]:
        for one in bench_case(case, loaded, device, args.profile, args.repeats, args.warmups):
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
