"""π over sequences of k distinct picks: drawing them, and their log-probabilities. Arrays only, no text.

At each step π is the softmax of logit / τ over the candidates that are neither barred nor already picked, so the
probability of a sequence is the product over its steps of renormalised probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from langchain_rcr.families.state import State

_NEVER = float("-inf")


class Sequences(NamedTuple):
    """R drawn sequences."""

    picks: Tensor  # (R, k) int64 pool positions, in order
    log_probs: Tensor  # (R,) float32 log π(o) of the policy that drew them
    entropies: Tensor  # (R, k) of the policy at each step, in nats


@torch.no_grad()
def draw(
    start: State[Any],
    candidates: Tensor,
    contexts: Callable[[Tensor], Tensor],
    barred: Tensor,
    k: int,
    *,
    tau: Sequence[float],
    uniforms: Tensor | None,
) -> Sequences:
    """Draw sequences without replacement, exactly: by inverting the cumulative distribution at each step.

    Args:
        start: the state of R rows before the first pick.
        candidates: (N, D) E_c of the pool.
        contexts: E_z of picks: (R,) positions → (R, D). Called between steps.
        barred: (R, N) bool. Every row has at least k others.
        k: picks per row.
        tau: τ of each step.
        uniforms: (R, k) numbers from [0, 1), one per draw; None: the most probable candidate at each step.
    """
    state, taken = start, barred.clone()
    rows = torch.arange(len(barred), device=candidates.device)
    picks, entropies = [], []
    log_probs = torch.zeros(len(barred), dtype=torch.float64, device=candidates.device)
    for step in range(k):
        logits = (state.vector() @ candidates.T).masked_fill(taken, _NEVER)
        log_policy = (logits.double() / tau[step]).log_softmax(-1)
        pick = log_policy.argmax(-1) if uniforms is None else _invert(log_policy.exp(), uniforms[:, step])
        log_probs += log_policy[rows, pick]
        picks.append(pick)
        entropies.append(torch.special.entr(log_policy.exp()).sum(-1))
        taken[rows, pick] = True
        if step + 1 < k:
            state = state.update(contexts(pick))
    return Sequences(torch.stack(picks, dim=1), log_probs.float(), torch.stack(entropies, dim=1).float())


def _invert(policy: Tensor, uniforms: Tensor) -> Tensor:
    """The column (R,) at which each row's cumulative probability first exceeds the uniform number."""
    cumulative = policy.cumsum(-1)
    total = cumulative[:, -1:]
    level = uniforms.to(policy).unsqueeze(-1) * total
    # Rounding may lift the product to the total, which no column exceeds.
    level = torch.minimum(level, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, level, right=True).squeeze(-1)


def states(start: State[Any], contexts: Tensor) -> Tensor:
    """The state before every pick (Eq. 4), (R, k, D), from the start and E_z (R, k − 1, D) of the earlier picks."""
    every = accumulate(contexts.unbind(1), lambda state, context: state.update(context), initial=start)
    return torch.stack([state.vector() for state in every], dim=1)


def masked(barred: Tensor, picks: Tensor) -> Tensor:
    """What each step of sequences (R, k) can't choose, (R, k, N) bool: barred, or picked at an earlier step."""
    out = barred.unsqueeze(1).repeat(1, picks.shape[1], 1)
    rows = torch.arange(len(picks), device=picks.device)
    for step in range(picks.shape[1] - 1):
        out[rows, step + 1 :, picks[:, step]] = True
    return out


def sequence_log_probs(
    states: Tensor, candidates: Tensor, picks: Tensor, masked: Tensor, tau: Sequence[float]
) -> Tensor:
    """Log π(o) (R,) of given sequences, `picks` (R, k); gradients flow to states and candidates.

    From the state before every pick (R, k, D), E_c (N, D), what a step can't choose (R, k, N), and each step's τ.
    """
    logits = ((states @ candidates.T) / states.new_tensor(tau)[:, None]).masked_fill(masked, _NEVER)
    return logits.log_softmax(-1).gather(2, picks.unsqueeze(-1)).squeeze(-1).sum(-1)
