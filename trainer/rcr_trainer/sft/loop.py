"""Stage 1 (section 3.1): supervised fine-tuning of a TriEncoder, top to bottom.

Departures from the paper, each with the setting that undoes it:
- the default loss is listwise over soft gains, not InfoNCE against one positive (`loss: infonce`);
- later in training, part of the states come from the policy's own picks, not Algorithm 1's (`on_policy: 0`);
- steps at which nothing uncovered can be reached teach nothing and are skipped (the paper trains on their ties);
- candidates that add as much as the positive are masked from InfoNCE's negatives;
- a query never gets itself, nor, by default, its own program (`exclude_own_program: false`);
- gradients are clipped to a norm (`max_grad_norm: null`);
- training stops early on development coverage (`patience: null`).

Where the family has a closed-form fit of E_x (`Family.fit`), that comes first, and gradient descent goes on from there.

In several processes a batch of the listwise loss is one process's, as in gradient accumulation; one of InfoNCE, whose
candidates are the batch's own, is as much larger, and each process takes a share of its rows and candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from langchain_rcr.families.encoder import Features
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.items import Item
from langchain_rcr.policy import TriEncoder
from langchain_rcr.selection import greedy
from rcr_trainer.data import Example
from rcr_trainer.errors import DataError
from rcr_trainer.programs import ProgramSpec
from rcr_trainer.settings import SFTConfig
from rcr_trainer.sft.batches import Batch, grouped, info_nce_batches, listwise_batches
from rcr_trainer.sft.losses import info_nce_loss, listwise_loss
from rcr_trainer.sft.supervision import HardNegatives, IntArray, Supervision
from rcr_trainer.training import Processes, TrainingState, is_better, linear, resume

logger = logging.getLogger(__name__)

_ENOUGH_DEV = 50
"""Development queries that can tell one fit of E_x from another."""
Log = Callable[[int, dict[str, float]], None]
"""Called with the epoch and its figures after every epoch, in every process."""


@dataclass(slots=True)
class SFTResult:
    """What came of training; the model itself holds the best epoch's weights.

    Args:
        best_epoch: the epoch kept, 0 for the untrained model.
        best_dev_coverage: mean coverage of the development queries at that epoch, in percent; NaN without any.
        epochs: epochs trained.
        steps: optimiser steps taken.
        processes: how many train together.
        history: a row of figures per epoch.
    """

    best_epoch: int = 0
    best_dev_coverage: float = float("nan")
    epochs: int = 0
    steps: int = 0
    processes: int = 1
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Targets:
    """What a batch's S states should learn.

    Args:
        batch: the batch.
        gains: (S, C) how many uncovered structures each candidate covers.
        allowed: (S, C) bool; what may be picked.
        count: states that the loss is a mean over.
    """

    batch: Batch
    gains: NDArray[np.float32]
    allowed: NDArray[np.bool_]
    count: int


def train(
    model: TriEncoder,
    pool: Sequence[Example],
    queries: Sequence[Example],
    dev: Sequence[Example],
    spec: ProgramSpec,
    config: SFTConfig,
    *,
    seed: int = 0,
    state_folder: Path | None = None,
    log: Log | None = None,
    progress: Callable[[int, int], None] | None = None,
    processes: Processes | None = None,
) -> SFTResult:
    """Fine-tune a policy on coverage; the model ends with the weights of the best development coverage.

    Args:
        model: trained in place, on the device it is on.
        pool: the N candidates.
        queries: the training queries, usually the pool itself (a query never gets itself).
        dev: development queries for early stopping; empty: the last epoch is kept.
        spec: how programs are read.
        config: the settings.
        seed: of batches, rollouts and draws. Every epoch draws from its own generator, so a resumed run repeats an
            undisturbed one.
        state_folder: where the training state is kept between epochs; one that is there is continued.
        log: receives the figures of every epoch.
        progress: receives (steps done, steps planned).
        processes: those that train together, each with `config.batch_size` (see `join`); None: this one alone. All
            call this function alike; the first one's weights are what they begin with, and it alone writes.

    Returns:
        The result, the same in all processes.

    Raises:
        DataError: no query has a program that parses, or the pool is smaller than k + what a query may not get.
    """
    trainer = _Trainer(model, pool, queries, dev, spec, config, seed, processes or Processes())
    return trainer.run(state_folder, log, progress)


class _Trainer:
    def __init__(
        self,
        model: TriEncoder,
        pool: Sequence[Example],
        queries: Sequence[Example],
        dev: Sequence[Example],
        spec: ProgramSpec,
        config: SFTConfig,
        seed: int,
        processes: Processes,
    ) -> None:
        self.model, self.config, self.seed, self.processes = model, config, seed, processes
        self.device = next(model.parameters()).device
        self.batch_size, self.accumulation = config.batch_size, config.gradient_accumulation
        if config.loss == "infonce":
            self.batch_size *= processes.size
        else:
            self.accumulation *= processes.size
        self._vectors: PoolVectors | None = None
        own = config.exclude_own_program
        self.supervision = Supervision.build(queries, pool, spec, exclude_own_program=own)
        # Development queries that were taken out of the pool are barred like training queries; others get what test
        # queries get.
        inside = {e.id for e in pool} >= {e.id for e in dev}
        dev = [e for e in dev if spec.structures(e.target)]
        self.queries, self._lent = list(queries), dev if inside else []
        self.dev = Supervision.build(dev, pool, spec, exclude_own_program=own and inside) if dev else None
        _check_sizes(self.supervision, len(pool), config.k)
        self.sequences, self.sequence_gains = self.supervision.sequences(config.k)
        self.trainable = np.flatnonzero(self.sequence_gains[:, 0] > 0)
        if not len(self.trainable):
            msg = (
                f"none of the {len(queries)} training queries has a program that parses as '{spec.language}' and "
                "shares a structure with another example: set program.language (tokens reads any text), or check the "
                "programs"
            )
            raise DataError(msg)
        items = [Item(e.source, e.target) for e in pool]
        self.candidate_features, self.context_features = model.featurize_pool(items)
        keys = [spec.key(e.target) for e in pool] if config.mask_duplicates else []
        self.groups = np.unique(keys, return_inverse=True)[1] if keys else None
        dev_items = [Item(e.source) for e in dev]
        self.query_features = self._query_features(dev_items)
        processes.broadcast(model)
        self.dev_features = model.query.featurize(dev_items)
        self.negatives = None
        if config.loss == "infonce" and config.bm25_worst:
            self.negatives = HardNegatives(
                [e.source for e in queries],
                [e.source for e in pool],
                top=config.bm25_top,
                worst=config.bm25_worst,
                forbidden=self.supervision.forbidden,
            )

    def _say(self, message: str, *values: object) -> None:
        """The fit takes seconds to minutes without a step to count."""
        if self.processes.first:
            logger.info(message, *values)

    def _query_features(self, dev: Sequence[Item]) -> Features:
        """Features of the training queries; E_x is fitted first, where its family can, as is best for dev queries."""
        if self.model.family.fits:
            self._say("fitting to %d training questions …", len(self.queries))

        def judge() -> float:
            coverage = self._dev_coverage(self.model.query.featurize(dev))
            self._say("fitted: development coverage %.2f", coverage)
            return coverage

        return self._fit(self.queries, judge if len(dev) >= _ENOUGH_DEV else None)

    def _fit(self, queries: Sequence[Example], judge: Callable[[], float] | None = None) -> Features:
        return self.model.family.fit(
            self.model.query,
            [Item(query.source, query.target) for query in queries],
            own_program=not self.config.exclude_own_program,
            seed=self.seed,
            judge=judge,
        )

    # ------------------------------------------------------------------ the loop

    def run(self, folder: Path | None, log: Log | None, progress: Callable[[int, int], None] | None) -> SFTResult:
        result = self._descend(folder, log, progress)
        self._refit(result)
        self.model.eval()
        return result

    def _descend(self, folder: Path | None, log: Log | None, progress: Callable[[int, int], None] | None) -> SFTResult:
        config, model, processes = self.config, self.model, self.processes
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
        per_epoch = -(-self._batches_per_epoch() // self.accumulation)
        planned = min(config.epochs * per_epoch, config.max_steps or config.epochs * per_epoch)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: linear(step, planned, config.warmup))
        state = TrainingState(model, optimizer, schedule, SFTResult(processes=processes.size))
        if not resume(state, folder, processes):
            self._evaluate(state, {"epoch": 0.0, "loss": float("nan")}, log)
        result = state.result
        while result.steps < planned and not self._out_of_patience(result):
            losses: list[float] = []
            rng = np.random.default_rng([self.seed, result.epochs])
            batches = self._batches(rng, self._sequences_of_epoch(rng, result.epochs))
            model.train()
            with _dropout_of(int(rng.integers(2**31)) + processes.rank, self.device), processes.together():
                for group in grouped(batches, self.accumulation):
                    losses.append(self._step(group, optimizer, parameters))
                    schedule.step()
                    result.steps += 1
                    if progress is not None:
                        progress(result.steps, planned)
                    if result.steps >= planned:
                        break
            result.epochs += 1
            self._vectors = None
            last = result.steps >= planned
            loss = float(np.mean(processes.sum(np.array(losses))))
            if result.epochs % config.evaluate_every == 0 or last:
                self._evaluate(state, {"epoch": float(result.epochs), "loss": loss}, log)
            with processes.together():
                if folder is not None and processes.first:
                    state.save(folder, force=last)
        state.restore_best()
        return result

    def _refit(self, result: SFTResult) -> None:
        """Fit E_x to the development queries, too, where training lent them and no gradient moved it."""
        if self.model.family.fits and self._lent and not result.steps:
            queries = [*self.queries, *self._lent]
            self._say("fitting to all %d questions …", len(queries))
            self._fit(queries)
            self.processes.broadcast(self.model)

    def _step(
        self, group: Sequence[Batch], optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
    ) -> float:
        """One optimiser step on the mean loss over some batches' states; returns this process's part of that loss."""
        processes, loss = self.processes, 0.0
        optimizer.zero_grad(set_to_none=True)
        with processes.together():
            share = [self._targets(batch) for batch in self._share(group)]
        count = int(processes.sum(np.array([sum(targets.count for targets in share)]))[0])
        with processes.together():
            for targets in share:
                loss += self._backward(targets, targets.count / max(1, count))
        processes.sum_gradients(parameters)
        if self.config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        optimizer.step()
        return loss

    def _share(self, group: Sequence[Batch]) -> Sequence[Batch]:
        """What this process does of the batches of a step."""
        if self.config.loss == "listwise":
            return group[self.processes.rank :: self.processes.size]
        return [batch.rows(self.processes.part(len(batch.queries))) for batch in group]

    def _evaluate(self, state: TrainingState[SFTResult], figures: dict[str, float], log: Log | None) -> None:
        result = state.result
        if self.dev is not None:
            coverage = self._dev_coverage(self.dev_features)
            figures["dev_coverage"] = coverage
            better = is_better(coverage, result.best_dev_coverage)
        else:
            better = True
        if better:
            result.best_epoch = int(figures["epoch"])
            result.best_dev_coverage = figures.get("dev_coverage", float("nan"))
            state.keep_best()
        figures["lr"] = float(state.schedule.get_last_lr()[0])
        result.history.append(figures)
        with self.processes.together():
            if log is not None:
                log(int(figures["epoch"]), figures)

    def _dev_coverage(self, features: Features) -> float:
        """Coverage of the policy as it stands on the development queries, of which there are some, in percent."""
        if self.dev is None:
            return float("nan")
        picks = self._greedy(features, np.arange(len(features)), self.dev)
        return float(100 * self.dev.coverage(picks).mean())

    def _out_of_patience(self, result: SFTResult) -> bool:
        patience = self.config.patience
        if patience is None or self.dev is None:
            return False
        return sum(row["epoch"] > result.best_epoch for row in result.history) >= patience

    # ------------------------------------------------------------------ batches

    def _batches_per_epoch(self) -> int:
        if self.config.loss == "infonce":
            return -(-int((self.sequence_gains > 0).sum()) // self.batch_size)
        return -(-len(self.trainable) // self._queries_per_batch())

    def _queries_per_batch(self) -> int:
        return max(1, self.batch_size // self.config.k)

    def _sequences_of_epoch(self, rng: np.random.Generator, epoch: int) -> IntArray:
        """(Q, k) picks whose prefixes are the epoch's states: Algorithm 1's, or, for a share, the policy's own."""
        config = self.config
        if config.loss == "infonce" or not config.on_policy or epoch < config.on_policy_from * config.epochs:
            return self.sequences
        rows = self.trainable[rng.random(len(self.trainable)) < config.on_policy]
        sequences = self.sequences.copy()
        if len(rows):
            sequences[rows] = self._greedy(self.query_features, rows, self.supervision)
        return sequences

    def _greedy(self, features: Features, rows: IntArray, supervision: Supervision) -> IntArray:
        """(len(rows), k) picks of the policy as it is for some queries, of which each process finds a share."""
        mine = rows[self.processes.part(len(rows))]
        picks = np.empty((0, self.config.k), dtype=np.int64)
        with self.processes.together():
            if len(mine):
                picks = greedy(
                    self.model.query.vectors(features.select(mine)),
                    self._pool_vectors(),
                    self.model.state(),
                    self.config.k,
                    exclude=[supervision.forbidden[row] for row in mine],
                    groups=self.groups,
                ).positions
        return self.processes.gather(picks, len(rows))

    def _batches(self, rng: np.random.Generator, sequences: IntArray) -> Iterator[Batch]:
        if self.config.loss == "infonce":
            order = rng.permutation(np.argwhere(self.sequence_gains > 0))
            yield from info_nce_batches(order, self.sequences, self.batch_size, self.supervision, self.negatives, rng)
            return
        order, size = rng.permutation(self.trainable), self._queries_per_batch()
        pool, most = len(self.candidate_features), self.config.candidates
        yield from listwise_batches(order, sequences, self.sequences, size, pool, most, rng)

    # ------------------------------------------------------------------ tensors

    def _pool_vectors(self) -> PoolVectors:
        """E_c and E_z of the pool under the current weights; encoded at most once an epoch."""
        if self._vectors is None:
            self._vectors = PoolVectors(
                self.model.candidate.vectors(self.candidate_features), self.model.context.vectors(self.context_features)
            )
        return self._vectors

    def _targets(self, batch: Batch) -> _Targets:
        gains = self.supervision.gains(batch.queries, batch.picked, batch.candidates)[batch.steps]
        allowed = self._allowed(batch)[batch.steps]
        learnt = np.ones(len(gains)) if batch.positive is not None else np.where(allowed, gains, 0.0).max(axis=1) > 0
        return _Targets(batch, gains, allowed, int(learnt.sum()))

    def _backward(self, targets: _Targets, weight: float) -> float:
        """Add the gradient of the weighted loss on a batch's S states and C candidates; returns that loss."""
        batch, rows, loss = targets.batch, len(targets.gains), 0.0
        states = self._states(batch)[torch.from_numpy(batch.steps).to(self.device)] if rows else None  # (S, D)
        together = self.processes if self.config.loss == "infonce" else Processes()
        with together.whole(lambda part: self._encode(batch.candidates[part]), len(batch.candidates)) as candidates:
            if states is not None:
                weighted = weight * self._loss(targets, states @ candidates.T)
                torch.autograd.backward(weighted)
                loss = weighted.item()
        return loss

    def _loss(self, targets: _Targets, logits: Tensor) -> Tensor:
        batch = targets.batch
        gains, allowed = (torch.from_numpy(a).to(self.device) for a in (targets.gains, targets.allowed))
        if batch.positive is None:
            return listwise_loss(logits, gains, allowed, self.config.temperature)
        return info_nce_loss(logits, torch.from_numpy(batch.positive[batch.steps]).to(self.device), gains, allowed)

    def _encode(self, candidates: IntArray) -> Tensor:
        """E_c (C, D) of candidates, with gradients."""
        if not len(candidates):
            return torch.zeros(0, self.model.dim, device=self.device)
        out: Tensor = self.model.candidate(self.candidate_features.select(candidates))
        return out

    def _states(self, batch: Batch) -> Tensor:
        """State vectors (B, k, D) of every prefix of the batch's sequences (Eq. 4)."""
        state = self.model.state().start(self.model.query(self.query_features.select(batch.queries)))
        picked = batch.picked
        flat = self.model.context(self.context_features.select(picked.ravel())) if picked.size else None
        vectors = [state.vector()]
        for step in range(picked.shape[1]):
            assert flat is not None  # noqa: S101  # picked.size > 0 here
            state = state.update(flat.view(*picked.shape, -1)[:, step])
            vectors.append(state.vector())
        return torch.stack(vectors, dim=1)

    def _allowed(self, batch: Batch) -> NDArray[np.bool_]:
        """(B, k, C): neither forbidden for the query nor picked before the step (nor of a picked one's group)."""
        column = np.full(len(self.candidate_features), -1)
        column[batch.candidates] = np.arange(len(batch.candidates))
        allowed = np.ones((len(batch.queries), batch.picked.shape[1] + 1, len(batch.candidates)), dtype=bool)
        for row, query in enumerate(batch.queries):
            barred = column[self.supervision.forbidden[query]]
            allowed[row, :, barred[barred >= 0]] = False
            for step, pick in enumerate(batch.picked[row]):
                if self.groups is not None:
                    allowed[row, step + 1 :, self.groups[batch.candidates] == self.groups[pick]] = False
                elif column[pick] >= 0:
                    allowed[row, step + 1 :, column[pick]] = False
        return allowed


def _check_sizes(supervision: Supervision, size: int, k: int) -> None:
    barred = max((len(row) for row in supervision.forbidden), default=0)
    if size - barred < k:
        msg = (
            f"the pool of {size} examples leaves a training query only {size - barred} to pick from, fewer than "
            f"k = {k}: give more examples, lower sft.k, or set sft.exclude_own_program: false"
        )
        raise DataError(msg)


@contextmanager
def _dropout_of(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout drawn from its own seed; the process's generators are as before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


__all__ = ["Log", "SFTResult", "train"]
