"""The HTTP server on the fast backend: upstream's replies to whatever is sent, however it is started."""

from __future__ import annotations

import gzip
import inspect
import json
import math
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from decisions import question, text
from hosts import run
from http_server import JEV, JSON, ONE_THREAD, PYTHON, Reply, Server, Start, Wire, process, running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jev import serving
from jev.server import make_server
from typesafe_sdk import Choice, Noul, NoulCriteria, Score, TypeSafeClient

from openjev_fast_plugin.demo import EXAMPLE, largest_difference

REQUEST = json.loads(EXAMPLE.read_text(encoding="utf-8"))
SMALL = {"state": "Late again.", "questions": {"late": {"type": "noul", "instructions": "Is it late?"}}}
FORTY = {"state": text(20, 1), "questions": {"which": question("choice", 40, 2)}}
BODY_LIMIT = 4 * 1024 * 1024
# Two bfloat16 forwards of a tiny random model that round in different places: over 150 requests at most 0.055 apart
# (median 0.017), where the options of a question lie 0.3 apart. `test_engine` compares in float32.
NOISE = 0.1


def plain(checkpoint: Path, *more: object) -> Start:
    return Start(("-m", "jev.server", "--checkpoint", checkpoint, *more))


@pytest.fixture(scope="module")
def servers(tiny_checkpoint):
    with running(plain(tiny_checkpoint), plain(tiny_checkpoint, "--backend", "fast")) as started:
        yield started


@pytest.fixture(scope="module")
def original(servers) -> Server:
    return servers[0]


@pytest.fixture(scope="module")
def fast(servers) -> Server:
    return servers[1]


@pytest.fixture(scope="module")
def known(fast) -> dict[str, Any]:
    """The fast server's answers to SMALL, to be given again after anything else it was sent."""
    return fast.ask(SMALL)["answers"]


def same_reply(original: Server, fast: Server, body: bytes, **options: Any) -> int:
    """The status both give these bytes; answers must agree within rounding, errors byte for byte."""
    theirs, ours = original.send(body, **options), fast.send(body, **options)
    assert ours.status == theirs.status, (theirs, ours)
    if ours.status == 200:
        assert largest_difference(theirs.content["answers"], ours.content["answers"]) <= NOISE
        assert ours.content["usage"] == theirs.content["usage"]
    else:
        assert isinstance(ours.content["error"], str) and "answers" not in ours.content
        assert ours.body == theirs.body
    return ours.status


# Public clients


def test_jevcompat_finds_nothing_it_does_not_find_without_the_flag(servers, tmp_path):
    def report(name: str, server: Server) -> dict[str, Any]:
        file = tmp_path / f"{name}.json"
        command = [PYTHON, "-m", "jevcompat.cli", "test", server.url, "--timeout", "300", "--json", file]
        subprocess.run(command, capture_output=True, timeout=300)
        return json.loads(file.read_text())

    with ThreadPoolExecutor() as pool:
        theirs, ours = pool.map(report, ("original", "fast"), servers)
    for each in (theirs, ours):
        assert each["summary"]["verdict"] in ("conformant", "not conformant"), each["summary"]
        assert each["summary"]["MUST"]["tested"] >= 31 and each["summary"]["SHOULD"]["tested"] >= 11
        assert not each["case_errors"] and not each["inconclusive"] and not each["aborted"]
        assert len(each["exchanges"]) >= 50
    statuses = [{each["id"]: each["status"] for each in found["results"]} for found in (theirs, ours)]
    worse = {name for name, status in statuses[1].items() if status != "pass" and statuses[0][name] == "pass"}
    assert not worse


