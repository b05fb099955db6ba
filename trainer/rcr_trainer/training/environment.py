"""What the race and GRPO act in: training questions seen as questions to come, and what picks earn on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.policy.prompt import Request, arranged
from rcr_trainer.data import Example
from rcr_trainer.data.held_out import HeldOut, share_held_out
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.rewards import Reward, RewardError, check_reward, score
from rcr_trainer.training.closing import scalars_of
from rcr_trainer.training.registry import GRPOSettings
from rcr_trainer.training.runner import Job
from rcr_trainer.training.supervision import IntArray, check_pool_size

FloatArray = NDArray[np.float64]

Tally = dict[str, tuple[float, float]]
"""Sums and counts of one process, from which a figure is a mean over all."""

_PATIENCE = 64
"""Answers in a row that a reward may leave without a score before no more are paid for."""


class Environment:
    """Training questions, what each may not get, and what picks earn.

    Attributes:
        queries: the Q training queries whose gold program the reward can score.
        barred: for each the pool positions that it may not get.
        features: of the queries, as E_x would see them without having been fitted to their programs.
        before: the model's numbers that have a name, as they are now.

    Raises:
        ConfigError: the reward fails its test, or needs a language model and there is none.
        DataError: the pool is smaller than k + what a query may not get.
        RewardError: the reward failed on an example, which is named.
    """

    def __init__(self, job: Job, reward: Reward, llm: LanguageModel | None, config: GRPOSettings) -> None:
        if reward.needs_llm and llm is None:
            raise ConfigError(
                f"reward '{reward.name}' reads what a language model answers, and there is none: set llm.model"
            )
        self.reward, self.llm, self.before = reward, llm, scalars_of(job.model)
        self._model, self._pool = job.model.eval(), job.pool
        job.processes.broadcast(job.model)
        scorable = job.processes.sum(check_reward(reward, job.queries).astype(np.int64)) == job.processes.size
        self.queries = [query for query, good in zip(job.queries, scorable, strict=True) if good]
        new = share_held_out(config.exclude_own_program, self.queries, job.dev, job.pool, job.spec)
        self.held_out = HeldOut(job.pool, self.queries, job.spec, new=new, seed=job.seed)
        self.barred = self.held_out.barred(self.queries)
        check_pool_size("grpo", self.barred, len(job.pool), config.picks(job.model.config))
        self.features = self.held_out.features(job.model, self.queries)
        self._unscored = 0

    def score(
        self, queries: Sequence[Example], picks: IntArray, reward: Reward | None = None
    ) -> tuple[FloatArray, Tally]:
        """Picks → prompts → language model → programs → rewards.

        Of R questions with picks (R, k), by `reward` or the environment's own.

        Returns:
            (R,) rewards, NaN where there is nothing to score, and figures for the log.

        Raises:
            RewardError: the reward failed on an answer, or has scored none of the last 64.
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
        if reward.needs_llm and self._unscored >= _PATIENCE:
            raise RewardError(
                f"reward '{reward.name}' gave None for the last {self._unscored} answers: there is nothing to learn "
                "from. The answers are kept: mend the reward, and resume"
            )
        return rewards, tally

    def prompt_tokens(self, queries: Sequence[Example], picks: IntArray) -> float:
        """Tokens of the prompts with these picks (R, k), in the mean; 0: no language model is asked."""
        if self.llm is None or not len(queries):
            return 0.0
        return float(np.mean([*map(self.llm.about_tokens, self._prompts(self.llm, queries, self._contexts(picks)))]))

    def _contexts(self, picks: IntArray) -> list[list[Example]]:
        order = self._model.config.order
        return [arranged([self._pool[position] for position in row], order) for row in picks.tolist()]

    @staticmethod
    def _prompts(llm: LanguageModel, queries: Sequence[Example], contexts: list[list[Example]]) -> list[Request]:
        asked = zip(contexts, queries, strict=True)
        return [llm.prompt.request([e.item for e in shown], query.source, query.fields) for shown, query in asked]
