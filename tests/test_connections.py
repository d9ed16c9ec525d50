"""The server's connections: what clients can make it hold and for how long, and how it stops. Real sockets, no model.

`upstream` is the server as Open-Jev makes it, `bounded` the same one on a backend of ours.
"""

from __future__ import annotations

import contextlib
import gzip
import inspect
import json
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hosts import environment
from http_server import JEV, PYTHON, Reply, Wire, request
from jev import server as jev_server_module

from openjev_fast_plugin import exchange
from openjev_fast_plugin.connections import Limits
from openjev_fast_plugin.exchange import ClientGone, Exchange, Unavailable
from openjev_fast_plugin.patches import UnknownUpstream, jev_server
from openjev_fast_plugin.takeover import Takeover

MAX_BODY = 256 * 1024
ASK = json.dumps({"state": "Late again.", "questions": {}}).encode()


@dataclass
class Predictor:
    """Answers at once, or once `go` is set; keeps what it was asked."""

    answer: Callable[[Any], Any] = lambda request: {"echo": request}
    model_name: str = "toy"
    method: str = "stub"
    asked: list[Any] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    seen: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        self.go.set()

    def predict(self, request: Any) -> Any:
        self.asked.append(request)
        self.seen.release()
        assert self.go.wait(20)
        return self.answer(request)

    def wait_until_asked(self) -> None:
        assert self.seen.acquire(timeout=20)


@dataclass
class Running:
    server: Any
    predictor: Predictor
    exchanges: list[Exchange]
    thread: threading.Thread | None = None
    # What `serve_forever` raised.
    ended: SystemExit | None = None

    def serve(self) -> None:
        def serve_forever() -> None:
            try:
                self.server.serve_forever()
            except SystemExit as error:
                self.ended = error

        self.thread = threading.Thread(target=serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def wire(self, **options: Any) -> Wire:
        return Wire(self.url, **options)

    def statuses(self, count: int) -> list[int]:
        """Of the exchanges so far, once there are so many."""
        wait_for(lambda: len(self.exchanges) >= count)
        return [each.status for each in self.exchanges]


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def make(
    backend: bool = True,
    predictor: Predictor | None = None,
    make_server: Callable | None = None,
    **limits: Any,
) -> Running:
    """A server that listens and does not serve yet."""
    predictor, exchanges = predictor or Predictor(), []
    if backend:
        engine = SimpleNamespace(describe=lambda: {"kernels": "none"})
        predictor.openjev_fast = Takeover("fast", "argument", engine, observers=[exchanges.append])
    # Another test may have left a patched one.
    upstreams = inspect.unwrap(jev_server_module.make_server)
    make_server = jev_server._make_server(make_server or upstreams)
    server = make_server(predictor, "127.0.0.1", 0, max_body_bytes=MAX_BODY)
    if backend:
        server.limits = replace(server.limits, **limits)
    return Running(server, predictor, exchanges)


def with_handler(**methods: Callable) -> Callable:
    original = inspect.unwrap(jev_server_module.make_server)

    def make_server(predictor, host="127.0.0.1", port=0, *, static_root=None, max_body_bytes=2**22):
        server = original(predictor, host, 0, max_body_bytes=max_body_bytes)
        server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), methods)
        return server

    return make_server


@contextlib.contextmanager
def running(*args: Any, **options: Any) -> Iterator[Running]:
    made = make(*args, **options)
    made.serve()
    # Of exceptions that leave a handler; socketserver prints them.
    errors = []
    made.server.handle_error = lambda *_: errors.append(sys.exc_info()[1])
    try:
        yield made
        if hasattr(made.predictor, "openjev_fast"):
            assert not errors
    finally:
        made.predictor.go.set()
        made.server.shutdown()
        made.server.server_close()
        made.thread.join(20)
        assert not made.thread.is_alive()


@pytest.fixture(scope="module")
def bounded() -> Iterator[Running]:
    with running() as made:
        yield made


# Hazards: there in upstream's server, gone in ours


def loses_a_burst(made: Running) -> bool:
    """The kernel takes no more connections than the backlog while the server is busy elsewhere."""
    made.server.shutdown()
    made.thread.join()
    sockets = [socket.socket() for _ in range(64)]
    try:
        for each in sockets:
            each.setblocking(False)
            each.connect_ex(made.server.server_address)
        time.sleep(0.2)
        _, connected, _ = select.select([], sockets, [], 0)
        return len(connected) < 64
    finally:
        for each in sockets:
            each.close()
        made.serve()


def closes_after_one_request(made: Running) -> bool:
    with made.wire() as wire:
        assert wire.post(ASK).status == 200
        with contextlib.suppress(ConnectionError):
            return wire.post(ASK).status != 200
        return True


