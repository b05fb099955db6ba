"""Greedy maximisation of set coverage: Algorithm 1 of Gupta, Gardner and Singh (2023), for a block of queries at once.

A query has aspects (its tokens, its words), a candidate covers each aspect to some degree, and a set of candidates
covers it as well as its best member does (Eq. 6). Set-BERTScore-Recall and BM25 with coverage differ in the aspects.

Source: "Coverage-based Example Selection for In-Context Learning", Findings of EMNLP 2023, arXiv 2305.14907.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse

from rcr_trainer.coverage import excluded_entries

# Degrees of coverage are rounded to this fraction: what is a tie on paper is one here, whatever order BLAS sums in.
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
    alone[excluded_entries(excluded)] = -np.inf
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
