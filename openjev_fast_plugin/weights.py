"""The model's weights as the backends read them: LoRA merged; for the packed forward fused, the originals released."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from tqdm import tqdm
from transformers.activations import SiLUActivation
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from openjev_fast_plugin.ops._choices import Heads

MODEL_TYPE = "qwen3_5_text"
DTYPES = (torch.float32, torch.bfloat16)


class UnsupportedModel(ValueError):
    """No backend here can take this model; the message names the property and the value found."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of one model, all read from its configuration.

    Letters as in the ops: H/HV key and value heads of the delta rule with dims K/V; HQ/HKV attention heads of dim D;
    R rotated pairs.
    """

    vocabulary: int
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

    @property
    def heads(self) -> Heads:
        """Those of attention."""
        return Heads(self.query_heads, self.kv_heads, self.head_dim)

    @classmethod
    def of(cls, config: Any) -> Shapes:
        """Shapes of a Qwen3.5 text configuration; UnsupportedModel where it asks for something else."""
        rope = config.rope_parameters
        expected = {
            "model_type": (config.model_type, MODEL_TYPE),
            "hidden_act": (config.hidden_act, "silu"),
            "rope_parameters.rope_type": (rope.get("rope_type"), "default"),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise UnsupportedModel(f"the plugin needs {name} = {wanted!r}, this model has {found!r}")
        unknown = set(config.layer_types) - {"linear_attention", "full_attention"}
        if unknown:
            raise UnsupportedModel(f"the plugin knows no layer type {sorted(unknown)[0]!r}")
        for few, many in (
            ("linear_num_key_heads", "linear_num_value_heads"),
            ("num_key_value_heads", "num_attention_heads"),
        ):
            if getattr(config, many) % getattr(config, few):
                raise UnsupportedModel(
                    f"{many} = {getattr(config, many)} is not a multiple of {few} = {getattr(config, few)}"
                )
        rotary_dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        if rotary_dim % 2:
            raise UnsupportedModel(
                f"head_dim * partial_rotary_factor = {rotary_dim} is odd, rotation takes pairs of dims"
            )
        return cls(
            vocabulary=config.vocab_size,
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
            rotary_pairs=rotary_dim // 2,
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


def multiplied(layer: LayerWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights a layer multiplies with, in order, each with its op; the last layer's first one in parts."""
    yield "linear", layer.mixer.project
    yield "linear_update", layer.mixer.output
    yield "linear_silu_mul", layer.gate_up
    yield "linear_update", layer.down


def last_layer_parts(shapes: Shapes, mixer: LinearAttentionWeights | FullAttentionWeights) -> list[int]:
    """Rows of the parts of the fused projection that the last layer multiplies with one by one."""
    if isinstance(mixer, LinearAttentionWeights):
        return [shapes.conv_channels, shapes.value_heads * shapes.value_dim, 2 * shapes.value_heads]
    return [2 * shapes.query_heads * shapes.head_dim, 2 * shapes.kv_heads * shapes.head_dim]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


class HeldBackbone(nn.Module):
    """A backbone whose weights an engine reads where they are: answers `config` and `parameters()`, refuses to move."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> HeldBackbone:
        """What `to`, `float`, `half` and `cuda` come to: RuntimeError where it would change a weight."""
        probe = next(self.parameters()).detach().new_empty(0)
        if fn(probe) is not probe:
            raise RuntimeError(
                f"a backend holds the weights of this model as {probe.dtype} on {probe.device} and they can "
                "neither be converted nor moved; load the model again as it should be, then hand it over"
            )
        return self


class ReleasedBackbone(HeldBackbone):
    """Stands where the original text model was, which gave its weights to the packed forward; refuses to run."""

    def __init__(self, config: Any, weights: Iterable[torch.Tensor]):
        super().__init__(config)
        self.fused = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Always raises RuntimeError: the original modules gave their weights to the packed forward."""
        raise RuntimeError(
            "the original modules of this model were released when the fast backend took its weights; "
            "load the model again with --backend torch to run them"
        )


