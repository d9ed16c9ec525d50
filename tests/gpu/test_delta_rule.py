"""The CUDA kernel of delta_rule against its reference, against float64, and against FLA where it is installed.

Bounds. Kernel and reference round at the same places; float32 sums in another order flip a rounding now and then,
and a flip in the state is carried along, most where the decay is slow: a relative L2 norm of 2e-3 at most, and
2.5e-3 after thousands of slow rows, where the reference is 1.9e-3 away from itself with its sums in float64. That
norm hides one bad element, so no element is further off than 4 % of the largest. Against the recurrence in float64
bfloat16 products err by some 3e-3; the kernel's error is at most 1.05 times the reference's, and FLA's, pooled over
a set, and 1.10 times in one case.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

# The parent folder is on the path through its conftest.py.
from comparison import assert_close, relative_l2
from forests import TREES, Tree, split_sequence
from op_inputs import DECAYS, PROFILES, exact_delta_rule
from op_inputs import delta_rule as delta_rule_inputs

from openjev_fast_plugin.ops import DeltaPlan, delta_rule, delta_rule_ref, plan_delta_rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
CHUNK = 64
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 4096]
FOLLOWS, FOLLOWS_FAR = 2e-3, 2.5e-3
POOLED, SINGLE = 1.05, 1.10

Inputs = list[torch.Tensor]


def inputs(
    rows: int, decay: str = "slow", key_heads: int = 16, groups: int = 3, alike: float = 0.0
) -> Inputs:
    profile = replace(PROFILES["27b"], key_heads=key_heads, value_heads=key_heads * groups)
    return delta_rule_inputs(profile, rows, decay, alike, CUDA.type)


def plan_of(tree: Tree) -> DeltaPlan:
    return plan_delta_rule(*tree.nodes, CHUNK, CUDA)


def run(given: Inputs, plan: DeltaPlan) -> torch.Tensor:
    """The kernel's output, computed into memory that held NaN."""
    delta_rule(*given, plan).fill_(torch.nan)
    # The allocator hands the freed, NaN-filled block to the second call.
    output = delta_rule(*given, plan)
    torch.cuda.synchronize()
    return output


def assert_follows(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    bound = FOLLOWS_FAR if len(found) > 2000 else FOLLOWS
    assert found.shape == expected.shape and found.dtype == expected.dtype == torch.bfloat16
    finite = torch.isfinite(found)
    assert finite.all(), f"{what}: not finite at {torch.nonzero(~finite)[:4].tolist()}"
    distance = (found.float() - expected.float()).abs()
    worst = np.unravel_index(int(distance.argmax()), distance.shape)
    error = relative_l2(found, expected)
    place = f"{what}: relative L2 {error:.2e}, worst {found[worst].item()} for {expected[worst].item()} at {worst}"
    assert error <= bound and distance.max() <= 0.04 * expected.float().abs().max(), place


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rows", LENGTHS)
def test_one_sequence_follows_the_reference(rows, decay):
    given, tree = inputs(rows, decay), Tree.of((rows, -1))
    assert_follows(run(given, plan_of(tree)), delta_rule_ref(*given, *tree.nodes, CHUNK))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rows", LENGTHS)
def test_a_node_handed_a_state_follows_the_reference(rows, decay):
    tree = Tree.of((70, -1), (rows, 0), (5, 1))
    given = inputs(tree.rows, decay)
    assert_follows(run(given, plan_of(tree)), delta_rule_ref(*given, *tree.nodes, CHUNK))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", TREES)
def test_trees_follow_the_reference(name, decay):
    tree = TREES[name]
    given = inputs(tree.rows, decay)
    assert_follows(run(given, plan_of(tree)), delta_rule_ref(*given, *tree.nodes, CHUNK), name)


@pytest.mark.parametrize("key_heads, groups", [(16, 1), (16, 2), (1, 4), (3, 5)])
def test_head_counts_follow_the_reference(key_heads, groups):
    tree = TREES["chunk_edges"]
    given = inputs(tree.rows, key_heads=key_heads, groups=groups)
    assert_follows(run(given, plan_of(tree)), delta_rule_ref(*given, *tree.nodes, CHUNK))


def test_keys_that_are_alike_follow_the_reference():
    tree = TREES["one_node_200"]
    given = inputs(tree.rows, alike=0.5)
    assert_follows(run(given, plan_of(tree)), delta_rule_ref(*given, *tree.nodes, CHUNK))


def test_many_blocks_wait_for_their_parents():
    """More blocks than run at once, in a deep chain and a wide fan, again and again."""
    tree = Tree.of((3, -1), *[(1 + i % 3, i) for i in range(40)], *[(2, 40) for _ in range(200)])
    given, plan = inputs(tree.rows), plan_of(tree)
    first = run(given, plan)
    assert_follows(first, delta_rule_ref(*given, *tree.nodes, CHUNK))
    for _ in range(30):
        assert torch.equal(delta_rule(*given, plan), first)


def errors(rows: int, decay: str, **more: float) -> dict[str, torch.Tensor]:
    """Differences from float64 of one sequence, and its norm."""
    given, tree = inputs(rows, decay, **more), Tree.of((rows, -1))
    exact = exact_delta_rule(given, *tree.nodes)
    outputs = {"kernel": run(given, plan_of(tree)), "reference": delta_rule_ref(*given, *tree.nodes, CHUNK)}
    if find_spec("fla") is not None:
        outputs["fla"] = by_fla(given)
    return {"exact": exact.norm(), **{name: (x.double() - exact).norm() for name, x in outputs.items()}}


def by_fla(given: Inputs) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta = (x[None] for x in given)
    groups = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(groups, dim=2) for x in (q, k))
    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta.bfloat16(), use_qk_l2norm_in_kernel=False)[0][0]


