"""One forward pass over a packed forest: the layer loop over the ops, and when it is compiled code's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from openjev_fast_plugin.compiled_layers import compiled_layers, compiles
from openjev_fast_plugin.layout import CONVOLUTION_ROWS, Layout, Reuse, rotary_tables
from openjev_fast_plugin.ops import (
    add_rms_norm,
    attention_prepare,
    delta_prepare,
    delta_rule,
    gated_rms_norm,
    head_score,
    linear,
    linear_silu_mul,
    linear_update,
    tree_attention,
)
from openjev_fast_plugin.prefixes import KeptRows, KeptStates, PrefixCache
from openjev_fast_plugin.weights import FullAttentionWeights, LinearAttentionWeights, Shapes, Weights


def forward(weights: Weights, layout: Layout, prefixes: PrefixCache | None = None) -> torch.Tensor:
    """Scores [C] float32 of a forest's candidates.

    prefixes: where what the layout starts from was kept and what it keeps is put; read for a layout with `reuse` alone.

    Every packed row is computed once. The last layer computes what the read rows need: keys, values and states of
    every row, and queries, projections and MLP of the read rows alone. The head scores each read row once, so that
    neither the order of candidates nor their number changes a bit of a score.

    Candidates of one forward share values that are not finite: masks and decays multiply what a row must not see by
    zero, and zero times NaN is NaN. A prompt whose hidden state overflows can make other prompts' scores NaN; it
    never makes them finite and wrong.

    Where it `compiles`, the layers are one call of compiled code, to the same bits as op by op.
    """
    if not compiles(weights, layout):
        return forward_by_ops(weights, layout, prefixes)
    rotary, residual = _inputs(weights, layout)
    return _scores(weights, layout, *compiled_layers(weights, layout, rotary, residual))


def forward_by_ops(weights: Weights, layout: Layout, prefixes: PrefixCache | None = None) -> torch.Tensor:
    """:func:`forward` with every op called from here: what it computes, on any device and with prefixes.

    csrc/layers.cpp follows the loop step by step.
    """
    shapes, last = weights.shapes, len(weights.layers) - 1
    rotary, residual = _inputs(weights, layout)
    update: torch.Tensor | None = None
    kept: Sequence[Any] = [None] * len(weights.layers)
    if layout.reuse is not None:
        assert prefixes is not None and prefixes.layers is not None
        kept = prefixes.layers
        # What index_copy_ takes, once for all layers.
        keep_place, keep_row = layout.reuse.keep_place.long(), layout.reuse.keep_row.long()
        layout = replace(layout, reuse=layout.reuse._replace(keep_place=keep_place, keep_row=keep_row))
    for index, layer in enumerate(weights.layers):
        read = layout.read_row if index == last else None
        residual, normed = add_rms_norm(residual, update, layer.input_norm, shapes.eps)
        if isinstance(layer.mixer, LinearAttentionWeights):
            update = _linear_attention(normed, layer.mixer, layout, shapes, read, kept[index])
        else:
            update = _full_attention(normed, layer.mixer, layout, rotary, shapes, read, kept[index])
        if read is not None:
            residual = residual.index_select(0, read)
        residual, normed = add_rms_norm(residual, update, layer.post_norm, shapes.eps)
        update = linear_update(linear_silu_mul(normed, layer.gate_up), layer.down)
    assert update is not None, "a model has layers"
    return _scores(weights, layout, residual, update)


def _inputs(weights: Weights, layout: Layout) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Cosine and sine of every packed row, and their embeddings [N, hidden]."""
    shapes = weights.shapes
    rotary = rotary_tables(layout.position, shapes.rotary_pairs, shapes.rope_theta, weights.dtype)
    return rotary, F.embedding(layout.token, weights.embedding)


