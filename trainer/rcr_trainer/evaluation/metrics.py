"""The measures, as functions of arrays: each for every prefix of the picks in one pass."""

from __future__ import annotations

import numpy as np
from scipy import sparse


def within_pool(gold: sparse.csr_array, pool: sparse.csr_array) -> tuple[sparse.csr_array, sparse.csr_array]:
    """Both without the structures that the pool lacks.

    Args:
        gold: (B, S) binary.
        pool: (N, S) binary, over the same structures.

    Returns:
        gold (B, S') and pool (N, S') over the S' structures that some candidate has; gold rows may become empty.
    """
    present = np.unique(pool.indices)
    return gold[:, present], pool[:, present]


def coverage_by_step(recall: np.ndarray) -> np.ndarray:
    """(T,) in %: the mean over queries of recall (B, T)."""
    return _percent(recall)


def full_coverage_by_step(recall: np.ndarray) -> np.ndarray:
    """(T,) in %: the share of queries with every structure of the gold program found; recall is (B, T)."""
    return _percent(recall == 1)


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
    return _percent(np.logical_or.accumulate(repeats, axis=1))


def paired_error(ours: np.ndarray, other: np.ndarray) -> float | None:
    """Standard error of the mean difference of two rates (B,) over the same queries, points; None for one query."""
    if len(ours) < 2:
        return None
    return float(100 * np.std(ours - other, ddof=1) / np.sqrt(len(ours)))


def _percent(values: np.ndarray) -> np.ndarray:
    """(T,): the mean over queries of values (B, T), in %."""
    mean: np.ndarray = 100 * values.mean(axis=0)
    return mean
