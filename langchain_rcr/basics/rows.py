"""Matrices of a pool, dense or sparse (vectors, bags of n-grams), and matrices that grow at their end."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from langchain_rcr.errors import PoolError

if TYPE_CHECKING:
    import torch
    from scipy.sparse import csc_array, csr_array

FloatArray: TypeAlias = NDArray[np.float32]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

_LEAST = 16
"""Rows that a growing matrix has room for at first."""
_COUNTED = np.iinfo(np.int32).max
"""Most numbers of a sparse matrix: some 40 million examples."""
_AT_ONCE, _BLOCK = 4096, 1024
"""Rows of a sparse and a dense matrix multiplied at once: products with dozens of states fit a core's cache."""
LARGE = 1 << 21
"""Numbers (8 MB) from which a matrix doesn't fit a core's cache, so that reading it is what a product costs."""
TRIALS = 2
"""Questions before a matrix is laid out anew to be read faster: as many as may come in one call."""
_FEW = 4
"""States for which a large dense matrix is summed plainly: BLAS reads it at a third of the speed."""
_BETA = threading.Lock()
"""Guards the filter of PyTorch's warning that sparse matrices are in beta; such filters are the whole process's."""


@dataclass(frozen=True)
class SparseRows:
    """An (N, D) matrix of mostly zeros in CSR form."""

    starts: NDArray[np.int32]  # (N + 1,), where each row starts in the other two
    columns: NDArray[np.int32]
    values: FloatArray
    dim: int  # D

    def __reduce__(self) -> tuple[Any, ...]:
        return SparseRows, (self.starts, self.columns, self.values, self.dim)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, D)."""
        return len(self), self.dim

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, keys: IntArray) -> FloatArray:
        """Rows at M positions, dense: (M, D)."""
        out = np.zeros((len(keys), self.dim), dtype=np.float32)
        # A pick or a few: faster than by `select`.
        for line, start, end in zip(out, self.starts[keys].tolist(), self.starts[keys + 1].tolist(), strict=True):
            line[self.columns[start:end]] = self.values[start:end]
        return out

    def __iter__(self) -> Iterator[FloatArray]:
        """The rows, dense: (D,) each."""
        for start, end in itertools.pairwise(self.starts.tolist()):
            row = np.zeros(self.dim, dtype=np.float32)
            row[self.columns[start:end]] = self.values[start:end]
            yield row

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        out = np.zeros(self.shape, dtype=dtype or np.float32)
        out[self.owner, self.columns] = self.values
        return out

    @property
    def owner(self) -> IntArray:
        """The row of each value."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def csr(self) -> csr_array:
        """As a SciPy matrix that shares the memory."""
        from scipy.sparse import csr_array

        return csr_array((self.values, self.columns, self.starts), shape=self.shape)

    def select(self, keys: IntArray) -> SparseRows:
        """Rows at M positions, in that order."""
        lengths = np.diff(self.starts)[keys]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        flat = np.arange(starts[-1]) + np.repeat(self.starts[keys] - starts[:-1], lengths)
        return SparseRows(starts, self.columns[flat], self.values[flat], self.dim)

    def beside(self, others: SparseRows) -> SparseRows:
        """Side by side with the same rows of (N, D'): (N, D + D')."""
        lengths = np.stack([np.diff(self.starts), np.diff(others.starts)], axis=1)
        mine = np.repeat(np.tile([True, False], len(self)), lengths.ravel())
        columns, values = np.empty(len(mine), np.int32), np.empty(len(mine), np.float32)
        columns[mine], values[mine] = self.columns, self.values
        columns[~mine], values[~mine] = others.columns + self.dim, others.values
        return SparseRows(self.starts + others.starts, columns, values, self.dim + others.dim)

    def first(self, columns: int) -> SparseRows:
        """(N, D) with zeros in all but the first columns."""
        kept = self.columns < columns
        starts = np.concatenate([[0], np.cumsum(kept)])[self.starts].astype(self.starts.dtype)
        return SparseRows(starts, self.columns[kept], self.values[kept], self.dim)

    def product(self, states: FloatArray) -> FloatArray:
        """Inner products (B, N) of states (B, D) with all rows."""
        torch: Any = sys.modules.get("torch")  # where it is loaded: up to twice as fast
        if torch is None:
            scores: FloatArray = (self._csr @ states.T).T
            return np.ascontiguousarray(scores)
        if len(states) == 1 and torch.backends.mkl.is_available():
            alone: FloatArray = (self._tensor @ torch.from_numpy(states[0])).numpy()[None]
            return alone
        table = torch.from_numpy(np.ascontiguousarray(states.T))
        out = np.empty((len(states), len(self)), dtype=np.float32)
        for first in range(0, len(self), _AT_ONCE):
            starts = self.starts[first : first + _AT_ONCE + 1]
            part = slice(starts[0], starts[-1])
            bags = torch.nn.functional.embedding_bag(
                torch.from_numpy(self.columns[part]),
                table,
                torch.from_numpy(starts[:-1] - starts[0]),
                mode="sum",
                per_sample_weights=torch.from_numpy(self.values[part]),
            )
            out[:, first : first + _AT_ONCE] = bags.numpy().T
        return out

    def dots(self, keys: IntArray, state: FloatArray) -> FloatArray:
        """Inner products (M,) of rows with a state (D,), summed in float64."""
        some = self.select(keys)
        sums = np.bincount(some.owner, some.values * state[some.columns].astype(np.float64), minlength=len(keys))
        return sums.astype(np.float32)

    def worth_following(self) -> bool:
        """Whether to `follow`: in a large matrix that has been asked more than `TRIALS` questions.

        Laying out its columns takes longer than a question, so a pool that keeps changing shouldn't.
        """
        asked = self.__dict__["_asked"] = self.__dict__.get("_asked", 0) + 1
        return bool(asked > TRIALS and len(self.values) >= LARGE)

    def follow(self, scores: FloatArray, change: FloatArray) -> None:
        """Update inner products (N,) with a vector to which `change` (D,) is added; reads only changed columns."""
        columns = np.flatnonzero(change)
        scores += self._by_column[:, columns] @ change[columns]

    @cached_property
    def _csr(self) -> csr_array:
        return self.csr()

    @cached_property
    def _by_column(self) -> csc_array:
        return self.csr().tocsc()

    @cached_property
    def _tensor(self) -> torch.Tensor:
        import torch

        starts, columns, values = map(torch.from_numpy, (self.starts, self.columns, self.values))
        with _BETA, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(starts, columns, values, self.shape, check_invariants=False)


