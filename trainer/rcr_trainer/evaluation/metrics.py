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
