"""What the engines in this process share: they keep the rows; a table of vectors, theirs or FAISS's, searches them."""

from __future__ import annotations

import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from langchain_rcr.errors import CheckpointError, PoolError
from langchain_rcr.files import write_bytes
from langchain_rcr.filters import Filter, fields_of, unknown_field
from langchain_rcr.index.base import (
    FloatArray,
    Hits,
    IntArray,
    InThisThread,
    PoolVectors,
    Row,
    Search,
    Searcher,
    check_vectors,
)
from langchain_rcr.index.columns import BoolArray, Columns

_FILTERS_KEPT = 32
"""Filters whose rows a snapshot remembers."""

_FORMAT = "langchain-rcr pool vectors"


class Table(Searcher, Protocol):
    """Vectors that can be searched; keys are row numbers, 0 … N−1. Never changes, as far as its holder can see."""

    def __len__(self) -> int: ...
    def extended(self, vectors: PoolVectors) -> Table:
        """This table with more rows, which can all be found. Called by one thread at a time."""
        ...

    def allowing(self, allowed: BoolArray) -> Table:
        """This table where nothing but the rows with `allowed` (N,) can be found."""
        ...

    def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (B, D) of the rows `keys` (B,)."""
        ...

    def opened(self) -> Steps:
        """This table for one selection, by one thread: it may remember from one step to the next."""
        ...


class Steps(Protocol):
    """A table for the steps of one selection."""

    def found(self, search: Search) -> tuple[IntArray, FloatArray, NDArray[np.float64] | None]:
        """Keys (B, t), logits (B, t) and, where there is a τ, log partitions (B,)."""
        ...


class LocalReader:
    """A `Reader` of an engine in this process.

    Args:
        table: what can be found.
        rows: the rows of the table; may go on behind them.
    """

    def __init__(self, table: Table, rows: Sequence[Row]) -> None:
        self._table, self._steps, self._rows = table, table.opened(), rows

    @property
    def size(self) -> int:
        """How many candidates there are."""
        return self._table.size

    async def search(self, search: Search) -> Hits:
        """See `Reader.search`."""
        keys, logits, totals = self._steps.found(search)
        there = keys >= 0
        contexts = np.zeros((*keys.shape, search.states.shape[1]), dtype=np.float32)
        contexts[there] = self._table.vectors(keys[there])
        rows = [[self._rows[key] for key in line if key >= 0] for line in keys.tolist()]
        return Hits(keys, logits, contexts, rows, totals)

    async def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (n, D) of `keys` (n,)."""
        return self._table.candidates(keys)


class _Snapshot:
    """The pool at one moment.

    Args:
        table: the vectors of all rows, deleted ones too.
        rows: a list whose first N are the table's; later changes append to the same list.
        alive: which of them are not deleted, (N,); None: all.
        fields: the fields that any of them has.
        columns: of `rows`.
    """

    def __init__(
        self, table: Table, rows: list[Row], alive: BoolArray | None, fields: frozenset[str], columns: Columns
    ) -> None:
        self.table, self.rows, self.alive, self.fields, self.columns = table, rows, alive, fields, columns
        self._everything = table if alive is None else table.allowing(alive)
        self._filtered: OrderedDict[str, Table] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        return self._everything.size

    def reader(self, where: Filter | None) -> LocalReader:
        return LocalReader(self._everything if where is None else self._passing(where), self.rows)

    def _passing(self, where: Filter) -> Table:
        if fields_of(where) - self.fields:
            raise unknown_field(where, sorted(self.fields))
        name = repr(where)  # not the filter itself: as a key of a dict, 1 is the same as True
        with self._lock:
            if name in self._filtered:
                self._filtered.move_to_end(name)
                return self._filtered[name]
        allowed = self.columns.passing(where, len(self.table))
        table = self.table.allowing(allowed if self.alive is None else allowed & self.alive)
        with self._lock:
            self._filtered[name] = table
            if len(self._filtered) > _FILTERS_KEPT:
                self._filtered.popitem(last=False)
        return table


