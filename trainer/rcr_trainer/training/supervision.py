"""Supervision of SFT: Algorithm 1's sequences, and what every candidate would add in any state. No model takes part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from langchain_rcr.programs import ProgramSpec
from rcr_trainer.data import Example
from rcr_trainer.data.coverage import greedy_coverage, recall_by_step, row_blocks, structure_matrices
from rcr_trainer.data.okapi import BM25Scorer
from rcr_trainer.errors import DataError

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


class Supervision:
    """What Q training queries need and what N candidates have.

    Args:
        needs: (Q, S) binary float32; LS(y) of each query's gold program.
        pool: (N, S) binary float32; LS(c) of each candidate's program.
        forbidden: for each query the pool positions it may never get (itself; its own program, as an option).
    """

    def __init__(self, needs: sparse.csr_array, pool: sparse.csr_array, forbidden: Sequence[IntArray]) -> None:
        self.needs, self.pool, self.forbidden = needs, pool, list(forbidden)

    @classmethod
    def build(
        cls,
        queries: Sequence[Example],
        pool: Sequence[Example],
        spec: ProgramSpec,
        forbidden: Sequence[IntArray],
        *,
        reachable: bool = False,
    ) -> Supervision:
        """From examples.

        Args:
            queries: the training (or development) queries.
            pool: the candidates.
            spec: how programs are read.
            forbidden: for each query the pool positions it may never get.
            reachable: count only those structures as needed that some candidate has which the query may get.
        """
        needs, have = structure_matrices(spec, [e.target for e in queries], [e.target for e in pool])
        if reachable:
            total = np.asarray(have.sum(axis=0)).ravel()
            left = np.stack([total - np.asarray(have[row].sum(axis=0)).ravel() for row in forbidden] or [total])
            needs = sparse.csr_array(needs.multiply(left > 0)) if len(queries) else needs
            needs.eliminate_zeros()  # entries are counted
        return cls(needs, have, forbidden)

    def sequences(self, k: int) -> tuple[IntArray, FloatArray]:
        """Algorithm 1 for every query: k picks (Q, k) and how many uncovered structures each covered (Q, k).

        A step that covers nothing new has gain 0: every candidate ties, its pick teaches nothing, and no loss may
        be taken on it.
        """
        positions, gains = greedy_coverage(self.needs, self.pool, k, self.forbidden)
        return positions, gains.astype(np.float32)

    def gains(self, queries: IntArray, picked: IntArray, candidates: IntArray | None = None) -> FloatArray:
        """|LS(c) ∩ uncovered| of every candidate in every state of some sequences.

        Args:
            queries: (B,) rows of `needs`.
            picked: (B, T) pool positions picked so far, in order; state t has the first t of them.
            candidates: (C,) pool positions to score; None for all N.

        Returns:
            (B, T + 1, C) counts of structures that are needed, not yet covered, and in the candidate.
        """
        if candidates is None or np.array_equal(candidates, np.arange(self.pool.shape[0])):
            columns = self._by_structure
        else:
            columns = self.pool[candidates].T.tocsr()
        uncovered = self.needs[queries]
        out = np.empty((len(queries), picked.shape[1] + 1, columns.shape[1]), dtype=np.float32)
        for step in range(picked.shape[1] + 1):
            out[:, step] = (uncovered @ columns).toarray()
            if step < picked.shape[1]:
                uncovered = uncovered - uncovered.multiply(self.pool[picked[:, step]])
        return out

    @cached_property
    def _by_structure(self) -> sparse.csr_array:
        return self.pool.T.tocsr()

    def coverage(self, positions: IntArray) -> float:
        """Share of a query's needed structures that its picks (Q, k) cover together, in percent.

        The mean over the queries that need any; NaN where none does.
        """
        rows = np.flatnonzero(np.diff(self.needs.indptr))
        if not len(rows):
            return float("nan")
        return float(100 * recall_by_step(self.needs[rows], self.pool, positions[rows])[:, -1].mean())


def check_pool_size(stage: str, forbidden: Sequence[IntArray], size: int, k: int) -> None:
    """Refuse a pool that leaves some training query fewer than k candidates.

    Args:
        stage: sft or grpo, as the settings' section is called.
        forbidden: for each query the pool positions it may not get.
        size: N.
        k: picks a query.

    Raises:
        DataError: with what to set.
    """
    left = size - max((len(row) for row in forbidden), default=0)
    if left < k:
        raise DataError(
            f"the pool of {size} examples leaves a training query only {left} to pick from, fewer than "
            f"k = {k}: give more examples, lower {stage}.k, or set {stage}.exclude_own_program: false"
        )


class HardNegatives:
    """BM25-hard negatives (section 3.1): near by wording, far by coverage.

    Args:
        supervision: tells what a candidate would add, and which ones a query never gets: they are no negatives either.
        queries: the Q training queries' questions.
        pool: the N candidates' questions.
        top: H, the candidates nearest by BM25.
        worst: B, of these the ones that add least in the state at hand; what is picked already is none of them.
    """

    def __init__(
        self, supervision: Supervision, queries: Sequence[str], pool: Sequence[str], *, top: int, worst: int
    ) -> None:
        self.worst, self._supervision, forbidden = worst, supervision, supervision.forbidden
        scorer = BM25Scorer(pool)
        top = min(top, len(pool))
        self.nearest = np.empty((len(queries), top), dtype=np.int64)
        """(Q, H) positions, nearest first; where fewer than H are allowed, the forbidden ones come last."""
        for block in row_blocks(len(queries), len(pool)):
            scores = scorer.scores(queries[block])
            for row, barred in enumerate(forbidden[block]):
                scores[row, barred] = -np.inf
            self.nearest[block] = np.argsort(-scores, axis=1, kind="stable")[:, :top]

    def draw(self, queries: IntArray, picked: IntArray, steps: IntArray, rng: np.random.Generator) -> IntArray:
        """One hard negative for each state.

        Args:
            queries: (B,) query rows.
            picked: (B, T) the sequences the states are on.
            steps: (B,) how many picks each state has.
            rng: draws among the B worst.

        Returns:
            (B,) pool positions. Where a state's H nearest are all forbidden or picked, the nearest of them: the loss
            masks it.
        """
        out = np.empty(len(queries), dtype=np.int64)
        for row, query in enumerate(queries):
            picks = picked[row, : steps[row]]
            nearest = self.nearest[query]
            # A pick adds nothing any more: left in, picks would be the "worst" candidates of every later state.
            near = nearest[~np.isin(nearest, np.concatenate([self._supervision.forbidden[query], picks]))]
            if not len(near):
                out[row] = nearest[0]
                continue
            gains = self._supervision.gains(queries[row : row + 1], picks[None], near)[0, -1]
            worst = near[np.argsort(gains, kind="stable")[: self.worst]]
            out[row] = worst[rng.integers(len(worst))]
        return out
