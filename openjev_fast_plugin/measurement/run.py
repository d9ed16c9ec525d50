"""The modes of a checkpoint, timed on requests: in turn where their models fit together, else one after the other."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from openjev_fast_plugin.checkpoint import make_checkpoint
from openjev_fast_plugin.console import UsageError, say, step
from openjev_fast_plugin.engine import free_memory
from openjev_fast_plugin.loading import load_original, usable_device
from openjev_fast_plugin.random_models import decision_model
from openjev_fast_plugin.settings import BackendError, Settings
from openjev_fast_plugin.takeover import accelerate
from openjev_fast_plugin.verification.cases import (
    Case,
    candidates,
    compile_requests,
    default_requests,
    read_requests,
    tokenize,
)
from openjev_fast_plugin.verification.observe import BATCH, flat_scores, part
from openjev_fast_plugin.weights import text_model

from . import budget, record
from .originals import ORIGINALS, best_delta_rule, use_delta_rule
from .timing import interleaved, summary

MODES = ("torch", "fla", "graph", "fast")
INTERLEAVED = "interleaved"
ONE_BY_ONE = "one model after the other"
# Of the free memory, what models that are loaded together may take; the rest is for what they compute.
_MODELS_SHARE = 0.7
# What a graph that is captured when the device is idle gets to be captured in, and how often it is looked for.
_IDLE_SECONDS, _IDLE_LOOKS = 0.5, 6


@dataclass
class Loaded:
    """A model and the modes it runs: both original ones share theirs."""

    modes: tuple[str, ...]
    model: Any

    def prepare(self, mode: str) -> None:
        """To be called before `ask` when the mode is another one than before."""
        if mode in ORIGINALS:
            use_delta_rule(text_model(self.model.backbone), mode)

    def ask(self, mode: str, case: Case) -> torch.Tensor:
        """Scores [C] of a case's prompts; the original gets batches of at most 32, as Open-Jev makes them."""
        step_size = BATCH if mode in ORIGINALS else len(case.sequences)
        scores = []
        with torch.inference_mode():
            for start in range(0, len(case.sequences), step_size):
                records = part(case.records, start, start + step_size)
                scores.append(flat_scores(records, self.model(records)))
        return torch.cat(scores)

    def rows_computed(self, mode: str, case: Case) -> int:
        """Of the last answer: prompts padded to the longest of a batch, or what the backend says."""
        if mode not in ORIGINALS:
            return self.model.last_stats["rows_computed"]
        lengths = [len(sequence) for sequence in case.sequences]
        batches = [lengths[start : start + BATCH] for start in range(0, len(lengths), BATCH)]
        return sum(len(batch) * max(batch) for batch in batches)


