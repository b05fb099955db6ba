"""Programs as rows of a sparse binary matrix, and greedy maximisation of coverage.

Each step takes the candidate that covers most of what is left. `greedy_coverage` is Algorithm 1 of the paper (for the
oracle, the fixed set and SFT); `greedy_set_cover` is that of Gupta, Gardner and Singh, for degrees of coverage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from itertools import chain

import numpy as np
from scipy import sparse

from langchain_rcr.index.ranking import checked_exclude
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.data.arrays import row_blocks

_GRID = 2.0**-16  # degrees of coverage are rounded to this, so that ties stay ties in whatever order BLAS sums


class PoolStructures:
    """Which structures a pool's programs have, by name, sorted; later programs map to the same columns."""

    def __init__(self, spec: ProgramSpec, programs: Sequence[str]) -> None:
        self._structures = cache(lambda program: tuple(spec.structures(program)))  # sets would take six times as much
        self.names = sorted(frozenset[str]().union(*map(self._structures, dict.fromkeys(programs))))
        self._columns = {name: i for i, name in enumerate(self.names)}
        self.matrix = self.rows(programs)

    def rows(self, programs: Sequence[str]) -> sparse.csr_array:
        """Binary float32 (B, S) for any B programs; structures that the pool lacks are dropped."""
        names = map(self._structures, programs)
        rows = [sorted(self._columns[name] for name in own if name in self._columns) for own in names]
        indices = np.fromiter(chain.from_iterable(rows), dtype=np.int32)
        indptr = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        data = np.ones(len(indices), dtype=np.float32)
        return sparse.csr_array((data, indices, indptr), shape=(len(programs), len(self._columns)))


def structure_matrices(spec: ProgramSpec, *program_lists: Sequence[str]) -> list[sparse.csr_array]:
    """For each list of N_i programs, a binary float32 matrix (N_i, S); the S columns are all lists' structures."""
    everything = PoolStructures(spec, list(dict.fromkeys(chain.from_iterable(program_lists))))
    return [everything.rows(programs) for programs in program_lists]


def greedy_coverage(
    needs: sparse.csr_array, pool: sparse.csr_array, k: int, exclude: Sequence[Collection[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Pick k candidates per query, each the one that covers most of what the earlier ones left (Algorithm 1).

    Ties go to the lowest position. Once no candidate covers more, the rest are those with most overlap with the whole
    need; their gain is 0. A smaller k gives the first k of the same picks.

    Args:
        needs: (B, S) non-negative; what covering structure s is worth to query b.
        pool: (N, S) binary; which candidates have which structures.
        k: picks per query.
        exclude: per query, the positions that it may not pick; an `InputError` if fewer than k are left.

    Returns:
        Positions (B, k) int64 in pick order, and gains (B, k): the worth of what each pick newly covers.
    """
    needs = needs.astype(np.result_type(needs.dtype, np.float32))
    by_structure = sparse.csr_array(pool.T).astype(needs.dtype)
    all_positions = np.empty((needs.shape[0], k), dtype=np.int64)
    all_gains = np.empty((needs.shape[0], k), dtype=needs.dtype)
    for block in row_blocks(needs.shape[0], pool.shape[0]):
        positions, gains, uncovered = all_positions[block], all_gains[block], needs[block]
        overlap = (uncovered @ by_structure).toarray()  # (b, N): worth of a candidate alone; -inf if barred
        for own, barred in zip(overlap, checked_exclude(exclude[block], len(overlap), pool.shape[0], k), strict=True):
            own[barred] = -np.inf
        gain, rows = overlap.copy(), np.arange(len(overlap))
        for t in range(k):
            best = gain.argmax(axis=1)
            gains[:, t] = gain[rows, best]
            positions[:, t] = best = np.where(gains[:, t] > 0, best, overlap.argmax(axis=1))
            overlap[rows, best] = -np.inf
            # Recomputed rather than updated: rounding would turn a gain of zero into a small positive one.
            uncovered = uncovered - uncovered.multiply(pool[best])
            gain = (uncovered @ by_structure).toarray()
            gain[np.isneginf(overlap)] = -np.inf
    return all_positions, all_gains


def recall(gold: sparse.csr_array, pool: sparse.csr_array, positions: np.ndarray) -> np.ndarray:
    """Share of each gold program's structures that one of its picks has, (B,) float64.

    From binary `gold` (B, S), of which no row may be empty, a binary pool (N, S), and the positions of picks (B, k).
    """
    shown = sum((pool[picks] for picks in positions.T), start=sparse.csr_array(gold.shape))
    return np.asarray(gold.multiply(shown > 0).sum(axis=1), dtype=np.float64) / np.diff(gold.indptr)


def greedy_set_cover(coverage: np.ndarray, row_of: np.ndarray, barred: np.ndarray, k: int) -> np.ndarray:
    """Pick k candidates for a query (k,), each the one that adds most to the cover; ties go to the lowest position.

    Once nothing adds anything, a new cover starts from the remaining candidates. A smaller k gives the first k of the
    same picks; a query without aspects gets the lowest positions.

    Args:
        coverage: (T, U); how well text u covers aspect t of the query.
        row_of: (N,); the text of each candidate.
        barred: the positions that may not be picked; at least k are left.
        k: how many picks.
    """
    coverage = np.rint(coverage / _GRID) * _GRID
    alone = coverage.sum(axis=0)[row_of]  # what each candidate covers on its own; −inf if barred
    alone[barred] = -np.inf
    positions = np.empty(k, dtype=np.int64)
    covered = np.full(len(coverage), np.inf, dtype=coverage.dtype)
    for t in range(k):
        gain = np.maximum(coverage - covered[:, None], 0).sum(axis=0)[row_of]
        gain[np.isneginf(alone)] = -np.inf
        goes_on = gain.max() > 0
        positions[t] = best = (gain if goes_on else alone).argmax()
        alone[best] = -np.inf
        by_pick = coverage[:, row_of[best]]
        covered = np.maximum(covered, by_pick) if goes_on else by_pick
    return positions
