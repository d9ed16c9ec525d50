"""What the packed forward takes and what it refuses: small text models against the original, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.forward import forward
from openjev_fast_plugin.layout import build_layout
from openjev_fast_plugin.weights import UnsupportedModel, refusal, take_weights, text_model

LINEAR, FULL = "linear_attention", "full_attention"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj"]
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}


def model_of(**changes: Any) -> Qwen3_5TextModel:
    """A model of four layers, the last with full attention, every weight large enough to show in its output."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
    }
    model = Qwen3_5TextModel(Qwen3_5TextConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("A_log", "dt_bias")):
                parameter.normal_()
            else:
                parameter.mul_(6)
    return model


def head_of() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(64, 1)


def adapted(*configs: dict[str, Any], **changes: Any) -> PeftModel:
    """A model with adapters named 0, 1, ..., the first one active."""
    configs = configs or ({},)
    plain = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS}
    model = get_peft_model(model_of(**changes), LoraConfig(**{**plain, **configs[0]}), adapter_name="0")
    for index, config in enumerate(configs[1:], 1):
        model.add_adapter(str(index), LoraConfig(**{**plain, **config}))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return model.eval()


def sequences() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    root = draw.integers(0, 300, 37)
    middle = [np.concatenate([root, draw.integers(0, 300, length)]) for length in (3, 17)]
    tails = [
        np.concatenate([stem, draw.integers(0, 300, length)]) for stem in middle for length in (1, 9, 70)
    ]
    return [root, *middle, *tails, tails[0], np.array([5]), np.array([5, 6])]


def scores_of_original(backbone: Any, head: nn.Linear) -> torch.Tensor:
    with torch.no_grad():
        hidden = [
            backbone(input_ids=torch.from_numpy(sequence)[None], use_cache=False).last_hidden_state[0, -1]
            for sequence in sequences()
        ]
        return head(torch.stack(hidden)).squeeze(-1)


def assert_taken_as_it_is(backbone: Any, expected: torch.Tensor | None = None) -> None:
    head = head_of()
    if expected is None:
        expected = scores_of_original(backbone, head)
    assert refusal(backbone, head) is None
    weights = take_weights(backbone, head)
    assert all(parameter.numel() == 0 for parameter in text_model(backbone).parameters())
    with torch.inference_mode():
        found = forward(weights, build_layout(build_forest(sequences())))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def replaced(model: Qwen3_5TextModel, path: str, module: Callable[[Any], nn.Module]) -> Qwen3_5TextModel:
    model.set_submodule(path, module(model.get_submodule(path)))
    return model


def changed(model: Any, change: Callable[[Any], Any]) -> Any:
    change(model)
    return model


# Taken


@pytest.mark.parametrize(
    "layer_types",
    [[LINEAR] * 4, [FULL] * 4, [FULL] * 3 + [LINEAR], [FULL, LINEAR] * 2, [LINEAR], [FULL]],
    ids=lambda types: "".join(kind[0] for kind in types),
)
def test_any_order_of_layers(layer_types):
    assert_taken_as_it_is(model_of(layer_types=layer_types, num_hidden_layers=len(layer_types)))


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-2},
        # As Transformers reads a configuration that names no factor.
        {"rope_parameters": ROPE},
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
        {"linear_num_value_heads": 6, "linear_value_head_dim": 24, "linear_key_head_dim": 8},
        {"hidden_size": 64, "intermediate_size": 33, "linear_key_head_dim": 7, "linear_value_head_dim": 5},
    ],
    ids=["eps", "no_factor", "whole_head", "value_heads", "odd"],
)
def test_sizes_of_the_configuration(changes):
    assert_taken_as_it_is(model_of(**changes))


def test_a_missing_rotary_factor_is_one():
    model = model_of()
    expected = model_of(rope_parameters={**ROPE, "partial_rotary_factor": 1.0})
    model.rotary_emb = expected.rotary_emb
    del model.config.rope_parameters["partial_rotary_factor"]
    assert_taken_as_it_is(model, scores_of_original(expected, head_of()))


@pytest.mark.parametrize(
    "backbone",
    [
        lambda: adapted(),
        lambda: adapted({"use_rslora": True}),
        lambda: adapted({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3}}),
        lambda: adapted({"target_modules": "all-linear"}),
        lambda: adapted({}, {}),
        lambda: changed(adapted({}, {}), lambda model: model.set_adapter("1")),
        lambda: changed(adapted({}, {}), lambda model: model.base_model.set_adapter(["0", "1"])),
        lambda: changed(adapted(), lambda model: model.merge_adapter()),
        lambda: changed(adapted(), lambda model: model.base_model.disable_adapter_layers()),
        lambda: adapted().merge_and_unload(),
    ],
    ids=[
        "plain", "rslora", "patterns", "every_linear", "first_of_two", "second_of_two", "both", "merged", "disabled",
        "merged_and_unloaded",
    ],
)  # fmt: skip
def test_active_adapters_are_merged_once(backbone):
    assert_taken_as_it_is(backbone())


