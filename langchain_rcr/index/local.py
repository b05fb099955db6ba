"""What the engines in this process share: they keep the rows; a table of vectors, theirs or FAISS's, searches them."""

from __future__ import annotations

import copy
import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.rows import BoolArray, FloatArray, IntArray, growing, longest, taken
from langchain_rcr.errors import CheckpointError
from langchain_rcr.index.base import Hits, InThisThread, PoolVectors, Row, check_ids, check_vectors, replaced
from langchain_rcr.index.filters import Filter, fields_of, matches, unknown_field

T = TypeVar("T")

_FILTERS_KEPT = 64
"""Filters for which an index remembers what passes."""


class _Turns:
    """As many at once as there are cores: more threads would hand Python's lock and the caches to and fro."""

    def __init__(self) -> None:
        self._start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start)  # threads that hold one are not in the child

    def _start(self) -> None:
        self.free = threading.BoundedSemaphore(os.cpu_count() or 1)


_turns = _Turns()


class Table(ABC):
    """Vectors that can be searched; keys are row numbers, 0 … N−1. Safe from threads; never changes.

    Args:
        vectors: the pool's E_c and E_z; not copied.
    """

    def __init__(self, vectors: PoolVectors) -> None:
        self._context = growing(vectors.context)
        self._longest = longest(vectors.candidate)
        self._allowed: BoolArray | None = None
        self.size = len(vectors.candidate)
        """How many candidates can be found."""

    def __len__(self) -> int:
        return len(self._context.rows)

    def extended(self, vectors: PoolVectors) -> Self:
        """This table with more rows, which can all be found. Called by one thread at a time."""
        table, more = copy.copy(self), len(vectors.candidate)
        table._context = self._context.extended(vectors.context)
        table._longest = float(np.maximum(self._longest, longest(vectors.candidate)))
        table.size += more
        if self._allowed is not None:
            table._allowed = np.append(self._allowed, np.ones(more, dtype=bool))
        return table

    def allowing(self, allowed: BoolArray) -> Self:
        """This table where nothing but the rows with `allowed` (N,) can be found."""
        table = copy.copy(self)
        table._allowed, table.size = allowed, int(np.count_nonzero(allowed))
        return table

    def vectors(self, keys: IntArray) -> FloatArray:
        """E_z (B, D) of the rows `keys` (B,)."""
        return self._context.rows[keys]

    @abstractmethod
    def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (B, D) of the rows `keys` (B,)."""

    def pool_vectors(self, keys: IntArray) -> PoolVectors:
        """Both of the rows `keys` (B,), for another table."""
        return PoolVectors(self.candidates(keys), taken(self._context.rows, keys))

    def opened(self) -> Self:
        """This table for one selection, in which a step may build on the last one."""
        return self

    @abstractmethod
    def found(
        self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None
    ) -> tuple[IntArray, FloatArray, NDArray[np.float64] | None]:
        """Keys (B, t), logits (B, t) and, where there is a τ, log partitions (B,); see `Reader.search`.

        Raises:
            InputError: a state or a candidate is not finite.
        """


class LocalReader:
    """A `Reader` of an engine in this process.

    Args:
        table: what can be found.
        rows: the rows of the table; may go on behind them.
    """

    def __init__(self, table: Table, rows: Sequence[Row]) -> None:
        self.table, self._rows, self.size = table.opened(), rows, table.size

    async def search(self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None) -> Hits:
        """See `Reader.search`."""
        keys, logits, totals = self.table.found(states, t, exclude, tau)
        return Hits(keys, logits, self._rows, self.table.vectors, totals)

    async def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (n, D) of `keys` (n,)."""
        return self.table.candidates(keys)


class _Filters:
    """Which rows of a list that only grows pass the filters that were asked last. Safe from many threads.

    Args:
        rows: the list; others append to it.
    """

    def __init__(self, rows: list[Row]) -> None:
        self._rows, self._lock = rows, threading.Lock()
        self._passing: dict[str, BoolArray] = {}

    def passing(self, where: Filter, count: int) -> BoolArray:
        """Which of the first `count` rows pass, (count,): each row is looked at once, when it is new."""
        with self._lock:
            # By its text: as a key, 1 is the same as True.
            passing = self._passing.pop(repr(where), np.empty(0, dtype=bool))
            new = [matches(where, row.example) for row in self._rows[len(passing) : count]]
            self._passing[repr(where)] = passing = np.append(passing, new) if new else passing
            if len(self._passing) > _FILTERS_KEPT:
                del self._passing[next(iter(self._passing))]
            return passing[:count]


class _Snapshot:
    """The pool at one moment.

    Args:
        table: the vectors of all rows, deleted ones too.
        rows: a list whose first N are the table's; later changes append to the same list.
        alive: which of them are not deleted, (N,).
        filters: of `rows`.
    """

    def __init__(self, table: Table, rows: list[Row], alive: BoolArray, filters: _Filters) -> None:
        self.table, self.rows, self.alive, self.filters = table, rows, alive, filters
        self.everything = table if alive.all() else table.allowing(alive)

    def reader(self, where: Filter | None) -> LocalReader:
        if where is None:
            return LocalReader(self.everything, self.rows)
        for field in fields_of(where) if self.alive.any() else ():
            if not any(field in row.example for row in self._there()):
                raise unknown_field(where, [*{field for row in self._there() for field in row.example}])
        allowed = self.filters.passing(where, len(self.table)) & self.alive
        return LocalReader(self.table.allowing(allowed), self.rows)

    def _there(self) -> Iterator[Row]:
        return itertools.compress(self.rows, self.alive)


