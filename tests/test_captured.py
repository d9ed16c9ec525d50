"""What surrounds a capture on a CUDA device: locks, memory, and what is tried again. CUDA is a stand-in."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from openjev_fast_plugin import graphs as graphs_module
from openjev_fast_plugin.graphs import CapturedAtOnce, CapturedGraphs, GraphedForward

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """Inputs whose shape is their length."""

    values: torch.Tensor

    @property
    def rows(self) -> int:
        return len(self.values)

    def shape_key(self) -> tuple[int, ...]:
        return (len(self.values),)

    def pack(self, pinned: bool = False) -> torch.Tensor:
        return self.values.clone()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return packed


class Cuda:
    """Notes what is asked of CUDA, in order. A capture takes `grows` bytes of its pool and `graph_bytes` besides."""

    grows, graph_bytes, seconds = 100, 7, 0.0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pools: list[Any] = []
        self.errors: list[Exception] = []
        self.reserved = self.used = 0
        self.capturing = 0

    def graph(self) -> Cuda:
        return self

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert not self.capturing, "another capture is under way"
        self.capturing += 1
        self.pools.append(pool)
        self.calls.append("begin")
        time.sleep(self.seconds)

    def capture_end(self) -> None:
        self.capturing -= 1
        self.calls.append("end")
        if self.errors:
            raise self.errors.pop(0)
        self.reserved += self.grows
        self.used += self.grows + self.graph_bytes

    def synchronize(self, device: torch.device) -> None:
        assert not self.capturing, "a device that is synchronised breaks a capture"
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    cuda, handles = Cuda(), iter(range(100))
    for name, stands_in in {
        "CUDAGraph": cuda.graph,
        "synchronize": cuda.synchronize,
        "empty_cache": cuda.empty_cache,
        "graph_pool_handle": lambda: next(handles),
        "mem_get_info": lambda device: (10**6 - cuda.used, 10**6),
        "memory_reserved": lambda device: cuda.reserved,
        "stream": lambda stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)
    monkeypatch.setattr(graphs_module, "_capture_stream", lambda device: None)
    monkeypatch.setattr(CapturedGraphs, "device_type", "cpu")
    monkeypatch.setattr(CapturedGraphs, "_pinned", lambda self, inputs: inputs.pack())
    monkeypatch.setattr(CapturedGraphs, "_on_device", lambda self: nullcontext())
    monkeypatch.setattr(CapturedGraphs, "_mark", lambda self: lambda: True)
    return cuda


def row(length: int) -> Row:
    return Row(torch.ones(length))


def doubled(values: torch.Tensor) -> torch.Tensor:
    return 2 * values


def test_graphs_share_a_pool_and_say_what_they_hold(cuda):
    graphs = GraphedForward(doubled, CPU)
    graphs.capture(row(3))
    cuda.grows = 0
    graphs.capture(row(2))
    assert cuda.pools == [0, 0] and graphs.held_bytes == cuda.used == 100 + 2 * 7
    # What the allocator keeps stays for eager forwards, but for the start of a pool.
    assert cuda.calls.count("empty_cache") == 1
    graphs.drop()
    assert graphs.held_bytes == 0
    graphs.capture(row(3))
    # A pool is never taken again after its last graph, and what it held is given back before the next begins.
    assert cuda.pools == [0, 0, 1] and cuda.calls.count("empty_cache") == 2


def test_a_pool_that_outgrew_its_bound_is_given_back(cuda):
    graphs = GraphedForward(doubled, CPU, most_bytes=150)
    graphs.capture(row(3))
    cuda.calls.clear()
    graphs.capture(row(4))
    assert cuda.pools == [0, 0, 1] and list(graphs._graphs) == [(4,)]
    second = cuda.calls.index("end")
    assert "empty_cache" in cuda.calls[second : cuda.calls.index("begin", second)]


def test_each_graph_with_a_pool_of_its_own_begins_with_an_empty_cache(cuda):
    graphs = CapturedAtOnce(doubled, CPU, most_graphs=1)
    assert graphs(row(3))[1] == graphs(row(2))[1] == "captures"
    assert cuda.pools == [0, 1] and cuda.calls.count("empty_cache") == 2 and graphs.counts["evictions"] == 1


@pytest.mark.parametrize("said_by", ["allocator", "driver"])
def test_a_capture_without_memory_is_tried_once_more(cuda, said_by):
    error = {
        "allocator": torch.OutOfMemoryError("no memory"),
        "driver": torch.AcceleratorError("CUDA error: out of memory"),
    }[said_by]
    graphs = GraphedForward(doubled, CPU)
    graphs.capture(row(3))
    cuda.calls.clear()
    cuda.errors = [error]
    graphs.capture(row(2))
    assert cuda.calls.count("begin") == 2 and cuda.calls.count("empty_cache") == 1
    assert len(graphs._graphs) == 2
    cuda.errors = [error, error]
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture(row(4))
    # The scores of a request that was to be captured are there all the same.
    at_once = CapturedAtOnce(doubled, CPU)
    cuda.errors = [error, error]
    scores, done = at_once(row(5))
    assert done == "eager" and torch.equal(scores, 2 * torch.ones(5))


def test_another_error_is_not_tried_again(cuda):
    cuda.errors = [torch.AcceleratorError("CUDA error: operation not permitted")]
    with pytest.raises(torch.AcceleratorError, match="not permitted"):
        GraphedForward(doubled, CPU).capture(row(3))
    assert cuda.calls.count("begin") == 1


def test_models_of_one_process_capture_one_after_the_other(cuda):
    cuda.seconds = 0.02
    models = [GraphedForward(doubled, CPU) for _ in range(3)]

    def captures(model: GraphedForward[Row]) -> None:
        for length in range(1, 4):
            model.capture(row(length))

    with ThreadPoolExecutor(len(models)) as pool:
        # The stand-in fails where captures overlap, or the device is synchronised during one.
        list(pool.map(captures, models))
    assert cuda.calls.count("begin") == 9


def test_a_forward_runs_once_before_its_capture(cuda):
    runs = []

    def forward(values: torch.Tensor) -> torch.Tensor:
        runs.append(cuda.capturing)
        return 2 * values

    GraphedForward(forward, CPU).capture(row(3))
    # Libraries and kernels are not to be initialised under capture.
    assert runs == [0, 1]


def test_what_changes_during_a_capture_outdates_its_graph(cuda):
    class Work:
        now = 0

        def step(self) -> bool:
            return False

        def state(self, inputs: Row) -> int:
            return self.now

    work = Work()

    def forward(values: torch.Tensor) -> torch.Tensor:
        # As another model on the device would.
        work.now = 1
        return 2 * values

    graphs = GraphedForward(forward, CPU, idle_work=work)
    graphs.capture(row(3))
    (captured,) = graphs._graphs.values()
    assert graphs._outdated(captured)


def test_a_process_without_another_thread_answers(cuda, monkeypatch, caplog):
    graphs = GraphedForward(doubled, CPU, idle_seconds=0)
    with monkeypatch.context() as patch:

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", start)
        scores, replayed = graphs(row(3))
        assert torch.equal(scores, 2 * torch.ones(3)) and not replayed
        graphs.wait_until_captured()
    assert "nothing is captured for now: can't start new thread" in caplog.text
    # The next new shape tries again.
    graphs(row(3))
    graphs.wait_until_captured()
    assert graphs.holds(row(3))
