"""The matmul benchmark without a GPU: which products it measures, what it writes, and what it leaves out and says."""

import json

import gemm_bench
import pytest
import torch
from op_inputs import PROFILES, Profile

from openjev_fast_plugin import tuner
from openjev_fast_plugin.checkpoint import PROFILES as MODELS
from openjev_fast_plugin.ops._choices import PYTORCH, Choice
from openjev_fast_plugin.random_models import head, text_config, text_model
from openjev_fast_plugin.tuner import forward_counts, model_weights
from openjev_fast_plugin.weights import take_weights

FIGURES = ("us", "rel_l2", "way", "alone_us", "tflops", "gb_s")


def run(tmp_path, *arguments: str) -> tuple[int, list[dict]]:
    output = tmp_path / "gemm.json"
    code = gemm_bench.main(["--device", "cpu", "--profile", "narrow", "--output", str(output), *arguments])
    content = json.loads(output.read_text())
    assert set(content) == {"meta", "rows"}
    return code, content["rows"]


def test_the_weights_are_those_a_forward_multiplies_with():
    layers, config = 8, text_config("tiny", 8, vocabulary=512)
    shapes, cpu = MODELS["tiny"], torch.device("cpu")
    weights = take_weights(text_model(config, cpu, 0), head(config.hidden_size, cpu, 0))
    width = shapes.linear_head_dim
    profile = Profile(
        shapes.hidden, shapes.mlp, shapes.heads, shapes.kv_heads, shapes.linear_key_heads,
        shapes.linear_value_heads, head_dim=shapes.head_dim, key_dim=width, value_dim=width,
    )  # fmt: skip
    found = gemm_bench.shapes(profile)
    assert {shape.weight for shape in found} == set(model_weights(weights))
    counts = {shape.weight: shape.layers * layers // 4 for shape in found if shape.layers}
    assert counts == forward_counts(weights)


@pytest.mark.parametrize("name", ["2b", "9b", "27b"])
def test_profiles_are_the_released_shapes(name):
    ours, theirs = PROFILES[name], MODELS[name]
    assert (ours.hidden, ours.intermediate, ours.query_heads, ours.kv_heads) == (
        theirs.hidden, theirs.mlp, theirs.heads, theirs.kv_heads,
    )  # fmt: skip
    assert sum(shape.layers for shape in gemm_bench.shapes(ours)) == 16


def test_a_dry_run_measures_every_product_in_three_variants(tmp_path, capsys):
    code, rows = run(tmp_path, "--rows", "8,24", "--repeats", "2")
    shapes = gemm_bench.shapes(PROFILES["narrow"])
    assert code == 0
    assert [(row["weight"], row["rows"], row["variant"]) for row in rows] == [
        (shape.name, count, variant)
        for shape in shapes
        for count in (8, 24)
        for variant in gemm_bench.VARIANTS
    ]
    for row in rows:
        assert all(row[figure] is not None for figure in FIGURES) and row["skipped"] is None
        assert row["us"] > 0 and 1e-3 < row["rel_l2"] < 1e-2 and row["case"].endswith(f"_{row['rows']}")
        assert (row["op"], row["features"], row["columns"]) in {shape.weight for shape in shapes}
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 2 + 2 * len(shapes)


def test_rates_are_of_the_product_alone(tmp_path, monkeypatch):
    def measure(self, product, choices, rounds, alone=False):
        return [(10.0 if alone else 12.0, 0.002) for _ in choices]

    monkeypatch.setattr(tuner.Tuner, "measure", measure)
    _, rows = run(tmp_path, "--rows", "24", "--weight", "linear_out")
    found = rows[-1]
    assert (found["us"], found["alone_us"]) == (12.0, 10.0)
    features, columns = found["features"], found["columns"]
    assert found["tflops"] == round(2 * 24 * features * columns / 10e-6 / 1e12, 1)
    assert found["gb_s"] == round(2 * (features * columns + 24 * (features + columns)) / 10e-6 / 1e9, 1)


def test_the_sums_of_a_forward(monkeypatch):
    shapes = gemm_bench.shapes(PROFILES["27b"])
    rows = [
        gemm_bench.row("27b", shape, 280, variant, us=us, alone_us=50.0)
        for shape in shapes
        for variant, us in zip(gemm_bench.VARIANTS, (100.0, 90.0, 60.0), strict=True)
    ]
    # Four matmuls in each of 64 layers; slices of the last layer are not counted.
    assert gemm_bench.forwards(rows).splitlines()[1].split() == [
        "27b",
        "280",
        "25.60",
        "23.04",
        "15.36",
        "12.80",
    ]
    assert len(gemm_bench.forwards(rows[3:]).splitlines()) == 1
    rows[0]["skipped"] = "late"
    assert len(gemm_bench.forwards(rows).splitlines()) == 1


def test_what_does_not_fit_is_skipped_and_said(tmp_path, capsys):
    code, rows = run(tmp_path, "--rows", "8", "--seconds", "-1")
    assert code == 1 and all(row["us"] is None and row["skipped"] == "more than -1 s" for row in rows)
    printed = capsys.readouterr()
    assert "skipped" in printed.out and f"SKIPPED {len(rows) // 3} products" in printed.err


def test_the_way_the_tuner_finds_is_the_one_measured(tmp_path, monkeypatch):
    chosen = Choice("kernel", tile=64)

    class Ways(gemm_bench.PytorchWays):
        def candidates(self, product):
            yield from (PYTORCH, chosen)

    def round_(self, recordings):
        return [50.0 if recording.calls < 0 else 100.0 for recording in recordings]

    monkeypatch.setattr(gemm_bench, "PytorchWays", Ways)
    real = gemm_bench.HostTimer.record

    def record(self, calls):
        made = real(self, calls)
        return made if calls[0].args[0] == PYTORCH else gemm_bench.Recording(-1, made.replay)

    monkeypatch.setattr(gemm_bench.HostTimer, "record", record)
    monkeypatch.setattr(gemm_bench.HostTimer, "round", round_)
    _, rows = run(tmp_path, "--rows", "8", "--weight", "linear_out", "--weight", "linear_in")
    assert [(row["variant"], row["us"], row["way"]) for row in rows[:3]] == [
        ("linear", 100.0, "F.linear"),
        ("default", 100.0, "F.linear"),
        ("openjev_fast", 50.0, str(chosen)),
    ]


@pytest.mark.parametrize(
    "arguments", [["--write-table"], ["--rows", "none"], ["--profile", "70b"]], ids=" ".join
)
def test_a_wrong_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        gemm_bench.main(["--device", "cpu", *arguments])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and (arguments[0] in printed or "measured on a GPU" in printed)


def test_an_unknown_weight_is_named(tmp_path):
    with pytest.raises(SystemExit, match="no weight is named up"):
        run(tmp_path, "--weight", "up", "--rows", "8")
