"""Shared forwards on a GPU: the scheduler over the kernels and graphs, and what a lost device looks like."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from prompt_cases import prompts
from schedulers import scheduler_of
from small_models import VOCABULARY, fused

from openjev_fast_plugin.engine import PackedForward
from openjev_fast_plugin.forest import count_rows
from openjev_fast_plugin.scheduler import Scheduler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def packed() -> PackedForward:
    return PackedForward(fused("2b"), [])


def requests() -> list[list[np.ndarray]]:
    cases = ("noul_70", "example", "noul_300", "choice_8x200")
    return [prompts(cases[seed % 4], VOCABULARY, seed) for seed in range(24)]


def ask(queue: Scheduler, sequences: list[np.ndarray]) -> np.ndarray:
    with queue.place() as place:
        return queue.score(place, sequences, count_rows(sequences)).scores


def test_shared_forwards_give_the_scores_of_lone_ones_within_rounding(packed):
    alone = [ask(scheduler_of(packed), sequences) for sequences in requests()]
    queue = scheduler_of(packed)
    with ThreadPoolExecutor(16) as pool:
        for _ in range(5):
            together = list(pool.map(lambda sequences: ask(queue, sequences), requests()))
            found, expected = np.concatenate(together), np.concatenate(alone)
            assert np.isfinite(found).all()
            # bfloat16: forwards of other sizes round in other places.
            assert np.linalg.norm(found - expected) <= 0.05 * np.linalg.norm(expected)
    sample = queue._metrics.registry.get_sample_value
    forwards = sum(
        sample("openjev_fast_forwards_total", {"replayed": replayed}) or 0 for replayed in ("yes", "no")
    )
    assert forwards < 5 * len(requests())


def test_what_is_asked_for_often_is_replayed_although_the_device_is_busy(packed):
    packed.graphs.drop()
    queue, sequences = scheduler_of(packed), prompts("noul_70", VOCABULARY)
    for _ in range(2000):
        if ask(queue, sequences).size and queue._metrics.registry.get_sample_value(
            "openjev_fast_forwards_total", {"replayed": "yes"}
        ):
            return
    raise AssertionError("never replayed")


def test_memory_is_let_go(packed):
    layout = packed.prepare(prompts("noul_70", VOCABULARY))
    packed.graphs.capture(layout)
    assert packed.graphs.holds(layout)
    packed.release_memory()
    assert not packed.graphs.holds(layout)
    assert packed.start(layout)().rows == layout.rows
    counters, gauges = packed.counts()
    assert counters["graph_captures"] >= 1 and 0 < gauges["device_memory_used_bytes"]


def test_an_error_of_a_request_is_not_the_device_s(packed):
    assert packed.diagnose(ValueError("too long")) == "request"
    assert packed.diagnose(RuntimeError("delta_rule: q must be contiguous")) == "request"
    assert packed.diagnose(torch.OutOfMemoryError("full")) == "memory"


# In a process of its own: nothing can be computed on the device afterwards.
LOST = """
import torch
from types import SimpleNamespace
from openjev_fast_plugin.engine import PackedForward

packed = PackedForward.__new__(PackedForward)
packed.weights = SimpleNamespace(device=torch.device("cuda", 0))
table, index = torch.zeros(4, 4, device="cuda"), torch.tensor([10**6], device="cuda")
try:
    torch.nn.functional.embedding(index, table).cpu()
except RuntimeError as error:
    print(packed.diagnose(error), packed.diagnose(RuntimeError("whatever is said after")))
"""


def test_a_fault_is_the_end_of_the_device():
    result = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=300)
    assert result.stdout.split() == ["broken", "broken"], result.stderr
