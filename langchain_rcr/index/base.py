"""What an engine is: it holds the pool (examples and their vectors) and searches it by inner product (MIPS).

Every engine promises, as far as its kind of search is exact:

- The best candidate of a state s is the one with the largest logit E_c · s among those that aren't excluded.
- Logits within `TIE` · |s| · max |E_c| of the best that is left count as ties with it, and the lowest key wins, that is
  the one added first. This is because float32 rounding of a product depends on its shape, while a pick may depend
  neither on how many queries are searched together nor on the engine. Every engine fetches until the last of its t hits
  doesn't tie with anything it didn't fetch; one behind a network stops at 1,024 candidates.
- A reader sees the pool as it was when it was opened.
- `log_partition` is exact if the search is. Others sum over the 1,024 best; probabilities are then upper bounds.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from langchain_rcr.basics.rows import DoubleArray, FloatArray, IntArray, Rows, longest, taken
from langchain_rcr.errors import InputError, PoolError
from langchain_rcr.index.filters import Filter

T = TypeVar("T")

TIE = 1e-6
"""How far apart tied logits may lie, relative to |state| · max |E_c|: about ten times float32's rounding."""

BEST = 1024
"""How many candidates a log partition sums over when not all are looked at."""


@dataclass(frozen=True, slots=True)
class PoolVectors:
    """The pool as the policy sees it."""

    candidate: Rows  # E_c of every example, (N, D) float32; dense or sparse
    context: Rows  # E_z of every example, likewise

    def __post_init__(self) -> None:
        if self.candidate.shape != self.context.shape or len(self.candidate.shape) != 2:
            raise ValueError(f"candidate {self.candidate.shape} and context {self.context.shape} must both be (N, D)")

    def take(self, keys: IntArray) -> PoolVectors:
        """The vectors of some examples (M,), in that order."""
        return PoolVectors(taken(self.candidate, keys), taken(self.context, keys))


class Row(NamedTuple):
    """An example as an engine keeps it."""

    id: str  # given by the user or random; unique in the pool
    example: dict[str, Any]  # its fields; engines that persist keep them as JSON
    program: int  # equal numbers for equal programs (`ProgramSpec.key`), int64


class Hits(NamedTuple):
    """What a search found, best first.

    The log partition is log Σ exp(logit / τ) over the candidates that aren't excluded.
    """

    keys: IntArray  # (B, t); −1 where a state has fewer than t candidates left
    logits: FloatArray  # (B, t); −inf there
    rows: Mapping[int, Row] | Sequence[Row]  # the examples found so far, by key; not to be changed
    contexts: Callable[[IntArray], FloatArray]  # returns E_z (M, D) of M keys found so far
    log_partition: DoubleArray | None = None  # (B,); −inf if there is no candidate; None if no τ was given


class Reader(Protocol):
    """The pool at one moment, or the part of it that passes a filter; for one selection.

    Its methods are awaited where the engine says (`CandidateIndex.run`); those of an engine in this process never wait.
    The reader of a remote engine may have a method `ahead(state, k, exclude, tau)`, which returns what the first of k
    greedy steps find, as many as one round trip allows; and `aside(work, …)`, for slow work off the event loop.
    """

    @property
    def size(self) -> int:
        """How many candidates there are."""

    async def search(self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None) -> Hits:
        """Find the best candidates: one step of a selection.

        A key is an int64 that identifies a candidate; later additions have larger keys.

        Args:
            states: state vectors, (B, D) float32.
            t: how many candidates for each, at least 1.
            exclude: (B, E) for each state the keys that may not come back, all found by this reader. Keep them few:
                engines that can't exclude them fetch that many more.
            tau: τ, if the log partition is wanted too.
        """

    async def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (n, D) of `keys` (n,), each found by this reader."""


class CandidateIndex(Protocol):
    """An engine. Safe from many threads. Outages are `EngineError`s that name the engine; the next call tries again."""

    def bind(self, fingerprint: str, dim: int) -> None:
        """Declare whose vectors the index holds, before using it; an empty one adopts them. May be repeated.

        Raises:
            CheckpointError: it holds vectors of another encoder or length; the message says what to rebuild.
        """

    def count(self) -> int:
        """How many examples there are."""

    def read(self, where: Filter | None = None) -> AbstractAsyncContextManager[Reader]:
        """The pool as it is now, for a coroutine that `run` or `arun` runs.

        Raises:
            InputError: the filter asks about a field that no example has.
        """

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that reads this engine, and return its result; from any thread."""

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """`run` for a caller on any event loop, which isn't blocked meanwhile."""

    def add(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: Collection[str] = ()) -> None:
        """Add examples, all or none; the next `read` sees them.

        Args:
            rows: the examples, with unique ids; they must not be changed afterwards.
            vectors: E_c and E_z of each.
            replace: ids whose examples are removed in the same change. One that is added again gets another key.

        Raises:
            PoolError: an id is taken and isn't replaced, or comes twice, or a field can't be kept; nothing was added.
            InputError: vectors have another number or length, or numbers that are not finite.
        """

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples, all at once; unknown ids are ignored. Returns how many there were."""

    def known(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids exist."""

    def rows(self, ids: Collection[str] | None = None) -> list[Row]:
        """The examples with these ids, or all in the order of adding; not to be changed."""

    def close(self) -> None:
        """Release connections and files; a second call does nothing."""


class InThisThread:
    """`run`, `arun` and `close` of an engine whose readers never wait for an event loop."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the caller's thread."""
        try:
            work.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        work.close()
        raise RuntimeError(f"a reader of {type(self).__name__} waited for an event loop that isn't there")

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a thread."""
        try:
            return await asyncio.to_thread(self.run, work)
        finally:
            with suppress(ValueError):  # a thread runs it
                work.close()  # or else Python warns of one that was cancelled before it began

    def close(self) -> None:
        """Does nothing: there is nothing to close, or it belongs to the caller."""


async def resolved(value: Any) -> Any:
    """A value, awaited if need be: with one that needn't be, `InThisThread` can run the coroutine."""
    return await value if inspect.isawaitable(value) else value


def check_vectors(count: int, vectors: PoolVectors, dim: int) -> None:
    """Raise an `InputError` unless these are finite vectors of `count` examples for an index of D = `dim` (0: any)."""
    number, length = vectors.candidate.shape
    if number != count:
        raise InputError(f"{count} examples came with {number} vectors")
    if count and dim not in (0, length):
        raise InputError(f"vectors of {length} numbers can't enter an index that holds vectors of {dim}")
    if not (math.isfinite(longest(vectors.candidate)) and math.isfinite(longest(vectors.context))):
        raise InputError("vectors of examples are not finite numbers: the encoder or its embeddings are broken")


def check_ids(ids: Sequence[str], taken: Collection[str]) -> None:
    """Raise a `PoolError` that names the first id that comes twice or is taken."""
    seen = set(taken)
    for one in ids:
        if one in seen:
            raise PoolError(f"the id {one!r:.80} is taken by another example")
        seen.add(one)
