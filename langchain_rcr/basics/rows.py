"""A pool's matrices, dense or sparse (vectors, bags of n-grams), and matrices that grow at the end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from langchain_rcr.basics.extras import installed
from langchain_rcr.errors import PoolError

if TYPE_CHECKING:
    from scipy.sparse import csc_array, csr_array

FloatArray: TypeAlias = NDArray[np.float32]
DoubleArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]

_LEAST = 16
"""A growing matrix's initial room, in rows."""
_TELLING, _RARE = 0.05, 0.001
"""`partly` reads columns in which a state has at least the first share of its largest number. Of equally large ones,
those that fewer rows have come first, down to the second share of the rows."""
_COUNTED = np.iinfo(np.int32).max
"""The most numbers in a sparse matrix: about 40 million examples."""
_BLOCK = 1024
"""Rows of a dense matrix multiplied at a time: products with dozens of states fit a core's cache."""
LARGE = 1 << 21
"""From this many numbers (8 MB) on, a matrix doesn't fit a core's cache, so reading it dominates a product's cost."""
TRIALS = 2
"""Questions before a matrix gets another layout that is faster to read: as many as may come in one call."""
_FEW = 4
"""Up to this many states, a large dense matrix is summed plainly: BLAS reads it at a third of the speed. Also the most
rows of a sparse one that are written out one by one."""


