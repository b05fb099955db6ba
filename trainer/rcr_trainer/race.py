"""Between SFT and GRPO: a race of a policy's variants, judged by a language model's answers to their picks.

What a language model wants, such as labels or brevity, is one number for all questions. Groups of sequences reveal it
slowly, since most get equal rewards; answers to the same questions reveal it at once.

The race is successive halving (Karnin, Koren and Somekh, 2013; Jamieson and Talwalkar, 2016) on paired questions: all
variants are asked about the first questions, the better half about the next ones, and so on. Each change
(`Family.changes`) races by itself first, then the best ones in combination.

Future questions with new programs may combine what no training program combines, and no answer shows how a variant does
on those. So a `Guard` rejects variants whose picks would no longer show such questions all their labels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from langchain_rcr.basics.rows import DoubleArray, IntArray
from langchain_rcr.index.base import PoolVectors
from rcr_trainer.data.coverage import structure_matrices
from rcr_trainer.data.examples import Example
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.faults import UnscoredError
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.rewards.reward import Reward
from rcr_trainer.training.environment import Environment, greedy_picks
from rcr_trainer.training.registry import TIMES, GRPOSettings
from rcr_trainer.training.runner import Job

logger = logging.getLogger(__name__)

Variant: TypeAlias = Mapping[str, Any]
"""The numbers that differ from the current policy."""

TOGETHER = 3
"""Winners of the first part that are combined in the second."""
WORTH = 0.01
"""Reward; a change that gains less isn't worth making, however certain the gain."""
FEWER = 0.05
"""Share of questions; a variant that shows all labels to this many fewer is out. On COVR's split 110 one that won by
0.06 on held-out questions cost 30 of 100 test questions; it shows 39 % fewer (a trial, with the `Guard` off)."""
_GUARDED = 400
"""Questions that the guard measures this on, at most."""
_WEIGHED = 50
"""Questions on which a variant's prompt length is measured."""


class Winner(NamedTuple):
    """The result of a race: mean rewards over the questions of the last round; {} is the unchanged policy."""

    variant: Variant
    before: float
    after: float
    questions: int


def run(job: Job, environment: Environment, config: GRPOSettings) -> None:
    """Change the policy into the variant whose greedy picks win, if its family has any and the reward reads answers.

    If the reward is exact match and the language model gives probabilities, the race uses the gold program's
    probability instead, which is much less noisy.
    """
    model, changes = job.model, [*job.model.family.changes_to(job.model.encoders, job.model.config)]
    if not (environment.reward.needs_llm and config.race and (changes or config.prompt_tokens)):
        return
    variants = _Variants(job, environment, config)
    if config.prompt_tokens and config.k is None:
        more = [{"k": times * model.config.k} for times in TIMES if times * model.config.k <= variants.guard.room]
        changes += [variant for variant in more if variants.tokens(variant) <= config.prompt_tokens]
    if not changes:
        return
    logger.info("race: trying %d changes of the policy, with at most %d answers …", len(changes), config.race)
    _, share = variants.of({})

    def admitted(variant: Variant) -> bool:
        return variants.of(variant)[1] >= share - FEWER

    won = race(changes, variants.earned, len(variants.rows), config.race, variants.spent, admitted)
    model.vary(won.variant)
    chosen = ", ".join(f"{name} {value}" for name, value in won.variant.items()) or "no change"
    if not won.questions:
        logger.info("race: no change was tried: the guard admits none, or there are too few answers")
        return
    message = "race: %s won (%s %.3f → %.3f on %d held-out questions)"
    logger.info(message, chosen, variants.reward.name, won.before, won.after, won.questions)


class _Variants:
    """What variants of a policy pick for held-out questions, and what that earns."""

    def __init__(self, job: Job, environment: Environment, config: GRPOSettings) -> None:
        self._job, self._environment, self._config = job, environment, config
        order = np.random.default_rng([job.seed, 2]).permutation(len(environment.queries))
        self.rows = order[: config.race]
        """(n,) the environment's questions that may be asked, in random order; each takes at least one answer."""
        self.guard = Guard(job, environment, order)
        self.reward = _reward(job, environment)
        self._pool = job.model.featurize_pool([example.item for example in job.pool])
        self._picked: dict[frozenset[tuple[str, Any]], tuple[IntArray, float]] = {}

    def of(self, variant: Variant) -> tuple[IntArray, float]:
        """The picks (len(rows), k) and the `Guard.share` of a variant; computed once."""
        job, environment = self._job, self._environment
        if (name := frozenset(variant.items())) not in self._picked:
            with job.model.varied(variant):
                vectors, k = job.model.pool_vectors(*self._pool), self._config.picks(job.model.config)
                picks = greedy_picks(job, environment.features, environment.barred, self.rows, vectors, k)
                self._picked[name] = picks, self.guard.share(vectors, k)
        return self._picked[name]

    def earned(self, variant: Variant, asked: slice) -> DoubleArray:
        """The rewards (n,) of a variant on some of the rows."""
        queries, picks = self._queries(asked), self.of(variant)[0][asked]
        part = self._job.processes.part(len(queries))
        with self._job.model.varied(variant):  # prompts have its order
            rewards = self._environment.score(queries[part], picks[part], self.reward)[0]
        return self._job.processes.gather(rewards, len(queries))

    def tokens(self, variant: Variant) -> float:
        """Mean tokens per prompt, over some of the rows."""
        few = slice(_WEIGHED)
        return self._environment.prompt_tokens(self._queries(few), self.of(variant)[0][few])

    def spent(self) -> int:
        """How many different prompts have been handed in by all processes."""
        llm = self._environment.llm
        return int(self._job.processes.sum(np.array([llm.stats.distinct if llm else 0]))[0])

    def _queries(self, asked: slice) -> list[Example]:
        return [self._environment.queries[row] for row in self.rows[asked]]


