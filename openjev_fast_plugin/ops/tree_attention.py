"""Attention of packed rows over row ranges: ancestors in full, the own node causally, gated."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from openjev_fast_plugin.ops import _choices
from openjev_fast_plugin.ops._choices import Heads
from openjev_fast_plugin.ops._library import define

# Bounds of one block, so that its mask stays small whatever the forest: queries by own rows.
_BLOCK_QUERIES = 256
_BLOCK_OWN_ROWS = 1024

# Queries of one tile of the CUDA kernel, for few queries and for many: more tiles against more reuse of a key. How many
# are few depends on the device and the heads: `few_queries_for`.
SMALL_TILE, LARGE_TILE = 10, 21
# A tile's queries are the bits of an int32.
_MOST_TILE_QUERIES = 32
KERNEL_DIMS = (64, 128, 256)
# Keys of a tile whose rows do not follow on start at a multiple of this: the kernel for Hopper copies 8 rows.
_RUN_KEYS = 8
# The tables for the portable implementation in a plan for the kernel alone.
NO_BLOCKS = {
    "block_query": torch.zeros(0, dtype=torch.int32),
    "block_own": torch.zeros(0, 2, dtype=torch.int32),
    "block_range": torch.zeros(0, dtype=torch.int32),
    "range_rows": torch.zeros(0, 2, dtype=torch.int32),
}


class AttentionPlan(NamedTuple):
    """What each query sees, twice: in blocks for the portable implementation, in tiles for the CUDA kernel.

    M queries in B blocks of queries that share their ancestors, R ranges of keys; and in T tiles of consecutive
    queries, S ranges of keys. The tables on the CPU are for the portable implementation, and empty in a plan for the
    kernel alone.

    query_row: [M] int32, packed row of each query, ascending; a query sees no row after it.
    query_first: [M] int32, first row of the query's own node.
    block_query: [B + 1] int32 on the CPU, queries block_query[i]:block_query[i + 1] form a block.
    block_own: [B, 2] int32 on the CPU, rows [first, end) that hold the own nodes of a block's queries.
    block_range: [B + 1] int32 on the CPU, a block's ranges are block_range[i]:block_range[i + 1].
    range_rows: [R, 2] int32 on the CPU, rows [first, end) of an ancestor, seen by every query of the block.
    tile: [T, 4] int32, a tile's first query, number of queries, first range and number of keys. Its keys are the
        rows of its ranges, numbered from 0 in ascending order; where rows do not follow on, from a multiple of 8.
    tile_range: [S, 4] int32, what to add to the number of a key for its row, the number after the range's last
        key, the queries whose path holds the range as bits from the tile's first (none for the numbers skipped
        before a multiple of 8), and 0. S is a power of two: the last ranges may belong to no tile.
    tile_queries: queries of every tile but the last, at most 32.
    """

    query_row: torch.Tensor
    query_first: torch.Tensor
    block_query: torch.Tensor
    block_own: torch.Tensor
    block_range: torch.Tensor
    range_rows: torch.Tensor
    tile: torch.Tensor
    tile_range: torch.Tensor
    tile_queries: int


def tile_queries_for(queries: int, few_queries: int) -> int:
    """Queries of a tile, where up to few_queries are planned in small ones."""
    return SMALL_TILE if queries <= few_queries else LARGE_TILE


def few_queries_for(device: torch.device, heads: Heads) -> int:
    """The most queries to plan in small tiles on a device: what was measured there, else `default_few_queries`.

    0 where the kernel does not run: on another device than CUDA.
    """
    if device.type != "cuda":
        return 0
    choices = _choices.installed(device.index)
    found = None if choices is None else choices.few_queries.get(heads)
    return default_few_queries(multiprocessors_of(device), heads) if found is None else found


def default_few_queries(multiprocessors: int, heads: Heads) -> int:
    """The most queries whose small tiles run at once: a multiprocessor has one tile of one key head at a time."""
    return multiprocessors // heads.kv_heads * SMALL_TILE


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    """How many a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_attention(
    node_start: np.ndarray,
    node_length: np.ndarray,
    node_parent: np.ndarray,
    query_row: np.ndarray,
    query_node: np.ndarray,
    device: torch.device,
    tile_queries: int | None = None,
    portable: bool = True,
    few_queries: int = 0,
) -> AttentionPlan:
    """Group queries with common ancestors into bounded blocks, and consecutive queries into tiles; host code.

    node_start, node_length, node_parent: [K] integers, parents before children, -1 for a root.
    query_row, query_node: [M] integers, ascending rows and their nodes.
    tile_queries: queries of a tile, 1 to 32; where not given, what `tile_queries_for` says of few_queries.
    portable: False plans for the CUDA kernel alone.
    few_queries: the most queries that are planned in small tiles, for the kernel what `few_queries_for` says; the
        portable implementation reads no tiles, and large ones are fewer.
    """
    if tile_queries is None:
        tile_queries = tile_queries_for(len(query_row), few_queries)
    if not 1 <= tile_queries <= _MOST_TILE_QUERIES:
        raise ValueError(f"tile_queries must be 1 to {_MOST_TILE_QUERIES}, it is {tile_queries}")
    first_row = node_start[query_node]
    blocks = NO_BLOCKS
    if portable:
        blocks = _plan_blocks(node_start, node_length, node_parent, query_row, query_node, first_row)
    tile, tile_range = _plan_tiles(node_start, node_length, node_parent, query_row, query_node, tile_queries)
    return AttentionPlan(
        query_row=torch.from_numpy(query_row.astype(np.int32)).to(device),
        query_first=torch.from_numpy(first_row.astype(np.int32)).to(device),
        **blocks,
        tile=torch.from_numpy(tile).to(device),
        tile_range=torch.from_numpy(tile_range).to(device),
        tile_queries=tile_queries,
    )


