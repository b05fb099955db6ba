"""An ITERR-like policy: a recurrent state, trained by policy gradient on the likelihood of the program.

After Chen, Xu, Wang et al., "Learning to Retrieve Iteratively for In-Context Learning", EMNLP 2024, arXiv 2406.14739:
retrieval as a decision process whose state s_{t+1} = GRU(E_c(z_t), s_t) starts from E_q(x) and picks by inner product;
the reward is the language model's log-likelihood of the program after the picks.

It is like ITERR, not ITERR itself: the advantage is the reward normalised within a group of sequences (Eq. 9), while
ITERR trains a value head by PPO and rewards each step's gain; training candidates are the best by BM25 between
programs, while ITERR truncates a dense retriever's list. E_c is frozen. The GRU starts close to the identity (bias of
its update gate 3), so that the first picks are those of the encoders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import DoubleArray, IntArray
from langchain_rcr.policy.triencoder import TriEncoder
from rcr_trainer.baselines import LearnedSettings
from rcr_trainer.paper.learned import LearnedSelector, question_batches
from rcr_trainer.paper.se2 import beam
from rcr_trainer.training.actor import Sequences, draw, sequence_log_probs, states
from rcr_trainer.training.advantages import estimate
from rcr_trainer.training.losses import grpo_loss

_CLIP = 0.2


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The counterpart of the tri-encoder's `State`, updated by a recurrent cell; `current` is (R, D)."""

    cell: nn.GRUCell
    current: Tensor

    def vector(self) -> Tensor:
        """(R, D)."""
        return self.current

    def update(self, context: Tensor) -> Recurrent:
        """The state after a pick; `context` is E_c of each row's pick, (R, D)."""
        return Recurrent(self.cell, self.cell(context, self.current))


class ITERRSelector(LearnedSelector):
    """Each step picks the example with the largest inner product with a recurrent state."""

    @classmethod
    def texts(cls, options: LearnedSettings, queries: int, k: int) -> int:
        """See `Baseline.texts`."""
        return options.epochs * queries * options.sets

    def _learn(self, model: TriEncoder, rows: IntArray) -> None:
        given, tau = model.query.given, [model.config.tau] * self.k
        self._cell = cell = nn.GRUCell(model.dim, model.dim)
        with torch.no_grad():
            cell.bias_ih[model.dim : 2 * model.dim] += 3.0  # update gate: the state hardly changes
        candidates = given(model.candidate.encode(self._items))
        cell.to(candidates.device)
        questions = model.query.featurize([Item(self.examples[row]["source"]) for row in rows])
        barred = torch.ones(len(rows), len(candidates), dtype=torch.bool)
        barred.scatter_(1, torch.from_numpy(self._near(rows)), value=False)
        group = self.options.sets

        def start(batch: IntArray) -> Any:
            return Recurrent(cell, model.query(questions.select(batch)).repeat_interleave(group, 0))

        def closed(batch: IntArray) -> Tensor:
            return barred[batch].repeat_interleave(group, 0).to(candidates.device)

        def batches(rng: np.random.Generator) -> Iterator[tuple[IntArray, Sequences, Tensor, Tensor]]:
            # Drawn one at a time, by the policy as the previous batch left it.
            for batch in question_batches(len(rows), self.options.batch_size, rng):
                uniforms = torch.from_numpy(rng.random((len(batch) * group, self.k)))
                with torch.no_grad():
                    begun, shut = start(batch), closed(batch)
                    drawn = draw(begun, candidates, candidates.__getitem__, shut, self.k, tau=tau, uniforms=uniforms)
                rewards = self._scores(np.repeat(rows[batch], group).tolist(), drawn.picks.tolist())
                rewards = np.where(np.isfinite(rewards), rewards, np.nan).reshape(-1, group)
                advantages, scored = (given(each.ravel()) for each in estimate("grpo", rewards))
                yield batch, drawn, advantages.float(), scored

        def loss(material: tuple[IntArray, Sequences, Tensor, Tensor]) -> Tensor:
            batch, drawn, advantages, scored = material
            picks, old = drawn.picks, drawn.log_probs
            new = sequence_log_probs(start(batch), candidates, candidates[picks[:, :-1]], closed(batch), picks, tau)
            return grpo_loss(new, old, old, advantages, scored, _CLIP, 0.0).mean()

        self._train(model, [model.query, cell], len(rows), loss, batches)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        starts, candidates = map(self.model.query.given, (self._query_vectors(queries), self._candidates[self._row_of]))

        @torch.inference_mode()
        def logits(rows: IntArray, picks: IntArray) -> DoubleArray:
            start: Any = Recurrent(self._cell, starts[rows])
            return self._pool_logits(states(start, candidates[picks])[:, -1].cpu().numpy())

        return beam(logits, excluded, k, width=1, horizon=k)
