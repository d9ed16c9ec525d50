"""The stand-in host keeps the interface the plugin is written against: API, HTTP, and commands."""

import http.client
import json
import math
import os
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import jev
import pytest
from jev import api, metrics, serving
from jev.server import make_server, strict_json

from openjev_fast_plugin.demo import interruptible_children

STATE = "Customer: the kettle I bought leaks. I want my money back.\nAgent: I am sorry to hear that."
CHOICE = {
    "type": "choice",
    "instructions": "Who handles it?",
    "criteria": {"Billing": "Refunds", "Repair": None},
}
SCORE = {"type": "score", "instructions": "How angry?", "criteria": ["Calm", "Annoyed", "Furious"]}
NOUL = {"type": "noul", "instructions": "Refund asked?", "criteria": {"true": "money back", "false": "other"}}
REQUEST = {"model": "open-jev", "state": STATE, "questions": {"team": CHOICE, "anger": SCORE, "refund": NOUL}}


def test_it_says_what_it_is():
    assert "STAND-IN" in jev.__doc__ and jev.__version__.endswith("+standin")


# API


def test_prompts():
    team, anger, refund = api.compile_request(STATE, REQUEST["questions"])
    start = f"Context:\n{STATE}\n\nQuestion: "
    end = "Is this proposed answer correct? Answer Yes or No."
    assert api.candidate_prompts(team) == [
        f"{start}Who handles it?\nProposed answer: Billing: Refunds\n{end}",
        f"{start}Who handles it?\nProposed answer: Repair\n{end}",
    ]
    assert api.candidate_prompts(anger)[2] == f"{start}How angry?\nProposed answer: Furious\n{end}"
    assert api.candidate_prompts(refund) == [
        f"{start}Refund asked?\nYes means: money back\nNo means: other\n"
        "Is the answer to this question yes? Answer Yes or No."
    ]
    levels = ["low", {"z": 1, "y": 2}]
    (structured,) = api.compile_request({"b": 1, "a": "é"}, {"q": {**SCORE, "criteria": levels}})
    prompt = api.candidate_prompts(structured)[1]
    assert prompt.startswith('Context:\n{"a": "é", "b": 1}\n\nQuestion: How angry?\n')
    assert 'Proposed answer: {"y": 2, "z": 1}\n' in prompt
    assert structured["legend"] == {"0": "low", "1": '{"y": 2, "z": 1}'}


@pytest.mark.parametrize(
    "question",
    [
        None,
        {},
        {"type": "essay", "instructions": "x"},
        {"type": "noul"},
        {"type": "noul", "instructions": ""},
        {**NOUL, "criteria": {"true": "t"}},
        {**NOUL, "criteria": {"true": "t", "false": None}},
        {**NOUL, "criteria": {}},
        {**CHOICE, "criteria": {}},
        {**CHOICE, "criteria": ["a", "b"]},
        {**CHOICE, "criteria": {"a": 1}},
        {**CHOICE, "criteria": {f"o{i}": None for i in range(256)}},
        {**SCORE, "criteria": ["one"]},
        {**SCORE, "criteria": ["level"] * 11},
        {**SCORE, "criteria": ["a", None]},
        {**SCORE, "criteria": {"0": "a", "1": "b"}},
    ],
)
def test_bad_questions(question):
    with pytest.raises(ValueError):
        api.compile_request(STATE, {"q": question})


@pytest.mark.parametrize("state", [None, 1, True, 1.5])
def test_bad_states(state):
    with pytest.raises(ValueError, match="state"):
        api.compile_request(state, {"q": NOUL})


def test_limits_that_are_allowed():
    for count in (1, 255):
        options = {f"o{i}": None for i in range(count)}
        (record,) = api.compile_request(STATE, {"q": {**CHOICE, "criteria": options}})
        assert len(api.candidate_prompts(record)) == count
    for count in (2, 10):
        (record,) = api.compile_request(STATE, {"q": {**SCORE, "criteria": ["level"] * count}})
        assert record["answer_keys"] == [str(i) for i in range(count)]


