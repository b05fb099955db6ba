"""The measures, as functions of arrays: sparse binary matrices of structures, and positions of picks."""

from __future__ import annotations

import numpy as np
from scipy import sparse


def within_pool(gold: sparse.csr_array, pool: sparse.csr_array) -> sparse.csr_array:
    """The gold programs (B, S) without the structures that no row of the pool (N, S) has; rows may become empty."""
    kept = sparse.csr_array(gold.multiply(_counts(pool) > 0))
    kept.eliminate_zeros()
    return kept


def specificity(pool: sparse.csr_array) -> np.ndarray:
    """(S,) how rare each structure is: −log of the share of the pool's programs that have it; 0 if the pool lacks it.

    Args:
        pool: (N, S) binary; an empty row is of a program that doesn't parse, and doesn't count.
    """
    counts, programs = _counts(pool), int(np.count_nonzero(np.diff(pool.indptr)))
    rarity: np.ndarray = np.where(counts > 0, np.log(max(programs, 1)) - np.log(np.maximum(counts, 1)), 0.0)
    return rarity


def shown_of(gold: sparse.csr_array, pool: sparse.csr_array, positions: np.ndarray) -> sparse.csr_array:
    """(B, S) binary: the structures of each gold program that one of its picks has.

    Args:
        gold: (B, S) binary.
        pool: (N, S) binary.
        positions: (B, k) picks.
    """
    n_queries, k = positions.shape
    picked = (np.ones(positions.size, dtype=np.float32), positions.ravel(), np.arange(0, positions.size + 1, k))
    union = (sparse.csr_array(picked, shape=(n_queries, pool.shape[0])) @ pool).sign()
    return sparse.csr_array(gold.multiply(union))


def weighted_recall(gold: sparse.csr_array, shown: sparse.csr_array, weights: np.ndarray) -> np.ndarray:
    """(B,) from 0 to 1: the share of each gold program's weight that is shown; 1 where nothing of it has any weight.

    Args:
        gold: (B, S) binary.
        shown: (B, S) binary, those of gold that the picks have.
        weights: (S,) non-negative: `specificity`, or 1 for each structure that counts.
    """
    needed, found = gold @ weights, shown @ weights
    recall: np.ndarray = np.divide(found, needed, out=np.ones(len(needed)), where=needed > 0)
    return recall


def percent_by_step(values: np.ndarray) -> np.ndarray:
    """(T,): the mean over queries of values (B, T), in %."""
    mean: np.ndarray = 100 * values.mean(axis=0)
    return mean


def duplicates_by_step(programs: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """(T,) in %: the share of queries with the same program twice or more among the first 1, 2, …, T picks.

    Args:
        programs: (N,) int; equal numbers say that two candidates have the same program.
        positions: (B, T) picks.
    """
    picked = programs[positions]
    steps = np.arange(positions.shape[1])
    earlier = steps[None, :] < steps[:, None]
    repeats = ((picked[:, :, None] == picked[:, None, :]) & earlier).any(axis=2)
    return percent_by_step(np.logical_or.accumulate(repeats, axis=1))


def hub_share(positions: np.ndarray, most: int = 10) -> float:
    """In %: the part of all picks (B, k) that the `most` most picked examples make up."""
    return 100 * float(np.sort(np.bincount(positions.ravel()))[-most:].sum() / positions.size)


def _counts(pool: sparse.csr_array) -> np.ndarray:
    """(S,): how many rows of the pool have each structure."""
    return np.bincount(pool.indices, minlength=pool.shape[1])
