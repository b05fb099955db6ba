"""The pool as two matrices in memory: exact search by one matrix product a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from langchain_rcr.errors import InputError
from langchain_rcr.index.base import FloatArray, IntArray, PoolVectors

_BLOCK = 1 << 26
"""Scores held at once (256 MiB of float32): queries are searched in blocks of this many scores."""

TIE = 1e-6
"""Logits this close to a row's best, relative to |state| · max |E_c|, are equal: float32 rounding of a matrix product
depends on its shape, and a pick may not depend on how many queries were searched together."""


class MemoryIndex:
    """Exact MIPS over (N, D) matrices. `add` replaces the matrices, so a reader keeps what it started with.

    Args:
        vectors: the pool's E_c and E_z.
    """

    def __init__(self, vectors: PoolVectors) -> None:
        self._pool = vectors
        self._longest = _longest(vectors.candidate)

    @property
    def size(self) -> int:
        """N, the number of candidates."""
        return len(self._pool.candidate)

    def search(self, states: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]:
        """The t best candidates for each state; see `CandidateIndex.search`.

        Raises:
            InputError: a state or a candidate is not finite.
        """
        pool = self._pool.candidate
        positions = np.full((len(states), t), -1, dtype=np.int64)
        logits = np.full((len(states), t), -np.inf, dtype=np.float32)
        rows = max(1, _BLOCK // max(1, len(pool)))
        for start in range(0, len(states), rows):
            block = slice(start, start + rows)
            scores = states[block] @ pool.T
            slack = TIE * self._longest * np.linalg.norm(states[block], axis=1)
            if not np.isfinite(slack).all():
                msg = "vectors of queries or examples are not finite numbers: the encoder or its embeddings are broken"
                raise InputError(msg)
            _mask(scores, exclude[block])
            for column in range(min(t, len(pool))):
                best = first_best(scores, slack)
                every = np.arange(len(scores))
                value = scores[every, best]
                found = value > -np.inf
                positions[block][found, column] = best[found]
                logits[block][found, column] = value[found]
                scores[every, best] = -np.inf
        return positions, logits

    def vectors(self, positions: IntArray) -> FloatArray:
        """E_z (B, D) of the examples at `positions` (B,)."""
        return self._pool.context[positions]

    def add(self, vectors: PoolVectors) -> None:
        """Append candidates."""
        self._pool = PoolVectors(
            np.concatenate([self._pool.candidate, vectors.candidate]),
            np.concatenate([self._pool.context, vectors.context]),
        )
        self._longest = float(np.maximum(self._longest, _longest(vectors.candidate)))


def _mask(scores: FloatArray, exclude: Sequence[IntArray]) -> None:
    """Set scores[i, exclude[i]] to −inf for all rows in one indexed write."""
    counts = [len(positions) for positions in exclude]
    if not sum(counts):
        return
    rows = np.repeat(np.arange(len(counts)), counts)
    scores[rows, np.concatenate(exclude).astype(np.int64)] = -np.inf


def _longest(vectors: FloatArray) -> float:
    """The largest length of (N, D) vectors; NaN where one is not finite."""
    return float(np.sqrt(np.einsum("nd,nd->n", vectors, vectors).max(initial=0.0)))


def first_best(scores: FloatArray, slack: FloatArray) -> IntArray:
    """The lowest position among each row's best scores.

    Args:
        scores: (B, N) float32; −inf for what may not be found.
        slack: (B,) how far below a row's best a score still counts as the same.

    Returns:
        (B,) int64.
    """
    floor = scores.max(axis=1) - slack
    best: IntArray = (scores >= floor[:, None]).argmax(axis=1)
    return best
