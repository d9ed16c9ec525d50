"""Inputs of every CUDA op at a model's shapes, as the forward makes them: slices of fused projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

EPS = 1e-6


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


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random values on the GPU, drawn on the CPU so that a seed gives them everywhere."""
    return (scale * torch.randn(*shape)).to("cuda", dtype)


def tree_predecessors(rows: int) -> torch.Tensor:
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
    return torch.tensor(table, dtype=torch.int32).reshape(rows, 3).cuda()


def add_rms_norm(p: Profile, rows: int, partials: int | None = -1) -> tuple:
    """partials: None without update, -1 for one of the model's dtype, else the number of partial sums."""
    update = None
    if partials == -1:
        update = normal(rows, p.hidden)
    elif partials is not None:
        update = normal(partials, rows, p.hidden, dtype=torch.float32)
    return normal(rows, p.hidden, scale=3.0), update, normal(p.hidden, scale=0.3), EPS


def head_score(p: Profile, rows: int, partials: int = -1) -> tuple:
    residual, update, weight, eps = add_rms_norm(p, rows, partials)
    candidates = torch.randint(0, max(rows, 1), (min(rows, 9),), dtype=torch.int32).cuda()
    head = normal(p.hidden, scale=0.02, dtype=torch.float32)
    return residual, update, candidates, weight, head, torch.tensor(0.25, device="cuda"), eps


def silu_mul(p: Profile, rows: int) -> tuple:
    return (normal(rows, p.skipped + 2 * p.intermediate, scale=3.0)[:, p.skipped :],)


def gate_mul(p: Profile, rows: int) -> tuple:
    fused = normal(rows, p.query_heads, p.skipped + 2 * p.head_dim, scale=2.0)
    return normal(rows, p.query_heads, p.head_dim), fused[:, :, p.skipped + p.head_dim :]


def gated_rms_norm(p: Profile, rows: int) -> tuple:
    width = p.value_heads * p.value_dim
    z = normal(rows, p.skipped + width + 16)[:, p.skipped : p.skipped + width]
    z = z.unflatten(1, (p.value_heads, p.value_dim))
    return normal(rows, p.value_heads, p.value_dim, scale=0.1), z, normal(p.value_dim, scale=0.5) + 1, EPS


def delta_prepare(p: Profile, rows: int) -> tuple:
    channels, heads = 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim, p.value_heads
    fused = normal(rows, p.skipped + channels + 2 * heads)[:, p.skipped :]
    qkv, b, a = fused.split([channels, heads, heads], dim=1)
    gates = normal(heads), normal(heads)
    return qkv, b, a, tree_predecessors(rows), normal(channels, 4, scale=0.5), *gates, p.key_heads, p.key_dim


def attention_prepare(p: Profile, rows: int) -> tuple:
    fused = normal(rows, p.query_heads, p.skipped + 2 * p.head_dim, scale=2.0)
    q = fused[:, :, p.skipped : p.skipped + p.head_dim]
    k = normal(rows, p.skipped + 2 * p.kv_heads * p.head_dim)[:, p.skipped :]
    k = k[:, : p.kv_heads * p.head_dim].unflatten(1, (p.kv_heads, p.head_dim))
    angle = torch.arange(rows)[:, None] * 1e7 ** (-torch.arange(p.pairs) / p.pairs)
    cos, sin = (table.to("cuda", torch.bfloat16) for table in (angle.cos(), angle.sin()))
    weights = normal(p.head_dim, scale=0.3), normal(p.head_dim, scale=0.3)
    return q, k, *weights, cos, sin, cos, sin, EPS


CASES: dict[str, Callable[..., tuple]] = {
    "add_rms_norm": add_rms_norm,
    "attention_prepare": attention_prepare,
    "delta_prepare": delta_prepare,
    "gate_mul": gate_mul,
    "gated_rms_norm": gated_rms_norm,
    "head_score": head_score,
    "silu_mul": silu_mul,
}
