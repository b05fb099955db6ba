"""The training state between rounds: weights, best weights, optimiser, position. Safetensors and JSON, no pickle."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from langchain_rcr.basics.files import atomic_directory, write_text
from langchain_rcr.errors import CheckpointError
from langchain_rcr.policy.manifest import seal, verify

Figures = dict[str, float]

SAVE_EVERY_S = 20.0
"""Seconds between saves, or 20 times as long as the last one took. A kill costs at most this much work."""


@dataclass(slots=True)
class Result:
    """The result of training; the model itself holds the best weights.

    Args:
        stage: sft or grpo.
        processes: how many train together.
        rounds: rounds trained: epochs of SFT, batches of GRPO.
        steps: steps taken, of those the learning rate was planned for.
        best_round: the round whose weights are kept, 0 for those before training.
        best_score: its development figure; NaN without development queries.
        since_best: evaluations since then.
        history: the figures of each round that was evaluated.
        pending: the figures of a round whose evaluation is still to come; None: there is no such round.
    """

    stage: str
    processes: int = 1
    rounds: int = 0
    steps: int = 0
    best_round: int = 0
    best_score: float = math.nan
    since_best: int = 0
    history: list[Figures] = field(default_factory=list)
    pending: Figures | None = field(default_factory=dict)


class TrainingState:
    """What a run needs to continue after any round as if it had never stopped.

    It holds no random state: generators are seeded by the position in the run.
    """

    def __init__(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, result: Result) -> None:
        self.parameters, self.optimizer, self.result = parameters, optimizer, result
        self._best: dict[str, Tensor] = {}
        self._saved_at, self._took = time.monotonic(), 0.0

    def keep_best(self) -> None:
        """Remember the current weights as the best so far."""
        self._best = {name: tensor.detach().cpu().clone() for name, tensor in self.parameters.items()}

    def restore_best(self) -> None:
        """Put the best weights back into the model, if there are any."""
        self._put(self._best)

    def save(self, folder: Path, *, force: bool = False) -> None:
        """Write the state atomically; unless forced, only if the last write was some time ago."""
        began = time.monotonic()
        if not force and began - self._saved_at < SAVE_EVERY_S * max(1.0, self._took):
            return
        tensors = {f"model.{name}": tensor for name, tensor in self.parameters.items()}
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

    def load(self, folder: Path) -> bool:
        """Continue from a saved state; False if there is none, a `CheckpointError` if it is another model's."""
        if not folder.is_dir():
            return False
        try:
            verify(folder)
            tensors = load_file(folder / "state.safetensors")
            result = Result(**json.loads((folder / "state.json").read_text(encoding="utf-8")))
            weights, best = _part(tensors, "model."), _part(tensors, "best.")
            wanted = _shapes(self.parameters)
            if _shapes(weights) != wanted or (best and _shapes(best) != wanted):
                raise ValueError("its weights are those of another model")
            slots: dict[int, dict[str, Tensor]] = {}
            for name, value in _part(tensors, "optimizer.").items():
                number, slot = name.split(".", 1)
                slots.setdefault(int(number), {})[slot] = value
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        except (CheckpointError, OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder} can't be resumed from: {' '.join(str(error).split())[:300]}; delete it to start afresh"
            ) from None
        self._put(weights)
        self.result, self._best = result, best
        return True

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in weights.items():
                self.parameters[name].copy_(tensor)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
