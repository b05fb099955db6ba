"""A large matrix in 8 bits, which are read in a quarter of the time: which few of its rows can be the best for a state.

With c = ĉ + e and s = ŝ + f, where ĉ and ŝ are rounded, c · s is at most |e| |s| + |ĉ| |f| away from ĉ · ŝ.
"""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import Any

import numpy as np

from langchain_rcr.basics.rows import TRIALS, FloatArray, IntArray

_AT_ONCE = 4096
"""Rows rounded at once."""
_MOST = 127
"""The largest whole number."""


class Coarse:
    """The rows of a dense matrix, rounded when they are asked for more than `TRIALS` times. Safe from threads.

    Rounding takes as long as some ten questions save; a pool that changes with each call would do it for each. FAISS,
    which is in an extra, keeps and scans the rounded rows: without it there are none.
    """

    def __init__(self) -> None:
        self._lock, self._asked, self._held = threading.Lock(), 0, False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def ready(self, rows: FloatArray) -> bool:
        """Whether the nearest rows can be asked for; rounds (N, D) finite rows, the same in each call."""
        if not self._held and self._lock.acquire(blocking=False):
            try:
                self._asked += 1
                if self._asked > TRIALS and not self._held and find_spec("faiss") is not None:
                    self._round(rows)
                    self._held = True
            finally:
                self._lock.release()
        return self._held

    def _round(self, rows: FloatArray) -> None:
        import faiss

        self._index = faiss.IndexScalarQuantizer(
            rows.shape[1], faiss.ScalarQuantizer.QT_8bit_direct_signed, faiss.METRIC_INNER_PRODUCT
        )
        self._unit = _unit(rows)
        squares = lengths = 0.0
        for first in range(0, len(rows), _AT_ONCE):
            part = rows[first : first + _AT_ONCE]
            codes = np.rint(part / self._unit)
            self._index.add(codes)
            near = codes * self._unit
            squares = max(squares, np.square(part - near).sum(axis=1).max(initial=0))
            lengths = max(lengths, np.square(near).sum(axis=1).max(initial=0))
        self._error, self._longest = np.sqrt(squares), np.sqrt(lengths)

    def nearest(self, state: FloatArray, count: int) -> tuple[IntArray, float]:
        """Keys (M,) of the `count` rows that seem best for a state (D,), and what no other row's logit is above."""
        unit = _unit(state)
        codes = np.rint(state / unit)
        off = self._error * np.linalg.norm(state) + self._longest * np.linalg.norm(state - codes * unit)
        scores, keys = self._index.search(codes[None], count)
        found: IntArray = keys[0][keys[0] >= 0]
        return found, float(scores[0, -1] * (self._unit * unit) + off) if len(found) == count else -np.inf


def _unit(numbers: FloatArray) -> np.float32:
    """What one unit of the whole numbers stands for."""
    return np.float32(np.abs(numbers).max(initial=0) / _MOST or 1)
