"""What the two stages of training share: processes, state between steps, learning rate, what a query may not get."""

from __future__ import annotations

from rcr_trainer.training.barred import own_positions
from rcr_trainer.training.fixing import fixed
from rcr_trainer.training.joining import join, resume
from rcr_trainer.training.processes import ProcessError, Processes
from rcr_trainer.training.schedule import linear
from rcr_trainer.training.state import TrainingState, is_better

__all__ = [
    "ProcessError",
    "Processes",
    "TrainingState",
    "fixed",
    "is_better",
    "join",
    "linear",
    "own_positions",
    "resume",
]
