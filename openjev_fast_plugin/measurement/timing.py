"""The interleaved timer of whole forwards, and the figures a results row holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

# Rounds that a slow call gets in any case.
LEAST_ROUNDS = 3


def interleaved(
    variants: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    warmups: int,
    seconds: float = float("inf"),
    prepare: Callable[[str], None] = lambda name: None,
    synchronize: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, list[float]]:
    """Milliseconds of each variant, measured in turn so that a slow spell of the machine meets them all.

    variants: name to a call that does the work. repeats: timed rounds, each of one call per variant.
    warmups: untimed rounds first. seconds: no further round starts after so many of timed ones, once there are
    LEAST_ROUNDS. prepare: called untimed before every call, with the variant's name. synchronize: waits for the device
    before and after a call.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    begun = time.perf_counter()
    for round_ in range(warmups + repeats):
        if round_ == warmups:
            begun = time.perf_counter()
        if round_ - warmups >= LEAST_ROUNDS and time.perf_counter() - begun >= seconds:
            break
        for name, call in variants.items():
            prepare(name)
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            if round_ >= warmups:
                times[name].append(1e3 * (time.perf_counter() - start))
        timed = round_ + 1 - warmups
        progress(f"warm-up {round_ + 1} of {warmups}" if timed <= 0 else f"round {timed} of {repeats}")
    return times


def summary(times: list[float]) -> dict[str, float]:
    """The three figures a results row holds, in milliseconds to the microsecond."""
    return {
        "p50_ms": round(statistics.median(times), 3),
        "min_ms": round(min(times), 3),
        "max_ms": round(max(times), 3),
    }
