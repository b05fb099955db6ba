"""CEIL: a determinantal point process over embeddings trained on how much sets of examples help.

Source: Ye, Wu, Feng, Yu and Kong, "Compositional Exemplars for In-context Learning", ICML 2023, arXiv 2302.05698,
section 3.2, and their code (HKUNLP/icl-ceil). It starts from a trained EPR. For each training question (x, y), sets of
k of its nearest examples by EPR are drawn and ranked by p(y | set, x). The log det L_S = Σ r / λ + log det S_S of a
better set must exceed that of a worse one by a margin times the difference of their ranks. Only the query encoder is
trained. Picks are the greedy mode, as in `dpp`, with the same kernel.

Departures: the sets have k examples (there 16, of 50 in the prompt), `baselines.sets` sets are drawn from the
`baselines.candidates` nearest (there 50 of 100), and EPR trains E_c, too. Encoders, rate and epochs are the run's
(there: BERT and 30 epochs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import IntArray
from langchain_rcr.families.model_files import unit
from langchain_rcr.policy.triencoder import TriEncoder
from rcr_trainer.baselines import LearnedSettings
from rcr_trainer.baselines.base import TradeOff
from rcr_trainer.baselines.dense import DPPSelector
from rcr_trainer.data.arrays import top_k
from rcr_trainer.paper.learned import EPRSelector

MARGIN = 0.02  # from their training script
_JITTER = 1e-4
"""Added to the diagonal of S, so that a set with two equal examples has a small volume, and a gradient, not none."""


class CEILSelector(EPRSelector, DPPSelector):
    """Each step picks the largest log(new volume) + relevance / λ by trained encoders; `lam` is λ in training, too."""

    trade_off: ClassVar[TradeOff | None] = None

    @classmethod
    def texts(cls, options: LearnedSettings, queries: int, k: int) -> int:
        """See `Baseline.texts`."""
        return EPRSelector.texts(options, queries, k) + queries * options.sets

    def _learn(self, model: TriEncoder, rows: IntArray) -> None:
        super()._learn(model, rows)
        rng, items = np.random.default_rng(self.resources.seed), self._items
        candidates = unit(model.candidate.encode(items))
        questions = model.query.featurize([Item(items[row].source) for row in rows])
        similarity = np.round(unit(model.query.vectors(questions)) @ candidates.T, 6)
        size = min(max(self.options.candidates, self.k), len(items) - 1)
        near = top_k(similarity, size, list(rows[:, None]))
        sets = draw_sets(near, self.options.sets, self.k, rng)
        scores = self._scores(np.repeat(rows, sets.shape[1]).tolist(), sets.reshape(-1, sets.shape[2]).tolist())
        by_question = torch.from_numpy(scores.reshape(sets.shape[:2]))
        shown = model.query.given(candidates)

        def loss(batch: IntArray) -> Tensor:
            queries = normalize(model.query(questions.select(batch)), dim=-1)
            values = log_volumes(queries, shown[torch.from_numpy(sets[batch])], self.lam)
            return margin_loss(values, by_question[torch.from_numpy(batch)].to(values))

        self._train(model, [model.query], len(rows), loss)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return DPPSelector._pick(self, queries, k, excluded)

    def _fit(self) -> None:
        super()._fit()
        self._use(unit(self._candidates))

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        return unit(self._query_vectors(texts))


def draw_sets(near: IntArray, count: int, k: int, rng: np.random.Generator) -> IntArray:
    """Draw `count` sets of k distinct candidates for each question, (Q, count, k), from `near` (Q, L)."""
    order = rng.random((len(near), count, near.shape[1])).argsort(axis=2)[:, :, :k]
    drawn: IntArray = np.take_along_axis(near[:, None], order, axis=2)
    return drawn


def log_volumes(queries: Tensor, candidates: Tensor, lam: float) -> Tensor:
    """(B, M) log det of the kernel of sets (B, M, k, D) for queries (B, D), unit vectors: Σ r / λ + log det S."""
    relevance = (1 + torch.einsum("bd,bmkd->bmk", queries, candidates)) / 2
    similarity = (1 + candidates @ candidates.transpose(-1, -2)) / 2
    jitter = _JITTER * torch.eye(candidates.shape[2], device=candidates.device)
    volumes: Tensor = relevance.sum(-1) / lam + torch.linalg.slogdet(similarity + jitter)[1]
    return volumes


def margin_loss(values: Tensor, scores: Tensor) -> Tensor:
    """Σ over differences i in rank of the mean of max(0, v(worse) − v(better) + margin · i).

    The values v (B, M) of a question are scaled to 0 … 1 first; gradients don't flow through the scale. Equal scores
    (B, M) rank in the order given.
    """
    values = values.gather(1, scores.argsort(dim=1, descending=True, stable=True))
    least, most = (each.detach()[:, None] for each in values.aminmax(dim=1))
    values = (values - least) / (most - least).clamp(min=1e-9)
    gaps = range(1, values.shape[1])
    short = [(values[:, gap:] - values[:, :-gap] + MARGIN * gap).clamp(min=0).mean() for gap in gaps]
    return torch.stack(short).sum()
