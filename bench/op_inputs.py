"""Inputs of the ops at a model's shapes, as the forward makes them, and exact results to compare with.

Slices of fused projections stay slices. Values come from a seed; `device` is where the tensors are put.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

EPS = 1e-6
# Natural logarithms of the decay a row: remembers thousands of rows, and forgets within one or two.
DECAYS = {"slow": (1e-4, 1e-2), "fast": (0.5, 3.0)}


@dataclass(frozen=True)
class Profile:
    """Sizes of one model; letters as in the ops."""

    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    head_dim: int = 256
    pairs: int = 32
    key_dim: int = 128
    value_dim: int = 128
    # Columns before the first slice of a fused projection: with an odd number no slice is aligned.
    skipped: int = 0


PROFILES = {
    "2b": Profile(2048, 6144, 8, 2, 16, 16),
    "9b": Profile(4096, 12288, 16, 4, 16, 32),
    "27b": Profile(5120, 17408, 24, 4, 16, 48),
    # No size is a multiple of the vector width.
    "odd": Profile(1037, 517, 3, 1, 3, 5, head_dim=77, pairs=11, key_dim=45, value_dim=33, skipped=3),
    # Sizes of whole vectors, slices that start in the middle of one.
    "unaligned": Profile(256, 512, 4, 2, 2, 4, skipped=3),
    # Heads other than the usual widths; a row longer than one block has threads for.
    "wide": Profile(12288, 4096, 4, 2, 2, 6, head_dim=128, pairs=64, key_dim=192, value_dim=256),
    "narrow": Profile(64, 128, 4, 2, 2, 4, head_dim=32, pairs=8, key_dim=16, value_dim=24),
}


def normal(
    *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> torch.Tensor:
    """Random values, drawn on the CPU so that a seed gives them everywhere."""
    return (scale * torch.randn(*shape)).to(device, dtype)


def tree_predecessors(rows: int, device: str = "cuda") -> torch.Tensor:
    """[rows, 3] int32: a trunk of a third of the rows, then branches of 20 rows that start at its end."""
    trunk, before = max(1, rows // 3), []
    for row in range(rows):
        into_branch = (row - trunk) % 20 if row >= trunk else -1
        before.append(trunk - 1 if into_branch == 0 else row - 1)
    table = []
    for row in range(rows):
        steps, at = [], row
        for _ in range(3):
            at = before[at] if at >= 0 else -1
            steps.append(at)
        table.append(steps)
    return torch.tensor(table, dtype=torch.int32).reshape(rows, 3).to(device)


def add_rms_norm(p: Profile, rows: int, partials: int | None = -1, device: str = "cuda") -> tuple:
    """partials: None without update, -1 for one of the model's dtype, else the number of partial sums."""
    update = None
    if partials == -1:
        update = normal(rows, p.hidden, device=device)
    elif partials is not None:
        update = normal(partials, rows, p.hidden, dtype=torch.float32, device=device)
    residual = normal(rows, p.hidden, scale=3.0, device=device)
    return residual, update, normal(p.hidden, scale=0.3, device=device), EPS


def head_score(p: Profile, rows: int, partials: int = -1, device: str = "cuda") -> tuple:
    residual, update, weight, eps = add_rms_norm(p, rows, partials, device)
    candidates = torch.randint(0, max(rows, 1), (min(rows, 9),), dtype=torch.int32).to(device)
    head = normal(p.hidden, scale=0.02, dtype=torch.float32, device=device)
    return residual, update, candidates, weight, head, torch.tensor(0.25, device=device), eps


def silu_mul(p: Profile, rows: int, device: str = "cuda") -> tuple:
    fused = normal(rows, p.skipped + 2 * p.intermediate, scale=3.0, device=device)
    return (fused[:, p.skipped :],)


def gate_mul(p: Profile, rows: int, device: str = "cuda") -> tuple:
    fused = normal(rows, p.query_heads, p.skipped + 2 * p.head_dim, scale=2.0, device=device)
    return normal(rows, p.query_heads, p.head_dim, device=device), fused[:, :, p.skipped + p.head_dim :]


def gated_rms_norm(p: Profile, rows: int, device: str = "cuda") -> tuple:
    width = p.value_heads * p.value_dim
    z = normal(rows, p.skipped + width + 16, device=device)[:, p.skipped : p.skipped + width]
    z = z.unflatten(1, (p.value_heads, p.value_dim))
    x = normal(rows, p.value_heads, p.value_dim, scale=0.1, device=device)
    return x, z, normal(p.value_dim, scale=0.5, device=device) + 1, EPS


def delta_prepare(p: Profile, rows: int, device: str = "cuda") -> tuple:
    channels, heads = 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim, p.value_heads
    fused = normal(rows, p.skipped + channels + 2 * heads, device=device)[:, p.skipped :]
    qkv, b, a = fused.split([channels, heads, heads], dim=1)
    gates = normal(heads, device=device), normal(heads, device=device)
    conv = normal(channels, 4, scale=0.5, device=device)
    return qkv, b, a, tree_predecessors(rows, device), conv, *gates, p.key_heads, p.key_dim


def attention_prepare(p: Profile, rows: int, device: str = "cuda") -> tuple:
    fused = normal(rows, p.query_heads, p.skipped + 2 * p.head_dim, scale=2.0, device=device)
    q = fused[:, :, p.skipped : p.skipped + p.head_dim]
    k = normal(rows, p.skipped + 2 * p.kv_heads * p.head_dim, device=device)[:, p.skipped :]
    k = k[:, : p.kv_heads * p.head_dim].unflatten(1, (p.kv_heads, p.head_dim))
    angle = torch.arange(rows)[:, None] * 1e7 ** (-torch.arange(p.pairs) / p.pairs)
    cos, sin = (table.to(device, torch.bfloat16) for table in (angle.cos(), angle.sin()))
    weights = (normal(p.head_dim, scale=0.3, device=device) for _ in range(2))
    return q, k, *weights, cos, sin, cos, sin, EPS


