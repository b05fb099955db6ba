"""Questions that stand in for future ones: those that judge a policy in training, those it acts on, and its rewards."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from langchain_rcr.basics.items import readable
from langchain_rcr.basics.rows import DoubleArray, IntArray
from langchain_rcr.families.base import PARTS
from langchain_rcr.families.encoding import Features
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.index.memory import MatrixTable
from langchain_rcr.policy.prompt import Request, arranged
from langchain_rcr.policy.selection import greedy
from rcr_trainer.data.arrays import row_blocks
from rcr_trainer.data.examples import Example
from rcr_trainer.data.held_out import HeldOut, check_pool_size, share_held_out, taken_from
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.rewards.reward import Reward, RewardError, check_reward, score
from rcr_trainer.training.registry import GRPOSettings
from rcr_trainer.training.runner import Job
from rcr_trainer.training.supervision import Supervision

logger = logging.getLogger(__name__)

Tally = dict[str, tuple[float, float]]
"""Sums and counts of one process; a figure is the mean over all processes."""

_PATIENCE = 64
"""Answers, or sets of picks, in a row that a reward may leave unscored before training stops."""


def greedy_picks(
    job: Job,
    features: Features,
    forbidden: Sequence[IntArray] | Mapping[int, IntArray],
    rows: IntArray,
    pool: PoolVectors,
    k: int,
) -> IntArray:
    """(n, k) greedy picks of the current policy for n of the queries (`rows`); each process computes a share."""
    mine, table = rows[job.processes.part(len(rows))], MatrixTable(pool)
    picks = np.empty((len(mine), k), dtype=np.int64)
    if len(mine):
        vectors = job.model.query.vectors(features.select(mine))
        for block in row_blocks(len(mine), len(table)):
            barred = [forbidden[row] for row in mine[block].tolist()]
            picks[block] = greedy(vectors[block], table, job.model.state(), k, exclude=barred).positions
    return job.processes.gather(picks, len(rows))


class Development:
    """The development queries whose programs parse; those taken out of training are treated as held out."""

    def __init__(self, job: Job, held_out: HeldOut) -> None:
        self.job, self.held_out = job, held_out
        self.queries = [query for query in job.dev if job.spec.structures(query.target)]
        self.are_training = taken_from(job.dev, job.pool)
        self.supervision = Supervision(self.queries, job.pool, job.spec, held_out.judging(self.queries), reachable=True)

    @cached_property
    def features(self) -> Features:
        """The queries' features, computed on first use: after a closed-form fit."""
        if self.are_training:
            return self.held_out.features(self.job.model, self.queries)
        return self.job.model.query.featurize(readable(query.item.asked for query in self.queries))

    def picks(self, pool: PoolVectors, k: int) -> IntArray:
        """(Q, k) greedy picks, see `greedy_picks`."""
        rows = np.arange(len(self.queries))
        return greedy_picks(self.job, self.features, self.supervision.forbidden, rows, pool, k)


class Environment:
    """Training questions, what each may not get, and what picks earn.

    Attributes:
        queries: the Q training queries whose gold program the reward can score.
        barred: for each query, the pool positions that it may not get.
        room: the fewest candidates that these leave to a query.
        features: of the queries, as if E_x hadn't been fitted to their programs.

    Raises:
        ConfigError: the reward fails its test, or needs a language model and there is none.
        DataError: the pool leaves some query fewer than k candidates.
        RewardError: the reward failed on an example, which is named.
    """

    def __init__(self, job: Job, reward: Reward, llm: LanguageModel | None, config: GRPOSettings) -> None:
        if reward.needs_llm and llm is None:
            raise ConfigError(
                f"reward '{reward.name}' reads what a language model answers, and there is none: set llm.model"
            )
        self.reward, self.llm = reward, llm
        self._model, self._pool = job.model.eval(), job.pool
        self._before = self._scalars()
        job.processes.broadcast(job.model)
        scorable = job.processes.sum(check_reward(reward, job.queries).astype(np.int64)) == job.processes.size
        self.queries = [query for query, good in zip(job.queries, scorable, strict=True) if good]
        new = share_held_out(config.exclude_own_program, self.queries, job.dev, job.pool, job.spec)
        logger.info(
            "%d %% of the training questions can't pick examples with their own program; the others can't pick "
            "themselves (grpo.exclude_own_program)",
            round(100 * new),
        )
        self.held_out = HeldOut(job.pool, self.queries, job.spec, new=new, seed=job.seed)
        self.barred = self.held_out.barred(self.queries)
        k = config.picks(job.model.config)
        self.room = check_pool_size("grpo", self.barred, len(job.pool), k, own_program=new > 0)
        self.features = self.held_out.features(job.model, self.queries)
        self._unscored = 0

    def score(
        self, queries: Sequence[Example], picks: IntArray, reward: Reward | None = None
    ) -> tuple[DoubleArray, Tally]:
        """Picks → prompts → language model → programs → rewards.

        For R questions with picks (R, k), by `reward` or the environment's own: (R,) rewards, NaN where there is
        nothing to score, and figures for the log.

        Raises:
            RewardError: the reward failed on an answer, or scored none of the last 64.
        """
        reward, contexts = reward or self.reward, self._contexts(picks)
        predictions: list[str | None] = [None] * len(queries)
        tally: Tally = {}
        if reward.needs_llm and self.llm is not None:
            prompt, prompts = self.llm.prompt, self._prompts(self.llm, queries, contexts)
            tally["distinct_prompts"] = (len(set(prompts)), len(prompts))
            if reward.likelihood:
                wanted = [prompt.continuation(query.target) for query in queries]
                return np.exp(self.llm.log_likelihoods([*map(str, prompts)], wanted)), tally
            predictions = [answer.program for answer in self.llm.generate(prompts)]
            tally["no_program"] = (predictions.count(None), len(predictions))
        rewards = score(reward, predictions, queries, contexts)
        scored = np.flatnonzero(~np.isnan(rewards))
        self._unscored = len(rewards) - 1 - scored[-1] if len(scored) else self._unscored + len(rewards)
        if self._unscored >= _PATIENCE:
            what = "answers" if reward.needs_llm else "sets of picks"
            raise RewardError(
                f"reward '{reward.name}' gave None for the last {self._unscored} {what}: there is nothing to learn "
                "from. Fix the reward and resume: no answer is paid for again"
            )
        return rewards, tally

    def prompt_tokens(self, queries: Sequence[Example], picks: IntArray) -> float:
        """Mean tokens of the prompts with these picks (R, k); 0 if no language model is asked."""
        if self.llm is None or not len(queries):
            return 0.0
        return float(np.mean([*map(self.llm.about_tokens, self._prompts(self.llm, queries, self._contexts(picks)))]))

    def changes(self) -> str:
        """How the model's named numbers differ from those it began with."""
        now = self._scalars()
        changes = [f"{name} {was:.3g} → {now[name]:.3g}" for name, was in self._before.items() if now[name] != was]
        return ", ".join(changes) or "nothing"

    def _scalars(self) -> dict[str, float]:
        return {name: value for part in PARTS for name, value in getattr(self._model, part).logged().items()}

    def _contexts(self, picks: IntArray) -> list[list[Example]]:
        order = self._model.config.order
        return [arranged([self._pool[position] for position in row], order) for row in picks.tolist()]

    @staticmethod
    def _prompts(llm: LanguageModel, queries: Sequence[Example], contexts: list[list[Example]]) -> list[Request]:
        asked = zip(contexts, queries, strict=True)
        return [llm.prompt.request(shown, query.source, query.fields) for shown, query in asked]
