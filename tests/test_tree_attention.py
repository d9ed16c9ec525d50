import numpy as np
import pytest
import torch
from comparison import assert_close, relative_l2
from forests import TREES, Tree

from openjev_fast_plugin.ops import plan_attention, tree_attention, tree_attention_ref

CPU = torch.device("cpu")


def inputs(
    queries: int, rows: int, dtype: torch.dtype = torch.float32, heads: int = 4, kv: int = 2, dim: int = 16
):
    torch.manual_seed(rows)
    q = torch.randn(queries, heads, dim).to(dtype)
    k = torch.randn(rows, kv, dim).to(dtype)
    v = torch.randn(rows, 3 * kv * dim).to(dtype)[:, kv * dim : 2 * kv * dim].unflatten(1, (kv, dim))
    gate = torch.randn(queries, heads, 2 * dim).to(dtype)[..., dim:]
    return q, k, v, gate, dim**-0.5


def run(given, tree: Tree, query_row: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    query_node = tree.node_of_row[query_row]
    plan = plan_attention(*tree.nodes, query_row, query_node, CPU)
    return tree_attention(*given, plan), tree_attention_ref(*given, *tree.nodes, query_row, query_node)


def test_reference_is_the_upstream_attention_on_one_sequence():
    from transformers.models.qwen3_5.modeling_qwen3_5 import eager_attention_forward

    tree, dtype = Tree.of((37, -1)), torch.float32
    q, k, v, gate, scale = inputs(37, 37, dtype)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    batch = [x.transpose(0, 1)[None] for x in (q, k, v)]
    causal = torch.full((37, 37), -torch.inf).triu(1)[None, None]
    expected, _ = eager_attention_forward(module, *batch, causal, scaling=scale)
    rows = np.arange(37)
    found = tree_attention_ref(q, k, v, gate, scale, *tree.nodes, rows, tree.node_of_row)
    assert_close(found, expected[0].flatten(1) * gate.sigmoid().flatten(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TREES)
def test_every_row_sees_its_path_and_nothing_else(name):
    tree = TREES[name]
    rows = np.arange(tree.rows)
    given = inputs(len(rows), tree.rows)
    found, expected = run(given, tree, rows)
    assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_no_queries():
    tree, none = TREES["example"], np.arange(0)
    found, expected = run(inputs(0, tree.rows), tree, none)
    assert found.shape == expected.shape == (0, 64)
    assert plan_attention(*tree.nodes, none, none, CPU).tile.shape == (0, 4)


@pytest.mark.parametrize("name", TREES)
def test_some_rows_as_queries(name):
    tree = TREES[name]
    rows = np.unique(np.concatenate([(tree.start + tree.length - 1)[-40:], tree.start[:3]]))
    given = inputs(len(rows), tree.rows)
    found, expected = run(given, tree, rows)
    assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "nodes",
    [
        [(40, -1), (700, 0)],
        [(3, -1), (400, 0), (900, 0), (300, 0), (2, 2)],
        [(1, -1), *[(90, 0)] * 14],
    ],
    ids=["long_child", "long_siblings", "many_own_rows"],
)
def test_long_nodes_are_cut_into_blocks(nodes):
    tree = Tree.of(*nodes)
    rows = np.arange(tree.rows)
    plan = plan_attention(*tree.nodes, rows, tree.node_of_row, CPU)
    sizes = np.diff(plan.block_query.numpy())[1:]
    assert sizes.max() <= 256 and sizes.sum() + nodes[0][0] == tree.rows
    found, expected = run(inputs(len(rows), tree.rows), tree, rows)
    assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_far_apart_queries_are_cut_into_blocks():
    tree = Tree.of((1, -1), *[(90, 0)] * 14)
    rows = tree.start + tree.length - 1
    plan = plan_attention(*tree.nodes, rows, tree.node_of_row[rows], CPU)
    assert int((plan.block_own[:, 1] - plan.block_own[:, 0]).max()) in range(900, 1025)
    found, expected = run(inputs(len(rows), tree.rows), tree, rows)
    assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_bfloat16_rounds_output_gate_and_product():
    tree = TREES["example"]
    rows = np.arange(tree.rows)
    given = inputs(len(rows), tree.rows, torch.bfloat16)
    found, expected = run(given, tree, rows)
    assert found.dtype == torch.bfloat16
    # The CPU kernel rounds the softmax weights to bfloat16 before the second product.
    assert relative_l2(found, expected) < 5e-3
    exact, _ = run([x.float() if isinstance(x, torch.Tensor) else x for x in given], tree, rows)
    assert relative_l2(expected, exact) < 5e-3


def test_masks_stay_bounded_by_blocks_not_by_rows():
    tree = TREES["fan_out_255"]
    rows = np.arange(tree.rows)
    plan = plan_attention(*tree.nodes, rows, tree.node_of_row, CPU)
    own = plan.block_own[:, 1] - plan.block_own[:, 0]
    queries = plan.block_query.diff()
    assert tree.rows > 2000
    assert int(queries.max()) <= 256 and int(own.max()) <= 1024


def rows_by_tiles(plan, total: int) -> list[list[int]]:
    """The rows each query sees by the tables of the CUDA kernel."""
    rows, tile_range = plan.query_row.tolist(), plan.tile_range.tolist()
    seen: list[list[int]] = [[] for _ in range(total)]
    for first, queries, at, keys in plan.tile.tolist():
        for key in range(keys):
            while key >= tile_range[at][1]:
                at += 1
            row = key + tile_range[at][0]
            for query in range(queries):
                if tile_range[at][2] >> query & 1 and row <= rows[first + query]:
                    seen[first + query].append(row)
    return seen


@pytest.mark.parametrize("tile_queries", [1, 8, 21, 32])
@pytest.mark.parametrize("name", TREES)
def test_tiles_hold_each_path_once_and_in_order(name, tile_queries):
    tree = TREES[name]
    last_rows = np.unique(np.concatenate([(tree.start + tree.length - 1)[-40:], tree.start[:3]]))
    for rows in (np.arange(tree.rows), last_rows):
        nodes = tree.node_of_row[rows]
        plan = plan_attention(*tree.nodes, rows, nodes, CPU, tile_queries=tile_queries)
        assert plan.tile[:, 0].tolist() == list(range(0, len(rows), tile_queries))
        assert int(plan.tile[:, 1].sum()) == len(rows)
        paths = [tree.path(node) for node in range(len(tree.length))]
        expected = [paths[node][paths[node] <= row].tolist() for row, node in zip(rows, nodes, strict=True)]
        assert rows_by_tiles(plan, len(rows)) == expected


def test_tiles_hold_no_key_that_no_query_sees():
    tree = TREES["one_node_200"]
    rows = np.array([3, 150])
    plan = plan_attention(*tree.nodes, rows, tree.node_of_row[rows], CPU, tile_queries=1)
    assert plan.tile[:, 3].tolist() == [4, 151]


def test_a_run_of_rows_seen_alike_is_one_range():
    tree = Tree.of((10, -1), (20, 0), (30, 1))
    rows = np.arange(50, 58)
    plan = plan_attention(*tree.nodes, rows, tree.node_of_row[rows], CPU, tile_queries=8)
    assert plan.tile.tolist() == [[0, 8, 0, 58]]
    assert plan.tile_range.tolist() == [[0, 58, 255, 0]]


def test_keys_whose_rows_do_not_follow_on_start_at_a_multiple_of_8():
    tree = Tree.of((10, -1), (20, 0), (30, 0))
    rows = np.array([31, 32])
    plan = plan_attention(*tree.nodes, rows, tree.node_of_row[rows], CPU, tile_queries=2)
    assert plan.tile.tolist() == [[0, 2, 0, 19]]
    assert plan.tile_range.tolist() == [[0, 10, 3, 0], [0, 16, 0, 0], [14, 19, 3, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("few_queries, tile", [(0, 21), (199, 21), (200, 10), (201, 10)])
def test_up_to_few_queries_have_small_tiles(few_queries, tile):
    tree = TREES["one_node_200"]
    rows = np.arange(tree.rows)
    plan = plan_attention(*tree.nodes, rows, tree.node_of_row, CPU, few_queries=few_queries)
    assert plan.tile_queries == tile and plan.tile[0].tolist() == [0, tile, 0, tile]
    # Every one of them is planned, and what is said of the tile itself comes first.
    assert len(plan.tile) == -(-tree.rows // tile)
    given = plan_attention(*tree.nodes, rows, tree.node_of_row, CPU, 8, few_queries=few_queries)
    assert given.tile_queries == 8


@pytest.mark.parametrize("tile_queries", [0, 33])
def test_tile_sizes_out_of_range_are_refused(tile_queries):
    tree, rows = TREES["one_row"], np.arange(1)
    with pytest.raises(ValueError, match=f"tile_queries must be 1 to 32, it is {tile_queries}"):
        plan_attention(*tree.nodes, rows, rows, CPU, tile_queries=tile_queries)