class Guard:
    """How often picks show all labels of a question whose combination of labels no candidate has."""

    def __init__(self, job: Job, environment: Environment, order: IntArray) -> None:
        self._job, self._features = job, environment.features
        with_program = environment.held_out.with_program(environment.queries)
        self._rows = np.sort(order[with_program[order]][:_GUARDED])
        queries = [environment.queries[row] for row in self._rows]
        barred = environment.held_out.without_combination(queries)
        self._barred = dict(zip(self._rows.tolist(), barred, strict=True))
        self.room = min(environment.room, len(job.pool) - max(map(len, barred), default=0))
        """The fewest candidates that the environment or the guard leaves to any question."""
        programs = ([each.target for each in examples] for examples in (queries, job.pool))
        self._needed, self._labels = structure_matrices(replace(job.spec, max_size=1), *programs)

    def share(self, vectors: PoolVectors, k: int) -> float:
        """The share of questions whose labels are all among the model's k picks; 1 if there are no questions."""
        if not len(self._rows):
            return 1.0
        picks = greedy_picks(self._job, self._features, self._barred, self._rows, vectors, k)
        shown = sum(self._labels[column] for column in picks.T)
        has = self._needed.multiply(shown > 0).sum(axis=1)
        return float((has == self._needed.sum(axis=1)).mean())


def _reward(job: Job, environment: Environment) -> Reward:
    reward, llm = environment.reward, environment.llm
    if reward.name != "correctness" or llm is None:
        return reward
    query = environment.queries[0]
    text = str(llm.prompt.request([], query.source, query.fields))
    try:
        llm.log_likelihoods([text], [llm.prompt.continuation(query.target)])
    except (ConfigError, UnscoredError):
        return reward
    return make_reward("likelihood", job.spec)


def race(
    changes: Sequence[Variant],
    earned: Callable[[Variant, slice], DoubleArray],
    questions: int,
    answers: int,
    spent: Callable[[], int],
    admitted: Callable[[Variant], bool] = lambda variant: True,
) -> Winner:
    """Find the variant that earns most, if that is clear (`is_clear`).

    Args:
        changes: of one number each; of two that earn the same, the first is taken.
        earned: the rewards (n,) of a variant on some of the questions; NaN: there is none.
        questions: how many there are, in random order.
        answers: the most to ask for. Variants with the same picks share them.
        spent: how many answers have been asked for.
        admitted: whether a variant may take part.
    """
    before, end = np.full(questions, np.nan), spent() + answers

    def halved(variants: list[Variant], answers: int, last: int) -> list[tuple[Variant, DoubleArray]]:
        """The `last` best, in their order, with what each gains on all questions asked; fills `before` for these."""
        if not variants:  # what the unchanged policy earns decides nothing
            return []
        rounds, begun, stop = max(1, math.ceil(math.log2(len(variants) / last))), spent(), 0
        gains = {at: np.empty(0) for at in range(len(variants))}
        for number in range(rounds):
            limit = begun + answers * (number + 1) // rounds
            # Ask as many questions as the budget allows; where variants share answers, the rest pays for more.
            while more := min(questions - stop, max(0, limit - spent()) // (len(gains) + 1)):
                asked, stop = slice(stop, stop + more), stop + more
                before[asked] = earned({}, asked)
                gains = {at: np.append(old, earned(variants[at], asked) - before[asked]) for at, old in gains.items()}
            count = last if number == rounds - 1 else max(last, math.ceil(len(gains) / 2))
            best = sorted(gains, key=lambda at: _mean(gains[at]), reverse=True)[:count]
            gains = {at: gains[at] for at in sorted(best)}
        return [(variants[at], each) for at, each in gains.items()]

    alone = halved([*filter(admitted, changes)], answers // 2, TOGETHER)
    joined = [*together([variant for variant, gains in alone if _mean(gains) > 0], 1)]
    finalist = halved([*filter(admitted, joined)], end - spent(), 1)
    asked = before[: len(finalist[0][1])] if finalist else before[np.isfinite(before)]
    for variant, gains in finalist:
        if is_clear(gains):
            return Winner(variant, _mean(asked), _mean(asked) + _mean(gains), len(asked))
    return Winner({}, _mean(asked), _mean(asked), len(asked))


def together(changes: Sequence[Variant], fewest: int) -> Iterator[Variant]:
    """Combinations of `fewest` or more of these single-number changes, all of different numbers."""
    for size in range(fewest, len(changes) + 1):
        for some in combinations(changes, size):
            joined = {name: value for change in some for name, value in change.items()}
            if len(joined) == size:
                yield joined


def is_clear(gains: DoubleArray) -> bool:
    """Whether gains (n,) of a variant, NaN where there is no answer, are more on average than their standard error.

    The one-standard-error rule (Breiman, Friedman, Olshen and Stone, 1984): else held-out questions can't tell it from
    the unchanged policy, which does the least harm on questions unlike them. Nor are less than `WORTH` worth a change.
    """
    known = gains[np.isfinite(gains)]
    return len(known) > 1 and bool(known.mean() > max(known.std(ddof=1) / math.sqrt(len(known)), WORTH))


def _mean(values: DoubleArray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else -math.inf
