"""Rewards for sets of picks: batched callables that give None where there is nothing to score."""

from __future__ import annotations

from langchain_rcr.errors import ProgramError
from rcr_trainer.rewards.ours import (
    NAMES,
    context_coverage,
    correctness,
    execution,
    make_reward,
    mixture,
    structure_coverage,
)
from rcr_trainer.rewards.reward import Reward, RewardError, check_reward, score

__all__ = [
    "NAMES",
    "ProgramError",
    "Reward",
    "RewardError",
    "check_reward",
    "context_coverage",
    "correctness",
    "execution",
    "make_reward",
    "mixture",
    "score",
    "structure_coverage",
]
