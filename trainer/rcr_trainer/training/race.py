"""A race: which of a policy's variants a language model answers best with, for few answers.

Successive halving (Karnin, Koren and Somekh, 2013; Jamieson and Talwalkar, 2016) on paired questions: all variants are
asked about the first questions, the better half of them about the next ones, and so on. First each change by itself,
then the best ones together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Variant: TypeAlias = Mapping[str, Any]
"""What differs from the policy as it is."""
FloatArray = NDArray[np.float64]

TOGETHER = 3
"""Changes of the first part that are tried together in the second."""


class Winner(NamedTuple):
    """What a race has found.

    Args:
        variant: {}: the policy as it is.
        before: its mean reward on the questions of the last round, before the change.
        after: with it.
        questions: how many there were.
    """

    variant: Variant
    before: float
    after: float
    questions: int


def race(
    changes: Sequence[Variant], earned: Callable[[Variant, slice], FloatArray], questions: int, answers: int
) -> Winner:
    """Find the variant that earns most, or one that differs less and earns as much.

    Args:
        changes: of one number each, the mildest first.
        earned: the rewards (n,) of a variant on some of the questions; NaN: there is none.
        questions: how many there are, in random order.
        answers: rewards asked for at most.
    """
    before = np.full(questions, np.nan)
    alone = _halved(list(changes), earned, before, answers // 2, TOGETHER)
    best = [variant for variant, gains in alone if _mean(gains) > 0]
    joined = [
        {name: value for variant in some for name, value in variant.items()}
        for size in range(1, len(best) + 1)
        for some in combinations(best, size)
        if len({name for variant in some for name in variant}) == len(some)
    ]
    finalists = [({}, np.zeros(1)), *_halved([*joined], earned, before, answers - answers // 2, 1)]
    winner, gains = finalists[mildest([gains for _, gains in finalists])]
    asked = before[: len(finalists[-1][1])]
    return Winner(winner, _mean(asked), _mean(asked) + _mean(gains), len(asked))


def mildest(gains: Sequence[FloatArray]) -> int:
    """The first that gains no less than the best does, but for one standard error of that.

    The one-standard-error rule (Breiman, Friedman, Olshen and Stone, 1984): held-out questions can't tell these from
    each other, and what changes least does least harm to questions unlike them.

    Args:
        gains: of each variant, the mildest first, what it earns on each question beyond what is there; NaN: no answer.

    Returns:
        Its place.
    """
    known = [each[np.isfinite(each)] for each in gains]
    means = [each.mean() if len(each) else -math.inf for each in known]
    best = known[int(np.argmax(means))]
    error = best.std(ddof=1) / math.sqrt(len(best)) if len(best) > 1 else 0.0
    return next(at for at, mean in enumerate(means) if mean >= max(means) - error)


def _halved(
    variants: list[Variant], earned: Callable[[Variant, slice], FloatArray], before: FloatArray, answers: int, last: int
) -> list[tuple[Variant, FloatArray]]:
    """The last variants of a race, in their order, with what each gains on every question that was asked.

    What the policy as it is earns on these is put into `before`.
    """
    rounds, stop = max(1, math.ceil(math.log2(max(1, len(variants) / last)))), 0
    gains = {at: np.empty(0) for at in range(len(variants))}
    for number in range(rounds):
        start, stop = stop, min(len(before), stop + answers // rounds // (len(gains) + 1))
        asked = slice(start, stop)
        if start < stop:
            before[asked] = earned({}, asked)
            gains = {at: np.append(old, earned(variants[at], asked) - before[asked]) for at, old in gains.items()}
        count = last if number == rounds - 1 else max(last, math.ceil(len(gains) / 2))
        best = sorted(gains, key=lambda at: _mean(gains[at]), reverse=True)[:count]
        gains = {at: gains[at] for at in sorted(best)}
    return [(variants[at], each) for at, each in gains.items()]


def _mean(values: FloatArray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else -math.inf