def _plan_blocks(
    node_start: np.ndarray,
    node_length: np.ndarray,
    node_parent: np.ndarray,
    query_row: np.ndarray,
    query_node: np.ndarray,
    first_row: np.ndarray,
) -> dict[str, torch.Tensor]:
    """The tables `block_query`, `block_own`, `block_range` and `range_rows` of AttentionPlan."""
    ancestors: list[tuple[tuple[int, int], ...]] = []
    for start, length, parent in zip(
        node_start.tolist(), node_length.tolist(), node_parent.tolist(), strict=True
    ):
        above = ancestors[parent] if parent >= 0 else ()
        # A run of rows that continues the one above it is one range.
        if above and above[-1][1] == start:
            ancestors.append((*above[:-1], (above[-1][0], start + length)))
        else:
            ancestors.append((*above, (start, start + length)))

    block_query, block_own, block_range, range_rows = [0], [], [0], []
    rows, nodes, firsts = query_row.tolist(), query_node.tolist(), first_row.tolist()
    parents = node_parent.tolist()
    begin, total = 0, len(rows)
    while begin < total:
        parent = parents[nodes[begin]]
        own_first = firsts[begin]
        end = begin + 1
        if parent < 0:
            # A root has no ancestors: its queries run as one causal block of any length.
            while end < total and nodes[end] == nodes[begin]:
                end += 1
        else:
            while (
                end < total
                and end - begin < _BLOCK_QUERIES
                and parents[nodes[end]] == parent
                and (nodes[end] == nodes[begin] or rows[end] - own_first < _BLOCK_OWN_ROWS)
            ):
                end += 1
            range_rows.extend(ancestors[parent])
        block_query.append(end)
        block_own.append((own_first, rows[end - 1] + 1))
        block_range.append(len(range_rows))
        begin = end

    def table(values: list, *shape: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).reshape(*shape)

    return {
        "block_query": table(block_query, -1),
        "block_own": table(block_own, -1, 2),
        "block_range": table(block_range, -1),
        "range_rows": table(range_rows, -1, 2),
    }


