"""What the selectors share that learn from a scoring language model: its scores, their encoders, their training.

The training questions are the pool's own examples, as published; none gets itself. The encoders are those of the run's
family, or heads over frozen embeddings where that family reads structures. EPR and se² train them by the common
InfoNCE on candidates that the language model has ranked (`contrast`).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.basics.items import Item
from langchain_rcr.errors import InputError
from langchain_rcr.policy.prompt import arranged
from langchain_rcr.policy.triencoder import TriEncoder
from rcr_trainer.baselines.base import Baseline
from rcr_trainer.baselines.options import LearnedSettings
from rcr_trainer.data.coverage import row_blocks
from rcr_trainer.data.okapi import BM25Scorer
from rcr_trainer.training.losses import Targets, info_nce
from rcr_trainer.training.runner import Job, Runner
from rcr_trainer.training.stage import StageSettings
from rcr_trainer.training.supervision import Batch, info_nce_batches

logger = logging.getLogger(__name__)

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
MaterialT = TypeVar("MaterialT")

_GRID = 1e-5
"""Logits are rounded to this: exact ties stay ties, whatever batch a text was encoded in."""


class LearnedSelector(Baseline):
    """Base of the selectors that a scoring language model teaches.

    They learn before the first pick, from the pool as it then is; examples that are added later can be picked, too, but
    nothing is learned from them.

    Raises:
        InputError: the pool has less than k + 2 examples.
        LLMError: the language model can't be asked, or its budget is spent: its scores so far are kept.
    """

    needs: ClassVar[tuple[str, ...]] = ("spec", "score", "policy")
    _model: TriEncoder | None = None

    @classmethod
    @abstractmethod
    def texts(cls, options: LearnedSettings, queries: int, k: int) -> int:
        """How many texts the language model scores at most.

        Args:
            options: of the training.
            queries: training questions.
            k: picks a query.
        """

    @abstractmethod
    def _learn(self, model: TriEncoder, rows: IntArray) -> None:
        """Train a fresh model on some of the pool's examples as questions."""

    @property
    def options(self) -> LearnedSettings:
        """The settings of the training."""
        return self.resources.learning

    @property
    def model(self) -> TriEncoder:
        """The encoders, trained as soon as something has been picked."""
        if self._model is None:
            build: Any = self.resources.policy
            if len(self._examples) < self.k + 2:
                what = f"the pool has {len(self._examples)} examples, too few to learn to pick {self.k}"
                raise InputError(f"the {self.name} selector can't be trained: {what}")
            rows = training_rows(len(self._examples), self.options.queries)
            most = self.texts(self.options, len(rows), self.k)
            logger.info("%s learns: the language model scores at most %d texts …", self.name, most)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.resources.seed)
                model: TriEncoder = build(self._items)
                self._learn(model, rows)
            self._model = model.eval()
        return self._model

    def _fit(self) -> None:
        model, distinct = self.model, list(dict.fromkeys(self._items))
        place = {item: at for at, item in enumerate(distinct)}
        # Equal examples have equal vectors to the last bit.
        self._candidates = model.candidate.encode(distinct)
        self._row_of = np.array([place[item] for item in self._items], dtype=np.int64)

    def _pool_logits(self, states: NDArray[np.float32]) -> FloatArray:
        """(R, N) of state vectors (R, D)."""
        rounded: FloatArray = np.round((states @ self._candidates.T).astype(np.float64) / _GRID) * _GRID
        return rounded[:, self._row_of]

    @property
    def _items(self) -> list[Item]:
        return [Item(example["source"], example["target"]) for example in self._examples]

    def _scores(self, rows: Sequence[int], sets: Iterable[Sequence[int]]) -> FloatArray:
        """(R,) log-likelihoods of the programs of R examples behind prompts that show others, the first last."""
        scorer: Any = self.resources.score
        prompt, items, examples = self.resources.prompt, self._items, self._examples
        prompts = [
            str(prompt.request(arranged([items[each] for each in shown], "reversed"), items[row].source, examples[row]))
            for row, shown in zip(rows, sets, strict=True)
        ]
        wanted = [prompt.continuation(items[row].target) for row in rows]
        return np.array(scorer.log_likelihoods(prompts, wanted), dtype=np.float64)

    def _near(self, rows: IntArray) -> IntArray:
        """(Q, L) the examples nearest to each row by BM25 between programs, itself left out; L is k or more."""
        programs = self._programs()
        scorer, size = BM25Scorer(programs), min(max(self.options.candidates, self.k), len(programs) - 1)
        found = np.empty((len(rows), size), dtype=np.int64)
        for block in row_blocks(len(rows), len(programs)):
            scores = np.round(scorer.scores([programs[row] for row in rows[block]]), 6)  # so that a tie is one
            scores[np.arange(len(scores)), rows[block]] = -np.inf
            found[block] = np.argsort(-scores, axis=1, kind="stable")[:, :size]
        return found

    def _job(self, model: TriEncoder) -> Job:
        return Job(model, (), (), (), self.resources.spec, self.resources.seed)


