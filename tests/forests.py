"""Forests for tests, given by node lengths and parents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tree:
    """Nodes with contiguous rows; parents come before children."""

    length: np.ndarray
    parent: np.ndarray

    @classmethod
    def of(cls, *nodes: tuple[int, int]) -> Tree:
        """Nodes as (length, parent)."""
        return cls(np.array([length for length, _ in nodes]), np.array([parent for _, parent in nodes]))

    @property
    def start(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.length)[:-1]])

    @property
    def rows(self) -> int:
        return int(self.length.sum())

    @property
    def node_of_row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.length)), self.length)

    @property
    def nodes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.start, self.length, self.parent

    def path(self, node: int) -> np.ndarray:
        """Rows from the root to the end of a node."""
        start = self.start
        rows = np.arange(start[node], start[node] + self.length[node])
        return rows if self.parent[node] < 0 else np.concatenate([self.path(self.parent[node]), rows])


def split_sequence(length: int, at: int) -> Tree:
    """One sequence as a node and its only child."""
    return Tree.of((at, -1), (length - at, 0))


TREES = {
    "one_row": Tree.of((1, -1)),
    "one_node_200": Tree.of((200, -1)),
    "two_roots": Tree.of((5, -1), (70, -1), (3, 1), (2, 0)),
    "fan_out_255": Tree.of((30, -1), *[(1 + i % 19, 0) for i in range(255)]),
    "depth_6": Tree.of((65, -1), (1, 0), (64, 1), (63, 2), (17, 3), (16, 4)),
    "chunk_edges": Tree.of((64, -1), (127, 0), (128, 0), (129, 1), (15, 1), (16, 2), (17, 2)),
    "example": Tree.of((38, -1), (18, 0), (15, 0), (20, 0), *[(20, 1 + 2 * (i // 3)) for i in range(6)]),
}