class MergedBackbone(HeldBackbone):
    """The original text model without adapters, behind what keeps its weights in place; runs as it did."""

    def __init__(self, model: Any):
        super().__init__(model.config)
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the text model returns."""
        return self.model(*args, **kwargs)


def text_model(backbone: Any) -> Any:
    """The Qwen3.5 text model inside a backbone, which PEFT may have wrapped."""
    return backbone.get_base_model() if isinstance(backbone, PeftModel) else backbone


def refusal(backbone: Any, head: nn.Module) -> str | None:
    """Why no backend here can take this model, naming the value; None when one can. Reads no weight."""
    try:
        check(backbone, head)
    except UnsupportedModel as reason:
        return str(reason)
    return None


def check(backbone: Any, head: nn.Module) -> Shapes:
    """Shapes of a model whose every module computes what the packed forward computes in its place.

    Raises UnsupportedModel otherwise. Changes nothing and reads no weight.
    """
    model = text_model(backbone)
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != MODEL_TYPE:
        found = getattr(config, "model_type", type(model).__name__)
        raise UnsupportedModel(f"the plugin takes models of type {MODEL_TYPE!r}, this one is {found!r}")
    shapes = Shapes.of(config)
    _check_adapters(backbone)
    modules = dict(model.named_modules(remove_duplicate=False))
    counts = {len(shapes.layer_types), config.num_hidden_layers, len(model.layers)}
    if len(counts) != 1:
        raise UnsupportedModel(
            f"the model has {len(model.layers)} layers, num_hidden_layers is {config.num_hidden_layers} "
            f"and layer_types names {len(shapes.layer_types)}"
        )
    dtypes: dict[torch.dtype, str] = {}
    first: dict[int, str] = {}
    for expected in _expected_modules(shapes):
        for name, parameter in _checked(modules.get(expected.path), expected, shapes.eps).items():
            if parameter.dtype not in DTYPES:
                raise UnsupportedModel(f"{name} is {parameter.dtype}; the plugin takes float32 and bfloat16")
            dtypes[parameter.dtype] = name
            if first.setdefault(id(parameter), name) != name:
                raise UnsupportedModel(f"{first[id(parameter)]} and {name} are one parameter")
    if len(dtypes) != 1:
        mixed = ", ".join(f"{dtype} ({name})" for dtype, name in dtypes.items())
        raise UnsupportedModel(f"the weights mix {mixed}; the plugin needs one dtype")
    _checked(head, _Expected("head", (nn.Linear,), {"weight": (1, shapes.hidden), "bias": (1,)}), shapes.eps)
    if head.weight.dtype != torch.float32:
        raise UnsupportedModel(f"head is {head.weight.dtype}; the plugin needs torch.float32")
    devices = {parameter.device for part in (backbone, head) for parameter in part.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise UnsupportedModel(
            f"the weights are on {sorted(map(str, devices))}; the plugin needs them on one device, loaded"
        )
    return shapes


def _check_adapters(backbone: Any) -> None:
    """Refuses adapters that act outside the layers they wrap; what they put in place of a layer is checked there."""
    if not isinstance(backbone, PeftModel):
        if getattr(backbone, "_hf_peft_config_loaded", False):
            raise UnsupportedModel("adapters added by Transformers' add_adapter cannot be merged; use PEFT's")
        return
    for name, config in backbone.peft_config.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise UnsupportedModel(f"adapter {name!r} is {kind}, only LORA can be merged")
    for wrapper in (backbone, backbone.base_model):
        _check_forward(wrapper, type(wrapper).__name__)


class _Expected(NamedTuple):
    """A module that the packed forward stands for: where it is, what it may be, all its parameters' shapes."""

    path: str
    types: tuple[type | None, ...]
    parameters: dict[str, tuple[int, ...]] = {}


def _expected_modules(shapes: Shapes) -> Iterator[_Expected]:
    """Every module below the text model whose forward the packed forward replaces, parents first."""
    hidden, width = shapes.hidden, shapes.head_dim
    queries, keys = shapes.query_heads * width, shapes.kv_heads * width
    channels, values = shapes.conv_channels, shapes.value_heads * shapes.value_dim
    # Transformers 5.10 takes the norm of flash-linear-attention where that is installed; later versions never do.
    gated_norms = (upstream.Qwen3_5RMSNormGated, getattr(upstream, "FusedRMSNormGated", None))

    def norm(path: str, size: int) -> _Expected:
        return _Expected(path, (upstream.Qwen3_5RMSNorm,), {"weight": (size,)})

    def projection(path: str, out_features: int, in_features: int) -> _Expected:
        return _Expected(path, (nn.Linear, LoraLinear), {"weight": (out_features, in_features)})

    yield _Expected("", (upstream.Qwen3_5TextModel,))
    yield _Expected("embed_tokens", (nn.Embedding,), {"weight": (shapes.vocabulary, hidden)})
    yield _Expected("rotary_emb", (upstream.Qwen3_5TextRotaryEmbedding,))
    for index, kind in enumerate(shapes.layer_types):
        layer = f"layers.{index}"
        yield _Expected(layer, (upstream.Qwen3_5DecoderLayer,))
        yield norm(f"{layer}.input_layernorm", hidden)
        if kind == "linear_attention":
            mixer, heads = f"{layer}.linear_attn", (shapes.value_heads,)
            yield _Expected(mixer, (upstream.Qwen3_5GatedDeltaNet,), {"A_log": heads, "dt_bias": heads})
            yield projection(f"{mixer}.in_proj_qkv", channels, hidden)
            yield projection(f"{mixer}.in_proj_z", values, hidden)
            yield projection(f"{mixer}.in_proj_b", shapes.value_heads, hidden)
            yield projection(f"{mixer}.in_proj_a", shapes.value_heads, hidden)
            yield _Expected(f"{mixer}.conv1d", (nn.Conv1d,), {"weight": (channels, 1, 4)})
            yield _Expected(f"{mixer}.norm", gated_norms, {"weight": (shapes.value_dim,)})
            yield projection(f"{mixer}.out_proj", hidden, values)
        else:
            mixer = f"{layer}.self_attn"
            yield _Expected(mixer, (upstream.Qwen3_5Attention,))
            yield projection(f"{mixer}.q_proj", 2 * queries, hidden)
            yield projection(f"{mixer}.k_proj", keys, hidden)
            yield projection(f"{mixer}.v_proj", keys, hidden)
            yield norm(f"{mixer}.q_norm", width)
            yield norm(f"{mixer}.k_norm", width)
            yield projection(f"{mixer}.o_proj", hidden, queries)
        yield norm(f"{layer}.post_attention_layernorm", hidden)
        yield _Expected(f"{layer}.mlp", (upstream.Qwen3_5MLP,))
        yield _Expected(f"{layer}.mlp.act_fn", (SiLUActivation, nn.SiLU))
        yield projection(f"{layer}.mlp.gate_proj", shapes.intermediate, hidden)
        yield projection(f"{layer}.mlp.up_proj", shapes.intermediate, hidden)
        yield projection(f"{layer}.mlp.down_proj", hidden, shapes.intermediate)
    yield norm("norm", hidden)


