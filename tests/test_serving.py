"""Many clients of one server on the fast backend: shared forwards, a full queue, clients that leave, a lost device."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import load
import pytest
import torch
from decisions import question, text
from hosts import environment
from http_server import JEV, ONE_THREAD, PYTHON, Reply, Server
from jev import serving
from jev.server import make_server

from openjev_fast_plugin import takeover
from openjev_fast_plugin.demo import largest_difference
from openjev_fast_plugin.patches import jev_server_lock

SECONDS = 60.0
# Of a probability, in float32.
BOUND = 1e-5

LATE = {"state": "Late again.", "questions": {"late": {"type": "noul", "instructions": "Is it late?"}}}


def requests() -> list[dict[str, Any]]:
    """Forty requests of very different sizes, a third of them about one state."""
    kinds = [("noul", 1, 5), ("choice", 3, 15), ("score", 4, 8), ("noul", 1, 80), ("choice", 12, 5)]
    found = []
    for seed in range(40):
        kind, options, words = kinds[seed % 5]
        questions = {f"q{n}": question(kind, options, seed + n) for n in range(1 + seed % 2)}
        found.append({"state": text(words, seed if seed % 3 else 7), "questions": questions})
    return found


@dataclass
class Running:
    """A server of this process."""

    server: Server
    predictor: Any
    http: ThreadingHTTPServer

    @property
    def engine(self) -> Any:
        return self.predictor.openjev_fast.engine

    def sample(self, name: str, **labels: str) -> float:
        return self.engine.metrics.registry.get_sample_value(f"openjev_fast_{name}", labels) or 0.0

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.002)

    def hold(self, monkeypatch) -> Callable[[], None]:
        """Hold the device back until the function returned is called."""
        go_on, start = threading.Event(), self.engine._packed.start

        def held(layout: Any) -> Callable[[], Any]:
            assert go_on.wait(SECONDS)
            return start(layout)

        monkeypatch.setattr(self.engine._packed, "start", held)
        return go_on.set


@contextmanager
def running(checkpoint: Path, **settings: int) -> Iterator[Running]:
    """A server on a float32 model, with settings of the queue by the end of their variables' names."""
    with pytest.MonkeyPatch.context() as patched:
        real = takeover.accelerate
        patched.setattr(takeover, "accelerate", lambda model, *rest: real(model.float(), *rest))
        for name, value in settings.items():
            patched.setenv(f"OPENJEV_FAST_{name}", str(value))
        predictor = serving.load_predictor(checkpoint=str(checkpoint), device="cpu", backend="fast")
    http = make_server(predictor, "127.0.0.1", 0)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield Running(Server(f"http://127.0.0.1:{http.server_port}"), predictor, http)
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@pytest.fixture(scope="module")
def served(tiny_checkpoint) -> Iterator[Running]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with running(tiny_checkpoint) as made:
        yield made
    torch.set_num_threads(threads)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as made:
        yield made


def test_64_clients_get_the_answers_they_get_alone(served):
    asked = requests()
    alone = [served.server.ask(request) for request in asked]
    bodies = [json.dumps(request).encode() for request in asked]
    before = served.sample("requests_total", status="200")
    forwards = served.sample("forwards_total", replayed="no")
    problems: Counter[str] = Counter()
    answered: Counter[int] = Counter()
    lock = threading.Lock()

    def client(number: int) -> None:
        # Half of them keep their connection.
        kept = load.Client(served.server.url) if number % 2 else None
        for turn in range(20):
            index = (7 * number + turn) % len(asked)
            if kept:
                status, body = kept.ask(bodies[index])
            else:
                reply = served.server.send(bodies[index], headers={**JSON, "Connection": "close"})
                status, body = reply.status, reply.body
            with lock:
                if status != 200:
                    problems[f"status {status}"] += 1
                    continue
                found = json.loads(body)
                answered[index] += 1
                if largest_difference(alone[index]["answers"], found["answers"]) > BOUND:
                    problems["another answer"] += 1
                if found["usage"] != alone[index]["usage"]:
                    problems["another number of tokens"] += 1
                if found["metadata"]["backend"]["rows_asked"] != found["usage"]["input_tokens"]:
                    problems["another request's figures"] += 1
        if kept:
            kept.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not problems
    assert answered.total() == 64 * 20
    assert served.sample("requests_total", status="200") - before == 64 * 20
    # They did share forwards.
    assert served.sample("forwards_total", replayed="no") - forwards < 64 * 20 / 2
    assert served.engine.scheduler.inside == 0


