"""A forest as the tensors one forward reads, on the model's device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from openjev_fast_plugin.forest import Forest
from openjev_fast_plugin.ops import AttentionPlan, DeltaPlan, plan_attention, plan_delta_rule
from openjev_fast_plugin.weights import Shapes

_CHUNK_SIZES = (64, 32, 16)


@dataclass(frozen=True)
class Layout:
    """N packed rows, M read rows, C candidates.

    token: [N] int32, token id of each row.
    predecessor: [N, 3] int32, rows 1, 2 and 3 steps back on the path, -1 before its start.
    cos, sin: [N, R] model dtype, rotary tables of each row's position.
    delta: chunks of the delta rule. attention: every row as a query. read_attention: the read rows as queries.
    read_row: [M] int32, rows the head reads. candidate_read: [C] int32, index into read_row of each candidate.
    """

    token: torch.Tensor
    predecessor: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    delta: DeltaPlan
    attention: AttentionPlan
    read_attention: AttentionPlan
    read_row: torch.Tensor
    candidate_read: torch.Tensor

    @property
    def rows(self) -> int:
        return self.token.shape[0]


def rotary_tables(
    position: torch.Tensor, pairs: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position * theta^(-i / pairs) for i < pairs; angles in float32, rounded to dtype once.

    position: [N] integers. Returns two [N, pairs] tensors.
    """
    exponent = torch.arange(0, 2 * pairs, 2, dtype=torch.int64, device=position.device).float() / (2 * pairs)
    angle = position.float()[:, None] * (1.0 / theta**exponent)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def chunk_size_for(node_length: np.ndarray, node_level: np.ndarray) -> int:
    """The chunk size of the portable delta rule that is cheapest for these nodes.

    node_length, node_level: [K] integers. In units of one row, a padded row costs 1 + size / 256 and a step of the
    recurrence 8: fitted to timings on one CPU core (bench/LOG.md).
    """

    def cost(size: int) -> float:
        chunks = -(-node_length // size)
        steps = sum(int(chunks[node_level == level].max()) for level in range(int(node_level.max()) + 1))
        return int(chunks.sum()) * size * (1 + size / 256) + 8 * steps

    return min(_CHUNK_SIZES, key=cost)


def build_layout(forest: Forest, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Layout:
    """Tensors of one forest for a model of these shapes.

    dtype: the model's; device: where its weights are.
    """

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    nodes = (forest.node_start, forest.node_length, forest.node_parent)
    cos, sin = rotary_tables(tensor(forest.position), shapes.rotary_pairs, shapes.rope_theta, dtype)
    every_row = np.arange(len(forest.token))
    return Layout(
        token=tensor(forest.token),
        predecessor=tensor(forest.predecessor),
        cos=cos,
        sin=sin,
        delta=plan_delta_rule(*nodes, chunk_size_for(forest.node_length, forest.node_level), device),
        attention=plan_attention(*nodes, every_row, forest.node, device),
        read_attention=plan_attention(*nodes, forest.read_row, forest.node[forest.read_row], device),
        read_row=tensor(forest.read_row),
        candidate_read=tensor(forest.candidate_read),
    )