def test_disabling_a_merged_adapter_takes_it_out_again():
    backbone = adapted()
    backbone.merge_adapter()
    backbone.base_model.disable_adapter_layers()
    assert_taken_as_it_is(backbone, scores_of_original(model_of(), head_of()))


def test_hooks_that_change_nothing_are_no_obstacle():
    recorded = model_of()
    recorded(input_ids=torch.tensor([[1, 2]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in recorded.modules())
    assert_taken_as_it_is(recorded)
    aligned = dispatch_model(model_of(), {"": "cpu"}, force_hooks=True)
    assert hasattr(aligned, "_hf_hook")
    assert_taken_as_it_is(aligned)


# Refused


class Custom(nn.Module):
    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, x):
        return self.inner(x)


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def halved(layer: nn.Linear) -> nn.Linear:
    return Halved(layer.in_features, layer.out_features, bias=False)


def with_bias(path: str) -> Qwen3_5TextModel:
    model = model_of()
    module = model.get_submodule(path)
    module.bias = nn.Parameter(torch.ones(module.weight.shape[0]))
    return model


def with_config(name: str, value: Any) -> Qwen3_5TextModel:
    return changed(model_of(), lambda model: setattr(model.config, name, value))


def hooked(path: str, register: str, backbone: Any = None) -> Any:
    backbone = model_of() if backbone is None else backbone
    getattr(backbone.get_submodule(path), register)(lambda *arguments: None)
    return backbone


def tied(source: str, target: str) -> Qwen3_5TextModel:
    model = model_of()
    model.get_submodule(target).weight = model.get_submodule(source).weight
    return model


def with_forward(path: str) -> Qwen3_5TextModel:
    model = model_of()
    module = model.get_submodule(path)
    original = module.forward
    module.forward = lambda *arguments, **names: original(*arguments, **names)
    return model


def bdlora() -> Any:
    from peft.tuners.lora.config import BdLoraConfig

    return BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=[], nblocks=2)


MLP, DELTA, ATTENTION = "layers.0.mlp", "layers.0.linear_attn", "layers.3.self_attn"