def test_requests_of_10_000_tokens_starve_nobody(served, pool, monkeypatch):
    monkeypatch.setattr(served.predictor.scorer.model, "max_length", 16_384)
    large = [{**LATE, "state": text(4_000, seed)} for seed in range(4)]
    expected = served.server.ask(LATE)["answers"]
    enough = threading.Event()

    def ask_on(request: dict[str, Any]) -> list[dict[str, Any]]:
        found = []
        while not enough.is_set():
            found.append(served.server.ask(request))
        return found

    clients = [pool.submit(ask_on, request) for request in large]
    served.until(lambda: served.engine.scheduler.inside == len(large))
    passed, shared = [], 0
    try:
        for _ in range(4):
            before = served.sample("forwards_total", replayed="no")
            answer = served.server.ask(LATE)
            passed.append(served.sample("forwards_total", replayed="no") - before)
            shared += answer["metadata"]["backend"]["rows_computed"] > 10_000
            assert largest_difference(expected, answer["answers"]) <= BOUND
    finally:
        enough.set()
    # It comes while one runs and is in the next, whoever waits; one may end between the count and its arrival.
    assert max(passed) <= 3 and shared > 0, passed
    answers = [client.result(SECONDS) for client in clients]
    assert all(10_000 < each["usage"]["input_tokens"] < 12_000 for found in answers for each in found)
    # In turn, so that of the large ones none is starved by the others either.
    counts = [len(found) for found in answers]
    assert min(counts) > 0 and max(counts) - min(counts) <= 2, counts


JSON = {"Content-Type": "application/json"}


def test_what_is_wrong_with_a_request_is_told_to_its_client_alone(served, pool, monkeypatch):
    expected = served.server.ask(LATE)["answers"]
    go_on = served.hold(monkeypatch)
    good = [pool.submit(served.server.post, LATE) for _ in range(6)]
    bad = [
        pool.submit(served.server.post, {**LATE, "state": "word " * 5000}),
        pool.submit(served.server.post, {**LATE, "model": "gpt"}),
        pool.submit(served.server.send, b"{"),
    ]
    assert [future.result(SECONDS).status for future in bad] == [422] * 3
    served.until(lambda: served.engine.scheduler.inside == 6)
    go_on()
    for future in good:
        reply = future.result(SECONDS)
        assert reply.status == 200 and largest_difference(expected, reply.content["answers"]) <= BOUND


def test_a_forward_that_fails_for_one_request_fails_for_it_alone(served, pool, monkeypatch):
    asked = requests()[:8]
    expected = [served.server.ask(request)["answers"] for request in asked]
    culprit = served.server.ask(asked[3])["metadata"]["backend"]["rows_computed"]
    go_on, prepare = served.hold(monkeypatch), served.engine._packed.prepare
    tokens: list[bytes] = []

    def fails(sequences: list[Any], *roots: Any, **options: Any) -> Any:
        if any(sequence.tobytes() in tokens for sequence in sequences):
            raise RuntimeError("a kernel that refuses")
        return prepare(sequences, *roots, **options)

    records = served.predictor.openjev_fast.engine._encoder
    from jev.api import compile_request

    encoded = records.encode(compile_request(asked[3]["state"], asked[3]["questions"]))
    tokens.append(encoded[0][0].tobytes())
    monkeypatch.setattr(served.engine._packed, "prepare", fails)
    futures = [pool.submit(served.server.post, request) for request in asked]
    served.until(lambda: served.engine.scheduler.inside >= 7)
    go_on()
    replies = [future.result(SECONDS) for future in futures]
    assert [reply.status for reply in replies] == [200] * 3 + [500] + [200] * 4
    assert replies[3].content == {"error": "model inference failed", "error_type": "RuntimeError"}
    for index, reply in enumerate(replies):
        if index != 3:
            assert largest_difference(expected[index], reply.content["answers"]) <= BOUND
    assert culprit > 0 and served.engine.scheduler.inside == 0