Rows: TypeAlias = FloatArray | SparseRows


class Growing(Generic[Scalar]):
    """An immutable array (N, …); `extended` returns a longer one, which shares its memory where it can.

    Threads may read while one extends, since that writes behind what they hold. Only one may extend at a time; two that
    extended the same array hold an array each.
    """

    def __init__(self, rows: NDArray[Scalar]) -> None:
        self.rows = rows
        self._buffer, self._used = rows, [len(rows)]

    def __reduce__(self) -> tuple[Any, ...]:
        return Growing, (self.rows,)

    def extended(self, more: NDArray[Scalar] | SparseRows) -> Growing[Scalar]:
        """With `more` (M, …) at the end; a full buffer doubles."""
        start, end = len(self.rows), len(self.rows) + len(more)
        buffer, used = self._buffer, self._used
        if used[0] != start or end > len(buffer):
            buffer = np.empty((max(end, 2 * start, _LEAST), *self.rows.shape[1:]), dtype=self.rows.dtype)
            buffer[:start], used = self.rows, [start]
        buffer[start:end] = np.asarray(more)
        used[0] = end
        grown = Growing(buffer[:end])
        grown._buffer, grown._used = buffer, used
        return grown


class GrowingSparse:
    """`Growing` for a sparse matrix (N, D)."""

    def __init__(self, rows: SparseRows, parts: Sequence[Growing[Any]] = ()) -> None:
        self.rows = rows
        self._parts = parts or [Growing(rows.starts), Growing(rows.columns), Growing(rows.values)]

    def __reduce__(self) -> tuple[Any, ...]:
        return GrowingSparse, (self.rows,)

    def extended(self, more: Rows) -> GrowingSparse:
        """With `more` (M, D) at the end.

        Raises:
            PoolError: int32 can't count that many numbers.
        """
        new = sparse(more)
        if len(self.rows.values) + len(new.values) > _COUNTED:
            raise PoolError(f"a sparse pool holds {_COUNTED:,} numbers at most: keep this one in several")
        ends = (new.starts[1:] + self.rows.starts[-1], new.columns, new.values)
        parts = [part.extended(end) for part, end in zip(self._parts, ends, strict=True)]
        starts, columns, values = (part.rows for part in parts)
        return GrowingSparse(SparseRows(starts, columns, values, self.rows.dim), parts)


def growing(rows: Rows) -> Growing[np.float32] | GrowingSparse:
    """A matrix that can be extended."""
    return GrowingSparse(rows) if isinstance(rows, SparseRows) else Growing(rows)


def sparse(rows: Rows) -> SparseRows:
    """The same matrix, sparse."""
    if isinstance(rows, SparseRows):
        return rows
    places = rows != 0
    starts = np.concatenate([[0], np.cumsum(places.sum(axis=1))]).astype(np.int32)
    return SparseRows(starts, np.nonzero(places)[1].astype(np.int32), rows[places], rows.shape[1])


def product(states: FloatArray, rows: Rows) -> FloatArray:
    """Inner products (B, N) of states (B, D) with rows (N, D), in new memory."""
    if isinstance(rows, SparseRows):
        return rows.product(states)
    large = rows.size >= LARGE
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
            # Along the rows as they lie in memory: up to four times as fast as `states @ rows.T`.
            scores[:, part] = (rows[part] @ states.T).T
    return scores


def taken(rows: Rows, keys: IntArray) -> Rows:
    """Rows at M positions, dense or sparse as they were."""
    return rows.select(keys) if isinstance(rows, SparseRows) else rows[keys]


def numbers(rows: Rows) -> FloatArray:
    """The numbers of a matrix in any shape, perhaps without zeros."""
    return rows.values if isinstance(rows, SparseRows) else rows


def longest(rows: Rows) -> float:
    """The largest length of a row; NaN if one isn't finite."""
    if isinstance(rows, SparseRows):
        squares = np.concatenate([[0.0], np.cumsum(rows.values.astype(np.float64) ** 2)])
        lengths = np.diff(squares[rows.starts])
    else:
        lengths = np.einsum("nd,nd->n", rows, rows)
    return float(np.sqrt(lengths.max(initial=0.0)))
