"""The graph backend against the host's own forward, on the tiny checkpoint; graphs themselves are tested on a GPU."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from decisions import question, text
from jev.api import compile_request
from jev.model import DecisionModel
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as LoraLinear
from recorded import record_instead_of_capture
from transformers import masking_utils
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from openjev_fast_plugin import engine as fast_engine
from openjev_fast_plugin import graph_engine
from openjev_fast_plugin import weights as model_weights
from openjev_fast_plugin.build import BuildError
from openjev_fast_plugin.graph_engine import GraphEngine
from openjev_fast_plugin.graphs import CapturedAtOnce
from openjev_fast_plugin.patches import transformers_masks
from openjev_fast_plugin.settings import BackendError, Settings
from openjev_fast_plugin.takeover import accelerate


@pytest.fixture
def on_cpu(monkeypatch):
    """Graphs that only pretend, so that an engine runs here."""
    record_instead_of_capture(monkeypatch)


def load(checkpoint, dtype: torch.dtype = torch.bfloat16) -> DecisionModel:
    model = DecisionModel.load(checkpoint, "cpu")
    return model.float() if dtype == torch.float32 else model


def taken(checkpoint, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> DecisionModel:
    return accelerate(load(checkpoint, dtype), "graph", Settings(**settings))


def merged_host(checkpoint, dtype: torch.dtype = torch.bfloat16) -> DecisionModel:
    """The host's model with its adapters merged, its forward its own."""
    model = load(checkpoint, dtype)
    model.backbone = model_weights.merge_adapters(model.backbone)
    return model


