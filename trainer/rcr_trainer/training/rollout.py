"""π over sequences of k distinct picks: drawing them, and their log-probabilities. Arrays only, no text.

At each step π is the softmax of logit / τ over the candidates that are neither barred nor picked already, so the
probability of a sequence is the product over its steps of renormalised probabilities. For large pools every step may
be confined to the M candidates with the largest logits under the policy that draws (the step's support): then that
restricted policy is what is drawn from, compared with, and trained, and its log-probabilities exceed the pool's by
−log of the probability that the pool's policy leaves to the support at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from langchain_rcr.state import State

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Sequences:
    """R drawn sequences.

    Args:
        picks: (R, k) int64 pool positions, in order.
        log_probs: (R,) float32 log π(o) of the policy that drew them.
        support: (R, k, M) int64 pool positions that each step could choose from; None: all.
    """

    picks: Tensor
    log_probs: Tensor
    support: Tensor | None

    def part(self, rows: slice) -> Sequences:
        """Some of the sequences."""
        return Sequences(self.picks[rows], self.log_probs[rows], None if self.support is None else self.support[rows])


@torch.no_grad()
def draw(
    start: State[Any],
    candidates: Tensor,
    contexts: Callable[[Tensor], Tensor],
    barred: Tensor,
    k: int,
    *,
    tau: float,
    uniforms: Tensor | None,
    top: int | None = None,
) -> Sequences:
    """Draw sequences without replacement, exactly: by inverting the cumulative distribution at each step.

    Args:
        start: the state of R rows before the first pick.
        candidates: E_c of the pool, (N, D).
        contexts: E_z of picks: (R,) positions → (R, D). Called between steps.
        barred: (R, N) bool; what a row may not get. Every row has at least k others.
        k: picks a row.
        tau: τ.
        uniforms: (R, k) numbers from [0, 1), one a draw; None: the most probable candidate at each step.
        top: M, where steps are confined to the M largest logits (at least k); None: the whole pool.

    Returns:
        The sequences.
    """
    state, taken = start, barred.clone()
    rows = torch.arange(len(barred), device=candidates.device)
    picks, log_probs, support = [], torch.zeros(len(barred), dtype=torch.float64, device=candidates.device), []
    for step in range(k):
        logits = (state.vector() @ candidates.T).masked_fill(taken, _NEVER)
        if top is not None and top < len(candidates):
            logits, kept = logits.topk(top, dim=-1)
            support.append(kept)
        log_policy = (logits.double() / tau).log_softmax(-1)
        column = log_policy.argmax(-1) if uniforms is None else _invert(log_policy.exp(), uniforms[:, step])
        pick = support[-1][rows, column] if support else column
        log_probs += log_policy[rows, column]
        picks.append(pick)
        taken[rows, pick] = True
        if step + 1 < k:
            state = state.update(contexts(pick))
    return Sequences(torch.stack(picks, dim=1), log_probs.float(), torch.stack(support, dim=1) if support else None)


def _invert(policy: Tensor, uniforms: Tensor) -> Tensor:
    """The column (R,) at which each row's cumulative probability first exceeds the uniform number."""
    cumulative = policy.cumsum(-1)
    total = cumulative[:, -1:]
    level = uniforms.to(policy).unsqueeze(-1) * total
    # Rounding may lift the product to the total, which no column exceeds.
    level = torch.minimum(level, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, level, right=True).squeeze(-1)


def states(start: State[Any], contexts: Tensor) -> Tensor:
    """The state before every pick (Eq. 4).

    Args:
        start: the state of R rows before the first pick.
        contexts: (R, k − 1, D) E_z of the picks but the last.

    Returns:
        (R, k, D).
    """
    vectors = [start.vector()]
    state = start
    for step in range(contexts.shape[1]):
        state = state.update(contexts[:, step])
        vectors.append(state.vector())
    return torch.stack(vectors, dim=1)


def masked(barred: Tensor, picks: Tensor, support: Tensor | None = None) -> Tensor:
    """What no step of a sequence can choose.

    Args:
        barred: (R, C) bool.
        picks: (R, k) columns among the C candidates.
        support: (R, k, M) columns that each step is confined to; None: all.

    Returns:
        (R, k, C) bool: barred, picked at an earlier step, or outside the step's support.
    """
    if support is None:
        out = barred.unsqueeze(1).repeat(1, picks.shape[1], 1)
    else:
        outside = torch.ones(*picks.shape, barred.shape[1], dtype=torch.bool, device=barred.device)
        out = outside.scatter_(2, support, value=False) | barred.unsqueeze(1)
    for step in range(picks.shape[1] - 1):
        later = out[:, step + 1 :]
        later.scatter_(2, picks[:, step, None, None].expand(-1, later.shape[1], 1), value=True)
    return out


def sequence_log_probs(states: Tensor, candidates: Tensor, picks: Tensor, masked: Tensor, tau: float) -> Tensor:
    """Log π(o) of given sequences; gradients flow to states and candidates.

    Args:
        states: (R, k, D), the state before every pick.
        candidates: (C, D), E_c.
        picks: (R, k) columns among the C candidates.
        masked: (R, k, C) bool; what a step can't choose.
        tau: τ.

    Returns:
        (R,).
    """
    logits = ((states @ candidates.T) / tau).masked_fill(masked, _NEVER)
    return logits.log_softmax(-1).gather(2, picks.unsqueeze(-1)).squeeze(-1).sum(-1)
