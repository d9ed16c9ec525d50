"""The fast backend against the original forward of the host, on the tiny checkpoint."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from decisions import question, requests, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jev.api import compile_request
from jev.model import DecisionModel

from openjev_fast_plugin import forward as forward_module
from openjev_fast_plugin import weights as model_weights
from openjev_fast_plugin.engine import FastEngine
from openjev_fast_plugin.ops import add_rms_norm_ref
from openjev_fast_plugin.settings import Settings

PROPERTY = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def load(checkpoint, dtype: torch.dtype = torch.float32) -> DecisionModel:
    model = DecisionModel.load(checkpoint, "cpu")
    return model.float() if dtype == torch.float32 else model


@pytest.fixture(scope="module")
def original(tiny_checkpoint) -> DecisionModel:
    return load(tiny_checkpoint)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint) -> FastEngine:
    return FastEngine(load(tiny_checkpoint), Settings())


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
    engine = FastEngine(load(tiny_checkpoint, dtype), Settings())
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
    real = forward_module.head_score

    def spy(residual, update, rows, norm_weight, *rest):
        normed = add_rms_norm_ref(residual, update, norm_weight, rest[-1])[1]
        seen.append(normed[rows.long()].double())
        return real(residual, update, rows, norm_weight, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(forward_module, "head_score", spy)
        engine.score(records)
    return torch.cat(seen)


def test_bfloat16_is_no_further_from_float32_than_the_original(tiny_checkpoint, original, monkeypatch):
    rounded = load(tiny_checkpoint, torch.bfloat16)
    fast = FastEngine(load(tiny_checkpoint, torch.bfloat16), Settings())
    ours = theirs = norm = 0.0
    for records in golden_requests():
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
    limited = FastEngine(load(tiny_checkpoint), Settings(max_rows=max_rows))
    found, expected = limited.score(records), engine.score(records)
    assert found.stats["forwards"] > 1 or max_rows >= expected.stats["rows_computed"]
    assert found.input_tokens == expected.input_tokens
    for got, wanted in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_prompt_longer_than_the_row_limit_is_refused_by_name(tiny_checkpoint):
    limited = FastEngine(load(tiny_checkpoint), Settings(max_rows=50))
    records = compile_request(text(100, 1), {"q": question("noul", 1, 2)})
    with pytest.raises(ValueError, match="50"):
        limited.score(records)


def test_a_prompt_over_max_length_is_refused_as_the_original_does(tiny_checkpoint, original):
    model = load(tiny_checkpoint)
    engine = FastEngine(model, Settings())
    records = compile_request(text(100, 1), {"q": question("noul", 1, 2)})
    limit = model.max_length
    model.max_length = original.max_length = 60
    try:
        with pytest.raises(ValueError) as theirs:
            original(records)
        with pytest.raises(ValueError) as ours:
            engine.score(records)
    finally:
        model.max_length = original.max_length = limit
    assert str(ours.value) == str(theirs.value)
    assert engine.score(records).logits


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


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda model: setattr(model.backbone.get_base_model().config, "model_type", "llama"),
            ["llama", "qwen3_5"],
        ),
        (
            lambda model: setattr(model.backbone.get_base_model().config, "hidden_act", "gelu"),
            ["hidden_act", "gelu"],
        ),
        (lambda model: model.half(), ["float16"]),
        (lambda model: model.backbone.get_base_model().layers[1].float(), ["mix", "bfloat16", "float32"]),
        (lambda model: model.head.to("meta"), ["meta"]),
        (lambda model: setattr(model.backbone.peft_config["default"], "use_dora", True), ["use_dora"]),
    ],
    ids=["model_type", "activation", "float16", "mixed", "meta", "dora"],
)
def test_a_model_it_cannot_take_is_refused_by_name_and_left_alone(tiny_checkpoint, change, words):
    model = load(tiny_checkpoint, torch.bfloat16)
    change(model)
    before = {name: parameter.numel() for name, parameter in model.named_parameters()}
    reason = model_weights.refusal(model.backbone, model.head)
    assert reason is not None and all(word in reason for word in words), reason
    with pytest.raises(model_weights.UnsupportedModel) as refused:
        FastEngine(model, Settings())
    assert str(refused.value) == reason
    assert {name: parameter.numel() for name, parameter in model.named_parameters()} == before
