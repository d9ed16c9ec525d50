import numpy as np
import pytest
import torch
from comparison import assert_close, relative_l2
from forests import TREES, Tree, split_sequence
from op_inputs import DECAYS, exact_delta_rule
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from openjev_fast_plugin.ops import delta_rule, delta_rule_ref, plan_delta_rule

CPU = torch.device("cpu")


def inputs(
    rows: int, decay: str = "slow", key_heads: int = 2, groups: int = 2, dim: int = 16
) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    q, k = torch.nn.functional.normalize(torch.randn(2, rows, key_heads, dim), dim=-1)
    v = torch.randn(rows, key_heads * groups, dim)
    low, high = DECAYS[decay]
    g = -torch.empty(rows, key_heads * groups).uniform_(low, high)
    return [q, k, v, g, torch.rand(rows, key_heads * groups)]


def packed(given: list[torch.Tensor], tree: Tree, chunk_size: int) -> torch.Tensor:
    return delta_rule(*given, plan_delta_rule(*tree.nodes, chunk_size, CPU))


def recurrence(given: list[torch.Tensor]) -> torch.Tensor:
    """Token by token in float64; one sequence, [N, HV, V]."""
    return exact_delta_rule(given, *Tree.of((len(given[0]), -1)).nodes)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_reference_and_op_follow_the_recurrence(rows, decay):
    given = inputs(rows, decay)
    tree = Tree.of((rows, -1))
    expected = recurrence(given)
    for chunk_size in (16, 64):
        found = {
            "reference": delta_rule_ref(*given, *tree.nodes, chunk_size),
            "op": packed(given, tree, chunk_size),
        }
        for what, output in found.items():
            # float32 sums over up to 200 rows against float64.
            assert_close(output, expected, rtol=1e-4, atol=2e-5, what=f"{what}, chunk {chunk_size}")


