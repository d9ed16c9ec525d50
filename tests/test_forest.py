"""forest.py against a naive prefix tree (a set of prefixes), on drawn and on hand-made sequences."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openjev_fast_plugin.forest import Forest, build_forest, continue_forest, count_rows, split_to_fit

TOKEN_LIMIT = 248_320

few_symbols = st.lists(st.integers(0, 2), min_size=1, max_size=12)
many_symbols = st.lists(
    st.sampled_from([0, 1, 255, 256, 65_535, 65_536, TOKEN_LIMIT - 1]), min_size=1, max_size=6
)
any_symbols = st.lists(st.integers(0, TOKEN_LIMIT - 1), min_size=1, max_size=6)
sets = st.one_of(
    st.lists(few_symbols, min_size=1, max_size=24),
    st.lists(many_symbols, min_size=1, max_size=24),
    st.lists(any_symbols, min_size=1, max_size=8),
    st.tuples(any_symbols, st.lists(few_symbols, min_size=1, max_size=12)).map(
        lambda t: [t[0] + s for s in t[1]]
    ),
)


def arrays(sequences, dtype=np.int32) -> list[np.ndarray]:
    return [np.array(sequence, dtype=dtype) for sequence in sequences]


def prefixes(sequences) -> set[tuple[int, ...]]:
    return {tuple(sequence[:length]) for sequence in sequences for length in range(1, len(sequence) + 1)}


def path_of(forest: Forest, row: int) -> list[int]:
    """Rows from the start of the path to row, found through node ancestors alone."""
    node = int(forest.node[row])
    rows = list(range(int(forest.node_start[node]), row + 1))
    while (node := int(forest.node_parent[node])) >= 0:
        start = int(forest.node_start[node])
        rows[:0] = range(start, start + int(forest.node_length[node]))
    return rows


def check(sequences) -> Forest:
    """Build and hold the result against the set of prefixes; returns the forest."""
    forest = build_forest(arrays(sequences))
    expected = prefixes(sequences)
    nodes = len(forest.node_start)

    for name in Forest.__dataclass_fields__:
        if name not in ("rows_asked", "node_kept", "kept_length"):
            assert getattr(forest, name).dtype == np.int32, name
    assert forest.node_kept is None and forest.kept_length == ()
    assert forest.rows_asked == sum(map(len, sequences))
    assert len(forest.token) == len(expected) == count_rows(arrays(sequences))

    # Nodes tile the rows, parents come before children, levels count ancestors and never fall.
    assert forest.node_start[0] == 0
    assert (forest.node_length >= 1).all()
    ends = forest.node_start + forest.node_length
    assert ends.tolist() == [*forest.node_start[1:].tolist(), len(expected)]
    assert forest.node.tolist() == np.repeat(np.arange(nodes), forest.node_length).tolist()
    assert (forest.node_parent < np.arange(nodes)).all()
    for parent, level in zip(forest.node_parent, forest.node_level, strict=True):
        assert level == (0 if parent < 0 else forest.node_level[parent] + 1)
    assert (np.diff(forest.node_level) >= 0).all()

    # Every row is one prefix, and its predecessors are the rows before it on its path.
    found = []
    for row in range(len(forest.token)):
        rows = path_of(forest, row)
        found.append(tuple(forest.token[rows].tolist()))
        assert forest.position[row] == len(rows) - 1
        assert forest.predecessor[row].tolist() == [-1, -1, -1, *rows[:-1]][:-4:-1]
    assert set(found) == expected
    assert len(set(found)) == len(found)

    # A node is split only where paths diverge: nothing has exactly one child.
    children = np.bincount(forest.node_parent[forest.node_parent >= 0], minlength=nodes)
    assert not (children == 1).any()
    paths = [found[start] for start in forest.node_start]
    order = list(zip(forest.node_level.tolist(), paths, strict=True))
    assert order == sorted(order)

    # The head reads the end of each sequence, and each end once.
    assert forest.candidate_read.shape == (len(sequences),)
    for sequence, read in zip(sequences, forest.candidate_read, strict=True):
        assert found[forest.read_row[read]] == tuple(sequence)
    assert (np.diff(forest.read_row) > 0).all()
    assert len(forest.read_row) == len(set(map(tuple, sequences)))
    return forest


def same(one: Forest, other: Forest, *, but: tuple[str, ...] = ()) -> None:
    for name in Forest.__dataclass_fields__:
        if name not in but:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@settings(max_examples=300, deadline=None)
@given(sets)
def test_holds_each_prefix_once(sequences):
    check(sequences)


@settings(max_examples=100, deadline=None)
@given(sets, st.randoms(use_true_random=False))
def test_input_order_changes_only_where_candidates_read(sequences, random):
    order = list(range(len(sequences)))
    random.shuffle(order)
    one = build_forest(arrays(sequences))
    other = build_forest(arrays(sequences[index] for index in order))
    same(one, other, but=("candidate_read",))
    np.testing.assert_array_equal(one.candidate_read[order], other.candidate_read)


@settings(max_examples=50, deadline=None)
@given(sets)
def test_int64_equals_int32(sequences):
    same(build_forest(arrays(sequences)), build_forest(arrays(sequences, np.int64)))


def test_every_small_set_of_binary_sequences():
    words = [word for length in (1, 2, 3) for word in product((0, 1), repeat=length)]
    for chosen in range(1, 2 ** len(words)):
        if chosen % 7 == 1:
            check([word for bit, word in enumerate(words) if chosen >> bit & 1])


def test_one_candidate_is_one_node():
    forest = check([[5, 6, 7, 8, 9]])
    assert forest.node_length.tolist() == [5]
    assert forest.predecessor.tolist() == [[-1, -1, -1], [0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 2, 1]]
    assert forest.read_row.tolist() == [4]


def test_one_token():
    forest = check([[0]])
    assert forest.predecessor.tolist() == [[-1, -1, -1]]


def test_nothing_shared_is_one_root_each():
    forest = check([[3, 1], [1, 1], [2, 1]])
    assert forest.node_parent.tolist() == [-1, -1, -1]
    assert forest.token.tolist() == [1, 1, 2, 1, 3, 1]
    assert forest.candidate_read.tolist() == [2, 0, 1]


def test_identical_candidates_share_a_read_row():
    forest = check([[1, 2, 3]] * 4 + [[1, 2, 4]])
    assert forest.candidate_read.tolist() == [0, 0, 0, 0, 1]
    assert len(forest.token) == 4


def test_prefix_of_another_does_not_split():
    forest = check([[1, 2, 3, 4], [1, 2], [1], [1, 2, 3]])
    assert forest.node_length.tolist() == [4]
    assert forest.read_row.tolist() == [0, 1, 2, 3]
    assert forest.candidate_read.tolist() == [3, 1, 0, 2]


def test_prefix_ending_where_paths_diverge():
    forest = check([[1, 2], [1, 2, 3], [1, 2, 4]])
    assert forest.node_length.tolist() == [2, 1, 1]
    assert forest.read_row.tolist() == [1, 2, 3]


def test_prefixes_on_nodes_that_later_sequences_split():
    check([[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7], [1, 8]])


def test_predecessors_cross_short_nodes():
    forest = check([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 7]])
    row = forest.read_row[forest.candidate_read[0]]
    assert forest.node_level[forest.node[row]] == 3
    assert forest.token[forest.predecessor[row]].tolist() == [3, 2, 1]


def test_255_candidates():
    random = np.random.default_rng(0)
    state = random.integers(0, TOKEN_LIMIT, 200).tolist()
    sequences = [
        [*state, *random.integers(0, TOKEN_LIMIT, 1 + index % 9).tolist(), 11, 12] for index in range(255)
    ]
    forest = check(sequences)
    assert forest.rows_asked > 40_000
    assert len(forest.token) < 2_500


def test_order_is_numeric_beyond_one_byte():
    forest = build_forest(arrays([[256], [1], [255], [65_536], [TOKEN_LIMIT - 1], [2]]))
    assert forest.token.tolist() == [1, 2, 255, 256, 65_536, TOKEN_LIMIT - 1]


@pytest.mark.parametrize("levels", [1_000, 3_000])
def test_deep_chain_does_not_recurse(levels):
    sequences = [[1] * depth + [2, 3] for depth in range(levels)]
    forest = build_forest(arrays(sequences))
    assert len(forest.token) == levels - 1 + 2 * levels
    assert forest.node_level.max() == levels - 2
    assert (forest.node_parent < np.arange(len(forest.node_parent))).all()
    for index in (0, 1, levels // 2, levels - 1):
        rows = path_of(forest, int(forest.read_row[forest.candidate_read[index]]))
        assert forest.token[rows].tolist() == sequences[index]


def test_deep_chain_of_prefixes():
    sequences = [[1] * depth for depth in range(1, 1_001)] + [[1] * depth + [0] for depth in range(1_000)]
    forest = build_forest(arrays(sequences))
    assert len(forest.token) == 2_000
    for depth in range(1, 1_001):
        row = forest.read_row[forest.candidate_read[depth - 1]]
        assert (forest.token[row], forest.position[row]) == (1, depth - 1)


@pytest.mark.parametrize("function", [build_forest, count_rows])
@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "no sequence"),
        ([np.array([1], np.int32), np.array([], np.int32)], "sequence 1 is empty"),
        ([np.array([1.0])], "integer array, not float64"),
        ([np.array([[1]], np.int32)], r"not int32 \(1, 1\)"),
        ([np.array([-1, 3], np.int32)], "got -1 to 3"),
        ([np.array([2**31], np.int64)], "got 2147483648"),
    ],
    ids=["none", "empty", "float", "two-dimensional", "negative", "too-large"],
)
def test_bad_sequences(function, sequences, message):
    with pytest.raises(ValueError, match=message):
        function(sequences)


def sequences_of(groups, parts) -> list[list[list[int]]]:
    return [[sequence for question, cut in part for sequence in groups[question][cut]] for part in parts]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(few_symbols, min_size=1, max_size=8), min_size=1, max_size=6), st.integers(12, 60))
def test_split_properties(groups, max_rows):
    parts = split_to_fit([arrays(group) for group in groups], max_rows)
    chosen = sequences_of(groups, parts)

    assert all(len(prefixes(sequences)) <= max_rows for sequences in chosen)
    assert [sequence for part in chosen for sequence in part] == [
        sequence for group in groups for sequence in group
    ]
    pieces = [(question, cut) for part in parts for question, cut in part]
    assert all(cut.step is None and cut.start < cut.stop for _, cut in pieces)
    assert [question for question, _ in pieces] == sorted(question for question, _ in pieces)
    for question, group in enumerate(groups):
        cuts = [cut for found, cut in pieces if found == question]
        assert [cuts[0].start, *(cut.stop for cut in cuts)] == [*(cut.start for cut in cuts), len(group)]
        assert (len(cuts) == 1) == (len(prefixes(group)) <= max_rows)
    # No forward could have taken the piece that opens the next one.
    for sequences, following in zip(chosen, parts[1:], strict=False):
        question, cut = following[0]
        next_piece = [groups[question][cut.start]] if cut.start else groups[question]
        assert len(prefixes(sequences + next_piece)) > max_rows


def test_split_keeps_everything_together_when_it_fits():
    groups = [arrays([[1, 2], [1, 3]]), arrays([[1, 4]])]
    assert split_to_fit(groups, 4) == [[(0, slice(0, 2)), (1, slice(0, 1))]]


def test_split_at_question_boundaries_first():
    groups = [arrays([[1, 2], [1, 3]]), arrays([[1, 4], [1, 5]]), arrays([[1, 6]])]
    assert split_to_fit(groups, 4) == [[(0, slice(0, 2))], [(1, slice(0, 2)), (2, slice(0, 1))]]


def test_split_inside_a_question():
    groups = [arrays([[1, 2], [1, 3], [1, 4], [1, 5], [1, 6]]), arrays([[1, 7]])]
    assert split_to_fit(groups, 3) == [
        [(0, slice(0, 2))],
        [(0, slice(2, 4))],
        [(0, slice(4, 5)), (1, slice(0, 1))],
    ]


def test_split_refuses_a_path_that_is_too_long():
    groups = [arrays([[1, 2]]), arrays([[1] * 7, [1, 3]])]
    with pytest.raises(ValueError, match="7 tokens .* at most 6 rows"):
        split_to_fit(groups, 6)


def test_split_refuses_a_question_without_candidates():
    with pytest.raises(ValueError, match="question 1"):
        split_to_fit([arrays([[1]]), []], 10)


def test_split_of_nothing():
    with pytest.raises(ValueError, match="no sequence"):
        split_to_fit([], 10)


# Over kept prefixes

KEPT = [[7] * 3, [7] * 5, [8, 9, 8, 9]]
continuing = st.lists(
    st.tuples(st.integers(-1, len(KEPT) - 1), st.lists(st.sampled_from([1, 2, 7]), min_size=1, max_size=7)),
    min_size=1,
    max_size=12,
)


def check_continued(forest: Forest, sequences: list[list[int]], prefix: list[int]) -> None:
    """Every sequence's path holds its own tokens, positions and predecessors behind those of its kept prefix."""
    assert forest.rows_asked == sum(map(len, sequences)) and forest.kept_length == tuple(map(len, KEPT))
    nodes = len(forest.node_start)
    ends = forest.node_start + forest.node_length
    assert ends.tolist() == [*forest.node_start[1:].tolist(), len(forest.token)]
    assert forest.node.tolist() == np.repeat(np.arange(nodes), forest.node_length).tolist()
    assert (forest.node_parent < np.arange(nodes)).all()
    for parent, level, kept in zip(forest.node_parent, forest.node_level, forest.node_kept, strict=True):
        assert level == (0 if parent < 0 else forest.node_level[parent] + 1)
        assert kept == -1 or parent == -1
    # Once for each prefix they continue.
    assert len(forest.token) == len(
        {
            (chosen, tuple(sequence[:length]))
            for sequence, chosen in zip(sequences, prefix, strict=True)
            for length in range((len(KEPT[chosen]) if chosen >= 0 else 0) + 1, len(sequence) + 1)
        }
    )
    for sequence, chosen, read in zip(sequences, prefix, forest.candidate_read, strict=True):
        skipped = len(KEPT[chosen]) if chosen >= 0 else 0
        rows = path_of(forest, int(forest.read_row[read]))
        assert forest.token[rows].tolist() == sequence[skipped:]
        assert forest.position[rows].tolist() == list(range(skipped, len(sequence)))
        assert forest.node_kept[forest.node[rows[0]]] == chosen
        assert forest.kept_prefix(int(forest.node[rows[-1]])) == chosen
        before = [-2 - (3 * chosen + i) for i in range(3)] if chosen >= 0 else [-1] * 3
        for at, row in enumerate(rows):
            assert forest.predecessor[row].tolist() == [*before, *rows][: at + 3][:-4:-1]
    for name in ("token", "position", "node", "predecessor", "node_start", "node_parent", "read_row"):
        assert getattr(forest, name).dtype == np.int32, name


