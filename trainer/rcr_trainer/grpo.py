"""Stage 2 (section 3.2): group relative policy optimisation of a TriEncoder, top to bottom.

Departures from the paper, each with the setting that undoes it:
- all training queries take part and stay in the pool, instead of 110 held out (`queries: 110`);
- a query never gets itself, nor, as often as questions to come won't, its own program (`exclude_own_program: false`);
- a race of the policy's numbers that need no gradient (`Family.changes`) says which policy to start from (`race: 0`);
- τ is set step by step, so that each draws among as many candidates (`perplexity: null`);
- what a structure is worth, γ and ε of `structure` have learning rates of their own (`Encoder.rates`);
- for all families but `transformer` E_c stays as SFT left it (`train_candidates: true`);
- gradients are clipped to a norm (`max_grad_norm: null`), the learning rate decays linearly, dropout is off;
- the weights kept are those with the best development figure, SFT's own included (`keep: last`).

Where SFT fitted E_x in closed form (`Family.fit`), training questions, and development questions that were among them,
are seen as E_x would see them without having been fitted to their programs (`Family.held_out`).

Where the paper leaves it open: one update for each batch of sequences (`updates`), so that the ratio is 1 and the
clip has no effect unless there are more; the standard deviation's divisor is G; a group of equal rewards has
advantage 0; for RLOO, ReMax and NB the reward is r − β (log π_old(o) − log π_ref(o)), that of the greedy sequence too.

In several processes a batch is as many times larger; each rolls out, asks the language model and backpropagates for its
share of the queries.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from langchain_rcr.families.base import PARTS
from langchain_rcr.families.encoder import Features
from langchain_rcr.policy.prompt import arranged
from langchain_rcr.policy.triencoder import TriEncoder
from rcr_trainer.data import Example
from rcr_trainer.data.held_out import HeldOut, share_held_out
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.faults import UnscoredError
from rcr_trainer.llm.scoring import WAYS
from rcr_trainer.rewards import Reward, check_reward, make_reward, score
from rcr_trainer.settings import GRPOSettings
from rcr_trainer.training.actor import Actor
from rcr_trainer.training.advantages import estimate
from rcr_trainer.training.closing import closing_lines, moved, told
from rcr_trainer.training.development import Development, greedy_picks
from rcr_trainer.training.losses import grpo_loss, kl_estimate, ratio
from rcr_trainer.training.processes import Processes
from rcr_trainer.training.race import Variant, race
from rcr_trainer.training.registry import ADVANTAGES
from rcr_trainer.training.rollout import Sequences
from rcr_trainer.training.runner import Job, Runner
from rcr_trainer.training.state import Figures, Result
from rcr_trainer.training.supervision import check_pool_size

if TYPE_CHECKING:
    from rcr_trainer.llm.model import LanguageModel

logger = logging.getLogger(__name__)

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_Tally = dict[str, tuple[float, float]]
"""Sums and counts of one process, from which a figure is a mean over all."""


@dataclass(frozen=True, slots=True)
class _Rollout:
    """B queries with G drawn sequences each: R = B · G, query by query. In several processes one's share of a batch.

    Args:
        rows: (B,) training queries.
        drawn: the sequences, with log π_old(o).
        reference: (R,) log π_ref(o).
        advantages: (R,).
        scored: (R,) bool; whether there is a reward.
        count: sequences of the whole batch.
        figures: for the log, of the whole batch.
    """

    rows: IntArray
    drawn: Sequences
    reference: Tensor
    advantages: Tensor
    scored: Tensor
    count: int
    figures: Figures

    def dead(self) -> IntArray:
        """Of the queries, those whose sequences all earn the same: they teach nothing."""
        return np.flatnonzero(~self._by_query(self.advantages).any(dim=1).cpu().numpy())

    def take(self, places: IntArray, others: _Rollout, theirs: IntArray) -> None:
        """Put others' queries (`theirs`) in the place of some of these."""
        self.rows[places] = others.rows[theirs]
        for mine, new in zip(self._tensors(), others._tensors(), strict=True):
            self._by_query(mine)[places] = others._by_query(new)[theirs]

    def _tensors(self) -> list[Tensor]:
        drawn = self.drawn
        return [drawn.picks, drawn.log_probs, drawn.entropies, self.reference, self.advantages, self.scored]

    def _by_query(self, values: Tensor) -> Tensor:
        """(B, G, …) the same memory."""
        return values.view(len(self.rows), len(values) // max(1, len(self.rows)), *values.shape[1:])


def train(job: Job, config: GRPOSettings, reward: Reward, llm: LanguageModel | None = None) -> Result:
    """Reinforce a policy; the model ends with the weights of the best development figure.

    Args:
        job: the model, its data, and where its figures go. The model as SFT left it is also the reference,
            and has to be given again after an interruption; queries whose gold program the reward can't score are
            left out.
        config: the settings.
        reward: what a set of picks is worth; tested on the training queries first.
        llm: answers the prompts, where the reward needs that.

    Returns:
        The result, the same in all processes; a round is a step.

    Raises:
        ConfigError: the reward fails its test, needs a language model and there is none, or training diverges.
        DataError: the pool is smaller than k + what a query may not get.
        RewardError: the reward failed on an example, which is named; the state before that step is kept.
        BudgetExceeded: the language model's budget is spent; the state before that step is kept.
        CheckpointError: the state in `job.state_folder` can't be continued from.
    """
    if reward.needs_llm and llm is None:
        raise ConfigError(
            f"reward '{reward.name}' reads what a language model answers, and there is none: set llm.model"
        )
    numbers, start = told(job.model), {name: tensor.detach().clone() for name, tensor in job.model.named_parameters()}
    stage = _GRPO(job, config, reward, llm)
    result = stage.runner.run(stage.collect, stage.learn, stage.evaluate)
    if job.processes.first:
        logger.info("moved: %s", ", ".join(moved(numbers, start, job.model)) or "nothing")
        for line in closing_lines(result, stage.runner.best_by):
            logger.info("%s", line)
    return result


def calls_at_most(config: GRPOSettings, queries: int, dev: int, *, races: bool = False) -> int:
    """Prompts that training hands in at most, identical ones counted each time.

    Args:
        config: the settings.
        queries: training queries.
        dev: development queries.
        races: whether the family has changes that race.
    """
    per_query = (config.group_size + ADVANTAGES[config.advantage].reads_greedy) * (1 + config.resample)
    evaluations = 1 + math.ceil(config.epochs / config.evaluate_every) if config.best_by == "reward" else 0
    raced = config.race + len(WAYS) if config.race and races else 0
    return raced + config.epochs * queries * per_query + evaluations * dev


class _GRPO:
    def __init__(self, job: Job, config: GRPOSettings, reward: Reward, llm: LanguageModel | None) -> None:
        self.model, self.config, self.reward, self.llm, self.seed = job.model.eval(), config, reward, llm, job.seed
        self.job, self.pool, self.processes = job, list(job.pool), job.processes
        model, pool, spec, processes = job.model, job.pool, job.spec, job.processes
        self.advantage = ADVANTAGES[config.advantage]
        processes.broadcast(model)

        with processes.together():
            scorable = check_reward(reward, job.queries)
        scorable = processes.from_first(scorable.astype(np.int64)).astype(np.bool_)
        self.queries = [query for query, good in zip(job.queries, scorable, strict=True) if good]
        new = share_held_out(config.exclude_own_program, self.queries, job.dev, pool, spec)
        held_out = HeldOut(pool, self.queries, spec, new=new, seed=job.seed)
        barred = held_out.barred(self.queries)
        check_pool_size("grpo", barred, len(pool), config.k)
        features = held_out.features(model, self.queries)
        self._race(features, barred)
        self.actor = Actor(
            model,
            features,
            pool,
            barred,
            k=config.k,
            train_candidates=config.train_candidates,
            chunk=config.chunk,
            perplexity=config.perplexity,
        )
        self.dev = Development(job, held_out)

        trained = dict(model.named_parameters())
        if not config.train_candidates:
            trained = {name: tensor for name, tensor in trained.items() if not name.startswith("candidate.")}
        self.batch_size = config.batch_size * processes.size
        self.per_epoch = math.ceil(len(self.queries) / self.batch_size)
        self.runner = Runner(
            "grpo",
            job,
            config,
            trained,
            per_epoch=self.per_epoch,
            every=config.evaluate_every * self.per_epoch,
            best_by=f"dev_{config.best_by}",
            rates=_rates(model, trained),
        )

    # ------------------------------------------------------------------ race

    def _race(self, features: Features, barred: Sequence[IntArray]) -> None:
        """Take the variant of the policy that wins a race, by what its greedy picks earn.

        What a language model wants, such as labels or brevity, is one number for all questions. Groups of sequences,
        of which most get equal rewards, tell it slowly; answers to the same questions tell it at once. Where exact
        match is the reward and the model tells probabilities, that of the gold program takes its place: its mean is
        exact match without the noise.
        """
        model, config = self.model, self.config
        if not (self.reward.needs_llm and config.race and model.family.changes):
            return
        order = np.random.default_rng([self.seed, 2]).permutation(len(self.queries))
        reward, read = self._reward_of_race(), model.featurize_pool([example.item for example in self.pool])
        start, settings = {name: tensor.clone() for name, tensor in model.state_dict().items()}, model.config

        def earned(variant: Variant, asked: slice) -> FloatArray:
            rows = np.sort(order[asked])
            queries = [self.queries[row] for row in rows]
            model.vary(variant)
            picks = greedy_picks(self.job, features, barred, rows, model.pool_vectors(*read), config.k)
            rewards = self.processes.collect(len(rows), lambda part: self._score(queries[part], picks[part], reward)[0])
            model.load_state_dict(start)
            model.config = settings
            return rewards

        changes = model.family.changes
        if self.processes.first:  # It takes minutes.
            logger.info("a race of %d changes of the policy, by at most %d answers …", len(changes), config.race)
        with self.processes.together():
            won = race(changes, earned, len(order), config.race)
            model.vary(won.variant)
        if self.processes.first:
            chosen = ", ".join(f"{name} {value}" for name, value in won.variant.items()) or "as it was"
            message = "the race, on %d held-out questions: %s, %s %.3f → %.3f"
            logger.info(message, won.questions, chosen, reward.name, won.before, won.after)

    def _reward_of_race(self) -> Reward:
        if self.reward.name != "correctness" or self.llm is None:
            return self.reward
        query, prompt = self.queries[0], self.llm.prompt
        text = str(prompt.request([], query.source, query.fields))
        try:
            self.llm.log_likelihoods([text], [prompt.continuation(query.target)])
        except (ConfigError, UnscoredError):
            return self.reward
        return make_reward("likelihood", self.job.spec)

    # ------------------------------------------------------------------ rollout → prompt → LLM → reward → advantage

    def collect(self, step: int) -> _Rollout:
        """Draw G sequences for each query of a batch, and find out what they are worth."""
        config, (epoch, batch) = self.config, divmod(step, self.per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.queries))
        rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
        shape = (len(rows), config.group_size, config.k)
        with self.processes.together():
            share, count = self.processes.part(len(rows)), len(rows) * config.group_size
            rng = np.random.default_rng([self.seed, epoch, batch + 1])
            rollout, tally = self._roll_out(rows[share], rng.random(shape)[share], count)
            for _ in range(config.resample):
                rows, uniforms = rng.integers(len(self.queries), size=len(rows))[share], rng.random(shape)[share]
                dead = rollout.dead()
                others, more = self._roll_out(rows[dead], uniforms[dead], count)
                alive = np.setdiff1d(np.arange(len(dead)), others.dead())
                rollout.take(dead[alive], others, alive)
                tally = {name: (mine + more[name][0], asked + more[name][1]) for name, (mine, asked) in tally.items()}
            tally["no_signal"] = (len(rollout.dead()), len(rollout.rows))
        for name, mean in _means(self.processes, tally).items():
            rollout.figures[name] = math.exp(mean) if name.startswith("perplexity_") else mean
        return rollout

    def _roll_out(self, rows: IntArray, uniforms: FloatArray, count: int) -> tuple[_Rollout, _Tally]:
        config, actor = self.config, self.actor
        drawn = actor.draw(rows, uniforms)
        reference = actor.reference_log_probs(rows, drawn)
        rewards, tally = self._rewards(rows, drawn)
        shaped, greedy_shaped = rewards, None
        if not self.advantage.kl_in_loss:
            shaped = rewards - config.beta * _array(drawn.log_probs - reference).reshape(rewards.shape)
        if self.advantage.reads_greedy:
            best = actor.draw(rows, None)
            gap = _array(best.log_probs - actor.reference_log_probs(rows, best))
            penalty = 0.0 if self.advantage.kl_in_loss else config.beta * gap
            greedy_shaped = self._rewards(rows, best)[0][:, 0] - penalty
        advantages, scored = estimate(config.advantage, shaped, greedy_shaped)
        tally["reward"] = (rewards[scored].sum(), scored.sum())
        tally["unscored"] = ((~scored).sum(), scored.size)
        for step, each in enumerate(drawn.entropies.sum(0).tolist(), start=1):
            tally[f"perplexity_{step}"] = each, len(drawn.picks)
        advantage = torch.from_numpy(advantages.ravel()).float().to(reference.device)
        has_one = torch.from_numpy(scored.ravel()).to(reference.device)
        return _Rollout(rows, drawn, reference, advantage, has_one, count, {}), tally

    def _rewards(self, rows: IntArray, drawn: Sequences) -> tuple[FloatArray, _Tally]:
        """(B, G) rewards of the sequences of B queries, NaN where there is none, and what to tell of them."""
        group = len(drawn.picks) // max(1, len(rows)) or 1
        queries = [self.queries[row] for row in np.repeat(rows, group)]
        rewards, tally = self._score(queries, drawn.picks.cpu().numpy())
        return rewards.reshape(len(rows), group), tally

    def _score(
        self, queries: Sequence[Example], picks: IntArray, reward: Reward | None = None
    ) -> tuple[FloatArray, _Tally]:
        """Picks (R, k) → prompts → language model → programs → rewards (R,)."""
        order, reward = self.model.config.order, reward or self.reward
        contexts = [arranged([self.pool[position] for position in row], order) for row in picks.tolist()]
        predictions: list[str | None] = [None] * len(queries)
        tally: _Tally = {}
        if reward.needs_llm and self.llm is not None:
            prompt = self.llm.prompt
            prompts = [
                prompt.request([e.item for e in context], query.source, query.fields)
                for context, query in zip(contexts, queries, strict=True)
            ]
            tally["distinct_prompts"] = (len(set(prompts)), len(prompts))
            if reward.likelihood:
                wanted = [prompt.continuation(query.target) for query in queries]
                return np.exp(self.llm.log_likelihoods([*map(str, prompts)], wanted)), tally
            predictions = [answer.program for answer in self.llm.generate(prompts)]
            tally["no_program"] = (predictions.count(None), len(predictions))
        return score(reward, predictions, queries, contexts), tally

    # ------------------------------------------------------------------ loss

    def learn(self, rollout: _Rollout) -> Figures:
        """Update the policy on a batch of sequences."""
        figures = {**rollout.figures, "lr": self.runner.lr}
        for _ in range(self.config.updates):
            figures |= self._update(rollout)
        self.runner.advance()
        return figures

    def _update(self, rollout: _Rollout) -> Figures:
        """One optimiser step on −J, the mean over all sequences; returns its figures."""
        config, count = self.config, rollout.count
        beta = config.beta if self.advantage.kl_in_loss else 0.0
        figures = {"loss": 0.0, "kl": 0.0, "clipped": 0.0}

        def loss(new: Tensor, of: slice) -> Tensor:
            old, reference = rollout.drawn.log_probs[of], rollout.reference[of]
            each = grpo_loss(new, old, reference, rollout.advantages[of], rollout.scored[of], config.epsilon, beta)
            with torch.no_grad():
                moved = (ratio(new, old) - 1).abs() > config.epsilon
                for name, values in (("loss", each), ("kl", kl_estimate(new, reference)), ("clipped", moved)):
                    figures[name] += float(values.sum()) / count
            return each.sum() / count

        norm = self.runner.step(lambda: self.actor.backward(rollout.rows, rollout.drawn, loss))
        sums = self.processes.sum(np.array(list(figures.values())))
        return {**dict(zip(figures, sums.tolist(), strict=True)), "grad_norm": norm}

    # ------------------------------------------------------------------ development

    def evaluate(self) -> Figures:
        """Coverage and, where it decides or costs nothing, reward of the greedy picks for the development queries."""
        figures: Figures = {"epoch": self.runner.result.steps / self.per_epoch}
        queries = self.dev.queries
        if not queries:
            return figures
        picks = self.dev.picks(self.actor.pool_vectors(), self.config.k)
        figures["dev_coverage"] = self.dev.supervision.coverage(picks)
        if self.config.best_by == "reward" or not self.reward.needs_llm:
            rewards = self.processes.collect(len(queries), lambda part: self._score(queries[part], picks[part])[0])
            figures["dev_reward"] = float(np.nanmean(rewards)) if np.isfinite(rewards).any() else math.nan
        return figures


def _rates(model: TriEncoder, trained: Iterable[str]) -> dict[str, float]:
    """Learning rates of their own that some parameters have; see `Encoder.rates`."""
    by_prefix = {f"{part}.{begin}": rate for part in PARTS for begin, rate in getattr(model, part).rates.items()}
    return {name: rate for name in trained for begin, rate in by_prefix.items() if name.startswith(begin)}


def _means(processes: Processes, tally: _Tally) -> Figures:
    """Means over all processes; no figure where nothing was counted."""
    totals = processes.sum(np.array(list(tally.values()), dtype=np.float64))
    return {name: float(total / count) for name, (total, count) in zip(tally, totals, strict=True) if count}


def _array(tensor: Tensor) -> FloatArray:
    array: FloatArray = tensor.double().cpu().numpy()
    return array