class LocalIndex(InThisThread, ABC):
    """An engine in this process: a `CandidateIndex`. Every change puts one new snapshot in the place of the old.

    Deleted rows stay in the table, where nothing finds them, until they are more than half of it; then it is made anew
    without them, and keys change. A reader keeps the snapshot that it began with.

    Pickled and copied with its rows.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fingerprint: str | None = None
        self._dim = 0
        self._fill([], self._table(_no_vectors(0)), None)

    @abstractmethod
    def _table(self, vectors: PoolVectors) -> Table:
        """A table of its own over vectors, which it may take over; they may be none."""

    def __getstate__(self) -> dict[str, Any]:
        now = self._now
        dropped = ("_lock", "_now", "_keys", "_fields")
        state = {name: value for name, value in self.__dict__.items() if name not in dropped}
        return state | {"content": (now.rows[: len(now.table)], now.table, now.alive)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        content = state.pop("content")
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._fill(*content)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count()} examples)"

    def bind(self, fingerprint: str, dim: int) -> None:
        """See `CandidateIndex.bind`."""
        with self._lock:
            if self._now.count:
                self._check_binding(fingerprint, dim)
            elif self._dim != dim:
                self._fill([], self._table(_no_vectors(dim)), None)
            self._fingerprint, self._dim = fingerprint, dim

    def count(self) -> int:
        """How many examples there are."""
        return self._now.count

    @asynccontextmanager
    async def read(self, where: Filter | None = None) -> AsyncIterator[LocalReader]:
        """The pool as it is now; see `CandidateIndex.read`."""
        yield self._now.reader(where)

    def add(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: bool = False) -> None:
        """Add examples, all or none; see `CandidateIndex.add`.

        Raises:
            PoolError: an id is taken and `replace` is off, comes twice, or a field can't be copied.
            InputError: vectors of another number or length, or with numbers that are not finite.
        """
        kept = [row.copied() for row in rows]
        ids = [row.id for row in kept]
        with self._lock:
            check_vectors(len(kept), vectors, self._dim)
            seen: set[str] = set()
            for one in ids:
                if one in seen or (one in self._keys and not replace):
                    msg = f"the id {one!r} is taken by another example"
                    raise PoolError(msg)
                seen.add(one)
            if not kept:
                return
            now, dim = self._now, vectors.candidate.shape[1]
            table = now.table if len(now.table) else self._table(_no_vectors(dim))
            start = len(table)
            gone = [self._keys[one] for one in ids if one in self._keys]
            table = table.extended(vectors)
            del now.rows[start:]  # what a change that failed half-way left there is nobody's
            now.rows.extend(kept)
            alive = now.alive
            if alive is not None or gone:
                alive = np.concatenate([np.ones(start, bool) if alive is None else alive, np.ones(len(kept), bool)])
                alive[gone] = False
            self._publish(table, alive, kept, gone)
            self._keys.update(zip(ids, range(start, start + len(kept)), strict=True))
            self._dim = dim
            self._compact()

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples, all at once; unknown ids are ignored. Returns how many there were."""
        with self._lock:
            there = [one for one in dict.fromkeys(ids) if one in self._keys]
            if there:
                now = self._now
                alive = np.ones(len(now.table), dtype=bool) if now.alive is None else now.alive.copy()
                gone = [self._keys[one] for one in there]
                alive[gone] = False
                self._publish(now.table, alive, (), gone)
                for one in there:
                    del self._keys[one]
                self._compact()
            return len(there)

    def known(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids are there."""
        with self._lock:
            return {one for one in ids if one in self._keys}

    def close(self) -> None:
        """Nothing to let go of; for callers that close any engine."""

    def content(self) -> tuple[list[Row], PoolVectors]:
        """All examples, by order of adding, and their vectors (N, D): what saving the pool needs. Not to be changed."""
        now = self._now
        keys = np.arange(len(now.table)) if now.alive is None else np.flatnonzero(now.alive)
        return [now.rows[key] for key in keys.tolist()], _vectors_of(now.table, keys)

    def _fill(self, rows: list[Row], table: Table, alive: BoolArray | None) -> None:
        """Begin with rows and their table."""
        there = range(len(rows)) if alive is None else np.flatnonzero(alive).tolist()
        self._keys = {rows[key].id: key for key in there}
        self._fields = Counter(field for key in there for field in rows[key].example)
        self._now = _Snapshot(table, rows, alive, frozenset(self._fields), Columns(rows))

    def _publish(self, table: Table, alive: BoolArray | None, new: Sequence[Row], gone: Sequence[int]) -> None:
        """The one moment at which a change is there."""
        now, fields = self._now, self._fields.copy()
        fields.update(field for row in new for field in row.example)
        fields.subtract(field for key in gone for field in now.rows[key].example)
        self._fields = +fields
        self._now = _Snapshot(table, now.rows, alive, frozenset(self._fields), now.columns)

    def _compact(self) -> None:
        now = self._now
        if 2 * now.count < len(now.table):
            rows, vectors = self.content()
            self._fill(rows, self._table(vectors), None)

    def _check_binding(self, fingerprint: str, dim: int) -> None:
        if self._dim != dim:
            msg = f"the index holds vectors of {self._dim} numbers, the encoder makes {dim}"
        elif self._fingerprint not in (None, fingerprint):
            msg = f"the index holds vectors of another encoder ({self._fingerprint}, not {fingerprint})"
        else:
            return
        raise CheckpointError(f"{msg}: encode the examples anew, into an index of their own")


def save_vectors(path: str | os.PathLike[str], fingerprint: str, ids: Sequence[str], vectors: PoolVectors) -> None:
    """Write a pool's vectors to a safetensors file, atomically.

    Args:
        path: the file.
        fingerprint: of the encoder that made them.
        ids: the examples' ids, (N,).
        vectors: theirs, by the order of the ids.
    """
    count, dim = vectors.candidate.shape
    meta = {
        "format": _FORMAT,
        "fingerprint": fingerprint,
        "count": str(count),
        "dim": str(dim),
        "ids": _digest(ids),
    }
    tensors = {"candidate": vectors.candidate, "context": vectors.context}
    tensors = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in tensors.items()}
    write_bytes(path, save(tensors, meta))


def load_vectors(path: str | os.PathLike[str], fingerprint: str, ids: Sequence[str]) -> PoolVectors:
    """Read what `save_vectors` wrote.

    Args:
        path: the file.
        fingerprint: of the encoder that is to search them.
        ids: the ids of the examples that they must belong to, in this order.

    Raises:
        CheckpointError: the file is missing, damaged, foreign, or of another encoder or other examples; the message
            says what to rebuild.
    """
    try:
        if not Path(path).is_file():
            raise _unfit(path, "is missing")
        with safe_open(path, framework="numpy") as file:
            meta = file.metadata() or {}
            if meta.get("format") != _FORMAT or set(file.keys()) != {"candidate", "context"}:
                raise _unfit(path, "holds no vectors of a pool")
            vectors = PoolVectors(file.get_tensor("candidate"), file.get_tensor("context"))
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise _unfit(path, f"is damaged ({error})") from error
    if meta.get("fingerprint") != fingerprint:
        raise _unfit(path, f"is of another encoder ({meta.get('fingerprint')}, not {fingerprint})")
    if meta.get("ids") != _digest(ids):
        raise _unfit(path, f"belongs to other examples than those of the pool ({meta.get('count')}, not {len(ids)})")
    right = all(
        matrix.dtype == np.float32 and len(matrix) == len(ids) and np.isfinite(matrix).all()
        for matrix in (vectors.candidate, vectors.context)
    )
    if not right or meta.get("dim") != str(vectors.candidate.shape[1]):
        raise _unfit(path, "is damaged (the vectors are not what its header says)")
    return vectors


def _unfit(path: str | os.PathLike[str], what: str) -> CheckpointError:
    return CheckpointError(f"{os.fspath(path)} {what}: remove it, encode the examples anew and save again")


def _digest(ids: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for one in ids:
        encoded = one.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def _no_vectors(dim: int) -> PoolVectors:
    return PoolVectors(np.empty((0, dim), dtype=np.float32), np.empty((0, dim), dtype=np.float32))


def _vectors_of(table: Table, keys: IntArray) -> PoolVectors:
    return PoolVectors(table.candidates(keys), table.vectors(keys))
