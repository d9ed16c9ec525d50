"""The order of a verification: the original first, then the backend, and what is compared on the way.

One model is loaded at a time: the original in its own dtype and then, layer by layer, in float32; after it the backend.
What is compared later waits on the host.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from openjev_fast_plugin import engine as fast_engine
from openjev_fast_plugin import plugin
from openjev_fast_plugin.console import UsageError, step
from openjev_fast_plugin.loading import load_original, usable_device
from openjev_fast_plugin.padded import PaddedBatch, padded_forward
from openjev_fast_plugin.settings import BackendError, Settings
from openjev_fast_plugin.takeover import accelerate
from openjev_fast_plugin.weights import Shapes, text_model

from . import answers as answer_level
from . import ops as op_level
from . import states as state_level
from .cases import Case, compile_requests, default_requests, read_requests, tokenize
from .observe import Observed, flat_scores, in_float32, observe, observe_original
from .packed import PackedRun, checked_layers, own_rows
from .preparation import Fingerprints, check_tree, fused_weights, module_weights

LEVELS = ("preparation", "ops", "states", "answers")
BACKENDS = ("fast", "graph")
# Of the host's free memory, for the hidden states that wait to be compared.
_HOST_SHARE = 0.5
# What a graph that is captured when the device is idle gets to be captured in.
_IDLE_SECONDS = 1.0

T = TypeVar("T")


@dataclass
class _Original:
    """What is kept of the original: enough to hold another model against it.

    kept: for each case, whether its hidden states are. golden: what the float32 forward said, None where it is the
        original's own.
    """

    shapes: Shapes
    dtype: torch.dtype
    weight_bytes: int
    cases: list[Case]
    kept: list[bool]
    fingerprints: Fingerprints
    observed: list[Observed] = field(default_factory=list)
    golden: list[Observed | None] = field(default_factory=list)

    @property
    def in_float32(self) -> bool:
        return self.dtype == torch.float32

    def states_bytes(self, case: Case) -> int:
        """Host memory of a case's hidden states: the original's and, where they are others, the float32 ones."""
        item = 4 if self.in_float32 else self.dtype.itemsize + 4
        return case.rows * len(self.shapes.layer_types) * self.shapes.hidden * item


@dataclass
class _Level:
    """What one level found. failures: {place, what, found, bound, at_least}; no figure: found and bound are None."""

    details: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    skipped: str | None = None

    def fail(
        self,
        place: str,
        what: str,
        found: float | None = None,
        bound: float | None = None,
        at_least: bool = False,
    ) -> None:
        """at_least: found had to be no less than the bound, not no more."""
        self.failures.append(
            {"place": place, "what": what, "found": found, "bound": bound, "at_least": at_least}
        )

    def described(self) -> dict[str, Any]:
        passed = None if self.skipped else not self.failures
        return {"passed": passed, "skipped": self.skipped, **self.details, "failures": self.failures}


def run(
    checkpoint: Path,
    requests: list[Path] | None = None,
    device: str | None = None,
    backend: str = "fast",
    float32: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Verify a backend on a checkpoint.

    checkpoint: a checkpoint package. requests: JSON files of requests, None for the example and some drawn from seed.
    device: a torch device, None for the first GPU where there is one and the CPU elsewhere.
    backend: one of BACKENDS. float32: convert both models to it first, for backend `fast`.

    Returns what the report holds: {passed, failed_level, checkpoint, backend, dtype, requests, memory, tolerances,
    levels: {name: {passed (None: skipped), skipped, failures, ...}}}. Raises UsageError where the checkpoint, a
    request or the backend cannot be used.
    """
    device = usable_device(device)
    if float32 and backend != "fast":
        raise UsageError(
            f"--float32 verifies backend fast; {backend} runs what kernels the original finds, rounded or not"
        )
    temperature = _temperature(checkpoint)
    compiled = compile_requests(read_requests(requests) if requests else default_requests(seed))
    free = fast_engine.free_memory(torch.device(device))
    original = _observe_original(checkpoint, device, float32, backend, compiled)
    with step(f"loading the checkpoint for backend {backend}"):
        model = _in_dtype(load_original(checkpoint, device), float32)
        try:
            accelerate(model, backend, Settings.read())
        except BackendError as error:
            raise UsageError(str(error)) from error
    engine = model.openjev_fast.engine
    levels = {name: _Level() for name in LEVELS}
    _check_prompts(levels["preparation"], original)
    if backend == "fast":
        _check_weights(levels["preparation"], original, fused_weights(engine.weights))
        _run_packed(levels, original, engine)
    else:
        _check_weights(levels["preparation"], original, module_weights(model.backbone.model))
        levels["ops"].skipped = "this backend runs the original's modules"
        _run_merged(levels["states"], original, model)
    _check_answers(levels["answers"], original, model, temperature)
    described = {name: level.described() for name, level in levels.items()}
    failed = next((name for name in LEVELS if described[name]["passed"] is False), None)
    return {
        "passed": failed is None,
        "failed_level": failed,
        "checkpoint": str(checkpoint),
        "backend": {"name": backend, **engine.describe()},
        "dtype": str(original.dtype).removeprefix("torch."),
        "requests": [
            {
                "name": case.name,
                "prompts": len(case.sequences),
                "tokens": case.tokens,
                "rows": case.rows,
                "states_compared": kept,
            }
            for case, kept in zip(original.cases, original.kept, strict=True)
        ],
        "memory": {
            "order": "one model after the other",
            "free_bytes": free,
            "model_bytes": original.weight_bytes,
            "host_bytes": sum(
                original.states_bytes(case)
                for case, kept in zip(original.cases, original.kept, strict=True)
                if kept
            ),
        },
        "tolerances": tolerances(original.dtype),
        "levels": described,
    }


