"""What commands say while they work: progress on standard error, results on standard output."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


class UsageError(ValueError):
    """What was given to a command is wrong: a file, a folder, or a backend for this model; exit status 2."""


def say(message: str) -> None:
    """One line of progress."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def step(message: str) -> Iterator[None]:
    """Announce a step, show on a terminal how long it has been running, and say how long it took."""
    start = time.monotonic()
    done = threading.Event()
    live = sys.stderr.isatty()

    def tick() -> None:
        while not done.wait(1.0):
            print(f"\r{message} ... {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)

    ticker = threading.Thread(target=tick, daemon=True)
    if live:
        ticker.start()
    else:
        say(f"{message} ...")
    try:
        yield
    finally:
        done.set()
        if live:
            ticker.join()
        erase = "\r" if live else ""
        say(f"{erase}{message}: {time.monotonic() - start:.1f} s")


def each(items: Sequence[Item], message: str, unit: str) -> Iterable[Item]:
    """The items in turn: on a terminal with a progress bar, elsewhere with the lines of a `step`."""
    if sys.stderr.isatty():
        # Commands that show no bar need only the standard library.
        from tqdm import tqdm

        yield from tqdm(items, message, unit=unit, disable=not items)
    elif items:
        with step(f"{message}: {len(items)} {unit}s"):
            yield from items