def _plan_tiles(
    node_start: np.ndarray,
    node_length: np.ndarray,
    node_parent: np.ndarray,
    query_row: np.ndarray,
    query_node: np.ndarray,
    tile_queries: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The tables `tile` and `tile_range` of AttentionPlan."""
    starts, parents = node_start.tolist(), node_parent.tolist()
    ends = (node_start + node_length).tolist()
    total = len(query_row)
    # Runs of queries of one node, each cut where a tile ends.
    begins = np.zeros(total, dtype=bool)
    begins[::tile_queries] = True
    begins[1:] |= query_node[1:] != query_node[:-1]
    cuts = np.flatnonzero(begins).tolist()
    nodes = query_node[cuts].tolist()
    cuts.append(total)
    last_rows = query_row[np.array(cuts[1:], dtype=np.int64) - 1].tolist()
    run = 0
    tile: list[tuple[int, int, int, int]] = []
    tile_range: list[tuple[int, int, int, int]] = []
    for begin in range(0, total, tile_queries):
        end = min(begin + tile_queries, total)
        # Queries whose path holds a node, and the end of the node's rows that one of them sees.
        seen_by: dict[int, int] = {}
        seen_end: dict[int, int] = {}
        while cuts[run] < end:
            node = nodes[run]
            bits = (1 << cuts[run + 1] - begin) - (1 << cuts[run] - begin)
            seen_by[node] = seen_by.get(node, 0) | bits
            seen_end[node] = last_rows[run] + 1
            run += 1
            node = parents[node]
            while node >= 0:
                seen_by[node] = seen_by.get(node, 0) | bits
                seen_end[node] = ends[node]
                node = parents[node]
        keys, first_range = 0, len(tile_range)
        range_end = range_bits = 0
        # Nodes are numbered in the order of their rows.
        for node in sorted(seen_by):
            start, end_row, bits = starts[node], seen_end[node], seen_by[node]
            if keys and start == range_end and bits == range_bits:
                tile_range.pop()
            elif keys and start != range_end and keys % _RUN_KEYS:
                shift, keys = range_end - keys, keys + -keys % _RUN_KEYS
                tile_range.append((shift, keys, 0, 0))
            shift = start - keys
            keys += end_row - start
            tile_range.append((shift, keys, bits, 0))
            range_end, range_bits = end_row, bits
        tile.append((begin, end - begin, first_range, keys))
    padded = 1 << max(len(tile_range) - 1, 0).bit_length()
    tile_range.extend([(0, 0, 0, 0)] * (padded - len(tile_range)))
    # Bit 31 is the sign.
    ranges = np.array(tile_range, dtype=np.int64).reshape(-1, 4).astype(np.uint32).view(np.int32)
    return np.array(tile, dtype=np.int32).reshape(-1, 4), ranges


def tree_attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    scale: float,
    node_start: np.ndarray,
    node_length: np.ndarray,
    node_parent: np.ndarray,
    query_row: np.ndarray,
    query_node: np.ndarray,
) -> torch.Tensor:
    """The readable twin of :func:`tree_attention`, one query at a time over the rows gathered from its path."""
    groups, dtype = q.shape[1] // k.shape[1], q.dtype
    output = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for index, (row, node) in enumerate(zip(query_row.tolist(), query_node.tolist(), strict=True)):
        path = list(range(int(node_start[node]), row + 1))
        while node_parent[node] >= 0:
            node = int(node_parent[node])
            path = list(range(int(node_start[node]), int(node_start[node] + node_length[node]))) + path
        keys = k[path].float().repeat_interleave(groups, dim=1)
        values = v[path].float().repeat_interleave(groups, dim=1)
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q[index].float(), keys) * scale, dim=-1)
        output[index] = torch.einsum("hn,nhd->hd", weights, values)
    gates = torch.sigmoid(gate.float()).to(dtype).float()
    return (output.to(dtype).float() * gates).to(dtype).flatten(1)


def _portable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    scale: float,
    query_row: torch.Tensor,
    query_first: torch.Tensor,
    block_query: torch.Tensor,
    block_own: torch.Tensor,
    block_range: torch.Tensor,
    range_rows: torch.Tensor,
    tile: torch.Tensor,
    tile_range: torch.Tensor,
    tile_queries: int,
) -> torch.Tensor:
    if len(q) and not len(block_own):
        raise ValueError(
            "this plan is for the CUDA kernel alone: plan_attention without portable=False makes one for both"
        )
    queries = q.transpose(0, 1).unsqueeze(0)
    keys, values = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    output = torch.empty_like(q)
    bounds, owns, range_bounds = block_query.tolist(), block_own.tolist(), block_range.tolist()
    ranges = range_rows.tolist()
    for block, (own_first, own_end) in enumerate(owns):
        begin, end = bounds[block], bounds[block + 1]
        above = ranges[range_bounds[block] : range_bounds[block + 1]]
        whole_root = not above and end - begin == own_end - own_first
        mask = None
        if not whole_root:
            own = torch.arange(own_first, own_end, dtype=torch.int32, device=q.device)
            seen = (own >= query_first[begin:end, None]) & (own <= query_row[begin:end, None])
            shared = sum(last - first for first, last in above)
            mask = F.pad(seen, (shared, 0), value=True)
        spans = [*above, [own_first, own_end]]
        block_keys, block_values = (
            x[:, :, own_first:own_end] if not above else torch.cat([x[:, :, a:b] for a, b in spans], dim=2)
            for x in (keys, values)
        )
        out = F.scaled_dot_product_attention(
            queries[:, :, begin:end],
            block_keys,
            block_values,
            attn_mask=mask,
            is_causal=whole_root,
            scale=scale,
            enable_gqa=True,
        )
        output[begin:end] = out[0].transpose(0, 1)
    return output.mul_(torch.sigmoid(gate)).flatten(1)


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    scale: float,
    query_row: torch.Tensor,
    query_first: torch.Tensor,
    block_query: torch.Tensor,
    block_own: torch.Tensor,
    block_range: torch.Tensor,
    range_rows: torch.Tensor,
    tile: torch.Tensor,
    tile_range: torch.Tensor,
    tile_queries: int,
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def _kernel_takes(q: torch.Tensor, *_: object) -> bool:
    """Whether the CUDA kernel has an instance for these heads; others run the portable implementation."""
    return q.shape[-1] in KERNEL_DIMS


_op = define(
    "tree_attention(Tensor q, Tensor k, Tensor v, Tensor gate, float scale, Tensor query_row, Tensor query_first, "
    "Tensor block_query, Tensor block_own, Tensor block_range, Tensor range_rows, Tensor tile, Tensor tile_range, "
    "int tile_queries) -> Tensor",
    portable=_portable,
    fake=_fake,
)


def tree_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, scale: float, plan: AttentionPlan
) -> torch.Tensor:
    """``softmax(scale q k^T) v`` over each query's path, times ``sigmoid(gate)``.

    q: [M, HQ, D] model dtype (bfloat16 or float32), contiguous: the rows named by the plan.
    k: [N, HKV, D], v: [N, HKV, D] model dtype, every packed row, all finite; v's rows may be strided. Query head h
        uses key head h // (HQ / HKV).
    gate: [M, HQ, D] model dtype, rows and heads may be strided.
    scale: multiplies the dot products.
    plan: from :func:`plan_attention`; a query sees its ancestors' rows and its own node's rows up to itself.

    Returns [M, HQ * D] of the model dtype. Softmax is float32; the attention output is rounded, the sigmoid is
    rounded, their product is rounded: the points of ``Qwen3_5Attention.forward`` of Transformers 5.10.2. Memory
    grows with rows and nodes; no mask is larger than 256 queries by their ancestors and 1,024 own rows (a longer
    own node adds its own length).
    """
    return _op(q, k, v, gate, scale, *plan)
