import numpy as np
import pytest
import torch
from comparison import assert_close, relative_l2
from forests import TREES, Tree

from openjev_fast_plugin.ops import plan_attention, tree_attention, tree_attention_ref

CPU = torch.device("cpu")


def inputs(queries: int, rows: int, dtype: torch.dtype = torch.float32, heads: int = 4, kv: int = 2, dim: int = 16):
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