# The elementwise ops: what takes rows and knows no tree.
CASES: dict[str, Callable[..., tuple]] = {
    "add_rms_norm": add_rms_norm,
    "attention_prepare": attention_prepare,
    "delta_prepare": delta_prepare,
    "gate_mul": gate_mul,
    "gated_rms_norm": gated_rms_norm,
    "head_score": head_score,
    "silu_mul": silu_mul,
}


def delta_rule(
    p: Profile, rows: int, decay: str = "slow", alike: float = 0.0, device: str = "cuda"
) -> list[torch.Tensor]:
    """q, k, v, g, beta as delta_prepare leaves them; `alike` is the share of a direction all keys have in common."""
    draw = torch.Generator(device).manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=draw)

    q, k = normal(2, rows, p.key_heads, p.key_dim)
    k = (1 - alike) * k + alike * normal(1, p.key_heads, p.key_dim)
    q, k = (torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in (q, k))
    v = normal(rows, p.value_heads, p.value_dim).bfloat16()
    low, high = DECAYS[decay]
    g, beta = torch.rand(2, rows, p.value_heads, device=device, generator=draw)
    return [q, k, v, -(low + (high - low) * g), beta.bfloat16().float()]


def tree_attention(p: Profile, queries: int, rows: int, seed: int = 0, device: str = "cuda") -> tuple:
    """q, k, v, gate, scale as the forward makes them: v and gate are slices of fused projections."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=draw).bfloat16()

    dim, width = p.head_dim, p.kv_heads * p.head_dim
    q, k = normal(queries, p.query_heads, dim), normal(rows, p.kv_heads, dim)
    v = normal(rows, 3 * width)[:, width : 2 * width].unflatten(1, (p.kv_heads, dim))
    gate = normal(queries, p.query_heads, 2 * dim)[..., dim:]
    # Scores of deviation 2: weights neither uniform nor all on one key.
    return q, k, v, gate, 2 * dim**-0.5


def path_rows(
    node_start: np.ndarray, node_length: np.ndarray, node_parent: np.ndarray, node: int
) -> np.ndarray:
    """Rows from the root to the end of a node."""
    rows = np.arange(node_start[node], node_start[node] + node_length[node])
    parent = int(node_parent[node])
    if parent < 0:
        return rows
    return np.concatenate([path_rows(node_start, node_length, node_parent, parent), rows])


def exact_delta_rule(
    given: Sequence[torch.Tensor], node_start: np.ndarray, node_length: np.ndarray, node_parent: np.ndarray
) -> torch.Tensor:
    """The delta rule token by token in float64, written from the formula; [N, HV, V], zeros in rows of no node.

    given: q, k, v, g, beta of the op. node_start, node_length, node_parent: [K], parents before children.
    """
    q, k, v, g, beta = (x.double() for x in given)
    groups = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(groups, 1), k.repeat_interleave(groups, 1)
    decay, output = g.exp()[:, :, None, None], torch.zeros_like(v)
    states: list[torch.Tensor] = []
    for start, length, parent in zip(
        node_start.tolist(), node_length.tolist(), node_parent.tolist(), strict=True
    ):
        state = states[parent] if parent >= 0 else v.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        for t in range(start, start + length):
            state = state * decay[t]
            error = beta[t][:, None] * (v[t] - (k[t][:, None] @ state)[:, 0])
            state = torch.baddbmm(state, k[t][:, :, None], error[:, None])
            output[t] = (q[t][:, None] @ state)[:, 0]
        states.append(state)
    return output * q.shape[2] ** -0.5


def exact_attention(
    given: tuple,
    node_start: np.ndarray,
    node_length: np.ndarray,
    node_parent: np.ndarray,
    query_row: np.ndarray,
    query_node: np.ndarray,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention times the gate in float64 over each query's gathered path, and that of the values' magnitudes.

    given: q [M, HQ, D], k, v [N, HKV, D], gate [M, HQ, D], scale. query_row, query_node: [M], of each query.
    Returns two [M, HQ * D].
    """
    q, k, v, gate, scale = given
    exact = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    magnitude, groups = torch.empty_like(exact), q.shape[1] // k.shape[1]
    for node in np.unique(query_node):
        path = torch.from_numpy(path_rows(node_start, node_length, node_parent, int(node))).to(q.device)
        mine = torch.from_numpy(np.flatnonzero(query_node == node)).to(q.device)
        depth = torch.from_numpy(query_row).to(q.device)[mine] - path[-1] + len(path) - 1
        hidden = torch.arange(len(path), device=q.device) > depth[:, None]
        # [key heads, queries and their groups, dim] by [key heads, keys, dim].
        queries = q[mine].double().unflatten(1, (k.shape[1], groups)).permute(1, 0, 2, 3).flatten(1, 2)
        keys, values = (x[path].double().transpose(0, 1) for x in (k, v))
        score = (queries @ keys.mT * scale).masked_fill_(hidden.repeat_interleave(groups, 0), -torch.inf)
        weight = torch.softmax(score, dim=-1)
        for target, of in ((exact, values), (magnitude, values.abs())):
            by_key_head = (weight @ of).unflatten(1, (len(mine), groups))
            target[mine] = by_key_head.transpose(0, 1).flatten(1, 2)
    factor = torch.sigmoid(gate.double())
    return (exact * factor).flatten(1), (magnitude * factor).flatten(1)
