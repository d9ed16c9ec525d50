"""The gated delta rule over a forest: every node starts from its parent's final state."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from openjev_fast_plugin.ops._library import define

# Key and value dim of the CUDA kernel, rows of its chunks, rows of its tiles.
KERNEL_DIM, KERNEL_CHUNK, KERNEL_TILE = 128, 64, 16
# Tables of the portable implementation that belong on the tensors' device.
_DEVICE_TABLES = ("chunk_start", "chunk_length", "chunk_source", "chunk_target")
# Columns of DeltaPlan's `node`.
_KEPT_SOURCE, _KEPT_TARGET = 5, 6
_NONE_KEPT = np.empty((0, 2), dtype=np.int64)


class DeltaPlan(NamedTuple):
    """A forest's nodes, cut into chunks twice: for the portable implementation and for the CUDA kernel.

    B chunks stand in the order they can run, in steps of independent chunks. K nodes, parents before children, have
    D chunks of at most 64 rows and T tiles of at most 16 rows; entries past the last are padding if they have no
    rows, and T may be larger, so that a captured graph serves every forest that fits. What stands before `node` is
    for the portable implementation, and empty or 0 in a plan for the kernel alone.

    chunk_start, chunk_length: [B] int32, the packed rows of each chunk (at most chunk_size; a node's rows are cut
        from its first row on).
    chunk_source: [B] int32, state slot a chunk starts from, -1 for zeros.
    chunk_target: [B] int32, state slot a chunk leaves its final state in, -1 where nobody reads it.
    step_start: [steps + 1] int32 on the CPU; chunks step_start[i]:step_start[i + 1] depend on earlier steps only.
    step_kept: [steps] int32 on the CPU; the first step_kept[i] chunks of a step have a target, the rest none.
    slots: number of state slots.
    chunk_size: longest chunk.
    kept_source: [n, 2] int32 on the CPU, chunks that start from a kept state, and its slot.
    kept_target: [m, 2] int32 on the CPU, state slots that are kept when all chunks have run, and where: -1 is nowhere.
    node: [K, 8] int32, a node's first row, its number of rows, the node slot it starts from and the one it leaves
        its final state in, both -1 where there is none, its first tile, the kept slot it starts from plus 1 and the
        one it also leaves its final state in plus 1, both 0 where there is none, and 0.
    node_chunk: [D, 4] int32, the first row, number of rows and first tile of a node's chunk, and 0.
    node_tiles: T. node_slots: number of node slots.
    """

    chunk_start: torch.Tensor
    chunk_length: torch.Tensor
    chunk_source: torch.Tensor
    chunk_target: torch.Tensor
    step_start: torch.Tensor
    step_kept: torch.Tensor
    slots: int
    chunk_size: int
    kept_source: torch.Tensor
    kept_target: torch.Tensor
    node: torch.Tensor
    node_chunk: torch.Tensor
    node_tiles: int
    node_slots: int

    def keeping(self, node: np.ndarray, kept_slot: np.ndarray) -> DeltaPlan:
        """The same plan on the CPU with other slots for what is kept; the tables of this one stay as they are.

        node: [m], the nodes it was planned with to keep, in that order. kept_slot: [m], where, -1 for nowhere.
        """
        changed, kept_target = self.node.clone(), self.kept_target.clone()
        changed[torch.from_numpy(node), _KEPT_TARGET] = torch.from_numpy(kept_slot + 1).int()
        if len(kept_target):
            kept_target[:, 1] = torch.from_numpy(kept_slot)
        return self._replace(node=changed, kept_target=kept_target)


def plan_delta_rule(
    node_start: np.ndarray,
    node_length: np.ndarray,
    node_parent: np.ndarray,
    chunk_size: int | None,
    device: torch.device,
    kept_source: np.ndarray = _NONE_KEPT,
    kept_target: np.ndarray = _NONE_KEPT,
) -> DeltaPlan:
    """Cut nodes into chunks and order them; host code.

    node_start, node_length, node_parent: [K] integers, parents before children, -1 for a root.
    chunk_size: longest chunk of the portable implementation, at least 1; None plans for the CUDA kernel alone.
    kept_source: [n, 2] integers, roots with rows that start from a kept state instead of zeros, and its slot.
    kept_target: [m, 2] integers, nodes with rows whose final state is kept, and its slot, -1 for nowhere
        (`DeltaPlan.keeping` says later where). No such slot may be another's, or one that a root starts from.
    """
    has_child = np.zeros(len(node_start), dtype=bool)
    has_child[node_parent[node_parent >= 0]] = True
    if chunk_size is None:
        none = torch.zeros(0, dtype=torch.int32)
        portable: dict[str, Any] = dict.fromkeys(_DEVICE_TABLES, none.to(device))
        portable |= {"step_start": none, "step_kept": none, "slots": 0, "chunk_size": 0}
        portable |= dict.fromkeys(("kept_source", "kept_target"), none.view(0, 2))
    else:
        portable = _plan_portable(
            node_start, node_length, node_parent, has_child, chunk_size, device, kept_source, kept_target
        )
    kernel = _plan_kernel(node_start, node_length, node_parent, has_child, device, kept_source, kept_target)
    return DeltaPlan(**portable, **kernel)


def _plan_portable(
    node_start: np.ndarray,
    node_length: np.ndarray,
    node_parent: np.ndarray,
    has_child: np.ndarray,
    chunk_size: int,
    device: torch.device,
    kept_source: np.ndarray,
    kept_target: np.ndarray,
) -> dict[str, Any]:
    """The fields of DeltaPlan that the portable implementation reads."""
    nodes = len(node_start)
    chunks = -(-node_length // chunk_size)
    first_step = np.zeros(nodes, dtype=np.int64)
    for child, parent in enumerate(node_parent):
        if parent >= 0:
            first_step[child] = first_step[parent] + chunks[parent]
    keeps_state = has_child | (chunks > 1)
    is_kept = np.zeros(nodes, dtype=bool)
    is_kept[kept_target[:, 0]] = True
    keeps_state |= is_kept
    slot = np.where(keeps_state, np.cumsum(keeps_state) - 1, -1)

    node = np.repeat(np.arange(nodes), chunks)
    index = np.arange(len(node)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    parent_slot = np.where(node_parent >= 0, slot[node_parent], -1)
    source = np.where(index > 0, slot[node], parent_slot[node])
    last = index == chunks[node] - 1
    target = np.where(last & ~(has_child | is_kept)[node], -1, slot[node])
    step = first_step[node] + index
    steps = int(step.max()) + 1
    order = np.lexsort((target < 0, step))

    def count(values: np.ndarray) -> np.ndarray:
        return np.bincount(values, minlength=steps).astype(np.int32)

    start, length = node_start[node] + index * chunk_size, node_length[node] - index * chunk_size
    tables = (start, np.minimum(length, chunk_size), source, target)
    fields: dict[str, Any] = {
        name: torch.from_numpy(table[order].astype(np.int32)).to(device)
        for name, table in zip(_DEVICE_TABLES, tables, strict=True)
    }
    fields["step_start"] = torch.from_numpy(np.concatenate([[0], np.cumsum(count(step))]).astype(np.int32))
    fields["step_kept"] = torch.from_numpy(count(step[target >= 0]))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    first_chunk = np.cumsum(chunks) - chunks
    for name, chosen, of_node in (
        ("kept_source", kept_source, place[first_chunk[kept_source[:, 0]]]),
        ("kept_target", kept_target, slot[kept_target[:, 0]]),
    ):
        fields[name] = torch.from_numpy(np.stack([of_node, chosen[:, 1]], axis=1).astype(np.int32))
    return fields | {"slots": int(keeps_state.sum()), "chunk_size": chunk_size}


def _plan_kernel(
    node_start: np.ndarray,
    node_length: np.ndarray,
    node_parent: np.ndarray,
    has_child: np.ndarray,
    device: torch.device,
    kept_source: np.ndarray,
    kept_target: np.ndarray,
) -> dict[str, Any]:
    """The fields of DeltaPlan that the CUDA kernel reads."""
    tiles = -(-node_length // KERNEL_TILE)
    first_tile = np.cumsum(tiles) - tiles
    slot = np.where(has_child, np.cumsum(has_child) - 1, -1)
    node = np.zeros((len(tiles), 8), dtype=np.int32)
    node[:, 0], node[:, 1], node[:, 3], node[:, 4] = node_start, node_length, slot, first_tile
    node[:, 2] = np.where(node_parent >= 0, slot[node_parent], -1)
    node[kept_source[:, 0], _KEPT_SOURCE] = kept_source[:, 1] + 1
    node[kept_target[:, 0], _KEPT_TARGET] = kept_target[:, 1] + 1

    chunks = -(-node_length // KERNEL_CHUNK)
    owner = np.repeat(np.arange(len(chunks)), chunks)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    chunk = np.zeros((len(owner), 4), dtype=np.int32)
    chunk[:, 0] = node_start[owner] + index * KERNEL_CHUNK
    chunk[:, 1] = np.minimum(node_length[owner] - index * KERNEL_CHUNK, KERNEL_CHUNK)
    chunk[:, 2] = first_tile[owner] + index * (KERNEL_CHUNK // KERNEL_TILE)
    return {
        "node": torch.from_numpy(node).to(device),
        "node_chunk": torch.from_numpy(chunk).to(device),
        "node_tiles": int(tiles.sum()),
        "node_slots": int(has_child.sum()),
    }


def delta_rule_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    node_start: np.ndarray,
    node_length: np.ndarray,
    node_parent: np.ndarray,
    chunk_size: int = 64,
    kept_source: np.ndarray = _NONE_KEPT,
    kept_target: np.ndarray = _NONE_KEPT,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """The readable twin of :func:`delta_rule`, node by node and chunk by chunk.

    In bfloat16 it rounds where FLA's chunked path rounds (fla-core 0.5.2: ``chunk_scaled_dot_kkt``, ``solve_tril``,
    ``wy_fast``, ``chunk_delta_h``, ``chunk_o``): the inverse, w, u, v_new, the state entering a product, the
    attention weights and the output; in float32 nothing rounds.
    """
    dtype, groups = q.dtype, v.shape[1] // q.shape[1]
    scale = q.shape[2] ** -0.5

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    # [heads, rows, dim] in float32, key heads repeated for their value heads.
    q, k = (x.float().repeat_interleave(groups, dim=1).transpose(0, 1) for x in (q, k))
    values, decay, write = v.float().transpose(0, 1), g.t(), beta.t().unsqueeze(-1)
    output = torch.empty_like(values)
    source, target = (dict(table.tolist()) for table in (kept_source, kept_target))
    states: list[torch.Tensor] = []
    for node, (start, length, parent) in enumerate(
        zip(node_start.tolist(), node_length.tolist(), node_parent.tolist(), strict=True)
    ):
        state = states[parent] if parent >= 0 else q.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        if node in source:
            assert kept is not None
            state = kept[source[node]].transpose(1, 2)
        for first in range(start, start + length, chunk_size):
            rows = slice(first, min(first + chunk_size, start + length))
            qc, kc, vc, bc = q[:, rows], k[:, rows], values[:, rows], write[:, rows]
            cumulative = decay[:, rows].cumsum(-1)
            ratio = torch.exp(cumulative[:, :, None] - cumulative[:, None, :]).tril()
            inside = (bc * (kc @ kc.transpose(1, 2)) * ratio).tril(-1)
            identity = torch.eye(inside.shape[1], dtype=torch.float32, device=q.device)
            inverse = rounded(torch.linalg.inv(identity + inside))
            since_start = torch.exp(cumulative).unsqueeze(-1)
            u = rounded(inverse @ rounded(vc * bc))
            w = rounded(inverse @ rounded(rounded(kc * bc) * since_start))
            v_new = u - w @ rounded(state)
            weights = rounded(((qc @ kc.transpose(1, 2)) * ratio).tril())
            output[:, rows] = scale * (since_start * (qc @ rounded(state)) + weights @ rounded(v_new))
            to_end = torch.exp(cumulative[:, -1:] - cumulative).unsqueeze(-1)
            state = torch.exp(cumulative[:, -1])[:, None, None] * state + kc.transpose(1, 2) @ rounded(
                v_new * to_end
            )
        states.append(state)
        if target.get(node, -1) >= 0:
            assert kept is not None
            kept[target[node]] = state.transpose(1, 2)
    return output.transpose(0, 1).to(dtype)


def _portable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_start: torch.Tensor,
    chunk_length: torch.Tensor,
    chunk_source: torch.Tensor,
    chunk_target: torch.Tensor,
    step_start: torch.Tensor,
    step_kept: torch.Tensor,
    slots: int,
    chunk_size: int,
    kept_source: torch.Tensor,
    kept_target: torch.Tensor,
    node: torch.Tensor,
    node_chunk: torch.Tensor,
    node_tiles: int,
    node_slots: int,
    kept: torch.Tensor | None,
) -> torch.Tensor:
    if not chunk_size:
        raise ValueError(
            "this plan is for the CUDA kernel alone: plan_delta_rule with a chunk_size makes one for both"
        )
    if kept is None:
        if len(kept_source) + len(kept_target):
            raise ValueError("this plan starts from or keeps states, and there is no tensor of kept states")
        kept = g.new_empty(0, *v.shape[1:], q.shape[2])
    elif kept.dtype is not torch.float32 or kept.shape[1:] != (*v.shape[1:], q.shape[2]):
        wanted = ["slots", *v.shape[1:], q.shape[2]]
        raise ValueError(f"kept must be float32 of shape {wanted}, it is {kept.dtype} {list(kept.shape)}")
    rows, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[1:]
    groups, scale = value_heads // key_heads, key_dim**-0.5
    offset = torch.arange(chunk_size, device=q.device)
    inside = offset < chunk_length[:, None]
    row = torch.where(inside, chunk_start[:, None] + offset, rows)
    flat = row.flatten()

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[N, heads(, dim)] to [B, heads, chunk(, dim)] float32, zeros past a chunk's end."""
        padded = torch.zeros(rows + 1, *x.shape[1:], dtype=torch.float32, device=x.device)
        padded[:rows] = x
        return padded.index_select(0, flat).view(-1, chunk_size, *x.shape[1:]).transpose(1, 2).contiguous()

    def grouped(x: torch.Tensor) -> torch.Tensor:
        """[B, value heads, ...] seen as [B, key heads, group, ...]."""
        return x.view(x.shape[0], key_heads, groups, *x.shape[2:])

    # State-independent work of every chunk at once.
    qc, kc, vc = chunked(q).unsqueeze(2), chunked(k).unsqueeze(2), grouped(chunked(v))
    cumulative = grouped(chunked(g)).cumsum(-1)
    write = grouped(chunked(beta)).unsqueeze(-1)
    ratio = (cumulative.unsqueeze(-1) - cumulative.unsqueeze(-2)).tril_().exp_()
    since_start = cumulative.exp().unsqueeze(-1)
    to_end = (cumulative[..., -1:] - cumulative).exp().unsqueeze(-1)
    whole = since_start[..., -1:, :]
    k_t = kc.transpose(-1, -2)
    lower = (write * ratio).mul_(kc @ k_t)
    known = torch.cat([write * vc, write * since_start * kc], dim=-1)
    # solve_triangular reads below the diagonal only and takes the diagonal as ones.
    solved = torch.linalg.solve_triangular(lower, known, upper=False, unitriangular=True)
    u, w = solved[..., :value_dim], solved[..., value_dim:]
    weights = ratio.mul_(qc @ k_t).tril_()
    k_to_end = (kc * to_end).transpose(-1, -2)
    q_since = qc * since_start

    # The recurrence, one step of independent chunks after another.
    states = q.new_zeros(slots + 1, key_heads, groups, key_dim, value_dim, dtype=torch.float32)
    output = torch.empty_like(u)
    source = torch.where(chunk_source < 0, slots, chunk_source)
    bounds = step_start.tolist()
    for first, end, left in zip(bounds[:-1], bounds[1:], step_kept.tolist(), strict=True):
        state = states.index_select(0, source[first:end])
        if first == 0:
            # Roots begin in the first step.
            for chunk, slot in kept_source.tolist():
                state[chunk] = kept[slot].transpose(1, 2).unflatten(0, (key_heads, groups))
        v_new = u[first:end] - w[first:end] @ state
        output[first:end] = q_since[first:end] @ state + weights[first:end] @ v_new
        if left:
            keep = slice(first, first + left)
            after = whole[keep] * state[:left] + k_to_end[keep] @ v_new[:left]
            states.index_copy_(0, chunk_target[keep].long(), after)
    for at, slot in kept_target.tolist():
        if slot >= 0:
            kept[slot] = states[at].flatten(0, 1).transpose(1, 2)
    by_row = output.mul_(scale).view(-1, value_heads, chunk_size, value_dim).transpose(1, 2)
    result = v.new_empty(rows, value_heads, value_dim)
    result[row[inside].long()] = by_row[inside].to(v.dtype)
    return result


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_start: torch.Tensor,
    chunk_length: torch.Tensor,
    chunk_source: torch.Tensor,
    chunk_target: torch.Tensor,
    step_start: torch.Tensor,
    step_kept: torch.Tensor,
    slots: int,
    chunk_size: int,
    kept_source: torch.Tensor,
    kept_target: torch.Tensor,
    node: torch.Tensor,
    node_chunk: torch.Tensor,
    node_tiles: int,
    node_slots: int,
    kept: torch.Tensor | None,
) -> torch.Tensor:
    return v.new_empty(v.shape)


