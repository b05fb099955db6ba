"""Large sparse pools, searched approximately: by the columns that a state needs most.

The few columns in which a state is largest make up most of the best rows' logits, and reading these columns alone takes
a fraction of the time. The rows that are best by them are then looked at in full (after Turtle and Flood, "Query
evaluation: strategies and optimizations", 1995, without the proof that no other row is better).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.rows import FloatArray, IntArray, SparseRows, product
from langchain_rcr.index.base import BEST
from langchain_rcr.index.memory import MatrixTable
from langchain_rcr.index.ranking import in_order, log_sums, nothing, slack

_READ = 0.3
"""Numbers that a step reads for each row of the pool, of some 40 that a row has."""
_SAMPLED = 64
"""Which rows are the best `BEST`, about, is told from one row in so many. Of these the logits are worked out, and the
picks' add up to some 0.4 % less than the exact ones do (trials: a million drawn examples, 60,000 of COVR's)."""
_RARE = 10
"""Where fewer than one row in ten can be found, all of these are looked at."""


class ColumnTable(MatrixTable):
    """Approximate search of (N, D) sparse matrices that are large; exact search of others. See `Table`.

    Partitions sum over the best rows that were looked at.
    """

    _approximate = False

    def opened(self) -> ColumnTable:
        """See `Table.opened`."""
        table = super().opened()
        table._approximate = table._steps is not None and _RARE * self.size >= len(self)
        return table

    def found(
        self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None
    ) -> tuple[IntArray, FloatArray, NDArray[np.float64] | None]:
        """See `Table.found`."""
        rows = self._candidate.rows
        if not (self._approximate and isinstance(rows, SparseRows)):
            return super().found(states, t, exclude, tau)
        (keys, logits), totals = nothing(len(states), t), np.full(len(states), -np.inf)
        margin, short = slack(states, self._longest), list[int]()
        for at, state in enumerate(states):
            near = self._near(rows, state, max(BEST, 4 * t))
            near = near[~np.isin(near, exclude[at])]
            values = product(state[None], rows.select(near))[0]
            if np.count_nonzero(values > 0) < t:  # what is needed is rare, or too frequent to be read
                short.append(at)
                continue
            keys[at], logits[at] = in_order(near, values, float(margin[at]), t)
            if tau is not None:
                totals[at] = log_sums(values[None], tau)[0]
        if short:
            keys[short], logits[short], others = super().found(states[short], t, exclude[short], tau)
            totals[short] = totals[short] if others is None else others
        return keys, logits, None if tau is None else totals

    def _near(self, rows: SparseRows, state: FloatArray, count: int) -> IntArray:
        """Keys of some `count` rows that are the best by the state's largest columns."""
        scores = rows.partly(state, int(_READ * len(rows)))
        if self._allowed is not None:
            scores *= self._allowed
        some = scores[:: max(1, min(_SAMPLED, len(rows) // count))]
        best = np.sort(some[some > 0])[-max(1, count * len(some) // len(rows)) :]
        return np.flatnonzero(scores >= best[0]) if len(best) else np.empty(0, dtype=np.int64)
