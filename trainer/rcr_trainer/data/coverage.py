"""Programs as rows of a sparse binary matrix, and greedy maximisation of coverage.

At every step the candidate that covers most of what is still uncovered: Algorithm 1 of the paper, of which the oracle,
the fixed set and the supervision of SFT differ in what a query needs (its gold program's structures, the mean over
training queries, soft targets); and Algorithm 1 of Gupta, Gardner and Singh, for degrees of coverage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from langchain_rcr.errors import InputError
from langchain_rcr.index.ranking import blocks, checked_exclude, places

if TYPE_CHECKING:
    from langchain_rcr.programs import ProgramSpec


_BLOCK_ELEMENTS = 1 << 23  # queries × candidates that are dense at once: 32 MiB in float32


class PoolStructures:
    """A pool's structure matrix whose columns stay put, so that programs seen later map onto them.

    Args:
        spec: how programs are read.
        programs: the pool's N programs; one that doesn't parse gets an empty row, one that repeats is parsed once.

    Attributes:
        names: of the S structures, sorted.
        matrix: binary float32 (N, S); row n holds the local structures of program n, columns as in `names`.
    """

    def __init__(self, spec: ProgramSpec, programs: Sequence[str]) -> None:
        self._structures = cache(spec.structures)
        known = map(self._structures, dict.fromkeys(programs))
        self.names = sorted(frozenset[str]().union(*known))
        self._columns = {name: i for i, name in enumerate(self.names)}
        self.matrix = self.rows(programs)

    def rows(self, programs: Sequence[str]) -> sparse.csr_array:
        """Binary float32 (B, S) for B programs, pool's or not; structures that the pool lacks have no column."""
        names = map(self._structures, programs)
        rows = [sorted(self._columns[name] for name in own if name in self._columns) for own in names]
        indices = np.fromiter(chain.from_iterable(rows), dtype=np.int32)
        indptr = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        data = np.ones(len(indices), dtype=np.float32)
        return sparse.csr_array((data, indices, indptr), shape=(len(programs), len(self._columns)))


def structure_matrices(spec: ProgramSpec, *program_lists: Sequence[str]) -> list[sparse.csr_array]:
    """A matrix per list of programs: which of all lists' local structures each program has.

    Args:
        spec: how programs are read. A program that doesn't parse gets an empty row.
        program_lists: lists of programs; list i has N_i of them. Repeated programs are parsed once.

    Returns:
        Per list a binary float32 matrix (N_i, S), column indices sorted within rows. Column j of every matrix is the
        same structure: the S structures of all programs in all lists, sorted by name.
    """
    everything = PoolStructures(spec, list(dict.fromkeys(chain.from_iterable(program_lists))))
    return [everything.rows(programs) for programs in program_lists]


def program_groups(spec: ProgramSpec, programs: Sequence[str]) -> np.ndarray:
    """(N,) int64: a number for each program; the same programs (`ProgramSpec.key`) have the same."""
    return np.unique([spec.key(program) for program in programs], return_inverse=True)[1].astype(np.int64)


