"""When graphs are captured, replayed and dropped; the captures themselves are tested on a GPU."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from recorded import record_instead_of_capture

from openjev_fast_plugin.graphs import CapturedAtOnce, CapturedGraphs, GraphedForward

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    record_instead_of_capture(monkeypatch)
    with torch.inference_mode():
        yield


@dataclass(frozen=True)
class Row:
    values: torch.Tensor

    @classmethod
    def of(cls, *values: float) -> Row:
        return cls(torch.tensor(values, dtype=torch.float32))

    @property
    def rows(self) -> int:
        return len(self.values)

    def shape_key(self):
        return (len(self.values),)

    def pack(self, pinned=False):
        return self.values.clone()

    def unpack(self, packed):
        return Row(packed)


def doubled(row: Row) -> torch.Tensor:
    return 2 * row.values


def at_once(**limits) -> CapturedAtOnce:
    return CapturedAtOnce(doubled, CPU, **limits)


def test_a_new_shape_is_captured_at_once_and_then_replayed():
    graphs = at_once()
    kept = []
    rows = [Row.of(1, 2), Row.of(3, 4), Row.of(5), Row.of(6, 7)]
    for row, done in zip(rows, ["captures", "replays", "captures", "replays"], strict=True):
        scores, how = graphs(row)
        assert torch.equal(scores, doubled(row)) and how == done
        kept.append((scores, row))
    # What was handed out is not overwritten by a later replay.
    assert all(torch.equal(scores, doubled(row)) for scores, row in kept)
    assert graphs.counts == {"replays": 2, "eager": 0, "captures": 2, "evictions": 0}


def test_inputs_too_large_are_never_captured():
    graphs = at_once(most_rows=2)
    assert [graphs(Row.of(*range(size)))[1] for size in (2, 3, 3, 2)] == [
        "captures", "eager", "eager", "replays",
    ]  # fmt: skip
    assert graphs.counts == {"replays": 1, "eager": 2, "captures": 1, "evictions": 0}


def test_the_least_recently_used_go_first_by_count():
    graphs = at_once(most_graphs=2)
    first, second, third = Row.of(1), Row.of(1, 2), Row.of(1, 2, 3)
    done = [graphs(row)[1] for row in (first, second, first, third, first, third, second)]
    assert done == ["captures", "captures", "replays", "captures", "replays", "replays", "captures"]
    assert graphs.counts["evictions"] == 2


def test_they_go_by_memory_and_the_newest_stays():
    graphs = at_once(most_bytes=12)
    assert [graphs(Row.of(*range(size)))[1] for size in (1, 2, 1, 2)] == ["captures"] * 2 + ["replays"] * 2
    assert graphs.held_bytes == 12
    assert graphs(Row.of(1, 2, 3, 4, 5))[1] == "captures"
    assert (graphs.held_bytes, graphs.counts["evictions"]) == (20, 2)
    assert graphs(Row.of(5, 4, 3, 2, 1))[1] == "replays"


def test_a_pool_that_has_outgrown_the_bound_starts_anew(monkeypatch):
    record = CapturedGraphs._captured

    def captured(self, inputs):
        # As much as it takes and nothing has taken before.
        found = record(self, inputs)
        self._pool_bytes = max(self._pool_bytes, found.bytes) if self._graphs else found.bytes
        return replace(found, bytes=0)

    monkeypatch.setattr(CapturedGraphs, "_captured", captured)
    graphs = at_once(most_bytes=12, one_pool=True)
    done = [graphs(Row.of(*range(size)))[1] for size in (1, 3, 2, 1, 2, 3)]
    assert done == ["captures"] * 3 + ["replays"] * 3
    assert (graphs.held_bytes, graphs.counts["evictions"]) == (12, 0)
    # One alone may be larger; what comes after it has the pool's memory already, or another pool.
    for size, evictions in ((5, 3), (4, 4), (2, 5)):
        assert graphs(Row.of(*range(size)))[1] == "captures"
        assert (graphs.held_bytes, graphs.counts["evictions"]) == (4 * size, evictions)
    assert [graphs(Row.of(*range(size)))[1] for size in (3, 2)] == ["captures", "replays"]
    graphs.drop()
    assert graphs.held_bytes == 0


def test_captures_are_logged_the_first_as_a_warning(caplog):
    graphs = at_once()
    with caplog.at_level(logging.INFO, "openjev_fast"):
        for size in (1, 2, 2, 3):
            graphs(Row.of(*range(size)))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
    first, second, _ = (record.getMessage() for record in caplog.records)
    assert "captured a CUDA graph of shape 1 in " in first and "(1 held, 0.00 GiB); every new shape" in first
    assert "of shape 2 in " in second and second.endswith("(2 held, 0.00 GiB)")


@pytest.mark.parametrize("graphs", [at_once, lambda: GraphedForward(doubled, CPU, idle_seconds=0.0)])
def test_no_memory_for_a_graph_answers_all_the_same(monkeypatch, caplog, graphs):
    graphs, record = graphs(), CapturedGraphs._captured

    def fails(self, inputs):
        raise torch.OutOfMemoryError

    def ask():
        scores, how = graphs(Row.of(1, 2))
        assert torch.equal(scores, torch.tensor([2.0, 4.0]))
        if isinstance(graphs, GraphedForward):
            graphs.wait_until_captured()
        return how

    monkeypatch.setattr(CapturedGraphs, "_captured", fails)
    assert ask() in ("eager", False)
    assert graphs.counts == {"replays": 0, "eager": 1, "captures": 0, "evictions": 0}
    assert "no device memory to capture a graph of 2 rows" in caplog.text
    monkeypatch.setattr(CapturedGraphs, "_captured", record)
    assert ask() in ("captures", False)
    assert ask() in ("replays", True)


def test_a_graph_captured_when_idle_is_replayed_with_the_inputs_of_the_day():
    graphs = GraphedForward(doubled, CPU, idle_seconds=0.0, most_rows=2)
    for row, replayed in ((Row.of(1, 2), False), (Row.of(3, 4), True), (Row.of(1, 2, 3), False)):
        scores, how = graphs(row)
        assert torch.equal(scores, doubled(row)) and how is replayed
        graphs.wait_until_captured()
    assert graphs(Row.of(3, 2, 1))[1] is False
    assert graphs.counts == {"replays": 1, "eager": 3, "captures": 1, "evictions": 0}


def test_nothing_is_captured_before_a_launched_forward_has_ended(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(CapturedGraphs, "_mark", lambda self: ended.is_set)
    graphs = GraphedForward(doubled, CPU, idle_seconds=0.0)
    assert not graphs(Row.of(1, 2))[1]
    time.sleep(0.05)
    assert graphs.counts["captures"] == 0
    ended.set()
    graphs.wait_until_captured()
    assert graphs.counts["captures"] == 1


def test_a_forward_that_fails_keeps_no_device_busy():
    def fails_once(row: Row) -> torch.Tensor:
        if not failed:
            failed.append(True)
            raise RuntimeError("no")
        return 2 * row.values

    failed: list[bool] = []
    graphs = GraphedForward(fails_once, CPU, idle_seconds=0.0)
    with pytest.raises(RuntimeError):
        graphs(Row.of(1, 2))
    graphs(Row.of(1, 2))
    graphs.wait_until_captured()
    assert graphs.counts["captures"] == 1


def test_what_a_step_of_the_work_outdates_is_not_wanted_after_a_drop():
    class Dropped(Doubling):
        def step(self) -> bool:
            done = super().step()
            dropping.start()
            while not begun.is_set():
                time.sleep(0.001)
            return done

    def drop() -> None:
        begun.set()
        graphs.drop()

    work, begun, dropping = Dropped(1), threading.Event(), threading.Thread(target=drop)
    graphs = GraphedForward(work.forward, CPU, idle_seconds=1000.0, idle_work=work)
    graphs.capture(Row.of(1))
    graphs._work()
    dropping.join()
    assert not graphs._wanted and graphs.held_bytes == 0


def test_a_shape_is_captured_once_however_often_it_is_asked_to():
    graphs = GraphedForward(doubled, CPU)
    graphs.capture(Row.of(1))
    graphs.capture(Row.of(2))
    assert graphs.counts == {"replays": 0, "eager": 0, "captures": 1, "evictions": 0}
    assert graphs(Row.of(3)) == (torch.tensor([6.0]), True)


def test_what_is_asked_for_often_is_captured_on_a_device_that_is_never_idle():
    graphs = GraphedForward(doubled, CPU, idle_seconds=1000.0, often=3)
    often, seldom = Row.of(1, 2), Row.of(1)
    graphs(seldom)
    # The capturing thread has looked, found nothing due, and waits for an idle device.
    time.sleep(0.05)
    for _ in range(3):
        assert graphs(often)[1] is False
    end = time.monotonic() + 10.0
    while not graphs.counts["captures"]:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert graphs(often)[1] is True
    # It has rested by then, and no more of it is waited for.
    time.sleep(0.05)
    for _ in range(3):
        graphs(seldom)
    while graphs.counts["captures"] < 2:
        assert time.monotonic() < end
        time.sleep(0.001)


class Doubling:
    """Idle work of some steps, after each of which forwards of one size double once more."""

    def __init__(self, *sizes: int):
        self.sizes = list(sizes)
        self.factor: dict[int, int] = {}
        self.steps = 0

    def step(self) -> bool:
        assert torch.is_inference_mode_enabled()
        if not self.sizes:
            return False
        self.steps += 1
        size = self.sizes.pop(0)
        self.factor[size] = 2 * self.factor.get(size, 1)
        return True

    def state(self, inputs: Row) -> int:
        return self.factor.get(inputs.rows, 1)

    def forward(self, inputs: Row) -> torch.Tensor:
        # As a captured graph does, a recorded one keeps the factor it was captured with.
        return self.state(inputs) * inputs.values


def frozen_captures(monkeypatch, work: Doubling) -> None:
    record = CapturedGraphs._captured

    def captured(self, inputs):
        factor, forward = work.state(inputs), self._forward
        self._forward = lambda row: factor * row.values
        try:
            return record(self, inputs)
        finally:
            self._forward = forward

    monkeypatch.setattr(CapturedGraphs, "_captured", captured)


def test_idle_work_is_done_after_captures_and_outdated_graphs_are_captured_again(monkeypatch):
    work = Doubling(1, 3, 1)
    frozen_captures(monkeypatch, work)
    graphs = GraphedForward(work.forward, CPU, idle_seconds=0.0, idle_work=work)
    assert graphs(Row.of(1))[1] is False and graphs(Row.of(1, 2))[1] is False
    graphs.wait_until_captured()
    assert work.steps == 3 and not work.sizes
    # Twice the work changed forwards of one row, once of three, which nobody asked for.
    assert graphs.counts["captures"] == 4 and len(graphs._graphs) == 2
    assert graphs(Row.of(5)) == (torch.tensor([20.0]), True)
    scores, replayed = graphs(Row.of(5, 6))
    assert torch.equal(scores, torch.tensor([5.0, 6.0])) and replayed
    # Nothing is left: replays start no work.
    work.sizes = [2]
    graphs(Row.of(5, 6))
    graphs.wait_until_captured()
    assert work.steps == 3
    # A new shape does, and is captured first.
    graphs(Row.of(1, 2, 3))
    graphs.wait_until_captured()
    assert work.steps == 4 and graphs(Row.of(5, 6))[0].tolist() == [10.0, 12.0]


def test_an_outdated_graph_is_replayed_until_it_has_been_captured_again(monkeypatch):
    work = Doubling()
    frozen_captures(monkeypatch, work)
    graphs = GraphedForward(work.forward, CPU, idle_seconds=0.0, idle_work=work)
    graphs.capture(Row.of(1))
    work.factor[1] = 2
    assert graphs(Row.of(7)) == (torch.tensor([7.0]), True)
    graphs.capture(Row.of(1))
    assert graphs(Row.of(7)) == (torch.tensor([14.0]), True)
    graphs.capture(Row.of(1))
    assert graphs.counts["captures"] == 2


def test_idle_work_waits_for_requests_between_its_steps():
    asked = []

    def ask() -> None:
        asked.append(graphs(Row.of(1))[1])

    class Patient(Doubling):
        def step(self) -> bool:
            done = super().step()
            if done:
                # A request comes in while a piece runs: the next piece waits until the device has been idle again.
                thread = threading.Thread(target=ask)
                thread.start()
                while not graphs._callers:
                    time.sleep(0.001)
                running.append((thread, time.monotonic()))
            return done

    running: list = []
    work = Patient(5, 5)
    graphs = GraphedForward(work.forward, CPU, idle_seconds=0.05, idle_work=work)
    graphs(Row.of(1))
    graphs.wait_until_captured()
    assert work.steps == 2 and running[1][1] - running[0][1] >= 0.045
    for thread, _ in running:
        thread.join()
    assert asked == [True, True]


def test_large_inputs_are_not_captured_but_start_the_work():
    work = Doubling(4)
    graphs = GraphedForward(work.forward, CPU, idle_seconds=0.0, most_rows=2, idle_work=work)
    graphs(Row.of(1, 2, 3, 4))
    graphs.wait_until_captured()
    assert work.steps == 1 and graphs.counts["captures"] == 0


def test_graphs_of_inputs_that_nobody_has_any_more_are_let_go():
    class Forgetting(Doubling):
        def state(self, inputs: Row) -> int | None:
            return None if inputs.rows == 2 and self.steps else 0

    graphs = GraphedForward(doubled, CPU, idle_seconds=0.0, idle_work=Forgetting(1))
    for rows in (2, 3):
        graphs(Row(torch.ones(rows)))
    graphs.wait_until_captured()
    assert not graphs.holds(Row(torch.ones(2))) and graphs.holds(Row(torch.ones(3)))
    # Not captured again for the asking of the work.
    assert graphs.counts["captures"] == 2 and graphs.counts["evictions"] == 1


def test_work_that_fails_is_logged_and_captures_go_on(caplog):
    class Failing(Doubling):
        def step(self) -> bool:
            if self.sizes:
                self.sizes.pop()
                raise TypeError("a mistake")
            return False

    graphs = GraphedForward(doubled, CPU, idle_seconds=0.0, idle_work=Failing(1))
    for row in (Row.of(1), Row.of(1, 2)):
        graphs(row)
        graphs.wait_until_captured()
    assert graphs.counts["captures"] == 2 and "a mistake" in caplog.text


def test_an_example_is_captured_in_the_place_of_the_inputs():
    seen = []

    def forward(row: Row) -> torch.Tensor:
        seen.append(row.values.tolist())
        return 2 * row.values

    graphs = GraphedForward(forward, CPU, idle_seconds=0.01)
    scores, replayed = graphs(Row.of(1, 2), Row.of(0, 0))
    assert scores.tolist() == [2, 4] and not replayed
    graphs.wait_until_captured()
    # Run once for the answer; everything after it is the capture's.
    assert seen[0] == [1, 2] and len(seen) > 1 and all(values == [0, 0] for values in seen[1:])
    scores, replayed = graphs(Row.of(3, 4), Row.of(0, 0))
    assert scores.tolist() == [6, 8] and replayed


def test_after_it_is_closed_it_answers_and_captures_nothing():
    graphs = GraphedForward(doubled, CPU, idle_seconds=0.0)
    graphs.capture(Row.of(1))
    graphs.close()
    assert graphs(Row.of(1, 2))[1] is False and graphs(Row.of(3)) == (torch.tensor([6.0]), True)
    graphs.wait_until_captured()
    assert graphs.counts["captures"] == 1


# In a process of its own, which ends while a capture is under way.
ENDING = """
import sys, threading, time
sys.path.insert(0, {folder!r})
import pytest, torch
from recorded import record_instead_of_capture
from openjev_fast_plugin.graphs import CapturedGraphs, GraphedForward
from test_graphs import Row, doubled