def _kernel_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> bool:
    """Whether the CUDA kernel takes these heads; all others run the portable implementation."""
    return q.shape[-1] == v.shape[-1] == KERNEL_DIM


_op = define(
    "delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor chunk_start, Tensor chunk_length, "
    "Tensor chunk_source, Tensor chunk_target, Tensor step_start, Tensor step_kept, int slots, int chunk_size, "
    "Tensor kept_source, Tensor kept_target, Tensor node, Tensor node_chunk, int node_tiles, int node_slots, "
    "Tensor(a!)? kept) -> Tensor",
    portable=_portable,
    fake=_fake,
)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    plan: DeltaPlan,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per value head, along every path: ``S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q / sqrt(K)``.

    q, k: [N, H, K] model dtype (bfloat16 or float32), L2-normalised; value head h uses key head h // (HV / H).
    v: [N, HV, V] model dtype.
    g: [N, HV] float32, natural logarithm of the decay, at most 0.
    beta: [N, HV] float32, write strength.
    plan: the forest's chunks from :func:`plan_delta_rule`.
    kept: [slots, HV, V, K] float32, transposed states that outlive the call; needed where the plan starts from or
        keeps some. The slots it keeps states in are written in place.

    Returns o [N, HV, V] of the model dtype. A node starts from its parent's final state, a root from zeros or from
    a kept state; states are float32. The portable implementation is float32 inside and rounds the output once.
    bfloat16 on CUDA with K = V = 128 runs the kernel of csrc/delta_rule.cuh, which rounds where
    :func:`delta_rule_ref` does with chunks of 64 rows; other heads run the portable implementation. Rows of no node
    are not written. Source: Gated Delta Networks (arXiv 2412.06464) in the chunked form of arXiv 2406.06484.
    """
    return _op(q, k, v, g, beta, *plan, kept)
