"""`--warmup` of the server: what it takes and refuses, what it runs, and that the port stays shut meanwhile."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hosts import environment, run, serving
from http_server import JEV, ONE_THREAD, PYTHON, Server
from jev.model import DecisionModel
from recorded import record_instead_of_capture

from openjev_fast_plugin import engine as engine_module
from openjev_fast_plugin import warm_start, warmup
from openjev_fast_plugin.demo import EXAMPLE
from openjev_fast_plugin.engine import CUDA_BUCKET, FastEngine
from openjev_fast_plugin.graphs import GraphedForward
from openjev_fast_plugin.ops import _cuda
from openjev_fast_plugin.ops._choices import Choices, Heads, Product
from openjev_fast_plugin.settings import BackendError, Settings
from openjev_fast_plugin.takeover import Takeover
from openjev_fast_plugin.tuner import MOST_ROWS, Weight

LATE: dict[str, Any] = {
    "state": "Late again.",
    "questions": {"late": {"type": "noul", "instructions": "Is it late?"}},
}
TEXT = json.dumps(LATE)


# What it takes


@pytest.mark.parametrize(
    "text, rows",
    [("72", [72]), ("280, 70", [72, 280]), ("8-24", [8, 16, 24]), ("512-640:64", [512, 576, 640])],
)
def test_sizes(text, rows):
    assert warm_start.read(text, "--warmup") == warm_start.WarmUp("--warmup", rows, [])


@pytest.mark.parametrize(
    "content, lines",
    [
        (TEXT, [1]),
        (json.dumps(LATE, indent=2), [1]),
        (f"{TEXT}\n{TEXT}\n\n  {TEXT}\n", [1, 2, 4]),
        (f"[{TEXT}, {TEXT}]", [1, 1]),
        (f"\n[\n{TEXT},\n\n{TEXT}\n]\n", [3, 5]),
    ],
    ids=["one", "one over lines", "a line each", "array", "array over lines"],
)
def test_requests_of_a_file(tmp_path, content, lines):
    file = tmp_path / "examples"
    file.write_text(content)
    found = warm_start.read(str(file), "--warmup")
    assert found.rows == [] and [example.request for example in found.examples] == [LATE] * len(lines)
    assert [example.where for example in found.examples] == [f"{file}, line {line}" for line in lines]


OTHER = {"late": {"type": "choice", "instructions": "Which?"}}


@pytest.mark.parametrize(
    "content, told",
    [
        ("", "holds no request"),
        ("[]", "holds no request"),
        (f"{TEXT}\n{{", "line 2: "),
        (f"[{TEXT}", "the array does not end"),
        (f"[\n{TEXT},\n]", "line 3: Expecting value"),
        (f"[{TEXT} {TEXT}]", "line 1: expected ',' or ']'"),
        (f"[{TEXT}]\n7", "line 2: something follows the array"),
        (f'{TEXT}\n{{"state": NaN}}', "line 2: NaN is not JSON"),
        ('\n{"state": 1, "state": 2}', "line 2: a key appears twice"),
        (f"{TEXT}\n7", "line 2: a request is an object with state and questions"),
        (f'{TEXT}\n{TEXT}\n{{"state": "x"}}', "line 3: a request is an object with state and questions"),
        (f"{TEXT}\n{json.dumps({**LATE, 'questions': OTHER})}", "line 2: the server refuses this request: "),
        ("[" * 100_000, "line 1: "),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, content, told):
    file = tmp_path / "examples"
    file.write_text(content)
    with pytest.raises(BackendError) as raised:
        warm_start.read(str(file), f"--warmup {file}")
    assert str(raised.value).startswith(f"--warmup {file}: {file}") and told in str(raised.value)


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "is empty: name row counts"),
        ("8-4", "'8-4' names no rows between 1 and"),
        ("8,,9", "'' is neither a number of rows nor a range"),
        ("9999999", "names no rows between 1 and"),
        ("no/such/file", "there is no file 'no/such/file'; give one of example requests, or rows such as"),
        ("/", "/ cannot be read"),
    ],
)
def test_a_value_that_is_neither(text, told):
    with pytest.raises(BackendError) as raised:
        warm_start.read(text, "--warmup X")
    assert str(raised.value).startswith("--warmup X") and told in str(raised.value)


def test_a_file_in_another_encoding(tmp_path):
    file = tmp_path / "examples"
    file.write_bytes(TEXT.replace("Late again", "Zu sp\xe4t").encode("latin-1"))
    with pytest.raises(BackendError, match="cannot be read: 'utf-8' codec"):
        warm_start.read(str(file), "--warmup")


# What it runs


def engine_of(checkpoint) -> FastEngine:
    model = DecisionModel.load(checkpoint, "cpu").float()
    engine = FastEngine(model, Settings())
    # It keeps the model it was built for.
    engine.model = model
    return engine


def test_on_a_cpu_everything_runs_once(tiny_checkpoint, monkeypatch):
    engine = engine_of(tiny_checkpoint)
    seen: list[int] = []
    real = engine._packed._compute

    def compute(layout, *rest):
        seen.append(layout.rows)
        return real(layout, *rest)

    monkeypatch.setattr(engine._packed, "_compute", compute)
    from jev.api import compile_request

    records = compile_request(LATE["state"], LATE["questions"])
    counts = engine.warm_up(lambda: engine.score(records), [8, 40])
    asked = sum(map(len, engine._encoder.encode(records)[0]))
    assert seen == [8, 40, asked] and counts == {"forwards": 3}
    # Afterwards nothing is noted any more.
    engine.score(records)
    assert engine._packed._observed is None and counts == {"forwards": 3}


def test_more_rows_than_a_forward_has_are_refused(tiny_checkpoint):
    engine = engine_of(tiny_checkpoint)
    with pytest.raises(ValueError, match=r"no forward has 9000000 rows: max_rows is \d+"):
        engine.warm_up(lambda: None, [9_000_000])


class Tuning:
    """Every forward wants a product of its rows, and what it reads; tuning one takes it off the list."""

    def __init__(self, events: list[Any]) -> None:
        self.events, self.entries, self.fails = events, {}, False
        self.attention = None
        self.choices = Choices()
        self.tuner = SimpleNamespace(weights={Weight("linear", 64, 32): ["a weight"]})

    def wants(self, layout: Any) -> None:
        for rows in (layout.rows, layout.reads):
            self.choices.find(Product("linear", rows, 64, 32))
            # Of another model on the device.
            self.choices.find(Product("linear", rows, 7, 7))

    def tune(self, product: Product):
        yield
        if self.fails:
            raise RuntimeError("no memory\nfor it")
        self.choices.wanted.pop(product)
        self.events.append(("tuned", product.rows))


@pytest.fixture
def gpu(tiny_checkpoint, compiled_layout, monkeypatch):
    """An engine whose forwards are captured, as on a GPU, and compute nothing; with the events in their order."""
    record_instead_of_capture(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(_cuda, "load", lambda: compiled_layout)
    engine = engine_of(tiny_checkpoint)
    made = SimpleNamespace(engine=engine, events=[])
    engine.tuning = Tuning(made.events)

    class Graphs(GraphedForward):
        def _eager(self, layout):
            made.events.append(("run", layout.rows))
            engine.tuning.wants(layout)
            return torch.zeros(8)

        def _captured(self, layout):
            made.events.append(("captured", layout.rows))
            return super()._captured(layout)

        def _start_capturing(self):
            raise AssertionError("nothing is captured behind a warm-up's back")

    packed = engine._packed
    packed.bucket, packed._thread = CUDA_BUCKET, None
    packed.graphs = Graphs(lambda layout: torch.zeros(len(layout.candidate_read)), torch.device("cpu"))
    return made


def test_on_a_gpu_forwards_run_then_are_tuned_then_captured(gpu):
    from jev.api import compile_request

    records = compile_request(LATE["state"], LATE["questions"])
    counts = gpu.engine.warm_up(lambda: gpu.engine.score(records), [72, MOST_ROWS + 64])
    steps = [what for what, _ in gpu.events]
    first, last = steps.index("tuned"), len(steps) - steps[::-1].index("tuned")
    assert set(steps[:first]) == {"run"} and set(steps[first:last]) == {"tuned"}
    # Once more before each capture, in the ways that are in force then.
    assert steps[last:] == ["run", "captured"] * counts["captured"]
    # What was read of every forward too; large forwards run in the default way, and eagerly.
    tuned = [rows for what, rows in gpu.events if what == "tuned"]
    asked = next(rows for what, rows in reversed(gpu.events) if what == "captured")
    assert sorted(tuned) == sorted({72, 8, asked})
    assert {rows for what, rows in gpu.events if what == "captured"} == {72, asked}
    assert counts["tuned"] == len(tuned) and counts["failed"] == 0
    assert counts["captured"] < counts["shapes"] <= counts["forwards"]
    # The first request of that shape is replayed.
    assert gpu.engine.score(records).stats["graph_replays"] == 1


@pytest.mark.parametrize("size", [72, 280, 512])
def test_a_size_stands_for_every_length_that_is_rounded_to_it(gpu, size):
    gpu.engine.warm_up(lambda: None, [size])
    packed = gpu.engine._packed
    for length in range(size - 7, size + 1):
        assert packed.graphs.holds(packed.prepare([np.arange(length, dtype=np.int32)])), length


def test_of_more_shapes_than_graphs_are_kept_the_last_are_captured(gpu):
    graphs = gpu.engine._packed.graphs
    graphs._most_graphs = 3
    counts = gpu.engine.warm_up(lambda: None, [8 * n for n in range(1, 9)])
    assert counts["captured"] == 3 < counts["shapes"] and graphs.counts["evictions"] == 0
    # The largest first, in whose memory the others run.
    assert [rows for what, rows in gpu.events if what == "captured"] == [64, 64, 56]


def test_without_memory_for_a_graph_the_server_starts_all_the_same(gpu, monkeypatch, caplog):
    graphs = gpu.engine._packed.graphs
    real, left = graphs._captured, [None]

    def captured(layout):
        if not left:
            raise torch.OutOfMemoryError("no memory")
        left.pop()
        return real(layout)

    monkeypatch.setattr(graphs, "_captured", captured)
    counts = gpu.engine.warm_up(lambda: None, [8, 16, 24])
    assert counts["captured"] == 1 and caplog.text.count("no device memory to capture") == 1


def test_where_a_large_graph_finds_no_memory_smaller_ones_may(gpu, monkeypatch):
    graphs = gpu.engine._packed.graphs
    real = graphs._captured

    def captured(layout):
        if layout.rows > 16:
            raise torch.OutOfMemoryError("no memory")
        return real(layout)

    monkeypatch.setattr(graphs, "_captured", captured)
    assert gpu.engine.warm_up(lambda: None, [8, 16, 24])["captured"] >= 2


def test_tuning_that_is_off_is_left_out(gpu, monkeypatch):
    monkeypatch.setattr(gpu.engine._packed.graphs, "_eager", lambda layout: torch.zeros(8))
    gpu.engine.tuning = None
    counts = gpu.engine.warm_up(lambda: None, [72])
    assert "tuned" not in counts and counts["captured"] > 0


class Attention:
    """Attention whose measurement is made up, and puts all in small tiles."""

    heads = Heads(2, 1, 16)

    def __init__(self, events: list[Any], patch: pytest.MonkeyPatch) -> None:
        self.events, self.patch, self.wanted, self.fails = events, patch, True, False

    def tune(self):
        yield
        if self.fails:
            raise RuntimeError("no memory\nfor it")
        self.events.append(("measured", 0))
        self.wanted = False
        self.patch.setattr(engine_module, "few_queries_for", lambda device, heads: 1 << 20)


def test_tile_sizes_are_measured_before_anything_is_laid_out(gpu, monkeypatch):
    gpu.engine.tuning.attention = Attention(gpu.events, monkeypatch)
    counts = gpu.engine.warm_up(lambda: None, [72, 280])
    assert gpu.events[0] == ("measured", 0) and counts["attention"] == 1
    packed = gpu.engine._packed
    for size in (72, 280):
        layout = packed.prepare([np.arange(size, dtype=np.int32)])
        assert layout.tile_queries == (10, 10) and packed.graphs.holds(layout)
    # Once.
    counts = gpu.engine.warm_up(lambda: None, [72])
    assert counts["attention"] == 0 and gpu.events.count(("measured", 0)) == 1


def test_tile_sizes_that_cannot_be_measured_are_said_and_left(gpu, monkeypatch, capsys):
    gpu.engine.tuning.attention = Attention(gpu.events, monkeypatch)
    gpu.engine.tuning.attention.fails = True
    counts = gpu.engine.warm_up(lambda: None, [72])
    assert counts["attention"] == 0 and counts["captured"] > 0
    said = capsys.readouterr().err
    assert "could not be measured" in said and "no memory" in said


def test_a_matmul_that_cannot_be_tuned_is_said_and_left(gpu, capsys):
    gpu.engine.tuning.fails = True
    counts = gpu.engine.warm_up(lambda: None, [72])
    assert (counts["tuned"], counts["failed"]) == (0, 2) and counts["captured"] > 0
    assert "could not be tuned" in capsys.readouterr().err


def plan(rows=(), examples=()) -> warm_start.WarmUp:
    return warm_start.WarmUp("--warmup X", list(rows), [warm_start.Example(*each) for each in examples])


@pytest.mark.parametrize(
    "error, told",
    [
        (
            ValueError("unknown model 'gpt'"),
            "f, line 7: the server refuses this request: unknown model 'gpt'",
        ),
        (KeyError("state"), "f, line 7: the server refuses this request: 'state' is missing"),
        (RuntimeError("invalid logits"), "f, line 7: this request failed: RuntimeError: invalid logits"),
    ],
)
def test_a_request_that_is_refused_is_named_by_its_line(error, told):
    def predict(request):
        raise error

    for engine in (SimpleNamespace(warm_up=lambda ask, rows: ask()), SimpleNamespace()):
        with pytest.raises(BackendError) as raised:
            plan(examples=[("f, line 7", LATE)]).run(predict, Takeover("fast", "flag", engine))
        assert str(raised.value) == f"--warmup X: {told}"


def test_choices_that_cannot_be_kept_stop_the_start():
    def warm_up(ask, rows):
        raise OSError("Read-only file system: '/cache'")

    with pytest.raises(BackendError, match="cannot be kept: Read-only.*OPENJEV_FAST_TUNING=off"):
        plan([8]).run(lambda request: None, Takeover("fast", "flag", SimpleNamespace(warm_up=warm_up)))


def test_other_engines_answer_the_examples_and_take_no_sizes(capsys):
    answered: list[Any] = []
    taken = Takeover("graph", "flag", SimpleNamespace())
    plan(examples=[("f, line 1", LATE), ("f, line 2", LATE)]).run(answered.append, taken)
    assert answered == [LATE] * 2
    assert "2 example requests answered" in capsys.readouterr().err
    with pytest.raises(BackendError, match="--warmup X: backend 'graph' is warmed up with example requests"):
        plan([72]).run(answered.append, taken)
    # Whatever `auto` came to, it starts.
    plan([72]).run(answered.append, Takeover("torch", "flag", requested="auto"))
    assert "sizes are for backend 'fast', not for 'torch'" in capsys.readouterr().err


def test_the_products_of_a_forward_are_tuned_once(gpu):
    tuning = gpu.engine.tuning
    for rows in (72, 72, MOST_ROWS + 8):
        tuning.choices.find(Product("linear", rows, 64, 32))
    tuning.choices.find(Product("linear", 72, 7, 7))
    assert warmup.tune_wanted(tuning, torch.device("cuda", 0)) == {"tuned": 1, "failed": 0}
    assert gpu.events == [("tuned", 72)]


# Real servers


def command(checkpoint, *more):
    return ("-m", "jev.server", "--checkpoint", checkpoint, "--device", "cpu", "--port", 0, *more)


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_a_server_has_run_its_examples_when_its_port_opens(tiny_checkpoint, how):
    given = ["--warmup", EXAMPLE] if how == "flag" else []
    variables = {} if how == "flag" else {"OPENJEV_FAST_WARMUP": str(EXAMPLE)}
    arguments = command(tiny_checkpoint, "--backend", "fast", *given)
    with serving(PYTHON, *arguments, path=JEV, **ONE_THREAD, **variables) as url:
        metrics = Server(url).get("/metrics").body.decode()
        # Forwards are forwards; a request is one that a client made.
        assert 'openjev_fast_forwards_total{replayed="no"} 1.0' in metrics
        assert 'openjev_fast_requests_total{status="200"} 0.0' in metrics
        assert Server(url).post(LATE).status == 200


def test_the_flag_comes_before_the_environment(tiny_checkpoint):
    arguments = command(tiny_checkpoint, "--backend", "fast", "--warmup", "8,16")
    with serving(PYTHON, *arguments, path=JEV, **ONE_THREAD, OPENJEV_FAST_WARMUP="no/such/file") as url:
        assert Server(url).get("/health").content["backend"]["status"] == "ready"


@pytest.mark.parametrize(
    "given, told, loaded",
    [
        (["--backend", "fast", "--warmup", "no-such-file"], "--warmup no-such-file: there is no file", False),
        (["--backend", "fast", "--warmup", "8-4"], "--warmup 8-4: '8-4' names no rows", False),
        (["--backend", "fast", "--warmup", "FILE"], "line 2: the server refuses this request: ", False),
        (
            ["--backend", "fast", "--warmup", "MODEL"],
            "line 1: the server refuses this request: unknown model",
            True,
        ),
        (["--warmup", "72"], "--warmup 72: a backend of openjev-fast-plugin is what warms up", False),
        (["--backend", "torch", "--warmup", "72"], "add --backend fast, or leave it out", False),
    ],
    ids=["no file", "no rows", "refused", "another model", "no backend", "original"],
)
def test_what_is_wrong_stops_the_start(tiny_checkpoint, tmp_path, given, told, loaded):
    files = {
        "FILE": f"{TEXT}\n{json.dumps({**LATE, 'questions': OTHER})}",
        "MODEL": json.dumps({**LATE, "model": "gpt"}),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    given = [str(tmp_path / each) if each in files else each for each in given]
    result = run(PYTHON, *command(tiny_checkpoint, *given), path=JEV, **ONE_THREAD)
    assert result.returncode == 1 and result.stdout == "" and told in result.stderr
    assert "Traceback" not in result.stderr and ("Loading weights" in result.stderr) == loaded


def test_without_a_backend_the_environment_warms_nothing_up(tiny_checkpoint):
    with serving(
        PYTHON, *command(tiny_checkpoint), path=JEV, **ONE_THREAD, OPENJEV_FAST_WARMUP="no/such/file"
    ) as url:
        assert Server(url).get("/health").status == 200


def test_the_port_is_shut_meanwhile_and_ctrl_c_ends_it(tiny_checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [*command(tiny_checkpoint, "--backend", "fast", "--warmup", "2000-4000:1"), "--port", port]
    process = subprocess.Popen(
        [PYTHON, *map(str, arguments)],
        env=environment(*JEV, **ONE_THREAD),
        cwd=PYTHON.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        read = ""
        while "running sizes" not in read:
            line = process.stderr.readline()
            assert line, read
            read += line
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=60)
        assert process.returncode == 130 and out == "" and "Traceback" not in read + rest
    finally:
        process.kill()
        process.communicate()