record_instead_of_capture(pytest.MonkeyPatch())
record, begun = CapturedGraphs._captured, threading.Event()

def captured(self, inputs):
    begun.set()
    time.sleep(0.5)
    print("captured", inputs.rows, flush=True)
    return record(self, inputs)

CapturedGraphs._captured = captured
graphs = GraphedForward(doubled, torch.device("cpu"), idle_seconds=0.2)
graphs(Row.of(1))
graphs(Row.of(1, 2))
begun.wait()
"""


def test_the_end_of_the_process_waits_for_the_capture_under_way_and_for_no_other():
    script = ENDING.format(folder=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "captured 2\n", "")


def test_the_mark_stands_behind_what_was_launched(monkeypatch):
    """Of a replay, a new shape, and what is run eagerly: the device is idle when all of it is done."""
    order: list[str] = []

    def forward(row: Row) -> torch.Tensor:
        order.append("forward")
        assert graphs._callers == 1
        return doubled(row)

    def mark(self):
        order.append("mark")
        return lambda: False

    monkeypatch.setattr(CapturedGraphs, "_mark", mark)
    graphs = GraphedForward(forward, CPU, idle_seconds=1000)
    for run in (graphs, graphs.eager):
        order.clear()
        run(Row.of(1))
        assert order == ["forward", "mark"] and graphs._due() is None and graphs._callers == 0
    with graphs._changed:
        graphs._wanted.clear()
        graphs._changed.notify_all()


def test_the_newest_shapes_are_wanted():
    graphs = GraphedForward(doubled, CPU, idle_seconds=1000, most_graphs=2)
    for length in (1, 2, 3):
        graphs(Row.of(*[1.0] * length))
    assert list(graphs._wanted) == [(2,), (3,)]
    graphs.stop()
