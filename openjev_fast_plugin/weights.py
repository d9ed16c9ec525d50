"""The model's weights in the form the packed forward reads: LoRA merged, projections fused, originals released."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

MODEL_TYPE = "qwen3_5_text"
DTYPES = (torch.float32, torch.bfloat16)


class UnsupportedModel(ValueError):
    """The packed forward cannot take this model; the message names the property and the value found."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of one model, all read from its configuration.

    Letters as in the ops: H/HV key and value heads of the delta rule with dims K/V; HQ/HKV attention heads of dim D;
    R rotated pairs.
    """

    hidden: int
    intermediate: int
    layer_types: tuple[str, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rotary_pairs: int
    rope_theta: float
    eps: float

    @classmethod
    def of(cls, config: Any) -> Shapes:
        """Shapes of a Qwen3.5 text configuration; UnsupportedModel where it asks for something else."""
        rope = config.rope_parameters
        expected = {
            "model_type": (config.model_type, MODEL_TYPE),
            "hidden_act": (config.hidden_act, "silu"),
            "attention_bias": (config.attention_bias, False),
            "linear_conv_kernel_dim": (config.linear_conv_kernel_dim, 4),
            "rope_parameters.rope_type": (rope.get("rope_type"), "default"),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise UnsupportedModel(
                    f"the packed forward needs {name} = {wanted!r}, this model has {found!r}"
                )
        unknown = set(config.layer_types) - {"linear_attention", "full_attention"}
        if unknown:
            raise UnsupportedModel(f"the packed forward knows no layer type {sorted(unknown)[0]!r}")
        for few, many in (
            ("linear_num_key_heads", "linear_num_value_heads"),
            ("num_key_value_heads", "num_attention_heads"),
        ):
            if getattr(config, many) % getattr(config, few):
                raise UnsupportedModel(
                    f"{many} = {getattr(config, many)} is not a multiple of {few} = {getattr(config, few)}"
                )
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layer_types=tuple(config.layer_types),
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            query_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_pairs=int(config.head_dim * rope.get("partial_rotary_factor", 1.0)) // 2,
            rope_theta=float(rope["rope_theta"]),
            eps=config.rms_norm_eps,
        )

    @property
    def conv_channels(self) -> int:
        """Columns of the fused linear-attention projection that pass the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass
class LinearAttentionWeights:
    """project: [C + HV V + 2 HV, hidden], rows q k v | z | b | a; conv: [C, 4]; output: [hidden, HV V]."""

    project: torch.Tensor
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    output: torch.Tensor


@dataclass
class FullAttentionWeights:
    """project: [2 HQ D + 2 HKV D, hidden], rows (per head: q, gate) | k | v; output: [hidden, HQ D]."""

    project: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    output: torch.Tensor


@dataclass
class LayerWeights:
    """gate_up: [2 I, hidden], gate rows then up rows; down: [hidden, I]; norms [hidden], applied as 1 + weight."""

    input_norm: torch.Tensor
    mixer: LinearAttentionWeights | FullAttentionWeights
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass
class Weights:
    """Everything one forward reads. embedding: [vocabulary, hidden]; head: [hidden] and [] in float32."""

    shapes: Shapes
    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head_weight: torch.Tensor
    head_bias: torch.Tensor

    def backbone_tensors(self) -> list[torch.Tensor]:
        """Every weight of the text model, once; not the head's."""
        return [self.embedding, *_tensors(self.layers), self.final_norm]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