def tolerances(dtype: torch.dtype) -> dict[str, str]:
    """Each level's, in words."""
    if dtype == torch.float32:
        close = f"{op_level.FLOAT32_RTOL:g} of its own and {op_level.FLOAT32_ATOL:g} of the output's largest value"
        return {
            "preparation": "ids, paths and weights equal; a merged row within 1e-5 of its largest element",
            "ops": f"an element off by at most {close}",
            "states": f"relative L2 to the original at most {state_level.FLOAT32_DISTANCE:g} after every layer",
            "answers": f"probabilities within {answer_level.FLOAT32_DIFFERENCE:g}; a decision changes only where the "
            "original's margin is smaller; asked twice, the same bits",
        }
    return {
        "preparation": "ids, paths and weights equal; a merged row within two roundings of its largest element",
        "ops": f"{op_level.EQUAL_SHARE:.0%} of elements equal and the others as far off as the roundings that chain "
        f"allow; products and attention at most {op_level.ERROR_RATIO:g} times as far from float64 as PyTorch's own",
        "states": f"after every layer a row is at most {state_level.RATIO:g} times as far from a float32 forward as "
        f"the original's, in the geometric mean, and no prompt's rows more than {state_level.PROMPT_RATIO:g} times",
        "answers": f"probabilities within {answer_level.DIFFERENCE:g} times the original's own largest distance to "
        f"float32, or {answer_level.LEAST_DIFFERENCE:g}; a decision changes only where the original's margin is at "
        f"most {answer_level.MARGIN:g} times that distance, or {answer_level.LEAST_MARGIN:g}; asked twice, the same "
        "bits",
    }


# The original


def _observe_original(
    checkpoint: Path,
    device: str,
    float32: bool,
    backend: str,
    compiled: list[tuple[str, list[dict[str, Any]]]],
) -> _Original:
    """backend: UsageError where it refuses the model, before anything takes time."""
    with step("loading the checkpoint for the original"):
        model = _in_dtype(load_original(checkpoint, device), float32)
    reason = plugin.find(backend).refusal(model)
    if reason is not None:
        raise UsageError(f"backend {backend!r} cannot take this model: {reason}")
    text = text_model(model.backbone)
    cases = tokenize(compiled, model.tokenizer, model.max_length)
    with step("reading the original's weights"):
        fingerprints = Fingerprints(model.backbone)
    original = _Original(
        shapes=Shapes.of(text.config),
        dtype=text.embed_tokens.weight.dtype,
        weight_bytes=sum(each.numel() * each.element_size() for each in model.backbone.parameters()),
        cases=cases,
        kept=[],
        fingerprints=fingerprints,
    )
    room = int(_HOST_SHARE * fast_engine.free_memory(torch.device("cpu")))
    for case in cases:
        size = original.states_bytes(case)
        original.kept.append(size <= room)
        room -= size if size <= room else 0
    pairs = list(zip(cases, original.kept, strict=True))
    # Where all is float32 already, this keeps other packages' kernels from multiplying it as tf32.
    with in_float32(model) if original.in_float32 else nullcontext():
        for case, kept in _progress(pairs, "The original"):
            original.observed.append(observe_original(model, case, kept))
    if original.in_float32:
        original.golden = [None] * len(cases)
    else:
        with in_float32(model):
            for case, kept in _progress(pairs, "The original in float32"):
                original.golden.append(observe_original(model, case, kept))
    del model, text
    gc.collect()
    torch.cuda.empty_cache()
    return original


def _in_dtype(model: Any, float32: bool) -> Any:
    return model.float() if float32 else model


