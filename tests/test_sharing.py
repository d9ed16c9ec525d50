"""Requests of several threads in one forward of the real engine: their answers, faults, and memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decisions import question, text
from jev.api import compile_request
from jev.model import DecisionModel

from openjev_fast_plugin import engine as engine_module
from openjev_fast_plugin import weights as model_weights
from openjev_fast_plugin.engine import CUDA_BUCKET, SHARED_BUCKET, FastEngine, PackedForward, Scores
from openjev_fast_plugin.exchange import ClientGone, Unavailable, answering
from openjev_fast_plugin.prefixes import Planned
from openjev_fast_plugin.scheduler import DeviceBroken
from openjev_fast_plugin.settings import Settings
from openjev_fast_plugin.takeover import accelerate

Records = list[dict[str, Any]]

# Of a probability, in float32.
BOUND = 1e-5


def engine_of(checkpoint, settings: Settings = Settings()) -> FastEngine:  # noqa: B008
    """A float32 engine that keeps the model it was built for."""
    model = DecisionModel.load(checkpoint, "cpu").float()
    engine = FastEngine(model, settings)
    engine.model = model
    return engine


@pytest.fixture(scope="module")
def shared_engine(tiny_checkpoint) -> FastEngine:
    return engine_of(tiny_checkpoint)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


class Gate:
    """Holds an engine's device back until it is opened, so that whoever comes meanwhile waits."""

    def __init__(self, engine: FastEngine, monkeypatch) -> None:
        self._open, self._engine = threading.Event(), engine
        start = engine._packed.start

        def held(layout: Any) -> Callable[[], Any]:
            assert self._open.wait(20)
            return start(layout)

        monkeypatch.setattr(engine._packed, "start", held)

    def ask(self, pool: ThreadPoolExecutor, requests: list[Records]) -> list[Future[Scores]]:
        """Ask all at once; the first one is held, the others wait."""
        first = pool.submit(self._engine.score, requests[0])
        until(lambda: self._engine.scheduler._in_flight)
        return [first, *(pool.submit(self._engine.score, records) for records in requests[1:])]

    def open(self, waiting: int) -> None:
        """Open once so many requests wait, beside the one that is held."""
        until(lambda: len(self._engine.scheduler._queue) >= waiting)
        self._open.set()


def records_of(words: int, kind: str, options: int, seed: int) -> Records:
    return compile_request(text(words, seed), {"q": question(kind, options, seed)})


def mixed(count: int) -> list[Records]:
    """Requests of very different sizes, some about one state."""
    kinds = [("noul", 1, 10), ("choice", 3, 40), ("score", 5, 25), ("noul", 1, 200), ("choice", 30, 15)]
    found = []
    for seed in range(count):
        kind, options, words = kinds[seed % 5]
        found.append(records_of(words, kind, options, seed if seed % 3 else 7))
    return found


def probabilities(scores: Scores) -> list[torch.Tensor]:
    return [row.double().softmax(0) for row in scores.logits]


def assert_same(found: Scores, expected: Scores) -> None:
    assert found.input_tokens == expected.input_tokens
    assert found.stats["rows_asked"] == expected.stats["rows_asked"]
    for got, wanted in zip(probabilities(found), probabilities(expected), strict=True):
        assert (got - wanted).abs().max() <= BOUND


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as made:
        yield made


def test_answers_do_not_depend_on_who_shared_the_forward(tiny_checkpoint, monkeypatch, pool):
    engine = engine_of(tiny_checkpoint, Settings(share_rows=10**6))
    requests = mixed(24)
    alone = [engine.score(records) for records in requests]
    assert all(scores.stats["shared_with"] == 0 for scores in alone)
    gate = Gate(engine, monkeypatch)
    futures = gate.ask(pool, requests)
    gate.open(len(requests) - 1)
    together = [future.result() for future in futures]
    for found, expected in zip(together, alone, strict=True):
        assert_same(found, expected)
    # The first one, about half of all, the rest.
    requests_with = [scores.stats["shared_with"] + 1 for scores in together]
    assert requests_with[0] == 1 and min(requests_with[1:]) >= 8
    assert sum(1 / count for count in requests_with) == pytest.approx(3)
    rows = sum(
        scores.stats["rows_computed"] / count for scores, count in zip(together, requests_with, strict=True)
    )
    assert rows < sum(scores.stats["rows_computed"] for scores in alone)