def _checked(module: nn.Module | None, expected: _Expected, eps: float) -> dict[str, nn.Parameter]:
    """The parameters of a module that is what the packed forward expects; UnsupportedModel where it is not."""
    path = expected.path or "the text model"
    if module is None or type(module) not in expected.types:
        wanted = " or ".join(_full_name(kind) for kind in expected.types if kind is not None)
        found = "missing" if module is None else _full_name(type(module))
        raise UnsupportedModel(f"{path} is {found}, the plugin needs {wanted}")
    _check_forward(module, path)
    if isinstance(module, LoraLinear):
        if module.lora_variant or any(module.lora_bias.values()):
            variants = sorted(type(variant).__name__ for variant in module.lora_variant.values())
            raise UnsupportedModel(f"the adapter of {path} uses {', '.join(variants) or 'lora_bias'}")
        for name, part in module.named_modules():
            _check_forward(part, f"{path}.{name}")
        return _checked(module.base_layer, expected._replace(types=(nn.Linear,)), eps)
    parameters = {name: found for name, found in module._parameters.items() if found is not None}
    sizes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if sizes != expected.parameters:
        raise UnsupportedModel(f"{path} has parameters {sizes}, the plugin needs {expected.parameters}")
    own_eps = getattr(module, "eps", getattr(module, "variance_epsilon", eps))
    if own_eps != eps:
        raise UnsupportedModel(f"{path} has eps {own_eps}, the configuration has {eps}")
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            raise UnsupportedModel(
                f"{path}.{name} is {_full_name(type(parameter))}, the plugin needs a plain parameter"
            )
    return {f"{path}.{name}": parameter for name, parameter in parameters.items()}


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _check_forward(module: nn.Module, path: str) -> None:
    """Refuses a module that runs anything but the forward of its class."""
    hook: Any = getattr(module, "_hf_hook", None)
    for part in () if hook is None else getattr(hook, "hooks", (hook,)):
        # Accelerate's alignment of devices changes nothing where all weights are on one device.
        if type(part).__name__ != "AlignDevicesHook":
            raise UnsupportedModel(f"{path} has the hook {_full_name(type(part))}")
        if part.offload:
            raise UnsupportedModel(f"{path} is offloaded by accelerate")
    forward: Any = module.forward if hook is None else module._old_forward
    if getattr(forward, "__func__", None) is not type(module).forward:
        raise UnsupportedModel(f"the forward of {path} was replaced")
    for registered in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        # Transformers' own, for output_hidden_states and the like, only record.
        if getattr(registered, "__module__", None) != "transformers.utils.output_capturing":
            raise UnsupportedModel(f"{path} has a forward hook, {registered!r}")


def _merged(layer: Any) -> torch.Tensor:
    """Weight of a linear layer with its active LoRA adapters added in float32, rounded once."""
    if type(layer) is nn.Linear:
        return layer.weight.detach()
    if layer.merged and layer.disable_adapters:
        # As its forward would.
        layer.unmerge()
    weight = layer.base_layer.weight.detach()
    if layer.merged or layer.disable_adapters:
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
def merge_adapters(backbone: Any) -> Any:
    """The text model inside a backbone, with its active LoRA adapters merged in place and their layers taken out.

    backbone: a Qwen3.5 text model that `check` takes, with or without PEFT LoRA adapters around it; every other
        module, and every parameter, stays the object it is, so no weight exists twice.
    """
    model = text_model(backbone)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, LoraLinear):
            base: Any = layer.base_layer
            base.weight.copy_(_merged(layer))
            model.set_submodule(path, base)
    return model


@torch.no_grad()
def take_weights(backbone: Any, head: nn.Linear) -> Weights:
    """Merge, fuse and take ownership of a model's weights, layer by layer.

    backbone: the Qwen3.5 text model, with or without PEFT LoRA adapters around it; its parameters are empty when
        this returns, so that no weight exists twice, and at most one layer's do while it runs.
    head: the scalar head; its weights are shared, not copied.

    Raises UnsupportedModel, with nothing changed, when the packed forward cannot take the model.
    """
    shapes = check(backbone, head)
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
