"""The batches of an epoch of SFT. Every process that trains makes the same ones, from the same generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rcr_trainer.training.supervision import IntArray

Negatives: TypeAlias = Callable[[IntArray, IntArray, IntArray, np.random.Generator], IntArray]
"""Draws a hard negative for each state, (B,) pool positions; see `HardNegatives.draw`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences and the states on them that are trained.

    Args:
        queries: (B,) rows of the supervision.
        picked: (B, k−1) the first picks of each sequence; state t has the first t of them.
        candidates: (C,) pool positions that are scored.
        steps: (B, k) bool; which states take part.
        positive: (B, k) columns of `candidates`, the one to prefer; only InfoNCE reads it.
    """

    queries: IntArray
    picked: IntArray
    candidates: IntArray
    steps: NDArray[np.bool_]
    positive: IntArray | None = None

    def rows(self, part: slice) -> Batch:
        """Some of the sequences, all of the candidates."""
        positive = None if self.positive is None else self.positive[part]
        return Batch(self.queries[part], self.picked[part], self.candidates, self.steps[part], positive)

    def allowed(self, forbidden: Sequence[IntArray], programs: IntArray) -> NDArray[np.bool_]:
        """(B, k, C) bool; which candidates each state may pick.

        Args:
            forbidden: for each query of the supervision the pool positions it never gets.
            programs: (N,) equal numbers for candidates of which one picked bars the others.
        """
        column = np.full(len(programs), -1)
        column[self.candidates] = np.arange(len(self.candidates))
        allowed = np.ones((*self.steps.shape, len(self.candidates)), dtype=bool)
        for row, query in enumerate(self.queries):
            barred = column[forbidden[query]]
            allowed[row, :, barred[barred >= 0]] = False
            for step, pick in enumerate(self.picked[row]):
                allowed[row, step + 1 :, programs[self.candidates] == programs[pick]] = False
        return allowed


def listwise_batches(
    order: IntArray,
    sequences: IntArray,
    best: IntArray,
    size: int,
    pool: int,
    most: int,
    rng: np.random.Generator,
) -> Iterator[Batch]:
    """Batches of whole sequences: every state on them is trained.

    Args:
        order: (n,) the queries, in the order in which they come.
        sequences: (Q, k) picks, whose prefixes are the states.
        best: (Q, k) Algorithm 1's picks, which are always among the candidates.
        size: queries in a batch.
        pool: N.
        most: candidates in a batch; of a larger pool a sample.
        rng: draws them.
    """
    everything = np.arange(pool)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        candidates = everything
        if pool > most:
            must = np.unique(np.concatenate([best[rows].ravel(), sequences[rows].ravel()]))
            free = max(0, most - len(must))
            candidates = np.union1d(must, rng.choice(everything, free, replace=False))
        steps = np.ones((len(rows), sequences.shape[1]), dtype=bool)
        yield Batch(rows, sequences[rows, :-1], candidates, steps)


def info_nce_batches(
    order: IntArray,
    best: IntArray,
    sequences: IntArray,
    size: int,
    negatives: Negatives | None,
    rng: np.random.Generator,
) -> Iterator[Batch]:
    """Batches of single states (x, Z_{t−1}, c_t): positives of the whole batch, then a hard negative each.

    Args:
        order: (n, 2) a query and how many picks the state has, in the order in which they come.
        best: (Q, k) the positive of each state: for SFT, Algorithm 1's picks.
        sequences: (Q, k) picks, whose prefixes are the states: for SFT, the same.
        size: states in a batch.
        negatives: where hard negatives come from; None: there are none.
        rng: draws them.
    """
    k = best.shape[1]
    for start in range(0, len(order), size):
        queries, at = order[start : start + size].T
        positives, picked = best[queries, at], sequences[queries, : k - 1]
        hard = positives[:0] if negatives is None else negatives(queries, picked, at, rng)
        candidates, columns = np.unique(np.concatenate([positives, hard]), return_inverse=True)
        steps = np.zeros((len(queries), k), dtype=bool)
        steps[np.arange(len(queries)), at] = True
        positive = np.repeat(columns[: len(queries), None], k, axis=1)
        yield Batch(queries, picked, candidates, steps, positive)


def grouped(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Lists of `size` batches; the last may be shorter."""
    while group := list(islice(batches, size)):
        yield group
