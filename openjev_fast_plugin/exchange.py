"""One HTTP request while it is answered, for the code that answers it. Standard library only.

Upstream's handler runs the whole request in its thread, so `current()` there is the request's own exchange; the
scheduler, which may answer it from another thread, takes the exchange along.
"""

from __future__ import annotations

import contextlib
import contextvars
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# What nginx logs for a client that closed its connection before the answer.
CLIENT_CLOSED_REQUEST = 499
# The state of a server that must not answer any more.
FAILED = "failed"
_CLOSED = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class Refused(Exception):
    """A request that is answered with `status` and `{"error": error}`.

    headers: further header fields of that answer.
    """

    def __init__(self, status: int, error: str, headers: dict[str, str] | None = None):
        super().__init__(error)
        self.status, self.error, self.headers = status, error, headers or {}


class Unavailable(Refused):
    """The server cannot take this request now: 503. `retry_after`: whole seconds, for `Retry-After`."""

    def __init__(self, error: str, retry_after: int = 1):
        super().__init__(503, error, {"Retry-After": str(retry_after)})


class ClientGone(Exception):
    """The client has closed its connection: nobody waits for this answer."""


@dataclass(eq=False)
class Exchange:
    """A request and what became of it.

    method, path: of the request line, empty until it is read; the path without its query.
    status: of the answer; 499 where the client left first, 0 where the connection ended without an answer.
    request_bytes: of the body as sent, before any decoding. response_bytes: with the header fields.
    started: when its first byte was there, in seconds of `time.time()`. seconds: from then to the end.
    """

    connection: socket.socket
    client: str
    # With the `state` it is in.
    server: Any
    method: str = ""
    path: str = ""
    status: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    started: float = field(default_factory=time.time)
    seconds: float = 0.0
    # What it is answered with instead of the handler's reply; and that nobody is there to answer.
    refused: Refused | None = None
    client_left: bool = False

    def client_gone(self) -> bool:
        """Whether the client has closed its side of the connection. One system call; from any thread."""
        poll = select.poll()
        try:
            poll.register(self.connection, _CLOSED)
        except ValueError:
            # Closed on our side.
            return True
        return bool(poll.poll(0))

    def check(self) -> None:
        """Raise ClientGone or Unavailable where there is no point in computing the answer."""
        if self.client_gone():
            raise ClientGone
        if self.server.state == FAILED:
            raise Unavailable("the server is stopping")


_current: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar("exchange", default=None)


@contextlib.contextmanager
def answering(about: Exchange) -> Iterator[None]:
    """What runs inside, on this thread, answers this exchange."""
    token = _current.set(about)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Exchange | None:
    """The exchange this thread answers; None where no HTTP request is behind a call."""
    return _current.get()