@dataclass(frozen=True)
class SparseRows:
    """An (N, D) matrix of mostly zeros in CSR form.

    SciPy, if installed, multiplies in half the time, and in a tenth of it with many states.
    """

    starts: NDArray[np.int32]  # (N + 1,), where each row starts in columns and values
    columns: NDArray[np.int32]
    values: FloatArray
    dim: int  # D

    @classmethod
    def of(cls, rows: Sequence[Mapping[int, float]], dim: int) -> SparseRows:
        """(N, D) from each row's numbers, by column."""
        starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        columns = np.fromiter(itertools.chain.from_iterable(rows), np.int32, count=starts[-1])
        values = itertools.chain.from_iterable(row.values() for row in rows)
        return cls(starts, columns, np.fromiter(values, np.float32, count=starts[-1]), dim)

    def __reduce__(self) -> tuple[Any, ...]:
        return SparseRows, (self.starts, self.columns, self.values, self.dim)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, D)."""
        return len(self), self.dim

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, keys: IntArray) -> FloatArray:
        """Rows at M positions, dense: (M, D)."""
        if len(keys) > _FEW:
            return np.asarray(self.select(keys))
        out = np.zeros((len(keys), self.dim), dtype=np.float32)
        for line, key in zip(out, keys.tolist(), strict=True):
            some = slice(self.starts[key], self.starts[key + 1])
            line[self.columns[some]] = self.values[some]
        return out

    def __iter__(self) -> Iterator[FloatArray]:
        """The rows, dense: (D,) each."""
        for at in range(len(self)):
            yield self[np.array([at])][0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        out = np.zeros(self.shape, dtype=dtype or np.float32)
        out[self.owner, self.columns] = self.values
        return out

    @property
    def owner(self) -> IntArray:
        """The row of each value."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def is_sound(self, count: int) -> bool:
        """Whether these are `count` rows in CSR form, of whatever a stranger's file may hold."""
        starts, columns, values = self.starts, self.columns, self.values
        kinds = starts.dtype == columns.dtype == np.int32 and starts.ndim == columns.ndim == values.ndim == 1
        if not kinds or len(starts) != count + 1 or starts[0] != 0 or not starts[-1] == len(columns) == len(values):
            return False
        inside = not len(columns) or 0 <= columns.min() <= columns.max() < self.dim
        return bool(inside and (np.diff(starts) >= 0).all())

    def select(self, keys: IntArray) -> SparseRows:
        """Rows at M positions, in that order."""
        if len(self.values) >= LARGE and self._csr is not None:
            some = self._csr[keys]
            return SparseRows(some.indptr, some.indices, some.data, self.dim)
        lengths = self.starts[keys + 1] - self.starts[keys]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        flat = np.arange(starts[-1]) + np.repeat(self.starts[keys] - starts[:-1], lengths)
        return SparseRows(starts, self.columns[flat], self.values[flat], self.dim)

    def beside(self, others: SparseRows) -> SparseRows:
        """These columns beside those of (N, D'): (N, D + D')."""
        lengths = np.stack([np.diff(self.starts), np.diff(others.starts)], axis=1)
        mine = np.repeat(np.tile([True, False], len(self)), lengths.ravel())
        columns, values = np.empty(len(mine), np.int32), np.empty(len(mine), np.float32)
        columns[mine], values[mine] = self.columns, self.values
        columns[~mine], values[~mine] = others.columns + self.dim, others.values
        return SparseRows(self.starts + others.starts, columns, values, self.dim + others.dim)

    def only(self, kept: BoolArray) -> SparseRows:
        """(N, D) with some of the numbers (`kept`), and zeros for the others."""
        starts = np.concatenate([[0], np.cumsum(kept)])[self.starts].astype(self.starts.dtype)
        return SparseRows(starts, self.columns[kept], self.values[kept], self.dim)

    def above(self, others: SparseRows) -> SparseRows:
        """These rows and then others (M, D): (N + M, D)."""
        return SparseRows(
            np.concatenate([self.starts, self.starts[-1] + others.starts[1:]]),
            np.concatenate([self.columns, others.columns]),
            np.concatenate([self.values, others.values]),
            self.dim,
        )

    def product(self, states: FloatArray) -> FloatArray:
        """Inner products (B, N) of states (B, D) with all rows."""
        if self._csr is None:
            return np.stack([self._alone(state) for state in states])
        # One state alone is faster.
        scores: FloatArray = (self._csr @ states[0])[None] if len(states) == 1 else (self._csr @ states.T).T
        return np.ascontiguousarray(scores)

    def _alone(self, state: FloatArray) -> FloatArray:
        """Inner products (N,) of a state (D,) with all rows."""
        columns, filled, firsts = self._layout
        if not len(firsts):
            return np.zeros(len(self), dtype=np.float32)
        products = state.take(columns, mode="clip")  # without bounds checks
        products *= self.values
        sums: FloatArray = np.add.reduceat(products, firsts)
        if len(sums) == len(self):
            return sums
        out = np.zeros(len(self), dtype=np.float32)
        out[filled] = sums
        return out

    def times(self, matrix: NDArray[np.float32]) -> FloatArray:
        """The matrix product (N, C) with a dense matrix (D, C)."""
        out = np.zeros((len(self), matrix.shape[1]), dtype=np.float32)
        for line, (start, end) in zip(out, itertools.pairwise(self.starts.tolist()), strict=True):
            np.dot(self.values[start:end], matrix[self.columns[start:end]], out=line)
        return out

    def mixed(self, columns: NDArray[np.integer[Any]], weights: FloatArray) -> FloatArray:
        """The sum (N,) of some columns (C,), each times its weight (C,); reads only these."""
        if not len(columns):
            return np.zeros(len(self), dtype=np.float32)
        starts, rows, values = self._by_column
        parts = [slice(*ends) for ends in zip(starts[columns].tolist(), starts[columns + 1].tolist(), strict=True)]
        products = np.concatenate([values[part] for part in parts])
        products *= np.repeat(weights, starts[columns + 1] - starts[columns])
        sums = np.bincount(np.concatenate([rows[part] for part in parts]), products, minlength=len(self))
        return sums.astype(np.float32)

    def dots(self, keys: IntArray, state: FloatArray) -> FloatArray:
        """Inner products (M,) of rows with a state (D,), summed in float64."""
        some = self.select(keys)
        sums = np.bincount(some.owner, some.values * state[some.columns].astype(np.float64), minlength=len(keys))
        return sums.astype(np.float32)

    def worth_following(self) -> bool:
        """Whether to `follow`: if the matrix is large and has been asked more than `TRIALS` questions.

        Laying out its columns takes longer than a question, so it doesn't pay for a pool that keeps changing.
        """
        asked = self.__dict__["_asked"] = self.__dict__.get("_asked", 0) + 1
        return bool(asked > TRIALS and len(self.values) >= LARGE)

    def follow(self, scores: FloatArray, change: FloatArray) -> None:
        """Update inner products (N,) after `change` (D,) was added to the vector; reads only changed columns."""
        scores += self._over(np.flatnonzero(change), change)

    def partly(self, state: FloatArray, most: int) -> FloatArray:
        """Inner products (N,) with a state (D,) over columns in which it is large and positive and that few rows have.

        It reads at most `most` numbers in all, and skips columns that exceed what is left.
        """
        large, columns = np.flatnonzero(state > _TELLING * state.max()), list[int]()
        order = np.argsort(-state[large] / np.sqrt(self._counts[large] + _RARE * len(self)))
        for column, count in zip(large[order].tolist(), self._counts[large[order]].tolist(), strict=True):
            if count <= most:
                columns.append(column)
                most -= count
        return self._over(np.array(columns, dtype=np.int64), state)

    def _over(self, columns: IntArray, state: FloatArray) -> FloatArray:
        """Inner products (N,) with a state (D,) over some columns (C,)."""
        if self._csc is None:
            return self.mixed(columns, state[columns])
        sums: FloatArray = self._csc[:, columns] @ state[columns]
        return sums

    @cached_property
    def _counts(self) -> IntArray:
        """How many numbers each column has, (D,)."""
        return np.bincount(self.columns, minlength=self.dim)

    @cached_property
    def _layout(self) -> tuple[IntArray, IntArray, IntArray]:
        """The columns, the rows that have any, and where each of these starts; as NumPy's index type."""
        filled = np.flatnonzero(np.diff(self.starts))
        return self.columns.astype(np.int64), filled, self.starts[filled].astype(np.int64)

    @cached_property
    def _by_column(self) -> tuple[IntArray, IntArray, FloatArray]:
        """The transposed matrix: where each column starts (D + 1,) in the rows and values that follow."""
        order = np.argsort(self.columns, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(self.columns, minlength=self.dim))])
        return starts, self.owner[order], self.values[order]

    @cached_property
    def _csr(self) -> csr_array | None:
        """As a SciPy matrix that shares the memory; None if SciPy is not installed."""
        if not installed("scipy"):
            return None
        from scipy.sparse import csr_array

        return csr_array((self.values, self.columns, self.starts), shape=self.shape)

    @cached_property
    def _csc(self) -> csc_array | None:
        return None if self._csr is None else self._csr.tocsc()


