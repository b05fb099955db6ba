"""Stage 2 (section 3.2): group relative policy optimisation of a TriEncoder, top to bottom.

Departures from the paper, each with the setting that undoes it:
- all training queries take part and stay in the pool, instead of 110 held out (`queries: 110`);
- a query never gets itself, nor, by default, its own program (`exclude_own_program: false`);
- for the `embeddings` and `lexical` families E_c stays as SFT left it (`train_candidates: true`);
- in pools of more than `exact_pool` examples each step draws from the `top` best candidates alone;
- gradients are clipped to a norm (`max_grad_norm: null`), the learning rate decays linearly, dropout is off;
- the weights kept are those with the best development figure, SFT's own included (`best_by`).

E_x of structures is fitted in closed form to the programs of the questions that SFT trained on (`Family.fit`). Here
these, and development questions that were among them, are seen as E_x without their programs would see them.

Where the paper leaves it open: one update for each batch of sequences (`updates`), so that the ratio is 1 and the
clip has no effect unless there are more; the standard deviation's divisor is G; a group of equal rewards has
advantage 0; for RLOO, ReMax and NB the reward is r − β (log π_old(o) − log π_ref(o)), that of the greedy sequence too.

In several processes a batch is as many times larger; each rolls out, asks the language model and backpropagates for its
share of the queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from langchain_rcr.families.encoder import Features
from langchain_rcr.items import Item, compose
from langchain_rcr.policy import TriEncoder
from langchain_rcr.selection import greedy
from rcr_trainer.data import Example
from rcr_trainer.errors import ConfigError, DataError
from rcr_trainer.evaluation.metrics import recall_by_step
from rcr_trainer.grpo.actor import Actor
from rcr_trainer.grpo.advantages import estimate
from rcr_trainer.grpo.losses import grpo_loss, kl_estimate, ratio
from rcr_trainer.grpo.policy import Sequences
from rcr_trainer.programs import ProgramSpec, structure_matrices
from rcr_trainer.rewards import Reward, check_reward, score
from rcr_trainer.settings import GRPOConfig
from rcr_trainer.training import Processes, TrainingState, fixed, is_better, linear, own_positions, resume

if TYPE_CHECKING:
    from rcr_trainer.llm import LanguageModel

Log = Callable[[int, dict[str, float]], None]
"""Called with the step and its figures after every step, in every process."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_Tally = dict[str, tuple[float, float]]
"""Sums and counts of one process, from which a figure is a mean over all."""


@dataclass(slots=True)
class GRPOResult:
    """What came of training; the model itself holds the best weights.

    Args:
        best_step: the step whose weights are kept, 0 for the policy that SFT left.
        best_dev: the development figure it was chosen by (`best_by`); NaN without development queries.
        steps: batches trained.
        processes: how many train together.
        history: a row of development figures per evaluation.
        unfinished: the figures of a step whose evaluation was cut short; else empty.
    """

    best_step: int = 0
    best_dev: float = float("nan")
    steps: int = 0
    processes: int = 1
    history: list[dict[str, float]] = field(default_factory=list)
    unfinished: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Rollout:
    """B queries with G drawn sequences each: R = B · G, query by query. In several processes one's share of a batch.

    Args:
        rows: (B,) training queries.
        count: sequences of the whole batch.
        drawn: the sequences, with log π_old(o).
        reference: (R,) log π_ref(o).
        advantages: (R,).
        scored: (R,) bool; whether there is a reward.
        figures: for the log, of the whole batch.
    """

    rows: IntArray
    count: int
    drawn: Sequences
    reference: Tensor
    advantages: Tensor
    scored: Tensor
    figures: dict[str, float]


