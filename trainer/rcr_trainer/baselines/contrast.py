"""Contrastive training of encoders on candidates that a language model has ranked (EPR, se²): the house's InfoNCE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from langchain_rcr.items import Item
from rcr_trainer.baselines.learned import IntArray, Learner
from rcr_trainer.baselines.options import LearnedSettings
from rcr_trainer.training.batches import Batch, info_nce_batches
from rcr_trainer.training.losses import Targets, info_nce
from rcr_trainer.training.runner import Job

States = Callable[[IntArray, IntArray], Tensor]
"""(queries (S,), picks of each so far (S,)) → the state vectors (S, D), with gradients."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """What a language model makes of the candidates of Q questions at k steps.

    Args:
        candidates: (Q, k, L) positions, the most helpful first.
        best: how many of the first are positives; no more than half of them are.
        worst: how many of the last are hard negatives, likewise.
    """

    candidates: IntArray
    best: int
    worst: int

    def positives(self, rng: np.random.Generator) -> IntArray:
        """(Q, k) one of the best of each state."""
        places = rng.integers(self._at_most(self.best), size=self.candidates.shape[:2])
        found: IntArray = np.take_along_axis(self.candidates, places[..., None], axis=2)[..., 0]
        return found

    def draw(self, queries: IntArray, picked: IntArray, steps: IntArray, rng: np.random.Generator) -> IntArray:
        """One of the worst of each state, see `Negatives`."""
        places = rng.integers(self._at_most(self.worst), size=len(queries))
        found: IntArray = self.candidates[queries, steps, -1 - places]
        return found

    def _at_most(self, count: int) -> int:
        half: int = self.candidates.shape[2] // 2
        return max(1, min(count, half))


def contrast(
    job: Job,
    options: LearnedSettings,
    items: Sequence[Item],
    rows: IntArray,
    ranking: Ranking,
    sequences: IntArray,
    states: States,
) -> None:
    """Train E_c, and whatever makes the states, by InfoNCE with in-batch and hard negatives.

    Args:
        job: the model.
        options: of the training.
        items: the pool.
        rows: (Q,) the training questions' own positions, which they never get.
        ranking: of the candidates of each question at each step.
        sequences: (Q, k) picks whose prefixes are the states.
        states: makes the state vectors.
    """
    model = job.model
    every, own = np.argwhere(np.ones(sequences.shape, dtype=bool)), list(rows[:, None])
    candidates, device = model.candidate.featurize(items), next(model.parameters()).device

    def batches(rng: np.random.Generator) -> Iterator[Batch]:
        order, best = rng.permutation(every), ranking.positives(rng)
        return info_nce_batches(order, best, sequences, options.batch_size, ranking, rng)

    def loss(batch: Batch) -> Tensor:
        # Each row of the batch is a single state, and has a positive.
        logits = (
            states(batch.queries, batch.steps.argmax(axis=1)) @ model.candidate(candidates.select(batch.candidates)).T
        )
        allowed = torch.from_numpy(batch.allowed(own, np.arange(len(items)))[batch.steps]).to(device)
        positive = torch.from_numpy(np.asarray(batch.positive)[:, 0]).to(device)
        return info_nce(logits, Targets(torch.zeros_like(logits), allowed, positive=positive, mask_equals=False))

    Learner(job, options, dict(model.named_parameters()), len(every)).run(batches, loss)
