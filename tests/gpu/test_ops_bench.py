"""The ops benchmark on a device: graphs, and every baseline that is installed, on small cases."""

import json
from importlib.util import find_spec

import ops_bench
import pytest
import torch
from op_problems import OPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = ("example", "root_200_tails_3", "noul_9")


def test_every_variant_has_a_time_and_computes_the_same(tmp_path):
    output = tmp_path / "ops.json"
    arguments = ["--repeats", "3", "--output", str(output)]
    variants = [
        name for name in ops_bench.VARIANTS if name not in ops_bench.FLA or find_spec("fla") is not None
    ]
    for name in variants:
        arguments += ["--variant", name]
    for case in CASES:
        arguments += ["--case", case]
    code = ops_bench.main(arguments)
    rows = json.loads(output.read_text())["rows"]
    assert [row["error"] for row in rows if row["error"]] == [] and code == 0
    assert {row["op"] for row in rows} == set(OPS) and {row["variant"] for row in rows} == set(variants)
    for row in rows:
        assert row["skipped"] is None and row["us"] > 0 and row["rel_l2"] <= 2e-2, row
        assert row["calls"] >= 4 and row["replays"] == 3, row


@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("way", ["cu_seqlens", "rectangles"])
def test_fla_runs_level_by_level_in_both_forms(tmp_path, way):
    output = tmp_path / "ops.json"
    arguments = ["--op", "delta", "--case", "example", "--variant", "fla_levels", "--way", way]
    assert ops_bench.main([*arguments, "--repeats", "3", "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["how"] == way and row["us"] > 0