def test_questions_about_one_state_share_its_rows(shared_engine, monkeypatch, pool):
    state = text(300, 3)
    requests = [compile_request(state, {"q": question("noul", 1, seed)}) for seed in range(8)]
    alone = [shared_engine.score(records) for records in requests]
    gate = Gate(shared_engine, monkeypatch)
    futures = gate.ask(pool, requests)
    gate.open(7)
    together = [future.result() for future in futures]
    for found, expected in zip(together, alone, strict=True):
        assert_same(found, expected)
    rows = {scores.stats["rows_computed"] for scores in together if scores.stats["shared_with"] == 6}
    assert len(rows) == 1 and rows.pop() < 1.5 * alone[0].stats["rows_computed"]


@pytest.mark.parametrize("share_rows", [0, 300])
def test_the_setting_bounds_what_others_add(tiny_checkpoint, monkeypatch, pool, share_rows):
    engine = engine_of(tiny_checkpoint, Settings(share_rows=share_rows))
    requests = [records_of(30, "noul", 1, seed) for seed in range(9)]
    rows = max(engine.score(records).stats["rows_computed"] for records in requests)
    gate = Gate(engine, monkeypatch)
    futures = gate.ask(pool, requests)
    gate.open(8)
    found = [future.result().stats for future in futures]
    assert all(stats["rows_computed"] <= rows + share_rows for stats in found)
    assert (max(stats["shared_with"] for stats in found) > 0) == (share_rows > 0)


def test_a_prompt_that_gives_nan_spoils_nobody_else(tiny_checkpoint, monkeypatch, pool):
    engine = engine_of(tiny_checkpoint)
    # Their prompts part at one word: paths beside each other, which the attention takes together.
    one_question = {"q": question("noul", 1, 0)}
    words = ("invoice", "refund", "parcel", "customer", "account", "password")
    requests = [compile_request(f"late {word} order", one_question) for word in words]
    bad = compile_request("late 🚚 東京 order", one_question)
    alone = [engine.score(records) for records in requests]

    def ids(requests: list[Records]) -> set[int]:
        encoded = [engine._encoder.encode(records) for records in requests]
        return {int(each) for groups in encoded for group in groups for row in group for each in row}

    poison = sorted(ids([bad]) - ids(requests))
    spoiled = []
    real = engine_module.forward

    def forward(weights, layout):
        scores = real(weights, layout)
        spoiled.append(int((~scores.isfinite()).sum()))
        return scores

    monkeypatch.setattr(engine_module, "forward", forward)
    with torch.inference_mode():
        engine._weights.embedding[poison] = torch.nan
    gate = Gate(engine, monkeypatch)
    futures = gate.ask(pool, [requests[0], bad, *requests])
    gate.open(7)
    assert futures[1].result().logits[0].isnan().tolist() == [False, True]
    del futures[1]
    for future, expected in zip(futures, [alone[0], *alone], strict=True):
        assert_same(future.result(), expected)
    # The test tests something: the NaN spread in the forward they shared.
    assert max(spoiled) > 1


# What fails by itself


def test_a_request_that_cannot_be_encoded_fails_alone(shared_engine, monkeypatch, pool):
    requests = mixed(6)
    alone = [shared_engine.score(records) for records in requests]
    encode = shared_engine._encoder.encode

    def fails(records: Records) -> Any:
        if records is requests[2]:
            raise RuntimeError("a tokenizer that fails")
        return encode(records)

    monkeypatch.setattr(shared_engine._encoder, "encode", fails)
    gate = Gate(shared_engine, monkeypatch)
    futures = gate.ask(pool, requests)
    too_long = pool.submit(shared_engine.score, records_of(5000, "noul", 1, 1))
    with pytest.raises(ValueError, match="no silent truncation"):
        too_long.result()
    with pytest.raises(RuntimeError, match="a tokenizer that fails"):
        futures[2].result()
    gate.open(4)
    for index, (future, expected) in enumerate(zip(futures, alone, strict=True)):
        if index != 2:
            assert_same(future.result(), expected)
    assert shared_engine.scheduler.inside == 0


