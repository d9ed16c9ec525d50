"""When an idle and a busy device capture a shape: the decision alone; test_graphs.py has the captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openjev_fast_plugin import graphs as graphs_module
from openjev_fast_plugin.graphs import GraphedForward


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(graphs_module, "time", made)
    return made


def asked(graphs: GraphedForward, **times: int) -> None:
    for key, count in times.items():
        layout: Any = key
        graphs._wanted[(key,)] = (layout, count)


def made(**options: Any) -> GraphedForward:
    return GraphedForward(lambda layout: torch.zeros(1), torch.device("cuda", 0), **options)


def test_an_idle_device_captures_the_newest_shape(clock):
    graphs = made(idle_seconds=0.05, often=3)
    asked(graphs, old=1, new=1)
    clock.now += 0.04
    assert graphs._due() is None
    clock.now += 0.02
    assert graphs._due() == ("new",)


def test_a_forward_that_is_launched_and_not_done_keeps_the_device_busy(clock):
    graphs = made(idle_seconds=0.05, often=3)
    asked(graphs, seldom=1)
    done = False
    graphs._done = lambda: done
    for _ in range(3):
        clock.now += 1.0
        assert graphs._due() is None
    done = True
    assert graphs._due() is None
    clock.now += 0.06
    assert graphs._due() == ("seldom",)


def test_a_caller_who_waits_for_the_device_keeps_it_busy(clock):
    graphs = made(idle_seconds=0.05, often=3)
    asked(graphs, seldom=1)
    with graphs._using():
        clock.now += 1.0
        assert graphs._due() is None
    clock.now += 0.06
    assert graphs._due() == ("seldom",)


def test_the_device_is_idle_from_when_its_last_caller_has_left(clock):
    graphs = made(idle_seconds=0.05, often=3)
    asked(graphs, seldom=1)
    with pytest.raises(ValueError), graphs._using():
        clock.now += 1.0
        raise ValueError
    clock.now += 0.04
    assert graphs._due() is None
    clock.now += 0.02
    assert graphs._due() == ("seldom",)


def test_no_capture_begins_while_a_caller_launches_however_often_it_was_asked_for(clock):
    graphs = made(idle_seconds=0.05, often=3)
    asked(graphs, often=9)
    with graphs._using():
        assert graphs._due() is None
    assert graphs._due() == ("often",)


def test_a_device_that_is_lost_ends_the_captures_and_nobody_waits_for_them(caplog):
    graphs = made(idle_seconds=0.0)

    def lost() -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    graphs._done = lost
    asked(graphs, seldom=1)
    with graphs._changed:
        graphs._start_capturing()
    graphs.wait_until_captured()
    assert graphs._capturing is None and not graphs._wanted and "illegal memory access" in caplog.text


def test_a_busy_device_captures_only_what_is_asked_for_often_and_rests_after(clock):
    graphs = made(idle_seconds=0.05, often=3)
    asked(graphs, often=3, seldom=2)
    assert graphs._due() == ("often",)
    graphs._resting_until = clock.now + 0.03
    assert graphs._due() is None
    clock.now += 0.04
    assert graphs._due() == ("often",)


def test_who_captures_rests_three_times_as_long(clock, monkeypatch):
    graphs = made(idle_seconds=10.0, often=3)
    asked(graphs, often=3)
    captured = []

    def capture(layout: Any) -> None:
        captured.append(layout)
        clock.now += 0.1

    monkeypatch.setattr(graphs, "capture", capture)
    graphs._capture_when_idle()
    assert captured == ["often"] and graphs._resting_until == pytest.approx(clock.now + 0.3)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), RuntimeError("no")], ids=["memory", "other"]
)
def test_a_capture_that_fails_is_said_and_others_follow(clock, monkeypatch, caplog, error):
    graphs = made(idle_seconds=0.0)
    asked(graphs, good=1, bad=1)
    captured = []

    def capture(layout: Any) -> None:
        if layout.rows == 7:
            raise error
        captured.append(layout)

    class Layout:
        rows = 7

    graphs._wanted[("bad",)] = (Layout(), 1)  # type: ignore[assignment]
    graphs._wanted[("good",)] = (type("Other", (), {"rows": 8})(), 1)  # type: ignore[assignment]
    monkeypatch.setattr(graphs, "capture", capture)
    with graphs._changed:
        graphs._start_capturing()
    graphs.wait_until_captured()
    assert len(captured) == 1 and "7 rows" in caplog.text and not graphs._wanted


def test_a_shape_being_captured_or_dropped_is_not_held():
    graphs = made()

    class Layout:
        def shape_key(self) -> tuple[Any, ...]:
            return ("a",)

    layout: Any = Layout()
    assert not graphs.holds(layout)
    graphs._graphs[("a",)] = object()  # type: ignore[assignment]
    assert graphs.holds(layout)
    with graphs._device_lock:
        assert not graphs.holds(layout)
    asked(graphs, b=1)
    graphs.drop()
    assert not graphs.holds(layout) and not graphs._wanted


def test_a_busy_device_looks_again_when_its_rest_is_over(clock):
    graphs = made(idle_seconds=1000.0, often=3)
    asked(graphs, often=3)
    graphs._resting_until = clock.now + 0.03
    assert graphs._next_look() == graphs._resting_until
    # What is asked for seldom waits for an idle device.
    graphs._wanted.clear()
    asked(graphs, seldom=2)
    assert graphs._next_look() == graphs._last_use + 1000.0
