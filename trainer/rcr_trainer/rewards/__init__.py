"""What a set of picks is worth: batched callables, None where there is nothing to score."""

from __future__ import annotations

from rcr_trainer.rewards.base import PerAnswer, Reward, RewardError, check_reward, score
from rcr_trainer.rewards.execution import Execution, ProgramError
from rcr_trainer.rewards.make import NAMES, Mixture, make_reward
from rcr_trainer.rewards.programs import ContextCoverage, Correctness, StructureCoverage

__all__ = [
    "NAMES",
    "ContextCoverage",
    "Correctness",
    "Execution",
    "Mixture",
    "PerAnswer",
    "ProgramError",
    "Reward",
    "RewardError",
    "StructureCoverage",
    "check_reward",
    "make_reward",
    "score",
]
