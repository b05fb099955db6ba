"""The training state between steps: weights, best weights, optimiser, position. Safetensors and JSON, no pickle."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from langchain_rcr.errors import CheckpointError
from langchain_rcr.files import atomic_directory, write_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from langchain_rcr.policy import TriEncoder

    class _Progress(DataclassInstance, Protocol):
        steps: int


ProgressT = TypeVar("ProgressT", bound="_Progress")

SAVE_EVERY_S = 20.0
"""Seconds between two writes of the state, more where a write takes more than a second, so that writing never takes
more than a twentieth of the time. At most so much work is repeated after a kill."""


class TrainingState(Generic[ProgressT]):
    """Everything that a run needs to go on after any step as if it had never stopped.

    Random numbers take no part: whoever draws some seeds a generator by the position in the run.

    Args:
        model: its current weights are saved and loaded.
        optimizer: its moments are.
        schedule: its step count is.
        result: how far the run is: a dataclass of JSON values that counts its `steps`. Saved, and replaced by
            what is loaded.
    """

    def __init__(
        self,
        model: TriEncoder,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        result: ProgressT,
    ) -> None:
        self.model, self.optimizer, self.schedule, self.result = model, optimizer, schedule, result
        self._best: dict[str, Tensor] | None = None
        self._saved_at, self._took = time.monotonic(), 0.0

    def keep_best(self) -> None:
        """Remember the current weights as the best so far."""
        self._best = {name: tensor.detach().cpu().clone() for name, tensor in self._weights().items()}

    def restore_best(self) -> None:
        """Put the best weights back into the model."""
        if self._best is not None:
            self.model.load_state_dict(self._best, strict=False)

    def save(self, folder: Path, *, force: bool = False) -> None:
        """Write the state, whole or not at all; unless forced, only when the last write is some time ago."""
        began = time.monotonic()
        if not force and began - self._saved_at < SAVE_EVERY_S * max(1.0, self._took):
            return
        tensors = {f"model.{name}": tensor for name, tensor in self._weights().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in (self._best or {}).items()}
        slots = self.optimizer.state_dict()["state"]
        tensors |= {
            f"optimizer.{number}.{slot}": value
            for number, values in slots.items()
            for slot, value in values.items()
            if isinstance(value, Tensor)
        }
        with atomic_directory(folder) as path:
            save_file(
                {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
                path / "state.safetensors",
            )
            write_json(path / "state.json", _finite(asdict(self.result)))
        self._saved_at = time.monotonic()
        self._took = self._saved_at - began

    def load(self, folder: Path) -> bool:
        """Continue from a saved state.

        Returns:
            False where there is none.

        Raises:
            CheckpointError: the state is damaged or belongs to another model.
        """
        if not (folder / "state.json").is_file():
            return False
        try:
            tensors = load_file(folder / "state.safetensors")
            raw = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            result = type(self.result)(**_infinite(raw))
            weights, best, own = _part(tensors, "model."), _part(tensors, "best."), self._weights().keys()
            if weights.keys() != own or best.keys() not in (own, set()):
                msg = "its weights are those of another model"
                raise ValueError(msg)
            self.model.load_state_dict(weights, strict=False)
            self.result, self._best = result, best or None
            slots: dict[int, dict[str, Tensor]] = {}
            for name, value in _part(tensors, "optimizer.").items():
                number, slot = name.split(".", 1)
                slots.setdefault(int(number), {})[slot] = value
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            msg = f"{folder} can't be resumed from: {' '.join(str(error).split())[:300]}; delete it to start afresh"
            raise CheckpointError(msg) from None
        self.schedule.last_epoch = self.result.steps
        for group, base, factor in zip(
            self.optimizer.param_groups,
            self.schedule.base_lrs,
            self.schedule.lr_lambdas,  # type: ignore[attr-defined]
            strict=True,
        ):
            group["lr"] = base * factor(self.result.steps)
        self.schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        return True

    def _weights(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def is_better(score: float, best: float) -> bool:
    """Whether a development score is the best so far. NaN never beats a number, and anything beats NaN.

    Args:
        score: of the weights as they are; NaN where there is nothing to judge by, so that the last weights are kept.
        best: the best before; NaN at first.
    """
    return score > best or math.isnan(best)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _finite(value: Any) -> Any:
    """What is not finite as null: JSON knows no NaN."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _infinite(value: Any) -> Any:
    """The inverse of `_finite`, NaN for null."""
    if isinstance(value, dict):
        return {key: _infinite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_infinite(inner) for inner in value]
    return float("nan") if value is None else value