def test_confidences():
    assert metrics.choice_confidence([1.0]) == metrics.score_confidence([1.0]) == 1
    assert metrics.choice_confidence([0.25] * 4) == 0
    assert metrics.choice_confidence([0.7, 0.2, 0.1]) == pytest.approx((0.7 - 1 / 3) / (2 / 3))
    # levels 0..2, mode 1: the expected distance is 0.4, the mean distance from the middle 2/3
    assert metrics.score_confidence([0.2, 0.6, 0.2]) == pytest.approx(1 - 0.4 / (2 / 3))
    assert metrics.score_confidence([0.5, 0.0, 0.5]) == 0
    assert metrics.softmax([0.0, math.log(3.0) * 2], 2.0) == pytest.approx([0.25, 0.75])


def test_answers():
    records = api.compile_request(STATE, REQUEST["questions"])
    answers = api.format_response(records, [[0.25, 0.75], [0.5, 0.25, 0.25], [0.125, 0.875]])["answers"]
    assert answers["team"]["choice"] == "Repair"
    assert answers["team"]["probabilities"] == {"Billing": 0.25, "Repair": 0.75}
    assert answers["anger"]["score"] == 0.75
    assert answers["anger"]["legend"] == {"0": "Calm", "1": "Annoyed", "2": "Furious"}
    assert answers["refund"] == {"type": "noul", "noul": 0.875}


@pytest.mark.parametrize("row", [[1.0], [0.5, 0.6], [math.nan, 1.0], [1.5, -0.5], [0.2, 0.3, 0.5]])
def test_rows_that_are_no_distribution(row):
    records = api.compile_request(STATE, {"q": NOUL})
    with pytest.raises(ValueError):
        api.format_response(records, [row])


# Predictor


