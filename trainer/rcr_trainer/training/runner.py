"""The training loop of every stage: it runs rounds, keeps the best weights, and resumes after a kill.

A stage supplies three functions, and decides what a round is (an epoch of SFT, a batch of GRPO):

    collect(round) → what the round learns from; changes no weight, and may cost money
    learn(that)    → figures; takes optimiser steps (`Runner.step`, `Runner.advance`)
    evaluate()     → figures on development queries, every `every` rounds and after the last

The state is weights, best weights, optimiser and position, in safetensors and JSON, no pickle; as generators are seeded
by the position, it holds no random state. It is saved after a round, unless the last save was very recent, and whenever
`collect` or `evaluate` fails (a spent budget, an interruption). A resumed run continues after the last round, or with
its evaluation if that was cut short: it learns nothing twice, and loses no answer that was paid for.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from langchain_rcr.basics.files import atomic_directory, write_text
from langchain_rcr.basics.progress import bar
from langchain_rcr.errors import CheckpointError
from langchain_rcr.policy.manifest import seal, verify
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.data.examples import Example
from rcr_trainer.errors import ConfigError
from rcr_trainer.training.processes import Processes
from rcr_trainer.training.registry import StageSettings

MaterialT = TypeVar("MaterialT")
Figures = dict[str, float]
Log = Callable[[int, Figures], None]
"""Called with the round (0: before training) and its figures after every round, in every process."""

SAVE_EVERY_S = 20.0
"""Seconds between saves, or 20 times as long as the last one took. A kill costs at most this much work."""


@dataclass(slots=True)
class Result:
    """The result of training; the model itself holds the best weights."""

    stage: str  # sft or grpo
    processes: int = 1  # how many train together
    rounds: int = 0  # trained: epochs of SFT, batches of GRPO
    steps: int = 0  # taken, of those the learning rate was planned for
    best_round: int = 0  # the round whose weights are kept, 0 for those before training
    best_score: float = math.nan  # its development figure; NaN without development queries
    since_best: int = 0  # evaluations since then
    history: list[Figures] = field(default_factory=list)  # the figures of each round that was evaluated
    pending: Figures | None = field(default_factory=dict)  # of a round whose evaluation is still to come


@dataclass(frozen=True, slots=True)
class Job:
    """What a stage trains, on which data, and where it reports its figures."""

    model: TriEncoder  # trained in place, on the device it is on
    pool: Sequence[Example]  # the N candidates
    queries: Sequence[Example]  # for training, usually the pool itself (a query never gets itself)
    dev: Sequence[Example]  # decide the best weights; empty: the last weights are kept
    spec: ProgramSpec
    seed: int = 0  # every round draws from its own generator, so a resumed run repeats an uninterrupted one
    state_folder: Path | None = None  # holds the training state; an existing one is continued
    log: Log | None = None
    processes: Processes = field(default_factory=Processes)
    """Those that train together, with equal arguments and `batch_size` each. They start from the first one's weights,
    and only that one writes."""


class Runner:
    """Trains some of a model's parameters, which have names.

    Args:
        stage: its name, as in the settings.
        per_epoch: steps in an epoch.
        every: rounds between two evaluations.
        best_by: the figure of `evaluate` that decides which weights are kept, larger is better; "": the last.
        rates: learning rates by parameter, in place of the settings'.
    """

    def __init__(
        self,
        stage: str,
        job: Job,
        config: StageSettings,
        parameters: Mapping[str, nn.Parameter],
        *,
        per_epoch: int,
        every: int,
        best_by: str,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        self.job, self.config, self.processes, self.every = job, config, job.processes, every
        self.best_by = best_by if config.keep == "best" else ""
        self.bar: Any = None
        self.planned = min(config.epochs * per_epoch, config.max_steps or config.epochs * per_epoch)
        if self.planned and not parameters:
            what = f"the {job.model.family.name} family has nothing here that gradients train: set {stage}.epochs: 0"
            raise ConfigError(f"{stage}.epochs = {config.epochs}: {what}")
        self.parameters, self.result = parameters, Result(stage, job.processes.size)
        self._best: dict[str, Tensor] = {}
        self._saved_at, self._took = time.monotonic(), 0.0
        rates = rates or {}
        # One group per learning rate: the optimiser updates a group at once.
        groups: dict[float, list[nn.Parameter]] = {}
        for name, each in parameters.items():
            groups.setdefault(rates.get(name, config.lr), []).append(each)
        self.optimizer = torch.optim.AdamW(
            [{"params": each, "rate": rate} for rate, each in groups.items()] or [{"params": []}],
            lr=config.lr,
            weight_decay=config.weight_decay,
            fused=True if all(each.is_cuda for each in parameters.values()) else None,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.config.lr * linear(self.result.steps, self.planned, self.config.warmup)

    @property
    def at_end(self) -> bool:
        """Whether all planned steps are taken."""
        return self.result.steps >= self.planned

    def run(
        self,
        collect: Callable[[int], MaterialT],
        learn: Callable[[MaterialT], Figures],
        evaluate: Callable[[], Figures],
    ) -> Result:
        """Train to the end, or until patience runs out; the model is left with the best weights.

        `collect` must draw its random numbers from generators seeded by the round. The result is the same in all
        processes.

        Raises:
            CheckpointError: the saved state can't be resumed from.
            ConfigError: training diverges.
        """
        self._resume()
        self._finish_round(evaluate)
        patience = math.inf if self.config.patience is None else self.config.patience
        with bar(self.result.stage, self.planned, self.result.steps) as self.bar:
            while not self.at_end and self.result.since_best < patience:
                with self._saved_on_error():
                    material = collect(self.result.rounds)
                self.result.pending = learn(material)
                self.result.rounds += 1
                self._finish_round(evaluate)
                self._save(force=self.at_end)
        self._put(self._best)
        self.job.model.eval()
        return self.result

    def step(self) -> float:
        """Take an optimiser step on the gradient accumulated since the last one, summed over processes.

        Returns the norm of the gradient before clipping; raises a `ConfigError` if it isn't finite.
        """
        parameters = list(self.parameters.values())
        self.processes.sum_gradients(parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm or math.inf))
        if not math.isfinite(norm):
            where = f"{self.result.stage}.lr = {self.config.lr:g}"
            raise ConfigError(f"the gradient is no longer finite: training has diverged at {where}; lower it")
        decay = linear(self.result.steps, self.planned, self.config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * decay
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def advance(self) -> None:
        """Count a step; the learning rate depends on it."""
        self.result.steps += 1
        self.bar.update()

    def _finish_round(self, evaluate: Callable[[], Figures]) -> None:
        """Evaluate if due, remember the best weights, and log."""
        result, figures = self.result, self.result.pending
        if figures is None:
            return
        if self.at_end or result.rounds % self.every == 0:
            with self._saved_on_error():
                figures = {**figures, **evaluate()}
            score = figures.get(self.best_by, math.nan)
            result.since_best += 1
            if score > result.best_score or math.isnan(result.best_score):  # NaN never beats a number
                result.best_round, result.best_score, result.since_best = result.rounds, score, 0
                if not math.isnan(score):  # else the last weights are kept
                    self._best = {name: each.detach().cpu().clone() for name, each in self.parameters.items()}
            result.history.append(figures)
        result.pending = None
        if self.job.log is not None:
            self.job.log(result.rounds, figures)

    @contextmanager
    def _saved_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._save(force=True)
            raise

    def _save(self, *, force: bool) -> None:
        """Write the state atomically; unless forced, only if the last write was some time ago."""
        began, folder = time.monotonic(), self.job.state_folder
        due = force or began - self._saved_at >= SAVE_EVERY_S * max(1.0, self._took)
        if folder is None or not self.processes.first or not due:
            return
        tensors: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in self.parameters.items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self._best.items()}
        for number, slots in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{slot}": value for slot, value in slots.items()}
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        with atomic_directory(folder) as path:
            save_file(copies, path / "state.safetensors")
            write_text(path / "state.json", json.dumps(asdict(self.result)))  # with NaN, which Python reads back
            seal(path)
        self._saved_at = time.monotonic()
        self._took = self._saved_at - began

    def _resume(self) -> None:
        """Continue from a saved state, in all processes or in none."""
        folder, now = self.job.state_folder, self.processes.size
        found = folder is not None and folder.is_dir()
        if folder is not None and found:
            self._load(folder)
        result = self.result
        if result.processes != now:
            raise CheckpointError(
                f"{folder} was written by {result.processes} processes that trained together, and now there are "
                f"{now}: start as many, or delete it to start afresh"
            )
        if len(set(self.processes.texts(f"{found} {result.rounds} {result.steps}"))) > 1:
            raise CheckpointError(f"{folder} differs between processes: they must share one file system")

    def _load(self, folder: Path) -> None:
        """Take over a saved state, or raise a `CheckpointError` if it is damaged or another model's."""
        try:
            verify(folder)
            tensors = load_file(folder / "state.safetensors")
            result = Result(**json.loads((folder / "state.json").read_text(encoding="utf-8")))
            weights, best = _part(tensors, "model."), _part(tensors, "best.")
            wanted = _shapes(self.parameters)
            if _shapes(weights) != wanted or (best and _shapes(best) != wanted):
                raise ValueError("its weights are those of another model")
            slots = defaultdict[int, dict[str, Tensor]](dict)
            for name, value in _part(tensors, "optimizer.").items():
                number, slot = name.split(".", 1)
                slots[int(number)][slot] = value
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        except (CheckpointError, OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder} can't be resumed from: {' '.join(str(error).split())[:300]}; delete it to start afresh"
            ) from None
        self._put(weights)
        self.result, self._best = result, best

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in weights.items():
                self.parameters[name].copy_(tensor)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def linear(step: float, planned: int, warmup: float) -> float:
    """Factor on the learning rate after `step` steps: warmup over a share of those planned, then linear decay to 0."""
    climb = warmup * planned
    if step < climb:
        return min(1.0, (step + 1) / climb)  # a climb of less than a step, in a short trial
    return max(0.0, (planned - step) / max(1.0, planned - climb))
