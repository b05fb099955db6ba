"""Matrices of a pool, dense or sparse (vectors, bags of n-grams), and matrices that grow at their end."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Iterator
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
"""Numbers that a sparse matrix can have, some 40 million examples."""
_AT_ONCE = 4096
"""Rows of a sparse matrix multiplied at once, as for `_BLOCK`."""
LARGE = 1 << 21
"""Numbers from which on a matrix (8 MB) doesn't stay in a core's cache: reading it is what a product costs."""
TRIALS = 2
"""Questions that a matrix is read for before it is laid out anew to be read faster: as many as may come in one call."""
_FEW = 4
"""States for which a large dense matrix is better summed plainly: BLAS reads it at a third of the speed."""
_BLOCK = 1024
"""Rows of a dense matrix multiplied at once: their products with some dozens of states still fit a core's cache."""
_BETA = threading.Lock()
"""Held while PyTorch may warn that its sparse matrices are in beta: filters of warnings are the whole process's."""


@dataclass(frozen=True)
class SparseRows:
    """An (N, D) matrix most of whose numbers are 0: of each row the others, rows one after the other (CSR).

    Args:
        starts: (N + 1,) int32, where each row starts in the other two.
        columns: int32.
        values: float32, one for each column.
        dim: D.
    """

    starts: NDArray[np.int32]
    columns: NDArray[np.int32]
    values: FloatArray
    dim: int

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
        """Some rows (M,), dense: (M, D)."""
        out = np.zeros((len(keys), self.dim), dtype=np.float32)
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
        """The row of each of the `columns`."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def csr(self) -> csr_array:
        """The matrix in SciPy, which shares its memory."""
        from scipy.sparse import csr_array

        return csr_array((self.values, self.columns, self.starts), shape=self.shape)

    def select(self, keys: IntArray) -> SparseRows:
        """Some rows (M,), in that order."""
        lengths = np.diff(self.starts)[keys]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        flat = np.arange(starts[-1]) + np.repeat(self.starts[keys] - starts[:-1], lengths)
        return SparseRows(starts, self.columns[flat], self.values[flat], self.dim)

    def beside(self, others: SparseRows) -> SparseRows:
        """Each row followed by that of the others (N, D') in further columns: (N, D + D')."""
        lengths = np.stack([np.diff(self.starts), np.diff(others.starts)], axis=1)
        mine = np.repeat(np.tile([True, False], len(self)), lengths.ravel())
        columns, values = np.empty(len(mine), np.int32), np.empty(len(mine), np.float32)
        columns[mine], values[mine] = self.columns, self.values
        columns[~mine], values[~mine] = others.columns + self.dim, others.values
        return SparseRows(self.starts + others.starts, columns, values, self.dim + others.dim)

    def first(self, columns: int) -> SparseRows:
        """(N, D) with the first columns alone; the others are 0."""
        kept = self.columns < columns
        starts = np.concatenate([[0], np.cumsum(kept)])[self.starts].astype(self.starts.dtype)
        return SparseRows(starts, self.columns[kept], self.values[kept], self.dim)

    def product(self, states: FloatArray) -> FloatArray:
        """Inner products of (B, D) with all rows, (B, N) float32."""
        import torch

        if len(states) == 1 and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
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
        """Inner products (M,) of some rows with (D,), summed in float64."""
        some = self.select(keys)
        sums = np.bincount(some.owner, some.values * state[some.columns].astype(np.float64), minlength=len(keys))
        return sums.astype(np.float32)

    def worth_following(self) -> bool:
        """Whether to `follow`: in a large matrix, and when this is asked more than `TRIALS` times.

        Laying out the columns takes longer than a question; a pool that changes with each call would do it for each.
        """
        asked = self.__dict__["_asked"] = self.__dict__.get("_asked", 0) + 1
        return bool(asked > TRIALS and len(self.values) >= LARGE)

    def follow(self, scores: FloatArray, change: FloatArray) -> None:
        """Bring inner products (N,) with a vector up to date when `change` (D,) is added to it.

        Only rows that have a number in one of the columns that change are looked at.
        """
        columns = np.flatnonzero(change)
        scores += self._by_column[:, columns] @ change[columns]

    @cached_property
    def _by_column(self) -> csc_array:
        """The matrix column by column."""
        return self.csr().tocsc()

    @cached_property
    def _tensor(self) -> torch.Tensor:
        """The matrix in PyTorch, which shares its memory."""
        import torch

        starts, columns, values = map(torch.from_numpy, (self.starts, self.columns, self.values))
        with _BETA, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(starts, columns, values, self.shape, check_invariants=False)


Rows: TypeAlias = FloatArray | SparseRows


class Growing(Generic[Scalar]):
    """An array that never changes: `extended` returns a longer one, which shares its memory where it can.

    Any number of threads may read while one extends: it writes behind what the others hold. Two that extend the same
    array get an array each; not at the same moment.

    Args:
        rows: (N, …); not copied.
    """

    def __init__(self, rows: NDArray[Scalar]) -> None:
        self.rows = rows
        """(N, …) the array."""
        self._buffer, self._used = rows, [len(rows)]

    def __reduce__(self) -> tuple[Any, ...]:
        return Growing, (self.rows,)

    def extended(self, more: NDArray[Scalar] | SparseRows) -> Growing[Scalar]:
        """This array with `more` (M, …) at its end; the buffer doubles where there is no room."""
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
    """`Growing` for a sparse matrix.

    Args:
        rows: (N, D); not copied.
    """

    def __init__(self, rows: SparseRows) -> None:
        self._fill(Growing(rows.starts), Growing(rows.columns), Growing(rows.values), rows.dim)

    def __reduce__(self) -> tuple[Any, ...]:
        return GrowingSparse, (self.rows,)

    def _fill(self, starts: Growing[Any], columns: Growing[Any], values: Growing[Any], dim: int) -> None:
        self._parts = starts, columns, values
        self.rows = SparseRows(starts.rows, columns.rows, values.rows, dim)
        """(N, D) the matrix."""

    def extended(self, more: Rows) -> GrowingSparse:
        """This matrix with `more` (M, D) at its end; see `Growing.extended`.

        Raises:
            PoolError: it would have more numbers than its int32 places can count.
        """
        new, (starts, columns, values) = sparse(more), self._parts
        if len(self.rows.values) + len(new.values) > _COUNTED:
            raise PoolError(f"a sparse pool holds {_COUNTED:,} numbers at most: keep this one in several")
        grown = GrowingSparse.__new__(GrowingSparse)
        after = new.starts[1:] + self.rows.starts[-1]
        grown._fill(starts.extended(after), columns.extended(new.columns), values.extended(new.values), self.rows.dim)
        return grown


def growing(rows: Rows) -> Growing[np.float32] | GrowingSparse:
    """A matrix that others can be put behind."""
    return GrowingSparse(rows) if isinstance(rows, SparseRows) else Growing(rows)


def sparse(rows: Rows) -> SparseRows:
    """A matrix as a sparse one."""
    if isinstance(rows, SparseRows):
        return rows
    places = rows != 0
    starts = np.concatenate([[0], np.cumsum(places.sum(axis=1))]).astype(np.int32)
    return SparseRows(starts, np.nonzero(places)[1].astype(np.int32), rows[places], rows.shape[1])


def product(states: FloatArray, rows: Rows) -> FloatArray:
    """Inner products (B, N) of (B, D) with (N, D), in memory of their own."""
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
            # Along the rows of the matrix, as they lie in memory: up to four times as fast as `states @ rows.T`.
            scores[:, part] = (rows[part] @ states.T).T
    return scores


def taken(rows: Rows, keys: IntArray) -> Rows:
    """Some rows (M,), as sparse as they were."""
    return rows.select(keys) if isinstance(rows, SparseRows) else rows[keys]


def numbers(rows: Rows) -> FloatArray:
    """All numbers of a matrix, in any shape; 0s may lack."""
    return rows.values if isinstance(rows, SparseRows) else rows


def longest(rows: Rows) -> float:
    """The largest length of (N, D) rows; NaN where one is not finite."""
    if isinstance(rows, SparseRows):
        squares = np.concatenate([[0.0], np.cumsum(rows.values.astype(np.float64) ** 2)])
        lengths = np.diff(squares[rows.starts])
    else:
        lengths = np.einsum("nd,nd->n", rows, rows)
    return float(np.sqrt(lengths.max(initial=0.0)))
