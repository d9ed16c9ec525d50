"""Open-Jev's HTTP server, with bounds on what its clients can make it hold, and for how long. Imports no torch.

`bound` changes one server object and the handler class that was made for it. Routes, checks and answers stay what that
handler writes; around it, a request is read whole before the handler starts and its reply leaves in one write.

- Connections are kept open (HTTP/1.1), at most `Limits.connections` of them: beyond, the one that was idle longest
  makes room; where none is idle, the new one is told 503.
- Header fields and bodies have deadlines (408) and sizes; chunked, gzip and zstd bodies reach the handler as plain
  ones, never longer than its own limit (413, in its own words).
- A client that has left is not waited for: `Exchange.client_gone`.
- SIGTERM, or the first Ctrl-C, stops accepting, lets what was asked before finish, and returns from `serve_forever`;
  the second ends the process. `fail` does the same with exit status 1.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import io
import json
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from . import exchange, message_body
from .exchange import FAILED, ClientGone, Exchange, Refused, Unavailable
from .kept_threads import KeptThreads

log = logging.getLogger("openjev_fast")

READY, DRAINING = "ready", "draining"
# How soon a stop is noticed.
_POLL_SECONDS = 0.1
# Threads that wait for the next connection, and for how many seconds.
_KEPT_THREADS, _KEPT_SECONDS = 16, 60.0


@dataclass(frozen=True)
class Limits:
    """What one server spends on its clients; times in seconds.

    connections: open at a time; further ones, `refusals` of them, are told 503, and any others closed.
    backlog: connections the kernel accepts ahead of us.
    idle: between two requests, longer than the 30 s that clients keep a connection for.
    header_seconds, header_bytes, body_seconds: from the first byte of a request to the end of its header fields; then
        to the end of its body.
    body_bytes: of all bodies that are being read or answered, as sent and as decoded; at least one compressed body of
        the largest size has room. Parsed, they take up to 32 times that.
    reply_seconds: until the client has taken a reply.
    linger_seconds, pause_seconds: how long a client may go on sending what nobody reads, and be silent meanwhile,
        before the connection is closed on it; closed at once, the reply would be lost.
    drain_seconds, failed_seconds: how long a stop waits for answers; and where the device failed.
    """

    connections: int = 512
    refusals: int = 64
    backlog: int = 256
    idle: float = 75.0
    header_seconds: float = 10.0
    header_bytes: int = 128 * 1024
    body_seconds: float = 60.0
    body_bytes: int = 64 * 1024 * 1024
    reply_seconds: float = 30.0
    linger_seconds: float = 30.0
    pause_seconds: float = 2.0
    drain_seconds: float = 25.0
    failed_seconds: float = 5.0


@dataclass(eq=False)
class _Place:
    """An open connection. idle_since: None while a request is read or answered."""

    connection: socket.socket
    # Over the limit: it is told so.
    surplus: bool
    idle_since: float | None = None
    closing: bool = False


class _Input(io.RawIOBase):
    """What a client sends, until `deadline` (of `time.monotonic()`; None: what is there now).

    allowance: bytes that may still be received; None: no limit.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self.deadline: float | None = None
        self.allowance: int | None = None
        self.timed_out = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self.allowance is not None:
            if not self.allowance:
                # What BaseHTTPRequestHandler answers 431 to.
                raise http.client.HTTPException("the header fields are too long")
            buffer = memoryview(buffer)[: self.allowance]
        remaining = 0.0 if self.deadline is None else self.deadline - time.monotonic()
        try:
            if remaining <= 0 and self.deadline is not None:
                raise TimeoutError("timed out")
            self._connection.settimeout(remaining)
            count = self._connection.recv_into(buffer)
        except BlockingIOError:
            return None
        except TimeoutError:
            self.timed_out = True
            raise
        if self.allowance is not None:
            self.allowance -= count
        return count


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    """The time as a header field has it, once a second."""
    return email.utils.formatdate(second, usegmt=True)