REFUSED = {
    # The configuration.
    "model_type": (lambda: with_config("model_type", "llama"), ["llama", "qwen3_5"]),
    "activation": (lambda: with_config("hidden_act", "gelu"), ["hidden_act", "gelu"]),
    "rope_type": (
        lambda: model_of(rope_parameters={**ROPE, "rope_type": "linear", "factor": 2.0}),
        ["rope_type", "'linear'"],
    ),
    "odd_rotation": (
        lambda: model_of(rope_parameters={**ROPE, "partial_rotary_factor": 0.3}),
        ["partial_rotary_factor = 9 is odd"],
    ),
    "layer_type": (
        lambda: changed(model_of(), lambda model: model.config.layer_types.__setitem__(1, "sliding_attention")),
        ["sliding_attention"],
    ),
    "other_layer_type": (
        lambda: changed(model_of(), lambda model: model.config.layer_types.__setitem__(1, FULL)),
        ["layers.1.self_attn is missing"],
    ),
    "layers": (lambda: with_config("num_hidden_layers", 2), ["4 layers", "num_hidden_layers is 2"]),
    "heads": (lambda: with_config("linear_num_value_heads", 3), ["linear_num_value_heads = 3"]),
    "sizes": (lambda: with_config("intermediate_size", 48), [f"{MLP}.gate_proj", "(96, 64)", "(48, 64)"]),
    "eps": (lambda: with_config("rms_norm_eps", 1e-2), ["eps 1e-06", "0.01"]),
    "conv_width": (lambda: model_of(linear_conv_kernel_dim=3), [f"{DELTA}.conv1d", "(128, 1, 3)"]),
    "attention_bias": (lambda: model_of(attention_bias=True), [f"{ATTENTION}.q_proj", "'bias'"]),
    # Modules.
    "projection_bias": (lambda: with_bias(f"{MLP}.up_proj"), [f"{MLP}.up_proj", "'bias'"]),
    "conv_bias": (lambda: with_bias(f"{DELTA}.conv1d"), [f"{DELTA}.conv1d", "'bias'"]),
    "custom": (lambda: replaced(model_of(), f"{MLP}.down_proj", Custom), [f"{MLP}.down_proj", "Custom"]),
    "subclass": (lambda: replaced(model_of(), f"{MLP}.up_proj", halved), [f"{MLP}.up_proj", "Halved"]),
    "parametrized": (
        lambda: changed(
            model_of(), lambda model: nn.utils.parametrizations.weight_norm(model.layers[3].mlp.up_proj)
        ),
        ["layers.3.mlp.up_proj", "Parametrized"],
    ),
    "activation_module": (lambda: replaced(model_of(), f"{MLP}.act_fn", lambda _: nn.GELU()), ["act_fn", "GELU"]),
    "tied_projections": (
        lambda: tied(f"{MLP}.gate_proj", "layers.1.mlp.gate_proj"),
        [f"{MLP}.gate_proj.weight and layers.1.mlp.gate_proj.weight are one parameter"],
    ),
    "tied_norms": (lambda: tied("layers.0.input_layernorm", "norm"), ["norm.weight are one parameter"]),
    "one_layer_twice": (
        lambda: changed(model_of(), lambda model: model.layers.__setitem__(1, model.layers[0])),
        ["are one parameter"],
    ),
    # What runs around a forward.
    **{
        f"{register}:{path}": (
            lambda path=path, register=register: hooked(path, register),
            [f"{path or 'the text model'} has a forward hook"],
        )
        for register in ("register_forward_hook", "register_forward_pre_hook")
        for path in ("", "rotary_emb", "layers.1", "norm", f"{MLP}.act_fn", f"{ATTENTION}.q_proj")
    },
    "hook_in_adapter": (
        lambda: hooked("base_model.model.layers.3.self_attn.q_proj.lora_A.0", "register_forward_hook", adapted()),
        [f"{ATTENTION}.q_proj.lora_A.0 has a forward hook"],
    ),
    "hook_around_adapters": (lambda: hooked("", "register_forward_hook", adapted()), ["PeftModel has a forward hook"]),
    "forward": (lambda: with_forward("layers.2.mlp"), ["the forward of layers.2.mlp was replaced"]),
    "hook_of_accelerate": (
        lambda: changed(model_of(), lambda model: add_hook_to_module(model.norm, ModelHook())),
        ["norm has the hook accelerate.hooks.ModelHook"],
    ),
    "offloaded": (lambda: changed(model_of(), lambda model: cpu_offload(model, "cpu")), ["offloaded by accelerate"]),
    # Dtypes and devices.
    "float16": (lambda: model_of().half(), ["float16"]),
    "float64": (lambda: model_of().double(), ["float64"]),
    "mixed": (
        lambda: changed(model_of(), lambda model: model.layers[1].bfloat16()),
        ["mix", "float32", "bfloat16", "layers.1"],
    ),
    "meta": (lambda: model_of().to("meta"), ["meta"]),
    # Adapters.
    "dora": (lambda: adapted({"use_dora": True}), [f"{DELTA}.in_proj_qkv", "Dora"]),
    "dora_beside": (lambda: adapted({}, {"use_dora": True}), ["Dora"]),
    "alora": (lambda: adapted({"alora_invocation_tokens": [5, 6]}), ["ALora"]),
    "bdlora": (lambda: adapted({"use_bdlora": bdlora(), "target_modules": ["q_proj"]}), ["BdLora"]),
    "lora_bias": (lambda: adapted({"lora_bias": True}), ["lora_bias"]),
    "modules_to_save": (lambda: adapted({"modules_to_save": ["norm"]}), ["ModulesToSaveWrapper"]),
    "embedding": (lambda: adapted({"target_modules": ["embed_tokens"]}), ["embed_tokens", "lora.layer.Embedding"]),
    "tokens": (lambda: adapted({"trainable_token_indices": [1, 2]}), ["embed_tokens", "TrainableTokensWrapper"]),
    "conv1d": (lambda: adapted({"r": 128, "target_modules": ["conv1d"]}), ["conv1d", "lora.layer.Conv1d"]),
    "parameters": (
        lambda: adapted({"target_modules": ["q_proj"], "target_parameters": ["mlp.gate_proj.weight"]}),
        ["gate_proj", "ParamWrapper"],
    ),
    "peft_type": (
        lambda: get_peft_model(model_of(), PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2)),
        ["PROMPT_TUNING"],
    ),
    "adapter_of_transformers": (
        # What its add_adapter leaves, with whichever version of PEFT it asks for.
        lambda: changed(
            inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model_of()),
            lambda model: setattr(model, "_hf_peft_config_loaded", True),
        ),
        ["add_adapter"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_it_cannot_take_is_refused_by_name_and_left_alone(name):
    build, words = REFUSED[name]
    assert_refused(build(), head_of(), words)


@pytest.mark.parametrize(
    "head, words",
    [
        (lambda: nn.Linear(64, 1, bias=False), ["head", "'bias'"]),
        (lambda: nn.Linear(64, 3), ["head", "(3, 64)", "(1, 64)"]),
        (lambda: nn.Linear(64, 1).bfloat16(), ["head", "bfloat16", "float32"]),
        (lambda: Halved(64, 1), ["head", "Halved"]),
        (lambda: hooked("", "register_forward_hook", head_of()), ["head has a forward hook"]),
        (lambda: nn.Linear(64, 1, device="meta"), ["cpu", "meta"]),
    ],
    ids=["no_bias", "three_outputs", "bfloat16", "subclass", "hook", "meta"],
)
def test_a_head_it_cannot_take_is_refused_by_name(head, words):
    assert_refused(model_of(), head(), words)


def assert_refused(backbone: Any, head: nn.Module, words: list[str]) -> None:
    def state() -> dict[str, tuple]:
        return {name: (id(parameter), parameter.shape) for name, parameter in backbone.named_parameters()}

    before = state()
    reason = refusal(backbone, head)
    assert reason is not None and all(word in reason for word in words), reason
    with pytest.raises(UnsupportedModel) as refused:
        take_weights(backbone, head)
    assert str(refused.value) == reason
    assert state() == before