def run(
    checkpoint: Path | None,
    profile: str | None,
    requests: list[Path] | None = None,
    device: str | None = None,
    modes: Sequence[str] | None = None,
    repeats: int = 15,
    warmups: int = 2,
    seconds: float = 8.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Time every mode on every request, from records to scores.

    checkpoint: a checkpoint package, or None for random weights of `profile`: on a CPU a package made on the spot, on a
    GPU drawn there, without an adapter. requests: JSON files of requests, None for the example and some drawn from
    seed. device: a torch device, None for the first GPU where there is one and the CPU elsewhere. modes: of MODES, None
    for all that run on the device. repeats, warmups: rounds of one call a mode. seconds: of timed rounds a request and
    mode, after which none starts once there are three.

    Returns {meta, model, order, memory, cases: [{name, prompts, tokens, rows}], rows: one per request and mode}. Raises
    UsageError where the checkpoint, a request or a mode cannot be used.
    """
    device = usable_device(device)
    place = torch.device(device)
    wanted = _modes(modes, place)
    compiled = compile_requests(read_requests(requests) if requests else default_requests(seed))
    groups = [
        group for group in (_originals(wanted), ("graph",), ("fast",)) if group and set(group) <= set(wanted)
    ]
    with ExitStack() as stack:
        if checkpoint is None and place.type == "cpu":
            assert profile is not None
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="openjev-fast-bench-"))
            with step(f"making a random {profile} checkpoint"):
                checkpoint = make_checkpoint(profile, Path(folder) / profile)
            name = f"{profile}, random weights"
        else:
            name = f"{profile}, random weights without an adapter" if checkpoint is None else str(checkpoint)

        def load(group: tuple[str, ...]) -> Loaded:
            with step(f"loading the model for {' and '.join(group)}"):
                if checkpoint is None:
                    assert profile is not None
                    model = decision_model(profile, place)
                else:
                    model = load_original(checkpoint, device)
                loaded = Loaded(group, take_over(model, group[0]))
                _release_memory(place)
                return loaded

        free = free_memory(place)
        first = load(groups[0])
        size = free - free_memory(place) if place.type == "cuda" else _bytes(first.model)
        together = len(groups) * size <= _MODELS_SHARE * free
        cases = tokenize(compiled, first.model.tokenizer, first.model.max_length)
        if together:
            rounds = [[first, *map(load, groups[1:])]]
        else:
            say(
                f"{len(groups)} models of {size / 2**30:.1f} GiB do not fit together into {_MODELS_SHARE:.0%} of the "
                f"{free / 2**30:.1f} GiB that were free: {ONE_BY_ONE}, so that a slow spell may meet one alone"
            )
            rounds = [[first]]
        del first
        found: dict[tuple[str, str], dict[str, Any]] = {}
        scores: dict[tuple[str, str], torch.Tensor] = {}
        calls = (1 + warmups + repeats) * len(cases) * (1 if together else len(groups))
        with tqdm(total=calls, desc="timing", unit="round", delay=2) as bar:
            for index in range(1 if together else len(groups)):
                loaded = rounds.pop() if rounds else [load(groups[index])]
                for case in cases:
                    aim = bar.n + 1 + warmups + repeats
                    measured = measure(
                        loaded, case, place, repeats, warmups, seconds, lambda message: bar.update()
                    )
                    bar.update(aim - bar.n)
                    for mode, (row, answer) in measured.items():
                        found[case.name, mode], scores[case.name, mode] = row, answer
                # No model is held while the next one loads.
                del loaded
                _release_memory(place)
    rows = []
    for case in cases:
        base = scores[case.name, wanted[0]]
        for mode in wanted:
            difference = largest_difference(case, scores[case.name, mode], base)
            rows.append({"case": case.name, "mode": mode, **found[case.name, mode], **difference})
    return {
        "meta": record.meta(place, "openjev-fast"),
        "model": name,
        "order": INTERLEAVED if together else ONE_BY_ONE,
        "memory": {"free_bytes": free, "model_bytes": size, "models": len(groups)},
        "cases": [
            {"name": case.name, "prompts": len(case.sequences), "tokens": case.tokens, "rows": case.rows}
            for case in cases
        ],
        "rows": rows,
    }


def take_over(model: Any, mode: str) -> Any:
    """The model on the backend of a mode, as it is for the original ones. UsageError where the backend refuses it."""
    if mode in ORIGINALS:
        return model
    try:
        # Every case is asked again and again: of a kept prefix the first time alone would be seen.
        return accelerate(model, mode, replace(Settings.read(), prefix_bytes=0))
    except BackendError as error:
        raise UsageError(
            f"mode {mode} cannot be timed: {error}\nleave it out by naming the others with --mode"
        ) from error


def measure(
    loaded: list[Loaded],
    case: Case,
    device: torch.device,
    repeats: int,
    warmups: int,
    seconds: float = float("inf"),
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, tuple[dict[str, Any], torch.Tensor]]:
    """Figures and scores of every mode on one case, its calls timed in turn with the others'.

    Figures: scope, p50_ms, min_ms, max_ms, ms (every timed call), first_ms (the very first), samples, rows_asked,
    rows_computed, and of one profiled call kernels, busy_ms, families and idle_ms, what is left of the median on a GPU
    and of the profiled call itself on a CPU.
    """
    owners = {mode: each for each in loaded for mode in each.modes}
    synchronize = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    firsts, scores = {}, {}
    for mode, owner in owners.items():
        owner.prepare(mode)
        synchronize()
        start = time.perf_counter()
        scores[mode] = owner.ask(mode, case).float().cpu()
        firsts[mode] = 1e3 * (time.perf_counter() - start)
        _settle(owner, mode, case)
    progress("first answers")
    times = interleaved(
        {mode: partial(owner.ask, mode, case) for mode, owner in owners.items()},
        repeats=repeats,
        warmups=warmups,
        seconds=seconds * len(owners),
        prepare=lambda mode: owners[mode].prepare(mode),
        synchronize=synchronize,
        progress=progress,
    )
    found = {}
    for mode, owner in owners.items():
        owner.prepare(mode)
        eager = text_model(owner.model.backbone) if mode in ORIGINALS else None
        spent = budget.spend(partial(owner.ask, mode, case), device, eager)
        figures = summary(times[mode])
        whole = figures["p50_ms"] if device.type == "cuda" else spent.wall_ms
        row = {
            "scope": "e2e",
            **figures,
            "ms": [round(each, 3) for each in times[mode]],
            "first_ms": round(firsts[mode], 3),
            "samples": len(times[mode]),
            "rows_asked": case.tokens,
            "rows_computed": owner.rows_computed(mode, case),
            "kernels": spent.kernels,
            "busy_ms": round(spent.busy_ms, 3),
            "families": {family: round(each, 3) for family, each in spent.families.items()},
            "idle_ms": round(max(whole - spent.busy_ms, 0.0), 3),
        }
        found[mode] = row, scores[mode]
    return found


def largest_difference(case: Case, scores: torch.Tensor, base: torch.Tensor) -> dict[str, float]:
    """{largest_probability_difference} of two modes' scores [C] of a case, at temperature 1."""
    largest, first = 0.0, 0
    for each in case.records:
        span = slice(first, first + candidates(each))
        first = span.stop
        one, other = (
            torch.sigmoid(given[span]) if each["kind"] == "noul" else given[span].softmax(0)
            for given in (scores, base)
        )
        largest = max(largest, (one - other).abs().max().item())
    return {"largest_probability_difference": round(largest, 6)}


def _settle(owner: Loaded, mode: str, case: Case) -> None:
    """Ask until a captured graph answers, where the backend captures shapes while the device is idle."""
    for _ in range(_IDLE_LOOKS):
        if mode in ORIGINALS or owner.model.last_stats.get("graph_replays", 1):
            return
        time.sleep(_IDLE_SECONDS)
        owner.ask(mode, case)


def _modes(asked: Sequence[str] | None, device: torch.device) -> list[str]:
    """In MODES' order. UsageError for one that this machine cannot run."""
    cuda = device.type == "cuda"
    fla = (
        ""
        if cuda and best_delta_rule() == "fla"
        else (
            "mode fla needs flash-linear-attention: pip install flash-linear-attention"
            if cuda
            else f"mode fla is flash-linear-attention's kernels and needs a GPU, the device is {device}"
        )
    )
    graph = "" if cuda else f"mode graph replays CUDA Graphs and needs a GPU, the device is {device}"
    reasons = {"fla": fla, "graph": graph}
    if asked is None:
        return [mode for mode in MODES if not reasons.get(mode)]
    for mode in asked:
        if reasons.get(mode):
            raise UsageError(reasons[mode])
    return [mode for mode in MODES if mode in asked]


def _originals(modes: list[str]) -> tuple[str, ...]:
    return tuple(mode for mode in modes if mode in ORIGINALS)


def _release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _bytes(model: Any) -> int:
    return sum(each.numel() * each.element_size() for each in model.parameters())