@settings(max_examples=200, deadline=None)
@given(continuing, st.data())
def test_what_continues_kept_prefixes_is_a_tree_of_its_own(chosen, data):
    prefix = [kept for kept, _ in chosen]
    sequences = [[*(KEPT[kept] if kept >= 0 else []), *rest] for kept, rest in chosen]
    forest = continue_forest(arrays(sequences), prefix, [len(kept) for kept in KEPT])
    check_continued(forest, sequences, prefix)
    for _ in range(2):
        candidate = data.draw(st.integers(0, len(sequences) - 1))
        skipped = len(KEPT[prefix[candidate]]) if prefix[candidate] >= 0 else 0
        depth = data.draw(st.integers(skipped + 1, len(sequences[candidate])))
        forest = forest.cut(candidate, depth)
        check_continued(forest, sequences, prefix)
        node = forest.node_at(candidate, depth - 1)
        last = int(forest.node_start[node] + forest.node_length[node]) - 1
        assert forest.position[last] == depth - 1
        path = forest.path(node)
        assert path[-1] == last
        assert forest.token[path].tolist() == sequences[candidate][skipped:depth]


def test_a_cut_where_a_node_ends_changes_nothing():
    forest = build_forest(arrays([[1, 2, 3, 4], [1, 2, 5]]))
    assert forest.cut(0, 2) is forest and forest.cut(1, 3) is forest
    assert len(forest.cut(0, 3).node_start) == len(forest.node_start) + 1
