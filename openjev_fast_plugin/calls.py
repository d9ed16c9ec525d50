"""What a server and a backend's scheduler tell each other about one request. Standard library only.

A server wraps each request in `answering`; without it a request is never dropped and nobody waits for `refused`.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass


class Overloaded(RuntimeError):
    """The queue is full: HTTP 503. `retry_after`: whole seconds after which to ask again, at least 1."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class ClientGone(RuntimeError):
    """The client hung up before its request was computed; there is nobody to answer."""


class DeviceBroken(RuntimeError):
    """The device failed in a way that only a new process recovers from; nothing is computed any more."""


@dataclass
class Call:
    """One request that a server is answering.

    gone: whether its client has hung up; asked while the request waits, from any thread, and must not block.
    refused: set when the queue was full. dropped: set when `gone` was true before the request was computed.
    """

    gone: Callable[[], bool]
    refused: Overloaded | None = None
    dropped: bool = False


_current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)


@contextlib.contextmanager
def answering(gone: Callable[[], bool]) -> Iterator[Call]:
    """What is scored inside, on this thread, belongs to the `Call` given."""
    call = Call(gone)
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)


def current() -> Call | None:
    """The call this thread is answering, None outside `answering`."""
    return _current.get()