def sends_in_several_writes(made: Running) -> bool:
    writes = []

    class Recording(socket.socket):
        def sendall(self, data, *flags):
            writes.append(bytes(data))
            return super().sendall(data, *flags)

    def get_request():
        accepted, address = made.server.socket.accept()
        return Recording(fileno=accepted.detach()), address

    made.server.get_request = get_request
    try:
        with made.wire() as wire:
            assert wire.post(ASK).status == 200
    finally:
        del made.server.get_request
    return len(writes) != 1


def resets_the_connection_of_what_it_does_not_read(made: Running) -> bool:
    """Clients that send first and read then see a broken connection, not the reply."""
    body, statuses = b" " * (20 * MAX_BODY), []
    for headers, path in (
        ((), "/v1/systemone"),
        ((), "/v1/other"),
        (("Origin: http://elsewhere.example",), "/v1/systemone"),
    ):
        with made.wire() as wire:
            try:
                wire.send(request(body, *headers, path=path))
            except ConnectionError:
                return True
            statuses.append(wire.reply().status)
    return statuses != [413, 404, 403]


def answers_nobody(made: Running) -> bool:
    """Clients that have left while another one was answered are computed for all the same."""
    made.predictor.go.clear()
    made.predictor.asked.clear()
    with made.wire() as first, made.wire() as last:
        first.send(request(b'{"n": 1}'))
        # Not `wait_until_asked`: what other tests asked of this server would do.
        wait_for(lambda: made.predictor.asked)
        gone = made.wire()
        gone.send(request(b'{"n": 2}'))
        last.send(request(b'{"n": 3}'))
        time.sleep(0.2)
        gone.close()
        made.predictor.go.set()
        assert first.reply().status == last.reply().status == 200
    time.sleep(0.1)
    return {"n": 2} in made.predictor.asked


def refuses_compressed_bodies(made: Running) -> bool:
    with made.wire() as wire:
        return wire.post(gzip.compress(ASK), "Content-Encoding: gzip").status != 200


def refuses_chunked_bodies(made: Running) -> bool:
    with made.wire() as wire:
        wire.send(request(b"", "Transfer-Encoding: chunked", length=False), chunked(ASK, 5))
        return wire.reply().status != 200


HAZARDS = [
    loses_a_burst,
    closes_after_one_request,
    sends_in_several_writes,
    resets_the_connection_of_what_it_does_not_read,
    answers_nobody,
    refuses_compressed_bodies,
    refuses_chunked_bodies,
]


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.__name__)
def test_a_hazard_of_upstream_s_server_is_gone(bounded, hazard):
    with running(backend=False) as upstream:
        assert hazard(upstream), "nothing to be fixed"
    assert not hazard(bounded)


# Keep-alive


def test_replies_are_not_held_back(bounded):
    with bounded.wire() as wire:
        seconds = []
        for _ in range(20):
            start = time.perf_counter()
            assert wire.post(ASK).status == 200
            seconds.append(time.perf_counter() - start)
    # Nagle's algorithm and a delayed acknowledgement cost 40 ms.
    assert statistics.median(seconds) < 0.02


