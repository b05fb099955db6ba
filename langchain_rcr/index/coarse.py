"""A matrix in small whole numbers, read in a fraction of the time: which few of its rows can be the best for a state.

With c = ĉ + e and s = ŝ + f, where ĉ and ŝ are rounded, c · s is at most |e| |s| + |ĉ| |f| away from ĉ · ŝ.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_rcr.basics.rows import TRIALS, BoolArray, FloatArray, IntArray, product

_AT_ONCE = 4096
"""Rows rounded at once."""
_CACHED = 1 << 19
"""Products made at once: they stay in a core's cache while they are looked at."""
_OPEN = 64
"""Where more rows than these, and than one in so many, may be the best, none are told: to look at all is faster."""
_HIDDEN = int(np.iinfo(np.int32).min)
_NOTHING = 200
"""What a hidden score must lie below the others, in units of τ, to count nothing in a sum."""

_ROUGH = 0.5
"""How far off rounded logits may be at most, in units of τ, to be summed: most are off by a tenth or less of that."""

Places: TypeAlias = tuple[IntArray, IntArray]
"""States (M,), and a row for each."""


class Near(NamedTuple):
    """The only rows that can be the best for each of B states; at least one for each.

    Args:
        whose: (M,) the state, ascending.
        keys: (M,) the row, ascending for each state.
        logits: (M,) as rounded numbers have it.
        log_partition: (B,) likewise, off by some thousandth; None where it wasn't wanted.
    """

    whose: IntArray
    keys: IntArray
    logits: NDArray[np.float64]
    log_partition: NDArray[np.float64] | None


class Coarse(ABC):
    """The rows of a dense matrix, rounded when they are asked for more than `TRIALS` times. Safe from threads.

    Rounding takes as long as some ten questions save; a pool that changes with each call would do it for each.
    """

    most: ClassVar[int]
    """The largest whole number."""

    def __init__(self) -> None:
        self._lock, self._asked, self._held = threading.Lock(), 0, False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def ready(self, rows: FloatArray) -> bool:
        """Whether the nearest rows can be asked for; makes what that needs of (N, D) rows, the same in each call.

        Args:
            rows: finite.
        """
        if not self._held and self._lock.acquire(blocking=False):
            try:
                self._asked += 1
                if self._asked > TRIALS and not self._held and self.possible():
                    self._round(rows)
                    self._held = True
            finally:
                self._lock.release()
        return self._held

    @classmethod
    @abstractmethod
    def possible(cls) -> bool:
        """Whether this machine has what it takes."""

    @abstractmethod
    def hold(self, rows: int, dim: int) -> Callable[[FloatArray], None]:
        """What takes in the rounded rows, some at a time."""

    def _round(self, rows: FloatArray) -> None:
        self._step, hold = _step(rows, self.most), self.hold(*rows.shape)
        squares = lengths = 0.0
        for first in range(0, len(rows), _AT_ONCE):
            part = rows[first : first + _AT_ONCE]
            codes = np.rint(part / self._step)
            hold(codes)
            near = codes * self._step
            squares = max(squares, np.square(part - near).sum(axis=1).max(initial=0))
            lengths = max(lengths, np.square(near).sum(axis=1).max(initial=0))
        self._error, self._longest = np.sqrt(squares), np.sqrt(lengths)

    def _rounded(self, state: FloatArray) -> tuple[FloatArray, float, float]:
        """A state (D,) in whole numbers, what a product of such numbers stands for, and how far off it is at most."""
        step = _step(state, self.most)
        codes = np.rint(state / step)
        off = self._error * np.linalg.norm(state) + self._longest * np.linalg.norm(state - codes * step)
        return codes, float(self._step * step), float(off)


class CoarseScan(Coarse):
    """Rows in 8 bits, for a state alone. FAISS, which is in an extra, keeps them: without it there are none."""

    most = 127

    @classmethod
    def possible(cls) -> bool:
        """See `Coarse.possible`."""
        return find_spec("faiss") is not None

    def hold(self, rows: int, dim: int) -> Callable[[FloatArray], None]:
        """See `Coarse.hold`."""
        import faiss

        self._index = faiss.IndexScalarQuantizer(
            dim, faiss.ScalarQuantizer.QT_8bit_direct_signed, faiss.METRIC_INNER_PRODUCT
        )
        return self._index.add

    def nearest(self, state: FloatArray, count: int) -> tuple[IntArray, float]:
        """Keys (M,) of the `count` rows that seem best for a state (D,), and what no other row's logit is above."""
        codes, unit, off = self._rounded(state)
        scores, keys = self._index.search(codes[None], count)
        found: IntArray = keys[0][keys[0] >= 0]
        return found, float(scores[0, -1] * unit + off) if len(found) == count else -np.inf


