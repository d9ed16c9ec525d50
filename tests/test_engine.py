"""The fast backend against the original forward of the host, on the tiny checkpoint."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from decisions import question, requests, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jev.api import compile_request
from jev.model import DecisionModel

from openjev_fast_plugin import engine as engine_module
from openjev_fast_plugin import forward as forward_module
from openjev_fast_plugin import weights as model_weights
from openjev_fast_plugin.build import BuildError
from openjev_fast_plugin.engine import FastEngine
from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.layout import build_layout
from openjev_fast_plugin.ops import add_rms_norm_ref
from openjev_fast_plugin.settings import BackendError, Settings
from openjev_fast_plugin.takeover import accelerate

PROPERTY = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def load(checkpoint, dtype: torch.dtype = torch.float32) -> DecisionModel:
    model = DecisionModel.load(checkpoint, "cpu")
    return model.float() if dtype == torch.float32 else model


def engine_of(
    checkpoint,
    dtype: torch.dtype = torch.float32,
    settings: Settings = Settings(),  # noqa: B008
) -> FastEngine:
    """An engine that keeps the model it was built for."""
    model = load(checkpoint, dtype)
    engine = FastEngine(model, settings)
    engine.model = model
    return engine


@pytest.fixture(scope="module")
def original(tiny_checkpoint) -> DecisionModel:
    return load(tiny_checkpoint)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint) -> FastEngine:
    return engine_of(tiny_checkpoint)


def probabilities(logits: list[torch.Tensor]) -> list[torch.Tensor]:
    return [row.double().softmax(0) for row in logits]


def compiled(request: dict[str, Any]) -> list[dict[str, Any]]:
    return compile_request(request["state"], request["questions"])


def assert_same_logits(engine: FastEngine, original: DecisionModel, records: list[dict[str, Any]]) -> None:
    found = engine.score(records)
    with torch.inference_mode():
        expected = original(records)
    assert found.input_tokens == original.last_input_tokens
    assert len(found.logits) == len(expected)
    for row, wanted in zip(found.logits, expected, strict=True):
        assert row.dtype == torch.float32
        torch.testing.assert_close(row, wanted, rtol=1e-4, atol=1e-4)


@PROPERTY
@given(request=requests())
def test_logits_are_the_original_ones(engine, original, request):
    assert_same_logits(engine, original, compiled(request))


@pytest.mark.parametrize(
    "questions",
    [
        {"q": question("noul", 1, 1)},
        {"q": question("choice", 1, 2)},
        {"q": question("choice", 255, 3)},
        {"q": question("score", 2, 4)},
        {"q": question("score", 10, 5)},
        {"a": question("choice", 3, 6), "b": question("noul", 1, 7), "c": question("score", 3, 8)},
    ],
    ids=["noul", "choice_1", "choice_255", "score_2", "score_10", "three"],
)
def test_edges_of_every_kind(engine, original, questions):
    assert_same_logits(engine, original, compile_request("One short state.", questions))


def test_a_state_of_2000_tokens(engine, original):
    records = compile_request(text(700, 11), {"q": question("choice", 4, 1)})
    assert_same_logits(engine, original, records)
    assert engine.score(records).input_tokens > 4 * 1500


def test_state_is_computed_once(engine):
    records = compile_request(text(300, 5), {"q": question("choice", 32, 1)})
    stats = engine.score(records).stats
    assert stats["forwards"] == 1
    assert stats["rows_asked"] > 10 * stats["rows_computed"]


@PROPERTY
@given(request=requests(budget=4000), seed=st.integers(0, 100))
def test_other_questions_change_no_probability(engine, request, seed):
    alone = compiled(request)
    more = {
        "other": question("choice", 3, seed),
        **request["questions"],
        "last": question("noul", 1, seed + 1),
    }
    renamed = {f"renamed {key}": value for key, value in reversed(more.items())}
    expected = probabilities(engine.score(alone).logits)
    for questions in (more, renamed):
        records = compile_request(request["state"], questions)
        found = dict(zip(questions, probabilities(engine.score(records).logits), strict=True))
        for key, wanted in zip(request["questions"], expected, strict=True):
            got = found[key] if key in found else found[f"renamed {key}"]
            assert (got - wanted).abs().max() <= 1e-5


@PROPERTY
@given(first=requests(budget=3000), second=requests(budget=3000))
def test_another_request_beside_it_changes_no_probability(engine, first, second):
    own, beside = compiled(first), compiled(second)
    expected = probabilities(engine.score(own).logits)
    found = probabilities(engine.score([*beside, *own]).logits[len(beside) :])
    for got, wanted in zip(found, expected, strict=True):
        assert (got - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_request_twice_is_bit_equal(tiny_checkpoint, dtype):
    engine = engine_of(tiny_checkpoint, dtype)
    records = compile_request(text(90, 3), {"a": question("choice", 9, 1), "b": question("noul", 1, 2)})
    first, second = engine.score(records), engine.score(records)
    assert all(torch.equal(x, y) for x, y in zip(first.logits, second.logits, strict=True))


def golden_requests() -> list[list[dict[str, Any]]]:
    sizes = [3, 17, 40, 80, 160]
    return [
        compile_request(
            text(sizes[seed % 5], seed),
            {
                "a": question("choice", 2 + seed % 4, seed),
                "b": question("noul", 1, seed),
                "c": question("score", 3, seed),
            },
        )
        for seed in range(50)
    ]


def rows_read_by_original(model: DecisionModel, records: list[dict[str, Any]]) -> torch.Tensor:
    """What the head multiplies, in float64 [candidates, hidden]."""
    seen: list[torch.Tensor] = []
    handle = model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0].double()))
    with torch.inference_mode():
        model(records)
    handle.remove()
    return torch.cat(seen)


def rows_read_by_engine(engine: FastEngine, records: list[dict[str, Any]], monkeypatch) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    real_head, real_forward = forward_module.head_score, engine_module.forward

    def head_score(residual, update, rows, norm_weight, *rest):
        seen.append(add_rms_norm_ref(residual, update, norm_weight, rest[-1])[1][rows.long()].double())
        return real_head(residual, update, rows, norm_weight, *rest)

    def forward(weights, layout):
        scores = real_forward(weights, layout)
        seen[-1] = seen[-1][layout.candidate_read.long()]
        return scores

    with monkeypatch.context() as patch:
        patch.setattr(forward_module, "head_score", head_score)
        patch.setattr(engine_module, "forward", forward)
        engine.score(records)
    return torch.cat(seen)


@pytest.mark.parametrize("sharing", [1, 10], ids=["alone", "ten_in_a_forward"])
def test_bfloat16_is_no_further_from_float32_than_the_original(
    tiny_checkpoint, original, monkeypatch, sharing
):
    rounded = load(tiny_checkpoint, torch.bfloat16)
    fast = engine_of(tiny_checkpoint, torch.bfloat16)
    ours = theirs = norm = 0.0
    requests = golden_requests()
    # What several requests give in one forward is what one request with all their records gives.
    together = [sum(requests[start : start + sharing], []) for start in range(0, len(requests), sharing)]
    for records in together:
        golden = rows_read_by_original(original, records)
        norm += golden.pow(2).sum().item()
        ours += (rows_read_by_engine(fast, records, monkeypatch) - golden).pow(2).sum().item()
        theirs += (rows_read_by_original(rounded, records) - golden).pow(2).sum().item()
    assert norm > 0 and theirs > 0
    ratio = math.sqrt(ours / theirs)
    assert ratio <= 1.05, (
        f"relative L2 {math.sqrt(ours / norm):.4f}, the original's {math.sqrt(theirs / norm):.4f}"
    )


@pytest.mark.parametrize("max_rows", [700, 200, 150])
def test_a_request_over_the_row_limit_runs_in_parts(tiny_checkpoint, engine, max_rows):
    records = compile_request(
        text(25, 9),
        {"a": question("choice", 40, 1), "b": question("score", 10, 2), "c": question("noul", 1, 3)},
    )
    limited = engine_of(tiny_checkpoint, settings=Settings(max_rows=max_rows))
    found, expected = limited.score(records), engine.score(records)
    assert found.stats["forwards"] > 1 or max_rows >= expected.stats["rows_computed"]
    assert found.input_tokens == expected.input_tokens
    for got, wanted in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_prompt_longer_than_the_row_limit_is_refused_by_name(tiny_checkpoint):
    limited = engine_of(tiny_checkpoint, settings=Settings(max_rows=50))
    records = compile_request(text(100, 1), {"q": question("noul", 1, 2)})
    with pytest.raises(ValueError, match="50"):
        limited.score(records)


def test_a_prompt_over_max_length_is_refused_as_the_original_does(tiny_checkpoint, original):
    engine = engine_of(tiny_checkpoint)
    records = compile_request(text(100, 1), {"q": question("noul", 1, 2)})
    length = engine.score(records).input_tokens
    limit = original.max_length
    engine.model.max_length = original.max_length = length - 1
    try:
        with pytest.raises(ValueError) as theirs:
            original(records)
    finally:
        original.max_length = limit
    with pytest.raises(ValueError) as ours:
        engine.score(records)
    assert str(ours.value) == str(theirs.value)
    engine.model.max_length = length
    assert engine.score(records).logits


def test_no_records_are_refused_as_the_original_does(engine, original):
    for score in (engine.score, original):
        with pytest.raises(IndexError):
            score([])


def test_tuning_when_idle_is_not_promised_where_it_cannot_be(tiny_checkpoint, caplog):
    for tuning, said in (("off", False), ("tables", False), ("idle", True)):
        caplog.clear()
        engine = engine_of(tiny_checkpoint, settings=Settings(tuning=tuning))
        assert ("nothing is tuned when idle" in caplog.text) is said
        # Off the GPU there is nothing to choose.
        assert engine.tuning is None and "tuned_matmuls" not in engine.describe()


def test_max_rows_follow_memory_and_never_fall_below_max_length(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(engine_module, "_available_memory", lambda: 0)
    engine = engine_of(tiny_checkpoint)
    assert engine.max_rows == 4096
    engine.model.max_length = 16_384
    assert engine.max_rows == engine.describe()["max_rows"] == 16_384
    assert engine_of(tiny_checkpoint, settings=Settings(max_rows=50)).max_rows == 50
    monkeypatch.setattr(engine_module, "_available_memory", lambda: 1 << 50)
    assert engine_module.default_max_rows(engine._weights) == 262_144


def test_available_memory_is_what_linux_estimates_or_half_of_what_there_is(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 7000 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(engine_module, "MEMINFO", meminfo)
    assert engine_module._available_memory() == 7000 * 1024
    meminfo.unlink()
    monkeypatch.setattr(engine_module.os, "sysconf", {"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}.get)
    assert engine_module._available_memory() == 50 * 4096


def test_logits_are_ordinary_tensors_computed_without_autograd(engine, monkeypatch):
    real = engine_module.forward

    def forward(weights, layout):
        assert torch.is_inference_mode_enabled()
        return real(weights, layout)

    monkeypatch.setattr(engine_module, "forward", forward)
    for row in engine.score(
        compile_request("State.", {"a": question("choice", 3, 1), "b": question("noul", 1, 2)})
    ).logits:
        assert not row.is_inference() and not row.requires_grad
        (row.add_(1) * torch.ones(1, requires_grad=True)).sum().backward()


def test_order_and_number_of_candidates_change_no_bit(tiny_checkpoint):
    engine = engine_of(tiny_checkpoint, torch.bfloat16)
    (record,) = compile_request(text(40, 3), {"q": question("choice", 23, 1)})
    (expected,) = engine.score([record]).logits
    turned = {**record, "options": record["options"][::-1], "answer_keys": record["answer_keys"][::-1]}
    assert torch.equal(engine.score([turned]).logits[0].flip(0), expected)
    assert all(torch.equal(row, expected) for row in engine.score([record, record]).logits)


def test_rotation_reads_whole_positions(tiny_checkpoint, monkeypatch):
    engine = engine_of(tiny_checkpoint, torch.bfloat16)
    seen = []
    real = forward_module.attention_prepare

    def attention_prepare(*arguments):
        seen.append(arguments[6:8])
        return real(*arguments)

    monkeypatch.setattr(forward_module, "attention_prepare", attention_prepare)
    rows = engine.score(compile_request(text(300, 1), {"q": question("noul", 1, 2)})).stats["rows_computed"]
    assert rows > 520
    original = load(tiny_checkpoint, torch.bfloat16).backbone.get_base_model().rotary_emb
    for found, full in zip(
        seen[0], original(torch.zeros(1).bfloat16(), torch.arange(rows)[None]), strict=True
    ):
        assert torch.equal(found, full[0, :, : found.shape[1]])


def test_after_load_no_weight_exists_twice(tiny_checkpoint):
    model = load(tiny_checkpoint, torch.bfloat16)
    sizes = sum(p.numel() for name, p in model.backbone.named_parameters() if "lora_" not in name)
    dtypes = {p.dtype for name, p in model.backbone.named_parameters() if "lora_" not in name}
    projection = model_weights.text_model(model.backbone).layers[0].mlp.gate_proj
    module, storage = weakref.ref(projection), projection.weight.untyped_storage().nbytes()
    assert storage > 0
    engine = FastEngine(model, Settings())
    projection_weight = projection.weight
    del projection
    gc.collect()
    assert projection_weight.untyped_storage().nbytes() == 0
    assert module() is None
    kept = list(model.backbone.parameters())
    assert {p.dtype for p in kept} == dtypes
    assert sum(p.numel() for p in kept) == sizes
    held = {
        w.untyped_storage().data_ptr(): w.untyped_storage().nbytes()
        for w in engine._weights.backbone_tensors()
    }
    assert held == {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in kept}
    assert sum(held.values()) == sizes * 2
    assert model.backbone.config.hidden_size == engine._weights.shapes.hidden
    with pytest.raises(RuntimeError, match="released"):
        model.backbone(torch.zeros(1, 1))


def test_lora_is_merged_in_float32_and_rounded_once(tiny_checkpoint):
    reference = load(tiny_checkpoint, torch.bfloat16)
    layer = model_weights.text_model(reference.backbone).layers[0].linear_attn
    delta = layer.in_proj_qkv.get_delta_weight("default")
    assert delta.abs().max() > 0 and delta.dtype == torch.float32
    expected = (layer.in_proj_qkv.base_layer.weight.float() + delta).bfloat16()
    plain = layer.in_proj_z.weight.detach().clone()
    engine = FastEngine(load(tiny_checkpoint, torch.bfloat16), Settings())
    fused = engine._weights.layers[0].mixer.project
    assert torch.equal(fused[: expected.shape[0]], expected)
    assert torch.equal(fused[expected.shape[0] : expected.shape[0] + plain.shape[0]], plain)


# What becomes of the model


def test_a_model_is_freed_with_its_last_reference(tiny_checkpoint):
    gc.collect()
    gc.disable()
    try:
        model = accelerate(load(tiny_checkpoint))
        model(compile_request("State.", {"q": question("noul", 1, 1)}))
        weights = weakref.ref(model.openjev_fast.engine._weights)
        del model
        assert weights() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_model_taken_over_cannot_be_copied(tiny_checkpoint, duplicate):
    with pytest.raises(TypeError, match="backend 'fast' cannot be copied or pickled"):
        duplicate(accelerate(load(tiny_checkpoint)))
    assert copy.deepcopy(accelerate(load(tiny_checkpoint), "torch")).openjev_fast.name == "torch"


@pytest.mark.parametrize(
    "convert", [lambda model: model.float(), lambda model: model.half(), lambda model: model.to("meta")]
)
def test_weights_can_neither_be_converted_nor_moved(tiny_checkpoint, convert):
    model = accelerate(load(tiny_checkpoint, torch.bfloat16))
    records = compile_request("State.", {"q": question("noul", 1, 1)})
    expected = model(records)[0]
    with pytest.raises(RuntimeError, match="holds the weights of this model as torch.bfloat16 on cpu"):
        convert(model)
    model.to("cpu").backbone.bfloat16()
    assert torch.equal(model(records)[0], expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "head", torch.nn.Linear(64, 1)),
        lambda model: model.head.double(),
        lambda model: setattr(model, "backbone", torch.nn.Identity()),
    ],
    ids=["another_head", "head_converted", "another_backbone"],
)
def test_what_was_replaced_is_noticed(tiny_checkpoint, change):
    model = accelerate(load(tiny_checkpoint))
    change(model)
    with pytest.raises(RuntimeError, match="replaced, converted or moved"):
        model(compile_request("State.", {"q": question("noul", 1, 1)}))


def test_a_head_changed_in_place_is_the_one_that_scores(tiny_checkpoint):
    model = accelerate(load(tiny_checkpoint))
    model.head.load_state_dict(
        {"weight": torch.zeros(model.head.weight.shape), "bias": torch.full((1,), 2.5)}
    )
    assert model(compile_request("State.", {"q": question("choice", 2, 1)}))[0].tolist() == [2.5, 2.5]


@pytest.mark.parametrize(
    "error", [model_weights.UnsupportedModel("no room"), BuildError("no nvcc")], ids=repr
)
def test_an_engine_that_cannot_be_built_changes_nothing(tiny_checkpoint, monkeypatch, error):
    def fails(*_):
        raise error

    model = load(tiny_checkpoint)
    before = model.backbone
    monkeypatch.setattr(engine_module, "portable_ops", fails)
    with pytest.raises(BackendError, match=f"backend 'fast' cannot take this model: {error}"):
        accelerate(model)
    records = compile_request("State.", {"q": question("noul", 1, 1)})
    assert model.backbone is before and getattr(model, "openjev_fast", None) is None
    expected = model(records)[0]
    reason = accelerate(model, "auto").openjev_fast.describe()["reason"]
    assert reason.startswith(f"fast: {error}; graph: the model is on cpu, CUDA Graphs need a CUDA device")
    assert torch.equal(model(records)[0], expected)


class Launches:
    """Graphs that hold none, and note what they are asked to launch."""

    def __init__(self, taken: bool):
        self.taken, self.launched, self.stopped = taken, [], False

    def holds(self, layout: Any) -> bool:
        return False

    def __call__(self, layout: Any, example: Any) -> tuple[torch.Tensor, bool]:
        self.launched.append(layout)
        return torch.zeros(1), False

    def stop(self) -> None:
        self.stopped = True


def packed_of(tiny_checkpoint, monkeypatch, graphs: Launches) -> engine_module.PackedForward:
    """A forward as on a GPU, around these graphs."""
    model = DecisionModel.load(tiny_checkpoint, "cpu")
    monkeypatch.setattr(engine_module, "GraphedForward", lambda *arguments, **options: graphs)
    packed = engine_module.PackedForward(model_weights.take_weights(model.backbone, model.head), [])
    packed._thread.shutdown()
    packed._thread = None
    return packed


@pytest.mark.parametrize("taken", [False, True])
def test_what_compiled_code_launches_is_on_its_way_before_it_is_waited_for(
    tiny_checkpoint, monkeypatch, taken
):
    """Unless somebody captures: then the answers of others would wait for it too."""
    graphs = Launches(taken)
    packed = packed_of(tiny_checkpoint, monkeypatch, graphs)
    layout = engine_module.PackedLayout(torch.zeros(8, dtype=torch.int32), [8] * 9 + [0] * 4)
    wait = packed.start(layout)
    assert graphs.launched == [] if taken else graphs.launched == [layout]
    assert wait().scores.tolist() == [0.0] and graphs.launched == [layout]


def test_an_engine_that_is_let_go_captures_nothing_any_more(tiny_checkpoint, monkeypatch):
    graphs = Launches(False)
    packed = packed_of(tiny_checkpoint, monkeypatch, graphs)
    gc.collect()
    assert not graphs.stopped
    del packed
    gc.collect()
    assert graphs.stopped


def test_what_python_launches_is_not_started_before_it_is_waited_for(tiny_checkpoint, monkeypatch):
    """A layout over kept states takes as long to launch as the device works: others are sent on their way first."""
    graphs = Launches(False)
    packed = packed_of(tiny_checkpoint, monkeypatch, graphs)
    layout = build_layout(build_forest([np.array([1, 2, 3], dtype=np.int32)]))
    assert packed.kind(layout) is None
    wait = packed.start(layout)
    assert graphs.launched == []
    wait()
    assert graphs.launched == [layout]
