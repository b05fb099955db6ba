"""What the two stages of training share: their state between steps, the learning rate, what a query may not get."""

from __future__ import annotations

from rcr_trainer.training.barred import own_positions
from rcr_trainer.training.schedule import linear
from rcr_trainer.training.state import TrainingState

__all__ = ["TrainingState", "linear", "own_positions"]
