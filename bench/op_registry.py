"""What the ops benchmark compares: problems, their variants, and ways to compute a variant; and how one is measured."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from op_timer import Recording, Timer, replay_in_turn

from openjev_fast_plugin.console import say

# Sets of inputs, at most; and how many times the cache they are larger than together.
_MOST_SETS, _CACHES = 64, 2
# A relative L2 norm beyond this is no rounding.
_LARGEST_ERROR = 2e-2
# Replays of a variant: as many as asked for while they fit, at least three.
_SECONDS, _LEAST_REPLAYS = 0.5, 3
# Replays that choose between ways, while they take no longer than this together.
_TRIALS, _TRIAL_SECONDS = 5, 0.05


@dataclass(frozen=True)
class Prepared:
    """calls: one for each set of inputs. compare: from an output of the first to pairs (found, expected).

    rows: rows computed in a call.
    """

    calls: list[Callable[[], Any]]
    compare: Callable[[Any], list[tuple[torch.Tensor, torch.Tensor]]]
    rows: int


@dataclass(frozen=True)
class Way:
    """One way to compute a variant. prepare: puts the inputs where the calls need them, untimed."""

    how: str
    prepare: Callable[[], Prepared]


@dataclass(frozen=True)
class Variant:
    """ways: the fastest counts, or the first that runs where `first`.

    may_refuse: a way may raise RuntimeError since it does not take such inputs; the others then stand for the variant.
    skipped: why it is not run at all.
    """

    name: str
    ways: list[Way]
    first: bool = False
    may_refuse: bool = False
    skipped: str | None = None


@dataclass(frozen=True)
class Problem:
    """One op on one case. against: what rel_l2 compares with. moved: bytes a call must move, where that is defined."""

    op: str
    case: str
    against: str
    variants: list[Variant]
    moved: int | None = None


def tensors(nested: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples and lists."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, (tuple, list)):
        for item in nested:
            yield from tensors(item)


def bytes_of(nested: Any) -> int:
    """Bytes of the elements of all tensors in nested tuples and lists, each tensor once."""
    return sum(x.numel() * x.element_size() for x in {id(x): x for x in tensors(nested)}.values())


def copies(inputs: Any, cache_bytes: int) -> list[Any]:
    """Sets of equal inputs at different addresses, the given one first: more than fit twice in the cache, 64 at most.

    Slices of one tensor stay slices of one tensor. cache_bytes: 0 for the given set alone.
    """
    count = min(_MOST_SETS, -(-_CACHES * cache_bytes // max(bytes_of(inputs), 1)))
    return [inputs, *(copy.deepcopy(inputs) for _ in range(count - 1))]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in float64."""
    if found.shape != expected.shape:
        raise ValueError(f"shape {tuple(found.shape)} where {tuple(expected.shape)} is expected")
    expected = expected.double()
    return ((found.double() - expected).norm() / expected.norm()).item()


@dataclass
class _Chosen:
    way: Way
    prepared: Prepared
    recording: Recording
    us: float