def test_the_official_client_gets_the_answers(fast):
    routing, refund, urgency = REQUEST["questions"].values()
    refund = {**refund, "criteria": {"true": "the money back", "false": "anything else"}}
    questions = {"routing": routing, "refund": refund, "urgency": urgency}
    expected = fast.ask({**REQUEST, "questions": questions})
    with TypeSafeClient(api_key="unused", base_url=fast.url, timeout=120) as client:
        names = [model.name for model in client.models.list().models]
        response = client.system_one(
            state=REQUEST["state"],
            questions={
                "routing": Choice(instructions=routing["instructions"], criteria=routing["criteria"]),
                "refund": Noul(
                    instructions=refund["instructions"], criteria=NoulCriteria(**refund["criteria"])
                ),
                "urgency": Score(instructions=urgency["instructions"], criteria=urgency["criteria"]),
            },
        )
    assert response.model == expected["model"] and expected["model"] in names
    assert response.usage.input_tokens == expected["usage"]["input_tokens"]
    answers = list(expected["answers"].values())
    choice, noul, score = response.choices["routing"], response.nouls["refund"], response.scores["urgency"]
    assert choice.choice == answers[0]["choice"]
    assert dict(choice.probabilities) == answers[0]["probabilities"]
    assert choice.confidence == answers[0]["confidence"]
    assert noul.noul == answers[1]["noul"]
    assert score.score == answers[2]["score"] and score.confidence == answers[2]["confidence"]
    assert {str(level): p for level, p in score.probabilities.items()} == answers[2]["probabilities"]


# Answers


@pytest.mark.parametrize("path", ["/v1/systemone", "/v1/inference", "/api/jev"])
def test_every_route_gives_the_same_answers(original, fast, path):
    assert same_reply(original, fast, json.dumps(REQUEST).encode(), path=path) == 200
    assert fast.ask(REQUEST, path=path)["answers"] == fast.ask(REQUEST)["answers"]


def test_a_request_over_upstream_s_batch_size_is_one_forward(original, fast):
    theirs, ours = original.ask(FORTY), fast.ask(FORTY)
    batch_size = inspect.signature(serving.load_predictor).parameters["batch_size"].default
    assert ours["metadata"]["candidate_sequences"] == 40 > batch_size
    backend = ours["metadata"]["backend"]
    assert backend["forwards"] == 1
    assert backend["rows_asked"] == ours["usage"]["input_tokens"] == theirs["usage"]["input_tokens"]
    assert backend["rows_computed"] < backend["rows_asked"] / 3
    expected, found = (list(each["answers"]["which"]["probabilities"].values()) for each in (theirs, ours))
    distance = math.dist(expected, found) / math.dist(expected, [1 / 40] * 40)
    assert distance <= 0.3


def test_requests_at_the_same_time_get_their_own_answers(fast):
    wanted = [SMALL, REQUEST, FORTY] * 4
    expected = [fast.ask(request) for request in wanted]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fast.ask, wanted))
    for got, alone in zip(found, expected, strict=True):
        # In bfloat16 a shared forward rounds elsewhere.
        assert largest_difference(alone["answers"], got["answers"]) <= NOISE
        assert got["usage"] == alone["usage"]


# Connections (their bounds: test_connections)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_compressed_bodies_get_the_same_answers(fast, coding):
    compress = {"gzip": gzip.compress, "zstd": zstandard.compress}[coding]
    body = json.dumps(REQUEST).encode()
    reply = fast.send(compress(body), headers={**JSON, "Content-Encoding": coding})
    assert reply.status == 200 and reply.content["answers"] == fast.ask(REQUEST)["answers"]


def test_one_connection_takes_many_requests(fast, known):
    body = json.dumps(SMALL).encode()
    with Wire(fast.url) as wire:
        for _ in range(5):
            assert wire.post(body).content["answers"] == known
            assert wire.post(b"{}").status == 422
            assert wire.get("/health").status == 200


def test_metrics_are_an_unknown_route_where_there_are_none(original, fast):
    assert fast.get("/nothing").body == original.get("/nothing").body
    assert fast.get("/nothing").status == original.get("/nothing").status == 404


def test_a_terminated_server_has_answered_or_refused_everything(tiny_checkpoint, known, tmp_path):
    log = tmp_path / "access.jsonl"
    start = Start(("-m", "jev.server", "--checkpoint", tiny_checkpoint, "--backend", "fast"))
    start = replace(start, variables=(("OPENJEV_FAST_ACCESS_LOG", str(log)),))
    body = json.dumps(SMALL).encode()
    ready = threading.Barrier(33)

    def client(url: str, keep: bool) -> list[int]:
        """The status of every request up to the first that is not answered; 0: refused, or no answer at all."""
        statuses, wire = [], None
        ready.wait()
        while not statuses or statuses[-1] == 200:
            try:
                wire = wire or Wire(url)
                reply = wire.post(body)
            except ConnectionError:
                reply = Reply(0)
            if reply.status == 200:
                assert reply.content["answers"] == known
            statuses.append(reply.status)
            if wire and not (keep and reply.headers.get("connection") != "close"):
                wire.close()
                wire = None
        return statuses

    with process(start) as (started, server), ThreadPoolExecutor(32) as pool:
        clients = [pool.submit(client, server.url, number % 2 == 0) for number in range(32)]
        ready.wait()
        time.sleep(1)
        started.terminate()
        statuses = [status for each in clients for status in each.result()]
        assert started.wait(60) == 0
        assert "Traceback" not in started.stderr.read()
    answered = statuses.count(200)
    assert answered > 32 and set(statuses) <= {200, 503, 0}
    assert len(statuses) == answered + 32
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    # Each answer was given once, and nothing was computed that nobody got.
    assert [line["status"] for line in lines].count(200) == answered
    assert {line["status"] for line in lines} <= {200, 503}
    assert SMALL["state"] not in log.read_text() and "Is it" not in log.read_text()


