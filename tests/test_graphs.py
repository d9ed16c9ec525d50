"""When graphs are captured, replayed and dropped; the captures themselves are tested on a GPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass

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


def test_a_shape_is_captured_once_however_often_it_is_asked_to():
    graphs = GraphedForward(doubled, CPU)
    graphs.capture(Row.of(1))
    graphs.capture(Row.of(2))
    assert graphs.counts == {"replays": 0, "eager": 0, "captures": 1, "evictions": 0}
    assert graphs(Row.of(3)) == (torch.tensor([6.0]), True)
