from dataclasses import fields

import numpy as np
import pytest
import torch
from decisions import question, text
from jev.api import compile_request
from test_engine import engine_of

from openjev_fast_plugin.forest import build_forest, continue_forest
from openjev_fast_plugin.forward import forward
from openjev_fast_plugin.layout import Bucket, Layout, build_layout
from openjev_fast_plugin.ops import plan_attention, plan_delta_rule


def sequences(seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    root, middle = draw.integers(0, 4000, 21), draw.integers(0, 4000, 9)
    tails = [draw.integers(0, 4000, length) for length in (1, 5, 17, 4)]
    return [np.concatenate([root, *([middle] if i % 2 else []), tail]) for i, tail in enumerate(tails)]


def tables(layout: Layout) -> dict[str, torch.Tensor]:
    """Every table of a layout by name."""
    found = {}
    for field in fields(layout):
        name, value = field.name, getattr(layout, field.name)
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif value is not None:
            found |= {f"{name}.{key}": part for key, part in value._asdict().items() if torch.is_tensor(part)}
    return found


def test_packing_keeps_every_table():
    layout = build_layout(build_forest(sequences()), Bucket(rows=8, nodes=8, reads=8))
    packed = layout.pack()
    assert packed.dtype == torch.int32
    for name, table in tables(layout.unpack(packed)).items():
        assert torch.equal(table, tables(layout)[name]), name
        if table.data_ptr() != tables(layout)[name].data_ptr() and table.numel():
            assert (table.data_ptr() - packed.data_ptr()) % 16 == 0, name


def test_what_the_host_loops_over_stays_on_the_host():
    forest = continue_forest(sequences(), [0] * len(sequences()), [4])
    layout = build_layout(forest, kept=[(1, np.arange(1, 5))], keep=[(0, 0, forest.path(0))])
    before, after = tables(layout), tables(layout.unpack(layout.pack()))
    stayed = {name for name, table in after.items() if table.data_ptr() == before[name].data_ptr()}
    blocks = ("block_query", "block_own", "block_range", "range_rows")
    steps = ("step_start", "step_kept", "kept_source", "kept_target")
    assert stayed == {f"delta.{name}" for name in steps} | {
        f"{plan}.{name}" for plan in ("attention", "read_attention") for name in blocks
    }


def test_a_layout_for_the_kernels_has_their_tables_and_no_others(tiny_checkpoint):
    forest, bucket = build_forest(sequences()), Bucket(rows=8, nodes=8, reads=8)
    both, kernels = tables(build_layout(forest, bucket)), tables(build_layout(forest, bucket, portable=False))
    left_out = {name for name, table in kernels.items() if not table.numel() and both[name].numel()}
    assert {name.partition(".")[0] for name in left_out} == {"delta", "attention", "read_attention"}
    assert not left_out & {f"delta.{name}" for name in ("node", "node_chunk")}
    for name in kernels.keys() - left_out:
        assert torch.equal(kernels[name], both[name]), name
    with pytest.raises(ValueError, match="for the CUDA kernel alone"), torch.inference_mode():
        forward(engine_of(tiny_checkpoint)._weights, build_layout(forest, bucket, portable=False))


def test_a_bucket_rounds_sizes_up_and_shares_shapes():
    forest = build_forest(sequences())
    layout = build_layout(forest, Bucket(rows=8, nodes=4, reads=4))
    rows = len(forest.token)
    assert rows % 8 and layout.rows == -(-rows // 8) * 8
    assert len(layout.delta.node) % 4 == len(layout.delta.node_chunk) % 4 == 0
    assert len(layout.read_row) % 4 == len(layout.candidate_read) % 4 == 0
    assert layout.delta.node_chunk[:, 1].sum() == layout.rows
    again = build_layout(build_forest(sequences(1)), Bucket(rows=8, nodes=4, reads=4))
    assert again.shape_key() == layout.shape_key()
    assert build_layout(forest).shape_key() != layout.shape_key()


@pytest.mark.parametrize("rows", [2, 8, 64])
def test_padding_changes_no_score(tiny_checkpoint, rows):
    weights = engine_of(tiny_checkpoint)._weights
    forest = build_forest(sequences())
    with torch.inference_mode():
        expected = forward(weights, build_layout(forest))
        found = forward(weights, build_layout(forest, Bucket(rows=rows, nodes=16, reads=8)))
    assert len(found) % 8 == 0 and torch.isfinite(found).all()
    torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-5, atol=1e-6)


def test_padding_rows_are_a_root_of_their_own():
    forest = build_forest(sequences())
    rows, nodes = len(forest.token), len(forest.node_start)
    layout = build_layout(forest, Bucket(rows=64))
    extra = layout.rows - rows
    assert extra > 3
    assert layout.position[rows:].tolist() == list(range(extra))
    chain = [
        [back if back >= rows else -1 for back in (row - 1, row - 2, row - 3)]
        for row in range(rows, layout.rows)
    ]
    assert layout.predecessor[rows:].tolist() == chain
    tables = (
        np.append(forest.node_start, rows),
        np.append(forest.node_length, extra),
        np.append(forest.node_parent, -1),
    )
    every, node = np.arange(layout.rows), np.append(forest.node, [nodes] * extra)
    cpu = torch.device("cpu")
    delta = plan_delta_rule(*tables, layout.delta.chunk_size, cpu)
    attention = plan_attention(*tables, every, node, cpu)
    for found, expected in ((layout.delta, delta), (layout.attention, attention)):
        for name, table in expected._asdict().items():
            assert np.array_equal(getattr(found, name), table), name


def test_real_requests_keep_their_order_of_candidates(tiny_checkpoint):
    engine = engine_of(tiny_checkpoint)
    records = compile_request(text(12, 1), {"a": question("choice", 5, 1), "b": question("noul", 1, 2)})
    flat = [sequence for group in engine._encoder.encode(records) for sequence in group]
    forest = build_forest(flat)
    plain, padded = build_layout(forest), build_layout(forest, Bucket(rows=8, nodes=8, reads=8))
    for layout in (plain, padded):
        ends = layout.read_row[layout.candidate_read.long()][: len(flat)]
        assert [int(layout.token[row]) for row in ends] == [int(sequence[-1]) for sequence in flat]
        assert [int(layout.position[row]) for row in ends] == [len(sequence) - 1 for sequence in flat]


def test_few_queries_decide_the_tiles_of_both_plans_and_the_shape():
    forest = build_forest(sequences())
    bucket = Bucket(rows=8, nodes=8, reads=8)
    rows = build_layout(forest, bucket).rows
    found = {few: build_layout(forest, bucket, few_queries=few) for few in (0, 8, rows - 1, rows)}
    tiles = {
        few: (layout.attention.tile_queries, layout.read_attention.tile_queries)
        for few, layout in found.items()
    }
    assert tiles == {0: (21, 21), 8: (21, 10), rows - 1: (21, 10), rows: (10, 10)}
    keys = [layout.shape_key() for layout in found.values()]
    assert keys[1] == keys[2] and len(set(keys)) == 3
