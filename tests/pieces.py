"""Work that is cut into pieces, as generators, done at once."""

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")


def finished(running: Generator[None, None, Result]) -> tuple[Result, int]:
    """What a generator returns, and how many pieces it was cut into."""
    pieces = 0
    while True:
        try:
            next(running)
        except StopIteration as done:
            return done.value, pieces
        pieces += 1
