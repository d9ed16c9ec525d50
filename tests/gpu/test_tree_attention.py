"""The CUDA kernel of tree_attention against exact attention over each query's gathered path.

Bound. Both our kernel and PyTorch's fused attention compute float32 softmax over bfloat16 products, so the
error of the pair (attention, gate) against float64 must be no larger than 1.05 times that of
scaled_dot_product_attention on the same gathered paths followed by the same gate. A relative L2 norm hides one
bad element, so no element may be further off than three units in the last place of its own value plus 2^-8 of
what its terms add up to without their signs: each softmax weight is rounded by at most half as much.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

# The parent folder is on the path through its conftest.py.
from comparison import bfloat16_ulp, relative_l2
from forests import TREES, Tree
from op_inputs import PROFILES, exact_attention
from op_inputs import tree_attention as tree_attention_inputs

from openjev_fast_plugin.ops import AttentionPlan, gate_mul, plan_attention, tree_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RATIO = 1.05
CUDA = torch.device("cuda")

# Query heads, key heads, head dim.
HEADS = {
    "27b": (24, 4, 256),
    "9b": (16, 4, 256),
    "2b": (8, 2, 256),
    "one_each": (3, 3, 128),
    "group_of_5": (10, 2, 64),
    # More packed rows than a block holds: a key head's queries are split.
    "one_key_head": (40, 1, 256),
}


def random_tree(seed: int) -> Tree:
    """Several roots, depth up to 6, nodes of 1 to 40 rows, ordered by level."""
    draw = np.random.default_rng(seed)
    nodes, levels = [(int(draw.integers(1, 130)), -1) for _ in range(int(draw.integers(1, 4)))], []
    levels.append(range(len(nodes)))
    for _ in range(int(draw.integers(1, 6))):
        parents = [parent for parent in levels[-1] for _ in range(int(draw.integers(0, 4)))]
        if not parents:
            break
        levels.append(range(len(nodes), len(nodes) + len(parents)))
        nodes += [(int(draw.integers(1, 41)), parent) for parent in parents]
    return Tree.of(*nodes)


CASES = {
    **TREES,
    "edges_1_15_16_17": Tree.of((1, -1), (15, 0), (16, 0), (17, 0), (1, 1), (1, 1), (17, 2), (15, 4)),
    "edges_127_128_129": Tree.of((127, -1), (128, -1), (129, -1), (1, 0), (129, 1), (127, 2), (128, 2)),
    "long_root": Tree.of((1030, -1), *[(21, 0)] * 7),
    **{f"random_{seed}": random_tree(seed) for seed in range(6)},
}


def inputs(queries: int, rows: int, heads: str = "27b", seed: int = 0) -> tuple:
    query_heads, kv_heads, dim = HEADS[heads]
    profile = replace(PROFILES["27b"], query_heads=query_heads, kv_heads=kv_heads, head_dim=dim)
    return tree_attention_inputs(profile, queries, rows, seed, CUDA.type)


def plan_of(tree: Tree, query_row: np.ndarray, **options) -> AttentionPlan:
    return plan_attention(*tree.nodes, query_row, tree.node_of_row[query_row], CUDA, **options)


def run(given: tuple, plan: AttentionPlan) -> torch.Tensor:
    """The op's output, computed into memory that held NaN."""
    tree_attention(*given, plan).fill_(torch.nan)
    # The allocator hands the freed, NaN-filled block to the second call.
    return tree_attention(*given, plan)