def _scores(weights: Weights, layout: Layout, residual: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Scores [C] of the candidates, of the read rows' residual stream [M, hidden] and the last update to it."""
    every = torch.arange(len(residual), dtype=torch.int32, device=residual.device)
    scores = head_score(
        residual,
        update,
        every,
        weights.final_norm,
        weights.head_weight,
        weights.head_bias,
        weights.shapes.eps,
    )
    return scores.index_select(0, layout.candidate_read)


def _linear_attention(
    normed: torch.Tensor,
    weights: LinearAttentionWeights,
    layout: Layout,
    shapes: Shapes,
    read: torch.Tensor | None,
    kept: KeptStates | None,
) -> torch.Tensor:
    """Gated DeltaNet over every row [N, hidden]; the output of the rows in `read` only, where given.

    kept: of this layer, where the layout has `reuse`.
    """
    channels, values = shapes.conv_channels, shapes.value_heads * shapes.value_dim
    if read is None:
        qkv, z, ba = linear(normed, weights.project).split([channels, values, 2 * shapes.value_heads], dim=1)
    else:
        qkv = linear(normed, weights.project[:channels])
        z = linear(normed.index_select(0, read), weights.project[channels : channels + values])
        ba = linear(normed, weights.project[channels + values :])
    b, a = ba.chunk(2, dim=1)
    if kept is not None and layout.reuse is not None:
        _continue_convolution(qkv, kept.conv, layout.reuse)
    q, k, v, g, beta = delta_prepare(
        qkv,
        b,
        a,
        layout.predecessor,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        shapes.key_heads,
        shapes.key_dim,
    )
    mixed = delta_rule(q, k, v, g, beta, layout.delta, None if kept is None else kept.states)
    if read is not None:
        mixed = mixed.index_select(0, read)
    z = z.unflatten(1, (shapes.value_heads, shapes.value_dim))
    return linear_update(gated_rms_norm(mixed, z, weights.norm, shapes.eps), weights.output)


def _full_attention(
    normed: torch.Tensor,
    weights: FullAttentionWeights,
    layout: Layout,
    rotary: tuple[torch.Tensor, torch.Tensor],
    shapes: Shapes,
    read: torch.Tensor | None,
    kept: KeptRows | None,
) -> torch.Tensor:
    """Gated attention of every row [N, hidden]; queries and output of the rows in `read` only, where given.

    kept: of this layer, where the layout has `reuse`.
    """
    query_width, key_width = 2 * shapes.query_heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    if read is None:
        projected = linear(normed, weights.project)
        q_gate, keys, values = projected.split([query_width, key_width, key_width], dim=1)
        q_rotary, plan = rotary, layout.attention
    else:
        q_gate = linear(normed.index_select(0, read), weights.project[:query_width])
        keys, values = linear(normed, weights.project[query_width:]).chunk(2, dim=1)
        q_rotary = (rotary[0].index_select(0, read), rotary[1].index_select(0, read))
        plan = layout.read_attention
    q, gate = q_gate.unflatten(1, (shapes.query_heads, 2 * shapes.head_dim)).chunk(2, dim=2)
    keys, values = (x.unflatten(1, (shapes.kv_heads, shapes.head_dim)) for x in (keys, values))
    q, k = attention_prepare(q, keys, weights.q_norm, weights.k_norm, *q_rotary, *rotary, shapes.eps)
    if kept is not None and layout.reuse is not None:
        k = _behind_kept(k, kept.keys, layout.reuse)
        values = _behind_kept(values, kept.values, layout.reuse)
    mixed = tree_attention(q, k, values, gate, shapes.head_dim**-0.5, plan)
    return linear_update(mixed, weights.output)


def _continue_convolution(qkv: torch.Tensor, kept: torch.Tensor, reuse: Reuse) -> None:
    """Put the last rows of kept prefixes in place of the last ones of qkv [N, C], and keep those of new prefixes."""
    standing = CONVOLUTION_ROWS * len(reuse.kept_place)
    if standing:
        qkv[-standing:] = kept.index_select(0, reuse.kept_place).flatten(0, 1)
    if len(reuse.keep_place):
        last = qkv.index_select(0, reuse.keep_last).unflatten(0, (-1, CONVOLUTION_ROWS))
        kept.index_copy_(0, reuse.keep_place, last)


def _behind_kept(rows: torch.Tensor, kept: torch.Tensor, reuse: Reuse) -> torch.Tensor:
    """Keys or values [N, HKV, D] behind those of kept prefixes [G + N, HKV, D]; keeps those of new prefixes."""
    before = len(reuse.kept_row)
    if before:
        every = rows.new_empty(before + len(rows), *rows.shape[1:])
        torch.index_select(kept, 0, reuse.kept_row, out=every[:before])
        every[before:] = rows
        rows = every
    if len(reuse.keep_row):
        kept.index_copy_(0, reuse.keep_row, rows.index_select(0, reuse.keep_from))
    return rows