def training_rows(pool: int, most: int | None) -> IntArray:
    """The pool's examples that are training questions: all, or `most`, evenly spaced."""
    return np.unique(np.linspace(0, pool - 1, min(pool, most or pool)).astype(np.int64))


class Learner:
    """The common training loop (`Runner`) around a function batch → loss.

    Args:
        job: the model and the seed.
        options: epochs, rows in a batch, rate.
        parameters: those to be trained, by name.
        rows: in an epoch.
    """

    def __init__(self, job: Job, options: LearnedSettings, parameters: Mapping[str, nn.Parameter], rows: int) -> None:
        trained = {each: parameter for each, parameter in parameters.items() if parameter.requires_grad}
        stage = StageSettings(
            epochs=options.epochs,
            batch_size=options.batch_size,
            lr=options.lr,
            weight_decay=0.01,
            warmup=0.1,
            patience=None,
            keep="last",
        )
        steps = -(-rows // options.batch_size)
        self._seed, self._model = job.seed, job.model
        self._runner = Runner("learned", job, stage, trained, per_epoch=steps, every=options.epochs, best_by="")

    def run(
        self, collect: Callable[[np.random.Generator], Iterable[MaterialT]], loss: Callable[[MaterialT], Tensor]
    ) -> None:
        """Train to the end.

        Args:
            collect: random numbers of an epoch → its batches.
            loss: of a batch, a scalar.
        """

        def learn(batches: Iterable[MaterialT]) -> dict[str, float]:
            self._model.train()
            for batch in batches:
                self._runner.step(lambda batch=batch: torch.autograd.backward(loss(batch)))  # type: ignore[misc]
                self._runner.advance()
            self._model.eval()
            return {}

        self._runner.run(lambda epoch: collect(np.random.default_rng([self._seed, epoch])), learn, dict)


def question_batches(count: int, size: int, rng: np.random.Generator) -> list[IntArray]:
    """All of `count` questions in random order, `size` at a time."""
    order = rng.permutation(count)
    return [order[start : start + size] for start in range(0, count, size)]


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
        """One of the worst of each state, see `HardNegatives.draw`."""
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
        return info_nce_batches(order, best, sequences, options.batch_size, ranking.draw, rng)

    def loss(batch: Batch) -> Tensor:
        # Each row of the batch is a single state, and has a positive.
        logits = (
            states(batch.queries, batch.steps.argmax(axis=1)) @ model.candidate(candidates.select(batch.candidates)).T
        )
        allowed = torch.from_numpy(batch.allowed(own, np.arange(len(items)))[batch.steps]).to(device)
        positive = torch.from_numpy(np.asarray(batch.positive)[:, 0]).to(device)
        return info_nce(logits, Targets(torch.zeros_like(logits), allowed, positive=positive, mask_equals=False))

    Learner(job, options, dict(model.named_parameters()), len(every)).run(batches, loss)
