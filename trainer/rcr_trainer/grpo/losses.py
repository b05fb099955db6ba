"""The objective of section 3.2 as pure functions of sequence log-probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LARGEST = 20.0
"""Exponents up to here are exact; beyond, exp goes on as its tangent, since float32 would soon overflow."""


def ratio(new: Tensor, old: Tensor) -> Tensor:
    """r_θ(o) = π_θ(o) / π_old(o), of whole sequences.

    Args:
        new: (R,) log π_θ(o).
        old: (R,) log π_old(o).
    """
    return _exp(new - old)


def surrogate(new: Tensor, old: Tensor, advantages: Tensor, epsilon: float) -> Tensor:
    """min(r_θ A, clip(r_θ, 1 − ε, 1 + ε) A), the first term of Eq. 8.

    Args:
        new: (R,) log π_θ(o); gradients flow through it.
        old: (R,) log π_old(o).
        advantages: (R,).
        epsilon: ε.
    """
    free = ratio(new, old)
    return torch.minimum(free * advantages, free.clamp(1 - epsilon, 1 + epsilon) * advantages)


def kl_estimate(new: Tensor, reference: Tensor) -> Tensor:
    """The paper's estimate of D_KL(π_θ ‖ π_ref) from one sequence: ρ − log ρ − 1 with ρ = π_ref(o) / π_θ(o).

    At least 0, and unbiased for sequences drawn from π_θ.

    Args:
        new: (R,) log π_θ(o); gradients flow through it.
        reference: (R,) log π_ref(o).
    """
    log_rho = reference - new
    return _exp(log_rho) - log_rho - 1


def grpo_loss(
    new: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, scored: Tensor, epsilon: float, beta: float
) -> Tensor:
    """−J (Eq. 8) of each sequence; the objective is their mean.

    Args:
        new: (R,) log π_θ(o); gradients flow through it.
        old: (R,) log π_old(o), of the policy that drew the sequences.
        reference: (R,) log π_ref(o), of the policy after SFT.
        advantages: (R,).
        scored: (R,) bool; False for a sequence without a reward: its loss is 0, the KL term included.
        epsilon: ε, the clip ratio.
        beta: β, the weight of the KL term; 0 where the penalty is in the reward.

    Returns:
        (R,).
    """
    objective = surrogate(new, old, advantages, epsilon)
    if beta:
        objective = objective - beta * kl_estimate(new, reference)
    return torch.where(scored, -objective, torch.zeros_like(objective))


def _exp(exponent: Tensor) -> Tensor:
    beyond = (exponent - _LARGEST).clamp(min=0)
    return (exponent.clamp(max=_LARGEST)).exp() + math.exp(_LARGEST) * beyond
