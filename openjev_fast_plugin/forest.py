"""Token sequences to a forest of packed rows that holds each distinct prefix once. Host code, numpy only.

The sequences may come from several questions and several requests: whatever they share is shared. A node is a
run of rows that no path leaves or enters on the way; paths diverge only at the end of a node. Rows, nodes and
read rows depend on the set of distinct sequences alone, never on their order, so renaming or reordering
questions changes nothing in the computation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class Forest:
    """N packed rows in K nodes, read at M rows for C input sequences.

    token: [N], int32, token id of each row.
    position: [N], int32, depth of the row on its path, from 0.
    node: [N], int32, node of each row.
    predecessor: [N, 3], int32, rows 1, 2 and 3 steps back on the path, -1 before its start.
    node_start: [K], int32, first row of each node; the rows of a node are contiguous.
    node_length: [K], int32, at least 1.
    node_parent: [K], int32, parent node, -1 for a root; a parent comes before its children.
    node_level: [K], int32, 0 for a root; nodes, and so rows, are ordered by level, then by path.
    read_row: [M], int32, the distinct rows at which a sequence ends, ascending.
    candidate_read: [C], int32, index into read_row of each input sequence, in input order.
    rows_asked: sum of the sequence lengths.
    """

    token: np.ndarray
    position: np.ndarray
    node: np.ndarray
    predecessor: np.ndarray
    node_start: np.ndarray
    node_length: np.ndarray
    node_parent: np.ndarray
    node_level: np.ndarray
    read_row: np.ndarray
    candidate_read: np.ndarray
    rows_asked: int


def build_forest(sequences: Sequence[np.ndarray]) -> Forest:
    """Pack sequences so that the number of rows is the number of distinct prefixes.

    sequences: C arrays [L], int32 or int64, L >= 1, ids in [0, 2**31).
    Returns a Forest. Raises ValueError when there is no sequence, an empty one, one that is not a
    one-dimensional integer array, or an id out of range.
    """
    text = _SortedSequences(sequences)

    # One leaf for each sequence that is not a prefix of the next; the others end on the path of the leaf
    # after them. The stack is the path to the newest leaf. A node covers depths [begin, end) and keeps the
    # first leaf below it.
    begin: list[int] = []
    end: list[int] = []
    parent: list[int] = []
    first_leaf: list[int] = []
    stack: list[int] = []
    ends_under: list[tuple[int, list[int]]] = []
    waiting: list[int] = []
    shared = 0
    for index, length in enumerate(text.length):
        if not waiting:
            shared = text.shared[index]
        waiting.append(index)
        if index + 1 < len(text.length) and text.shared[index + 1] == length:
            continue
        while stack and begin[stack[-1]] >= shared:
            stack.pop()
        if stack and end[stack[-1]] > shared:
            below = stack.pop()
            upper = len(begin)
            begin.append(begin[below])
            end.append(shared)
            parent.append(parent[below])
            first_leaf.append(first_leaf[below])
            begin[below] = shared
            parent[below] = upper
            stack.append(upper)
        leaf = len(begin)
        begin.append(shared)
        end.append(length)
        parent.append(stack[-1] if stack else -1)
        first_leaf.append(index)
        stack.append(leaf)
        ends_under.append((leaf, waiting))
        waiting = []

    # Depth first a parent comes before its children; a stable sort by level keeps the order of paths.
    level = [0] * len(begin)
    preorder = sorted(range(len(begin)), key=lambda node: (first_leaf[node], begin[node]))
    for node in preorder:
        if parent[node] >= 0:
            level[node] = level[parent[node]] + 1
    by_level = np.array(sorted(preorder, key=level.__getitem__), dtype=np.int32)
    renamed = np.empty(len(begin) + 1, dtype=np.int32)
    renamed[by_level] = np.arange(len(by_level), dtype=np.int32)
    renamed[-1] = -1

    node_begin = np.array(begin, dtype=np.int32)[by_level]
    node_length = np.array(end, dtype=np.int32)[by_level] - node_begin
    node_end_row = np.cumsum(node_length, dtype=np.int32)
    node_start = node_end_row - node_length
    node_parent = renamed[np.array(parent, dtype=np.int32)[by_level]]
    node_source = text.offset[np.array(first_leaf, dtype=np.int64)[by_level]]

    row = np.arange(node_end_row[-1], dtype=np.int32)
    node_of_row = np.repeat(np.arange(len(by_level), dtype=np.int32), node_length)
    position = row + np.repeat(node_begin - node_start, node_length)
    token = text.flat[position + np.repeat(node_source, node_length)]

    # Index -1 reads the extra last element, so that what comes before a start stays -1.
    back = np.empty(len(row) + 1, dtype=np.int32)
    back[:-1] = row - 1
    back[node_start] = np.where(node_parent >= 0, node_end_row[node_parent] - 1, -1)
    back[-1] = -1
    one = back[:-1]
    two = back[one]
    predecessor = np.stack((one, two, back[two]), axis=1)

    # What ends under a leaf ends on nodes this leaf was the first to reach: each node is climbed once.
    row_of = np.empty(len(text.length), dtype=np.int32)
    for leaf, indices in ends_under:
        at = leaf
        for index in reversed(indices):
            last = text.length[index] - 1
            while begin[at] > last:
                at = parent[at]
            row_of[index] = node_start[renamed[at]] + last - begin[at]
    read_row, read_of = np.unique(row_of, return_inverse=True)
    return Forest(
        token=token.astype(np.int32, copy=False),
        position=position,
        node=node_of_row,
        predecessor=predecessor,
        node_start=node_start,
        node_length=node_length,
        node_parent=node_parent,
        node_level=np.array(level, dtype=np.int32)[by_level],
        read_row=read_row,
        candidate_read=read_of.astype(np.int32)[text.distinct_of],
        rows_asked=len(text.flat),
    )


def count_rows(sequences: Sequence[np.ndarray]) -> int:
    """Number of distinct prefixes: the rows that build_forest would return, without building.

    sequences and errors: as for build_forest.
    """
    text = _SortedSequences(sequences)
    return sum(text.length) - sum(text.shared)


def split_to_fit(groups: Sequence[Sequence[np.ndarray]], max_rows: int) -> list[list[tuple[int, slice]]]:
    """Cut the candidates of several questions into forwards of at most max_rows packed rows each.

    groups: the candidate sequences of each question, each as for build_forest.
    max_rows: largest count_rows of one forward.
    Returns the forwards in order, each a list of (question, slice of its candidates). Questions and
    candidates keep their order. A question is cut only when it does not fit into a forward of its own, so no
    forward begins inside a question that would fit whole. Raises ValueError as build_forest does, for a
    question without candidates, and for one path longer than max_rows.
    """
    for question, group in enumerate(groups):
        if not len(group):
            raise ValueError(f"question {question} has no candidate sequence")
    every = [sequence for group in groups for sequence in group]
    if count_rows(every) <= max_rows:
        return [[(question, slice(0, len(group))) for question, group in enumerate(groups)]]
    longest = max(len(sequence) for sequence in every)
    if longest > max_rows:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit into one forward of at most {max_rows} rows"
        )

    parts: list[list[tuple[int, slice]]] = []
    part: list[tuple[int, slice]] = []
    rows = RowCount()
    for question, group in enumerate(groups):
        if part:
            if all(rows.add(sequence) <= max_rows for sequence in group):
                part.append((question, slice(0, len(group))))
                continue
            parts.append(part)
            part, rows = [], RowCount()
        first = 0
        for index, sequence in enumerate(group):
            if rows.add(sequence) > max_rows:
                parts.append([(question, slice(first, index))])
                first, rows = index, RowCount()
                rows.add(sequence)
        part.append((question, slice(first, len(group))))
    parts.append(part)
    return parts


class _SortedSequences:
    """The distinct sequences in lexicographic order, a prefix before what continues it.

    flat: [sum of lengths], integer, the input sequences one after the other.
    offset: [D], int64, where in flat each distinct sequence begins.
    length: D lengths.
    shared: D numbers, tokens shared with the distinct sequence before (0 for the first).
    distinct_of: [C], int64, distinct sequence of each input sequence.
    """

    def __init__(self, sequences: Sequence[np.ndarray]) -> None:
        self.flat, bounds = flatten(sequences)
        check_ids(self.flat)
        common = len(sequences[0])
        for sequence in sequences:
            common = _shared_length(sequences[0][:common], sequence)
        # What all of them share decides no order: only the rest is compared.
        keys = [_sort_key(self.flat[start + common : stop]) for start, stop in pairwise(bounds)]
        offsets: list[int] = []
        self.length: list[int] = []
        self.shared: list[int] = []
        self.distinct_of = np.empty(len(keys), dtype=np.int64)
        rest_before = self.flat[:0]
        key_before: bytes | None = None
        for index in sorted(range(len(keys)), key=keys.__getitem__):
            if keys[index] != key_before:
                rest = self.flat[bounds[index] + common : bounds[index + 1]]
                offsets.append(bounds[index])
                self.length.append(common + len(rest))
                self.shared.append(0 if key_before is None else common + _shared_length(rest_before, rest))
                rest_before, key_before = rest, keys[index]
            self.distinct_of[index] = len(offsets) - 1
        self.offset = np.array(offsets, dtype=np.int64)


class RowCount:
    """Packed rows of a growing set of valid sequences [L]."""

    def __init__(self) -> None:
        self._rows = 0
        self._keys: list[bytes] = []
        self._sequences: list[np.ndarray] = []

    def shared(self, sequence: np.ndarray) -> int:
        """Rows of this sequence that the set has already."""
        return self._find(_sort_key(sequence), sequence)[1]

    def add(self, sequence: np.ndarray) -> int:
        """Add a sequence; returns the rows of the whole set."""
        key = _sort_key(sequence)
        at, shared = self._find(key, sequence)
        self._keys.insert(at, key)
        self._sequences.insert(at, sequence)
        self._rows += len(sequence) - shared
        return self._rows

    def _find(self, key: bytes, sequence: np.ndarray) -> tuple[int, int]:
        """Where a sequence belongs in lexicographic order, and its longest prefix in the set."""
        at = bisect_left(self._keys, key)
        # The longest shared prefix is with a neighbour in lexicographic order.
        near = self._sequences[max(at - 1, 0) : at + 1]
        return at, max((_shared_length(each, sequence) for each in near), default=0)


def flatten(sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """All sequences in one array, and the C + 1 bounds between them; ValueError as build_forest says, but for ids."""
    if not len(sequences):
        raise ValueError("there is no sequence to pack")
    bounds = [0]
    for index, sequence in enumerate(sequences):
        if sequence.ndim != 1 or sequence.dtype.kind not in "iu":
            found = f"{sequence.dtype} {sequence.shape}"
            raise ValueError(f"sequence {index} must be a one-dimensional integer array, not {found}")
        if not len(sequence):
            raise ValueError(f"sequence {index} is empty")
        bounds.append(bounds[-1] + len(sequence))
    return np.concatenate(sequences), bounds


def check_ids(tokens: np.ndarray) -> None:
    """Raises ValueError where an id is out of range."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > _MAX_TOKEN:
        raise ValueError(f"token ids must lie in [0, 2**31), got {low} to {high}")


def _sort_key(tokens: np.ndarray) -> bytes:
    """Bytes whose order is the lexicographic order of token ids: four a token, most significant first."""
    return tokens.astype(">u4").tobytes()


def _shared_length(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common prefix of two sequences."""
    limit = min(len(one), len(other))
    differs = one[:limit] != other[:limit]
    if not limit:
        return 0
    first = int(differs.argmax())
    return first if differs[first] else limit
