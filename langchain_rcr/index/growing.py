"""Arrays that grow at their end without being copied each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)

_LEAST = 16


@dataclass(slots=True)
class _Buffer(Generic[Scalar]):
    data: NDArray[Scalar]
    used: int


class Growing(Generic[Scalar]):
    """An array that never changes: `extended` returns a longer one, which shares its memory where it can.

    Any number of threads may read while one extends: it writes behind what the others hold. Two that extend the same
    array get an array each; not at the same moment.

    Args:
        rows: (N, …); taken over, not copied.
    """

    def __init__(self, rows: NDArray[Scalar]) -> None:
        self.rows = rows
        """(N, …) the array."""
        self._buffer = _Buffer(rows, len(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return Growing, (self.rows,)

    def extended(self, more: NDArray[Scalar]) -> Growing[Scalar]:
        """This array with `more` (M, …) at its end; the buffer doubles where there is no room."""
        start, end = len(self.rows), len(self.rows) + len(more)
        buffer = self._buffer
        if buffer.used != start or end > len(buffer.data):
            data = np.empty((max(end, 2 * start, _LEAST), *self.rows.shape[1:]), dtype=self.rows.dtype)
            data[:start] = self.rows
            buffer = _Buffer(data, start)
        buffer.data[start:end] = more
        buffer.used = end
        grown = Growing(buffer.data[:end])
        grown._buffer = buffer
        return grown