def test_recurrence_and_reference_are_the_upstream_functions():
    given = inputs(70)
    q, k, v, g, beta = (x[None] for x in given)
    q, k = (x.repeat_interleave(2, dim=2) for x in (q, k))
    for upstream in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        expected = upstream(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False)[0][0]
        assert_close(delta_rule_ref(*given, *Tree.of((70, -1)).nodes), expected, rtol=1e-4, atol=2e-5)
        assert_close(recurrence(given), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("at", range(1, 200))
def test_a_split_at_any_position_changes_nothing(at):
    given = inputs(200)
    whole = recurrence(given)
    assert_close(packed(given, split_sequence(200, at), 64), whole, rtol=1e-4, atol=2e-5)
    if at % 9 == 1:
        assert_close(delta_rule_ref(*given, *split_sequence(200, at).nodes), whole, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_every_path_of_a_tree_is_its_own_sequence(name, chunk_size):
    tree = TREES[name]
    given = inputs(tree.rows)
    found = packed(given, tree, chunk_size)
    assert_close(found, delta_rule_ref(*given, *tree.nodes, chunk_size), rtol=1e-4, atol=2e-5)
    leaves = set(range(len(tree.length))) - set(tree.parent.tolist())
    for node in sorted(leaves)[:: max(1, len(leaves) // 8)]:
        path = tree.path(node)
        assert_close(
            found[path], recurrence([x[path] for x in given]), rtol=1e-4, atol=2e-5, what=f"node {node}"
        )


@pytest.mark.parametrize("groups, key_heads, dim", [(1, 1, 8), (3, 2, 24), (4, 1, 128)])
def test_grouped_heads(groups, key_heads, dim):
    given = inputs(90, key_heads=key_heads, groups=groups, dim=dim)
    tree = Tree.of((50, -1), (20, 0), (20, 0))
    found = packed(given, tree, 32)
    assert_close(found[tree.path(2)], recurrence([x[tree.path(2)] for x in given]), rtol=1e-4, atol=2e-5)


def test_bfloat16_is_closer_to_the_recurrence_than_the_reference_with_its_roundings():
    given = [x.bfloat16() if i < 3 else x for i, x in enumerate(inputs(200))]
    expected = recurrence([x.float() for x in given])
    tree = split_sequence(200, 77)
    op, reference = packed(given, tree, 64), delta_rule_ref(*given, *tree.nodes)
    assert op.dtype == reference.dtype == torch.bfloat16
    # bfloat16 operands of products: between 1e-3 and 1e-2; the op rounds its output only.
    assert relative_l2(op, expected) < relative_l2(reference, expected) < 1e-2


def test_plan_keeps_states_only_where_somebody_reads_them():
    plan = plan_delta_rule(*TREES["fan_out_255"].nodes, 64, CPU)
    assert plan.slots == 1
    assert plan.step_start.tolist() == [0, 1, 256]
    assert plan.step_kept.tolist() == [1, 0]
    assert plan.chunk_source.tolist() == [-1, *[0] * 255]
    assert sorted(plan.chunk_length.tolist()) == sorted(TREES["fan_out_255"].length.tolist())


def test_plan_runs_chunks_after_what_they_read():
    tree = TREES["chunk_edges"]
    plan = plan_delta_rule(*tree.nodes, 64, CPU)
    written: set[int] = set()
    for first, end in zip(plan.step_start.tolist(), plan.step_start.tolist()[1:], strict=False):
        sources = set(plan.chunk_source[first:end].tolist()) - {-1}
        assert sources <= written
        written |= set(plan.chunk_target[first:end].tolist()) - {-1}
    covered = np.concatenate(
        [
            np.arange(start, start + length)
            for start, length in zip(plan.chunk_start.tolist(), plan.chunk_length.tolist(), strict=True)
        ]
    )
    assert sorted(covered.tolist()) == list(range(tree.rows))


def test_plan_of_the_kernel_hands_states_from_node_to_node():
    tree = TREES["two_roots"]
    plan = plan_delta_rule(*tree.nodes, 64, CPU)
    expected = [[0, 5, -1, 0, 0], [5, 70, -1, 1, 1], [75, 3, 1, -1, 6], [78, 2, 0, -1, 7]]
    assert plan.node.tolist() == [[*entry, 0, 0, 0] for entry in expected]
    assert plan.node_chunk.tolist() == [
        [0, 5, 0, 0],
        [5, 64, 1, 0],
        [69, 6, 5, 0],
        [75, 3, 6, 0],
        [78, 2, 7, 0],
    ]
    assert (plan.node_tiles, plan.node_slots) == (8, 2)


def test_nodes_without_rows_are_padding():
    tree = TREES["example"]
    given = inputs(tree.rows)
    padded = tuple(
        np.concatenate([x, filler]) for x, filler in zip(tree.nodes, ([0, 0], [0, 0], [-1, -1]), strict=True)
    )
    expected, plan = packed(given, tree, 16), plan_delta_rule(*padded, 16, CPU)
    assert torch.equal(delta_rule(*given, plan), expected)
    unpadded = plan_delta_rule(*tree.nodes, 16, CPU)
    assert torch.equal(plan.node_chunk, unpadded.node_chunk) and len(plan.node) == len(unpadded.node) + 2
    assert (plan.node_tiles, plan.node_slots) == (unpadded.node_tiles, unpadded.node_slots)


# States that are kept


def kept_states(slots: int, key_heads: int = 2, groups: int = 2, dim: int = 16) -> torch.Tensor:
    """Random transposed states [slots, HV, V, K], none of them of any sequence."""
    draw = torch.Generator().manual_seed(slots)
    return torch.randn(slots, key_heads * groups, dim, dim, generator=draw)


def pairs(*of: tuple[int, int]) -> np.ndarray:
    return np.array(of, dtype=np.int64).reshape(-1, 2)


# A sequence that keeps its state, roots beside it that start from zeros, from a kept state, or do both.
MIXED = Tree.of((70, -1), (3, -1), (20, -1), (130, -1), (5, 0), (9, 2), (2, 3), (1, 3))
SOURCE, TARGET = pairs((2, 3), (3, 0)), pairs((0, 1), (3, 4))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, 200])
def test_a_sequence_goes_on_from_a_kept_state(rows, decay):
    first, slot = 37, 2
    given = inputs(first + rows, decay)
    whole = recurrence(given)
    for name in ("op", "reference"):
        kept = kept_states(4)
        others = [kept[at].clone() for at in (0, 1, 3)]

        def run(part: list[torch.Tensor], source: np.ndarray, target: np.ndarray, kept=kept, name=name):
            tree = Tree.of((len(part[0]), -1))
            if name == "reference":
                return delta_rule_ref(*part, *tree.nodes, 64, source, target, kept)
            return delta_rule(*part, plan_delta_rule(*tree.nodes, 64, CPU, source, target), kept)

        begun = run([x[:first] for x in given], pairs(), pairs((0, slot)))
        rest = run([x[first:] for x in given], pairs((0, slot)), pairs((0, slot - 2)))
        assert_close(torch.cat([begun, rest]), whole, rtol=1e-4, atol=2e-5, what=name)
        assert torch.equal(kept[1], others[1]) and torch.equal(kept[3], others[2])
        assert not torch.equal(kept[0], others[0])


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_roots_with_and_without_a_kept_state_in_one_forest(chunk_size):
    given, kept = inputs(MIXED.rows), kept_states(5)
    expected = kept.clone()
    plan = plan_delta_rule(*MIXED.nodes, chunk_size, CPU, SOURCE, TARGET)
    found = delta_rule(*given, plan, kept)
    wanted = delta_rule_ref(*given, *MIXED.nodes, chunk_size, SOURCE, TARGET, expected)
    assert_close(found, wanted, rtol=1e-4, atol=2e-5)
    assert_close(kept, expected, rtol=1e-4, atol=2e-5)
    fresh = kept_states(5)
    assert [torch.equal(x, y) for x, y in zip(kept, fresh, strict=True)] == [True, False, True, True, False]
    # Without kept states the roots that start from one differ, and no others.
    without = delta_rule(*given, plan_delta_rule(*MIXED.nodes, chunk_size, CPU))
    for node, (start, length) in enumerate(zip(MIXED.start, MIXED.length, strict=True)):
        rows = slice(start, start + length)
        assert torch.equal(found[rows], without[rows]) == (node in (0, 1, 4)), node


def test_a_plan_says_later_where_a_state_is_kept():
    given = inputs(MIXED.rows)
    nowhere = plan_delta_rule(*MIXED.nodes, 64, CPU, SOURCE, pairs((0, -1), (3, -1)))
    planned = plan_delta_rule(*MIXED.nodes, 64, CPU, SOURCE, TARGET)
    later = nowhere.keeping(TARGET[:, 0], TARGET[:, 1])
    for name, table in planned._asdict().items():
        other = getattr(later, name)
        assert torch.equal(table, other) if isinstance(table, torch.Tensor) else table == other, name
    kept = kept_states(5)
    delta_rule(*given, nowhere, kept)
    assert torch.equal(kept, kept_states(5))


def test_the_kernels_table_names_kept_slots_plus_one():
    plan = plan_delta_rule(*MIXED.nodes, None, CPU, SOURCE, TARGET)
    assert plan.node[:, 5].tolist() == [0, 0, 4, 1, 0, 0, 0, 0]
    assert plan.node[:, 6].tolist() == [2, 0, 0, 5, 0, 0, 0, 0]
    assert not plan.kept_source.numel() and not plan.kept_target.numel()


def test_a_plan_that_keeps_states_needs_somewhere_to_keep_them():
    with pytest.raises(ValueError, match="there is no tensor of kept states"):
        delta_rule(*inputs(MIXED.rows), plan_delta_rule(*MIXED.nodes, 64, CPU, SOURCE, TARGET))
    plan = plan_delta_rule(*MIXED.nodes, 64, CPU, SOURCE, TARGET)
    for wrong in (kept_states(5)[:, :3], kept_states(5)[..., :-1], kept_states(5).double()):
        with pytest.raises(ValueError, match="kept must be float32 of shape"):
            delta_rule(*inputs(MIXED.rows), plan, wrong)
