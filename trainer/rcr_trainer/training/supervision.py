"""What SFT learns from: Algorithm 1's sequences, what every candidate would add in any state, and batches of these.

No model is involved. All processes make the same batches from the same generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy import sparse

from langchain_rcr.basics.rows import BoolArray, FloatArray, IntArray
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.data.arrays import row_blocks, top_k
from rcr_trainer.data.coverage import greedy_coverage, recall, structure_matrices
from rcr_trainer.data.examples import Example
from rcr_trainer.data.okapi import BM25Scorer


class Supervision:
    """What Q training or development queries need and what N candidates have.

    Attributes:
        needs: (Q, S) binary float32; LS(y) of each query's gold program; if `reachable`, only those structures that
            some candidate the query may get has.
        pool: (N, S) binary float32; LS(c) of each candidate's program.
        forbidden: for each query, the pool positions it may never get (itself; optionally its own program).
    """

    def __init__(
        self,
        queries: Sequence[Example],
        pool: Sequence[Example],
        spec: ProgramSpec,
        forbidden: Sequence[IntArray],
        *,
        reachable: bool = False,
    ) -> None:
        needs, have = structure_matrices(spec, [e.target for e in queries], [e.target for e in pool])
        if reachable:
            total = have.sum(axis=0)
            left = np.array([total - have[row].sum(axis=0) for row in forbidden]).reshape(needs.shape)
            needs = sparse.csr_array(needs.multiply(left > 0))
            needs.eliminate_zeros()  # entries are counted
        self.needs, self.pool, self.forbidden = needs, have, forbidden

    def sequences(self, k: int) -> tuple[IntArray, FloatArray]:
        """Algorithm 1 for every query: k picks (Q, k), and how many uncovered structures each covered (Q, k).

        At a step of gain 0 every candidate ties, so its pick teaches nothing.
        """
        return greedy_coverage(self.needs, self.pool, k, self.forbidden)

    def gains(self, queries: IntArray, picked: IntArray, candidates: IntArray | None = None) -> FloatArray:
        """|LS(c) ∩ uncovered| (B, T + 1, C): what every candidate would add in every state of some sequences.

        The sequences are those of `queries` (B,), rows of `needs`: pool positions (B, T), in order; state t has the
        first t of them. The candidates are pool positions (C,), too; None for all N.
        """
        columns = (self.pool if candidates is None else self.pool[candidates]).T.tocsr()
        uncovered = self.needs[queries]
        out = np.empty((len(queries), picked.shape[1] + 1, columns.shape[1]), dtype=np.float32)
        for step in range(picked.shape[1] + 1):
            out[:, step] = (uncovered @ columns).toarray()
            if step < picked.shape[1]:
                uncovered = uncovered - uncovered.multiply(self.pool[picked[:, step]])
        return out

    def coverage(self, positions: IntArray) -> float:
        """Percent of needed structures that picks (Q, k) cover, averaged over queries that need any."""
        rows = np.flatnonzero(np.diff(self.needs.indptr))
        if not len(rows):
            return float("nan")
        return float(100 * recall(self.needs[rows], self.pool, positions[rows]).mean())


Negatives: TypeAlias = Callable[[IntArray, IntArray, np.random.Generator], IntArray]
"""Draws a hard negative (B,) for each state: a query (B,) after its first picks, of which there are (B,)."""


def hard_negatives(
    supervision: Supervision, picked: IntArray, queries: Sequence[str], pool: Sequence[str], *, top: int, worst: int
) -> Negatives:
    """BM25-hard negatives (section 3.1): close in wording, far in coverage.

    Of the H (`top`) candidates whose questions are nearest by BM25, the B (`worst`) that add least in the state at
    hand: state t of a query has the first t of its picks, `picked` (Q, T). They are found once, for all epochs. If none
    of the H may be picked, one that may not is drawn.
    """
    scorer, forbidden = BM25Scorer(pool), supervision.forbidden
    count, top, states = len(queries), min(top, len(pool)), picked.shape[1] + 1
    least, found = np.empty((count, states, min(worst, top)), np.int64), np.empty((count, states), np.int64)
    for block in row_blocks(count, states * len(pool)):
        scores = scorer.scores(queries[block])
        nearest = top_k(scores, top, forbidden[block])
        # A pick adds nothing more: left in, picks would be the "worst" candidates of every later state.
        earlier = np.arange(states - 1) < np.arange(states)[:, None]
        gone = (nearest[:, None, :, None] == picked[block, None, None, :]) & earlier[:, None]
        open_ = np.isfinite(np.take_along_axis(scores, nearest, axis=1))[:, None] & ~gone.any(axis=3)
        gains = supervision.gains(np.arange(count)[block], picked[block])
        near = np.where(open_, np.take_along_axis(gains, nearest[:, None], axis=2), np.inf)
        order = np.argsort(near, axis=2, kind="stable")[..., :worst]
        least[block] = np.take_along_axis(nearest[:, None], order, axis=2)
        found[block] = open_.sum(axis=2).clip(1, least.shape[2])
    return lambda queries, steps, rng: least[queries, steps, rng.integers(found[queries, steps])]


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences and which of their states are trained on."""

    queries: IntArray  # (B,) rows of the supervision
    picked: IntArray  # (B, k−1) the first picks of each sequence; state t has the first t of them
    candidates: IntArray  # (C,) pool positions that are scored
    steps: BoolArray  # (B, k); which states take part
    positive: IntArray | None = None
    """(B,) column of `candidates`, the one to prefer; read only by InfoNCE, with one state per sequence."""

    @property
    def before(self) -> BoolArray:
        """(B, k−1) bool; which picks come before a state that takes part."""
        later: BoolArray = np.logical_or.accumulate(self.steps[:, ::-1], axis=1)[:, ::-1]
        return later[:, 1:]

    def rows(self, part: slice) -> Batch:
        """Some of the sequences, all of the candidates."""
        positive = None if self.positive is None else self.positive[part]
        return Batch(self.queries[part], self.picked[part], self.candidates, self.steps[part], positive)

    def allowed(self, forbidden: Sequence[IntArray], pool: int) -> BoolArray:
        """(B, k, C) bool; which candidates each state may pick; `forbidden` are those that each query never gets."""
        column = np.full(pool, len(self.candidates))  # what isn't a candidate has a last column, which is cut off
        column[self.candidates] = np.arange(len(self.candidates))
        allowed = np.ones((*self.steps.shape, len(self.candidates) + 1), dtype=bool)
        for row, query in enumerate(self.queries):
            allowed[row, :, column[forbidden[query]]] = False
            for step, picked in enumerate(column[self.picked[row]], 1):
                allowed[row, step:, picked] = False
        return allowed[:, :, :-1]


