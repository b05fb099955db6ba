"""What the rivals that learn from a scoring language model share (scores, encoders, training); EPR and LLM-R.

The training questions are the pool's own examples; none gets itself. The encoders are those of the run's family or, if
that family reads structures, heads over frozen embeddings.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import DoubleArray, FloatArray, IntArray
from langchain_rcr.errors import InputError
from langchain_rcr.policy.prompt import arranged
from langchain_rcr.policy.triencoder import TriEncoder
from rcr_trainer.baselines import LearnedSettings
from rcr_trainer.baselines.base import Baseline
from rcr_trainer.data.arrays import distinct, row_blocks, top_k
from rcr_trainer.data.okapi import BM25Scorer
from rcr_trainer.training.losses import Targets, info_nce
from rcr_trainer.training.registry import StageSettings
from rcr_trainer.training.runner import Job, Runner
from rcr_trainer.training.supervision import Batch, info_nce_batches

logger = logging.getLogger(__name__)

States = Callable[[IntArray, IntArray], Tensor]
"""Queries (S,) and their numbers of picks (S,) → state vectors (S, D), with gradients."""
MaterialT = TypeVar("MaterialT")

NEGATIVES = 7  # less helpful examples besides the most helpful one, as in LLM-R
_GRID = 1e-5  # logits are rounded to this, so that exact ties stay ties whatever batch a text was encoded in


class LearnedSelector(Baseline):
    """Base of the selectors that a scoring language model teaches.

    They learn before the first pick, from the pool at that time. Examples added later can be picked, but nothing is
    learned from them.

    Raises:
        InputError: the pool has less than k + 2 examples.
        LLMError: the language model can't be asked, or its budget is spent; its scores so far are kept.
    """

    needs: ClassVar[tuple[str, ...]] = ("spec", "score", "policy")

    @abstractmethod
    def _learn(self, model: TriEncoder, rows: IntArray) -> None:
        """Train a fresh model with these examples of the pool as questions."""

    @property
    def options(self) -> LearnedSettings:
        """The training settings."""
        return self.resources.learning

    @cached_property
    def model(self) -> TriEncoder:
        """The encoders, trained on first use."""
        build: Any = self.resources.policy
        if len(self.examples) < self.k + 2:
            what = f"the pool has {len(self.examples)} examples, too few to learn to pick {self.k}"
            raise InputError(f"the {self.name} selector can't be trained: {what}")
        rows = training_rows(len(self.examples), self.options.queries)
        most = self.texts(self.options, len(rows), self.k)
        logger.info("%s learns: the language model scores at most %d texts …", self.name, most)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.resources.seed)
            model: TriEncoder = build(self._items)
            self._learn(model, rows)
        return model.eval()

    def _fit(self) -> None:
        items, self._row_of = distinct(self._items)
        self._candidates = self.model.candidate.encode(items)

    def _pool_logits(self, states: FloatArray) -> DoubleArray:
        """(R, N) logits of state vectors (R, D); those of equal ones are equal, too."""
        different, at = np.unique(states, axis=0, return_inverse=True)
        rounded: DoubleArray = np.round((different @ self._candidates.T).astype(np.float64) / _GRID) * _GRID
        return rounded[at.ravel()][:, self._row_of]  # ravel: NumPy 2.0 gives a column

    @property
    def _items(self) -> list[Item]:
        return [Item(example["source"], example["target"]) for example in self.examples]

    def _query_vectors(self, queries: Sequence[str]) -> FloatArray:
        return self.model.query.encode([Item(query) for query in queries])

    def _scores(self, rows: Sequence[int], sets: Iterable[Sequence[int]]) -> DoubleArray:
        """(R,) log-likelihoods of R examples' programs after prompts that show these others, the first one last."""
        scorer: Any = self.resources.score
        prompt, items, examples = self.resources.prompt, self._items, self.examples
        prompts = [
            str(prompt.request(arranged([items[each] for each in shown], "reversed"), items[row].source, examples[row]))
            for row, shown in zip(rows, sets, strict=True)
        ]
        wanted = [prompt.continuation(items[row].target) for row in rows]
        return np.array(scorer.log_likelihoods(prompts, wanted), dtype=np.float64)

    def _near(self, rows: IntArray) -> IntArray:
        """(Q, L) the other examples nearest to each row by BM25 between programs; L is at least k."""
        programs = self._programs
        scorer, size = BM25Scorer(programs), min(max(self.options.candidates, self.k), len(programs) - 1)
        found = np.empty((len(rows), size), dtype=np.int64)
        for block in row_blocks(len(rows), len(programs)):
            scores = np.round(scorer.scores([programs[row] for row in rows[block]]), 6)  # keeps ties exact
            found[block] = top_k(scores, size, list(rows[block][:, None]))
        return found

    def _contrast(
        self, model: TriEncoder, rows: IntArray, ranked: IntArray, best: int, sequences: IntArray, states: States
    ) -> None:
        """Train E_c, and whatever makes the states, by InfoNCE with in-batch and hard negatives.

        The Q training questions (`rows`) never get themselves. `ranked` (Q, k, L) are each one's candidates at each
        step, the most helpful first: positives are drawn from the `best` first, hard negatives from the last `extreme`.
        The states are the prefixes of the sequences (Q, k).
        """
        every, own, pool = np.argwhere(np.ones(sequences.shape, dtype=bool)), list(rows[:, None]), self._items
        candidates, given = model.candidate.featurize(pool), model.candidate.given
        half = max(1, ranked.shape[2] // 2)
        best, worst = min(best, half), min(self.options.extreme, half)

        def negatives(queries: IntArray, steps: IntArray, rng: np.random.Generator) -> IntArray:
            found: IntArray = ranked[queries, steps, -1 - rng.integers(worst, size=len(queries))]
            return found

        def batches(rng: np.random.Generator) -> Iterator[Batch]:
            order, drawn = rng.permutation(every), rng.integers(best, size=ranked.shape[:2])
            positives = np.take_along_axis(ranked, drawn[..., None], axis=2)[..., 0]
            return info_nce_batches(order, positives, sequences, self.options.batch_size, negatives, rng)

        def loss(batch: Batch) -> Tensor:
            # Each row of the batch is a single state with a positive.
            rivals = model.candidate(candidates.select(batch.candidates))
            logits = states(batch.queries, batch.steps.argmax(axis=1)) @ rivals.T
            allowed, positive = given(batch.allowed(own, len(pool))[batch.steps]), given(np.asarray(batch.positive))
            return info_nce(logits, Targets(torch.zeros_like(logits), allowed, positive=positive, mask_equals=False))

        self._train(model, [model], len(every), loss, batches)

    def _train(
        self,
        model: TriEncoder,
        modules: Sequence[nn.Module],
        rows: int,
        loss: Callable[[MaterialT], Tensor],
        collect: Callable[[np.random.Generator], Iterable[MaterialT]] | None = None,
    ) -> None:
        """Train modules with the common loop on what `collect` gives an epoch; None: all questions, shuffled."""
        options, seed = self.options, self.resources.seed
        parameters = (each for module in modules for each in module.parameters() if each.requires_grad)
        trained = {str(number): each for number, each in enumerate(parameters)}
        given = options.model_dump(include={"epochs", "batch_size", "lr"})
        stage = StageSettings(**given, weight_decay=0.01, warmup=0.1, patience=None, keep="last")
        steps = -(-rows // options.batch_size)
        job = Job(model, (), (), (), self.resources.spec, seed)
        runner = Runner("learned", job, stage, trained, per_epoch=steps, every=options.epochs, best_by="")

        def learn(batches: Iterable[MaterialT]) -> dict[str, float]:
            model.train()
            for batch in batches:
                torch.autograd.backward(loss(batch))
                runner.step()
                runner.advance()
            model.eval()
            return {}

        def epoch_of(epoch: int) -> Iterable[Any]:
            rng = np.random.default_rng([seed, epoch])
            return collect(rng) if collect else question_batches(rows, options.batch_size, rng)

        runner.run(epoch_of, learn, dict)


class EPRSelector(LearnedSelector):
    """EPR: a bi-encoder that learns which single example most helps a language model write the program.

    Source: Rubin, Herzig and Berant, "Learning To Retrieve Prompts for In-Context Learning", NAACL 2022, arXiv
    2112.08633, section 3. The candidates of a training question (x, y), the best by BM25 between programs, are ranked
    by p(y | candidate, x). One of the five best is the positive, one of the five worst the hard negative; those of the
    batch's other questions are negatives, too. Picks are the k largest inner products.

    Departures: encoders, rate and epochs are the run's (there: BERT, 1e-4, 30 epochs). A question's own picks are never
    its negatives.
    """

    @classmethod
    def texts(cls, options: LearnedSettings, queries: int, k: int) -> int:
        """See `Baseline.texts`."""
        return queries * max(options.candidates, k)

    def _learn(self, model: TriEncoder, rows: IntArray) -> None:
        near, scores = self._scored(rows)
        ranked = np.take_along_axis(near, np.argsort(-scores, axis=1, kind="stable"), axis=1)
        questions = model.query.featurize([Item(self.examples[row]["source"]) for row in rows])
        single = ranked[:, None], self.options.extreme, ranked[:, :1]
        self._contrast(model, rows, *single, lambda queries, _: model.query(questions.select(queries)))

    def _scored(self, rows: IntArray) -> tuple[IntArray, DoubleArray]:
        """(Q, L) each question's candidates, and the log-likelihoods of its program after each of them."""
        near = self._near(rows)
        scores = self._scores(np.repeat(rows, near.shape[1]).tolist(), near.reshape(-1, 1).tolist())
        return near, scores.reshape(near.shape)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return top_k(self._pool_logits(self._query_vectors(queries)), k, excluded)


class LLMRSelector(EPRSelector):
    """An LLM-R-like retriever: a reward model learns how much examples help, and a bi-encoder is distilled from it.

    After Wang, Yang and Wei, "Learning to Retrieve In-Context Examples for Large Language Models", EACL 2024, arXiv
    2307.07164: a cross-encoder reads question, program and one example. It learns to distinguish the example after
    which the language model finds the program most likely from less helpful ones. The softmax of the bi-encoder over a
    question's candidates then follows that of the reward model (KL divergence), although only the latter has seen the
    program.

    It is like LLM-R, not LLM-R itself: the reward model is E_x of the run's family with a linear head, candidates are
    the best by BM25 between programs, there is one round (theirs: two, the second from the retriever's own candidates),
    and the contrastive term, of weight 0.2 there, is left out.
    """

    def _learn(self, model: TriEncoder, rows: IntArray) -> None:
        near, scores = self._scored(rows)
        rewards = torch.from_numpy(self._rewards(rows, near, scores))
        questions = model.query.featurize([Item(self.examples[row]["source"]) for row in rows])
        candidates = model.candidate.featurize(self._items)

        def loss(batch: IntArray) -> Tensor:
            different, place = np.unique(near[batch], return_inverse=True)
            shown = model.candidate(candidates.select(different))[torch.from_numpy(place.reshape(len(batch), -1))]
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


def training_rows(pool: int, most: int | None) -> IntArray:
    """The pool's examples that serve as training questions: all, or `most`, evenly spaced."""
    return np.unique(np.linspace(0, pool - 1, min(pool, most or pool)).astype(np.int64))


def question_batches(count: int, size: int, rng: np.random.Generator) -> list[IntArray]:
    """All of `count` questions in random order, `size` at a time."""
    return np.split(rng.permutation(count), range(size, count, size))