def greedy_coverage(
    needs: sparse.csr_array,
    pool: sparse.csr_array,
    k: int,
    exclude: Sequence[Collection[int]] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Pick k candidates per query, each the one that covers most of what the earlier ones left (Algorithm 1).

    Ties go to the lowest position. Once nothing uncovered can be reached, the steps left take the candidates with
    the most overlap with the whole need, then the lowest position, and their gain is 0. The picks for k are the
    first k of those for any larger k. Memory is bounded by blocks of queries, whatever the pool's size.

    Args:
        needs: (B, S) non-negative; needs[b, s] is the worth to query b of covering structure s.
        pool: (N, S) binary; pool[n, s] says that candidate n has structure s.
        k: picks per query.
        exclude: per query, the positions it may not pick.

    Returns:
        positions (B, k) int64 in pick order, and gains (B, k): the worth newly covered by each pick.

    Raises:
        InputError: the shapes don't fit, or k is more than what a query has left to pick from.
    """
    if needs.shape[1] != pool.shape[1]:
        raise InputError(f"needs has {needs.shape[1]} structures (columns), the pool has {pool.shape[1]}")
    excluded = checked_exclude(exclude, needs.shape[0], pool.shape[0], k)
    pool = sparse.csr_array(pool)
    needs = sparse.csr_array(needs).astype(np.result_type(needs.dtype, np.float32))
    by_structure = sparse.csr_array(pool.T).astype(needs.dtype)
    positions = np.empty((needs.shape[0], k), dtype=np.int64)
    gains = np.empty((needs.shape[0], k), dtype=needs.dtype)
    for block in row_blocks(needs.shape[0], pool.shape[0]):
        positions[block], gains[block] = _greedy_block(needs[block], pool, by_structure, excluded[block], k)
    return positions, gains


def _greedy_block(
    needs: sparse.csr_array,
    pool: sparse.csr_array,
    by_structure: sparse.csr_array,
    excluded: Sequence[np.ndarray],
    k: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and gains (b, k) for one block of queries."""
    overlap = (needs @ by_structure).toarray()  # (b, N): worth of each candidate on its own; -inf: not to be picked
    overlap[places(excluded, overlap.shape[1])] = -np.inf
    positions = np.empty((len(overlap), k), dtype=np.int64)
    gains = np.zeros((len(overlap), k), dtype=overlap.dtype)
    gain = overlap.copy()
    gaining = np.arange(len(overlap))  # the queries that can still gain: rows of `gain` and `uncovered`
    uncovered = needs
    for t in range(k):
        best = gain.argmax(axis=1)
        worth = gain[np.arange(len(gaining)), best]
        useful = worth > 0
        best, gaining = best[useful], gaining[useful]
        positions[gaining, t], gains[gaining, t] = best, worth[useful]
        stuck = np.setdiff1d(np.arange(len(overlap)), gaining)
        positions[stuck, t] = overlap[stuck].argmax(axis=1)
        overlap[np.arange(len(overlap)), positions[:, t]] = -np.inf
        if t + 1 == k:
            break
        # Recomputed, not updated by differences: rounding would turn a soft gain of zero into a small positive one.
        uncovered = uncovered[useful]
        uncovered = uncovered - uncovered.multiply(pool[best])
        gain = (uncovered @ by_structure).toarray()
        gain[np.isneginf(overlap[gaining])] = -np.inf
    return positions, gains


def recall_by_step(gold: sparse.csr_array, pool: sparse.csr_array, positions: np.ndarray) -> np.ndarray:
    """Share of each gold program's structures found in the union of its first 1, 2, …, T picks.

    Args:
        gold: (B, S) binary; no row may be empty.
        pool: (N, S) binary, over the same structures.
        positions: (B, T) picks.

    Returns:
        (B, T) float64 from 0 to 1; [b, t] counts the picks 0 … t of query b.
    """
    n_queries, n_steps = positions.shape
    needed = sparse.csr_array(gold)[np.repeat(np.arange(n_queries), n_steps)]
    found = sparse.csr_array(pool)[positions.ravel()].multiply(needed).tocoo()
    query, step = np.divmod(found.row.astype(np.int64), n_steps)
    structure = query * gold.shape[1] + found.col
    order = np.lexsort((step, structure))
    _, first = np.unique(structure[order], return_index=True)
    newly = np.bincount((query * n_steps + step)[order][first], minlength=n_queries * n_steps)
    sizes = np.diff(sparse.csr_array(gold).indptr)
    recall: np.ndarray = newly.reshape(n_queries, n_steps).cumsum(axis=1) / sizes[:, None]
    return recall


def row_blocks(n_rows: int, n_columns: int, most: int | None = None) -> Iterator[slice]:
    """Slices over n_rows; a dense block of n_columns has `most` elements (default 8 million) or fewer, or one row."""
    return blocks(n_rows, n_columns, most or _BLOCK_ELEMENTS)


# Degrees of coverage are rounded to this fraction: exact ties stay ties, whatever order BLAS sums in.
_GRID = 2.0**-16


def greedy_set_cover(
    coverage: np.ndarray,
    owner: np.ndarray,
    row_of: np.ndarray,
    excluded: Sequence[np.ndarray],
    k: int,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Pick k candidates per query, each the one that adds most to what the picks cover; ties go to the lowest position.

    Once nothing adds anything, a new cover is begun from nothing with the candidates that are left, as in Algorithm 1.
    The picks for k are the first k of those for any larger k.

    Args:
        coverage: (T, U) floats; coverage[t, u] says how well the text u covers the aspect t.
        owner: (T,) int, ascending; the query that each aspect belongs to. A query may have none: it gets the lowest
            positions.
        row_of: (N,) int; candidate n has the text row_of[n].
        excluded: for each of the b queries, the positions it may not pick; k are left to every query.
        k: picks per query.
        groups: (N,) int; of each group one candidate is picked before any group has a second. None: no such rule.

    Returns:
        Positions (b, k) int64, in pick order.
    """
    coverage = np.multiply(coverage, 1 / _GRID, dtype=coverage.dtype)
    np.rint(coverage, out=coverage)
    coverage *= _GRID
    aspects, queries = np.arange(len(owner)), np.arange(len(excluded))
    ends = np.searchsorted(owner, np.arange(len(excluded) + 1))
    ones = np.ones(len(owner), dtype=coverage.dtype)
    total = sparse.csr_array((ones, aspects, ends), shape=(len(excluded), len(owner)))
    alone = (total @ coverage)[:, row_of]  # what each candidate covers on its own; −inf: not to be picked
    alone[places(excluded, alone.shape[1])] = -np.inf
    positions = np.empty((len(excluded), k), dtype=np.int64)
    covered = np.empty(len(owner), dtype=coverage.dtype)
    goes_on = np.zeros(len(excluded), dtype=bool)
    seen = np.zeros(alone.shape, dtype=bool)  # candidates of groups that have their pick
    for t in range(k):
        open_ = alone
        if groups is not None:
            seen[(seen | np.isneginf(alone)).all(axis=1)] = False
            open_ = np.where(seen, -np.inf, alone)
        best = open_.argmax(axis=1)
        if t:
            gain = (total @ np.maximum(coverage - covered[:, None], 0))[:, row_of]
            gain[np.isneginf(open_)] = -np.inf
            most = gain.argmax(axis=1)
            goes_on = gain[queries, most] > 0
            best = np.where(goes_on, most, best)
        positions[:, t] = best
        alone[queries, best] = -np.inf
        if groups is not None:
            seen |= groups == groups[best][:, None]
        by_pick = coverage[aspects, row_of[best][owner]]
        covered = np.where(goes_on[owner], np.maximum(covered, by_pick), by_pick)
    return positions