def test_a_full_queue_refuses_before_it_tokenizes(tiny_checkpoint, monkeypatch, pool):
    engine = engine_of(tiny_checkpoint, Settings(queue=2))
    gate = Gate(engine, monkeypatch)
    futures = [pool.submit(engine.score, records) for records in mixed(2)]
    until(lambda: engine.scheduler.inside == 2)
    with monkeypatch.context() as patched:
        patched.setattr(engine._encoder, "encode", lambda records: pytest.fail("tokenized"))
        with pytest.raises(Unavailable):
            engine.score(mixed(1)[0])
    gate.open(1)
    for future in futures:
        future.result()
    assert engine.score(mixed(1)[0]).logits


def test_a_queue_full_of_rows_refuses(tiny_checkpoint, monkeypatch, pool):
    engine = engine_of(tiny_checkpoint, Settings(queue_rows=100))
    gate = Gate(engine, monkeypatch)
    # More rows than the queue takes, but nobody else is there.
    future = pool.submit(engine.score, mixed(5)[3])
    until(lambda: engine.scheduler._in_flight)
    with pytest.raises(Unavailable, match="rows are waiting"):
        engine.score(mixed(1)[0])
    gate.open(0)
    assert future.result().stats["rows_asked"] > 100


def test_a_request_whose_client_hung_up_is_dropped(shared_engine, monkeypatch, pool):
    gate = Gate(shared_engine, monkeypatch)
    first = pool.submit(shared_engine.score, mixed(1)[0])
    gone = threading.Event()

    def ask() -> Scores:
        with answering(SimpleNamespace(client_gone=gone.is_set)):
            return shared_engine.score(mixed(2)[1])

    until(lambda: shared_engine.scheduler._in_flight)
    left = pool.submit(ask)
    until(lambda: len(shared_engine.scheduler._queue) == 1)
    gone.set()
    gate.open(1)
    assert first.result().logits
    with pytest.raises(ClientGone):
        left.result()


# Memory


def test_a_request_without_memory_runs_once_more_in_halves(shared_engine, monkeypatch):
    records = compile_request(text(10, 1), {"q": question("choice", 40, 2)})
    expected = shared_engine.score(records)
    limit = int(expected.stats["rows_computed"] * 0.75)
    start, sizes, released = shared_engine._packed.start, [], []

    def scarce(layout: Any) -> Callable[[], Any]:
        sizes.append(layout.rows)
        if layout.rows > limit:
            raise torch.OutOfMemoryError("of the test")
        return start(layout)

    monkeypatch.setattr(shared_engine._packed, "start", scarce)
    monkeypatch.setattr(shared_engine._packed, "release_memory", lambda: released.append(True))
    found = shared_engine.score(records)
    assert_same(found, expected)
    assert released == [True] and len(sizes) == 1 + found.stats["forwards"] >= 3
    assert max(sizes[1:]) <= expected.stats["rows_computed"] // 2 + 1

    monkeypatch.setattr(shared_engine._packed, "start", lambda layout: scarce(SimpleNamespace(rows=10**9)))
    sizes.clear()
    with pytest.raises(torch.OutOfMemoryError):
        shared_engine.score(records)
    assert len(sizes) == 2
    monkeypatch.setattr(shared_engine._packed, "start", start)
    assert_same(shared_engine.score(records), expected)


def test_large_requests_are_cut_where_that_repeats_little(shared_engine, monkeypatch):
    many = {f"q{index}": question("choice", 4, index) for index in range(12)}
    apart = compile_request("One state.", many)
    together = compile_request(text(300, 2), {"q": question("choice", 12, 3)})
    whole = [shared_engine.score(records) for records in (apart, together)]
    assert [scores.stats["forwards"] for scores in whole] == [1, 1]
    rows = [scores.stats["rows_computed"] for scores in whole]
    monkeypatch.setattr(engine_module, "CUT_ROWS", 900)
    monkeypatch.setattr(engine_module, "_MOST_REPEATED", 0.1)
    cut = [shared_engine.score(records) for records in (apart, together)]
    for found, expected in zip(cut, whole, strict=True):
        assert_same(found, expected)
    assert rows[0] > 900 < 1.1 * rows[0]
    assert cut[0].stats["forwards"] >= 2 and cut[0].stats["rows_computed"] <= 1.1 * rows[0]
    # One long state under every candidate: two forwards would compute it twice.
    monkeypatch.setattr(engine_module, "CUT_ROWS", max(700, rows[1] - 1))
    assert shared_engine.score(together).stats["forwards"] == 1