def test_error_against_float64_is_no_larger_than_the_references_and_flas():
    cases = {
        (rows, decay, alike): errors(rows, decay, alike=alike)
        for rows in (1, 17, 65, 200, 1024)
        for decay in DECAYS
        for alike in (0.0, 0.5)
    }
    for other in ("reference", "fla"):
        compared = [case for case in cases.values() if other in case]
        if not compared:
            continue
        for name, case in cases.items():
            assert case["kernel"] <= SINGLE * case[other], (other, name, case)
        # Relative errors count alike, however large a case's output is.
        kernel, others = (sum((c[x] / c["exact"]).square() for c in compared) for x in ("kernel", other))
        print(f"pooled error against {other}: {(kernel / others).sqrt().item():.4f}")
        assert kernel.sqrt() <= POOLED * others.sqrt(), other


def test_a_split_at_any_position_stays_near_the_whole():
    given = inputs(200)
    exact = exact_delta_rule(given, *Tree.of((200, -1)).nodes)
    whole = run(given, plan_of(Tree.of((200, -1))))
    for at in range(1, 200):
        found = run(given, plan_of(split_sequence(200, at)))
        assert relative_l2(found, whole) <= 6e-3, at
        assert relative_l2(found, exact) <= POOLED * relative_l2(whole, exact), at


def test_padding_nodes_and_rows_change_nothing():
    tree = TREES["example"]
    given, plan = inputs(tree.rows + 9), plan_of(tree)
    expected = run([x[: tree.rows].contiguous() for x in given], plan)
    for x in given:
        x[tree.rows :] = torch.nan
    padded = plan._replace(
        node=torch.cat([plan.node, plan.node.new_zeros(13, 8)]),
        node_chunk=torch.cat([plan.node_chunk, plan.node_chunk.new_zeros(5, 4)]),
        node_tiles=plan.node_tiles + 2,
        node_slots=plan.node_slots + 3,
    )
    assert torch.equal(run(given, padded)[: tree.rows], expected)


def test_two_runs_are_equal_bit_for_bit():
    for name in ("example", "chunk_edges", "fan_out_255"):
        given, plan = inputs(TREES[name].rows), plan_of(TREES[name])
        assert torch.equal(run(given, plan), run(given, plan)), name


