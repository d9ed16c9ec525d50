"""The layers of a forward in one call of compiled code, `csrc/layers.cpp`, which does what `forward_by_ops` does.

Called from Python one by one, the ops of an eager forward take the host longer than the device, and take Python's lock
hundreds of times from whoever prepares the next request. In one call they are launched without the lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter

import torch

from openjev_fast_plugin.layout import Layout
from openjev_fast_plugin.ops import _cuda
from openjev_fast_plugin.ops._choices import OPS, Product
from openjev_fast_plugin.ops.delta_rule import KERNEL_DIM as DELTA_RULE_DIM
from openjev_fast_plugin.ops.linear import choice_of, has_ways
from openjev_fast_plugin.ops.tree_attention import KERNEL_DIMS as ATTENTION_DIMS
from openjev_fast_plugin.weights import (
    FullAttentionWeights,
    LayerWeights,
    LinearAttentionWeights,
    Shapes,
    Weights,
    last_layer_parts,
    multiplied,
)

# Tensors of a layer in the order in which csrc/layers.cpp reads them, by the kind of its mixer.
_TENSORS = {
    kind: attrgetter("input_norm", *(f"mixer.{f.name}" for f in fields(kind)), "post_norm", "gate_up", "down")
    for kind in (LinearAttentionWeights, FullAttentionWeights)
}


def portable_ops(shapes: Shapes, weight: torch.Tensor) -> list[str]:
    """Ops that run as PyTorch operations, for want of a kernel for the heads or for the weights' dtype or device."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return ["all"]
    missing = []
    if not shapes.key_dim == shapes.value_dim == DELTA_RULE_DIM:
        missing.append("delta_rule")
    if shapes.head_dim not in ATTENTION_DIMS:
        missing.append("tree_attention")
    return missing


def compiles(weights: Weights, layout: Layout) -> bool:
    """Whether :func:`compiled_layers` takes such a forward: every op has a kernel, and nothing is reused or kept."""
    return (
        layout.reuse is None
        and not portable_ops(weights.shapes, weights.embedding)
        # All of an op's inputs are made by the forward, contiguous: whether it has ways is up to the weight.
        and all(has_ways(weight) for layer in weights.layers for _, weight in multiplied(layer))
    )


def compiled_layers(
    weights: Weights, layout: Layout, rotary: tuple[torch.Tensor, torch.Tensor], residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every layer of a forward that `compiles`, on a CUDA device.

    rotary: cosine and sine of every packed row. residual: [N, hidden], the rows' embeddings.

    Returns the residual stream of the M read rows and the last update to it, as `head_score` takes them.
    """
    shapes = weights.shapes
    choices: list[int] = []
    for product in products(weights, layout.rows, layout.reads):
        choices += [OPS.index(product.op), *product[1:], *choice_of(product, weights.device).encoded()]
    return _cuda.load()["layers"](
        residual=residual,
        cos=rotary[0],
        sin=rotary[1],
        predecessor=layout.predecessor,
        read_row=layout.read_row,
        node=layout.delta.node,
        node_chunk=layout.delta.node_chunk,
        node_tiles=layout.delta.node_tiles,
        node_slots=layout.delta.node_slots,
        query_row=layout.attention.query_row,
        tile=layout.attention.tile,
        tile_range=layout.attention.tile_range,
        tile_queries=layout.attention.tile_queries,
        read_query_row=layout.read_attention.query_row,
        read_tile=layout.read_attention.tile,
        read_tile_range=layout.read_attention.tile_range,
        read_tile_queries=layout.read_attention.tile_queries,
        # All of them in every call: that takes microseconds a layer, and so nothing but `weights` holds any.
        weights=layer_tensors(weights),
        linear_attention=[int(isinstance(layer.mixer, LinearAttentionWeights)) for layer in weights.layers],
        key_heads=shapes.key_heads,
        key_dim=shapes.key_dim,
        value_heads=shapes.value_heads,
        value_dim=shapes.value_dim,
        query_heads=shapes.query_heads,
        kv_heads=shapes.kv_heads,
        head_dim=shapes.head_dim,
        eps=shapes.eps,
        choices=choices,
    )


def layer_tensors(weights: Weights) -> list[torch.Tensor]:
    """The weights of all layers in the order in which csrc/layers.cpp reads them."""
    return [tensor for layer in weights.layers for tensor in _TENSORS[type(layer.mixer)](layer)]


def products(weights: Weights, rows: int, reads: int) -> list[Product]:
    """Every product of a forward with so many rows and read rows, each once, in the order of the first time."""
    return list(dict.fromkeys(_products(weights, rows, reads)))


def _products(weights: Weights, rows: int, reads: int) -> Iterator[Product]:
    *before, last = weights.layers
    # Layers of one kind have weights of the same sizes.
    kinds: dict[type, LayerWeights] = {}
    for layer in before:
        kinds.setdefault(type(layer.mixer), layer)
    for layer in kinds.values():
        for op, weight in multiplied(layer):
            yield Product(op, rows, *weight.shape)
    (op, project), *others = multiplied(last)
    # What the read rows alone need: z of linear attention, queries and gates of full attention.
    reading = 1 if isinstance(last.mixer, LinearAttentionWeights) else 0
    for part, features in enumerate(last_layer_parts(weights.shapes, last.mixer)):
        yield Product(op, reads if part == reading else rows, features, project.shape[1])
    for op, weight in others:
        yield Product(op, reads, *weight.shape)