class LocalIndex(InThisThread, ABC):
    """An engine in this process: a `CandidateIndex`. Every change puts one new snapshot in the place of the old.

    Deleted rows stay in the table, where nothing finds them, until they are more than half of it; then it is rebuilt
    without them, and keys change. A reader keeps the snapshot that it began with.

    Pickled and copied with its rows.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fingerprint: str | None = None
        self._dim = 0
        self._fill([], self._table(_no_vectors(0)))

    def emptied(self) -> Self:
        """Another index of this kind with nothing in it."""
        other = copy.copy(self)
        other._fingerprint, other._dim = None, 0
        other._fill([], other._table(_no_vectors(0)))
        return other

    @abstractmethod
    def _table(self, vectors: PoolVectors) -> Table:
        """A table of its own over vectors, which it may take over; they may be none."""

    def __getstate__(self) -> dict[str, Any]:
        now = self._now
        state = {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_now", "_keys")}
        return state | {"content": (now.rows[: len(now.table)], now.table, now.alive)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        content = state.pop("content")
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._fill(*content)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count()} examples)"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the caller's thread, when it has a turn."""
        with _turns.free:
            return super().run(work)

    def bind(self, fingerprint: str, dim: int) -> None:
        """See `CandidateIndex.bind`."""
        with self._lock:
            if self.count():
                self._check_binding(fingerprint, dim)
            self._start(dim)
            self._fingerprint = fingerprint

    def count(self) -> int:
        """How many examples there are."""
        return self._now.everything.size

    @asynccontextmanager
    async def read(self, where: Filter | None = None) -> AsyncIterator[LocalReader]:
        """The pool as it is now; see `CandidateIndex.read`."""
        yield self._now.reader(where)

    def add(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: bool | Collection[str] = False) -> None:
        """Add examples, all or none; see `CandidateIndex.add`.

        Raises:
            PoolError: an id is taken and isn't replaced, or comes twice.
            InputError: vectors of another number or length, or with numbers that are not finite.
        """
        ids = [row.id for row in rows]
        with self._lock:
            check_vectors(len(rows), vectors, self._dim)
            gone = self._keys.keys() & replaced(ids, replace)
            check_ids(ids, (self._keys.keys() & ids) - gone)
            if not rows:
                return
            self._start(vectors.candidate.shape[1])
            now, start = self._now, len(self._now.table)
            table = now.table.extended(vectors) if start else self._table(vectors)
            del now.rows[start:]  # left by a change that failed half-way
            now.rows.extend(rows)
            self._publish(table, np.append(now.alive, np.ones(len(rows), dtype=bool)), gone)
            self._keys.update(zip(ids, range(start, start + len(rows)), strict=True))
            self._compact()

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples, all at once; unknown ids are ignored. Returns how many there were."""
        with self._lock:
            there = self._keys.keys() & set(ids)
            if there:
                self._publish(self._now.table, self._now.alive.copy(), there)
                self._compact()
            return len(there)

    def known(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids are there."""
        with self._lock:
            return self._keys.keys() & set(ids)

    def rows(self, ids: Collection[str] | None = None) -> list[Row]:
        """The examples with these ids, or all; not to be changed."""
        with self._lock:
            keys = self._keys if ids is None else [one for one in dict.fromkeys(ids) if one in self._keys]
            return [self._now.rows[self._keys[one]] for one in keys]

    def close(self) -> None:
        """Nothing to let go of; for callers that close any engine."""

    def content(self) -> tuple[list[Row], PoolVectors]:
        """All examples, by order of adding, and their vectors (N, D): what saving the pool needs. Not to be changed."""
        now = self._now
        keys = np.flatnonzero(now.alive)
        return [now.rows[key] for key in keys.tolist()], now.table.pool_vectors(keys)

    def _start(self, dim: int) -> None:
        """Begin with vectors of another length, which an empty engine may."""
        if self._dim != dim:
            self._fill([], self._table(_no_vectors(dim)))
            self._dim = dim

    def _fill(self, rows: list[Row], table: Table, alive: BoolArray | None = None) -> None:
        """Begin with rows and their table; `alive` None: all are there."""
        alive = np.ones(len(rows), dtype=bool) if alive is None else alive
        self._keys = {rows[key].id: key for key in np.flatnonzero(alive).tolist()}
        self._now = _Snapshot(table, rows, alive, _Filters(rows))

    def _publish(self, table: Table, alive: BoolArray, gone: set[str]) -> None:
        """The one moment at which a change is there: another table, and the rows of some ids are gone."""
        alive[[self._keys[one] for one in gone]] = False
        self._now = _Snapshot(table, self._now.rows, alive, self._now.filters)
        for one in gone:
            del self._keys[one]

    def _compact(self) -> None:
        if 2 * self.count() < len(self._now.table):
            rows, vectors = self.content()
            self._fill(rows, self._table(vectors))

    def _check_binding(self, fingerprint: str, dim: int) -> None:
        if self._dim != dim:
            msg = f"the index holds vectors of {self._dim} numbers, the encoder makes {dim}"
        elif self._fingerprint not in (None, fingerprint):
            msg = f"the index holds vectors of another encoder ({self._fingerprint}, not {fingerprint})"
        else:
            return
        raise CheckpointError(f"{msg}: encode the examples again, into an index of their own")


def _no_vectors(dim: int) -> PoolVectors:
    return PoolVectors(np.empty((0, dim), dtype=np.float32), np.empty((0, dim), dtype=np.float32))
