"""`openjev-fast verify` on the tiny checkpoint: it passes, and planted faults are named by level and place."""

from __future__ import annotations

import dataclasses
import json
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decisions import question, text
from jev.api import compile_request
from jev.model import DecisionModel
from recorded import record_instead_of_capture

from openjev_fast_plugin import cli, ops
from openjev_fast_plugin import engine as fast_engine
from openjev_fast_plugin import forward as forward_module
from openjev_fast_plugin.loading import load_original
from openjev_fast_plugin.patches import jev_model
from openjev_fast_plugin.prompts import PromptEncoder
from openjev_fast_plugin.verification import answers as answer_level
from openjev_fast_plugin.verification import cases as case_module
from openjev_fast_plugin.verification import packed as packed_module
from openjev_fast_plugin.verification import run as run_module
from openjev_fast_plugin.verification.cases import Case, compile_requests, default_requests, tokenize
from openjev_fast_plugin.verification.observe import flat_scores, in_float32, observe_original, part
from openjev_fast_plugin.verification.packed import PackedRun, checked_layers, own_rows
from openjev_fast_plugin.verification.preparation import (
    Fingerprints,
    check_tree,
    fused_weights,
    module_weights,
)
from openjev_fast_plugin.verification.report import finite, render
from openjev_fast_plugin.verification.run import LEVELS, run
from openjev_fast_plugin.weights import merge_adapters, take_weights, text_model

REQUESTS = [
    {"state": text(25, 1), "questions": {"team": question("choice", 3, 1), "level": question("score", 3, 2)}},
    {"state": text(12, 2), "questions": {"refund": question("noul", 1, 3)}},
]


