"""Token sequences to a forest of packed rows that holds each distinct prefix once. Host code, numpy only.

The sequences may come from several questions and several requests: whatever they share is shared. A node is a
run of rows that no path leaves or enters on the way; paths diverge only at the end of a node. Rows, nodes and
read rows depend on the set of distinct sequences alone, never on their order, so renaming or reordering
questions changes nothing in the computation.

Sequences may also continue prefixes whose states were kept from an earlier forward: `continue_forest` packs what
comes after them, and `Forest.cut` makes a node end where a prefix to be kept does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

_MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class Forest:
    """N packed rows in K nodes, read at M rows for C input sequences.

    token: [N], int32, token id of each row.
    position: [N], int32, depth of the row on its path, from 0.
    node: [N], int32, node of each row.
    predecessor: [N, 3], int32, rows 1, 2 and 3 steps back on the path, -1 before its start; -2 - (3 p + i) is row i of
        the last three of kept prefix p.
    node_start: [K], int32, first row of each node; the rows of a node are contiguous.
    node_length: [K], int32, at least 1.
    node_parent: [K], int32, parent node, -1 for a root; a parent comes before its children.
    node_level: [K], int32, 0 for a root; as `build_forest` returns them, nodes, and so rows, are ordered by level,
        then by path.
    read_row: [M], int32, the distinct rows at which a sequence ends, ascending.
    candidate_read: [C], int32, index into read_row of each input sequence, in input order.
    rows_asked: sum of the sequence lengths.
    node_kept: [K], int32, kept prefix that a root continues, -1 for every other node; None: there are no kept prefixes.
    kept_length: rows of each kept prefix.
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
    node_kept: np.ndarray | None = None
    kept_length: tuple[int, ...] = ()

    def node_at(self, candidate: int, depth: int) -> int:
        """The node of the row at a depth of a candidate's path, a depth that no kept prefix holds."""
        node = int(self.node[self.read_row[self.candidate_read[candidate]]])
        while self.position[self.node_start[node]] > depth:
            node = int(self.node_parent[node])
        return node

    def path(self, node: int) -> np.ndarray:
        """Packed rows from the root to the end of a node, without those of a kept prefix."""
        runs = []
        while node >= 0:
            runs.append(np.arange(self.node_start[node], self.node_start[node] + self.node_length[node]))
            node = int(self.node_parent[node])
        return np.concatenate(runs[::-1])

    def kept_prefix(self, node: int) -> int:
        """The kept prefix that a node's path continues, -1 for none."""
        if self.node_kept is None:
            return -1
        while self.node_parent[node] >= 0:
            node = int(self.node_parent[node])
        return int(self.node_kept[node])

    def cut(self, candidate: int, depth: int) -> Forest:
        """The same rows, with a node that ends before this depth of a candidate's path.

        depth: more than the rows of a kept prefix on the path, at most the path's length. The second part of a node
        that is cut comes after the first and has its children.
        """
        node = self.node_at(candidate, depth - 1)
        first = int(self.node_start[node])
        length = depth - int(self.position[first])
        if length == self.node_length[node]:
            return self
        parent = np.insert(self.node_parent, node + 1, node)
        # Children, and nodes that have moved by one.
        later = np.arange(len(parent)) != node + 1
        parent[later & (parent >= node)] += 1
        level = np.zeros_like(parent)
        for at in range(len(parent)):
            level[at] = 0 if parent[at] < 0 else level[parent[at]] + 1
        start = np.insert(self.node_start, node + 1, first + length)
        lengths = np.insert(self.node_length, node + 1, self.node_length[node] - length)
        lengths[node] = length
        of_row = self.node.copy()
        of_row[first + length :] += 1
        return replace(
            self,
            node=of_row,
            node_start=start,
            node_length=lengths,
            node_parent=parent,
            node_level=level,
            node_kept=None if self.node_kept is None else np.insert(self.node_kept, node + 1, -1),
        )


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


def continue_forest(
    sequences: Sequence[np.ndarray], prefix: Sequence[int], kept_length: Sequence[int]
) -> Forest:
    """As `build_forest`, without the rows that kept prefixes hold: their sequences are trees of their own.

    sequences: as for `build_forest`. prefix: [C], the kept prefix each begins with, -1 for none. kept_length: rows of
    each kept prefix, at least 3, fewer than any sequence has that begins with it.
    """
    members: dict[int, list[int]] = {}
    for candidate, chosen in enumerate(prefix):
        members.setdefault(chosen, []).append(candidate)
    parts, rows, nodes, reads = [], 0, 0, 0
    candidate_read = np.empty(len(sequences), dtype=np.int32)
    for chosen in sorted(members):
        skipped = kept_length[chosen] if chosen >= 0 else 0
        part = build_forest([sequences[candidate][skipped:] for candidate in members[chosen]])
        candidate_read[members[chosen]] = part.candidate_read + reads
        # Row i of a prefix's last three is as deep as its third row before the start would be.
        before = part.position[:, None] - np.arange(1, 4, dtype=np.int32)
        kept_row = -2 - (3 * chosen + 3 + before)
        started = part.predecessor + rows
        outside = kept_row if chosen >= 0 else np.full_like(kept_row, -1)
        is_root = part.node_parent < 0
        parts.append(
            replace(
                part,
                position=part.position + skipped,
                node=part.node + nodes,
                predecessor=np.where(before < 0, outside, started).astype(np.int32),
                node_start=part.node_start + rows,
                node_parent=np.where(is_root, -1, part.node_parent + nodes).astype(np.int32),
                read_row=part.read_row + rows,
                node_kept=np.where(is_root, chosen, -1).astype(np.int32),
            )
        )
        rows, nodes, reads = (
            rows + len(part.token),
            nodes + len(part.node_start),
            reads + len(part.read_row),
        )

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    tables = ("token", "position", "node", "predecessor", "read_row", "node_kept")
    of_nodes = ("node_start", "node_length", "node_parent", "node_level")
    return Forest(
        **{name: joined(name) for name in (*tables, *of_nodes)},
        candidate_read=candidate_read,
        rows_asked=sum(map(len, sequences)),
        kept_length=tuple(kept_length),
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
