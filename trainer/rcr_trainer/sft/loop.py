"""Stage 1 (section 3.1): supervised fine-tuning of a TriEncoder, top to bottom.

Departures from the paper, each with the setting that undoes it:
- the default loss is listwise over soft gains, not InfoNCE against one positive (`loss: infonce`);
- later in training, part of the states come from the policy's own picks, not Algorithm 1's (`on_policy: 0`);
- steps at which nothing uncovered can be reached teach nothing and are skipped (the paper trains on their ties);
- candidates that add as much as the positive are masked from InfoNCE's negatives;
- a query never gets itself, nor, by default, its own program (`exclude_own_program: false`);
- gradients are clipped to a norm (`max_grad_norm: null`);
- training stops early on development coverage (`patience: null`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from langchain_rcr.index.base import PoolVectors
from langchain_rcr.items import Item
from langchain_rcr.selection import greedy
from langchain_rcr.tri_encoder import TriEncoder
from rcr_trainer.data import Example
from rcr_trainer.errors import DataError
from rcr_trainer.programs import ProgramSpec
from rcr_trainer.schema import SFTConfig
from rcr_trainer.sft.losses import info_nce_loss, listwise_loss
from rcr_trainer.sft.supervision import HardNegatives, IntArray, Supervision
from rcr_trainer.training import TrainingState, linear

Log = Callable[[int, dict[str, float]], None]
"""Called with the epoch and its figures after every epoch."""


@dataclass(slots=True)
class SFTResult:
    """What came of training; the model itself holds the best epoch's weights.

    Args:
        best_epoch: the epoch kept, 0 for the untrained model.
        best_dev_coverage: mean coverage of the development queries at that epoch, in percent; NaN without any.
        epochs: epochs trained.
        steps: optimiser steps taken.
        history: a row of figures per epoch.
    """

    best_epoch: int = 0
    best_dev_coverage: float = float("nan")
    epochs: int = 0
    steps: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Batch:
    """B sequences and the states on them that are trained.

    Args:
        queries: (B,) rows of the supervision.
        picked: (B, k−1) the first picks of each sequence; state t has the first t of them.
        candidates: (C,) pool positions that are scored.
        steps: (B, k) bool; which states take part.
        positive: (B, k) columns of `candidates`, Algorithm 1's choice; only InfoNCE reads it.
    """

    queries: IntArray
    picked: IntArray
    candidates: IntArray
    steps: NDArray[np.bool_]
    positive: IntArray | None = None


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

    Returns:
        The result.

    Raises:
        DataError: no query has a program that parses, or the pool is smaller than k + what a query may not get.
    """
    trainer = _Trainer(model, pool, queries, dev, spec, config, seed)
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
    ) -> None:
        self.model, self.config, self.seed = model, config, seed
        self._vectors: PoolVectors | None = None
        own = config.exclude_own_program
        self.supervision = Supervision.build(queries, pool, spec, exclude_own_program=own)
        # Development queries that were taken out of the pool are barred like training queries; others get what test
        # queries get.
        inside = {e.id for e in pool} >= {e.id for e in dev}
        dev = [e for e in dev if spec.structures(e.target)]
        self.dev = Supervision.build(dev, pool, spec, exclude_own_program=own and inside) if dev else None
        _check_sizes(self.supervision, len(pool), config.k)
        self.sequences, self.sequence_gains = self.supervision.sequences(config.k)
        self.trainable = np.flatnonzero(self.sequence_gains[:, 0] > 0)
        if not len(self.trainable):
            msg = (
                f"none of the {len(queries)} training queries has a program that parses as '{spec.language}' and "
                "shares a structure with another example: set program.language, or check the programs"
            )
            raise DataError(msg)
        self.query_features = model.query.featurize([Item(e.source) for e in queries])
        items = [Item(e.source, e.target) for e in pool]
        self.candidate_features, self.context_features = model.featurize_pool(items)
        self.dev_features = model.query.featurize([Item(e.source) for e in dev])
        keys = [spec.key(e.target) for e in pool] if config.mask_duplicates else []
        self.groups = np.unique(keys, return_inverse=True)[1] if keys else None
        self.negatives = None
        if config.loss == "infonce" and config.bm25_worst:
            self.negatives = HardNegatives(
                [e.source for e in queries],
                [e.source for e in pool],
                top=config.bm25_top,
                worst=config.bm25_worst,
                forbidden=self.supervision.forbidden,
            )

    # ------------------------------------------------------------------ the loop

    def run(self, folder: Path | None, log: Log | None, progress: Callable[[int, int], None] | None) -> SFTResult:
        config, model = self.config, self.model
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
        per_epoch = -(-self._batches_per_epoch() // config.gradient_accumulation)
        planned = min(config.epochs * per_epoch, config.max_steps or config.epochs * per_epoch)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: linear(step, planned, config.warmup))
        state = TrainingState(model, optimizer, schedule, SFTResult())
        if folder is None or not state.load(folder):
            self._evaluate(state, {"epoch": 0.0, "loss": float("nan")}, log)
        result = state.result
        while result.steps < planned and not self._out_of_patience(result):
            losses: list[float] = []
            rng = np.random.default_rng([self.seed, result.epochs])
            batches = self._batches(rng, self._sequences_of_epoch(rng, result.epochs))
            model.train()
            with _dropout_of(int(rng.integers(2**31)), parameters[0].device):
                for group in _grouped(batches, config.gradient_accumulation):
                    losses += self._step(group, optimizer, parameters)
                    schedule.step()
                    result.steps += 1
                    if progress is not None:
                        progress(result.steps, planned)
                    if result.steps >= planned:
                        break
            result.epochs += 1
            self._vectors = None
            last = result.steps >= planned
            if result.epochs % config.evaluate_every == 0 or last:
                self._evaluate(state, {"epoch": float(result.epochs), "loss": float(np.mean(losses))}, log)
            if folder is not None:
                state.save(folder, force=last)
        state.restore_best()
        model.eval()
        return result

    def _step(
        self, group: Sequence[_Batch], optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
    ) -> list[float]:
        """One optimiser step on the mean loss of some batches; returns their losses."""
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for batch in group:
            loss = self._loss(batch)
            torch.autograd.backward(loss / len(group))
            losses.append(loss.item())
        if self.config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        optimizer.step()
        return losses

    def _evaluate(self, state: TrainingState[SFTResult], figures: dict[str, float], log: Log | None) -> None:
        result = state.result
        if self.dev is not None:
            queries = self.model.query.vectors(self.dev_features)
            picks = greedy(
                queries,
                self._pool_vectors(),
                self.model.state(),
                self.config.k,
                exclude=self.dev.forbidden,
                groups=self.groups,
            )
            coverage = float(100 * self.dev.coverage(picks.positions).mean())
            figures["dev_coverage"] = coverage
            better = not coverage <= result.best_dev_coverage  # true for the first, NaN
        else:
            better = True
        if better:
            result.best_epoch = int(figures["epoch"])
            result.best_dev_coverage = figures.get("dev_coverage", float("nan"))
            state.keep_best()
        figures["lr"] = float(state.schedule.get_last_lr()[0])
        result.history.append(figures)
        if log is not None:
            log(int(figures["epoch"]), figures)

    def _out_of_patience(self, result: SFTResult) -> bool:
        patience = self.config.patience
        if patience is None or self.dev is None:
            return False
        return sum(row["epoch"] > result.best_epoch for row in result.history) >= patience

    # ------------------------------------------------------------------ batches

    def _batches_per_epoch(self) -> int:
        if self.config.loss == "infonce":
            return -(-int((self.sequence_gains > 0).sum()) // self.config.batch_size)
        return -(-len(self.trainable) // self._queries_per_batch())

    def _queries_per_batch(self) -> int:
        return max(1, self.config.batch_size // self.config.k)

    def _sequences_of_epoch(self, rng: np.random.Generator, epoch: int) -> IntArray:
        """(Q, k) picks whose prefixes are the epoch's states: Algorithm 1's, or, for a share, the policy's own."""
        config = self.config
        if config.loss == "infonce" or not config.on_policy or epoch < config.on_policy_from * config.epochs:
            return self.sequences
        rows = self.trainable[rng.random(len(self.trainable)) < config.on_policy]
        sequences = self.sequences.copy()
        if len(rows):
            picks = greedy(
                self.model.query.vectors(self.query_features.select(rows)),
                self._pool_vectors(),
                self.model.state(),
                config.k,
                exclude=[self.supervision.forbidden[row] for row in rows],
                groups=self.groups,
            )
            sequences[rows] = picks.positions
        return sequences

    def _batches(self, rng: np.random.Generator, sequences: IntArray) -> Iterator[_Batch]:
        if self.config.loss == "infonce":
            yield from self._info_nce_batches(rng)
            return
        everything = np.arange(len(self.candidate_features))
        size = self._queries_per_batch()
        order = rng.permutation(self.trainable)
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            candidates = everything
            if len(everything) > self.config.candidates:
                must = np.unique(np.concatenate([self.sequences[rows].ravel(), sequences[rows].ravel()]))
                free = max(0, self.config.candidates - len(must))
                candidates = np.union1d(must, rng.choice(everything, free, replace=False))
            picked = sequences[rows, : self.config.k - 1]
            yield _Batch(rows, picked, candidates, np.ones((len(rows), self.config.k), dtype=bool))

    def _info_nce_batches(self, rng: np.random.Generator) -> Iterator[_Batch]:
        """Batches of single states (x, Z_{t−1}, c_t): positives of the whole batch, then a hard negative each."""
        instances = rng.permutation(np.argwhere(self.sequence_gains > 0))
        for start in range(0, len(instances), self.config.batch_size):
            queries, at = instances[start : start + self.config.batch_size].T
            positives = self.sequences[queries, at]
            picked = self.sequences[queries, : self.config.k - 1]
            hard = positives[:0]
            if self.negatives is not None:
                hard = self.negatives.draw(self.supervision, queries, picked, at, rng)
            candidates, columns = np.unique(np.concatenate([positives, hard]), return_inverse=True)
            steps = np.zeros((len(queries), self.config.k), dtype=bool)
            steps[np.arange(len(queries)), at] = True
            positive = np.repeat(columns[: len(queries), None], self.config.k, axis=1)
            yield _Batch(queries, picked, candidates, steps, positive)

    # ------------------------------------------------------------------ tensors

    def _pool_vectors(self) -> PoolVectors:
        """E_c and E_z of the pool under the current weights; encoded at most once an epoch."""
        if self._vectors is None:
            self._vectors = PoolVectors(
                self.model.candidate.vectors(self.candidate_features), self.model.context.vectors(self.context_features)
            )
        return self._vectors

    def _loss(self, batch: _Batch) -> Tensor:
        """Logits of the batch's states (S of B × k) over its C candidates, then the loss."""
        device = next(self.model.parameters()).device
        states = self._states(batch)[torch.from_numpy(batch.steps).to(device)]  # (S, D)
        candidates = self.model.candidate(self.candidate_features.select(batch.candidates))  # (C, D)
        logits = states @ candidates.T
        gains = self.supervision.gains(batch.queries, batch.picked, batch.candidates)[batch.steps]
        gains_ = torch.from_numpy(gains).to(device)
        allowed = torch.from_numpy(self._allowed(batch)[batch.steps]).to(device)
        if batch.positive is None:
            return listwise_loss(logits, gains_, allowed, self.config.temperature)
        positive = torch.from_numpy(batch.positive[batch.steps]).to(device)
        return info_nce_loss(logits, positive, gains_, allowed)

    def _states(self, batch: _Batch) -> Tensor:
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

    def _allowed(self, batch: _Batch) -> NDArray[np.bool_]:
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


def _grouped(batches: Iterator[_Batch], size: int) -> Iterator[list[_Batch]]:
    group: list[_Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


__all__ = ["Log", "SFTResult", "train"]
