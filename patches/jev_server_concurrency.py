"""jev.server: requests side by side, for an engine that takes several at once (`Takeover.concurrent`).

Applied to one server, by the patch of `make_server`. Knows that `make_server` holds one lock around
`predictor.predict`, which its handler's methods close over, and that the handler answers what it does not know with
500. Changes:
- the lock lets everybody in. Where there is no such lock, or several, it stays and a log line says so;
- a full queue is answered 503 with `Retry-After`;
- a request whose client has hung up while it waited is not computed;
- when the device is lost, `/health` is 503 and `serve_forever` ends with SystemExit.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import select
import socket
import threading
import time
import types
import weakref
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..calls import Overloaded, answering
from . import log

if TYPE_CHECKING:
    from ..takeover import Takeover

# How long answers that are on their way have after the device is lost.
_LAST_ANSWERS_SECONDS = 0.5


class _OpenLock:
    """Has what a lock has, and never waits."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return True

    def release(self) -> None:
        pass

    def locked(self) -> bool:
        return False

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *error: object) -> None:
        pass


def apply(server: Any, taken: Takeover) -> None:
    """Change a server just made; one whose engine takes one request at a time stays as it is."""
    if not taken.concurrent:
        return
    handler = server.RequestHandlerClass
    _lift_lock(handler)
    _tell_calls(handler)
    _report_loss(handler, taken)
    _stop_when_lost(server, taken)


def _lift_lock(handler: type) -> None:
    locks: dict[int, types.CellType] = {}
    for function in vars(handler).values():
        for cell in getattr(function, "__closure__", None) or ():
            # An empty cell has no contents.
            with contextlib.suppress(ValueError):
                if isinstance(cell.cell_contents, type(threading.Lock())):
                    locks[id(cell)] = cell
    if len(locks) != 1:
        log.warning(
            "openjev-fast: requests are answered one at a time: expected one lock in the handler of jev.server, "
            "found %d",
            len(locks),
        )
        return
    (cell,) = locks.values()
    cell.cell_contents = _OpenLock()


def _tell_calls(handler: Any) -> None:
    original = handler.do_POST

    @functools.wraps(original)
    def do_POST(self: Any) -> Any:
        real, self.wfile = self.wfile, io.BytesIO()
        with answering(functools.partial(_hung_up, self.connection)) as call:
            try:
                return original(self)
            finally:
                answer, self.wfile = self.wfile.getvalue(), real
                if call.dropped:
                    self.close_connection = True
                elif answer:
                    real.write(answer if call.refused is None else _busy(answer, call.refused))

    handler.do_POST = do_POST


def _hung_up(connection: socket.socket) -> bool:
    """Whether the other side has closed or reset its connection. Does not wait, reads nothing."""
    try:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        # With a timeout set, recv alone would wait for it.
        return bool(poll.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


def _busy(response: bytes, refused: Overloaded) -> bytes:
    """An HTTP response turned into a 503; headers that do not speak of its body are kept."""
    head = response.partition(b"\r\n\r\n")[0].split(b"\r\n")
    version = head[0].partition(b" ")[0]
    body = json.dumps({"error": str(refused)}).encode()
    kept = [line for line in head[1:] if not line.lower().startswith((b"content-", b"retry-after:"))]
    lines = [
        version + b" 503 Service Unavailable",
        *kept,
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        b"Retry-After: %d" % refused.retry_after,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _report_loss(handler: Any, taken: Takeover) -> None:
    original = handler.do_GET

    @functools.wraps(original)
    def do_GET(self: Any) -> Any:
        if taken.broken is None or urlsplit(self.path).path != "/health":
            return original(self)
        body = json.dumps({"status": "failed", "error": taken.broken}).encode()
        self.send_response(503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    handler.do_GET = do_GET


def _stop_when_lost(server: Any, taken: Takeover) -> None:
    original = server.serve_forever

    @functools.wraps(original)
    def serve_forever(*args: Any, **arguments: Any) -> Any:
        result = original(*args, **arguments)
        if taken.broken is not None:
            raise SystemExit(f"openjev-fast: stopped, since the device is lost: {taken.broken}")
        return result

    server.serve_forever = serve_forever
    # The engine outlives a server that was closed.
    alive = weakref.ref(server)

    def stop() -> None:
        time.sleep(_LAST_ANSWERS_SECONDS)
        running = alive()
        if running is not None:
            running.shutdown()

    taken.on_broken(lambda reason: threading.Thread(target=stop, daemon=True).start())
