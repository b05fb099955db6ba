"""Estimates what another policy would have earned on logged questions, from the picks drawn there. Arrays only.

Each logged sequence of picks has a weight, how much more probable the other policy makes it (inverse propensity scores,
Horvitz and Thompson, 1952), clipped so that no question decides alone. An outcome model predicts what the other
policy's own picks earn, and the weights only correct its errors. So the estimate is doubly robust (Dudik, Langford and
Li, 2011): right if either the weights or the model are.

Both policies draw as the served one did: among the best candidates, at the temperature of the question.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from langchain_rcr.basics.rows import BoolArray, DoubleArray, FloatArray, IntArray, product
from langchain_rcr.families.state import State
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.policy.selection import EXPLORED, drawn_from
from rcr_trainer.data.arrays import top_k

CLIP = 50.0  # the largest weight of a question
_RIDGE = 1.0  # added to the squares of standardised features; worth less than one question each


def walk(
    queries: FloatArray,
    state: State[Any],
    pool: PoolVectors,
    tau: DoubleArray,
    allowed: tuple[IntArray, IntArray],
    picks: IntArray,
    random: np.random.Generator | None = None,
) -> tuple[IntArray, DoubleArray]:
    """Follow picks (B, k) or, given a generator, draw as many, as a served policy that explores does.

    That is `Options.explore`. The temperature τ (B,) is that of each question's draws. `allowed` has numbers (B,) and
    (N,): a question gets only examples with its number.

    Returns:
        Picks (B, k), and the log-probability of each (B, k); −inf where one can't be drawn.
    """
    picks, log_probs = picks.copy(), np.zeros(picks.shape)
    current = state.start(queries)
    barred = allowed[0][:, None] != allowed[1][None, :]
    rows, count = np.arange(len(barred)), min(EXPLORED, len(pool.candidate))
    for step, chosen in enumerate(picks.T):
        logits = product(current.vector(), pool.candidate)
        logits[barred] = -np.inf
        least = np.partition(logits, -count, axis=1)[:, -count]
        beyond = logits < least[:, None]
        # At the cut, of equal ones, the first count as best; those that are barred needn't be ranked.
        tied = np.flatnonzero(np.isfinite(least) & ((~beyond).sum(axis=1) > count))
        beyond[tied] = True
        beyond[tied[:, None], top_k(logits[tied], count)] = False
        logits[beyond] = -np.inf
        possible = drawn_from(logits, tau[:, None])
        if random is not None:
            chosen[:] = (possible + random.gumbel(size=possible.shape)).argmax(axis=1)
        log_probs[:, step] = possible[rows, chosen]
        barred[rows, chosen] = True
        if step + 1 < picks.shape[1]:
            current = current.update(pool.context[chosen])
    return picks, log_probs


def described(queries: FloatArray, state: State[Any], pool: PoolVectors, picks: IntArray) -> DoubleArray:
    """The predictors of the outcome, (B, 2k): each pick's logit in its state, and its logit for the question alone."""
    start = current = state.start(queries)
    columns = []
    for step, chosen in enumerate(picks.T):
        if step:
            current = current.update(pool.context[picks[:, step - 1]])
        candidate = pool.candidate[chosen]
        columns += [np.einsum("bd,bd->b", candidate, each.vector()) for each in (current, start)]
    return np.stack(columns, axis=1).astype(np.float64)


def predicted(features: DoubleArray, outcomes: DoubleArray, *others: DoubleArray) -> list[DoubleArray]:
    """Predictions for `others` (M, F) by a ridge regression of outcomes (B,) on features (B, F)."""
    mean, spread = features.mean(axis=0), features.std(axis=0)
    spread[spread == 0] = 1.0
    scaled = (features - mean) / spread
    squares = scaled.T @ scaled + _RIDGE * np.eye(scaled.shape[1])
    slopes = np.linalg.solve(squares, scaled.T @ (outcomes - outcomes.mean()))
    return [outcomes.mean() + (each - mean) / spread @ slopes for each in others]


def weights(new: DoubleArray, logged: DoubleArray) -> DoubleArray:
    """(B,) clipped weights of sequences, from log-probabilities (B, k) under the new policy and the logged ones."""
    with np.errstate(over="ignore"):
        ratios: DoubleArray = np.exp((new - logged).sum(axis=1))
    return np.minimum(ratios, CLIP)


def gains(weight: DoubleArray, outcomes: DoubleArray, expected: DoubleArray, expected_new: DoubleArray) -> DoubleArray:
    """How much more the new policy earns on each question, (B,); the mean is the doubly robust estimate."""
    return expected_new + weight * (outcomes - expected) - outcomes


def halves(questions: IntArray, seed: int) -> BoolArray:
    """Which of the questions (B,), given by number, are in the first half, (B,); equal ones share a half."""
    numbers = np.unique(questions)
    first = np.random.default_rng(seed).permutation(numbers)[: (len(numbers) + 1) // 2]
    return np.isin(questions, first)