class LengthScorer:
    """Scores an option by its length, and remembers the sizes of the groups it was given."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def score(self, records):
        rows = [
            [0.0, 1.0] if record["kind"] == "noul" else [float(len(option)) for option in record["options"]]
            for record in records
        ]
        self.groups.append(sum(len(api.candidate_prompts(record)) for record in records))
        return rows, 7

    def score_request(self, records, *, batch_size):
        return self.score(records)[0], {"logical_input_tokens": 5, "enabled": True}


def predictor(scorer, **options):
    defaults = {"batch_size": 4, "prefix_cache": False, "method": "test", "provenance": {"p": 1}}
    return serving.Predictor(scorer, model_name="base", temperature=2.0, **{**defaults, **options})


def test_groups_are_split_and_rejoined():
    wide = {**CHOICE, "criteria": {"x" * (i + 1): None for i in range(9)}}
    request = {"state": STATE, "questions": {"a": NOUL, "wide": wide, "b": NOUL}}
    scorer = LengthScorer()
    result = predictor(scorer).predict(request)
    assert scorer.groups == [4, 4, 3]
    whole = predictor(LengthScorer(), batch_size=64).predict(request)
    assert result["answers"] == whole["answers"]
    assert result["usage"] == {"input_tokens": 21, "output_tokens": 0}
    assert result["metadata"]["candidate_sequences"] == 11 and result["metadata"]["p"] == 1
    cached = predictor(LengthScorer(), prefix_cache=True).predict(request)
    assert cached["answers"] == whole["answers"] and cached["usage"]["input_tokens"] == 5


@pytest.mark.parametrize("rows", [[], [[0.0]], [[0.0, math.nan]], [[0.0, math.inf]], [[0.0, 1.0, 2.0]]])
def test_invalid_logits(rows):
    scorer = LengthScorer()
    scorer.score = lambda records: (rows, 1)
    with pytest.raises(RuntimeError, match="backend returned invalid logits"):
        predictor(scorer).predict({"state": STATE, "questions": {"q": NOUL}})


@pytest.mark.parametrize("model", [None, "open-jev", "jev-latest", "base"])
def test_known_models(model):
    assert predictor(LengthScorer()).predict({**REQUEST, "model": model, "extra": 1})["model"] == "base"


@pytest.mark.parametrize(
    "request_",
    [
        [],
        {},
        {"state": STATE},
        {"questions": {"q": NOUL}},
        {**REQUEST, "model": "gpt"},
        {**REQUEST, "questions": []},
    ],
)
def test_bad_requests(request_):
    with pytest.raises(ValueError):
        predictor(LengthScorer()).predict(request_)


def test_request_limits():
    with pytest.raises(ValueError, match="questions"):
        predictor(LengthScorer(), max_questions=2).predict(REQUEST)
    with pytest.raises(ValueError, match="candidates"):
        predictor(LengthScorer(), max_candidates=5).predict(REQUEST)


# Loading


def test_load_predictor_provenance(tiny_checkpoint):
    loaded = serving.load_predictor(checkpoint=str(tiny_checkpoint), device="cpu", max_length=100)
    result = loaded.predict(REQUEST)
    assert result["metadata"]["max_length"] == 100
    assert result["metadata"]["base_revision"] == "random-tiny-seed-0"
    assert result["metadata"]["backbone_parameter_dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert len(result["metadata"]["checkpoint_sha256"]) == 64
    with pytest.raises(ValueError, match=r"Input length \d+ exceeds max_length=100; no silent truncation"):
        loaded.predict({**REQUEST, "state": "word " * 200})


def test_load_predictor_arguments(tiny_checkpoint):
    base = str(tiny_checkpoint.parents[1] / "base")
    with pytest.raises(ValueError, match="either"):
        serving.load_predictor(device="cpu")
    with pytest.raises(ValueError, match="either"):
        serving.load_predictor(checkpoint=str(tiny_checkpoint), model_id=base, revision="x", device="cpu")
    with pytest.raises(ValueError, match="revision"):
        serving.load_predictor(model_id=base, device="cpu")
    with pytest.raises(ValueError, match="prefix_cache"):
        serving.load_predictor(checkpoint=str(tiny_checkpoint), device="cpu", prefix_cache=True)
    result = serving.load_predictor(model_id=base, revision="main", device="cpu").predict(REQUEST)
    assert result["metadata"]["max_length"] == 4096 and set(result["answers"]) == set(REQUEST["questions"])


def test_the_digest_follows_every_file(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "a").write_text("1")
    first = serving.checkpoint_sha256(tmp_path)
    (tmp_path / "adapter" / "a").write_text("2")
    assert serving.checkpoint_sha256(tmp_path) != first


# HTTP


@pytest.fixture(scope="module")
def port(tiny_checkpoint):
    loaded = serving.load_predictor(checkpoint=str(tiny_checkpoint), device="cpu")
    server = make_server(loaded, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def call(port, method, path, body=None, headers=None):
    """(status, content type, body) of one request; JSON bodies are parsed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sent = {"Content-Type": "application/json"} if headers is None else headers
    payload = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
    connection.request(method, path, payload, sent)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    kind = response.getheader("Content-Type")
    return response.status, kind, json.loads(content) if kind.startswith("application/json") else content


@pytest.mark.parametrize("path", ["/v1/systemone", "/v1/inference", "/api/jev"])
def test_post_routes(port, path):
    status, _, body = call(port, "POST", path, REQUEST)
    assert status == 200
    assert {name: answer["type"] for name, answer in body["answers"].items()} == {
        "team": "choice",
        "anger": "score",
        "refund": "noul",
    }


def test_get_routes(port):
    status, _, health = call(port, "GET", "/health")
    assert status == 200 and set(health) == {"status", "model", "method"} and health["status"] == "ready"
    assert call(port, "GET", "/v1/models")[2]["models"][0]["name"] == health["model"]
    for page in ("/", "/index.html"):
        status, kind, content = call(port, "GET", page)
        assert status == 200 and kind.startswith("text/html") and b"Stand-in" in content
    examples = call(port, "GET", "/examples.json")[2]
    assert call(port, "POST", "/api/jev", examples[0]["request"])[0] == 200
    for path in ("/nothing", "/../api.py", "/%2e%2e/api.py", "//etc/passwd"):
        assert call(port, "GET", path)[0] == 404