def test_an_access_log_that_cannot_be_written_stops_the_start(tiny_checkpoint, tmp_path):
    result = run(
        PYTHON,
        *plain(tiny_checkpoint, "--backend", "fast", "--device", "cpu").arguments,
        path=JEV,
        OPENJEV_FAST_ACCESS_LOG=str(tmp_path),
    )
    assert result.returncode == 1 and result.stdout == ""
    assert "OPENJEV_FAST_ACCESS_LOG: [Errno 21] Is a directory" in result.stderr
    assert "Traceback" not in result.stderr


# Who answers, and who decided that


@pytest.fixture(scope="module")
def everywhere(tiny_checkpoint, tmp_path_factory, fast):
    """Who decided -> a server it decided for; and the finished process of `jev.predict`."""
    folder = tmp_path_factory.mktemp("backend_in_file") / "checkpoint"
    shutil.copytree(tiny_checkpoint, folder)
    config = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**config, "backend": "fast"}))
    request = folder.parent / "request.json"
    request.write_text(json.dumps(REQUEST))
    script = PYTHON.with_name("open-jev-serve")
    serve = (script,) if script.exists() else ("-c", "from jev.server import main; main()")
    environment = {"OPENJEV_BACKEND": "fast", **ONE_THREAD}
    starts = (
        Start((*serve, "--checkpoint", tiny_checkpoint), tuple(environment.items())),
        plain(folder),
    )
    predict = ("-m", "jev.predict", "--checkpoint", tiny_checkpoint, "--request", request, "--device", "cpu")
    with ThreadPoolExecutor() as pool:
        # Names every module as it is imported: the answers do not say who computed them.
        predicted = pool.submit(run, PYTHON, "-X", "importtime", *predict, path=JEV, **environment)
        with running(*starts) as (by_environment, by_file):
            yield {
                "flag": fast,
                "environment": by_environment,
                "file": by_file,
                "predict": predicted.result(),
            }


@pytest.mark.parametrize("decided_by", ["flag", "environment", "file"])
def test_health_and_metadata_say_who_answers_and_who_decided(everywhere, fast, decided_by):
    server = everywhere[decided_by]
    health = server.get("/health")
    assert health.status == 200 and health.content["status"] == "ready"
    result = server.ask(REQUEST)
    for backend in (health.content["backend"], result["metadata"]["backend"]):
        assert (backend["name"], backend["decided_by"]) == ("fast", decided_by)
        assert backend["device"] == "cpu" and backend["dtype"] == "bfloat16"
    assert result["metadata"]["backend"]["forwards"] == 1
    assert result["answers"] == fast.ask(REQUEST)["answers"]


def test_without_the_flag_nothing_speaks_of_a_backend(original):
    assert set(original.get("/health").content) == {"status", "model", "method"}
    assert "backend" not in original.ask(SMALL)["metadata"]


def test_predict_follows_the_environment(everywhere, fast):
    predicted = everywhere["predict"]
    assert predicted.returncode == 0, predicted.stderr
    assert "openjev_fast_plugin.forward" in predicted.stderr
    assert json.loads(predicted.stdout)["answers"] == fast.ask(REQUEST)["answers"]


@pytest.fixture(scope="module")
def predictor(tiny_checkpoint):
    threads = torch.get_num_threads()
    # As the servers have it: the order of a sum depends on it.
    torch.set_num_threads(1)
    yield serving.load_predictor(checkpoint=str(tiny_checkpoint), device="cpu", backend="fast")
    torch.set_num_threads(threads)