Rows: TypeAlias = FloatArray | SparseRows


class Growing:
    """An immutable matrix (N, D); `extended` returns a longer one, which shares its memory if possible.

    Threads may read while one extends, since that writes beyond what they hold. Only one may extend at a time;
    extending the same matrix twice gives separate ones.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        arrays = (rows.starts, rows.columns, rows.values) if isinstance(rows, SparseRows) else (rows,)
        self._parts: list[_Part] = [(array, array, [len(array)]) for array in arrays]

    def __reduce__(self) -> tuple[Any, ...]:
        return Growing, (self.rows,)

    def extended(self, more: Rows) -> Growing:
        """With `more` (M, D) at the end; a `PoolError` if int32 can't count a sparse matrix's numbers any more."""
        rows = self.rows
        if isinstance(rows, SparseRows):
            new = sparse(more)
            if len(rows.values) + len(new.values) > _COUNTED:
                raise PoolError(f"a sparse pool holds {_COUNTED:,} numbers at most: keep this one in several")
            ends = [new.starts[1:] + rows.starts[-1], new.columns, new.values]
        else:
            ends = [np.asarray(more)]
        parts = [_longer(*part, end) for part, end in zip(self._parts, ends, strict=True)]
        whole = [array for array, *_ in parts]
        longer = SparseRows(whole[0], whole[1], whole[2], rows.dim) if isinstance(rows, SparseRows) else whole[0]
        grown = Growing(longer)
        grown._parts = parts
        return grown


_Part: TypeAlias = tuple[NDArray[Any], NDArray[Any], list[int]]
"""An array, the buffer that it begins, and how much of this is used, by longer arrays too."""


def _longer(array: NDArray[Any], buffer: NDArray[Any], used: list[int], more: NDArray[Any]) -> _Part:
    """An array with `more` at the end; a full buffer doubles."""
    start, end = len(array), len(array) + len(more)
    if used[0] != start or end > len(buffer):
        buffer = np.empty((max(end, 2 * start, _LEAST), *array.shape[1:]), dtype=array.dtype)
        buffer[:start], used = array, [start]
    buffer[start:end] = more
    used[0] = end
    return buffer[:end], buffer, used


def sparse(rows: Rows) -> SparseRows:
    """The same matrix, sparse."""
    if isinstance(rows, SparseRows):
        return rows
    places = rows != 0
    starts = np.concatenate([[0], np.cumsum(places.sum(axis=1))]).astype(np.int32)
    return SparseRows(starts, np.nonzero(places)[1].astype(np.int32), rows[places], rows.shape[1])


def product(states: FloatArray, rows: Rows) -> FloatArray:
    """Inner products (B, N) of states (B, D) with rows (N, D), in new memory.

    If the rows are dense and in column-major order (`np.asfortranarray`), one state takes half the time.
    """
    if isinstance(rows, SparseRows):
        return rows.product(states)
    large = rows.size >= LARGE and not rows.flags.f_contiguous
    if len(states) == 1 and not large:
        alone: FloatArray = (rows @ states[0])[None]
        return alone
    scores = np.empty((len(states), len(rows)), dtype=np.float32)
    for first in range(0, len(rows), _BLOCK):
        part = slice(first, first + _BLOCK)
        if large and len(states) <= _FEW:
            for state, line in zip(states, scores, strict=True):
                np.einsum("nd,d->n", rows[part], state, out=line[part])
        else:
            # In the rows' memory order, which is up to four times as fast as `states @ rows.T`.
            scores[:, part] = (rows[part] @ states.T).T
    return scores


def taken(rows: Rows, keys: IntArray) -> Rows:
    """Rows at M positions, dense or sparse as before."""
    return rows.select(keys) if isinstance(rows, SparseRows) else rows[keys]


def longest(rows: Rows) -> float:
    """The length of the longest row; NaN if one isn't finite."""
    if isinstance(rows, SparseRows):
        squares = np.concatenate([[0.0], np.cumsum(rows.values.astype(np.float64) ** 2)])
        lengths = np.diff(squares[rows.starts])
    else:
        lengths = np.einsum("nd,nd->n", rows, rows)
    return float(np.sqrt(lengths.max(initial=0.0)))