def test_graph_replay_equals_eager_with_changed_inputs_and_nodes():
    one, other = Tree.of((70, -1), (20, 0), (9, 0)), Tree.of((10, -1), (80, 0), (9, 1))
    static, plan = inputs(99), plan_of(one)._replace(node_tiles=9, node_slots=2)
    run(static, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = delta_rule(*static, plan)
    for tree, decay in ((one, "slow"), (other, "fast"), (one, "fast")):
        for target, source in zip(static, inputs(99, decay), strict=True):
            target.copy_(source)
        plan.node.copy_(plan_of(tree).node)
        plan.node_chunk.copy_(plan_of(tree).node_chunk)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, delta_rule(*static, plan))
        assert_follows(captured, delta_rule_ref(*static, *tree.nodes, CHUNK))


@pytest.mark.parametrize("dtype, dim", [(torch.float32, 128), (torch.bfloat16, 64)])
def test_other_dtypes_and_heads_run_the_portable_implementation(dtype, dim):
    tree = TREES["example"]
    q, k, v, g, beta = inputs(tree.rows)
    given = [*(x[..., :dim].to(dtype).contiguous() for x in (q, k, v)), g, beta]
    found, expected = delta_rule(*given, plan_of(tree)), delta_rule_ref(*given, *tree.nodes, CHUNK)
    if dtype is torch.float32:
        assert_close(found, expected, rtol=1e-4, atol=2e-5)
    else:
        # The reference rounds inside, the portable implementation its output only.
        assert relative_l2(found, expected) < 1e-2


def test_no_rows_give_an_empty_output():
    given = [x[:0] for x in inputs(1)]
    assert delta_rule(*given, plan_of(TREES["one_row"])).shape == (0, 48, 128)


@pytest.mark.parametrize(
    "index, change, message",
    [
        (1, lambda x: x[:, :-1].contiguous(), r"delta_rule: k must have shape \[9, 16, 128\]"),
        (2, lambda x: x.half(), "v must be BFloat16, it is Half"),
        (2, lambda x: x[:, :47].contiguous(), r"g must have shape \[9, 47\]"),
        (3, lambda x: x.bfloat16(), "g must be Float, it is BFloat16"),
        (0, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "q must be contiguous"),
    ],
)
def test_refusals_name_the_tensor_and_the_value(index, change, message):
    given = inputs(9)
    given[index] = change(given[index])
    with pytest.raises(RuntimeError, match=message):
        delta_rule(*given, plan_of(Tree.of((9, -1))))


def test_heads_that_do_not_divide_are_refused():
    q, k, v, g, beta = inputs(9)
    given = [q[:, :5].contiguous(), k[:, :5].contiguous(), v, g, beta]
    with pytest.raises(RuntimeError, match="heads of v must be a multiple of those of q, found 48 and 5"):
        delta_rule(*given, plan_of(Tree.of((9, -1))))


# States that are kept from one call to the next

KEPT_LENGTHS = [1, 15, 16, 17, 63, 64, 65, 4096]
NONE = np.empty((0, 2), dtype=np.int64)


def pairs(*of: tuple[int, int]) -> np.ndarray:
    return np.array(of, dtype=np.int64)


def kept_states(slots: int, heads: int = 48) -> torch.Tensor:
    """States no sequence has, transposed [slots, HV, V, K]."""
    draw = torch.Generator("cuda").manual_seed(slots)
    return torch.randn(slots, heads, 128, 128, device=CUDA, generator=draw)


def run_kept(
    given: Inputs,
    tree: Tree,
    kept: torch.Tensor,
    source: np.ndarray = NONE,
    target: np.ndarray = NONE,
) -> torch.Tensor:
    plan = plan_delta_rule(*tree.nodes, None, CUDA, source, target)
    # Twice, into memory that held NaN: no state may depend on what a call before has left.
    before = kept.clone()
    delta_rule(*given, plan, kept).fill_(torch.nan)
    left = kept.clone()
    kept.copy_(before)
    output = delta_rule(*given, plan, kept)
    torch.cuda.synchronize()
    assert torch.equal(kept, left)
    return output


