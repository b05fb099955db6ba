"""Stage 2 (section 3.2): group relative policy optimisation of a TriEncoder, top to bottom.

Departures from the paper, each with the setting that undoes it:
- all training queries take part and stay in the pool, instead of 110 held out (`queries: 110`);
- a query never gets itself nor, as often as future questions won't, its own program (`exclude_own_program: false`);
- a race over the policy's gradient-free numbers decides which policy to start from (`race.py`; `race: 0`);
- τ is set per step, so that every step draws among equally many candidates in effect (`perplexity: null`);
- the worth of a structure, γ and ε in `structure` have learning rates of their own (`Encoder.rates`);
- for all families but `transformer`, E_c stays as SFT left it (`train_candidates: true`);
- gradients are clipped to a norm (`max_grad_norm: null`), the learning rate decays linearly, dropout is off;
- the weights kept are those with the best development figure, SFT's own included (`keep: last`).

Choices that the paper leaves open: each batch of sequences gets one update (`updates`), so the ratio is 1 and the clip
has no effect unless there are more; the standard deviation's divisor is G; a group of equal rewards has advantage 0;
for RLOO, ReMax and NB every reward, the greedy sequence's included, is r − β (log π_old(o) − log π_ref(o)).

The batch grows with the number of processes; each rolls out, asks the language model and backpropagates for its share
of the queries.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from langchain_rcr.basics.rows import DoubleArray, IntArray
from langchain_rcr.families.base import PARTS
from rcr_trainer.llm.server import WAYS
from rcr_trainer.training.actor import Actor, Sequences
from rcr_trainer.training.advantages import estimate
from rcr_trainer.training.environment import Development, Environment, Tally
from rcr_trainer.training.losses import gap, grpo_loss, kl_estimate, ratio
from rcr_trainer.training.registry import ADVANTAGES, GRPOSettings
from rcr_trainer.training.runner import Figures, Job, Result, Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Rollout:
    """B queries with G drawn sequences each: R = B · G, query by query; of several processes, this one's share."""

    rows: IntArray  # (B,) training queries
    drawn: Sequences  # with log π_old(o)
    reference: Tensor  # (R,) log π_ref(o)
    advantages: Tensor  # (R,)
    scored: Tensor  # (R,) bool; whether there is a reward
    count: int  # of all processes' sequences
    figures: Figures  # of all processes, for the log


def train(job: Job, environment: Environment, config: GRPOSettings) -> Result:
    """Reinforce a policy; the model ends with the weights of the best development figure.

    The model as given is also the reference; pass the same one again after an interruption. The result is the same in
    all processes; a round is a step.

    Raises:
        ConfigError: training diverges.
        RewardError: the reward failed on an example, which is named; the state before that step is kept.
        BudgetExceeded: the language model's budget is spent; the state before that step is kept.
        CheckpointError: the state in `job.state_folder` can't be resumed from.
    """
    stage = _GRPO(job, environment, config)
    result = stage.runner.run(stage.collect, stage.learn, stage.evaluate)
    logger.info("moved: %s", environment.changes())
    for line in closing_lines(result, stage.runner.best_by):
        logger.info("%s", line)
    return result


def calls_at_most(config: GRPOSettings, queries: int, dev: int, *, races: bool = False) -> dict[str, int]:
    """Upper bound on the prompts of each part of GRPO in one process; only the race counts identical prompts once."""
    handed, rounds = config.epochs * queries, math.ceil(config.epochs / config.evaluate_every)
    if config.max_steps is not None:
        handed, rounds = min(handed, config.max_steps * config.batch_size), min(rounds, config.max_steps)
    per_query = config.group_size + ADVANTAGES[config.advantage].reads_greedy
    evaluations = 1 + rounds if config.best_by == "reward" else 0
    raced = config.race + len(WAYS) if config.race and races else 0
    return {"development": evaluations * dev, "search": raced, "training": handed * per_query}