class CoarseProduct(Coarse):
    """Rows in 7 bits, for several states together, by PyTorch's product of whole numbers.

    With 8 bits that product overflows on processors without instructions for it.
    """

    most = 63
    _least: ClassVar[int | None] = None

    @classmethod
    def possible(cls) -> bool:
        """See `Coarse.possible`."""
        return cls.least() > 0

    @classmethod
    def least(cls) -> int:
        """For how few states the product is faster than that of float32; 0: for none. Tried once, in some 20 ms."""
        if CoarseProduct._least is None:
            CoarseProduct._least = 0
            with suppress(AttributeError, RuntimeError):  # PyTorch promises nothing of this function
                CoarseProduct._least = next((count for count in (1, 4) if _faster(count)), 0)
        return CoarseProduct._least

    def hold(self, rows: int, dim: int) -> Callable[[FloatArray], None]:
        """See `Coarse.hold`."""
        self._codes = torch.empty((rows, dim), dtype=torch.int8)
        at = 0

        def take(codes: FloatArray) -> None:
            nonlocal at
            self._codes[at : at + len(codes)] = torch.from_numpy(codes)
            at += len(codes)

        return take

    def nearest(
        self,
        states: FloatArray,
        slack: FloatArray,
        exclude: Places,
        masked: Places,
        allowed: BoolArray | None,
        tau: float | None,
    ) -> Near | None:
        """The rows that can be the best for each of B states.

        Args:
            states: (B, D) float32.
            slack: (B,) how far below the best a logit still counts as the same.
            exclude: states (M,) and rows (M,) that may not be found for them.
            masked: likewise, but these rows are in the log partition.
            allowed: (N,) which rows may be found at all; None: all.
            tau: τ, where the log partition is wanted, too.

        Returns:
            None where a state has no candidate, or rounding leaves too many.
        """
        each = [self._rounded(state) for state in states]
        codes = torch.from_numpy(np.stack([one for one, _, _ in each]).astype(np.int8))
        units, off = np.array([unit for _, unit, _ in each]), np.array([off for _, _, off in each])
        window = np.minimum(np.ceil((2 * off + slack) / units) + 1, -_HIDDEN).astype(np.int64)
        size = max(1, _CACHED // len(states))
        excluded, masks = _by_block(exclude, size), _by_block(masked, size)
        sums = None if tau is None else _LogSums(units / tau)
        if tau is not None and (off.max() > _ROUGH * tau or (units / tau).min() * -_HIDDEN < _NOTHING):
            return None
        top, left = np.full(len(states), _HIDDEN, dtype=np.int64), len(states) * max(_OPEN, len(self._codes) // _OPEN)
        floor, found = top, list[tuple[IntArray, IntArray, IntArray]]()
        for first in range(0, len(self._codes), size):
            scores = torch._int_mm(codes, self._codes[first : first + size].t()).numpy()
            scores[excluded(first)] = _HIDDEN
            if allowed is not None:
                np.copyto(scores, _HIDDEN, where=~allowed[first : first + size])
            if sums is not None:
                sums.add(scores)
            scores[masks(first)] = _HIDDEN
            top = np.maximum(top, scores.max(axis=1))
            floor = np.maximum(top - window, _HIDDEN + 1).astype(np.int32)
            whose, keys = np.divmod(np.flatnonzero(scores >= floor[:, None]), scores.shape[1])
            found.append((whose, keys + first, scores[whose, keys]))
            left -= len(keys)
            if left < 0:
                return None
        whose, keys, values = map(np.concatenate, zip(*found, strict=True))
        near = np.flatnonzero(values >= floor[whose])
        near = near[np.argsort(whose[near], kind="stable")]
        whose = whose[near]
        if not np.bincount(whose, minlength=len(states)).all():
            return None
        return Near(whose, keys[near], values[near] * units[whose], None if sums is None else sums.total())


class _LogSums:
    """Log Σ exp(scale · score) of B states over scores that come block by block.

    Args:
        scale: (B,); so large that hidden scores count nothing.
    """

    def __init__(self, scale: NDArray[np.float64]) -> None:
        self._scale = scale
        self._top, self._sum = np.full(len(scale), -np.inf), np.zeros(len(scale))

    def add(self, scores: NDArray[np.int32]) -> None:
        """More scores (B, M)."""
        top = np.maximum(self._top, scores.max(axis=1) * self._scale)
        part = scores.astype(np.float32)
        part *= self._scale[:, None].astype(np.float32)
        part -= top[:, None].astype(np.float32)
        np.exp(part, out=part)
        self._sum = self._sum * np.exp(self._top - top) + part.sum(axis=1)
        self._top = top

    def total(self) -> NDArray[np.float64]:
        """(B,)."""
        total: NDArray[np.float64] = self._top + np.log(self._sum)
        return total


def _by_block(places: Places, size: int) -> Callable[[int], Places]:
    """States and columns of the places in the block of so many rows that begins at one."""
    order = np.argsort(places[1])
    whose, rows = places[0][order], places[1][order]

    def of(first: int) -> Places:
        some = slice(*np.searchsorted(rows, (first, first + size)))
        return whose[some], rows[some] - first

    return of


def _step(numbers: FloatArray, most: int) -> np.float32:
    """What one unit of the whole numbers stands for."""
    return np.float32(np.abs(numbers).max(initial=0) / most or 1)


def _faster(count: int) -> bool:
    """Whether this machine multiplies whole numbers faster than float32, for so many states."""
    rows, states = torch.ones((8192, 384), dtype=torch.int8), torch.ones((count, 384), dtype=torch.int8)
    exact, some = rows.float().numpy(), states.float().numpy()
    products: tuple[Callable[[], Any], ...] = (lambda: torch._int_mm(states, rows.t()), lambda: product(some, exact))
    spent = [[0.0] * 5 for _ in products]
    for turn in range(5):
        for times, multiply in zip(spent, products, strict=True):
            start = time.perf_counter()
            multiply()
            times[turn] = time.perf_counter() - start
    return min(spent[0]) < min(spent[1])