def rows_of(given: Inputs, rows: slice) -> Inputs:
    return [x[rows].contiguous() for x in given]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rows", KEPT_LENGTHS)
@pytest.mark.parametrize("first", [1, 64, 77])
def test_a_sequence_goes_on_from_a_kept_state(rows, decay, first):
    given, kept = inputs(first + rows, decay), kept_states(4)
    others = kept.clone()
    begun = run_kept(rows_of(given, slice(first)), Tree.of((first, -1)), kept, target=pairs((0, 2)))
    assert torch.equal(kept[[0, 1, 3]], others[[0, 1, 3]])
    state = kept[2].clone()
    rest = run_kept(
        rows_of(given, slice(first, None)), Tree.of((rows, -1)), kept, pairs((0, 2)), pairs((0, 0))
    )
    assert torch.equal(kept[[1, 3]], others[[1, 3]]) and torch.equal(kept[2], state)
    found = torch.cat([begun, rest])
    # A state handed to a child in one launch is the same float32 numbers.
    split = split_sequence(first + rows, first)
    assert torch.equal(found, run(given, plan_of(split)))
    whole, sequence = run(given, plan_of(Tree.of((first + rows, -1)))), Tree.of((first + rows, -1))
    # Where a sequence is split moves its roundings.
    assert relative_l2(found, whole) <= 6e-3
    expected = kept_states(4)
    assert_follows(found, delta_rule_ref(*given, *split.nodes, CHUNK, NONE, pairs((0, 2), (1, 0)), expected))
    for slot in (0, 2):
        assert relative_l2(kept[slot], expected[slot]) <= FOLLOWS_FAR, slot
        worst = (kept[slot] - expected[slot]).abs().max()
        assert worst <= 0.04 * expected[slot].abs().max(), slot
    # The state after all rows, whether the rows before were computed in the same call or not.
    once = kept_states(4)
    run_kept(given, split, once, target=pairs((0, 2), (1, 0)))
    assert torch.equal(once[[0, 2]], kept[[0, 2]])
    run_kept(given, sequence, once, target=pairs((0, 1)))
    assert relative_l2(once[1], kept[0]) <= 6e-3


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("key_heads, groups", [(16, 3), (16, 1), (3, 5)])
def test_roots_with_and_without_a_kept_state_in_one_forest(key_heads, groups, decay):
    tree = Tree.of((70, -1), (3, -1), (20, -1), (130, -1), (64, -1), (5, 0), (9, 2), (2, 3), (65, 3), (1, 8))
    source, target = pairs((2, 3), (3, 0), (4, 3)), pairs((0, 1), (3, 4), (8, 5), (9, 6))
    given = inputs(tree.rows, decay, key_heads, groups)
    kept, expected = (kept_states(7, key_heads * groups) for _ in range(2))
    found = run_kept(given, tree, kept, source, target)
    assert_follows(found, delta_rule_ref(*given, *tree.nodes, CHUNK, source, target, expected))
    for slot in range(7):
        if slot in target[:, 1]:
            assert relative_l2(kept[slot], expected[slot]) <= FOLLOWS, slot
        else:
            assert torch.equal(kept[slot], expected[slot]), slot
    without = run(given, plan_of(tree))
    for node, (start, length) in enumerate(zip(tree.start, tree.length, strict=True)):
        rows = slice(start, start + length)
        # What decays fast is gone at the end of a root.
        if decay == "slow" or node in (0, 1, 2, 3, 4, 5):
            assert torch.equal(found[rows], without[rows]) == (node in (0, 1, 5)), node


def test_kept_states_that_nobody_names_change_nothing():
    tree = TREES["chunk_edges"]
    given, kept = inputs(tree.rows), kept_states(2)
    nowhere = np.stack([np.arange(len(tree.length)), np.full(len(tree.length), -1)], axis=1)
    for target in (NONE, nowhere):
        assert torch.equal(run_kept(given, tree, kept, target=target), run(given, plan_of(tree)))
        assert torch.equal(kept, kept_states(2))