class _GRPO:
    def __init__(self, job: Job, environment: Environment, config: GRPOSettings) -> None:
        self.job, self.environment, self.config, self.processes = job, environment, config, job.processes
        self.advantage, self.queries = ADVANTAGES[config.advantage], environment.queries
        self.actor = Actor(job.model, environment.features, job.pool, environment.barred, config)
        self.dev = Development(job, environment.held_out)
        fixed = () if config.train_candidates else ("candidate.",)
        trained = {name: each for name, each in job.model.named_parameters() if not name.startswith(fixed)}
        rates = {f"{part}.{begin}": rate for part in PARTS for begin, rate in getattr(job.model, part).rates.items()}
        self.batch_size = config.batch_size * self.processes.size
        self.per_epoch = math.ceil(len(self.queries) / self.batch_size)
        self.runner = Runner(
            "grpo",
            job,
            config,
            trained,
            per_epoch=self.per_epoch,
            every=config.evaluate_every * self.per_epoch,
            best_by=f"dev_{config.best_by}",
            rates={name: rate for name in trained for begin, rate in rates.items() if name.startswith(begin)},
        )

    def collect(self, step: int) -> _Rollout:
        """Rollout → prompt → LLM → reward → advantage: draw G sequences for each query of a batch, and score them."""
        config, actor, (epoch, batch) = self.config, self.actor, divmod(step, self.per_epoch)
        order = np.random.default_rng([self.job.seed, epoch]).permutation(len(self.queries))
        rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
        count, share = len(rows) * config.group_size, self.processes.part(len(rows))
        rng = np.random.default_rng([self.job.seed, epoch, batch + 1])
        rows, uniforms = rows[share], rng.random((len(rows), config.group_size, actor.k))[share]
        drawn = actor.draw(rows, uniforms)
        reference = actor.reference_log_probs(rows, drawn)
        rewards, tally = self._rewards(rows, drawn)
        earned, penalty, greedy = rewards, 0.0 if self.advantage.kl_in_loss else config.beta, None
        shaped = rewards - penalty * gap(drawn.log_probs, reference).cpu().numpy().reshape(rewards.shape)
        if self.advantage.reads_greedy:
            best = actor.draw(rows, None)
            left, own = gap(best.log_probs, actor.reference_log_probs(rows, best)), self._rewards(rows, best)[0]
            earned, greedy = np.hstack([rewards, own]), own[:, 0] - penalty * left.cpu().numpy()
        advantages, scored = estimate(config.advantage, shaped, greedy)
        tally["reward"] = (rewards[scored].sum(), scored.sum())
        tally["unscored"] = ((~scored).sum(), scored.size)
        # Of rewards alone: with the penalty in it, no advantage is ever 0.
        tally["no_signal"] = ((estimate("grpo", earned)[0] == 0).all(axis=1).sum(), len(rows))
        for at, each in enumerate(drawn.entropies.sum(0).tolist(), start=1):
            tally[f"perplexity_{at}"] = each, len(drawn.picks)
        # Means over all processes; no figure where nothing was counted.
        totals = self.processes.sum(np.array([*tally.values()], dtype=np.float64))
        means = {name: float(total / number) for name, (total, number) in zip(tally, totals, strict=True) if number}
        figures = {name: math.exp(mean) if name.startswith("perplexity_") else mean for name, mean in means.items()}
        advantage = torch.from_numpy(advantages.ravel()).float().to(reference.device)
        has_one = torch.from_numpy(scored.ravel()).to(reference.device)
        return _Rollout(rows, drawn, reference, advantage, has_one, count, figures)

    def _rewards(self, rows: IntArray, drawn: Sequences) -> tuple[DoubleArray, Tally]:
        """(B, G) rewards of the sequences of B queries, NaN where there is none, and figures for the log."""
        group = len(drawn.picks) // max(1, len(rows)) or 1
        queries = [self.queries[row] for row in np.repeat(rows, group)]
        rewards, tally = self.environment.score(queries, drawn.picks.cpu().numpy())
        return rewards.reshape(len(rows), group), tally

    def learn(self, rollout: _Rollout) -> Figures:
        """Update the policy on a batch of sequences."""
        figures = {**rollout.figures, "lr": self.runner.lr}
        for _ in range(self.config.updates):
            figures |= self._update(rollout)
        self.runner.advance()
        return figures

    def _update(self, rollout: _Rollout) -> Figures:
        """One optimiser step on −J, the mean over all processes' sequences; returns its figures."""
        config = self.config
        beta = config.beta if self.advantage.kl_in_loss else 0.0
        figures = {"loss": 0.0, "kl": 0.0, "clipped": 0.0}

        def loss(new: Tensor, of: slice) -> Tensor:
            old, reference = rollout.drawn.log_probs[of], rollout.reference[of]
            each = grpo_loss(new, old, reference, rollout.advantages[of], rollout.scored[of], config.epsilon, beta)
            with torch.no_grad():
                moved = (ratio(new, old) - 1).abs() > config.epsilon
                for name, values in (("loss", each), ("kl", kl_estimate(new, reference)), ("clipped", moved)):
                    figures[name] += float(values.sum()) / rollout.count
            return each.sum() / rollout.count

        self.actor.backward(rollout.rows, rollout.drawn, loss)
        norm = self.runner.step()
        sums = self.processes.sum(np.array(list(figures.values())))
        return {**dict(zip(figures, sums.tolist(), strict=True)), "grad_norm": norm}

    def evaluate(self) -> Figures:
        """Coverage and, where it decides or costs nothing, reward of the greedy picks for the development queries."""
        figures: Figures = {"epoch": self.runner.result.steps / self.per_epoch}
        queries, environment = self.dev.queries, self.environment
        if not queries:
            return figures
        picks = self.dev.picks(self.actor.pool_vectors(), self.actor.k)
        figures["dev_coverage"] = self.dev.supervision.coverage(picks)
        if self.config.best_by == "reward" or not environment.reward.needs_llm:
            part = self.processes.part(len(queries))
            rewards = self.processes.gather(environment.score(queries[part], picks[part])[0], len(queries))
            figures["dev_reward"] = float(np.nanmean(rewards)) if np.isfinite(rewards).any() else math.nan
        return figures


