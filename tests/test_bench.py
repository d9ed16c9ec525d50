"""`openjev-fast bench` on the CPU: what it measures, writes and refuses; its timer, its record and its families."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from hosts import ROOT
from jev.model import DecisionModel
from torch.autograd import DeviceType

from openjev_fast_plugin import cli
from openjev_fast_plugin.demo import EXAMPLE
from openjev_fast_plugin.measurement import budget, plots, record, run
from openjev_fast_plugin.measurement.budget import FAMILIES, family_of_kernel
from openjev_fast_plugin.measurement.originals import use_delta_rule
from openjev_fast_plugin.measurement.timing import LEAST_ROUNDS, interleaved
from openjev_fast_plugin.settings import PREFIX_BYTES_VARIABLE
from openjev_fast_plugin.verification.cases import compile_requests, tokenize
from openjev_fast_plugin.weights import text_model

CPU = torch.device("cpu")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def request_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("requests") / "mine.json"
    short = {
        "state": "The parcel is late.",
        "questions": {"late": {"type": "noul", "instructions": "Is it late?"}},
    }
    file.write_text(json.dumps([json.loads(EXAMPLE.read_text()), short]))
    return file


def bench(*arguments: object) -> int:
    return cli.main(["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def result(tiny_checkpoint, request_file, tmp_path_factory):
    """What a run wrote, and where."""
    out = tmp_path_factory.mktemp("bench") / "new" / "folder"
    given = ("--checkpoint", tiny_checkpoint, "--requests", request_file, "--device", "cpu", "--out", out)
    assert bench(*given, "--repeats", 4, "--warmups", 1) == 0
    return json.loads((out / "bench.json").read_text()), out


def test_every_mode_of_a_cpu_is_measured_on_every_request(result):
    content, out = result
    assert content["order"] == "interleaved" and content["memory"]["models"] == 2
    assert [(row["case"], row["mode"]) for row in content["rows"]] == [
        (case, mode) for case in ("mine.json[0]", "mine.json[1]") for mode in ("torch", "fast")
    ]
    cases = {case["name"]: case for case in content["cases"]}
    for row in content["rows"]:
        case = cases[row["case"]]
        assert len(row["ms"]) == row["samples"] == 4
        assert 0 < row["min_ms"] == min(row["ms"]) <= row["p50_ms"] <= row["max_ms"] == max(row["ms"])
        assert row["first_ms"] > 0 and row["rows_asked"] == case["tokens"]
        assert list(row["families"]) == list(FAMILIES)
        assert (
            row["busy_ms"] == pytest.approx(sum(row["families"].values()), abs=0.01) and row["idle_ms"] >= 0
        )
        assert min(row["families"][name] for name in ("matmul", "delta rule", "attention")) > 0
        assert row["kernels"] is None
    original, fast = content["rows"][:2]
    prompts, tokens = cases["mine.json[0]"]["prompts"], cases["mine.json[0]"]["tokens"]
    # Padded to the longest, against what is shared computed once.
    assert original["rows_computed"] % prompts == 0 and original["rows_computed"] > tokens
    assert fast["rows_computed"] < original["rows_computed"] / 2
    # Two bfloat16 forwards: close, and not one model asked twice.
    assert original["largest_probability_difference"] == 0 < fast["largest_probability_difference"] < 0.1
    meta = content["meta"]
    assert meta["command"].split()[0] == "openjev-fast" and meta["torch"] == torch.__version__
    assert re.fullmatch("[0-9a-f]{16}", meta["sources"]) and meta["driver"] is None and meta["device"]
    assert (out / "bench.png").read_bytes().startswith(PNG) and (out / "bench.png").stat().st_size > 20_000
    assert sorted(path.name for path in out.iterdir()) == ["bench.json", "bench.png"]


def test_the_text_has_every_figure(result):
    from openjev_fast_plugin.measurement.report import render

    content, _ = result
    shown = render(content)
    for row in content["rows"]:
        assert f"{row['p50_ms']:.2f}" in shown and f"{row['families']['delta rule']:.2f}" in shown
    ratio = content["rows"][0]["p50_ms"] / content["rows"][1]["p50_ms"]
    assert f"{ratio:.2f}" in shown and "interleaved" in shown and "mine.json[1]" in shown


def test_models_that_do_not_fit_together_come_one_after_the_other(
    tiny_checkpoint, request_file, tmp_path, monkeypatch, capsys
):
    loaded: list[weakref.ref] = []
    alive: list[int] = []
    load = run.load_original

    def counted(*arguments):
        alive.append(sum(model() is not None for model in loaded))
        model = load(*arguments)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(run, "load_original", counted)
    monkeypatch.setattr(run, "free_memory", lambda device: 1 << 20)
    given = (
        "--checkpoint",
        tiny_checkpoint,
        "--requests",
        request_file,
        "--device",
        "cpu",
        "--out",
        tmp_path,
    )
    assert bench(*given, "--repeats", 2, "--warmups", 1, "--no-png", "--json") == 0
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert content["order"] == "one model after the other" and len(content["rows"]) == 4
    assert "do not fit together" in printed.err and all(row["ms"] for row in content["rows"])
    # Nothing is held of the first when the second loads.
    assert alive == [0, 0]
    assert (
        not (tmp_path / "bench.png").exists() and json.loads((tmp_path / "bench.json").read_text()) == content
    )


def test_without_matplotlib_it_says_so_before_it_measures(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert bench("--checkpoint", tiny_checkpoint, "--out", tmp_path / "out") == 2
    shown = capsys.readouterr().err
    assert (
        "pip install 'openjev-fast-plugin[bench]'" in shown and "--no-png" in shown and "loading" not in shown
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "tiny", "--mode", "fla"], "needs a GPU, the device is cpu"),
        (["--profile", "tiny", "--mode", "graph"], "mode graph replays CUDA Graphs and needs a GPU"),
        (["--profile", "tiny", "--device", "cuda:0"], "--device cuda:0: PyTorch sees no CUDA device here"),
        (["--profile", "tiny", "--device", "nonsense"], "--device nonsense: "),
        (["--checkpoint", "missing"], "missing cannot be loaded: "),
        (["--profile", "tiny", "--requests", "missing.json"], "missing.json cannot be read as JSON"),
        (["--profile", "tiny", "--out", __file__], "is a file: name a folder"),
    ],
)
def test_what_cannot_be_measured_is_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "--device" not in arguments:
        arguments = [*arguments, "--device", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_backend_that_refuses_the_model_is_named(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    from openjev_fast_plugin import engine

    monkeypatch.setattr(engine, "refusal", lambda model: "it is too blue")
    assert bench("--checkpoint", tiny_checkpoint, "--device", "cpu", "--out", tmp_path) == 2
    shown = capsys.readouterr().err
    assert "mode fast cannot be timed" in shown and "too blue" in shown and "--mode" in shown


# The timer


def test_nothing_is_kept_from_one_call_to_the_next(tiny_checkpoint, monkeypatch):
    monkeypatch.setenv(PREFIX_BYTES_VARIABLE, "256MiB")
    model = run.take_over(DecisionModel.load(tiny_checkpoint, "cpu"), "fast")
    assert "prefix_bytes" not in model.openjev_fast.describe()


def test_variants_take_turns_and_a_slow_one_gets_three_rounds():
    said = []
    times = interleaved(
        {name: (lambda name=name: said.append(name)) for name in "ab"},
        repeats=5,
        warmups=1,
        prepare=lambda name: said.append(f"prepare {name}"),
    )
    assert said == ["prepare a", "a", "prepare b", "b"] * 6
    assert [len(times[name]) for name in "ab"] == [5, 5]
    assert len(interleaved({"a": lambda: None}, repeats=9, warmups=0, seconds=0)["a"]) == LEAST_ROUNDS


# The record


def test_the_digest_follows_what_can_change_a_number(tmp_path):
    checkout = {name: tmp_path / name for name in ("openjev_fast_plugin", "csrc", "patches", "bench")}
    for name, folder in checkout.items():
        shutil.copytree(ROOT / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    first = record.source_digest(checkout)
    (checkout["bench"] / "results" / "cpu" / "e2e.json").write_text("{}")
    (checkout["bench"] / "LOG.md").write_text("other words")
    (checkout["openjev_fast_plugin"] / "__pycache__").mkdir()
    assert record.source_digest(checkout) == first
    # As it is installed: what is mapped into the package counts once, under the same names.
    package = {name: checkout[name] for name in ("openjev_fast_plugin", "csrc", "patches")}
    plain, inside = record.source_digest(package), tmp_path / "site" / "openjev_fast_plugin"
    shutil.copytree(checkout["openjev_fast_plugin"], inside)
    installed = {"openjev_fast_plugin": inside}
    for name in ("csrc", "patches"):
        installed[name] = shutil.copytree(checkout[name], inside / name)
    assert record.source_digest(installed) == plain != first
    for path in (
        "openjev_fast_plugin/matmuls.json",
        "csrc/binding.cpp",
        "patches/jev_server.py",
        "bench/load.py",
    ):
        file = tmp_path / path
        before = file.read_bytes()
        file.write_bytes(before + b" ")
        assert record.source_digest(checkout) != first, path
        file.write_bytes(before)
    assert record.source_digest(checkout) == first


# Families


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("void delta_chunk_kernel<128, 128>(DeltaRule)", "delta rule"),
        ("delta_prepare_kernel", "norms and elementwise"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "delta rule"),
        ("chunk_fwd_kernel_o", "delta rule"),
        ("recompute_w_u_fwd_kernel", "delta rule"),
        ("l2norm_fwd_kernel", "norms and elementwise"),
        ("layer_norm_gated_fwd_kernel", "norms and elementwise"),
        ("causal_conv1d_fwd_kernel", "norms and elementwise"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "matmul"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>",
            "norms and elementwise",
        ),
        ("void at::native::reduce_kernel<512, 1>", "norms and elementwise"),
        ("Memcpy DtoH (Device -> Pageable)", "other"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", "other"),
        ("something new", "other"),
    ],
)
def test_a_kernel_has_a_family_by_its_name(kernel, family):
    assert family_of_kernel(kernel) == family


def test_every_kernel_of_ours_has_a_family():
    kernels = {
        name
        for path in (ROOT / "csrc").glob("*.cu*")
        for name in re.findall(r"\b([a-z]\w*_kernel)\s*\(", path.read_text())
    }
    assert len(kernels) >= 10
    assert {name for name in kernels if family_of_kernel(name) == "other"} == set()


def event(name, first, last, device=DeviceType.CUDA, kernels=(), children=(), parent=None):
    span = SimpleNamespace(start=first, end=last)
    return SimpleNamespace(
        name=name,
        time_range=span,
        device_type=device,
        kernels=kernels,
        cpu_children=children,
        cpu_parent=parent,
        is_async=False,
    )


def test_kernels_that_overlap_count_once():
    events = [event("nvjet", 0, 1000), event("delta_state_kernel", 800, 1500), event("memset", 900, 1200)]
    found = budget._of_kernels(events, wall=9.0)
    assert found.kernels == 3 and found.busy_ms == pytest.approx(1.5) and found.wall_ms == 9.0
    assert found.families["matmul"] == pytest.approx(1.0)
    assert found.families["delta rule"] == pytest.approx(0.5) and found.families["other"] == 0


def test_a_product_that_the_delta_rule_launches_is_the_delta_rules():
    Kernel = namedtuple("Kernel", "name device duration")
    inner = event("aten::bmm", 0, 9, DeviceType.CPU, kernels=[Kernel("nvjet", 0, 300.0)], parent=True)
    linear = event("aten::mm", 0, 9, DeviceType.CPU, kernels=[Kernel("nvjet", 0, 200.0)], parent=True)
    child = event(budget._MARK + "matmul", 0, 9, DeviceType.CPU, children=[linear], parent=True)
    mixer = event(budget._MARK + "delta rule", 0, 9, DeviceType.CPU, children=[inner, child])
    device = [event("nvjet", 0, 300), event("nvjet", 300, 500), event("late", 500, 550)]
    found = budget._of_launches([mixer, inner, child, linear, *device], wall=1.0)
    assert found.families["delta rule"] == pytest.approx(0.3) and found.families["matmul"] == pytest.approx(
        0.2
    )
    assert found.families["other"] == pytest.approx(0.05) and found.kernels == 3
    # A kernel listed twice took its time once.
    twice = event("aten::matmul", 0, 9, DeviceType.CPU, kernels=linear.kernels)
    again = budget._of_launches([mixer, inner, child, linear, twice, *device], wall=1.0)
    assert again.busy_ms == pytest.approx(0.55) == found.busy_ms
    assert again.families["other"] == pytest.approx(0.05)


def test_the_parts_of_a_cpu_forward_are_told_apart(tiny_checkpoint):
    model = DecisionModel.load(tiny_checkpoint, "cpu")
    text = text_model(model.backbone)
    use_delta_rule(text, "torch")
    requests = compile_requests([("example", json.loads(EXAMPLE.read_text()))])
    case = tokenize(requests, model.tokenizer, model.max_length)[0]
    loaded = run.Loaded(("torch",), model)
    hooks = sum(len(module._forward_hooks) for module in text.modules())
    loaded.ask("torch", case)
    marked = budget.spend(lambda: loaded.ask("torch", case), CPU, text)
    plain = budget.spend(lambda: loaded.ask("torch", case), CPU)
    assert sum(len(module._forward_hooks) for module in text.modules()) == hooks
    assert 0 < marked.busy_ms <= marked.wall_ms
    # The delta rule in PyTorch is made of products and elementwise work, told apart by who calls them alone.
    assert plain.families["delta rule"] == 0 < marked.families["delta rule"]
    assert marked.families["matmul"] < plain.families["matmul"] + marked.families["delta rule"]
    product = budget.spend(lambda: torch.randn(300, 300) @ torch.randn(300, 300), CPU)
    assert product.families["matmul"] > 0 == product.families["delta rule"] == product.families["attention"]
