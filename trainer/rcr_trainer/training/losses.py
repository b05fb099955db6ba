"""The losses of SFT (section 3.1) and GRPO (section 3.2) as pure functions of logits and log-probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST = 20.0
"""Exponents up to this are exact; beyond, exp continues as its tangent, since float32 would soon overflow."""
_EQUAL = 1e-3
"""Log-probabilities of sequences this close are equal: even the same weights give others for texts encoded in another
batch (by up to 1e-5 in trials), and where nothing else has a gradient, AdamW takes whole steps by rounding errors."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What S states should learn about C candidates."""

    gains: Tensor  # (S, C) how many uncovered structures each candidate covers, at least 0
    allowed: Tensor  # (S, C) bool; False for what may not be picked (the query itself, what is already picked)
    temperature: float = 1.0  # softness of the targets computed from gains
    positive: Tensor | None = None  # (S,) int64; the column of Algorithm 1's pick; None: whole sequences are trained
    mask_equals: bool = True  # whether a candidate that adds at least as much as the positive is no negative


def listwise(logits: Tensor, targets: Targets) -> Tensor:
    """Cross-entropy between softmax(gain / temperature) and the policy: candidates that add as much share the target.

    L = −Σ_c softmax_c(gain / T) · log softmax_c(logit), mean over the states in which some candidate adds something; 0
    without such states. A small T concentrates the target on the best candidates.

    Use it if the whole pool (or a good part of it) can be scored at every step: frozen embeddings, n-grams. The logits
    (S, C) are those of Eq. 4.
    """
    allowed, lowest = targets.allowed, torch.finfo(logits.dtype).min
    target = (targets.gains / targets.temperature).masked_fill(~allowed, lowest).softmax(-1)
    log_policy = logits.masked_fill(~allowed, lowest).log_softmax(-1)
    useful = (targets.gains.masked_fill(~allowed, 0.0).amax(-1) > 0).to(logits.dtype)
    cross_entropy = -(target * log_policy.masked_fill(~allowed, 0.0)).sum(-1)
    return (cross_entropy * useful).sum() / useful.sum().clamp(min=1.0)


def info_nce(logits: Tensor, targets: Targets) -> Tensor:
    """The paper's InfoNCE (section 3.1): the step's positive against in-batch and hard negatives.

    L = −log exp q(c⁺) / Σ_{c ∈ N ∪ {c⁺}} exp q(c), mean over the batch. With `mask_equals` a candidate that adds at
    least as much as the positive is masked; the paper keeps it as a negative.

    Use it if only a batch's own candidates can be encoded: fully trained transformers. The logits (S, C) are those of
    Eq. 4; the candidates are the batch's positives and hard negatives, each once. What isn't allowed is never a
    negative.
    """
    positive = targets.positive
    if positive is None:
        raise ValueError("InfoNCE compares with a positive")
    is_positive = torch.zeros_like(targets.allowed).scatter_(1, positive.unsqueeze(1), value=True)
    kept = is_positive | targets.allowed
    if targets.mask_equals:
        kept &= is_positive | (targets.gains < targets.gains.gather(1, positive.unsqueeze(1)))
    masked = logits.masked_fill(~kept, torch.finfo(logits.dtype).min)
    return torch.nn.functional.cross_entropy(masked, positive)


def ratio(new: Tensor, old: Tensor) -> Tensor:
    """r_θ(o) = π_θ(o) / π_old(o) of whole sequences, from their log-probabilities (R,)."""
    return _exp(new - old)


def gap(one: Tensor, other: Tensor) -> Tensor:
    """How far log-probabilities (R,) are above others; 0, without a gradient, if only by rounding."""
    return torch.nn.functional.hardshrink(one - other, _EQUAL)


def kl_estimate(new: Tensor, reference: Tensor) -> Tensor:
    """The paper's estimate of D_KL(π_θ ‖ π_ref) from one sequence: ρ − log ρ − 1 with ρ = π_ref(o) / π_θ(o).

    At least 0, and unbiased for sequences drawn from π_θ. Takes and returns (R,).
    """
    log_rho = gap(reference, new)
    return _exp(log_rho) - log_rho - 1


def grpo_loss(
    new: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, scored: Tensor, epsilon: float, beta: float
) -> Tensor:
    """−J (Eq. 8) of each sequence, (R,), J = min(r_θ A, clip(r_θ, 1 − ε, 1 + ε) A) − β KL; the objective is their mean.

    Args:
        new: (R,) log π_θ(o); gradients flow through it.
        old: (R,) log π_old(o), of the policy that drew the sequences.
        reference: (R,) log π_ref(o), of the policy after SFT.
        advantages: (R,).
        scored: (R,) bool; False for a sequence without a reward: its loss is 0, including the KL term.
        epsilon: ε, the clip ratio.
        beta: β, the weight of the KL term; 0 if the penalty is in the reward.
    """
    free = ratio(new, old)
    objective = torch.minimum(free * advantages, free.clamp(1 - epsilon, 1 + epsilon) * advantages)
    if beta:
        objective = objective - beta * kl_estimate(new, reference)
    return torch.where(scored, -objective, torch.zeros_like(objective))


def _exp(exponent: Tensor) -> Tensor:
    beyond = (exponent - _LARGEST).clamp(min=0)
    return (exponent.clamp(max=_LARGEST)).exp() + math.exp(_LARGEST) * beyond