def test_load_predictor_takes_the_backend_as_an_argument(predictor, fast):
    result = predictor.predict(REQUEST)
    backend = result["metadata"]["backend"]
    assert (backend["name"], backend["decided_by"], backend["forwards"]) == ("fast", "argument", 1)
    assert result["answers"] == fast.ask(REQUEST)["answers"]


# Errors


def bad(**changes: Any) -> bytes:
    return json.dumps({**SMALL, **changes}).encode()


LATE = SMALL["questions"]["late"]
REFUSED = {
    "over max_length": bad(state="word " * 5000),
    "unknown model": bad(model="gpt"),
    "model is a list": bad(model=["open-jev"]),
    "no questions": bad(questions={}),
    "too many questions": bad(questions={str(index): LATE for index in range(4097)}),
    "too many candidates": bad(questions={str(i): question("choice", 255, 3) for i in range(258)}),
    "one-sided criteria": bad(questions={"q": {**LATE, "criteria": {"true": "t"}}}),
    "no options": bad(questions={"q": {**LATE, "type": "choice", "criteria": {}}}),
    "256 options": bad(questions={"q": question("choice", 256, 3)}),
    "one level": bad(questions={"q": {**LATE, "type": "score", "criteria": ["only"]}}),
    "unknown type": bad(questions={"q": {**LATE, "type": "essay"}}),
    "not an object": b"[]",
    "not JSON": b"{",
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_refused_in_upstream_s_words(original, fast, known, body):
    assert same_reply(original, fast, body) == 422
    assert fast.ask(SMALL)["answers"] == known


@pytest.mark.parametrize(
    ("status", "options"),
    [
        (404, {"path": "/v1/other"}),
        (403, {"headers": {**JSON, "Origin": "http://elsewhere.example"}}),
        (415, {"headers": {"Content-Type": "text/plain"}}),
        (415, {"headers": {}}),
        (413, {"length": 0}),
        (413, {"length": BODY_LIMIT + 1}),
        (422, {"length": 10_000}),
    ],
    ids=["path", "origin", "content type", "no content type", "no length", "too long", "cut short"],
)
def test_the_rest_of_http_is_left_to_upstream(original, fast, known, status, options):
    body = b"" if "length" in options and options["length"] != 10_000 else json.dumps(SMALL).encode()
    assert same_reply(original, fast, body, **options) == status
    assert fast.ask(SMALL)["answers"] == known


@pytest.fixture
def in_process(predictor):
    server = make_server(predictor, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Server(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_is_never_an_answer(in_process, predictor, monkeypatch, logit):
    expected = in_process.ask(REQUEST)["answers"]
    engine = predictor.scorer.model.openjev_fast.engine
    score = engine.score

    def broken(records):
        scores = score(records)
        scores.logits[1] = torch.full_like(scores.logits[1], logit)
        return scores

    with monkeypatch.context() as patched:
        patched.setattr(engine, "score", broken)
        reply = in_process.post(REQUEST)
    assert reply.status == 500
    assert reply.content == {"error": "model inference failed", "error_type": "RuntimeError"}
    assert in_process.ask(REQUEST)["answers"] == expected


def test_a_failed_forward_is_never_an_answer(in_process, predictor, monkeypatch):
    def fails(layout):
        raise torch.OutOfMemoryError("of the test")

    engine = predictor.scorer.model.openjev_fast.engine
    with monkeypatch.context() as patched:
        patched.setattr(engine._packed, "start", fails)
        reply = in_process.post(REQUEST)
    assert (reply.status, reply.content["error_type"]) == (500, "OutOfMemoryError")
    assert in_process.post(REQUEST).status == 200


# Any bytes at all


def test_a_body_of_the_largest_size_is_read_and_one_byte_more_is_not(original, fast, known):
    empty = len(bad(state=""))
    largest = bad(state="word " * ((BODY_LIMIT - empty) // 5) + "w" * ((BODY_LIMIT - empty) % 5))
    assert len(largest) == BODY_LIMIT
    assert same_reply(original, fast, largest) == 422
    # Upstream answers without reading it: whether that arrives is up to the network.
    assert original.send(largest + b" ").status in (413, 0)
    assert fast.send(largest + b" ").status == 413
    assert fast.ask(SMALL)["answers"] == known


@pytest.mark.parametrize("depth", [10, 200, 3_000, 200_000])
@pytest.mark.parametrize("part", ["state", "questions", "criteria", "unclosed"])
def test_deep_nesting(original, fast, known, part, depth):
    if part == "unclosed":
        body = b"[" * depth
    else:
        nested = "[" * depth + "]" * depth if part == "state" else '{"a":' * depth + "1" + "}" * depth
        inside = {part: "@"} if part != "criteria" else {"questions": {"late": {**LATE, part: "@"}}}
        body = json.dumps({**SMALL, **inside}).replace('"@"', nested).encode()
    same_reply(original, fast, body)
    assert fast.ask(SMALL)["answers"] == known


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
VALID = {
    "model": "open-jev",
    "state": {"text": "Late again.", "turns": [1, None]},
    "questions": {
        "pick": {"type": "choice", "instructions": "Which?", "criteria": {"a": "first", "b": None}},
        "rate": {"type": "score", "instructions": ["How", "bad?"], "criteria": ["low", "high"]},
        "late": {"type": "noul", "instructions": "Late?", "criteria": {"true": "yes", "false": "no"}},
    },
}


def paths(value: Any, prefix: tuple = ()) -> list[tuple]:
    """Where every value inside `value` is."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in [(*prefix, key), *paths(inner, (*prefix, key))]]


def parent(request: Any, path: tuple) -> Any:
    for key in path[:-1]:
        request = request[key]
    return request


@st.composite
def wrong_types(draw: st.DrawFn) -> bytes:
    """A valid request with one value replaced by anything, or gone."""
    request = deepcopy(VALID)
    path = draw(st.sampled_from(paths(VALID)))
    if draw(st.booleans()):
        parent(request, path)[path[-1]] = draw(JUNK)
    else:
        del parent(request, path)[path[-1]]
    return json.dumps(request, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


NOT_JSON = ["NaN", "Infinity", "-Infinity", "1e999", "01", "'a'", "undefined", "[1,]", '"\t"', '"\\x"', ""]


@st.composite
def not_quite_json(draw: st.DrawFn) -> bytes:
    """A valid request with one value replaced by what JSON does not have, or one key there twice."""
    request = deepcopy(VALID)
    path = draw(st.sampled_from([path for path in paths(VALID) if isinstance(path[-1], str)]))
    holder = parent(request, path)
    if draw(st.booleans()):
        holder[path[-1]] = "@"
        return json.dumps(request).replace('"@"', draw(st.sampled_from(NOT_JSON))).encode()
    holder["@"] = holder[path[-1]]
    return json.dumps(request).replace('"@"', json.dumps(path[-1])).encode()


NOT_UNICODE = [b"\\ud83d", b"\\ude00", b"\\ude00\\ud83d", b"\\u0000", b"\xff", b"\xc3", b"\xed\xa0\x80"]


@st.composite
def not_unicode(draw: st.DrawFn) -> bytes:
    """A valid request with bytes that are not UTF-8, with half a surrogate pair, or in another encoding."""
    request = deepcopy(VALID)
    path = draw(st.sampled_from(paths(VALID)))
    holder = parent(request, path)
    if draw(st.booleans()) and isinstance(holder, dict):
        holder["late@"] = holder.pop(path[-1])
    else:
        holder[path[-1]] = "late@"
    body = json.dumps(request).encode()
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32"]))
    if encoding != "utf-8":
        return body.decode().encode(encoding)
    return body.replace(b"@", draw(st.sampled_from(NOT_UNICODE)))


def truncated() -> st.SearchStrategy[bytes]:
    body = json.dumps(VALID).encode()
    return st.integers(0, len(body) - 1).map(lambda length: body[:length])


ANY_BODY = st.one_of(
    st.binary(max_size=40),
    JUNK.map(lambda value: json.dumps(value).encode()),
    truncated(),
    wrong_types(),
    not_quite_json(),
    not_unicode(),
)
CONTENT_TYPES = st.sampled_from(
    [*["application/json"] * 8, "application/json; charset=latin-1", "text/json", "application/js", "a/b", ""]
)


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=ANY_BODY, content_type=CONTENT_TYPES)
def test_any_body_gets_upstream_s_reply_and_the_next_request_works(original, fast, known, body, content_type):
    status = same_reply(original, fast, body, headers={"Content-Type": content_type})
    assert status in (200, 413, 415, 422)
    assert fast.ask(SMALL)["answers"] == known