def test_a_full_queue_is_503_with_retry_after(tiny_checkpoint, pool, monkeypatch):
    with running(tiny_checkpoint, QUEUE=4) as served:
        expected = served.server.ask(LATE)["answers"]
        with monkeypatch.context() as patched:
            go_on = served.hold(patched)
            inside = [pool.submit(served.server.post, LATE) for _ in range(4)]
            served.until(lambda: served.engine.scheduler.inside == 4)
            connection = socket.create_connection(("127.0.0.1", served.http.server_port))
            body = json.dumps(LATE).encode()
            head = (
                b"POST /v1/systemone HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            )
            connection.sendall(head % len(body) + body)
            answer = connection.recv(1 << 16)
            top, _, rest = answer.partition(b"\r\n\r\n")
            lines = top.lower().split(b"\r\n")
            assert lines[0] == b"http/1.1 503 service unavailable"
            assert b"retry-after: 1" in lines and b"content-length: %d" % len(rest) in lines
            assert sum(line.startswith(b"content-length") for line in lines) == 1
            assert (
                list(json.loads(rest)) == ["error"] and "4 requests are waiting" in json.loads(rest)["error"]
            )
            others = list(pool.map(lambda _: served.server.post(LATE).status, range(20)))
            assert others == [503] * 20
            go_on()
            for future in inside:
                assert largest_difference(expected, future.result(SECONDS).content["answers"]) <= BOUND
        # The connection of the one refused is as good as before.
        connection.sendall(head % len(body) + body)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.close()
        assert served.sample("refused_total") == 21
        counted = {s: served.sample("requests_total", status=s) for s in ("200", "503", "500", "422")}
        assert counted == {"200": 6, "503": 21, "500": 0, "422": 0}


def test_http_requests_are_counted_whether_they_reach_the_model_or_not(tiny_checkpoint):
    with running(tiny_checkpoint) as served:
        assert served.server.post(LATE).status == 200
        assert served.server.post({"state": "x"}).status == 422
        assert served.server.get("/nothing").status == 404
        # They are counted once their replies are sent.
        counted = b'openjev_fast_http_requests_total{status="404"} 1.0'
        served.until(lambda: counted in served.server.get("/metrics").body)
        served.until(lambda: served.sample("http_requests_total", status="422") == 1)
        # Open-Jev refuses what has no questions before it asks the model.
        assert served.sample("requests_total", status="200") == 1


def test_nothing_is_lost_when_a_small_queue_overflows(tiny_checkpoint, pool):
    with running(tiny_checkpoint, QUEUE=3) as served:
        expected = served.server.ask(LATE)["answers"]
        replies: list[Reply] = list(pool.map(lambda _: served.server.post(LATE), range(300)))
        statuses = Counter(reply.status for reply in replies)
        assert set(statuses) <= {200, 503} and statuses.total() == 300 and statuses[200] > 0
        for reply in replies:
            if reply.status == 200:
                assert largest_difference(expected, reply.content["answers"]) <= BOUND
        assert served.sample("refused_total") == statuses[503]
        assert served.sample("requests_total", status="200") == statuses[200] + 1
        assert served.engine.scheduler.inside == 0


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_hangs_up_frees_its_place(tiny_checkpoint, pool, monkeypatch, how, capfd):
    with running(tiny_checkpoint, QUEUE=3) as served:
        go_on = served.hold(monkeypatch)
        first = pool.submit(served.server.post, LATE)
        served.until(lambda: served.engine.scheduler._in_flight)
        body = json.dumps(LATE).encode()
        head = b"POST /v1/systemone HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        leaving = [socket.create_connection(("127.0.0.1", served.http.server_port)) for _ in range(2)]
        for connection in leaving:
            connection.sendall(head % len(body) + body)
        served.until(lambda: len(served.engine.scheduler._queue) == 2)
        assert served.server.post(LATE).status == 503
        for connection in leaving:
            if how == "half":
                connection.shutdown(socket.SHUT_WR)
                continue
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        asked: list[Future[Reply]] = []

        def taken() -> bool:
            asked.append(pool.submit(served.server.post, LATE))
            return served.sample("dropped_total") == 2

        served.until(taken)
        go_on()
        statuses = {future.result(SECONDS).status for future in asked}
        assert first.result(SECONDS).status == 200 and 200 in statuses <= {200, 503}
        served.until(lambda: served.engine.scheduler.inside == 0)
        served.until(lambda: served.sample("requests_total", status="499") == 2)
        for connection in leaving if how == "half" else ():
            # Not an answer that somebody made up.
            assert connection.recv(1 << 16) == b""
            connection.close()
    printed = capfd.readouterr().err
    assert "Traceback" not in printed, printed


def test_a_client_that_has_sent_its_next_request_already_is_not_gone(served, pool, monkeypatch):
    go_on = served.hold(monkeypatch)
    first = pool.submit(served.server.post, LATE)
    served.until(lambda: served.engine.scheduler._in_flight)
    body = json.dumps(LATE).encode()
    head = b"POST /v1/systemone HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.http.server_port)) as connection:
        connection.sendall(head % len(body) + body)
        served.until(lambda: len(served.engine.scheduler._queue) == 1)
        connection.sendall(head % len(body) + body)
        go_on()
        received = b""
        while received.count(b'"answers"') < 2:
            received += connection.recv(1 << 16)
    assert received.count(b"HTTP/1.1 200") == 2 and first.result(SECONDS).status == 200


# The lock


@pytest.mark.parametrize("locks", [0, 1, 2])
def test_the_lock_is_lifted_only_where_there_is_one(locks, caplog):
    first, second = threading.Lock(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None: ...

        if locks == 0:

            def do_POST(self) -> None: ...

        elif locks == 1:

            def do_POST(self) -> Any:
                with first:
                    return first

        else:

            def do_POST(self) -> Any:
                with first, second:
                    return first, second

    handler = Handler.do_POST
    with caplog.at_level(logging.WARNING, "openjev_fast"):
        # A cell of this function too: what the handler sees is looked at through its own.
        jev_server_lock.lift(Handler)
    if locks == 1:
        lock = handler(None)
        assert lock.acquire() and lock.acquire(timeout=1) and not lock.locked() and not caplog.text
        lock.release()
    else:
        assert f"one at a time: expected one lock in the handler of jev.server, found {locks}" in caplog.text
        held = handler(None)
        assert held is None if locks == 0 else all(isinstance(each, type(first)) for each in held)


def test_an_engine_that_takes_one_request_at_a_time_keeps_its_lock(served, monkeypatch):
    def locks() -> int:
        http = make_server(served.predictor, "127.0.0.1", 0)
        http.server_close()
        functions = [each for kind in http.RequestHandlerClass.__mro__ for each in vars(kind).values()]
        cells = [cell for each in functions for cell in getattr(each, "__closure__", None) or ()]
        return sum(isinstance(cell.cell_contents, type(threading.Lock())) for cell in cells)

    assert locks() == 0
    monkeypatch.setattr(type(served.engine), "concurrent", False)
    assert locks() == 1


# A lost device

LOST = """
import runpy, sys
from openjev_fast_plugin import bootstrap
bootstrap.install()
from openjev_fast_plugin.engine import PackedForward
start, PackedForward.diagnose = PackedForward.start, lambda self, error: "broken"
runs = []

def fails_the_third_time(self, prepared):
    runs.append(prepared)
    if len(runs) >= 3:
        raise RuntimeError("an illegal memory access")
    return start(self, prepared)

PackedForward.start = fails_the_third_time
sys.argv = ["jev.server", *sys.argv[1:]]
runpy.run_module("jev.server", run_name="__main__", alter_sys=True)
"""


def test_a_server_that_lost_its_device_answers_nothing_and_exits(tiny_checkpoint):
    process = subprocess.Popen(
        [PYTHON, "-c", LOST, "--checkpoint", tiny_checkpoint, "--backend", "fast"]
        + ["--device", "cpu", "--port", "0"],
        env=environment(*JEV, **ONE_THREAD),
        cwd=PYTHON.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line, process.communicate(timeout=SECONDS)[1]
        server = Server(json.loads(line)["url"])
        assert [server.post(LATE).status for _ in range(2)] == [200, 200]
        assert server.get("/health").content["backend"]["status"] == "ready"
        reply = server.post(LATE)
        assert (reply.status, reply.content["error_type"]) == (500, "DeviceBroken")
        assert process.wait(SECONDS) == 1
        errors = process.communicate(timeout=SECONDS)[1]
        assert "openjev-fast: the server stopped: RuntimeError: an illegal memory access" in errors
    finally:
        process.kill()
        process.communicate()
