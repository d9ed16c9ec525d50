"""From the fused projection to the delta rule's inputs: convolution along the tree, SiLU, split, norms, gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from openjev_fast_plugin.ops._library import define

_L2_EPS = 1e-6

Prepared = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def delta_prepare_ref(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    predecessor: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_dim: int,
) -> Prepared:
    """The readable twin of :func:`delta_prepare`: same arguments, same rounding points."""
    dtype, rows, value_heads = qkv.dtype, qkv.shape[0], b.shape[1]
    x, weight = qkv.float(), conv_weight.float()
    conv = x * weight[:, 3]
    for back in range(3):
        source = predecessor[:, back].long()
        taken = torch.where(source[:, None] >= 0, x[source.clamp(min=0)], 0.0)
        conv = conv + taken * weight[:, 2 - back]
    activated = (conv * torch.sigmoid(conv)).to(dtype).float()
    q, k, v = activated.split(
        [key_heads * key_dim, key_heads * key_dim, qkv.shape[1] - 2 * key_heads * key_dim], dim=1
    )
    q, k = (head.reshape(rows, key_heads, key_dim) for head in (q, k))
    q, k = (head / torch.sqrt(head.pow(2).sum(-1, keepdim=True) + _L2_EPS) for head in (q, k))
    g = -torch.exp(a_log.float()) * F.softplus(a.float() + dt_bias.float())
    beta = torch.sigmoid(b.float()).to(dtype).float()
    return q.to(dtype), k.to(dtype), v.unflatten(1, (value_heads, -1)).to(dtype), g, beta


def _portable(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    predecessor: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_dim: int,
) -> Prepared:
    dtype, (rows, channels), value_heads = qkv.dtype, qkv.shape, b.shape[1]
    # One zero row at the end stands for "before the start".
    x = torch.zeros(rows + 1, channels, dtype=torch.float32, device=qkv.device)
    x[:rows] = qkv
    source = torch.where(predecessor < 0, rows, predecessor)
    taps = conv_weight.float().t().contiguous()
    conv = x[:rows] * taps[3]
    for back in range(3):
        conv.addcmul_(x.index_select(0, source[:, back]), taps[2 - back])
    activated = F.silu(conv, inplace=True).to(dtype)
    key_width = key_heads * key_dim
    qk = activated[:, : 2 * key_width].reshape(rows, 2 * key_heads, key_dim).float()
    qk = (qk * torch.rsqrt(qk.pow(2).sum(-1, keepdim=True) + _L2_EPS)).to(dtype)
    v = activated[:, 2 * key_width :].unflatten(1, (value_heads, -1)).contiguous()
    g = -torch.exp(a_log.float()) * F.softplus(a.float() + dt_bias.float())
    return qk[:, :key_heads].contiguous(), qk[:, key_heads:].contiguous(), v, g, torch.sigmoid(b).float()


def _fake(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    predecessor: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_dim: int,
) -> Prepared:
    rows, value_heads = qkv.shape[0], b.shape[1]
    q, k = (qkv.new_empty(rows, key_heads, key_dim) for _ in range(2))
    v = qkv.new_empty(rows, value_heads, (qkv.shape[1] - 2 * key_heads * key_dim) // value_heads)
    g, beta = (qkv.new_empty(rows, value_heads, dtype=torch.float32) for _ in range(2))
    return q, k, v, g, beta


_op = define(
    "delta_prepare(Tensor qkv, Tensor b, Tensor a, Tensor predecessor, Tensor conv_weight, Tensor a_log, "
    "Tensor dt_bias, int key_heads, int key_dim) -> (Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta)",
    portable=_portable,
    fake=_fake,
)


def delta_prepare(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    predecessor: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_dim: int,
) -> Prepared:
    """Depthwise causal convolution over each row's path, SiLU, split into heads, L2 norms and gates.

    qkv: [N, C] model dtype (bfloat16 or float32), rows may be strided; C = 2 H K + HV V, ordered q, k, v.
    b, a: [N, HV] model dtype, rows may be strided: inputs of the write strength and of the decay.
    predecessor: [N, 3] int32: rows 1, 2 and 3 steps back on the row's own path, -1 before its start.
    conv_weight: [C, 4] model dtype; tap 3 multiplies the row itself, taps 2, 1, 0 its predecessors.
    a_log, dt_bias: [HV] model dtype.
    key_heads, key_dim: H and K.

    Returns q [N, H, K], k [N, H, K], v [N, HV, V] in the model dtype, g [N, HV] and beta [N, HV] in float32:
    ``q, k = x / sqrt(sum x^2 + 1e-6)``, ``g = -exp(a_log) softplus(a + dt_bias)`` (natural logarithm of the decay),
    ``beta = sigmoid(b)`` rounded to the model dtype. The convolution is summed in float32 and rounded once, after
    SiLU (the causal-conv1d kernel's rounding); q and k are rounded once more after their norm. The maths is
    ``Qwen3_5GatedDeltaNet.forward`` of Transformers 5.10.2.
    """
    return _op(qkv, b, a, predecessor, conv_weight, a_log, dt_bias, key_heads, key_dim)