def logits(model: DecisionModel, records: list[dict]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat(model(records))


REQUESTS = {
    "three_questions": compile_request(
        text(40, 1),
        {"a": question("choice", 5, 1), "b": question("noul", 1, 2), "c": question("score", 4, 3)},
    ),
    "other_lengths": compile_request(
        text(60, 2),
        {"a": question("choice", 5, 4), "b": question("noul", 1, 5), "c": question("score", 4, 6)},
    ),
    # Nothing is padded.
    "one_prompt": compile_request("One short state.", {"q": question("noul", 1, 1)}),
}


# Answers


def test_answers_are_the_merged_modules_bit_for_bit(tiny_checkpoint, on_cpu):
    model, host = taken(tiny_checkpoint), merged_host(tiny_checkpoint)
    for how in ("graph_captures", "graph_replays"):
        for records in REQUESTS.values():
            found = logits(model, records)
            with transformers_masks.applied():
                expected = logits(host, records)
            assert torch.equal(found, expected)
            assert model.last_input_tokens == host.last_input_tokens
            assert (model.last_stats["forwards"], model.last_stats[how]) == (1, 1)


def test_one_shape_is_replayed_with_other_prompts(tiny_checkpoint, on_cpu):
    model, host = taken(tiny_checkpoint), merged_host(tiny_checkpoint)
    done, seen = [], set()
    for seed in range(3):
        record = {**REQUESTS["one_prompt"][0], "state": f"State {seed}."}
        found = logits(model, [record])
        with transformers_masks.applied():
            assert torch.equal(found, logits(host, [record]))
        seen.add(tuple(found.tolist()))
        done.append(model.last_stats["graph_replays"])
    assert done == [0, 1, 1] and len(seen) == 3


@pytest.mark.parametrize("records", REQUESTS.values(), ids=REQUESTS)
def test_logits_are_the_original_ones(tiny_checkpoint, on_cpu, records):
    model, original = taken(tiny_checkpoint, torch.float32), load(tiny_checkpoint, torch.float32)
    found = model(records)
    with torch.inference_mode():
        expected = original(records)
    assert [row.dtype for row in found] == [torch.float32] * len(records)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_large_request_is_cut_by_padded_rows(tiny_checkpoint, on_cpu):
    records = compile_request(text(25, 9), {"a": question("choice", 40, 1), "b": question("noul", 1, 3)})
    whole, limited = (
        taken(tiny_checkpoint, torch.float32),
        taken(tiny_checkpoint, torch.float32, max_rows=500),
    )
    torch.testing.assert_close(logits(limited, records), logits(whole, records), rtol=1e-5, atol=1e-5)
    assert whole.last_stats["forwards"] == 1
    assert whole.last_stats["rows_asked"] == limited.last_stats["rows_asked"] == whole.last_input_tokens
    stats = limited.last_stats
    assert stats["forwards"] == stats["graph_captures"] + stats["graph_replays"] > 4
    assert stats["rows_asked"] < stats["rows_computed"] <= whole.last_stats["rows_computed"]
    assert all(batch * longest <= 500 for batch, longest in limited.openjev_fast.engine._graphs._graphs)
    with pytest.raises(ValueError, match="does not fit into one forward of at most 50 rows"):
        taken(tiny_checkpoint, max_rows=50)(records)


def test_what_is_too_large_to_capture_runs_eagerly(tiny_checkpoint, on_cpu):
    model = taken(tiny_checkpoint)
    records = REQUESTS["three_questions"]
    expected = logits(model, records)
    model.openjev_fast.engine._graphs = CapturedAtOnce(
        model.openjev_fast.engine._graphs._forward, torch.device("cpu"), most_rows=10
    )
    assert torch.equal(logits(model, records), expected)
    stats = model.last_stats
    assert (stats["forwards"], stats["graph_replays"], stats["graph_captures"]) == (1, 0, 0)


def test_what_the_original_refuses_is_refused_with_its_words(tiny_checkpoint, on_cpu):
    model, original = taken(tiny_checkpoint), load(tiny_checkpoint)
    records = REQUESTS["one_prompt"]
    model.max_length = original.max_length = 20
    with pytest.raises(ValueError) as theirs:
        original(records)
    with pytest.raises(ValueError) as ours:
        model(records)
    assert str(ours.value) == str(theirs.value)
    for each in (model, original):
        with pytest.raises(IndexError):
            each([])


def test_logits_are_ordinary_tensors_computed_without_autograd(tiny_checkpoint, on_cpu):
    for row in taken(tiny_checkpoint)(REQUESTS["three_questions"]):
        assert not row.is_inference() and not row.requires_grad
        (row.add_(1) * torch.ones(1, requires_grad=True)).sum().backward()


# Weights


def test_merging_is_pefts_in_float32(tiny_checkpoint):
    backbone = load(tiny_checkpoint, torch.float32).backbone
    reference = copy.deepcopy(backbone).merge_and_unload()
    plain = copy.deepcopy(backbone).unload()
    merged = model_weights.merge_adapters(backbone)
    ids = torch.arange(1, 60)[None]
    found, expected, without = (
        model(input_ids=ids, use_cache=False).last_hidden_state for model in (merged, reference, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert (found - without).abs().max() > 1e-2


def test_merging_rounds_once_and_keeps_every_module_and_parameter(tiny_checkpoint):
    backbone = load(tiny_checkpoint).backbone
    layers = {name: each for name, each in backbone.named_modules() if isinstance(each, LoraLinear)}
    expected = {
        layer.base_layer: (layer.base_layer.weight.float() + layer.get_delta_weight("default")).bfloat16()
        for layer in layers.values()
    }
    assert expected and all(not torch.equal(layer.weight, merged) for layer, merged in expected.items())
    kept = {
        id(parameter): parameter.data_ptr()
        for name, parameter in backbone.named_parameters()
        if "lora_" not in name
    }
    text_model = backbone.get_base_model()
    merged = model_weights.merge_adapters(backbone)
    assert merged is text_model
    assert {id(parameter): parameter.data_ptr() for parameter in merged.parameters()} == kept
    fresh = upstream.Qwen3_5TextModel(merged.config)
    assert {name: type(module) for name, module in merged.named_modules()} == {
        name: type(module) for name, module in fresh.named_modules()
    }
    assert {layer for layer in merged.modules() if layer in expected} == set(expected)
    for layer, weight in expected.items():
        assert torch.equal(layer.weight, weight)


def test_adapters_are_freed_and_the_backbone_still_answers(tiny_checkpoint, on_cpu):
    model = load(tiny_checkpoint)
    adapter = next(each for each in model.backbone.modules() if isinstance(each, LoraLinear))
    gone = weakref.ref(adapter.lora_A["default"].weight)
    sizes = sum(each.numel() for name, each in model.backbone.named_parameters() if "lora_" not in name)
    del adapter
    accelerate(model, "graph")
    gc.collect()
    assert gone() is None
    assert sum(each.numel() for each in model.backbone.parameters()) == sizes
    assert {each.dtype for each in model.backbone.parameters()} == {torch.bfloat16}
    assert model.backbone.config.model_type == "qwen3_5_text"
    with torch.inference_mode():
        assert model.backbone(input_ids=torch.tensor([[1]])).last_hidden_state.shape == (1, 1, 64)


def test_a_model_is_freed_with_its_last_reference(tiny_checkpoint, on_cpu):
    gc.collect()
    gc.disable()
    try:
        model = taken(tiny_checkpoint)
        model(REQUESTS["one_prompt"])
        weight = weakref.ref(next(model.backbone.parameters()))
        del model
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("convert", ["float", "half", "double"])
def test_weights_can_neither_be_converted_nor_moved(tiny_checkpoint, on_cpu, convert):
    model = taken(tiny_checkpoint)
    expected = logits(model, REQUESTS["one_prompt"])
    with pytest.raises(RuntimeError, match="holds the weights of this model as torch.bfloat16 on cpu"):
        getattr(model, convert)()
    with pytest.raises(TypeError, match="backend 'graph' cannot be copied or pickled"):
        copy.deepcopy(model)
    assert torch.equal(logits(model.to("cpu"), REQUESTS["one_prompt"]), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "head", torch.nn.Linear(64, 1)),
        lambda model: model.head.double(),
        lambda model: setattr(model, "backbone", model.backbone.model),
    ],
    ids=["another_head", "head_converted", "another_backbone"],
)
def test_what_was_replaced_is_noticed(tiny_checkpoint, on_cpu, change):
    model = taken(tiny_checkpoint)
    change(model)
    with pytest.raises(RuntimeError, match="replaced, converted or moved"):
        model(REQUESTS["one_prompt"])


# What it says about itself


def test_max_rows_follow_memory_and_never_fall_below_max_length(tiny_checkpoint, on_cpu, monkeypatch):
    monkeypatch.setattr(graph_engine, "free_memory", lambda device: 0)
    model = taken(tiny_checkpoint)
    engine = model.openjev_fast.engine
    assert engine.max_rows == 4096
    model.max_length = 16_384
    assert engine.max_rows == engine.describe()["max_rows"] == 16_384
    model = taken(tiny_checkpoint, max_rows=50)
    assert model.openjev_fast.engine.max_rows == 50
    monkeypatch.setattr(graph_engine, "free_memory", lambda device: 4 << 30)
    model = taken(tiny_checkpoint)
    engine = model.openjev_fast.engine
    short, model.max_length = engine.max_rows, 32_768
    # The masks of longer prompts leave room for fewer.
    assert 32_768 <= engine.max_rows < short < 262_144


def test_it_says_what_runs(tiny_checkpoint, on_cpu):
    model = taken(tiny_checkpoint)
    about = model.openjev_fast.describe()
    assert (about["name"], about["device"], about["dtype"]) == ("graph", "cpu", "bfloat16")
    assert about["kernels"].startswith("transformers 5.")
    assert about["kernels"].endswith(", delta rule pytorch, convolution pytorch")


def test_kernels_are_named_by_where_they_come_from(tiny_checkpoint, monkeypatch):
    def theirs(package):
        def function():
            raise AssertionError

        function.__module__ = f"{package}.some.module"
        return function

    def wrapped(implementation):
        def like_later_versions():
            return implementation()

        like_later_versions.__module__ = upstream.__name__
        return like_later_versions

    model = model_weights.text_model(load(tiny_checkpoint).backbone)
    delta = model.layers[0].linear_attn
    if hasattr(delta, "chunk_gated_delta_rule"):
        for layer in model.layers[:-1]:
            layer.linear_attn.chunk_gated_delta_rule = theirs("fla")
            layer.linear_attn.causal_conv1d_fn = theirs("causal_conv1d")
        assert graph_engine.kernels(model).endswith(", delta rule fla, convolution causal_conv1d")
        delta.chunk_gated_delta_rule = upstream.torch_chunk_gated_delta_rule
        assert "delta rule fla and pytorch, " in graph_engine.kernels(model)
        for layer in model.layers[:-1]:
            del layer.linear_attn.chunk_gated_delta_rule, layer.linear_attn.causal_conv1d_fn
    monkeypatch.setattr(upstream, "torch_chunk_gated_delta_rule", wrapped(theirs("fla")))
    monkeypatch.setattr(upstream, "causal_conv1d_fn", wrapped(upstream.apply_mask_to_padding_states))
    assert graph_engine.kernels(model).endswith(", delta rule fla, convolution pytorch")


# Refused, and chosen


def test_a_model_on_the_cpu_is_refused_with_the_way_out(tiny_checkpoint):
    model = load(tiny_checkpoint)
    before = model.backbone
    reason = (
        "the model is on cpu, CUDA Graphs need a CUDA device: load it on one, or serve it with backend 'fast'"
    )
    assert graph_engine.refusal(model).startswith(reason)
    with pytest.raises(model_weights.UnsupportedModel, match="CUDA Graphs need a CUDA device"):
        GraphEngine(model, Settings())
    with pytest.raises(BackendError, match=reason) as refused:
        accelerate(model, "graph")
    assert str(refused.value).endswith("\nbackend='auto' takes the best backend that can")
    assert model.backbone is before


def unknown_masks(model, patch):
    patch.setattr(masking_utils, "_ignore_causal_mask_sdpa", lambda padding_mask: False)


REFUSED = {
    "attention": (
        lambda model, patch: model.backbone.get_base_model().set_attn_implementation("eager"),
        "attn_implementation is 'eager'.* load the model with 'sdpa'",
    ),
    "masks": (unknown_masks, "Transformers 5.* not known here .*_ignore_causal_mask_sdpa.*install a version"),
    "type": (
        lambda model, patch: setattr(model.backbone.config, "model_type", "llama"),
        "takes models of type 'qwen3_5_text', this one is 'llama'",
    ),
    "adapter": (
        lambda model, patch: model.backbone.add_adapter(
            "dora", LoraConfig(use_dora=True, target_modules=["o_proj"])
        ),
        "uses DoraLinearVariant",
    ),
    "hook": (
        lambda model, patch: model.head.register_forward_hook(lambda *arguments: None),
        "head has a forward hook",
    ),
    "dtype": (lambda model, patch: model.half(), "float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_take_is_refused_by_name_and_left_alone(tiny_checkpoint, on_cpu, monkeypatch, name):
    change, words = REFUSED[name]
    model = load(tiny_checkpoint)
    change(model, monkeypatch)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(model_weights.UnsupportedModel, match=words):
        GraphEngine(model, Settings())
    with pytest.raises(BackendError, match=words):
        accelerate(model, "graph")
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


def test_auto_takes_it_where_the_kernels_cannot_be_built(tiny_checkpoint, on_cpu, monkeypatch):
    def fails(*_):
        raise BuildError("no nvcc")

    monkeypatch.setattr(fast_engine, "portable_ops", fails)
    model = accelerate(load(tiny_checkpoint), "auto")
    about = model.openjev_fast.describe()
    assert (about["name"], about["requested"], about["reason"]) == ("graph", "auto", "fast: no nvcc")
    with transformers_masks.applied():
        expected = logits(merged_host(tiny_checkpoint), REQUESTS["three_questions"])
    assert torch.equal(logits(model, REQUESTS["three_questions"]), expected)


def test_auto_prefers_fast(tiny_checkpoint, on_cpu):
    assert accelerate(load(tiny_checkpoint), "auto").openjev_fast.name == "fast"
