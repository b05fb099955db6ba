"""CEIL: a determinantal point process over embeddings that are trained on how much sets of examples help.

Source: Ye, Wu, Feng, Yu and Kong, "Compositional Exemplars for In-context Learning", ICML 2023, arXiv 2302.05698. For
each training question (x, y), sets of k candidates are scored by p(y | set, x). The log det L_S = Σ r / λ + log det S_S
of a better set must be larger than that of a worse one, by a margin times the difference of their ranks (section 3.2,
after Zhong et al., "Extractive Summarization as Text Matching", ACL 2020). At inference the greedy mode, as in `dpp`,
whose kernel this is.

Departures: the candidates are the best by BM25 between programs, where CEIL takes those of a trained EPR, from which
its encoders start, too. Assumed: sets are drawn evenly from the candidates, and one is the first k; the margin is 0.01.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from langchain_rcr.items import Item
from langchain_rcr.policy import TriEncoder
from rcr_trainer.baselines.base import TradeOff
from rcr_trainer.baselines.dense import unit_vectors
from rcr_trainer.baselines.dpp import DPPSelector
from rcr_trainer.baselines.learned import IntArray, LearnedSelector, Learner, question_batches
from rcr_trainer.baselines.options import LearnedSettings

MARGIN = 0.01
_JITTER = 1e-4
"""On the diagonal of S, so that a set with two equal examples has a small volume, and a gradient, instead of none."""


class CEILSelector(LearnedSelector, DPPSelector):
    """Picks, one after the other, the example with the largest log(new volume) + relevance / λ, by trained encoders.

    Args:
        examples: the pool, one dict per example.
        lam: λ above 0, in training and at inference.
        fetch_k: length of the shortlist, the candidates most similar to the query.
        **options: as for `Baseline`.
    """

    name: ClassVar[str] = "ceil"
    trade_off: ClassVar[TradeOff | None] = None

    @classmethod
    def texts(cls, options: LearnedSettings, queries: int, k: int) -> int:
        """See `LearnedSelector.texts`."""
        return queries * options.sets

    def _learn(self, model: TriEncoder, rows: IntArray) -> None:
        rng, items = np.random.default_rng(self.resources.seed), self._items
        sets = draw_sets(self._near(rows), self.options.sets, self.k, rng)
        scores = self._scores(np.repeat(rows, sets.shape[1]).tolist(), sets.reshape(-1, sets.shape[2]).tolist())
        by_question = torch.from_numpy(scores.reshape(sets.shape[:2]))
        questions = model.query.featurize([Item(items[row].source) for row in rows])
        candidates = model.candidate.featurize(items)

        def loss(batch: IntArray) -> Tensor:
            used, columns = np.unique(sets[batch], return_inverse=True)
            vectors = normalize(model.candidate(candidates.select(used)), dim=-1)
            each = vectors[torch.from_numpy(columns.reshape(sets[batch].shape))]
            values = log_volumes(normalize(model.query(questions.select(batch)), dim=-1), each, self.lam)
            return margin_loss(values, by_question[torch.from_numpy(batch)].to(values))

        def batches(rng: np.random.Generator) -> list[IntArray]:
            return question_batches(len(rows), self.options.batch_size, rng)

        Learner(self._job(model), self.options, dict(model.named_parameters()), len(rows)).run(batches, loss)

    def _fit(self) -> None:
        super()._fit()
        self._use(unit_vectors(self._candidates))

    def _embed(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        vectors = self.model.query.encode([Item(text) for text in texts])
        return np.ones(len(texts), dtype=np.int64), unit_vectors(vectors)


def draw_sets(near: IntArray, count: int, k: int, rng: np.random.Generator) -> IntArray:
    """(Q, count, k) distinct candidates of each question: the first k, then sets at random.

    Args:
        near: (Q, L) candidates, nearest first; L is at least k.
        count: sets for each.
        k: examples in a set.
        rng: draws.
    """
    order = rng.random((len(near), count, near.shape[1])).argsort(axis=2)[:, :, :k]
    order[:, 0] = np.arange(k)
    drawn: IntArray = np.take_along_axis(near[:, None], order, axis=2)
    return drawn


def log_volumes(queries: Tensor, candidates: Tensor, lam: float) -> Tensor:
    """(B, M) log det of the kernel of each set: Σ r / λ + log det S.

    Args:
        queries: (B, D) unit vectors.
        candidates: (B, M, k, D) unit vectors of the sets' examples.
        lam: λ.
    """
    relevance = (1 + torch.einsum("bd,bmkd->bmk", queries, candidates)) / 2
    similarity = (1 + candidates @ candidates.transpose(-1, -2)) / 2
    jitter = _JITTER * torch.eye(candidates.shape[2], device=candidates.device)
    volumes: Tensor = relevance.sum(-1) / lam + torch.linalg.slogdet(similarity + jitter)[1]
    return volumes


def margin_loss(values: Tensor, scores: Tensor) -> Tensor:
    """Mean over pairs of a better set and a worse one of max(0, v(worse) − v(better) + margin · difference in rank).

    Args:
        values: (B, M) of the sets; gradients flow through them.
        scores: (B, M) of the language model. Sets with equal scores are no pair.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    values, scores = values.gather(1, order), scores.gather(1, order)
    ranks = torch.arange(values.shape[1], device=values.device)
    margin = MARGIN * (ranks[None, :] - ranks[:, None])
    pairs = scores[:, :, None] > scores[:, None, :]
    short = (values[:, None, :] - values[:, :, None] + margin).clamp(min=0)
    return (short * pairs).sum() / pairs.sum().clamp(min=1)
