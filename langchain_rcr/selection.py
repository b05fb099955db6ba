"""The step-by-step loop on arrays: each pick is one inner-product search with a state made of the picks before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.errors import InputError
from langchain_rcr.index.base import CandidateIndex, FloatArray, IntArray, PoolVectors
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.state import State

_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Picks:
    """What was picked for B queries.

    Args:
        positions: (B, k) int64; positions[b, t] is the pool position of query b's pick at step t.
        logits: (B, k) float32; the pick's logit (Eq. 4) in the state it was picked in.
    """

    positions: IntArray
    logits: FloatArray


def greedy(
    queries: FloatArray,
    pool: PoolVectors | CandidateIndex,
    state: State[Any],
    k: int,
    *,
    exclude: Sequence[Collection[int]] | None = None,
    groups: NDArray[np.integer[Any]] | None = None,
) -> Picks:
    """Greedy decoding of the policy (section 3.2): at every step the candidate with the largest logit.

    Args:
        queries: E_x of the queries, (B, D) float32.
        pool: the pool's vectors, or an engine that holds them.
        state: how picks compose (its `start` is called here).
        k: how many examples to pick for each query.
        exclude: for each query the pool positions it must not get (itself, for a training query).
        groups: (N,) integers; once a candidate is picked, all of its group are masked (same program, say). Where
            nothing is left but masked groups, the mask is lifted for that query: k picks come back in any case.

    Returns:
        Picks of k distinct positions a query. Equal logits are decided by the lowest position.

    Raises:
        InputError: k is not positive, a query has fewer than k candidates left, a position is outside the pool, or
            groups has another length than the pool.
    """
    index = MemoryIndex(pool) if isinstance(pool, PoolVectors) else pool
    batch = len(queries)
    barred = [_positions(row) for row in exclude] if exclude is not None else [_NONE] * batch
    _check(k, index.size, batch, barred)
    if groups is not None and len(groups) != index.size:
        msg = f"groups has {len(groups)} entries for a pool of {index.size}"
        raise InputError(msg)

    current = state.start(queries)
    masked = list(barred)
    positions = np.empty((batch, k), dtype=np.int64)
    logits = np.empty((batch, k), dtype=np.float32)
    for step in range(k):
        found, values = index.search(current.vector(), 1, masked)
        best, logit = found[:, 0], values[:, 0]
        for row in np.flatnonzero(best < 0):
            masked[row] = np.concatenate([barred[row], positions[row, :step]])
            again, value = index.search(current.vector()[row : row + 1], 1, [masked[row]])
            best[row], logit[row] = again[0, 0], value[0, 0]
        positions[:, step], logits[:, step] = best, logit
        if step + 1 < k:
            current = current.update(index.vectors(best))
            masked = [
                np.append(row, pick if groups is None else np.flatnonzero(groups == groups[pick]))
                for row, pick in zip(masked, best, strict=True)
            ]
    return Picks(positions, logits)


def _positions(row: Collection[int]) -> IntArray:
    return np.unique(np.fromiter(row, dtype=np.int64, count=len(row)))


def _check(k: int, size: int, batch: int, barred: Sequence[IntArray]) -> None:
    if len(barred) != batch:
        msg = f"exclude has {len(barred)} rows for {batch} queries"
        raise InputError(msg)
    if k < 1:
        msg = f"k must be at least 1, not {k}"
        raise InputError(msg)
    outside = next((n for n, row in enumerate(barred) if len(row) and not 0 <= row[0] <= row[-1] < size), None)
    if outside is not None:
        msg = f"exclude[{outside}] names a position outside the pool of {size}"
        raise InputError(msg)
    fewest = size - max((len(row) for row in barred), default=0)
    if batch and k > fewest:
        msg = f"k = {k} examples asked for, but the pool offers only {fewest}"
        raise InputError(msg)
