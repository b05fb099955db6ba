"""The measures as functions of arrays, and bootstrap intervals of their differences.

Structures are sparse binary matrices: gold (B, S) for B queries, pool (N, S); picks are positions (B, k). The bootstrap
draws programs with all their questions, since the questions of one program succeed and fail together. Treating them as
independent made intervals on text-to-SQL a third as wide as these. Likewise the questions of one database, where there
are enough databases.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from rcr_trainer.data.arrays import distinct, row_blocks
from rcr_trainer.evaluation.report import OURS, Interval

FEW_PROGRAMS = 30
"""With fewer different programs there is no interval: percentiles of a bootstrap over few clusters are too narrow."""
DRAWS = 2000


def cluster_bootstrap(
    values: np.ndarray, clusters: Sequence[Hashable], draws: int = DRAWS, seed: int = 0
) -> np.ndarray:
    """Means (draws, M) over questions when their clusters are resampled: as many as there are, with replacement.

    The values (B, M) are those of B questions in M comparisons, which all see the same draws.
    """
    names, members = distinct(clusters)
    sums = np.zeros((len(names), values.shape[1]))
    np.add.at(sums, members, values)
    sizes = np.bincount(members)
    rng, even = np.random.default_rng(seed), np.full(len(names), 1 / len(names))
    means = np.empty((draws, values.shape[1]))
    for block in row_blocks(draws, len(names)):
        times = rng.multinomial(len(names), even, size=len(means[block])).astype(np.float64)  # draws of each cluster
        means[block] = times @ sums / (times @ sizes)[:, None]
    return means


def interval_of(values: np.ndarray, clusters: Sequence[Hashable]) -> np.ndarray:
    """(2, M) the 2.5th and 97.5th percentiles of the bootstrapped means of values (B, M)."""
    ends: np.ndarray = np.quantile(cluster_bootstrap(values, clusters), [0.025, 0.975], axis=0)
    return ends


def paired_intervals(
    rates: Mapping[str, np.ndarray], programs: Sequence[Hashable], homes: Sequence[Hashable] = ()
) -> dict[str, Interval]:
    """By selector, the 95 % interval of ours minus its rates (B,), from 0 to 1, in points.

    Questions with the same one of B programs are drawn together or, if FEW_PROGRAMS or more databases (`homes`) differ,
    those of a database. There are no intervals without ours, or for fewer than FEW_PROGRAMS different programs.
    """
    others = [name for name in rates if name != OURS]
    if OURS not in rates or not others or len(set(programs)) < FEW_PROGRAMS:
        return {}
    clusters = homes if len(set(homes)) >= FEW_PROGRAMS else programs
    ends = 100 * interval_of(np.stack([rates[OURS] - rates[name] for name in others], axis=1), clusters)
    return {name: (float(low), float(high)) for name, (low, high) in zip(others, ends.T, strict=True)}
