"""The compiled layout, built with the host's compiler, against the one in numpy: every table, value by value."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompt_cases import prompts

from openjev_fast_plugin import forest as numpy_forest
from openjev_fast_plugin.engine import CUDA_BUCKET
from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.layout import Bucket, Layout, build_layout
from openjev_fast_plugin.ops import _cuda
from openjev_fast_plugin.packed_layout import PackedLayout, count_rows, pack_layout


@pytest.fixture(autouse=True)
def in_place_of_the_kernels(compiled_layout, monkeypatch):
    monkeypatch.setattr(_cuda, "load", lambda: compiled_layout)


def tables(layout: Layout) -> dict[str, object]:
    """Every table and number of a layout by name."""
    found: dict[str, object] = {}
    for field in fields(layout):
        value = getattr(layout, field.name)
        if value is None:
            continue
        parts = {"": value} if isinstance(value, torch.Tensor) else value._asdict()
        found |= {f"{field.name}.{name}": part for name, part in parts.items()}
    return found


def check(sequences: list[np.ndarray], bucket: Bucket = CUDA_BUCKET, few_queries: int = 330) -> PackedLayout:
    expected = build_layout(build_forest(sequences), bucket, portable=False, few_queries=few_queries)
    found = pack_layout(sequences, bucket, few_queries, pinned=False)
    assert found.shape_key() == expected.shape_key()
    assert (found.rows, found.reads) == (expected.rows, expected.reads)
    assert found.tile_queries == expected.tile_queries
    assert count_rows(sequences) == numpy_forest.count_rows(sequences)
    packed = found.pack()
    assert packed.dtype == torch.int32 and packed.shape == expected.pack().shape
    # The layouts' ways to take a buffer apart are one.
    for unpacked in (found.unpack(packed), expected.unpack(packed)):
        values, others = tables(unpacked), tables(expected)
        assert values.keys() == others.keys()
        for name, value in values.items():
            other = others[name]
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype and torch.equal(value, other), name
            else:
                assert value == other, name
    return found


@st.composite
def families(draw) -> list[np.ndarray]:
    """Sequences that continue one another, end on one another and repeat."""
    tokens = st.integers(0, draw(st.sampled_from([1, 3, 1000])))
    found = [draw(st.lists(tokens, min_size=1, max_size=30))]
    for _ in range(draw(st.integers(0, 40))):
        start = draw(st.sampled_from(found))
        kept = start[: draw(st.integers(0, len(start)))]
        found.append(
            kept + draw(st.lists(tokens, min_size=not kept, max_size=draw(st.sampled_from([2, 70]))))
        )
    return [np.array(sequence, np.int64) for sequence in draw(st.permutations(found))]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(families(), st.sampled_from([1, 3, 8]), st.sampled_from([1, 8]), st.sampled_from([0, 5, 60, 10_000]))
def test_any_family_of_sequences(sequences, rows, others, few_queries):
    check(sequences, Bucket(rows=rows, nodes=others, reads=others), few_queries)


@pytest.mark.parametrize(
    "case", ["example", "noul_1", "noul_70", "choice_32x1056", "choice_255x60", "root_16363_tails_255"]
)
@pytest.mark.parametrize("few_queries", [0, 330, 100_000])
def test_the_benchmarks_cases(case, few_queries):
    check(prompts(case, 248_320), few_queries=few_queries)


def test_a_chain_of_prefixes_and_a_comb():
    line = np.arange(200, dtype=np.int32)
    check([line[:end] for end in range(1, 201)])
    check([np.append(line[:end], 7) for end in range(1, 200)])


def test_requests_of_several_states():
    check([sequence for seed in range(5) for sequence in prompts("example", 1000, seed)])


def test_states_of_equal_beginnings_with_options_given_in_turn():
    """A sort that compares them anew for each pair reads all of them again and again."""
    draw = np.random.default_rng(0)
    text = draw.integers(0, 1000, 3000).astype(np.int32)
    states = [np.append(text, np.int32(end)) for end in (7, 3, 9)]
    tails = [draw.integers(0, 4, length).astype(np.int32) for length in draw.integers(1, 9, 120)]
    check([np.concatenate([state, tail]) for tail in tails for state in states])
    # As sequences that end inside one another's paths, and where blocks of a comparison end.
    check([text[:end] for end in (31, 32, 33, 64, 65, 3000, 1, 2)] + states + states[:1])


def test_nodes_in_a_deep_chain_with_branches():
    """Every tile sees every node above it: as many ranges as the table has, found without climbing for each query."""
    line = np.arange(600, dtype=np.int32)
    check([np.append(line[:end], np.int32(1000 + turn)) for end in range(1, 600, 2) for turn in range(3)])


def test_tokens_of_any_size_are_in_the_same_order():
    ids = [0, 1, 255, 256, 65_535, 65_536, 2**24, 2**31 - 1]
    check([np.array([5, one, other]) for one in ids for other in ids])


def test_the_buffer_is_the_layouts_own():
    found = pack_layout(prompts("example", 1000), CUDA_BUCKET, 330, pinned=False)
    assert (
        found.pack() is found.pack()
        and found.unpack(found.pack()).token.data_ptr() == found.pack().data_ptr()
    )


@pytest.mark.parametrize(
    "sequences, told",
    [
        ([], "there is no sequence"),
        ([np.array([], np.int32)], "sequence 0 is empty"),
        ([np.array([1, -1])], "token ids must lie in"),
        ([np.array([4, -3, 5], np.int32)], r"token ids must lie in \[0, 2\*\*31\), got -3 to 5$"),
        ([np.array([2**31])], "token ids must lie in"),
        ([np.array([1.0])], "one-dimensional integer array"),
    ],
)
def test_what_is_no_sequence_is_refused_as_by_build_forest(sequences, told):
    for refuses in (
        build_forest,
        count_rows,
        lambda given: pack_layout(given, CUDA_BUCKET, 330, pinned=False),
    ):
        with pytest.raises(ValueError, match=told):
            refuses(sequences)


@pytest.mark.parametrize(
    "tokens, bounds",
    [([1, 2], [0, 1]), ([1, 2], [0, 0, 2]), ([1, 2], [1, 2]), ([1, 2], [0]), ([1, 2], [0, 3])],
)
def test_the_op_refuses_bounds_of_other_tokens(compiled_layout, tokens, bounds):
    given = torch.tensor(tokens, dtype=torch.int32), bounds
    with pytest.raises(RuntimeError, match="packed_layout: bounds must"):
        compiled_layout["packed_layout"](*given, 8, 8, 8, 330, False)
    with pytest.raises(RuntimeError, match="count_rows: bounds must"):
        compiled_layout["count_rows"](*given)
