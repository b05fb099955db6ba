"""Advantages as pure functions of a group's rewards (section 3.2, Eq. 9; section 4, "RL variations").

They take rewards (B, G), B queries with G sequences each, and return advantages (B, G). A sequence that can't be scored
(NaN) has advantage 0, and is left out of the others' baseline.
"""

from __future__ import annotations

import numpy as np

from langchain_rcr.basics.rows import BoolArray, DoubleArray
from rcr_trainer.errors import ConfigError
from rcr_trainer.training.registry import ADVANTAGES

_NO_SPREAD = 1e-8
"""A standard deviation up to this, relative to the largest reward, is rounding error: the rewards are equal. Relative,
as the likelihood of a program of a hundred tokens is far below this."""


def estimate(name: str, rewards: DoubleArray, greedy: DoubleArray | None = None) -> tuple[DoubleArray, BoolArray]:
    """The advantages (B, G) of this name in `registry.ADVANTAGES`, and whether each sequence has one, (B, G) bool.

    From rewards (B, G) and, for those that read it, the greedy sequence's reward (B,). A `ConfigError` if the function
    gives anything but finite numbers of that shape.
    """
    entry, given, scored = ADVANTAGES[name], [rewards], ~np.isnan(rewards)
    if entry.reads_greedy:
        if greedy is None:
            raise ValueError(f"{name} compares with the greedy sequence's reward")
        given, scored = [rewards, greedy], scored & ~np.isnan(greedy)[:, None]
    advantages = np.asarray(entry.function(*given))
    if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
        wanted = f"finite numbers of shape {rewards.shape}"
        raise ConfigError(f"advantage '{name}' must give {wanted}, not {advantages.tolist()!r:.80}")
    return advantages, scored


def grpo(rewards: DoubleArray) -> DoubleArray:
    """A_i = (r_i − mean) / std over the group, std with divisor G; 0 throughout a group of equal rewards."""
    count, mean = _moments(rewards)
    centred = np.where(np.isnan(rewards), 0.0, rewards - mean)
    std = np.sqrt((centred**2).sum(axis=1, keepdims=True) / count)
    differ = std > _NO_SPREAD * np.nan_to_num(np.abs(rewards)).max(axis=1, keepdims=True)
    return np.where(differ, centred / np.where(differ, std, 1.0), 0.0)


def rloo(rewards: DoubleArray) -> DoubleArray:
    """A_i = r_i − mean of the other G − 1 rewards (the paper writes k − 1); 0 if there are no others."""
    count, mean = _moments(rewards)
    # r − (Σ − r) / (n − 1) = (r − Σ / n) · n / (n − 1)
    return np.where(np.isnan(rewards) | (count < 2), 0.0, (rewards - mean) * count / np.maximum(count - 1, 1))


def remax(rewards: DoubleArray, greedy: DoubleArray) -> DoubleArray:
    """A_i = r_i − r(o′), with rewards (B,) of the policy's greedy sequences o′; 0 where o′ can't be scored."""
    return np.nan_to_num(rewards - greedy[:, None], nan=0.0)


def nb(rewards: DoubleArray) -> DoubleArray:
    """A_i = r_i: no baseline."""
    return np.nan_to_num(rewards, nan=0.0)


def _moments(rewards: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
    """How many rewards each group has (at least 1) and their mean, (B, 1) each."""
    count = np.maximum((~np.isnan(rewards)).sum(axis=1, keepdims=True), 1).astype(np.float64)
    return count, np.nansum(rewards, axis=1, keepdims=True) / count