def measure(problem: Problem, timer: Timer, repeats: int) -> list[dict[str, Any]]:
    """A results row for each variant; one that fails has an `error`, and the others their figures all the same."""
    rows, chosen = [], {}
    for variant in problem.variants:
        row: dict[str, Any] = {
            "op": problem.op,
            "case": problem.case,
            "variant": variant.name,
            **dict.fromkeys(("us", "rel_l2")),
            "against": problem.against,
            **dict.fromkeys(("how", "rows", "min_us", "max_us", "replays", "calls", "sets", "gb_s")),
            "refused": [],
            "skipped": variant.skipped,
            "error": None,
        }
        rows.append(row)
        if not variant.skipped:
            say(f"  {variant.name} ...")
        best = None if variant.skipped else _choose(variant, timer, row)
        if best is not None:
            chosen[variant.name] = best
            row |= {"how": best.way.how, "rows": best.prepared.rows, "sets": len(best.prepared.calls)}
            _compare(best.prepared, row)
        del best
    try:
        times = replay_in_turn(
            {name: best.recording for name, best in chosen.items()},
            {name: _replays(best, repeats) for name, best in chosen.items()},
        )
    except Exception as error:
        times = {}
        for row in rows:
            if row["variant"] in chosen:
                _fail(row, "replay", error)
    for row in rows:
        if row["variant"] in times:
            spans = times[row["variant"]]
            us = statistics.median(spans)
            row |= {"us": round(us, 2), "min_us": round(min(spans), 2), "max_us": round(max(spans), 2)}
            row |= {"replays": len(spans), "calls": chosen[row["variant"]].recording.calls}
            if problem.moved is not None:
                row["gb_s"] = round(problem.moved / us / 1e3, 1)
        say(f"  {describe(row)}")
    chosen.clear()
    gc.collect()
    timer.release()
    return rows


def describe(row: dict[str, Any]) -> str:
    """One line of progress about a finished row."""
    text = f"{row['op']} {row['case']} {row['variant']}: "
    if row["skipped"]:
        return f"{text}skipped, {row['skipped']}"
    if row["us"] is not None:
        text += f"{row['us']} us, relative L2 {row['rel_l2']}, {row['how']}, {row['replays']} replays "
    if row["error"]:
        text += f"FAILED: {row['error']}"
    return text


def _choose(variant: Variant, timer: Timer, row: dict[str, Any]) -> _Chosen | None:
    """The way that stands for a variant, recorded; None where none runs. Notes in the row what does not."""
    best: _Chosen | None = None
    for way in variant.ways:
        try:
            # A backend that refuses gives its reasons as warnings too.
            with warnings.catch_warnings(action="ignore" if variant.may_refuse else None):
                prepared = way.prepare()
                recording = timer.record(prepared.calls)
            us = _trial(recording)
        except Exception as error:
            if variant.may_refuse and isinstance(error, RuntimeError):
                row["refused"].append(f"{way.how}: {_first_line(error)}")
            else:
                _fail(row, way.how, error)
            continue
        if best is None or us < best.us:
            best = _Chosen(way, prepared, recording, us)
        del prepared, recording
        if variant.first:
            break
    if best is None and row["error"] is None:
        row["error"] = f"no way runs: {'; '.join(row['refused']) or 'none was asked for'}"
    return best


def _trial(recording: Recording) -> float:
    """Microseconds of a call, from as few replays as tell ways apart."""
    spans = [recording.replay()]
    while len(spans) < _TRIALS and 1e-6 * sum(spans) * recording.calls < _TRIAL_SECONDS:
        spans.append(recording.replay())
    return statistics.median(spans)


def _compare(prepared: Prepared, row: dict[str, Any]) -> None:
    """Put the largest relative error of any output into the row, and an error where it is no rounding."""
    try:
        error = max(relative_error(*pair) for pair in prepared.compare(prepared.calls[0]()))
    except Exception as failure:
        _fail(row, "comparison", failure)
        return
    row["rel_l2"] = float(f"{error:.3e}") if math.isfinite(error) else None
    if not error <= _LARGEST_ERROR:
        row["error"] = f"relative L2 {error:.3g} to {row['against']}, at most {_LARGEST_ERROR} is rounding"


def _replays(best: _Chosen, repeats: int) -> int:
    fit = int(1e6 * _SECONDS / max(best.us * best.recording.calls, 1e-3))
    return max(min(repeats, fit), min(repeats, _LEAST_REPLAYS))


def _fail(row: dict[str, Any], where: str, error: Exception) -> None:
    text = f"{where}: {type(error).__name__}: {_first_line(error)}"
    row["error"] = text if row["error"] is None else f"{row['error']}; {text}"
    say("".join(traceback.format_exception(error)).rstrip())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