def listwise_batches(
    order: IntArray, sequences: IntArray, best: IntArray, size: int, pool: int, most: int, rng: np.random.Generator
) -> Iterator[Batch]:
    """Batches of `size` whole sequences (Q, k), of queries in this order (n,); every state is trained on.

    A pool of more than `most` candidates is sampled; Algorithm 1's picks, `best` (Q, k), are always in the sample.
    """
    for start in range(0, len(order), size):
        rows, candidates = order[start : start + size], np.arange(pool)
        if pool > most:
            must = np.unique(np.concatenate([best[rows].ravel(), sequences[rows].ravel()]))
            candidates = np.union1d(must, rng.choice(pool, max(0, most - len(must)), replace=False))
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
    """Batches of `size` single states (x, Z_{t−1}, c_t): positives of the whole batch, then a hard negative each.

    `order` (n, 2) has a query and how many picks the state has, `best` (Q, k) the positive of each state. The states
    are the prefixes of `sequences` (Q, k).
    """
    k = best.shape[1]
    for start in range(0, len(order), size):
        queries, at = order[start : start + size].T
        positives = best[queries, at]
        hard = positives[:0] if negatives is None else negatives(queries, at, rng)
        candidates, columns = np.unique(np.concatenate([positives, hard]), return_inverse=True)
        steps = np.zeros((len(queries), k), dtype=bool)
        steps[np.arange(len(queries)), at] = True
        yield Batch(queries, sequences[queries, : k - 1], candidates, steps, columns[: len(queries)])
