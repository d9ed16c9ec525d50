"""The cases that the sanitizers run, on the CPU: they run, and they reach every kernel and kind of padding."""

from itertools import chain

import sanitize
import torch
from op_registry import tensors

from openjev_fast_plugin import ops
from openjev_fast_plugin.ops.tree_attention import KERNEL_DIMS


def test_every_op_has_cases_that_run():
    every = (sanitize.row_cases, sanitize.product_cases, sanitize.tree_cases)
    names = [name for cases in every for name, _ in cases("cpu")]
    public = {name.removesuffix("_ref") for name in ops.__all__ if name.endswith("_ref")}
    assert {name.split(" ")[0].rstrip(",") for name in names} == public
    for name, call in chain(sanitize.row_cases("cpu"), sanitize.product_cases("cpu")):
        for output in tensors(call()):
            assert torch.isfinite(output.float()).all(), name


def test_the_delta_rules_case_has_levels_chunks_and_padding():
    call = dict(sanitize.tree_cases("cpu"))["delta_rule"]
    *given, plan = call.args
    lengths, sources, targets = plan.node[:, 1].tolist(), plan.node[:, 2].tolist(), plan.node[:, 3].tolist()
    # Roots, nodes that are handed a state, nodes that hand one on, nodes that do both; one row, two chunks, none.
    assert {(s >= 0, t >= 0) for s, t in zip(sources, targets, strict=True)} >= {
        (False, True),
        (True, True),
        (True, False),
    }
    assert 1 in lengths and max(lengths) > 64 and lengths.count(0) == 3
    # A padding chunk.
    assert 0 in plan.node_chunk[:, 1].tolist()
    assert len(given[0]) == sum(lengths) + 5
    assert torch.isfinite(call()[: sum(lengths)].float()).all()


def test_the_delta_rules_kept_states_are_read_and_written_by_every_kind_of_node():
    call = dict(sanitize.tree_cases("cpu"))["delta_rule, kept states"]
    *_, plan, kept = call.args
    node = plan.node
    assert ((node[:, 5] > 0) & (node[:, 6] > 0)).any()
    assert ((node[:, 3] >= 0) & (node[:, 6] > 0)).any() and ((node[:, 3] < 0) & (node[:, 6] > 0)).any()
    assert torch.isfinite(call()[: int(node[:, 1].sum())].float()).all()
    assert [bool(state.any()) for state in kept] == [True, False, True, True]


def test_attentions_cases_reach_every_kernel_and_both_numbers_of_warpgroups():
    cases = {name: call for name, call in sanitize.tree_cases("cpu") if name.startswith("tree_attention")}
    reached = set()
    for name, call in cases.items():
        q, k, v, _, _, plan = call.args
        reached.add((q.shape[2], plan.tile_queries * q.shape[1] // k.shape[1] > 64))
        assert plan.tile[-1].tolist() == [0, 0, 0, 0] and len(k) % 8 and len(k) > len(q), name
        # A run of keys that does not continue the one before it starts at a multiple of 8: numbers are skipped.
        assert any(bits == 0 and end > 0 for _, end, bits, _ in plan.tile_range.tolist()), name
        assert torch.isfinite(call().float()).all(), name
    assert reached == {(dim, two) for dim in KERNEL_DIMS for two in (False, True)}