def test_nagle_is_off(bounded):
    accepted = []
    accept = bounded.server.get_request
    bounded.server.get_request = lambda: accepted.append(accept()) or accepted[-1]
    try:
        with bounded.wire() as wire:
            assert wire.get("/health").status == 200
            assert accepted[0][0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        del bounded.server.get_request


def test_a_connection_stays_open_over_errors_and_an_empty_line(bounded):
    with bounded.wire() as wire:
        for path, body, status in (
            ("/v1/other", ASK, 404),
            ("/v1/systemone", b"{", 422),
            ("/v1/systemone", b"", 413),
            ("/v1/systemone", ASK, 200),
        ):
            reply = wire.post(body, path=path)
            assert reply.status == status and "connection" not in reply.headers
            wire.send(b"\r\n")
        assert wire.post(ASK, "Content-Encoding: br").status == 415
        assert wire.get("/v1/models").status == 200


@pytest.mark.parametrize(
    ("version", "field", "answer"),
    [
        ("1.1", "", None),
        ("1.1", "Connection: close\r\n", "close"),
        ("1.0", "", "close"),
        ("1.0", "Connection: keep-alive\r\n", "keep-alive"),
    ],
)
def test_who_closes_is_said(bounded, version, field, answer):
    with bounded.wire() as wire:
        ask = f"GET /health HTTP/{version}\r\n{field}\r\n".encode()
        wire.send(ask)
        reply = wire.reply()
        assert reply.status == 200 and reply.headers.get("connection") == answer
        if answer == "close":
            assert wire.closed()
        else:
            wire.send(ask)
            assert wire.reply().status == 200


def test_requests_sent_ahead_are_answered_in_order(bounded):
    with bounded.wire() as wire:
        bodies = [json.dumps({"n": n, "text": "x" * 20_000 * n}).encode() for n in range(6)]
        wire.send(*(request(body) for body in bodies))
        assert [wire.reply().content["echo"]["n"] for _ in bodies] == list(range(6))


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT"])
def test_other_methods_are_answered_as_upstream_answers_them(bounded, method):
    def answer(made: Running) -> tuple[int, bytes]:
        with made.wire() as wire:
            wire.send(f"{method} /health HTTP/1.1\r\nHost: test\r\nContent-Length: 3\r\n\r\nabc".encode())
            received = b"".join(iter(lambda: wire.socket.recv(65536), b""))
        head, _, body = received.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    with running(backend=False) as upstream:
        assert answer(bounded) == answer(upstream)
    assert answer(bounded)[0] == 501


def test_idle_connections_outlast_the_clients_own_limit_and_no_more():
    assert Limits().idle > 30
    with running(idle=0.3) as made, made.wire() as wire:
        assert wire.post(ASK).status == 200
        time.sleep(0.1)
        assert wire.post(ASK).status == 200
        start = time.monotonic()
        assert wire.closed() and 0.1 < time.monotonic() - start < 5
        assert made.statuses(2) == [200, 200]


@pytest.mark.parametrize(
    ("given", "idle"), [({}, 75.0), ({"idle_timeout": 30}, 75.0), ({"idle_timeout": 12}, 12)]
)
def test_an_idle_time_that_was_chosen_counts(given, idle):
    original = inspect.unwrap(jev_server_module.make_server)

    def later(
        predictor, host="127.0.0.1", port=0, *, static_root=None, max_body_bytes=2**22, idle_timeout=30
    ):
        return original(predictor, host, 0, max_body_bytes=max_body_bytes)

    predictor = Predictor()
    predictor.openjev_fast = Takeover("fast", "argument", SimpleNamespace(describe=dict))
    with jev_server._make_server(later)(predictor, **given) as server:
        assert server.limits.idle == idle


# Bodies (what they decode to: test_message_body)


def chunked(body: bytes, size: int, *trailers: bytes) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return framed + b"0\r\n" + b"".join(trailer + b"\r\n" for trailer in trailers) + b"\r\n"


def test_a_chunked_body_is_answered_like_a_plain_one_and_the_next_request_too(bounded):
    with bounded.wire() as wire:
        plain = wire.post(ASK)
        for size, trailers in ((1, ()), (7, (b"X-Sum: 1", b"X-More: 2")), (10_000, ())):
            wire.send(request(b"", "Transfer-Encoding: chunked", length=False), chunked(ASK, size, *trailers))
            reply = wire.reply()
            assert (reply.status, reply.body) == (200, plain.body)
        coded = request(b"", "Transfer-Encoding: chunked", "Content-Encoding: gzip", length=False)
        wire.send(coded, chunked(gzip.compress(ASK), 11))
        assert wire.reply().body == plain.body
        assert wire.post(ASK).body == plain.body


def test_a_body_of_the_largest_size_is_answered_and_one_byte_more_is_not(bounded):
    largest = b'"' + b"w" * (MAX_BODY - 2) + b'"'
    with running(backend=False) as upstream, upstream.wire() as wire:
        upstream_s = wire.post(b"").body
    ways: list[Callable[[bytes], bytes]] = [
        lambda body: request(body),
        lambda body: (
            request(b"", "Transfer-Encoding: chunked", length=False) + chunked(body, len(body) // 3 + 1)
        ),
        lambda body: request(gzip.compress(body), "Content-Encoding: gzip"),
    ]
    for way in ways:
        with bounded.wire() as wire:
            wire.send(way(largest))
            assert wire.reply().status == 200
        with bounded.wire() as wire:
            wire.send(way(largest + b" "))
            reply = wire.reply()
            assert reply.status == 413
            assert reply.body == upstream_s


def test_what_a_client_goes_on_sending_is_read_only_so_long():
    with running(linger_seconds=0.5, pause_seconds=0.2) as made, made.wire() as wire:
        wire.send(request(b"", length=10**12))
        start = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - start < 10:
                wire.send(b" " * 65536)
        assert 0.3 < time.monotonic() - start < 5
        wait_for(lambda: not made.server._places)


def test_a_client_that_is_silent_where_nothing_is_read_is_let_go():
    with running(linger_seconds=60, pause_seconds=0.2) as made, made.wire() as silent:
        start = time.monotonic()
        silent.send(request(b"", length=10**12))
        assert silent.reply().status == 413 and silent.closed()
        wait_for(lambda: not made.server._places, seconds=10)
        assert time.monotonic() - start > 0.1


def test_a_reply_to_what_is_not_read_ends_at_once_and_holds_no_stop_up():
    with running(linger_seconds=60, pause_seconds=60) as made, made.wire() as wire:
        wire.send(request(b"", length=10**12))
        assert wire.reply().status == 413 and wire.closed()
        made.server.stop()
        made.thread.join(10)
        assert not made.thread.is_alive()


def test_the_handler_sees_a_plain_body_whatever_was_sent():
    def do_POST(self: Any) -> None:
        names = ("Content-Length", "Transfer-Encoding", "Content-Encoding")
        seen = {"headers": [self.headers[name] for name in names], "body": self.rfile.read().decode()}
        self.send(200, json.dumps(seen).encode(), "application/json")

    limit = MAX_BODY
    sent = [
        (ASK, len(ASK), ()),
        (gzip.compress(ASK), len(ASK), ("Content-Encoding: gzip",)),
        (gzip.compress(b" " * (limit + 1)), limit + 1, ("Content-Encoding: gzip",)),
        (chunked(ASK, 9), len(ASK), ("Transfer-Encoding: chunked",)),
        (chunked(b" " * (limit + 7), limit), limit + 1, ("Transfer-Encoding: chunked",)),
        (chunked(b"", 1), 0, ("Transfer-Encoding: chunked",)),
    ]
    with running(make_server=with_handler(do_POST=do_POST)) as made:
        for body, length, headers in sent:
            with made.wire() as wire:
                wire.send(request(body, *headers, length="Transfer" not in "".join(headers) and None), b"")
                expected = ASK.decode() if length == len(ASK) else ""
                assert wire.reply().content == {"headers": [str(length), None, None], "body": expected}


@pytest.mark.parametrize(
    ("headers", "length", "status"),
    [
        (("Transfer-Encoding: chunked",), 5, 400),
        (("Content-Length: 6",), 5, 400),
        (("Transfer-Encoding: gzip, chunked",), False, 501),
        (("Transfer-Encoding: identity",), False, 501),
        ((), "+5", 422),
        ((), "0x5", 422),
        ((), "9" * 30, 413),
        ((), "9" * 5000, 422),
        ((), "-5", 413),
    ],
)
def test_where_a_body_ends_is_never_guessed(bounded, headers, length, status):
    """A second request hidden in the body of the first is not answered."""
    with bounded.wire() as wire:
        wire.send(request(b"{}   GET /health HTTP/1.1\r\n\r\n", *headers, length=length))
        reply = wire.reply()
        assert reply.status == status and isinstance(reply.content["error"], str)
        assert reply.headers["connection"] == "close" and wire.closed()


@pytest.mark.parametrize("way", ["length", "chunked"])
def test_a_body_that_is_cut_short_is_refused(bounded, way):
    with bounded.wire() as wire:
        if way == "length":
            wire.send(request(ASK, length=len(ASK) + 1))
        else:
            wire.send(request(b"", "Transfer-Encoding: chunked", length=False), chunked(ASK, 9)[:-4])
        wire.socket.shutdown(socket.SHUT_WR)
        reply = wire.reply()
        assert reply.status == 422 and reply.headers["connection"] == "close" and wire.closed()


def test_a_client_that_leaves_inside_its_body_frees_its_place():
    with running() as made:
        asked = len(made.predictor.asked)
        for body in (request(ASK, length=1000), request(b"", "Transfer-Encoding: chunked", length=False)):
            wire = made.wire()
            wire.send(body)
            # A reset, not an orderly end.
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            wire.close()
        assert made.statuses(2) == [exchange.CLIENT_CLOSED_REQUEST] * 2
        wait_for(lambda: not made.server._places)
        assert made.server._body_bytes == 0 and len(made.predictor.asked) == asked


def test_a_client_that_asks_first_is_told_to_go_on(bounded):
    with bounded.wire() as wire:
        wire.send(request(b"", "Expect: 100-continue", length=len(ASK)))
        assert wire._file.readline() == b"HTTP/1.1 100 Continue\r\n" and wire._file.readline() == b"\r\n"
        wire.send(ASK)
        assert wire.reply().status == 200
        wire.send(request(b"", "Expect: 100-continue", length=MAX_BODY + 1))
        reply = wire.reply()
        assert reply.status == 413 and reply.headers["connection"] == "close"


def test_bodies_together_are_bounded():
    with running(body_bytes=MAX_BODY) as made:
        half = b'"' + b"w" * (MAX_BODY // 2) + b'"'
        made.predictor.go.clear()
        with made.wire() as first, made.wire() as second:
            first.send(request(half))
            made.predictor.wait_until_asked()
            reply = second.post(half)
            assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
            assert reply.content == {"error": "too many large requests at the same time"}
            made.predictor.go.set()
            assert first.reply().status == 200
        with made.wire() as third:
            # What a body decodes to counts as well.
            assert third.post(half).status == 200
            assert third.post(gzip.compress(half), "Content-Encoding: gzip").status == 200
        assert made.server._body_bytes == 0


def test_a_body_of_the_largest_size_has_room_whatever_that_size_is():
    predictor = Predictor()
    predictor.openjev_fast = Takeover("fast", "argument", SimpleNamespace(describe=dict))
    make_server = jev_server._make_server(inspect.unwrap(jev_server_module.make_server))
    with make_server(predictor, "127.0.0.1", 0, max_body_bytes=2**30) as server:
        server.hold(2**31)
        with pytest.raises(Unavailable):
            server.hold(1)


# Slow clients


@pytest.mark.parametrize("part", ["request line", "headers", "body", "chunks"])
def test_a_client_that_sends_too_slowly_is_told_408(part):
    start = {
        "request line": b"GET /hea",
        "headers": b"POST /v1/systemone HTTP/1.1\r\nHost: ",
        "body": request(b"{", length=1000),
        "chunks": request(b"", "Transfer-Encoding: chunked", length=False) + b"1;",
    }[part]
    with running(header_seconds=0.4, body_seconds=0.4) as made, made.wire() as wire:
        wire.send(start)
        begun = time.monotonic()

        def drip() -> None:
            # Each byte in time for a timeout that starts anew with every byte.
            with contextlib.suppress(OSError):
                while time.monotonic() - begun < 5:
                    wire.send(b"x")
                    time.sleep(0.05)

        with ThreadPoolExecutor() as pool:
            pool.submit(drip)
            reply = wire.reply()
            elapsed = time.monotonic() - begun
            assert reply.status == 408 and elapsed < 3
            assert reply.content == {"error": "the request took too long to arrive"}
            assert reply.headers["connection"] == "close"
            wire.socket.shutdown(socket.SHUT_RDWR)
        assert made.statuses(1) == [408]
        wait_for(lambda: not made.server._places)


def test_a_client_that_does_not_take_its_reply_is_let_go():
    with running(
        predictor=Predictor(answer=lambda request: {"x": "x" * 32_000_000}), reply_seconds=0.3
    ) as made:
        with made.wire() as wire:
            wire.send(request(ASK))
            start = time.monotonic()
            assert made.statuses(1) == [exchange.CLIENT_CLOSED_REQUEST]
            assert time.monotonic() - start < 5
            wait_for(lambda: not made.server._places)


def test_header_fields_are_bounded(bounded):
    with bounded.wire() as wire:
        many = b"".join(b"X-%d: %b\r\n" % (n, b"a" * 50_000) for n in range(50))
        with contextlib.suppress(ConnectionError):
            wire.send(b"GET /health HTTP/1.1\r\n", many, b"\r\n")
        assert wire.reply().status == 431
    with bounded.wire() as wire:
        wire.send(b"GET /health HTTP/1.1\r\nX-A: ", b"a" * 60_000, b"\r\n\r\n")
        assert wire.reply().status == 200


def test_connections_are_bounded_and_idle_ones_make_room():
    with running(connections=3, refusals=1) as made, contextlib.ExitStack() as stack:
        made.predictor.go.clear()
        oldest, other = stack.enter_context(made.wire()), stack.enter_context(made.wire())
        for wire in (oldest, other):
            assert wire.get("/health").status == 200
            wait_for(lambda: not made.server._busy())
        busy = [stack.enter_context(made.wire())]
        busy[0].send(request(ASK))
        made.predictor.wait_until_asked()
        # The place of the one that was idle longest.
        busy.append(stack.enter_context(made.wire()))
        busy[1].send(request(ASK))
        assert oldest.closed()
        assert other.get("/health").status == 200
        other.send(request(ASK))
        wait_for(lambda: made.server._busy() == 3)

        with made.wire() as surplus:
            reply = surplus.post(ASK)
            assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
            assert reply.content == {"error": "too many connections"}
            assert surplus.closed()
        wait_for(lambda: len(made.server._places) == 3)
        with made.wire() as told:
            wait_for(lambda: len(made.server._places) == 4)
            with made.wire() as closed:
                assert closed.closed()
            assert told.post(ASK).status == 503
        made.predictor.go.set()
        assert [wire.reply().status for wire in (*busy, other)] == [200] * 3


def test_a_flood_of_silent_connections_shuts_nobody_out():
    with running(connections=8, refusals=8) as made, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(made.wire())
        wait_for(lambda: len(made.server._places) <= 9)
        with made.wire() as wire:
            assert wire.post(ASK).status == 200
        assert threading.active_count() < 50


def kept_threads(made: Running) -> int:
    # Those of the other servers of this module are theirs.
    return len(made.server._kept_threads._idle)


def test_connections_that_follow_each_other_share_a_thread():
    asked_on: set[threading.Thread] = set()

    def answer(request: Any) -> Any:
        asked_on.add(threading.current_thread())
        return request

    with running(predictor=Predictor(answer=answer)) as made:
        for _ in range(10):
            with made.wire() as wire:
                assert wire.post(ASK).status == 200
            wait_for(lambda: kept_threads(made) == 1)
    (thread,) = asked_on
    # Closed with the server.
    thread.join(20)
    assert not thread.is_alive()


def test_a_server_that_is_closed_leaves_no_thread():
    asked_on: set[threading.Thread] = set()

    def answer(request: Any) -> Any:
        asked_on.add(threading.current_thread())
        return request

    with running(predictor=Predictor(answer=answer)) as made, contextlib.ExitStack() as stack:
        # More connections than threads are kept for, of which the half stay open.
        wires = [stack.enter_context(made.wire()) for _ in range(40)]
        for wire in wires:
            assert wire.post(ASK).status == 200
        assert len(asked_on) == 40
        for wire in wires[:20]:
            wire.close()
        wait_for(lambda: len(made.server._places) == 20 and kept_threads(made) == 16)
    for thread in asked_on:
        thread.join(20)
        assert not thread.is_alive()


def test_replies_have_the_date_of_their_second(monkeypatch):
    with running() as made, made.wire() as wire:
        for now, date in (
            (1_800_000_000.9, "Fri, 15 Jan 2027 08:00:00 GMT"),
            (1_800_000_000.1, "Fri, 15 Jan 2027 08:00:00 GMT"),
            (1_800_000_001.0, "Fri, 15 Jan 2027 08:00:01 GMT"),
        ):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            assert wire.post(ASK).headers["date"] == date


# Who is waited for


def test_a_client_is_gone_once_it_has_closed():
    with running() as made:
        gone, looked = [], threading.Event()

        def look(request: Any) -> str:
            about = exchange.current()
            gone.append(about.client_gone())
            looked.set()
            wait_for(about.client_gone)
            gone.append(about.client_gone())
            raise ClientGone

        made.predictor.answer = look
        wire = made.wire()
        # With the next request in the socket, which is no sign of life.
        wire.send(request(ASK), request(ASK))
        assert looked.wait(20)
        wire.close()
        assert made.statuses(1) == [exchange.CLIENT_CLOSED_REQUEST]
        assert gone == [False, True]
        assert exchange.current() is None


def test_a_call_without_a_request_waits_for_nobody():
    made = make()
    assert made.predictor.predict(1) == {"echo": 1}
    made.server.server_close()


def test_a_full_queue_is_answered_503_with_retry_after():
    def full(request: Any) -> None:
        raise Unavailable("the queue is full", retry_after=3)

    with running(predictor=Predictor(answer=full)) as made, made.wire() as wire:
        for _ in range(2):
            reply = wire.post(ASK)
            assert (reply.status, reply.content) == (503, {"error": "the queue is full"})
            assert reply.headers["retry-after"] == "3" and "connection" not in reply.headers
        assert made.statuses(2) == [503, 503]


# Metrics


def test_metrics_have_a_route_once_there_are_some():
    with running() as made, running(backend=False) as upstream:
        with made.wire() as ours, upstream.wire() as theirs:
            unknown = ours.get("/metrics")
            assert (unknown.status, unknown.body) == (404, theirs.get("/metrics").body)
            counted = SimpleNamespace(render=lambda: (b"rows_total 7\n", "text/plain; version=1.0.0"))
            made.predictor.openjev_fast.engine.metrics = counted
            reply = ours.get("/metrics?name=rows")
            assert (reply.status, reply.body) == (200, b"rows_total 7\n")
            assert reply.headers["content-type"] == "text/plain; version=1.0.0"
            assert ours.get("/metrics/").status == 404


def test_every_exchange_is_observed():
    with running() as made, made.wire() as wire:
        before = time.time()
        reply = wire.post(ASK)
        wire.get("/nothing?secret=1")
        wire.send(b"nonsense\r\n\r\n")
        wire.closed()
        assert made.statuses(3) == [200, 404, 400]
        first, second, third = made.exchanges
        assert (first.method, first.path) == ("POST", "/v1/systemone")
        assert (second.method, second.path) == ("GET", "/nothing")
        assert (third.method, third.path) == ("", "")
        assert first.request_bytes == len(ASK) and first.response_bytes > len(reply.body)
        assert first.client == "127.0.0.1" and before - 1 < first.started < time.time()
        assert 0 < first.seconds < 5


# Stopping


def test_a_stop_answers_what_was_asked_and_refuses_the_rest():
    with running() as made, contextlib.ExitStack() as stack:
        idle, health, half, busy = (stack.enter_context(made.wire()) for _ in range(4))
        for wire in (idle, health, half):
            assert wire.get("/health").content["backend"]["status"] == "ready"
        wait_for(lambda: not made.server._busy())
        made.predictor.go.clear()
        busy.send(request(ASK))
        made.predictor.wait_until_asked()
        half.send(request(ASK)[:-5])
        wait_for(lambda: made.server._busy() == 2)
        made.server.stop()

        def refused() -> bool:
            try:
                made.wire().close()
            except ConnectionRefusedError:
                return True
            return False

        wait_for(refused)
        late = idle.post(ASK)
        assert (late.status, late.content) == (503, {"error": "the server is stopping"})
        assert int(late.headers["retry-after"]) >= 1 and late.headers["connection"] == "close"
        reply = health.get("/health")
        assert reply.status == 200 and reply.headers["connection"] == "close"
        assert reply.content["status"] == "ready" and reply.content["backend"]["status"] == "draining"
        assert made.thread.is_alive()
        half.send(ASK[-5:])
        made.predictor.go.set()
        for wire in (half, busy):
            reply = wire.reply()
            assert reply.status == 200 and reply.headers["connection"] == "close" and wire.closed()
        made.thread.join(20)
        assert not made.thread.is_alive()
        assert len(made.predictor.asked) == 2


def test_who_has_connected_before_a_stop_is_answered():
    made = make()
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(made.wire()) for _ in range(20)]
        for wire in waiting:
            wire.send(request(ASK))
        made.server.stop()
        made.serve()
        assert [wire.reply().status for wire in waiting] == [503] * 20
        made.thread.join(20)
        assert not made.thread.is_alive()
    made.server.server_close()


def test_a_stop_waits_only_so_long(caplog):
    with running(drain_seconds=0.3) as made, made.wire() as wire:
        made.predictor.go.clear()
        wire.send(request(ASK))
        made.predictor.wait_until_asked()
        start = time.monotonic()
        made.server.stop()
        made.thread.join(20)
        assert 0.2 < time.monotonic() - start < 5
        assert "stopped after 0.3 s with 1 requests unanswered" in caplog.text


def test_a_closed_server_lets_go_of_the_connections_it_kept_open():
    with running() as made:
        wire = made.wire()
        assert wire.post(ASK).status == 200
        wait_for(lambda: not made.server._busy())
    assert wire.closed()
    wire.close()


PROGRAM = """
import sys, threading, time
from types import SimpleNamespace
from openjev_fast_plugin import connections
from openjev_fast_plugin.takeover import Takeover
from openjev_fast_plugin.patches import jev_server
import jev.server

class Predictor:
    model_name, method = "toy", "stub"

    def predict(self, request):
        print("asked", flush=True)
        if request.get("fail"):
            connections.fail("the device is lost")
            raise RuntimeError("illegal access")
        time.sleep(request["seconds"])
        return {"answers": {}}

predictor = Predictor()
predictor.openjev_fast = Takeover("fast", "argument", SimpleNamespace(describe=dict))
jev_server.apply(jev.server)
jev.server.load_predictor = lambda **arguments: predictor
sys.argv[1:] = ["--checkpoint", "none", "--port", "0"]
jev.server.main()
"""


@pytest.fixture
def program() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(*JEV),
        cwd=PYTHON.parent,
    )
    process.url = json.loads(process.stdout.readline())["url"]
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_finish_and_exits_with_0(program, number):
    if number == signal.SIGINT and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("an ignored SIGINT is inherited")
    with Wire(program.url) as wire, Wire(program.url) as idle:
        assert idle.get("/health").status == 200
        wire.send(request(b'{"seconds": 0.5}'))
        assert program.stdout.readline() == "asked\n"
        program.send_signal(number)
        assert wire.reply().status == 200
        assert program.wait(10) == 0
        assert program.stderr.read() == ""


def test_a_second_signal_stops_at_once(program):
    with Wire(program.url) as wire:
        wire.send(request(b'{"seconds": 60}'))
        assert program.stdout.readline() == "asked\n"
        program.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert program.poll() is None
        program.send_signal(signal.SIGTERM)
        assert program.wait(5) == 128 + signal.SIGTERM
        assert wire.reply().status == 0


def test_a_broken_device_is_answered_500_and_ends_the_program(program):
    with Wire(program.url) as failing, Wire(program.url) as waiting:
        failing.send(request(b'{"fail": true}'))
        assert program.stdout.readline() == "asked\n"
        with contextlib.suppress(ConnectionError):
            waiting.send(request(b'{"seconds": 0}'))
        reply = failing.reply()
        assert (reply.status, reply.content["error_type"]) == (500, "RuntimeError")
        assert waiting.reply().status in (503, 0)
        assert program.wait(10) == 1
        assert program.stdout.read() == "", "nothing is computed any more"
        assert program.stderr.read().strip().endswith("the server stopped: the device is lost")


def test_who_waits_for_a_device_that_breaks_is_told_503():
    with running() as made, made.wire() as first, made.wire() as second:
        made.predictor.go.clear()

        def fails(request: Any) -> None:
            made.server.stop(failure="the device is lost")
            raise RuntimeError("illegal access")

        made.predictor.answer = fails
        first.send(request(ASK))
        made.predictor.wait_until_asked()
        second.send(request(ASK))
        wait_for(lambda: made.server._busy() == 2)
        time.sleep(0.1)
        made.predictor.go.set()
        assert first.reply().status == 500
        reply = second.reply()
        assert reply.status == 503 and reply.headers["retry-after"]
        assert len(made.predictor.asked) == 1
        made.thread.join(20)
        assert str(made.ended) == "openjev-fast: the server stopped: the device is lost"


def test_a_stop_under_load_loses_and_repeats_nothing():
    rng = random.Random(0)
    slow = Predictor(answer=lambda request: time.sleep(rng.random() / 500) or {"echo": request})
    with running(predictor=slow) as made:
        stopped = threading.Event()

        def client(number: int) -> list[tuple[int, int]]:
            """(what was asked, status) of every request; 0: no answer at all."""
            results, wire = [], None
            for turn in range(1000):
                if stopped.is_set() and results and results[-1][1] != 200:
                    break
                ask = 1000 * number + turn
                try:
                    wire = wire or made.wire()
                    reply = wire.post(json.dumps(ask).encode())
                except ConnectionError:
                    reply = Reply(0)
                if reply.status == 200:
                    assert reply.content == {"echo": ask}
                results.append((ask, reply.status))
                if number % 2 or reply.status != 200 or reply.headers.get("connection") == "close":
                    wire and wire.close()
                    wire = None
            return results

        with ThreadPoolExecutor(32) as pool:
            clients = [pool.submit(client, number) for number in range(32)]
            wait_for(lambda: len(slow.asked) > 200)
            made.server.stop()
            stopped.set()
            results = [result for each in clients for result in each.result()]
        made.thread.join(20)
        assert not made.thread.is_alive()
        by_status = {status: {ask for ask, found in results if found == status} for status in (200, 503, 0)}
        assert {status for _, status in results} <= {200, 503, 0} and len(by_status[200]) > 200
        # What was computed is what was answered, each once; what was refused was not computed.
        assert sorted(slow.asked) == sorted(by_status[200])


# What cannot be bounded is said


@pytest.mark.parametrize("name", ["handle", "handle_one_request", "parse_request"])
def test_a_handler_that_reads_requests_itself_is_unknown(name):
    predictor = Predictor()
    predictor.openjev_fast = Takeover("fast", "argument", SimpleNamespace(describe=dict))
    with pytest.raises(UnknownUpstream, match=f"expected {name} of BaseHTTPRequestHandler, found a {name}"):
        jev_server._make_server(with_handler(**{name: lambda self: None}))(predictor)
    assert not hasattr(Predictor.predict, "openjev_fast") and "predict" not in vars(predictor)


def test_a_server_of_another_kind_is_unknown():
    def make_server(predictor, host="127.0.0.1", port=0, *, static_root=None, max_body_bytes=2**22):
        return SimpleNamespace(RequestHandlerClass=object)

    predictor = Predictor()
    predictor.openjev_fast = Takeover("fast", "argument", SimpleNamespace(describe=dict))
    with pytest.raises(
        UnknownUpstream, match="expected a ThreadingHTTPServer .* found SimpleNamespace with object"
    ):
        jev_server._make_server(make_server)(predictor)


def test_a_server_without_an_engine_of_ours_is_as_upstream_made_it():
    predictor = Predictor()
    predictor.openjev_fast = Takeover("torch", "flag")
    upstreams = inspect.unwrap(jev_server_module.make_server)
    ours = jev_server._make_server(upstreams)
    with (
        upstreams(Predictor(), "127.0.0.1", 0) as plain,
        ours(predictor, "127.0.0.1", 0) as server,
    ):
        assert type(server) is type(plain) and vars(server).keys() == vars(plain).keys()
        handlers = [each.RequestHandlerClass for each in (plain, server)]
        assert vars(handlers[0]).keys() == vars(handlers[1]).keys()
        assert handlers[0].__bases__ == handlers[1].__bases__
        assert "predict" not in vars(predictor)
