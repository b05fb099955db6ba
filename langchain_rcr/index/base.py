"""What an engine is: it holds the pool (examples and their vectors) and searches it by inner product (MIPS)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.filters import Filter

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolVectors:
    """The pool as the policy sees it.

    Args:
        candidate: E_c of every example, (N, D) float32.
        context: E_z of every example, (N, D) float32.
    """

    candidate: FloatArray
    context: FloatArray

    def __post_init__(self) -> None:
        if self.candidate.shape != self.context.shape or self.candidate.ndim != 2:
            msg = f"candidate {self.candidate.shape} and context {self.context.shape} must both be (N, D)"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Row:
    """An example as an engine keeps it.

    Args:
        id: the user's or a random one; unique in the pool.
        example: its fields. Engines that persist keep them as JSON.
        program: equal numbers for equal programs (white space aside), int64.
    """

    id: str
    example: dict[str, Any]
    program: int


class Searcher(Protocol):
    """Candidates that can be searched. A key is an int64 that names one, by order of adding: later ones are larger."""

    @property
    def size(self) -> int:
        """How many candidates there are."""
        ...

    def search(self, states: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]:
        """The t candidates with the largest inner product for each state.

        Args:
            states: state vectors, (B, D) float32.
            t: how many candidates a row, at least 1.
            exclude: for each of the B rows the keys that may not come back (duplicates and unknown keys allowed). Few:
                engines that can't leave them out fetch that many more.

        Returns:
            keys (B, t) int64 and logits (B, t) float32, best first; equal logits by lowest key, where equal means
            within `TIE` (see `langchain_rcr.index.memory`); key −1 with logit −inf where a row has fewer than t
            candidates left.
        """
        ...

    def vectors(self, keys: IntArray) -> FloatArray:
        """E_z (B, D) of the candidates `keys` (B,), as `State.update` takes it; each was found by this searcher."""
        ...

    def log_partition(self, states: FloatArray, tau: float, exclude: Sequence[IntArray]) -> NDArray[np.float64]:
        """Log Σ exp(logit / τ) over the candidates that aren't excluded, (B,); −inf where there is none.

        Engines that would have to read all of a large pool sum over the best ones alone, and say over how many: the
        probabilities made of it are then upper bounds.
        """
        ...


class Reader(Searcher, Protocol):
    """The pool at one moment, or the part of it that a filter lets through: later changes aren't seen.

    For one selection, by one thread.
    """

    def rows(self, keys: IntArray) -> list[Row]:
        """The examples of `keys` (n,), each found by this reader; copies, which the caller may change."""
        ...


class AsyncReader(Protocol):
    """A `Reader` that is awaited."""

    @property
    def size(self) -> int: ...  # noqa: D102
    async def search(self, states: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]: ...  # noqa: D102
    async def vectors(self, keys: IntArray) -> FloatArray: ...  # noqa: D102
    async def candidates(self, keys: IntArray) -> FloatArray: ...  # noqa: D102
    async def log_partition(  # noqa: D102
        self, states: FloatArray, tau: float, exclude: Sequence[IntArray]
    ) -> NDArray[np.float64]: ...
    async def rows(self, keys: IntArray) -> list[Row]: ...  # noqa: D102


class CandidateIndex(Protocol):
    """An engine. Safe from many threads. Outages are `EngineError`s that name the engine; the next call tries anew."""

    def bind(self, fingerprint: str, dim: int) -> None:
        """Say whose vectors the index holds, before it is used; an empty one takes it on. May be repeated.

        Raises:
            CheckpointError: it holds vectors of another encoder or length; the message says what to rebuild.
        """
        ...

    def count(self) -> int:
        """How many examples there are."""
        ...

    def read(self, where: Filter | None = None) -> AbstractContextManager[Reader]:
        """The pool as it is now.

        Raises:
            InputError: the filter asks about a field that no example has.
        """
        ...

    def add(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: bool = False) -> None:
        """Add examples, all or none; the next `read` sees them.

        Args:
            rows: the examples, ids unique among them.
            vectors: E_c and E_z of each.
            replace: an example whose id is there takes the other's place (with a key of its own).

        Raises:
            PoolError: an id is taken and `replace` is off, or a field can't be kept; nothing was added.
        """
        ...

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples, all at once; unknown ids are ignored. Returns how many there were."""
        ...

    def known(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids are there."""
        ...

    def close(self) -> None:
        """Let go of connections and files; a second call does nothing."""
        ...


class AsyncCandidateIndex(CandidateIndex, Protocol):
    """An engine behind a network, natively async: its calls hold up no event loop and need no thread each.

    The same object serves any number of event loops and threads.
    """

    def aread(self, where: Filter | None = None) -> AbstractAsyncContextManager[AsyncReader]:
        """`read`, awaited."""
        ...

    async def aadd(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: bool = False) -> None:
        """`add`, awaited."""
        ...

    async def adelete(self, ids: Sequence[str]) -> int:
        """`delete`, awaited."""
        ...
