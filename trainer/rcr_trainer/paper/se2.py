"""se²: a retriever that learns, step by step, which example helps a language model most beside those already chosen.

Source: Liu, Liu, Huang et al., "Se²: Sequential Example Selection for In-Context Learning", Findings of ACL 2024, arXiv
2402.13874, and their code (microsoft/LMOps, se2). At each step the language model ranks randomly drawn candidates c by
p(y | chosen, c, x); the one of rank r = 0, 1, … is chosen with probability proportional to exp(−r). The query encoder
reads the chosen examples and then the question. It is trained by InfoNCE: the first of a ranking against one of the
last and the batch's others. A beam of 3 on the sum of inner products finds the picks. `se2_tri` is the paper's "se² +
tri-encoder" (section 4): the same with the state of Eq. 4.

Departures: prompts show the latest pick first, as se²'s do, but the encoder reads picks in the order of picking; one of
the worst candidates is drawn per state and epoch, while se² takes 20. Encoders, rate and epochs are the run's (there:
BERT and 6 epochs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, islice
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import DoubleArray, FloatArray, IntArray
from langchain_rcr.policy.triencoder import TriEncoder
from rcr_trainer.baselines import LearnedSettings
from rcr_trainer.paper.learned import LearnedSelector, States
from rcr_trainer.training.actor import states as states_of

Vectors = Callable[[IntArray, IntArray], FloatArray]
"""(queries (R,), their picks so far (R, t)) → state vectors (R, D)."""


class Se2Selector(LearnedSelector):
    """Picks the sequence of k examples with the largest sum of logits that a beam finds; further picks are greedy."""

    @classmethod
    def texts(cls, options: LearnedSettings, queries: int, k: int) -> int:
        """See `Baseline.texts`."""
        return queries * options.candidates * k

    def _learn(self, model: TriEncoder, rows: IntArray) -> None:
        rng, pool = np.random.default_rng(self.resources.seed), len(self.examples)
        ranked, chosen = sequences(self._scores, rows, pool, self.options.candidates, self.k, rng)
        self._contrast(model, rows, ranked, 1, chosen, self._states(model, rows, chosen))

    def _states(self, model: TriEncoder, rows: IntArray, chosen: IntArray) -> States:
        items, k = self._items, chosen.shape[1]
        texts = [
            appended(items[row].source, [items[pick] for pick in picks[:step]])
            for row, picks in zip(rows, chosen, strict=True)
            for step in range(k)
        ]
        features = model.query.featurize([Item(text) for text in texts])
        return lambda queries, steps: model.query(features.select(queries * k + steps))

    def _vectors(self, queries: Sequence[str]) -> Vectors:
        items = self._items
        return lambda rows, picks: self._query_vectors(
            [appended(queries[row], [items[pick] for pick in own]) for row, own in zip(rows, picks, strict=True)]
        )

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        vectors, shape = self._vectors(queries), {"width": self.options.beam_width, "horizon": self.k}
        return beam(lambda rows, picks: self._pool_logits(vectors(rows, picks)), excluded, k, **shape)


class Se2TriSelector(Se2Selector):
    """se² with the tri-encoder: the state is E_x(x) + λ Σ E_z(z), not a text (paper, section 4)."""

    def _fit(self) -> None:
        super()._fit()
        self._contexts = self.model.context.encode(self._items)

    def _states(self, model: TriEncoder, rows: IntArray, chosen: IntArray) -> States:
        questions = model.query.featurize([Item(self.examples[row]["source"]) for row in rows])
        contexts = model.context.featurize(self._items)

        def states(queries: IntArray, steps: IntArray) -> Tensor:
            start, picked = model.query(questions.select(queries)), chosen[queries, :-1]
            shown = model.context(contexts.select(picked.ravel())) if picked.size else start[:0]
            every = states_of(model.state().start(start), shown.view(*picked.shape, model.dim))
            return every[torch.arange(len(steps)), torch.from_numpy(steps)]

        return states

    def _vectors(self, queries: Sequence[str]) -> Vectors:
        questions, contexts = map(torch.from_numpy, (self._query_vectors(queries), self._contexts))
        return lambda rows, picks: states_of(self.model.state().start(questions[rows]), contexts[picks])[:, -1].numpy()


def appended(question: str, picks: Sequence[Item]) -> str:
    """What the query encoder reads: the chosen examples, then the question."""
    return "\n".join([*(pick.text for pick in picks), question])


def sequences(
    score: Callable[[Sequence[int], Iterable[Sequence[int]]], DoubleArray],
    rows: IntArray,
    pool: int,
    size: int,
    k: int,
    rng: np.random.Generator,
) -> tuple[IntArray, IntArray]:
    """Rank candidates in k steps (Q, k, L), the most helpful first, each beside the examples chosen before (Q, k).

    `score` gives the log-likelihoods of programs, given rows and the examples shown to each. The rows (Q,) are training
    questions, which are never their own candidates. At a step there are L candidates: `size`, or as many as there are.
    """
    size = min(size, pool - k)
    ranked, chosen = np.empty((len(rows), k, size), dtype=np.int64), np.empty((len(rows), k), dtype=np.int64)
    weights = np.exp(-np.arange(size, dtype=np.float64))
    for step in range(k):
        closed = np.concatenate([rows[:, None], chosen[:, :step]], axis=1)
        # Draw as many extra as may be dropped; a permutation of the whole pool per question would fill the memory.
        order = (rng.choice(pool, size + closed.shape[1], replace=False) for _ in rows)
        drawn = np.stack([own[~np.isin(own, taken)][:size] for own, taken in zip(order, closed, strict=True)])
        shown = [[*picks, each] for picks, own in zip(chosen[:, :step], drawn, strict=True) for each in own]
        scores = score(np.repeat(rows, size).tolist(), shown).reshape(drawn.shape)
        ranked[:, step] = np.take_along_axis(drawn, np.argsort(-scores, axis=1, kind="stable"), axis=1)
        ranks = rng.choice(size, size=len(rows), p=weights / weights.sum())
        chosen[:, step] = ranked[np.arange(len(rows)), step, ranks]
    return ranked, chosen


def beam(
    logits: Callable[[IntArray, IntArray], DoubleArray],
    excluded: Sequence[np.ndarray],
    k: int,
    *,
    width: int,
    horizon: int,
) -> IntArray:
    """The sequences (B, k) with the largest sum of logits that a beam finds; ties go to the lowest positions.

    `logits` maps queries (R,) and their picks so far (R, t) to logits (R, N). `width` sequences of each query compete
    up to the length `horizon`, whatever k is; further picks are greedy. So the sequences for k begin those for any
    larger k.
    """
    beams: list[tuple[int, float, tuple[int, ...]]] = [(query, 0.0, ()) for query in range(len(excluded))]
    for step in range(max(k, horizon)):
        picks = np.array([picked for *_, picked in beams], dtype=np.int64).reshape(len(beams), step)
        values = logits(np.array([query for query, *_ in beams], dtype=np.int64), picks)
        for row, (query, _, picked) in zip(values, beams, strict=True):
            row[excluded[query]] = row[list(picked)] = -np.inf
        if np.isneginf(values).all(axis=1).any():
            break  # a query's candidates are used up: k is at most this step
        kept = width if step + 1 < horizon else 1
        ranked = sorted(
            (query, cost - row[at], (*picked, int(at)))
            for (query, cost, picked), row in zip(beams, values, strict=True)
            for at in np.argsort(-row, kind="stable")[:kept]
            if row[at] > -np.inf
        )
        beams = [each for _, own in groupby(ranked, itemgetter(0)) for each in islice(own, kept)]
    best = [next(own)[2][:k] for _, own in groupby(beams, itemgetter(0))]
    return np.array(best, dtype=np.int64).reshape(len(excluded), k)
