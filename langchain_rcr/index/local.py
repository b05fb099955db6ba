"""What the engines in this process share: the pool as a table of rows and vectors, in NumPy or FAISS."""

from __future__ import annotations

import copy
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache
from hashlib import sha256
from itertools import compress
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.rows import BoolArray, FloatArray, Growing, IntArray, longest
from langchain_rcr.errors import CheckpointError
from langchain_rcr.index.base import Hits, InThisThread, PoolVectors, Row, check_ids, check_vectors
from langchain_rcr.index.filters import Filter, fields_of, matches, unknown_field
from langchain_rcr.index.ranking import Ranked

T = TypeVar("T")

_KEPT_BYTES, _ENTRY = 1 << 26, 512
"""Memory in which an index remembers what passes recent filters: a bit a row and what an entry takes beside them. That
is enough for 5,000 tenants of 100,000 examples."""


@cache
def _turns(process: int) -> threading.BoundedSemaphore:
    """Lets as many run at once as there are cores: more threads would fight over Python's lock and the caches.

    A forked process has its own, since the threads that hold turns don't exist in it.
    """
    return threading.BoundedSemaphore(os.cpu_count() or 1)


class _Rows(list[Row]):
    """An append-only list of rows, which caches which of them pass recent filters. Thread-safe."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        super().__init__(rows)
        self.lock, self._passing = threading.Lock(), dict[bytes, tuple[NDArray[np.uint8], int]]()
        self._having = dict[str, int]()  # field → a row that has it

    def __reduce__(self) -> tuple[Any, ...]:
        return _Rows, ([*self],)

    def have(self, field: str, allowed: BoolArray) -> bool:
        """Whether one of the rows in `allowed` (N,) has a field; looks where it found the field last."""
        at = self._having.get(field, 0)
        if not (at < len(allowed) and allowed[at] and field in self[at].example):
            at = next((key for key in compress(range(len(allowed)), allowed) if field in self[key].example), -1)
            if at < 0:
                return False
            self._having[field] = at
        return True

    def passing(self, where: Filter, count: int) -> BoolArray:
        """Which of the first `count` rows pass, (count,); each row is examined once."""
        # By its text, since 1 and True are the same key; the text itself may be long.
        key = sha256(repr(where).encode()).digest()
        with self.lock:
            packed, seen = self._passing.pop(key, (np.empty(0, dtype=np.uint8), 0))
            passing = np.unpackbits(packed, count=seen).view(bool)
            if new := [matches(where, row.example) for row in self[seen:count]]:
                passing = np.append(passing, new)
                packed, seen = np.packbits(passing), len(passing)
            self._passing[key] = packed, seen
            while len(self._passing) * (len(self) // 8 + _ENTRY) > _KEPT_BYTES:
                del self._passing[next(iter(self._passing))]
            return passing[:count]


class Table(ABC):
    """The pool at one moment, which can be searched; once `opened`, a `Reader`. Immutable and thread-safe.

    Keys are row numbers, 0 … N−1. The vectors aren't copied; the list of rows may have more after the pool's.
    """

    def __init__(self, vectors: PoolVectors, rows: Iterable[Row] = ()) -> None:
        self.rows = rows if isinstance(rows, _Rows) else _Rows(rows)
        self._context = Growing(vectors.context)
        self._longest = longest(vectors.candidate)
        self.size = len(vectors.candidate)  # how many candidates can be found
        self.allowed = np.ones(self.size, dtype=bool)  # (N,) which these are

    def __len__(self) -> int:
        return len(self._context.rows)

    def extended(self, vectors: PoolVectors) -> Self:
        """This table with more vectors, all of which can be found. Called by one thread at a time."""
        table, more = copy.copy(self), len(vectors.candidate)
        table._context = self._context.extended(vectors.context)
        table._longest = float(np.maximum(self._longest, longest(vectors.candidate)))
        table.size, table.allowed = self.size + more, np.append(self.allowed, np.ones(more, dtype=bool))
        return table

    def allowing(self, allowed: BoolArray) -> Self:
        """This table where only the rows in `allowed` (N,) can be found."""
        return self._with(allowed=allowed, size=int(np.count_nonzero(allowed)))

    def _with(self, **attributes: Any) -> Self:
        table = copy.copy(self)
        table.__dict__.update(attributes)
        return table

    def vectors(self, keys: IntArray) -> FloatArray:
        """E_z (B, D) of the rows `keys` (B,)."""
        return self._context.rows[keys]

    @abstractmethod
    def pool_vectors(self, keys: IntArray) -> PoolVectors:
        """E_c and E_z of the rows `keys` (B,)."""

    async def candidates(self, keys: IntArray) -> FloatArray:
        """See `Reader.candidates`."""
        return np.asarray(self.pool_vectors(keys).candidate)

    def opened(self) -> Self:
        """This table for one selection, in which a step may build on the last one."""
        return self

    async def search(self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None) -> Hits:
        """See `Reader.search`."""
        keys, logits, totals = self.found(states, t, exclude, tau)
        return Hits(keys, logits, self.rows, self.vectors, totals)

    @abstractmethod
    def found(self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None) -> Ranked:
        """The hits of `search`; an `InputError` if a state or a candidate is not finite."""


class LocalIndex(InThisThread, ABC):
    """An engine in this process: a `CandidateIndex`. Every change replaces the table with a new one.

    Deleted rows stay in the table, hidden, until they are more than half of it; then it is rebuilt without them, and
    keys change. A reader keeps the table that it started with.

    Pickled and copied with its rows.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fingerprint: str | None = None
        self._dim = 0
        self._empty()

    def emptied(self) -> Self:
        """Another, empty index of this kind."""
        other = copy.copy(self)
        other._fingerprint, other._dim = None, 0
        other._empty()
        return other

    @abstractmethod
    def _table(self, vectors: PoolVectors, rows: Iterable[Row]) -> Table:
        """A new table over vectors, which it may take over; there may be none."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_keys")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        table = copy.copy(self._now)
        table.rows = _Rows(table.rows)  # a shallow copy's own, as both go on adding
        self._fill(table)

    def forked(self) -> None:
        """In a forked process: free what threads held that it doesn't have, to change the pool or look at its rows."""
        if self._lock.locked() or self._now.rows.lock.locked():
            self.__setstate__(self.__getstate__())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count()} examples)"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the caller's thread, when it gets a turn."""
        with _turns(os.getpid()):
            return super().run(work)

    def bind(self, fingerprint: str, dim: int) -> None:
        """See `CandidateIndex.bind`."""
        with self._lock:
            other = ""
            if self._dim != dim:
                other = f"the index holds vectors of {self._dim} numbers, the encoder makes {dim}"
            elif self._fingerprint not in (None, fingerprint):
                other = f"the index holds vectors of another encoder ({self._fingerprint}, not {fingerprint})"
            if other and self.count():
                raise CheckpointError(f"{other}: encode the examples again, into an index of their own")
            if self._dim != dim:
                self._dim = dim
                self._empty()
            self._fingerprint = fingerprint

    def count(self) -> int:
        """How many examples there are."""
        return self._now.size

    def read(self, where: Filter | None = None) -> AbstractAsyncContextManager[Table]:
        """The pool as it is now; see `CandidateIndex.read`."""
        table = self._now
        if where is not None:
            for field in fields_of(where) if table.size else ():
                if not table.rows.have(field, table.allowed):
                    there = {field for row in compress(table.rows, table.allowed) for field in row.example}
                    raise unknown_field(where, [*there])
            table = table.allowing(table.rows.passing(where, len(table)) & table.allowed)
        return nullcontext(table.opened())

    def add(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: Collection[str] = ()) -> None:
        """See `CandidateIndex.add`."""
        ids = [row.id for row in rows]
        with self._lock:
            check_vectors(len(rows), vectors, self._dim)
            gone = self._keys.keys() & set(replace)
            check_ids(ids, (self._keys.keys() & ids) - gone)
            if not rows:
                return
            now, start = self._now, len(self._now)
            self._dim = vectors.candidate.shape[1]
            table = now.extended(vectors) if start else self._table(vectors, now.rows)
            del now.rows[start:]  # left by a change that failed halfway
            now.rows.extend(rows)
            self._publish(table, gone, dict(zip(ids, range(start, start + len(rows)), strict=True)))

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples, all at once; unknown ids are ignored. Returns how many there were."""
        with self._lock:
            there = self._keys.keys() & set(ids)
            if there:
                self._publish(self._now, there, {})
            return len(there)

    def known(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids exist."""
        with self._lock:
            return self._keys.keys() & set(ids)

    def rows(self, ids: Collection[str] | None = None) -> list[Row]:
        """The examples with these ids, or all; not to be changed."""
        with self._lock:
            keys = self._keys if ids is None else [one for one in dict.fromkeys(ids) if one in self._keys]
            return [self._now.rows[self._keys[one]] for one in keys]

    def content(self) -> tuple[list[Row], PoolVectors]:
        """All examples in the order of adding, and their vectors (N, D), for saving the pool. Not to be changed."""
        now = self._now
        keys = np.flatnonzero(now.allowed)
        return [now.rows[key] for key in keys.tolist()], now.pool_vectors(keys)

    def _empty(self) -> None:
        none = np.empty((0, self._dim), dtype=np.float32)
        self._fill(self._table(PoolVectors(none, none), ()))

    def _fill(self, table: Table) -> None:
        self._keys = {table.rows[key].id: key for key in np.flatnonzero(table.allowed).tolist()}
        self._now = table

    def _publish(self, table: Table, gone: set[str], new: dict[str, int]) -> None:
        """Make a change visible at one moment: another table, without the rows of some ids, with the keys of others."""
        if gone:
            allowed = table.allowed.copy()
            allowed[[self._keys[one] for one in gone]] = False
            table = table.allowing(allowed)
        self._now = table
        for one in gone:
            del self._keys[one]
        self._keys |= new
        if 2 * self.count() < len(self._now):
            rows, vectors = self.content()
            self._fill(self._table(vectors, rows))
