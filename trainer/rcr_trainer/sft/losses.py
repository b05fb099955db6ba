"""The two losses of SFT as pure functions of logits. Encoding texts is the loop's business, never a loss's."""

from __future__ import annotations

import torch
from torch import Tensor


def listwise_loss(logits: Tensor, gains: Tensor, allowed: Tensor, temperature: float) -> Tensor:
    """Cross-entropy between softmax(gain / temperature) and the policy: candidates that add as much share the target.

    L = −Σ_c softmax_c(gain / T) · log softmax_c(logit), mean over the states in which some candidate adds something.

    Use it where the whole pool (or a good part) can be scored at every step: frozen embeddings, n-grams.

    Args:
        logits: (S, C) Eq. 4 for S states and C candidates.
        gains: (S, C) how many uncovered structures each candidate covers, at least 0.
        allowed: (S, C) bool; False for what may not be picked (the query itself, what is picked already).
        temperature: T; small values put the target on the best candidates alone, ties shared.

    Returns:
        A scalar; 0 (with zero gradient) where no state has anything to gain.
    """
    lowest = torch.finfo(logits.dtype).min
    target = (gains / temperature).masked_fill(~allowed, lowest).softmax(-1)
    log_policy = logits.masked_fill(~allowed, lowest).log_softmax(-1)
    useful = (gains.masked_fill(~allowed, 0.0).amax(-1) > 0).to(logits.dtype)
    cross_entropy = -(target * log_policy.masked_fill(~allowed, 0.0)).sum(-1)
    return (cross_entropy * useful).sum() / useful.sum().clamp(min=1.0)


def info_nce_loss(logits: Tensor, positive: Tensor, gains: Tensor, allowed: Tensor) -> Tensor:
    """The paper's InfoNCE (section 3.1): the step's positive against in-batch and hard negatives.

    L = −log exp q(c⁺) / Σ_{c ∈ N ∪ {c⁺}} exp q(c), mean over the batch. A candidate that adds at least as much as
    the positive is no negative: it is masked.

    Use it where only a batch's own candidates can be encoded: fully trained transformers.

    Args:
        logits: (S, C) Eq. 4 for S states and the batch's C candidates (positives and hard negatives, each once).
        positive: (S,) int64; the column of each state's positive.
        gains: (S, C) how many uncovered structures each candidate covers.
        allowed: (S, C) bool; False for what is never a negative (the query itself, what is picked already).

    Returns:
        A scalar.
    """
    is_positive = torch.zeros_like(allowed).scatter_(1, positive.unsqueeze(1), value=True)
    as_good = gains >= gains.gather(1, positive.unsqueeze(1))
    kept = is_positive | (allowed & ~as_good)
    masked = logits.masked_fill(~kept, torch.finfo(logits.dtype).min)
    return torch.nn.functional.cross_entropy(masked, positive)
