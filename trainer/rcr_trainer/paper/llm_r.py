"""An LLM-R-like retriever: a reward model learns how much examples help, and a bi-encoder is distilled from it.

After Wang, Yang and Wei, "Learning to Retrieve In-Context Examples for Large Language Models", EACL 2024, arXiv
2307.07164: a cross-encoder reads question, program and one example. It learns to distinguish the example after which
the language model finds the program most likely from less helpful ones. The bi-encoder's softmax over a question's
candidates then follows the reward model's (KL divergence), although only the latter has seen the program.

It is like LLM-R, not LLM-R itself: the reward model is E_x of the run's family with a linear head, candidates are the
best by BM25 between programs, there is one round (theirs: two, the second from the retriever's own candidates), and the
contrastive term, of weight 0.2 there, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import DoubleArray, IntArray
from langchain_rcr.policy.triencoder import TriEncoder
from rcr_trainer.paper.learned import EPRSelector, question_batches

NEGATIVES = 7  # less helpful examples besides the most helpful one, as in LLM-R


class LLMRSelector(EPRSelector):
    """Picks the k examples whose vectors have the largest inner product with the query's."""

    def _learn(self, model: TriEncoder, rows: IntArray) -> None:
        near, scores = self._scored(rows)
        rewards = torch.from_numpy(self._rewards(rows, near, scores))
        questions = model.query.featurize([Item(self.examples[row]["source"]) for row in rows])
        candidates = model.candidate.featurize(self._items)

        def loss(batch: IntArray) -> Tensor:
            distinct, place = np.unique(near[batch], return_inverse=True)
            shown = model.candidate(candidates.select(distinct))[torch.from_numpy(place.reshape(len(batch), -1))]
            logits = torch.einsum("bd,bld->bl", model.query(questions.select(batch)), shown)
            wanted = rewards[torch.from_numpy(batch)].to(logits).softmax(dim=1)
            return kl_div(logits.log_softmax(dim=1), wanted, reduction="batchmean")

        self._train(model, [model], len(rows), loss)

    def _rewards(self, rows: IntArray, near: IntArray, scores: DoubleArray) -> DoubleArray:
        """(Q, L) rewards of the candidates, by a reward model trained on the language model's scores (Q, L) of them."""
        build: Any = self.resources.policy
        model: TriEncoder = build(self._items)
        head = nn.Linear(model.dim, 1).to(next(model.parameters()).device)
        items, size = self._items, near.shape[1]
        pairs = ((items[row], items[each]) for row, own in zip(rows, near, strict=True) for each in own)
        features = model.query.featurize([Item("\n".join([own.source, own.target, each.text])) for own, each in pairs])
        order = np.argsort(-scores, axis=1, kind="stable")
        worst = order[:, size // 2 :]

        def batches(rng: np.random.Generator) -> Iterator[IntArray]:
            for batch in question_batches(len(rows), self.options.batch_size, rng):
                drawn = rng.random(worst[batch].shape).argsort(axis=1)[:, :NEGATIVES]
                shown = np.concatenate([order[batch, :1], np.take_along_axis(worst[batch], drawn, axis=1)], axis=1)
                yield batch[:, None] * size + shown

        def loss(shown: IntArray) -> Tensor:
            logits = head(model.query(features.select(shown.ravel()))).view(shown.shape)
            return cross_entropy(logits, torch.zeros(len(shown), dtype=torch.long, device=logits.device))

        self._train(model, [model.query, head], len(rows), loss, batches)
        with torch.inference_mode():
            vectors = torch.from_numpy(model.query.vectors(features)).to(head.weight.device)
            rewards: DoubleArray = head(vectors).double().cpu().numpy().reshape(near.shape)
        return rewards