# The device


def test_a_cpu_computes_on_one_thread_with_the_threads_of_who_asks(shared_engine, monkeypatch, pool):
    seen = []
    real = engine_module.forward

    def forward(weights, layout):
        seen.append((threading.get_ident(), torch.get_num_threads(), torch.is_inference_mode_enabled()))
        return real(weights, layout)

    monkeypatch.setattr(engine_module, "forward", forward)
    threads = torch.get_num_threads()
    try:
        list(pool.map(shared_engine.score, mixed(6)))
        torch.set_num_threads(threads + 1)
        shared_engine.score(mixed(1)[0])
    finally:
        torch.set_num_threads(threads)
    assert len({ident for ident, _, _ in seen}) == 1 and threading.get_ident() != seen[0][0]
    assert seen[-1][1] == threads + 1 and all(inference for _, _, inference in seen)


@pytest.mark.parametrize(
    ("error", "synchronizes", "verdict"),
    [
        (torch.OutOfMemoryError("no memory"), True, "memory"),
        (torch.AcceleratorError("CUDA error: out of memory"), True, "memory"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True, "broken"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
            True,
            "broken",
        ),
        (RuntimeError("delta_rule: launch failed: unspecified launch failure"), False, "broken"),
        (RuntimeError("delta_rule: q must be contiguous"), True, "request"),
        (ValueError("sequence 0 is empty"), True, "request"),
    ],
    ids=["allocator", "driver", "fault", "cublas", "sticky", "check", "host"],
)
def test_what_an_error_on_a_gpu_means(monkeypatch, error, synchronizes, verdict):
    def synchronize() -> None:
        if not synchronizes:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    stream = SimpleNamespace(synchronize=synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    # It would break a capture that is under way.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("waited for the whole device"))
    packed = PackedForward.__new__(PackedForward)
    packed.weights = SimpleNamespace(device=torch.device("cuda", 0))
    assert packed.diagnose(error) == verdict


def test_a_lost_device_is_said_everywhere(tiny_checkpoint, monkeypatch):
    model = accelerate(DecisionModel.load(tiny_checkpoint, "cpu"))
    taken, reasons = model.openjev_fast, []
    taken.on_broken(reasons.append)
    assert taken.broken is None and taken.concurrent
    packed = taken.engine._packed

    def fails(layout: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(packed, "start", fails)
    monkeypatch.setattr(packed, "diagnose", lambda error: "broken")
    for _ in range(2):
        with pytest.raises(DeviceBroken, match="an illegal memory access"):
            model(mixed(1)[0])
    assert taken.broken == "RuntimeError: an illegal memory access" and reasons == [taken.broken]
    monkeypatch.setattr(packed, "counts", lambda: pytest.fail("asked a lost device"))
    body, content_type = taken.metrics()
    assert b"openjev_fast_device_lost 1.0" in body and content_type.startswith("text/plain")


# Metrics


def test_metrics_are_those_of_one_model(tiny_checkpoint, shared_engine):
    model = accelerate(DecisionModel.load(tiny_checkpoint, "cpu"))
    taken = model.openjev_fast
    with taken.counted():
        stats = model.openjev_fast.engine.score(mixed(1)[0]).stats
    for error in (ValueError, KeyError, UnicodeDecodeError):
        with pytest.raises(error), taken.counted():
            raise error("utf-8", b"", 0, 1, "x") if error is UnicodeDecodeError else error("x")
    for error in (Unavailable("full", 1), RuntimeError("x"), ClientGone("x")):
        with pytest.raises(type(error)), taken.counted():
            raise error
    sample = taken.engine.metrics.registry.get_sample_value
    found = {
        status: sample("openjev_fast_requests_total", {"status": status})
        for status in ("200", "422", "499", "500", "503")
    }
    assert found == {"200": 1, "422": 3, "499": 1, "500": 1, "503": 1}
    assert sample("openjev_fast_rows_asked_total") == stats["rows_asked"]
    assert sample("openjev_fast_rows_computed_total") == stats["rows_computed"]
    assert sample("openjev_fast_forward_seconds_count") == sample("openjev_fast_queue_seconds_count") == 1
    assert sample("openjev_fast_forward_rows_sum") == stats["rows_computed"]
    assert sample("openjev_fast_device_lost") == 0
    assert b"openjev_fast_requests_total" in taken.metrics()[0]
    assert accelerate(DecisionModel.load(tiny_checkpoint, "cpu"), "torch").openjev_fast.metrics is None


def test_graphs_and_device_memory_are_counted(monkeypatch):
    packed = PackedForward.__new__(PackedForward)
    packed.weights = SimpleNamespace(device=torch.device("cuda", 0))
    packed.prefixes = None
    packed.graphs = SimpleNamespace(counts={"replays": 3, "captures": 2, "evictions": 1}, held_bytes=5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40)
    counters, gauges = packed.counts()
    assert counters == {"graph_replays": 3, "graph_captures": 2, "graph_evictions": 1}
    assert gauges == {
        "graph_bytes": 5,
        "device_memory_used_bytes": 70,
        "device_memory_total_bytes": 100,
        "device_memory_allocated_bytes": 40,
    }


def test_rows_of_a_forward_are_those_of_its_forest(shared_engine):
    assert isinstance(shared_engine._weights, model_weights.Weights)
    sequences = [np.array([1, 2, 3], dtype=np.int32), np.array([1, 2, 4], dtype=np.int32)]
    layout = shared_engine._packed.prepare(sequences)
    assert layout.rows == 4 and shared_engine._packed.start(layout)().scores.shape == (2,)


def test_a_replay_may_be_launched_behind_what_runs(shared_engine, monkeypatch):
    packed = shared_engine._packed
    layout = packed.prepare([np.array([1, 2, 3], dtype=np.int32)])
    # The CPU computes one at a time.
    assert packed.kind(layout) is None
    held = []
    graphs = SimpleNamespace(holds=lambda layout: layout in held, taken=False)
    monkeypatch.setattr(packed, "graphs", graphs)
    assert packed.kind(layout) is None
    held.append(layout)
    assert packed.kind(layout) is None
    monkeypatch.setattr(packed, "_thread", None)
    assert packed.kind(layout) == layout.shape_key()
    with packed.observed():
        assert packed.kind(layout) is None
    assert packed.kind(Planned([], [], False, None, layout)) is None


def test_what_requests_share_is_laid_out_in_few_sizes(shared_engine, monkeypatch):
    packed = shared_engine._packed
    monkeypatch.setattr(packed, "bucket", CUDA_BUCKET)
    monkeypatch.setattr(packed, "shared_bucket", SHARED_BUCKET)
    monkeypatch.setattr(packed, "_best_rows", lambda rows: max(rows, 160) if rows > 100 else rows)
    sizes = [(70, 82), (71, 74), (73, 80), (66, 79)]
    together = [
        [np.arange(size, dtype=np.int32) + index for index, size in enumerate(each)] for each in sizes
    ]
    shared = [packed.prepare(each, shared=True) for each in together]
    # In steps of 8 rows they would be 152 and 160.
    assert {packed.prepare(each).rows for each in together} == {160}
    # The tables of the kernels; those of the portable ops have sizes of their own.
    assert {(layout.rows, layout.reads, len(layout.delta.node)) for layout in shared} == {(160, 16, 16)}
    for each, layout in zip(together, shared, strict=True):
        found = packed.start(layout)().scores
        expected = np.concatenate([packed.start(packed.prepare([one]))().scores[:1] for one in each])
        np.testing.assert_allclose(found[:2], expected, rtol=1e-5, atol=1e-6)
