"""`openjev-fast bench` on a GPU: every mode, and families by kernel."""

from __future__ import annotations

import pytest
import torch

from openjev_fast_plugin.measurement import run
from openjev_fast_plugin.measurement.originals import best_delta_rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def result():
    found = run.run(None, "2b", device="cuda:0", repeats=3, warmups=1, seconds=2.0)
    yield found
    torch.cuda.empty_cache()


def test_every_mode_is_measured_and_its_families_fill_its_time(result):
    modes = {row["mode"] for row in result["rows"]}
    assert modes == {"torch", "graph", "fast"} | ({"fla"} if best_delta_rule() == "fla" else set())
    for row in result["rows"]:
        at = (row["case"], row["mode"])
        assert row["kernels"] > 100 and row["samples"] == 3, at
        assert row["busy_ms"] == pytest.approx(sum(row["families"].values()), rel=0.02, abs=0.01), at
        assert (
            row["families"]["matmul"] > 0 and row["families"]["delta rule"] > 0 or row["mode"] == "graph"
        ), at
        assert row["families"]["attention"] > 0, at
        # What has no family is little.
        assert row["families"]["other"] < 0.25 * row["busy_ms"], at
        assert row["largest_probability_difference"] < 0.2, at
    assert result["meta"]["driver"] and result["order"] in (run.INTERLEAVED, run.ONE_BY_ONE)


def test_fast_is_not_slower_than_the_original(result):
    times = {(row["case"], row["mode"]): row["p50_ms"] for row in result["rows"]}
    assert all(times[case["name"], "fast"] < times[case["name"], "torch"] for case in result["cases"])