def test_many_blocks_start_from_and_leave_kept_states():
    """More blocks than run at once, of which many share one kept state and as many leave one each."""
    tree = Tree.of(*[(1 + i % 70, -1) for i in range(60)], *[(1 + i % 3, i) for i in range(60)])
    source = np.stack([np.arange(60), np.arange(60) % 2], axis=1)
    target = np.stack([np.arange(60, 120), 2 + np.arange(60)], axis=1)
    given, kept, expected = inputs(tree.rows), kept_states(62), kept_states(62)
    first = run_kept(given, tree, kept, source, target)
    assert_follows(first, delta_rule_ref(*given, *tree.nodes, CHUNK, source, target, expected))
    left = kept.clone()
    assert relative_l2(left[2:], expected[2:]) <= FOLLOWS and torch.equal(left[:2], expected[:2])
    for _ in range(20):
        assert torch.equal(run_kept(given, tree, kept, source, target), first) and torch.equal(kept, left)


def test_graph_replay_takes_other_kept_slots():
    tree = Tree.of((20, -1), (30, -1), (9, 0))
    static, kept = inputs(tree.rows), kept_states(5)
    plan = plan_delta_rule(*tree.nodes, None, CUDA, pairs((0, 1)), pairs((1, 2)))
    delta_rule(*static, plan, kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = delta_rule(*static, plan, kept)
    cases = (
        (pairs((0, 1)), pairs((1, 2))),
        (pairs((0, 4), (1, 1)), pairs((0, 3), (2, 0))),
        (NONE, NONE),
    )
    for seed, (source, target) in enumerate(cases):
        for to, x in zip(static, inputs(tree.rows, ("slow", "fast")[seed % 2]), strict=True):
            to.copy_(x)
        plan.node.copy_(plan_delta_rule(*tree.nodes, None, CUDA, source, target).node)
        kept.copy_(kept_states(5))
        captured.fill_(torch.nan)
        graph.replay()
        replayed, left = captured.clone(), kept.clone()
        kept.copy_(kept_states(5))
        assert torch.equal(replayed, run_kept(static, tree, kept, source, target))
        assert torch.equal(left, kept)


@pytest.mark.parametrize("dtype, dim", [(torch.float32, 128), (torch.bfloat16, 64)])
def test_kept_states_of_the_portable_implementation(dtype, dim):
    tree = TREES["two_roots"]
    q, k, v, g, beta = inputs(tree.rows)
    given = [*(x[..., :dim].to(dtype).contiguous() for x in (q, k, v)), g, beta]
    kept, expected = (kept_states(3)[..., :dim, :dim].contiguous() for _ in range(2))
    source, target = pairs((0, 2)), pairs((1, 0))
    plan = plan_delta_rule(*tree.nodes, CHUNK, CUDA, source, target)
    found = delta_rule(*given, plan, kept)
    wanted = delta_rule_ref(*given, *tree.nodes, CHUNK, source, target, expected)
    assert relative_l2(found, wanted) < (1e-4 if dtype is torch.float32 else 1e-2)
    assert relative_l2(kept, expected) < (1e-4 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda kept: kept[:, :47].contiguous(), r"delta_rule: kept must have shape \[3, 48, 128, 128\]"),
        (lambda kept: kept.bfloat16(), "kept must be Float, it is BFloat16"),
        (lambda kept: kept.transpose(2, 3), "kept must be contiguous"),
        (lambda kept: kept.cpu(), "kept must be on"),
        (lambda kept: kept[0], "kept must have"),
    ],
)
def test_kept_states_are_refused_by_name(change, message):
    given, tree = inputs(9), Tree.of((9, -1))
    plan = plan_delta_rule(*tree.nodes, None, CUDA, pairs((0, 1)))
    with pytest.raises(RuntimeError, match=message):
        delta_rule(*given, plan, change(kept_states(3)))