def train(
    model: TriEncoder,
    pool: Sequence[Example],
    queries: Sequence[Example],
    dev: Sequence[Example],
    spec: ProgramSpec,
    config: GRPOConfig,
    reward: Reward,
    llm: LanguageModel | None = None,
    *,
    seed: int = 0,
    state_folder: Path | None = None,
    log: Log | None = None,
    progress: Callable[[int, int], None] | None = None,
    processes: Processes | None = None,
) -> GRPOResult:
    """Reinforce a policy; the model ends with the weights of the best development figure.

    Args:
        model: the policy after SFT, which is also the reference; trained in place, on the device it is on.
        pool: the N candidates.
        queries: the training queries; those whose gold program the reward can't score are left out.
        dev: development queries; empty: the last weights are kept.
        spec: how programs are read.
        config: the settings.
        reward: what a set of picks is worth; tested on the training queries first.
        llm: answers the prompts, where the reward needs that.
        seed: of batches and draws. Every step draws from its own generator, so a resumed run repeats an undisturbed
            one.
        state_folder: where the training state is kept between steps; one that is there is continued, with `model`
            as the reference again.
        log: receives the figures of every step; after an epoch the development figures are among them.
        progress: receives (steps done, steps planned).
        processes: those that train together, each with `config.batch_size` (see `join`); None: this one alone. All
            call this function alike; the first one's weights are what they begin with, and it alone writes.

    Returns:
        The result, the same in all processes.

    Raises:
        ConfigError: the reward fails its test, needs a language model and there is none, or training diverges.
        DataError: the pool is smaller than k + what a query may not get.
        RewardError: the reward failed on an example, which is named; the state before that step is kept.
        BudgetExceeded: the language model's budget is spent; the state before that step is kept.
    """
    if reward.needs_llm and llm is None:
        msg = f"reward '{reward.name}' reads what a language model answers, and there is none: set llm.model"
        raise ConfigError(msg)
    processes = processes or Processes()
    trainer = _Trainer(model, pool, queries, dev, spec, config, reward, llm, seed, processes)
    return trainer.run(state_folder, log, progress)