class ReleasedBackbone(nn.Module):
    """Stands where the original text model was: answers `config` and `parameters()`, and refuses to run."""

    def __init__(self, config: Any, weights: Iterable[torch.Tensor]):
        super().__init__()
        self.config = config
        self.fused = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Always raises RuntimeError: the original modules gave their weights to the packed forward."""
        raise RuntimeError(
            "the original modules of this model were released when the fast backend took its weights; "
            "load the model again with --backend torch to run them"
        )


def text_model(backbone: Any) -> Any:
    """The Qwen3.5 text model inside a backbone, which PEFT may have wrapped."""
    return backbone.get_base_model() if hasattr(backbone, "peft_config") else backbone


def refusal(backbone: Any, head: nn.Module) -> str | None:
    """Why the packed forward cannot take this model, naming the value; None when it can. Reads no weight."""
    try:
        _check(backbone, head)
    except UnsupportedModel as reason:
        return str(reason)
    return None


def _check(backbone: Any, head: nn.Module) -> Shapes:
    model = text_model(backbone)
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) != MODEL_TYPE:
        found = getattr(config, "model_type", type(model).__name__)
        raise UnsupportedModel(
            f"the packed forward takes models of type {MODEL_TYPE!r}, this one is {found!r}"
        )
    shapes = Shapes.of(config)
    for name, config_entry in getattr(backbone, "peft_config", {}).items():
        for option in ("use_dora", "modules_to_save", "bias", "lora_bias"):
            if getattr(config_entry, option, None) not in (None, False, "none", []):
                raise UnsupportedModel(f"adapter {name!r} uses {option} = {getattr(config_entry, option)!r}")
        if getattr(config_entry.peft_type, "value", config_entry.peft_type) != "LORA":
            raise UnsupportedModel(f"adapter {name!r} is {config_entry.peft_type}, only LORA can be merged")
    devices, dtypes = set(), set()
    for name, parameter in model.named_parameters():
        devices.add(parameter.device)
        if "lora_" in name:
            continue
        dtypes.add(parameter.dtype)
        if parameter.dtype not in DTYPES:
            raise UnsupportedModel(
                f"{name} is {parameter.dtype}; the packed forward takes float32 and bfloat16"
            )
    if len(dtypes) != 1:
        raise UnsupportedModel(
            f"the weights mix {sorted(map(str, dtypes))}; the packed forward needs one dtype"
        )
    devices.update(parameter.device for parameter in head.parameters())
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise UnsupportedModel(
            f"the weights are on {sorted(map(str, devices))}; the packed forward needs them on one device, loaded"
        )
    hooked = next((name for name, module in model.named_modules() if _offloads(module)), None)
    if hooked is not None:
        raise UnsupportedModel(f"module {hooked or 'model'!r} is offloaded by accelerate")
    return shapes


def _offloads(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ())))


def _merged(layer: Any) -> torch.Tensor:
    """Weight of a linear layer with its active LoRA adapters added in float32, rounded once."""
    base = getattr(layer, "base_layer", layer)
    if not isinstance(base, nn.Linear) or type(base.weight) not in (nn.Parameter, torch.Tensor):
        raise UnsupportedModel(f"a projection is {type(base).__name__}, not a plain linear layer")
    weight = base.weight.detach()
    if base is layer or getattr(layer, "merged", False) or getattr(layer, "disable_adapters", False):
        return weight
    merged = weight.float()
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            up, down = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
            merged = merged + layer.scaling[adapter] * (up.detach().float() @ down.detach().float())
    return merged.to(weight.dtype)


def _take(layer: Any) -> torch.Tensor:
    """The merged weight of a layer whose own storage is given up."""
    weight = _merged(layer)
    _release(layer)
    return weight


def _release(module: nn.Module) -> None:
    """Drop the storage of every parameter below a module; whoever took a tensor still holds it."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)


def _fuse(*layers: Any) -> torch.Tensor:
    """Weights of several projections of one input, stacked along their outputs; the originals are released."""
    bases = [getattr(layer, "base_layer", layer).weight for layer in layers]
    fused = bases[0].new_empty(sum(base.shape[0] for base in bases), bases[0].shape[1])
    start = 0
    for layer, base in zip(layers, bases, strict=True):
        end = start + base.shape[0]
        fused[start:end] = _merged(layer)
        _release(layer)
        start = end
    return fused


@torch.no_grad()
def take_weights(backbone: Any, head: nn.Linear) -> Weights:
    """Merge, fuse and take ownership of a model's weights, layer by layer.

    backbone: the Qwen3.5 text model, with or without PEFT LoRA adapters around it; its parameters are empty when
        this returns, so that no weight exists twice, and at most one layer's do while it runs.
    head: the scalar head; its weights are shared, not copied.

    Raises UnsupportedModel, with nothing changed, when the packed forward cannot take the model.
    """
    shapes = _check(backbone, head)
    model = text_model(backbone)
    layers = []
    kinds = zip(model.layers, shapes.layer_types, strict=True)
    # The bar appears where this takes longer than two seconds.
    for layer, kind in tqdm(kinds, "Fusing weights", total=len(model.layers), delay=2):
        mixer: LinearAttentionWeights | FullAttentionWeights
        if kind == "linear_attention":
            delta = layer.linear_attn
            mixer = LinearAttentionWeights(
                project=_fuse(delta.in_proj_qkv, delta.in_proj_z, delta.in_proj_b, delta.in_proj_a),
                conv=delta.conv1d.weight.detach().squeeze(1).contiguous(),
                a_log=delta.A_log.detach(),
                dt_bias=delta.dt_bias.detach(),
                norm=delta.norm.weight.detach(),
                output=_take(delta.out_proj),
            )
        else:
            attention = layer.self_attn
            mixer = FullAttentionWeights(
                project=_fuse(attention.q_proj, attention.k_proj, attention.v_proj),
                q_norm=attention.q_norm.weight.detach(),
                k_norm=attention.k_norm.weight.detach(),
                output=_take(attention.o_proj),
            )
        layers.append(
            LayerWeights(
                input_norm=layer.input_layernorm.weight.detach(),
                mixer=mixer,
                post_norm=layer.post_attention_layernorm.weight.detach(),
                gate_up=_fuse(layer.mlp.gate_proj, layer.mlp.up_proj),
                down=_take(layer.mlp.down_proj),
            )
        )
        _release(layer)
    weights = Weights(
        shapes=shapes,
        embedding=model.embed_tokens.weight.detach(),
        layers=layers,
        final_norm=model.norm.weight.detach(),
        head_weight=head.weight.detach().squeeze(0),
        head_bias=head.bias.detach().squeeze(0),
    )
    _release(model)
    return weights
