"""95 % intervals of paired differences by a cluster bootstrap: whole programs are drawn, with all their questions.

Questions that ask for one program succeed and fail together. Taken for independent draws, they made intervals on
text-to-SQL a third as wide as these.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from rcr_trainer.coverage import row_blocks
from rcr_trainer.evaluation.report import OURS, Interval

FEW_PROGRAMS = 30
"""With fewer different programs there is no interval: the percentiles of a bootstrap of few clusters are too narrow."""
DRAWS = 2000


def cluster_bootstrap(
    values: np.ndarray, clusters: Sequence[Hashable], draws: int = DRAWS, seed: int = 0
) -> np.ndarray:
    """Means over questions when their clusters are drawn anew: each time as many as there are, with replacement.

    Args:
        values: (B, M) numbers of B questions in M comparisons, all of which see the same draws.
        clusters: the cluster of each question; it is drawn with all its questions.
        draws: how often.
        seed: of the draws.

    Returns:
        (draws, M) means over the questions drawn.
    """
    numbers: dict[Hashable, int] = {}
    members = np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])
    sums = np.zeros((len(numbers), values.shape[1]))
    np.add.at(sums, members, values)
    sizes = np.bincount(members)
    rng, even = np.random.default_rng(seed), np.full(len(numbers), 1 / len(numbers))
    means = np.empty((draws, values.shape[1]))
    for block in row_blocks(draws, len(numbers)):
        times = rng.multinomial(len(numbers), even, size=len(means[block])).astype(np.float64)  # each cluster is drawn
        means[block] = times @ sums / (times @ sizes)[:, None]
    return means


def paired_intervals(
    rates: Mapping[str, np.ndarray], programs: Sequence[Hashable], ours: str = OURS
) -> dict[str, Interval]:
    """The interval of ours less each other selector, in points.

    Args:
        rates: by selector (B,) rates from 0 to 1, of the same questions.
        programs: of each question, the gold program's key.
        ours: the selector that the others are compared with.

    Returns:
        By selector, ours excepted, the 2.5th and the 97.5th percentile of the bootstrap; nothing without ours, or with
        fewer than FEW_PROGRAMS different programs.
    """
    others = [name for name in rates if name != ours]
    if ours not in rates or not others or len(set(programs)) < FEW_PROGRAMS:
        return {}
    differences = np.stack([rates[ours] - rates[name] for name in others], axis=1)
    low, high = 100 * np.quantile(cluster_bootstrap(differences, programs), [0.025, 0.975], axis=0)
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(others)}