@pytest.mark.parametrize(
    ("status", "path", "body", "headers"),
    [
        (
            403,
            "/api/jev",
            REQUEST,
            {"Content-Type": "application/json", "Origin": "http://elsewhere.example"},
        ),
        (404, "/v1/other", REQUEST, None),
        (413, "/api/jev", b"", {"Content-Type": "application/json", "Content-Length": "4194305"}),
        (415, "/api/jev", REQUEST, {"Content-Type": "text/plain"}),
        (422, "/api/jev", b"{", None),
        (413, "/api/jev", b"", None),
        (422, "/api/jev", b"\xff\xfe", None),
        (422, "/api/jev", [], None),
        (422, "/api/jev", {**REQUEST, "model": "other"}, None),
        (422, "/api/jev", {**REQUEST, "state": "word " * 5000}, None),
        (422, "/api/jev", b'{"state": "a", "state": "b", "questions": {"q": {"type": "noul"}}}', None),
        (422, "/api/jev", json.dumps({**REQUEST, "state": [float("nan")]}).encode(), None),
        (422, "/api/jev", {**REQUEST, "questions": {"q": {**NOUL, "criteria": {"true": "t"}}}}, None),
    ],
)
def test_errors(port, status, path, body, headers):
    got, _, answer = call(port, "POST", path, body, headers)
    assert got == status and isinstance(answer["error"], str)
    assert call(port, "POST", "/api/jev", REQUEST)[0] == 200


def test_a_failed_forward_is_500():
    class Broken:
        def score(self, records):
            raise RuntimeError("secret detail")

    server = make_server(predictor(Broken()), "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        status, _, body = call(server.server_address[1], "POST", "/api/jev", REQUEST)
    finally:
        server.shutdown()
        server.server_close()
    assert (status, body) == (500, {"error": "model inference failed", "error_type": "RuntimeError"})


def test_strict_json():
    assert strict_json(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    for text in ('{"a": 1, "a": 1}', "[Infinity]", "[-Infinity]", "[NaN]", b"\xff", "[1,]"):
        with pytest.raises(ValueError):
            strict_json(text)


# Commands


def environment() -> dict[str, str]:
    """This process's own, with the folder `jev` was found in on the path of children too."""
    folder = str(Path(find_spec("jev").origin).parents[1])
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    kept = {name: value for name, value in os.environ.items() if name != "OPENJEV_BACKEND"}
    return {**kept, "PYTHONPATH": os.pathsep.join([folder, *inherited])}


def test_serve_command(tiny_checkpoint):
    command = [sys.executable, "-m", "jev.server", "--checkpoint", str(tiny_checkpoint)]
    command += ["--device", "cpu", "--port", "0"]
    with interruptible_children():
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    with server as process:
        try:
            ready = json.loads(process.stdout.readline())
            assert set(ready) == {"url", "model", "method"}
            answer = call(int(ready["url"].rpartition(":")[2]), "POST", "/v1/systemone", REQUEST)
            assert answer[0] == 200
        finally:
            process.send_signal(signal.SIGINT)
            try:
                status = process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert status == 0


def test_predict_command(tiny_checkpoint, tmp_path):
    request, output = tmp_path / "request.json", tmp_path / "answer.json"
    request.write_text(json.dumps(REQUEST))
    command = [sys.executable, "-m", "jev.predict", "--checkpoint", str(tiny_checkpoint), "--device", "cpu"]
    command += ["--request", str(request), "--output", str(output), "--batch-size", "2"]
    subprocess.run(command, check=True, env=environment())
    answer = json.loads(output.read_text())
    loaded = serving.load_predictor(checkpoint=str(tiny_checkpoint), device="cpu", batch_size=2)
    assert answer["answers"] == loaded.predict(REQUEST)["answers"]