@pytest.fixture(scope="module")
def requests(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("requests") / "asked.json"
    file.write_text(json.dumps(REQUESTS), encoding="utf-8")
    return file


@pytest.fixture
def verify(tiny_checkpoint, requests) -> Callable[..., dict[str, Any]]:
    def verified(**options: Any) -> dict[str, Any]:
        return run(tiny_checkpoint, [requests], "cpu", **options)

    return verified


def statuses(result: dict[str, Any]) -> dict[str, bool | None]:
    return {name: result["levels"][name]["passed"] for name in LEVELS}


def assert_fails_at(result: dict[str, Any], level: str, *words: str) -> None:
    """The first level to fail, and its first failure's place; the report for a person says the same."""
    assert not result["passed"] and result["failed_level"] == level, statuses(result)
    first = result["levels"][level]["failures"][0]
    last_words = render(result).split("\nFAIL at ")[1]
    for word in words:
        assert word in f"{first['place']}: {first['what']}", first
        assert word in last_words.splitlines()[0]
    assert last_words.startswith(level) and "--backend torch" in last_words


# What passes


@pytest.mark.parametrize("float32", [False, True], ids=["bfloat16", "float32"])
def test_it_passes_and_says_what_it_saw(tiny_checkpoint, requests, capsys, float32):
    options = ["--checkpoint", str(tiny_checkpoint), "--requests", str(requests), "--device", "cpu", "--json"]
    assert cli.main(["verify", *options, *(["--float32"] if float32 else [])]) == 0
    result = json.loads(capsys.readouterr().out)
    assert statuses(result) == dict.fromkeys(LEVELS, True) and result["passed"]
    assert result["dtype"] == ("float32" if float32 else "bfloat16")
    assert [request["prompts"] for request in result["requests"]] == [6, 1]
    assert {request["name"] for request in result["requests"]} == {"asked.json[0]", "asked.json[1]"}
    levels = result["levels"]
    # Every op a forward calls; the two that no forward calls by themselves are parts of others.
    called = {name.removesuffix("_ref") for name in ops.__all__ if name.endswith("_ref")} - {
        "gate_mul",
        "silu_mul",
    }
    assert set(levels["ops"]["ops"]) == called
    assert all(op["calls"] >= 2 and op["worst"] is not None for op in levels["ops"]["ops"].values())
    rows = levels["states"]["layers"]
    assert [row["layer"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        # Two forwards that differ, and not one compared with itself.
        assert 0 < row["relative_l2"] < (1e-5 if float32 else 0.2)
        assert float32 or 0.5 < row["ratio"] < 1.05
    assert levels["answers"]["questions"] == 3 and levels["answers"]["largest_difference"] > 0
    assert set(levels["answers"]["thresholds_crossed"]) == {"0.5", "0.6", "0.7", "0.8", "0.9", "0.95", "0.99"}
    assert result["memory"]["model_bytes"] > 0 and result["memory"]["host_bytes"] > 0


def test_the_default_requests_pass_in_a_report(tiny_checkpoint, capsys):
    assert cli.main(["verify", "--checkpoint", str(tiny_checkpoint), "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("\nPASS\n") and "FAIL" not in printed.out
    for name, _ in default_requests(0):
        assert name in printed.out
    for words in (
        "relative L2",
        "ratio",
        "decisions changed",
        "thresholds",
        "allowed:",
        "one model after the other",
    ):
        assert words in printed.out
    assert "loading the checkpoint for the original" in printed.err


def test_default_requests_hold_every_kind_and_follow_their_seed():
    kinds = {asked["type"] for _, request in default_requests(3) for asked in request["questions"].values()}
    assert kinds == {"choice", "score", "noul"}
    assert default_requests(3) == default_requests(3) != default_requests(4)
    compile_requests(default_requests(3))


@pytest.fixture
def graph(tiny_checkpoint, monkeypatch) -> Callable[[], dict[str, Any]]:
    """Verifies the backend `graph` on the default requests: merged adapters round as much as adapters beside the
    weights do, and over a few rows of the tiny model chance decides which more."""
    record_instead_of_capture(monkeypatch)
    return lambda: run(tiny_checkpoint, None, "cpu", "graph")


def test_a_graph_backend_is_held_against_the_original(graph):
    result = graph()
    assert statuses(result) == {"preparation": True, "ops": None, "states": True, "answers": True}
    assert result["levels"]["answers"]["replayed"] == len(default_requests(0))
    assert all(0.95 < row["ratio"] <= 1.05 for row in result["levels"]["states"]["layers"])
    assert render(result).endswith("PASS, without ops")


def test_the_environment_does_not_put_the_original_on_a_backend(tiny_checkpoint, monkeypatch):
    monkeypatch.setenv("OPENJEV_BACKEND", "fast")
    undo = jev_model.apply(__import__("jev.model").model)
    try:
        assert DecisionModel.load(tiny_checkpoint, "cpu").openjev_fast.name == "fast"
        assert getattr(load_original(tiny_checkpoint, "cpu"), "openjev_fast", None) is None
    finally:
        undo()


def test_states_that_do_not_fit_on_the_host_are_left_out_and_named(verify, monkeypatch):
    monkeypatch.setattr(run_module.fast_engine, "free_memory", lambda device: 0)
    result = verify()
    assert statuses(result) == {"preparation": True, "ops": True, "states": None, "answers": True}
    assert result["levels"]["answers"]["original_to_float32"] > 0
    shown = render(result)
    assert (
        shown.endswith("PASS, without states") and "for want of memory: asked.json[0], asked.json[1]" in shown
    )


def test_one_model_is_in_memory_at_a_time(verify, monkeypatch):
    real, loaded = run_module.load_original, []

    def load(*arguments):
        assert all(model() is None for model in loaded)
        model = real(*arguments)
        loaded.append(weakref.ref(text_model(model.backbone).layers[0].mlp.down_proj.weight))
        return model

    monkeypatch.setattr(run_module, "load_original", load)
    assert verify()["passed"] and len(loaded) == 2


# Planted faults


def fewer_bits(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 with its last bit cut off; float32 rounded to bfloat16."""
    if x.dtype == torch.float32:
        return x.bfloat16().float()
    return (x.contiguous().view(torch.int16) & ~1).view(torch.bfloat16)


@pytest.fixture
def replaced_op() -> Iterator[Callable[[str, Callable], None]]:
    """Puts a function in the place of an op's portable implementation."""
    libraries = []

    def replace(name: str, function: Callable) -> None:
        library = torch.library.Library("openjev_fast", "IMPL")
        library.impl(name, function, "CPU")
        libraries.append(library)

    yield replace
    for library in libraries:
        library._destroy()


@pytest.mark.parametrize("float32", [False, True], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name",
    [
        "add_rms_norm",
        "attention_prepare",
        "delta_prepare",
        "delta_rule",
        "gated_rms_norm",
        "linear",
        "linear_silu_mul",
        "linear_update",
        "tree_attention",
    ],
)
def test_an_op_that_rounds_otherwise_is_named(verify, replaced_op, name, float32):
    home = "linear" if name.startswith("linear") else name
    module = __import__(f"openjev_fast_plugin.ops.{home}", fromlist=["_"])
    own = {
        "linear": torch.nn.functional.linear,
        "linear_silu_mul": getattr(module, "_portable_silu_mul", None),
        "linear_update": getattr(module, "_portable_update", None),
    }
    portable = own.get(name) or module._portable

    def rounded(*arguments: Any) -> Any:
        found = portable(*arguments)
        return fewer_bits(found) if isinstance(found, torch.Tensor) else tuple(map(fewer_bits, found))

    replaced_op(name, rounded)
    result = verify(float32=float32)
    assert_fails_at(result, "ops", name, "layer", "asked.json[0]")
    failures = result["levels"]["ops"]["failures"]
    assert {failure["place"].split(",")[0] for failure in failures} == {name}
    assert result["levels"]["preparation"]["passed"]


def test_a_score_without_the_norms_rounding_is_named(verify, replaced_op):
    def unrounded(residual, update, rows, norm_weight, head_weight, head_bias, eps):
        x = (residual + update)[rows.long()].float()
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], 1.0 + norm_weight.float(), eps)
        return normed @ head_weight + head_bias

    replaced_op("head_score", unrounded)
    assert_fails_at(verify(), "ops", "head_score", "layer 3")


def test_an_output_that_is_not_finite_is_named(verify, replaced_op):
    portable = __import__("openjev_fast_plugin.ops.gated_rms_norm", fromlist=["_"])._portable

    def lost(*arguments: Any) -> torch.Tensor:
        found = portable(*arguments)
        found[-1, 0] = math.nan
        return found

    replaced_op("gated_rms_norm", lost)
    result = verify()
    assert_fails_at(result, "ops", "gated_rms_norm", "layer 0", "elements not finite")
    json.dumps(finite(result), allow_nan=False)


def after_takeover(monkeypatch, change: Callable[[Any], None]) -> None:
    """Do something to a model once the backend has it."""
    real = run_module.accelerate

    def accelerate(model: Any, *arguments: Any) -> Any:
        found = real(model, *arguments)
        with torch.no_grad():
            change(found)
        return found

    monkeypatch.setattr(run_module, "accelerate", accelerate)


@pytest.mark.parametrize("float32", [False, True], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "layer, part_of, row, name",
    [
        (2, lambda layer: layer.gate_up, 17, "layers.2.mlp.gate_proj.weight"),
        (1, lambda layer: layer.mixer.project, -1, "layers.1.linear_attn.in_proj_a.weight"),
        (3, lambda layer: layer.mixer.output, 5, "layers.3.self_attn.o_proj.weight"),
        (0, lambda layer: layer.mixer.conv, 9, "layers.0.linear_attn.conv1d.weight"),
        (1, lambda layer: layer.post_norm, 3, "layers.1.post_attention_layernorm.weight"),
    ],
    ids=["gate_up", "project", "output", "conv", "norm"],
)
def test_a_weight_row_is_named(verify, monkeypatch, layer, part_of, row, name, float32):
    after_takeover(
        monkeypatch, lambda model: part_of(model.openjev_fast.engine.weights.layers[layer])[row].neg_()
    )
    result = verify(float32=float32)
    at = 3 if row < 0 else row
    assert_fails_at(result, "preparation", name, f"1 of {rows_of(result, name)} rows", f": {at}")
    assert [failure["place"] for failure in result["levels"]["preparation"]["failures"]] == [
        f"weights, {name}"
    ]
    # Ops and references read the same weights; what they compute is another model's.
    assert result["levels"]["ops"]["passed"]
    if float32:
        states = result["levels"]["states"]
        assert [row["passed"] for row in states["layers"]] == [True] * layer + [False] * (4 - layer)


def rows_of(result: dict[str, Any], name: str) -> int:
    """As the failure says it."""
    first = result["levels"]["preparation"]["failures"][0]
    assert first["place"].endswith(name)
    return int(first["what"].split(" of ")[1].split(" ")[0])


def test_a_weight_row_of_the_graph_backend_is_named(graph, monkeypatch):
    after_takeover(monkeypatch, lambda model: model.backbone.model.layers[2].mlp.up_proj.weight[40].neg_())
    result = graph()
    assert_fails_at(result, "preparation", "layers.2.mlp.up_proj.weight", "40")
    states = [row["passed"] for row in result["levels"]["states"]["layers"]]
    assert states[:2] == [True, True] and not all(states)


@pytest.mark.parametrize("float32", [False, True], ids=["bfloat16", "float32"])
def test_a_parent_pointer_of_the_forest_is_named(verify, monkeypatch, float32):
    real = fast_engine.build_forest

    def build_forest(sequences):
        forest = real(sequences)
        if len(forest.node_parent) > 2:
            # The last leaf hangs below the root.
            assert forest.node_parent[-1] > 0
            forest.node_parent[-1] = 0
        return forest

    monkeypatch.setattr(fast_engine, "build_forest", build_forest)
    result = verify(float32=float32)
    node = len(real(compiled().sequences).node_parent) - 1
    assert_fails_at(result, "preparation", "tree of asked.json[0]", f"node {node} ", "has parent 0")
    assert len(result["levels"]["preparation"]["failures"]) == 1
    # The other request's tree is sound, and so is all the rest.
    assert [request["states_compared"] for request in result["requests"]] == [False, True]
    assert result["levels"]["ops"]["passed"] and result["levels"]["states"]["passed"]
    if float32:
        assert not result["levels"]["answers"]["passed"]


@pytest.mark.parametrize("float32", [False, True], ids=["bfloat16", "float32"])
def test_ops_put_together_wrongly_are_found_in_the_states(verify, monkeypatch, float32):
    real = forward_module.rotary_tables
    monkeypatch.setattr(forward_module, "rotary_tables", lambda position, *rest: real(2 * position, *rest))
    result = verify(float32=float32)
    # Layer 3 is the only one of full attention.
    assert_fails_at(result, "states", "layer 3 (full_attention)")
    assert [row["passed"] for row in result["levels"]["states"]["layers"]] == [True, True, True, False]


def test_a_fault_in_one_prompts_rows_is_found_in_the_states(verify, monkeypatch):
    """Too few rows to move what is typical."""
    real = forward_module.delta_rule

    def delta_rule(*arguments):
        found = real(*arguments)
        found[-3:] = found[-3:].flip(-1)
        return found

    monkeypatch.setattr(forward_module, "delta_rule", delta_rule)
    result = verify()
    assert_fails_at(result, "states", "layer 0", "asked.json", "a prompt's distance")


def test_answers_that_go_to_the_wrong_option_are_found(verify, monkeypatch):
    real = fast_engine.FastEngine.score

    def score(self, records):
        scores = real(self, records)
        return dataclasses.replace(scores, logits=[row.flip(0) for row in scores.logits])

    monkeypatch.setattr(fast_engine.FastEngine, "score", score)
    result = verify()
    assert_fails_at(result, "answers", "asked.json[0]", "probability difference")
    assert statuses(result) == {"preparation": True, "ops": True, "states": True, "answers": False}
    assert result["levels"]["answers"]["changed_decisions"]


def test_a_request_that_changes_the_next_answer_is_found(verify, monkeypatch):
    real, calls = fast_engine.FastEngine.score, []

    def score(self, records):
        calls.append(records)
        scores = real(self, records)
        return dataclasses.replace(scores, logits=[row + 1e-6 * len(calls) for row in scores.logits])

    monkeypatch.setattr(fast_engine.FastEngine, "score", score)
    assert_fails_at(verify(), "answers", "asked.json[0]", "asked twice")


def test_a_backend_that_raises_has_not_answered(verify, monkeypatch):
    def score(self, records):
        raise RuntimeError("out of kernels")

    monkeypatch.setattr(fast_engine.FastEngine, "score", score)
    assert_fails_at(verify(), "answers", "asked.json[0]", "out of kernels")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda ids: np.append(ids[:7], ids[6:-1]), "token 7 is"),
        (lambda ids: ids[:-1], "prompts 0 to 5: Open-Jev reads"),
    ],
    ids=["another_token", "too_short"],
)
def test_prompts_that_are_not_open_jevs_are_found(verify, monkeypatch, change, message):
    class Encoder(PromptEncoder):
        def encode(self, records):
            groups = super().encode(records)
            groups[0][0] = change(groups[0][0]).astype(np.int32)
            return groups

    monkeypatch.setattr(case_module, "PromptEncoder", Encoder)
    assert_fails_at(verify(), "preparation", "prompts of asked.json[0]", message)


# The command line


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["verify", "--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    for words in (*LEVELS, "--requests monday.json", '"questions"', "exit status: 0", "--float32"):
        assert words in shown


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "cannot be read as JSON"),
        ("[]", "hold no request"),
        ('{"state": "x"}', "asked.json is not a request that Open-Jev takes: KeyError('questions')"),
        ('[{"state": "x", "questions": {"q": {"type": "rank"}}}]', "asked.json[0] is not a request"),
        ('[{"state": %s, "questions": {"q": {"type": "noul", "instructions": "Is it?"}}}]', "a prompt of"),
    ],
    ids=["not_json", "empty", "no_questions", "unknown_type", "too_long"],
)
def test_requests_that_cannot_be_asked_are_a_usage_error(tiny_checkpoint, tmp_path, capsys, content, message):
    file = tmp_path / "asked.json"
    file.write_text(content % json.dumps("word " * 5000) if "%s" in content else content)
    options = ["--checkpoint", str(tiny_checkpoint), "--device", "cpu", "--requests", str(file)]
    assert cli.main(["verify", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--checkpoint", "missing"], "missing is not a checkpoint package"),
        (["--backend", "graph", "--device", "cpu"], "the model is on cpu, CUDA Graphs need a CUDA device"),
        (["--backend", "graph", "--device", "cpu", "--float32"], "--float32 verifies backend fast"),
        pytest.param(
            ["--device", "cuda:0"],
            "--device cuda:0: PyTorch sees no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
    ids=["checkpoint", "backend", "float32", "device"],
)
def test_what_cannot_be_verified_is_a_usage_error(tiny_checkpoint, requests, capsys, options, message):
    given = ["--checkpoint", str(tiny_checkpoint), "--requests", str(requests), *options]
    assert cli.main(["verify", *given]) == 2
    assert message in capsys.readouterr().err


def test_a_base_that_is_gone_is_a_usage_error(tiny_checkpoint, tmp_path, capsys):
    package = tmp_path / "package"
    package.mkdir()
    for name in ("temperature.json", "model.json"):
        (package / name).write_text((tiny_checkpoint / name).read_text())
    model = json.loads((package / "model.json").read_text())
    (package / "model.json").write_text(json.dumps({**model, "model_id": str(tmp_path / "gone")}))
    assert cli.main(["verify", "--checkpoint", str(package), "--device", "cpu"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_a_failure_is_exit_status_1(tiny_checkpoint, requests, monkeypatch, capsys):
    after_takeover(monkeypatch, lambda model: model.openjev_fast.engine.weights.layers[0].down[0].neg_())
    options = ["--checkpoint", str(tiny_checkpoint), "--requests", str(requests), "--device", "cpu"]
    assert cli.main(["verify", *options]) == 1
    assert "FAIL at preparation: weights, layers.0.mlp.down_proj.weight" in capsys.readouterr().out


# The parts


def compiled(requests: list[dict[str, Any]] = REQUESTS[:1], checkpoint: Path | None = None) -> Case:
    records = compile_requests([("asked", request) for request in requests])
    tokenizer = compiled.tokenizer
    return tokenize(records, tokenizer, 4096)[0]


@pytest.fixture(scope="module", autouse=True)
def model(tiny_checkpoint) -> DecisionModel:
    loaded = DecisionModel.load(tiny_checkpoint, "cpu")
    compiled.tokenizer = loaded.tokenizer
    return loaded


def test_a_case_counts_each_distinct_row_once():
    case = compiled()
    forest = fast_engine.build_forest(case.sequences)
    assert case.rows == len(forest.token) < case.tokens == sum(map(len, case.sequences))
    rows = np.concatenate(own_rows(case.new_from, forest))
    assert sorted(rows.tolist()) == list(range(case.rows))
    assert case.candidate(0).startswith("question 'team', answer")
    assert case.candidate(5) == "question 'level', answer '2'"
    with pytest.raises(IndexError):
        case.candidate(6)


@pytest.mark.parametrize("batch", [1, 2, 4, 32])
def test_parts_of_records_score_what_the_whole_does(model, batch):
    records = compile_request(
        text(8, 4), {"a": question("choice", 5, 1), "b": question("noul", 1, 2), "c": question("score", 3, 3)}
    )
    cut = [part(records, start, min(start + batch, 9)) for start in range(0, 9, batch)]
    keys = [key for piece in cut for record in piece for key in record["answer_keys"]]
    assert keys == [key for record in records for key in record["answer_keys"]]
    with torch.inference_mode():
        whole = flat_scores(records, model(records))
        pieces = torch.cat([flat_scores(piece, model(piece)) for piece in cut])
    assert whole.shape == (9,)
    torch.testing.assert_close(pieces, whole, rtol=0.05, atol=0.05)


def test_the_float32_forward_is_that_of_the_converted_model_and_leaves_no_trace(tiny_checkpoint, model):
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    case = compiled()
    with in_float32(model):
        golden = observe_original(model, case, True)
    converted = observe_original(DecisionModel.load(tiny_checkpoint, "cpu").float(), case, True)
    assert np.array_equal(golden.scores, converted.scores)
    assert all(torch.equal(one, other) for one, other in zip(golden.states, converted.states, strict=True))
    assert golden.states[0].dtype == torch.float32 and len(golden.states) == 4
    for name, parameter in model.named_parameters():
        assert parameter.dtype == before[name].dtype and torch.equal(parameter, before[name]), name
    assert not any(
        layer._forward_hooks or layer._forward_pre_hooks for layer in text_model(model.backbone).layers
    )
    rounded = observe_original(model, case, True)
    assert rounded.states[0].dtype == torch.bfloat16 and not np.array_equal(rounded.scores, golden.scores)


def test_states_of_the_packed_forward_are_the_originals_in_float32(tiny_checkpoint):
    model = DecisionModel.load(tiny_checkpoint, "cpu").float()
    case = compiled()
    expected = observe_original(model, case, True)
    forest, found = fast_engine.build_forest(case.sequences), {}
    packed = PackedRun(take_weights(model.backbone, model.head), [])
    packed.read_states(forest, lambda layer, states: found.setdefault(layer, states))
    rows = torch.from_numpy(np.concatenate(own_rows(case.new_from, forest)))
    assert list(found) == [0, 1, 2, 3] and not packed.results
    for layer, states in found.items():
        torch.testing.assert_close(states[rows], expected.states[layer], rtol=1e-4, atol=1e-4)


def test_the_forward_that_is_watched_has_the_tiles_of_the_engine(tiny_checkpoint, monkeypatch):
    model = DecisionModel.load(tiny_checkpoint, "cpu").float()
    packed = PackedRun(take_weights(model.backbone, model.head), [])
    forest, found = fast_engine.build_forest([np.arange(30, dtype=np.int32)]), []

    def on_call(op, arguments, outputs):
        if op == "tree_attention":
            found.append(arguments[-1])

    for few_queries, tile in ((30, 10), (0, 21)):
        monkeypatch.setattr(packed_module, "few_queries_for", lambda device, heads, few=few_queries: few)
        found.clear()
        packed._run(forest, on_call)
        assert found and found[0] == tile


@pytest.mark.parametrize("wrong", [0.0, 1e-3])
def test_the_compiled_loop_is_held_to_the_ops_bit_by_bit(tiny_checkpoint, monkeypatch, wrong):
    model = DecisionModel.load(tiny_checkpoint, "cpu")
    packed = PackedRun(take_weights(model.backbone, model.head), [])
    forest = fast_engine.build_forest([np.arange(length, dtype=np.int32) for length in (30, 41)])
    packed.check_ops("a request", forest)
    # Nothing is compiled here.
    assert "forward" not in packed.results
    monkeypatch.setattr(packed_module, "compiles", lambda weights, layout: True)
    real = packed_module.forward
    monkeypatch.setattr(packed_module, "forward", lambda *arguments: real(*arguments) + wrong)
    packed.check_ops("a request", forest)
    assert packed.results["forward"].calls == 1
    failures = [(op, place, measure.what) for op, place, measure in packed.failures]
    assert failures == ([("forward", "a request", "elements different from op by op")] if wrong else [])


def test_layers_to_check_are_the_ends_and_the_middle_of_each_type():
    assert checked_layers(("linear_attention",) * 3 + ("full_attention",)) == [0, 1, 2, 3]
    kinds = (("linear_attention",) * 3 + ("full_attention",)) * 8
    assert checked_layers(kinds) == [0, 3, 16, 19, 30, 31]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda forest: forest.token.__setitem__(3, 1), "its path does not spell its prompt"),
        (lambda forest: forest.position.__setitem__(3, 9), "positions along its path"),
        (lambda forest: forest.predecessor.__setitem__((3, 2), 1), "three predecessors"),
        (lambda forest: forest.predecessor.__setitem__((3, 0), 1), "its path does not spell its prompt"),
        (lambda forest: forest.predecessor.__setitem__((0, 0), 5), "its path does not spell its prompt"),
        (lambda forest: forest.candidate_read.__setitem__(0, 1), "does not spell its prompt"),
        (lambda forest: forest.node_parent.__setitem__(1, -1), "node 1 "),
        (lambda forest: forest.node.__setitem__(3, 1), "which name other nodes"),
    ],
)
def test_everything_wrong_with_a_tree_is_seen(change, message):
    case = compiled()
    forest = fast_engine.build_forest(case.sequences)
    assert check_tree(case, forest) == []
    change(forest)
    assert any(message in what for what in check_tree(case, forest))


def test_a_tree_with_rows_twice_is_seen():
    case = compiled()
    more = fast_engine.build_forest([*case.sequences, case.sequences[0][::-1].copy()])
    assert "distinct prefixes" in check_tree(case, more)[0]


def test_fingerprints_are_equal_whoever_merged(tiny_checkpoint):
    original = DecisionModel.load(tiny_checkpoint, "cpu")
    prints = Fingerprints(original.backbone)
    merged = merge_adapters(DecisionModel.load(tiny_checkpoint, "cpu").backbone)
    other = DecisionModel.load(tiny_checkpoint, "cpu")
    fused = take_weights(other.backbone, other.head)
    assert prints.differences(module_weights(merged)) == []
    assert prints.differences(fused_weights(fused)) == []
    some = [(name, weight) for name, weight in fused_weights(fused) if name != "norm.weight"]
    assert prints.differences([*some, ("more", fused.final_norm)]) == [
        ("more", "the original has no such weight"),
        ("norm.weight", "missing"),
    ]


@pytest.mark.parametrize("row, column", [(0, 0), (11, 7), (-1, -1)])
def test_one_element_of_a_weight_shows(tiny_checkpoint, row, column):
    prints = Fingerprints(DecisionModel.load(tiny_checkpoint, "cpu").backbone)
    other = DecisionModel.load(tiny_checkpoint, "cpu")
    fused = take_weights(other.backbone, other.head)
    with torch.no_grad():
        fused.layers[3].mixer.project[row, column] += 0.1
    ((name, what),) = prints.differences(fused_weights(fused))
    assert name == f"layers.3.self_attn.{'v_proj' if row < 0 else 'q_proj'}.weight" and what.startswith(
        "1 of"
    )


def answer(
    original: list[float], backend: list[float], golden: list[float] | None = None, kind: str = "choice"
):
    names = [f"option {index}" for index in range(len(original))]
    three = [None if row is None else np.array(row) for row in (original, backend, golden)]
    return answer_level.Answer("asked", "q", kind, names, *three)


def test_answers_say_their_margins_and_what_they_crossed():
    found = answer([0.52, 0.48, 0.0], [0.44, 0.56, 0.0], [0.5, 0.5, 0.0])
    assert found.difference == pytest.approx(0.08) and found.noise == pytest.approx(0.02)
    assert found.decisions == ("option 0", "option 1")
    assert found.margins == pytest.approx((0.04, 0.12))
    assert found.crossed() == [0.5]
    assert answer([1.0], [1.0]).margins == (1.0, 1.0)
    # Of a noul only the yes is given to a caller.
    assert answer([0.52, 0.48], [0.48, 0.52], kind="noul").crossed() == [0.5]
    assert answer([0.04, 0.96], [0.06, 0.94], kind="noul").crossed() == [0.95]
    assert answer([0.4, 0.6], [math.nan, math.nan]).difference == math.inf


def test_answers_are_judged_by_the_originals_own_noise():
    quiet, loud = [0.5, 0.5], [0.46, 0.54]
    small = answer_level.judge([answer([0.51, 0.49], [0.44, 0.56], quiet)], False)
    assert [failure["what"] for failure in small["failures"]] == ["probability difference"]
    assert small["failures"][0]["bound"] == pytest.approx(0.03)
    allowed = answer_level.judge([answer([0.51, 0.49], [0.44, 0.56], loud)], False)
    assert allowed["failures"] == [] and len(allowed["changed_decisions"]) == 1
    wide = answer_level.judge([answer([0.56, 0.44], [0.44, 0.56], [0.55, 0.45])], False)
    assert [failure["bound"] for failure in wide["failures"]] == pytest.approx([0.03, 0.04])
    assert answer_level.judge([answer([0.51, 0.49], [0.5101, 0.4899])], True)["failures"] == []
    assert answer_level.judge([answer([0.51, 0.49], [0.511, 0.489])], True)["failures"]
