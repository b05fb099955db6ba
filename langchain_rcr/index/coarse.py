"""A matrix in 8 bits, read in a third of the time: which few of its rows can be the best for a state."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import Any

import numpy as np

from langchain_rcr.rows import TRIALS, FloatArray, IntArray

_TOP = 127


class Coarse:
    """The rows of a dense matrix in 8 bits, made when they are asked for more than `TRIALS` times. Safe from threads.

    Making them takes as long as some ten questions save; a pool that changes with each call would do it for each.
    They take a quarter of the matrix's memory. FAISS, which is in an extra, keeps them: without it there are none.
    """

    def __init__(self) -> None:
        self._lock, self._asked = threading.Lock(), 0
        self._index: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Coarse, ()

    def ready(self, rows: FloatArray) -> bool:
        """Whether `nearest` can be asked; makes what it needs of (N, D) rows, the same in each call.

        Args:
            rows: finite.
        """
        if self._index is None and self._lock.acquire(blocking=False):
            try:
                self._asked += 1
                if self._asked > TRIALS and self._index is None and find_spec("faiss"):
                    self._index = self._made(rows)
            finally:
                self._lock.release()
        return self._index is not None

    def _made(self, rows: FloatArray) -> Any:
        import faiss

        quantizer = faiss.ScalarQuantizer.QT_8bit_direct_signed
        index = faiss.IndexScalarQuantizer(rows.shape[1], quantizer, faiss.METRIC_INNER_PRODUCT)
        self._step = _step(rows)
        squares = lengths = 0.0
        for part in np.array_split(rows, len(rows) // 4096 + 1):
            codes = np.rint(part / self._step)
            index.add(codes)
            near = codes * self._step
            squares = max(squares, np.square(part - near).sum(axis=1).max(initial=0))
            lengths = max(lengths, np.square(near).sum(axis=1).max(initial=0))
        self._error, self._longest = np.sqrt(squares), np.sqrt(lengths)
        return index

    def nearest(self, state: FloatArray, count: int) -> tuple[IntArray, float]:
        """Keys (M,) of the `count` rows that seem best for a state (D,), and what no other row's logit is above.

        With c = ĉ + e and s = ŝ + f in 8 bits, c · s is at most |e| |s| + |ĉ| |f| away from ĉ · ŝ.
        """
        step = _step(state)
        codes = np.rint(state / step)
        scores, keys = self._index.search(codes[None], count)
        off = self._error * np.linalg.norm(state) + self._longest * np.linalg.norm(state - codes * step)
        found: IntArray = keys[0][keys[0] >= 0]
        return found, float(scores[0, -1] * self._step * step + off) if len(found) == count else -np.inf


def _step(numbers: FloatArray) -> np.float32:
    """What one unit of the 8 bits stands for."""
    return np.float32(np.abs(numbers).max(initial=0) / _TOP or 1)
