"""Records to logits through the host's own model: what a user's request costs."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from harness import interleaved, row, summary
from jev.api import candidate_prompts, compile_request
from jev.model import DecisionModel
from workload import choice, example

from openjev_fast_plugin import Settings
from openjev_fast_plugin.checkpoint import make_checkpoint
from openjev_fast_plugin.console import say, step
from openjev_fast_plugin.prompts import PromptEncoder
from openjev_fast_plugin.takeover import accelerate

CASES = ("example", "choice_32x512")
# Without `graph`, since each mode has its own copy of the weights; --mode asks for it.
MODES = ("torch", "fast")


def prompt_lengths(request: dict[str, Any], model: DecisionModel) -> list[int]:
    """Tokens of every prompt of a request, by the model's own tokenizer."""
    records = compile_request(request["state"], request["questions"])
    groups = PromptEncoder(model.tokenizer, candidate_prompts).encode(records)
    return [len(sequence) for group in groups for sequence in group]


def request_for(case: str, model: DecisionModel) -> dict[str, Any]:
    """The request of a case, sized with the model's own tokenizer."""
    if case == "example":
        return example()
    options, tokens = (int(number) for number in case.removeprefix("choice_").split("x"))
    return choice(options, tokens, lambda request: max(prompt_lengths(request, model)))


def bench_case(
    case: str, models: dict[str, DecisionModel], profile: str, repeats: int, warmups: int
) -> list[dict[str, Any]]:
    """Rows of one case, one per mode, timed in turn."""
    request = request_for(case, next(iter(models.values())))
    records = compile_request(request["state"], request["questions"])

    def run(model: DecisionModel) -> list[torch.Tensor]:
        with torch.inference_mode():
            return model(records)

    probabilities = {
        mode: torch.cat([scores.float().softmax(0) for scores in run(model)])
        for mode, model in models.items()
    }
    with step(f"{case}: {warmups} warm-up and {repeats} timed rounds"):
        times = interleaved(
            {mode: (lambda model=model: run(model)) for mode, model in models.items()},
            repeats=repeats,
            warmups=warmups,
            progress=say,
        )
    lengths = prompt_lengths(request, next(iter(models.values())))
    found = []
    for mode, model in models.items():
        # The original computes every prompt padded to the longest.
        computed = len(lengths) * max(lengths) if mode == "torch" else model.last_stats["rows_computed"]
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
    """Rows of every case and mode asked for; every mode has its own copy of one checkpoint."""
    with ExitStack() as stack:
        checkpoint = args.checkpoint
        if checkpoint is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            with step(f"making a {args.profile} checkpoint"):
                checkpoint = make_checkpoint(args.profile, Path(folder) / args.profile)
        models = {}
        for mode in args.mode or MODES:
            with step(f"loading the model for mode {mode}"):
                models[mode] = DecisionModel.load(checkpoint, args.device)
                if mode != "torch":
                    accelerate(models[mode], mode, Settings())
    found: list[dict[str, Any]] = []
    for case in args.case or CASES:
        found += bench_case(case, models, args.profile, args.repeats, args.warmups)
    return found