_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "kl": (
        "KL {:.3g}: how far the policy has moved from SFT's, in nats a sequence of picks",
        lambda kl: "next to nothing: try a larger grpo.lr or more epochs" if kl < 1e-3 else "",
    ),
    "no_signal": (
        "no signal {:.0%}: questions whose sequences all earned the same, which teaches nothing",
        lambda share: "try a larger grpo.group_size or grpo.perplexity, or a graded reward" if share > 0.5 else "",
    ),
    "clipped": ("clipped {:.0%}: sequences whose ratio left 1 ± grpo.epsilon; 0 with grpo.updates: 1", lambda _: ""),
    "unscored": (
        "unscored {:.0%}: sequences without a reward",
        lambda share: "look at the programs, or the reward" if share > 0.1 else "",
    ),
    "no_program": (
        "no program {:.0%}: answers of the language model that hold none",
        lambda share: "look at the prompt, llm.stop and llm.max_tokens" if share > 0.1 else "",
    ),
}
"""Figure of the log → what it means, and advice if the value calls for some."""


def closing_lines(result: Result, best_by: str) -> Iterator[str]:
    """Explain the figures of the last batch, and which weights were kept."""
    trained = [figures for figures in result.history if "reward" in figures]
    if not trained:
        return
    first, last = trained[0], trained[-1]
    yield f"reward of the drawn picks {first['reward']:.3f} → {last['reward']:.3f}, first to last evaluation"
    for name, (text, advise) in _FIGURES.items():
        if name in last and not (name != "kl" and last[name] == 0):
            advice = advise(last[name])
            yield text.format(last[name]) + (f"; {advice}" if advice else "")
    if drawn := [f"{last[name]:.1f}" for name in sorted(last) if name.startswith("perplexity_")]:
        yield f"perplexity {', '.join(drawn)}: candidates that each step draws among in effect"
    scores = [figures[best_by] for figures in result.history if best_by in figures]
    if not scores or math.isnan(result.best_score):
        yield "kept: the last weights"
    elif result.best_round == 0:
        yield f"kept: SFT's own weights, as no later {best_by} was better than theirs, {scores[0]:.4g}"
    else:
        yield f"kept: the weights after batch {result.best_round} ({best_by} {scores[0]:.4g} → {result.best_score:.4g})"