def gathered(
    given: tuple, tree: Tree, query_row: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention times the gate, path by path: in float64, in float64 of the values' magnitudes, PyTorch's."""
    q, k, v, gate, scale = given
    theirs, node_of_query = torch.empty_like(q), tree.node_of_row[query_row]
    exact, magnitude = exact_attention(given, *tree.nodes, query_row, node_of_query)
    for node in np.unique(node_of_query):
        path = torch.from_numpy(tree.path(int(node))).to(CUDA)
        mine = torch.from_numpy(np.flatnonzero(node_of_query == node)).to(CUDA)
        depth = torch.from_numpy(query_row).to(CUDA)[mine] - path[-1] + len(path) - 1
        keys, values = k[path].transpose(0, 1), v[path].transpose(0, 1)
        # Queries at their places in the path, so that the causal kernels run.
        padded = torch.zeros(q.shape[1], len(path), q.shape[2], dtype=q.dtype, device=CUDA)
        padded[:, depth] = q[mine].transpose(0, 1)
        out = F.scaled_dot_product_attention(
            padded[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=True
        )
        theirs[mine] = out[0, :, depth].transpose(0, 1)
    return exact, magnitude, gate_mul(theirs, gate)


def check(given: tuple, tree: Tree, query_row: np.ndarray, found: torch.Tensor) -> None:
    exact, magnitude, theirs = gathered(given, tree, query_row)
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    assert torch.isfinite(found).all()
    ours, bound = relative_l2(found, exact), RATIO * relative_l2(theirs, exact)
    assert ours <= bound, f"relative L2 {ours:.3e}, bound {bound:.3e}"
    share = (found.double() - exact).abs() / (3 * bfloat16_ulp(exact) + 2**-8 * magnitude)
    assert share.max().item() <= 1


@pytest.mark.parametrize("name", CASES)
def test_every_row_as_query(name):
    tree = CASES[name]
    rows = np.arange(tree.rows)
    given = inputs(tree.rows, tree.rows)
    check(given, tree, rows, run(given, plan_of(tree, rows)))


@pytest.mark.parametrize("name", CASES)
def test_some_rows_as_queries(name):
    tree = CASES[name]
    rows = np.unique(np.concatenate([(tree.start + tree.length - 1)[-70:], tree.start[:3]]))
    given = inputs(len(rows), tree.rows)
    check(given, tree, rows, run(given, plan_of(tree, rows)))


@pytest.mark.parametrize("tile_queries", [1, 5, 8, 21, 32])
@pytest.mark.parametrize("heads", HEADS)
def test_heads_and_tiles(heads, tile_queries):
    tree = CASES["random_3"]
    rows = np.arange(tree.rows)
    given = inputs(tree.rows, tree.rows, heads)
    check(given, tree, rows, run(given, plan_of(tree, rows, tile_queries=tile_queries)))


def test_large_scores_do_not_overflow():
    tree = CASES["chunk_edges"]
    rows = np.arange(tree.rows)
    q, k, v, gate, scale = inputs(tree.rows, tree.rows)
    given = (30 * q, 30 * k, v, 50 * gate, scale)
    found = run(given, plan_of(tree, rows))
    exact, _, theirs = gathered(given, tree, rows)
    assert relative_l2(found, exact) <= RATIO * relative_l2(theirs, exact)


def test_two_runs_are_bit_equal():
    tree = CASES["long_root"]
    rows = np.arange(tree.rows)
    given, plan = inputs(tree.rows, tree.rows), plan_of(tree, rows)
    first = run(given, plan)
    assert all(torch.equal(first, run(given, plan)) for _ in range(5))


def test_rows_outside_every_path_change_nothing():
    tree = CASES["example"]
    rows = np.arange(tree.rows)
    q, k, v, gate, scale = inputs(tree.rows, tree.rows)
    plan = plan_of(tree, rows)
    expected = run((q, k, v, gate, scale), plan)
    # Kernels may read rows next to a path's: finite, as layouts keep them.
    padding = torch.full((5, *k.shape[1:]), 3e38, dtype=k.dtype, device=CUDA)
    found = run((q, torch.cat([k, padding]), torch.cat([v, padding]), gate, scale), plan)
    assert torch.equal(found, expected)


def test_padding_tiles_write_nothing():
    tree = CASES["example"]
    rows = np.arange(tree.rows)
    given, plan = inputs(tree.rows, tree.rows), plan_of(tree, rows)
    padded = plan._replace(tile=F.pad(plan.tile, (0, 0, 0, 9)))
    assert torch.equal(run(given, padded), run(given, plan))


def test_no_queries():
    tree = CASES["example"]
    given = inputs(0, tree.rows)
    assert tree_attention(*given, plan_of(tree, np.arange(0))).shape == (0, 24 * 256)


def test_graph_replay_equals_eager_with_changed_inputs_and_plans():
    trees = [
        Tree.of((40, -1), *[(20, 0)] * 8),
        Tree.of((100, -1), (20, 0), *[(10, 1)] * 8),
        Tree.of((200, -1)),
    ]
    rows = np.arange(200)
    plans = [plan_of(tree, rows) for tree in trees]
    ranges = max(len(plan.tile_range) for plan in plans)
    plans = [
        plan._replace(tile_range=F.pad(plan.tile_range, (0, 0, 0, ranges - len(plan.tile_range))))
        for plan in plans
    ]
    static = inputs(200, 200)
    captured = plans[0]._replace(tile=plans[0].tile.clone(), tile_range=plans[0].tile_range.clone())
    tree_attention(*static, captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = tree_attention(*static, captured)
    for seed, plan in enumerate(plans):
        for target, source in zip(static[:4], inputs(200, 200, seed=seed)[:4], strict=True):
            target.copy_(source)
        captured.tile.copy_(plan.tile)
        captured.tile_range.copy_(plan.tile_range)
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, tree_attention(*static, plan))


def test_other_head_dims_run_the_portable_implementation():
    tree = CASES["example"]
    rows = np.arange(tree.rows)
    q, k, v, gate, _ = inputs(tree.rows, tree.rows, "one_each")
    given = (q[..., :40].contiguous(), k[..., :40], v[..., :40], gate[..., :40], 0.2)
    exact, _, _ = gathered(given, tree, rows)
    assert relative_l2(tree_attention(*given, plan_of(tree, rows)), exact) < 1e-2


@pytest.mark.parametrize(
    "index, change, message",
    [
        (0, lambda x: x.half(), "q must be BFloat16, it is Half"),
        (1, lambda x: x[:, :, :128], r"k must have shape \[211, 4, 256\], it has \[211, 4, 128\]"),
        (2, lambda x: x[:-1], r"v must have shape \[211, 4, 256\], it has \[210, 4, 256\]"),
        (3, lambda x: x.cpu(), "gate must be on cuda:0 like the first tensor"),
        (4, lambda x: -x, "scale must be positive"),
    ],
)
def test_refusals_name_the_op_the_tensor_and_the_value(index, change, message):
    tree = TREES["example"]
    given = list(inputs(tree.rows, tree.rows))
    given[index] = change(given[index])
    with pytest.raises(RuntimeError, match=f"tree_attention: .*{message}"):
        tree_attention(*given, plan_of(tree, np.arange(tree.rows)))