def calls_at_most(config: GRPOConfig, queries: int, dev: int) -> int:
    """Prompts that training hands in at most, identical ones counted each time.

    Args:
        config: the settings.
        queries: training queries.
        dev: development queries.
    """
    per_query = config.group_size + (config.advantage == "remax")
    evaluations = 1 + -(-config.epochs // config.evaluate_every) if config.best_by == "reward" else 0
    return config.epochs * queries * per_query + evaluations * dev


class _Trainer:
    def __init__(
        self,
        model: TriEncoder,
        pool: Sequence[Example],
        queries: Sequence[Example],
        dev: Sequence[Example],
        spec: ProgramSpec,
        config: GRPOConfig,
        reward: Reward,
        llm: LanguageModel | None,
        seed: int,
        processes: Processes,
    ) -> None:
        self.model, self.config, self.reward, self.llm, self.seed = model.eval(), config, reward, llm, seed
        self.processes, self.batch_size = processes, config.batch_size * processes.size
        processes.broadcast(model)
        self.pool = list(pool)
        with processes.together():
            scorable = check_reward(reward, queries)
        scorable = processes.of_first(scorable.astype(np.int64)).astype(np.bool_)
        self.queries = [query for query, good in zip(queries, scorable, strict=True) if good]
        barred = own_positions(self.queries, pool, spec, same_program=config.exclude_own_program)
        _check_sizes(barred, len(pool), config)
        self.actor = Actor(
            model,
            self._held_out(self.queries),
            pool,
            barred,
            k=config.k,
            top=None if len(pool) <= config.exact_pool else max(config.top, config.k),
            train_candidates=config.train_candidates,
            chunk=config.chunk,
        )
        # Development queries that training lent are treated like training queries.
        inside = {e.id for e in pool} >= {e.id for e in dev}
        self.dev = [e for e in dev if spec.structures(e.target)]
        self.dev_barred = own_positions(self.dev, pool, spec, same_program=config.exclude_own_program and inside)
        self.dev_features: Features = (
            self._held_out(self.dev) if inside else model.query.featurize([Item(e.source) for e in self.dev])
        )
        self.needs, self.has = structure_matrices(spec, [e.target for e in self.dev], [e.target for e in pool])
        self.per_epoch = -(-len(self.queries) // self.batch_size)
        self.planned = min(config.epochs * self.per_epoch, config.max_steps or config.epochs * self.per_epoch)

    def _held_out(self, queries: Sequence[Example]) -> Features:
        """Features of queries that E_x may have been fitted to, as if it hadn't."""
        items = [Item(query.source, query.target) for query in queries]
        own_program = not self.config.exclude_own_program
        return self.model.family.held_out(self.model.query, items, own_program=own_program)

    # ------------------------------------------------------------------ the loop

    def run(self, folder: Path | None, log: Log | None, progress: Callable[[int, int], None] | None) -> GRPOResult:
        config, model, processes = self.config, self.model, self.processes
        with fixed([] if config.train_candidates else list(model.candidate.parameters())):
            parameters = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: linear(step, self.planned, config.warmup)
            )
            state = TrainingState(model, optimizer, schedule, GRPOResult(processes=processes.size))
            if not resume(state, folder, processes):
                figures = self._evaluate(state)
                with processes.together():
                    if log is not None:
                        log(0, figures)
            folder = folder if processes.first else None
            result = state.result
            if result.unfinished:
                self._finish_step(state, folder, log)
            while result.steps < self.planned and not self._out_of_patience(result):
                with _kept(state, folder):
                    rollout = self._roll_out(*divmod(result.steps, self.per_epoch))
                figures = {**rollout.figures, "lr": float(schedule.get_last_lr()[0])}
                for _ in range(config.updates):
                    figures |= self._update(rollout, optimizer, parameters)
                schedule.step()
                result.steps += 1
                result.unfinished = figures
                self._finish_step(state, folder, log)
                with processes.together():
                    if progress is not None:
                        progress(result.steps, self.planned)
                    if folder is not None:
                        state.save(folder, force=result.steps == self.planned)
            state.restore_best()
        return result

    def _finish_step(self, state: TrainingState[GRPOResult], folder: Path | None, log: Log | None) -> None:
        """Evaluate where that is due, and log; an evaluation that is cut short is made up for on resuming."""
        result = state.result
        figures = result.unfinished
        if self._is_due(result.steps):
            with _kept(state, folder):
                figures = figures | self._evaluate(state)
        result.unfinished = {}
        with self.processes.together():
            if log is not None:
                log(result.steps, figures)

    # ------------------------------------------------------------------ rollout → prompt → LLM → reward → advantage

    def _roll_out(self, epoch: int, batch: int) -> _Rollout:
        """Draw G sequences for each query of a batch, and find out what they are worth."""
        config, shape = self.config, (self.config.group_size, self.config.k)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.queries))
        rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
        uniforms = np.random.default_rng([self.seed, epoch, batch + 1]).random((len(rows), *shape))
        count, share = len(rows) * config.group_size, self.processes.part(len(rows))
        with self.processes.together():
            rollout, tally = self._roll_out_share(rows[share], uniforms[share], count)
        rollout.figures.update(_means(self.processes, tally))
        return rollout

    def _roll_out_share(self, rows: IntArray, uniforms: FloatArray, count: int) -> tuple[_Rollout, _Tally]:
        config = self.config
        drawn = self.actor.draw(rows, uniforms)
        reference = self.actor.reference_log_probs(rows, drawn)
        rewards, tally = self._rewards(rows, drawn)
        shaped, greedy_shaped = rewards, None
        if config.advantage != "grpo":
            shaped = rewards - config.beta * _array(drawn.log_probs - reference).reshape(rewards.shape)
        if config.advantage == "remax":
            best = self.actor.draw(rows, None)
            gap = _array(best.log_probs - self.actor.reference_log_probs(rows, best))
            greedy_shaped = self._rewards(rows, best)[0][:, 0] - config.beta * gap
        advantages, scored = estimate(config.advantage, shaped, greedy_shaped)
        tally["reward"] = (rewards[scored].sum(), scored.sum())
        tally["unscored"] = ((~scored).sum(), scored.size)
        tally["no_signal"] = ((~advantages.any(axis=1)).sum(), len(rows))
        device = reference.device
        rollout = _Rollout(
            rows,
            count,
            drawn,
            reference,
            torch.from_numpy(advantages.ravel()).float().to(device),
            torch.from_numpy(scored.ravel()).to(device),
            {},
        )
        return rollout, tally

    def _rewards(self, rows: IntArray, drawn: Sequences) -> tuple[FloatArray, _Tally]:
        """(B, G) rewards of the sequences of B queries, NaN where there is none, and what to tell of them."""
        picks = drawn.picks.cpu().numpy()
        group = len(picks) // len(rows) if len(rows) else 1
        rewards, tally = self._score([self.queries[row] for row in np.repeat(rows, group)], picks)
        return rewards.reshape(len(rows), group), tally

    def _score(self, queries: Sequence[Example], picks: IntArray) -> tuple[FloatArray, _Tally]:
        """Picks (R, k) → prompts → language model → programs → rewards (R,)."""
        contexts = [[self.pool[position] for position in row] for row in picks.tolist()]
        predictions: list[str | None] = [None] * len(queries)
        tally: _Tally = {}
        if self.reward.needs_llm and self.llm is not None:
            shown = [[Item(e.source, e.target) for e in context] for context in contexts]
            prompts = [compose(items, query.source) for items, query in zip(shown, queries, strict=True)]
            predictions = [answer.program for answer in self.llm.generate(prompts)]
            tally["no_program"] = (predictions.count(None), len(predictions))
            tally["distinct_prompts"] = (len(set(prompts)), len(prompts))
        return score(self.reward, predictions, queries, contexts), tally

    # ------------------------------------------------------------------ loss

    def _update(
        self, rollout: _Rollout, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
    ) -> dict[str, float]:
        """One optimiser step on −J, the mean over all sequences; returns its figures."""
        config, count = self.config, rollout.count
        beta = config.beta if config.advantage == "grpo" else 0.0
        figures = {"loss": 0.0, "kl": 0.0, "clipped": 0.0}

        def loss(new: Tensor, of: slice) -> Tensor:
            old, reference = rollout.drawn.log_probs[of], rollout.reference[of]
            each = grpo_loss(new, old, reference, rollout.advantages[of], rollout.scored[of], config.epsilon, beta)
            with torch.no_grad():
                moved = (ratio(new, old) - 1).abs() > config.epsilon
                for name, values in (("loss", each), ("kl", kl_estimate(new, reference)), ("clipped", moved)):
                    figures[name] += float(values.sum()) / count
            return each.sum() / count

        optimizer.zero_grad(set_to_none=True)
        with self.processes.together():
            self.actor.backward(rollout.rows, rollout.drawn, loss)
        self.processes.sum_gradients(parameters)
        sums = self.processes.sum(np.array(list(figures.values())))
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm or float("inf")))
        if not np.isfinite(norm):
            msg = f"the gradient is no longer finite: training has diverged at grpo.lr = {config.lr:g}; lower it"
            raise ConfigError(msg)
        optimizer.step()
        return {**dict(zip(figures, sums.tolist(), strict=True)), "grad_norm": norm}

    # ------------------------------------------------------------------ development

    def _is_due(self, steps: int) -> bool:
        return steps == self.planned or steps % (self.per_epoch * self.config.evaluate_every) == 0

    def _evaluate(self, state: TrainingState[GRPOResult]) -> dict[str, float]:
        """Figures of the greedy picks for the development queries; the best weights so far are remembered."""
        config, result, figures = self.config, state.result, {"epoch": state.result.steps / self.per_epoch}
        if self.dev:
            scores = config.best_by == "reward" or not self.reward.needs_llm
            share = self.processes.part(len(self.dev))
            with self.processes.together():
                picks, rewards = self._evaluate_share(share, scores=scores)
            picks, rewards = (self.processes.gather(rows, len(self.dev)) for rows in (picks, rewards))
            figures["dev_coverage"] = float(100 * recall_by_step(self.needs, self.has, picks)[:, -1].mean())
            if scores:
                figures["dev_reward"] = float(np.nanmean(rewards)) if np.isfinite(rewards).any() else float("nan")
        best = figures.get(f"dev_{config.best_by}", float("nan"))
        if is_better(best, result.best_dev):
            result.best_step, result.best_dev = result.steps, best
            state.keep_best()
        result.history.append({"step": float(result.steps), **figures})
        return figures

    def _evaluate_share(self, share: slice, *, scores: bool) -> tuple[IntArray, FloatArray]:
        """Greedy picks (n, k) for some development queries, and their rewards (n,), NaN where not asked for."""
        dev, barred = self.dev[share], self.dev_barred[share]
        queries = self.model.query.vectors(self.dev_features.select(np.arange(len(self.dev))[share]))
        pool = self.actor.pool_vectors()
        picks = greedy(queries, pool, self.model.state(), self.config.k, exclude=barred).positions
        return picks, self._score(dev, picks)[0] if scores else np.full(len(dev), np.nan)

    def _out_of_patience(self, result: GRPOResult) -> bool:
        if self.config.patience is None or not self.dev:
            return False
        return sum(row["step"] > result.best_step for row in result.history) >= self.config.patience


@contextmanager
def _kept(state: TrainingState[GRPOResult], folder: Path | None) -> Iterator[None]:
    """Whatever ends this block early, the weights are those of the last step: keep the state."""
    try:
        yield
    except BaseException:
        if folder is not None:
            state.save(folder, force=True)
        raise


def _means(processes: Processes, tally: _Tally) -> dict[str, float]:
    """Means over all processes; no figure where nothing was counted."""
    totals = processes.sum(np.array(list(tally.values()), dtype=np.float64))
    return {name: float(total / count) for name, (total, count) in zip(tally, totals, strict=True) if count}


def _array(tensor: Tensor) -> FloatArray:
    array: FloatArray = tensor.double().cpu().numpy()
    return array


def _check_sizes(barred: Sequence[IntArray], size: int, config: GRPOConfig) -> None:
    most = max(len(row) for row in barred)
    if size - most < config.k:
        msg = (
            f"the pool of {size} examples leaves a training query only {size - most} to pick from, fewer than "
            f"k = {config.k}: give more examples, lower grpo.k, or set grpo.exclude_own_program: false"
        )
        raise DataError(msg)


__all__ = ["GRPOResult", "Log", "calls_at_most", "train"]