class _Handler(BaseHTTPRequestHandler):
    """Stands before the handler class of a server: reads its requests, sends its replies."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._input = _Input(self.connection)
        self._stream = io.BufferedReader(self._input)
        self.rfile = self._stream
        self.wfile: Any = io.BytesIO()
        self._place: _Place = self.server.place(self.connection)
        self._sent: set[str] = set()

    def handle_one_request(self) -> None:
        if not self._await_request():
            self.close_connection = True
            return
        about = self.exchange = Exchange(self.connection, str(self.client_address[0]), self.server)
        start = time.monotonic()
        self._unavailable = self.server.unavailable(self._place)
        # For a reply to a request of which nothing is known yet.
        self.requestline, self.command, self.request_version = "", "", self.protocol_version
        self._expects_100, self._unread = False, True
        self.wfile = io.BytesIO()
        try:
            self._answer_request()
            if self._input.timed_out:
                about.refused = Refused(408, "the request took too long to arrive")
            if about.refused is not None:
                self._refuse(about.refused)
            if not about.client_left:
                self._send_reply(self.wfile.getvalue())
        finally:
            if not about.response_bytes:
                self.close_connection = True
                about.status = exchange.CLIENT_CLOSED_REQUEST if about.client_left else 0
            about.seconds = time.monotonic() - start
            self.server.finished(about)
        if self.close_connection and self._unread and not about.client_left:
            self._linger()

    def _answer_request(self) -> None:
        """Have the request read and answered, into `wfile`."""
        self._held = 0
        try:
            with exchange.answering(self.exchange):
                super().handle_one_request()
        except ConnectionError as error:
            log.debug("openjev-fast: a connection broke off: %s", error)
            self.exchange.client_left = True
        finally:
            self.rfile = self._stream
            self.server.release(self._held)

    def _await_request(self) -> bool:
        """Wait for the first byte of a request; False where the client has no more."""
        self._input.deadline = self._input.allowance = None
        self._input.timed_out = False
        try:
            if not self._starts():
                self.server.mark_idle(self._place)
                limits = self.server.limits
                patience = limits.header_seconds if self._place.surplus else limits.idle
                self._input.deadline = time.monotonic() + patience
                if not self._starts():
                    return False
        except OSError:
            return False
        self.server.mark_busy(self._place)
        self._input.deadline = time.monotonic() + self.server.limits.header_seconds
        self._input.allowance = self.server.limits.header_bytes
        return True

    def _starts(self) -> bool:
        # Some clients send an empty line more after a body.
        while (first := self._stream.peek(1)[:1]) in (b"\r", b"\n"):
            self._stream.read(1)
        return bool(first)

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        self._input.allowance = None
        self.exchange.method, self.exchange.path = self.command, self.path.partition("?")[0]
        if self.request_version == "HTTP/0.9":
            self._unread = False
            return True
        try:
            if self._unavailable is not None and (self._place.surplus or self.command == "POST"):
                raise self._unavailable
            self._read_body()
        except Refused as refused:
            self.exchange.refused = refused
        return self.exchange.refused is None

    def _read_body(self) -> None:
        """Read the body; `rfile` and the header fields then say what it would have been unchunked and uncompressed."""
        headers, limit = self.headers, self.server.max_body_bytes
        declared, chunked = headers.get("Content-Length", "").strip(), "Transfer-Encoding" in headers
        pieces = message_body.pieces(self._stream, headers)
        if pieces is None or (not chunked and int(declared or 0) > limit):
            # The handler says what is wrong with that length. What follows is not read.
            self.rfile, self.close_connection = io.BytesIO(), True
            return
        self._input.deadline = time.monotonic() + self.server.limits.body_seconds
        if self._expects_100:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        try:
            whole = self._collect(self._counted(pieces), body)
        except message_body.CutShort:
            self._unread, self.close_connection = False, True
            if chunked:
                raise Refused(422, "the body ends inside a chunk") from None
            self.rfile = io.BytesIO(body)
            return
        self._unread = not whole
        if not whole:
            self.close_connection = True
        codings = message_body.content_codings(headers)
        if codings and body:
            encoded, body = bytes(body), bytearray()
            whole = self._collect(message_body.decoded(encoded, codings), body)
        del headers["Content-Encoding"], headers["Transfer-Encoding"], headers["Content-Length"]
        if declared or chunked:
            # The handler refuses what is too long, by its length.
            headers["Content-Length"] = str(len(body) if whole else limit + 1)
        self.rfile = io.BytesIO(body)

    def _counted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.exchange.request_bytes += len(piece)
            yield piece

    def _collect(self, pieces: Iterable[bytes], body: bytearray) -> bool:
        """Add the pieces to `body`; False, and an empty body, where they are more than the handler takes."""
        for piece in pieces:
            if len(body) + len(piece) > self.server.max_body_bytes:
                body.clear()
                return False
            self.server.hold(len(piece))
            self._held += len(piece)
            body += piece
        return True

    def handle_expect_100(self) -> bool:
        self._expects_100 = True
        return True

    def do_GET(self) -> None:
        metrics = self.server.taken.metrics
        if metrics is None or urlsplit(self.path).path != "/metrics":
            return super().do_GET()  # type: ignore[misc]
        self._answer(200, *metrics())

    # The reply

    def send_response_only(self, code: int, message: str | None = None) -> None:
        self.exchange.status, self._sent = int(code), set()
        super().send_response_only(code, message)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(timestamp) if timestamp is not None else _date(int(time.time()))

    def send_header(self, keyword: str, value: str) -> None:
        self._sent.add(keyword.lower())
        super().send_header(keyword, value)

    def end_headers(self) -> None:
        if self.server.state != READY or "content-length" not in self._sent:
            self.close_connection = True
        if "connection" not in self._sent:
            if self.close_connection:
                self.send_header("Connection", "close")
            elif self.request_version == "HTTP/1.0":
                self.send_header("Connection", "keep-alive")
        super().end_headers()

    def _refuse(self, refused: Refused) -> None:
        """Replace whatever has been written as the reply."""
        if self._unread:
            self.close_connection = True
        self.wfile = io.BytesIO()
        content = json.dumps({"error": refused.error}).encode()
        self._answer(refused.status, content, "application/json", refused.headers)

    def _answer(
        self, status: int, content: bytes, content_type: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        fields = {"Content-Type": content_type, "Content-Length": str(len(content)), **(headers or {})}
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _send_reply(self, reply: bytes) -> None:
        try:
            self._send(reply)
        except OSError as error:
            log.debug("openjev-fast: a client did not take its reply: %s", error)
            self.exchange.client_left = self.close_connection = True
        else:
            self.exchange.response_bytes = len(reply)

    def _send(self, data: bytes) -> None:
        # For sendall this is one deadline for all of it.
        self.connection.settimeout(self.server.limits.reply_seconds)
        self.connection.sendall(data)

    def _linger(self) -> None:
        """Read on, so that the reply is not lost: closing with bytes unread resets the connection."""
        # A place that may be taken away, and that no stop waits for.
        self.server.mark_idle(self._place)
        end = time.monotonic() + self.server.limits.linger_seconds
        self._input.allowance = None
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while True:
                self._input.deadline = min(end, time.monotonic() + self.server.limits.pause_seconds)
                if not self._stream.read1(message_body.PIECE):
                    return


class _StopServing(Exception):
    """Leaves the loop of `serve_forever`."""


class _Server(ThreadingHTTPServer):
    """Stands before the class of a server."""

    def bind_limits(self, taken: Any, max_body_bytes: int, limits: Limits) -> None:
        """What `__init__` would do, for an object that is there already."""
        self.taken, self.max_body_bytes = taken, max_body_bytes
        self.limits = replace(limits, body_bytes=max(limits.body_bytes, 2 * max_body_bytes))
        self.state, self._failure = READY, ""
        self._places: dict[socket.socket, _Place] = {}
        self._changed = threading.Condition()
        self._body_bytes = 0
        self._backlog_is_empty = False
        self._kept_threads = KeptThreads("openjev-fast-connection", _KEPT_THREADS, _KEPT_SECONDS)
        self.request_queue_size = limits.backlog
        # A second `listen` changes the length of the queue.
        self.socket.listen(limits.backlog)

    # Connections

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            admitted = self._admit(request)
        if admitted:
            self._kept_threads.run(partial(self.process_request_thread, request, client_address))
        else:
            self.shutdown_request(request)

    def _admit(self, request: socket.socket) -> bool:
        surplus = False
        if len(self._places) >= self.limits.connections + self.limits.refusals:
            return False
        if len(self._places) >= self.limits.connections:
            held = [place for place in self._places.values() if not (place.surplus or place.closing)]
            if len(held) >= self.limits.connections:
                idle = [place for place in held if place.idle_since is not None]
                surplus = not idle
                if idle:
                    self._close_idle(min(idle, key=lambda place: place.idle_since or 0.0))
        self._places[request] = _Place(request, surplus)
        return True

    def _close_idle(self, place: _Place) -> None:
        # Its thread reads the end of the stream, or a request that has just arrived, which is answered.
        place.closing = True
        with contextlib.suppress(OSError):
            place.connection.shutdown(socket.SHUT_RD)

    def close_request(self, request: Any) -> None:
        with self._changed:
            self._places.pop(request, None)
            self._changed.notify_all()
        super().close_request(request)

    def place(self, connection: socket.socket) -> _Place:
        return self._places[connection]

    def mark_idle(self, place: _Place) -> None:
        with self._changed:
            place.idle_since = time.monotonic()
            self._changed.notify_all()

    def mark_busy(self, place: _Place) -> None:
        with self._changed:
            place.idle_since = None

    # Requests

    def unavailable(self, place: _Place) -> Unavailable | None:
        """Why a request that starts now on this connection is not taken."""
        if place.surplus:
            return Unavailable("too many connections")
        return None if self.state == READY else Unavailable("the server is stopping")

    def hold(self, count: int) -> None:
        """Count bytes of a body; raises Unavailable where all bodies together are too much."""
        with self._changed:
            if self._body_bytes + count > self.limits.body_bytes:
                raise Unavailable("too many large requests at the same time")
            self._body_bytes += count

    def release(self, count: int) -> None:
        with self._changed:
            self._body_bytes -= count

    def finished(self, about: Exchange) -> None:
        for observe in self.taken.observers:
            observe(about)

    # Stopping

    def stop(self, failure: str = "") -> None:
        """Refuse what is new, let the rest finish, leave `serve_forever`. Takes no lock: signal handlers call it."""
        if failure and not self._failure:
            self._failure, self.state = failure, FAILED
        elif self.state == READY:
            self.state = DRAINING

    def serve_forever(self, poll_interval: float = _POLL_SECONDS) -> None:
        """Returns after `shutdown`, as ever, and after a stop. Raises SystemExit where the stop was a failure."""
        with self._signals():
            try:
                super().serve_forever(min(poll_interval, _POLL_SECONDS))
            except _StopServing:
                self._drain()
        if self._failure:
            raise SystemExit(f"openjev-fast: the server stopped: {self._failure}")

    def service_actions(self) -> None:
        super().service_actions()
        if self.state != READY:
            raise _StopServing

    def handle_timeout(self) -> None:
        self._backlog_is_empty = True

    def _drain(self) -> None:
        # Whoever is connected already gets an answer.
        self.timeout = 0
        for _ in range(self.limits.backlog):
            if self._backlog_is_empty:
                break
            self.handle_request()
        self.socket.close()
        seconds = self.limits.failed_seconds if self._failure else self.limits.drain_seconds
        with self._changed:
            log.info("openjev-fast: stopping: %d requests to finish", self._busy())
            self._changed.wait_for(lambda: not self._busy(), seconds)
            if unanswered := self._busy():
                log.warning(
                    "openjev-fast: stopped after %g s with %d requests unanswered", seconds, unanswered
                )

    def server_close(self) -> None:
        super().server_close()
        # Connections that are kept open would go on being served.
        self.stop()
        self._kept_threads.close()
        with self._changed:
            for place in self._places.values():
                if place.idle_since is not None:
                    self._close_idle(place)

    def _busy(self) -> int:
        return sum(place.idle_since is None for place in self._places.values())

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the server, in the main thread and where nobody else has decided what they do."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: Any) -> None:
            if self.state != READY:
                os._exit(128 + number)
            self.stop()

        defaults: tuple[tuple[signal.Signals, Any], ...] = (
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGINT, signal.default_int_handler),
        )
        taken = [number for number, default in defaults if signal.getsignal(number) == default]
        previous = {number: signal.signal(number, on_signal) for number in taken}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


# Servers of this process that may be running.
_servers: weakref.WeakSet[_Server] = weakref.WeakSet()


def fail(reason: str) -> None:
    """The device of this process is broken: stop every server, and exit with status 1 where one is the program.

    Requests being answered get whatever their handler makes of the exception the caller raises next; those that wait
    get 503. Returns at once; from any thread.
    """
    log.error("openjev-fast: %s; stopping", reason)
    for server in list(_servers):
        server.stop(failure=reason)


def bound(server: Any, predictor: Any, max_body_bytes: int, limits: Limits) -> None:
    """Give a server that is not serving yet, and the handler class that was made for it, this module's behaviour.

    predictor: what it serves, with `openjev_fast`. max_body_bytes: the most its handler takes.
    """
    handler = server.RequestHandlerClass
    server.RequestHandlerClass = type(handler.__name__, (_Handler, handler), {})
    server.__class__ = type(type(server).__name__, (_Server, type(server)), {})
    server.bind_limits(predictor.openjev_fast, max_body_bytes, limits)
    if not hasattr(predictor.predict, "openjev_fast"):
        predictor.predict = _for_whoever_waits(predictor.predict)
    _servers.add(server)


def _for_whoever_waits(predict: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(predict)
    def for_whoever_waits(*args: Any, **arguments: Any) -> Any:
        about = exchange.current()
        if about is None:
            return predict(*args, **arguments)
        try:
            # It may have waited for its turn.
            about.check()
            return predict(*args, **arguments)
        except ClientGone:
            about.client_left = True
            raise
        except Refused as refused:
            about.refused = refused
            raise

    for_whoever_waits.openjev_fast = True  # type: ignore[attr-defined]
    return for_whoever_waits