def _temperature(checkpoint: Path) -> float:
    try:
        return float(json.loads((checkpoint / "temperature.json").read_text(encoding="utf-8"))["temperature"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{checkpoint} is not a checkpoint package: {error!r}") from error


def _progress(items: Iterable[T], what: str) -> Iterable[T]:
    """The bar appears where this takes longer than two seconds."""
    return tqdm(items, what, delay=2)


# The levels


def _check_prompts(level: _Level, original: _Original) -> None:
    for case, observed in zip(original.cases, original.observed, strict=True):
        if observed.wrong_ids is not None:
            level.fail(f"prompts of {case.name}", observed.wrong_ids)
    level.details["prompts"] = sum(len(case.sequences) for case in original.cases)


def _check_weights(level: _Level, original: _Original, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    with step("comparing weights"):
        for name, difference in original.fingerprints.differences(weights):
            level.fail(f"weights, {name}", difference)
    level.details["weight_rows"] = len(original.fingerprints)


def _run_packed(levels: dict[str, _Level], original: _Original, engine: Any) -> None:
    """Trees, ops and hidden states of the packed forward."""
    kinds = original.shapes.layer_types
    packed = PackedRun(engine.weights, checked_layers(kinds))
    distances = state_level.Distances(kinds, original.in_float32)
    for index, case in enumerate(_progress(original.cases, "The packed forward")):
        forest = fast_engine.build_forest(case.sequences)
        wrong = check_tree(case, forest)
        for what in wrong:
            levels["preparation"].fail(f"tree of {case.name}", what)
        # What an op would be asked over a wrong tree has no reference.
        if wrong or case.rows > engine.max_rows:
            original.kept[index] = False
            continue
        packed.check_ops(case.name, forest)
        if not original.kept[index]:
            continue
        rows = own_rows(case.new_from, forest)
        every = torch.from_numpy(np.concatenate(rows)).to(engine.weights.device)

        def on_state(
            layer: int, state: torch.Tensor, index: int = index, every: torch.Tensor = every
        ) -> None:
            original_of_case, golden = original.observed[index], original.golden[index]
            distances.add(layer, original.cases[index], state[every], original_of_case, golden)

        packed.read_states(forest, on_state)
    levels["preparation"].details["trees"] = len(original.cases)
    _describe_ops(levels["ops"], packed)
    _describe_states(levels["states"], distances, original)


def _run_merged(level: _Level, original: _Original, model: Any) -> None:
    """Hidden states of the original's modules with merged adapters, run eagerly on the batches the original ran."""
    merged, device = model.backbone.model, model.head.weight.device
    distances = state_level.Distances(original.shapes.layer_types, original.in_float32)
    for index, case in enumerate(_progress(original.cases, "The merged modules")):
        if not original.kept[index]:
            continue

        def scores(start: int, stop: int, case: Case = case) -> torch.Tensor:
            batch = PaddedBatch.of(case.sequences[start:stop], model.tokenizer.pad_token_id)
            return padded_forward(merged, model.head, batch.unpack(batch.pack().to(device)))

        found = observe(merged, scores, case, with_states=True)
        for layer, state in enumerate(found.states):
            distances.add(layer, case, state, original.observed[index], original.golden[index])
    _describe_states(level, distances, original)


def _describe_ops(level: _Level, packed: PackedRun) -> None:
    if not packed.results:
        level.skipped = "no request has a sound tree that fits into one forward"
    level.details["layers"] = packed.layers
    level.details["ops"] = {name: result.described() for name, result in packed.results.items()}
    for name, place, measure in packed.failures:
        figures = measure.found, measure.bound, measure.at_least
        level.fail(f"{name}, {measure.output}, {place}", measure.what, *figures)


def _describe_states(level: _Level, distances: state_level.Distances, original: _Original) -> None:
    if not any(original.kept):
        level.skipped = (
            "the hidden states of no request fit into half of the host's free memory, or into one forward"
        )
        return
    level.details["layers"] = rows = distances.rows()
    for row in rows:
        place = f"layer {row['layer']} ({row['kind']}), most in {row['furthest_prompt']}"
        if original.in_float32:
            figures = [("relative L2 to the original", row["relative_l2"], state_level.FLOAT32_DISTANCE)]
        else:
            figures = [
                ("a row's distance to float32 over the original's", row["ratio"], state_level.RATIO),
                (
                    "a prompt's distance to float32 over the original's",
                    row["furthest_ratio"],
                    state_level.PROMPT_RATIO,
                ),
            ]
        for what, found, bound in figures:
            if not found <= bound:
                level.fail(place, what, found, bound)


def _check_answers(level: _Level, original: _Original, model: Any, temperature: float) -> None:
    def ask(case: Case) -> np.ndarray | None:
        try:
            return flat_scores(case.records, model(case.records)).double().cpu().numpy()
        except Exception as error:
            # No answer is a wrong one, whatever the reason.
            level.fail(case.name, f"the backend raised {error!r}")
            return None

    first = [ask(case) for case in _progress(original.cases, "Asking the backend")]
    if "graph_replays" in model.last_stats:
        time.sleep(_IDLE_SECONDS)
    replayed = 0
    found: list[answer_level.Answer] = []
    for index, case in enumerate(_progress(original.cases, "Asking the backend again")):
        before = first[index]
        again = None if before is None else ask(case)
        if before is None or again is None:
            continue
        replayed += bool(model.last_stats.get("graph_replays"))
        if not np.array_equal(before, again):
            level.fail(case.name, "asked twice, scores differ by", float(np.abs(before - again).max()), 0.0)
        golden = original.golden[index]
        found += answer_level.answers(
            case,
            temperature,
            original.observed[index].scores,
            again,
            None if golden is None else golden.scores,
        )
    judged = answer_level.judge(found, original.in_float32)
    for failure in judged.pop("failures"):
        level.fail(**failure)
    level.details.update(judged, asked=len(original.cases), replayed=replayed)
