"""Hierarchical clustering by average linkage."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class AverageLinkage:
    """The merges of N points by average linkage, found by nearest-neighbour chains.

    Murtagh (1983): follow nearest neighbours until two clusters are each other's, merge these, and go on from there.
    Average linkage never brings a merged cluster nearer to another than both of its parts were, so the merges are those
    of the plain algorithm, in another order. Each step costs a row: O(N²) in all.

    Args:
        distances: (N, N) symmetric.
    """

    def __init__(self, distances: NDArray[np.floating]) -> None:
        count = len(distances)
        table = np.array(distances, dtype=np.float64)
        np.fill_diagonal(table, np.inf)
        sizes = np.ones(count)
        left = np.ones(count, dtype=bool)
        self.merges = np.zeros((max(0, count - 1), 2), dtype=np.int64)
        """(N - 1, 2) a member of each of the two clusters merged."""
        self.heights = np.zeros(len(self.merges))
        """(N - 1,) their average distance."""
        chain: list[int] = []
        for step in range(len(self.merges)):
            if not chain:
                chain = [int(left.argmax())]
            while True:
                row = table[chain[-1]]
                near = int(row.argmin())
                if len(chain) > 1 and row[chain[-2]] <= row[near]:
                    break
                chain.append(near)
            gone, kept = sorted(chain[-2:])
            del chain[-2:]
            self.merges[step], self.heights[step] = (gone, kept), table[gone, kept]
            merged = (sizes[gone] * table[gone] + sizes[kept] * table[kept]) / (sizes[gone] + sizes[kept])
            merged[kept] = np.inf
            table[kept], table[:, kept] = merged, merged
            table[gone], table[:, gone] = np.inf, np.inf
            sizes[kept] += sizes[gone]
            left[gone] = False

    def cut(self, height: float) -> NDArray[np.int64]:
        """(N,) cluster numbers from 0, once all merges up to this height are made."""
        parent = np.arange(len(self.merges) + 1)
        for one, other in self.merges[self.heights <= height].tolist():
            parent[_root(parent, one)] = _root(parent, other)
        roots = [_root(parent, point) for point in range(len(parent))]
        return np.unique(roots, return_inverse=True)[1].astype(np.int64)


def _root(parent: NDArray[np.int64], point: int) -> int:
    while parent[point] != point:
        parent[point] = parent[parent[point]]
        point = int(parent[point])
    return point
