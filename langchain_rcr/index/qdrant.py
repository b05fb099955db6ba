"""The pool in Qdrant: a server that many machines share, or a folder or memory of this process."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from langchain_rcr.errors import EngineError, InputError, MissingExtraError
from langchain_rcr.filters import Filter
from langchain_rcr.index.base import PoolVectors, Row

try:
    from qdrant_client import QdrantClient
except ImportError:
    raise MissingExtraError("qdrant_client", "qdrant") from None

from langchain_rcr.index.qdrant_collection import Collection, prepare
from langchain_rcr.index.qdrant_link import Link, Remote, Threaded, check_url
from langchain_rcr.index.qdrant_reader import AsyncQdrantReader, QdrantReader


@dataclass(frozen=True, slots=True)
class _Settings:
    """The arguments of `QdrantIndex`."""

    where: str | QdrantClient
    collection: str
    api_key: str | None = field(repr=False)
    exact: bool
    hnsw_ef: int | None
    timeout_s: float

    def __post_init__(self) -> None:
        if not isinstance(self.collection, str) or not self.collection:
            msg = f"qdrant: the collection must have a name, not {self.collection!r}"
            raise InputError(msg)
        if not 0 < self.timeout_s <= 1_000_000:
            msg = f"timeout_s must be a positive number of seconds, not {self.timeout_s!r}"
            raise InputError(msg)
        if isinstance(self.where, QdrantClient):
            if self.where.init_options.get("prefer_grpc"):
                msg = "qdrant: the client must speak REST (prefer_grpc=False)"
                raise InputError(msg)
        elif "://" in self.where or re.fullmatch(r"[\w.-]+:\d+", self.where):
            check_url(self.where)

    @property
    def tied(self) -> bool:
        """Whether the data or the client is this process's alone."""
        return isinstance(self.where, QdrantClient) or "://" not in self.where

    def link(self) -> Link:
        """A link to Qdrant, for the process that calls."""
        if isinstance(self.where, str) and "://" in self.where:
            return Remote(self.where, self.api_key, self.timeout_s)
        return Threaded(self.where)


class QdrantIndex:
    """The engine that keeps the pool in a Qdrant collection: an `AsyncCandidateIndex`.

    A point has two named vectors, `candidate` (searched by inner product) and `context`, and a payload with the example
    as JSON text. The collection is made by `bind`, with the encoder's fingerprint in its metadata (Qdrant 1.16 or
    newer). Any number of threads, event loops and, with a server, processes and machines may share it.

    What a reader sees: Qdrant has no snapshots. A search finds what is there at its moment, so examples added during a
    selection may be picked in its later steps, and deleted ones can't be found any more; but what was once found stays
    usable to the end of the selection, vectors and example. `size` is that of the beginning.

    What a writer can rely on: up to about 8 MB of examples and vectors are sent as one request, which Qdrant does as a
    whole; more are sent in several. If one of these fails, the new examples of those before it are deleted again, as
    far as the server can be reached (those that replaced others stay); if not, or if this process dies, they stay,
    and adding all of them again with `replace` mends it. Where two writers add the same id at the same time, one of
    them gets the `PoolError` (Qdrant 1.17 or newer; before, the last one wins).

    Keys are made of the time (ticks of 16 µs), but always above the largest in the collection, and a random number of
    16 bits for each writer: later examples have larger keys, those that several writers add at the same time are in any
    order, and no two are equal unless two writers drew the same number and add in the same ticks.

    Without a server (a folder or `":memory:"`), Qdrant's client does the work in Python: for tests and small pools, up
    to about 20,000 examples. A folder is opened by one process at a time, and holds pickles: open none that you don't
    trust.

    Args:
        where: a server's URL (`http://host:6333`), a folder, `":memory:"`, or a `QdrantClient` (REST), which stays the
            caller's to close.
        collection: its name.
        api_key: of the server; sent over http too, where anyone on the way can read it. Pickled with the index.
        exact: search all vectors; otherwise by an HNSW graph: faster in large pools, but may miss some.
        hnsw_ef: candidates looked at in a search of the graph; None: the server's choice.
        timeout_s: how long a server may take to answer a request.

    Raises:
        MissingExtraError: qdrant-client is not installed (when this module is imported).
        InputError: an argument is none of these.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | QdrantClient,
        collection: str,
        *,
        api_key: str | None = None,
        exact: bool = True,
        hnsw_ef: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not isinstance(where, QdrantClient):
            where = os.fspath(where)
        self._settings = _Settings(where, collection, api_key, exact, hnsw_ef, timeout_s)
        self._bound: tuple[str, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self._collection: Collection | None = None
        self._process = 0
        self._leave: weakref.finalize[[Link], QdrantIndex] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        where = self._settings.where
        place = where if isinstance(where, str) else type(where).__name__
        return f"QdrantIndex({place!r}, {self._settings.collection!r})"

    def __getstate__(self) -> dict[str, Any]:
        if self._settings.tied:
            msg = f"{self!r} can't be pickled, since its data or client is in this process: use a server's URL"
            raise InputError(msg)
        return {"_settings": self._settings, "_bound": self._bound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __copy__(self) -> QdrantIndex:
        """The same collection by connections of its own; itself where there is no server."""
        if self._settings.tied:
            return self
        other = QdrantIndex.__new__(QdrantIndex)
        other.__setstate__(self.__getstate__())
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> QdrantIndex:
        return self.__copy__()

    # ------------------------------------------------------------------ CandidateIndex

    def bind(self, fingerprint: str, dim: int) -> None:
        """Make the collection, or check that it is of this encoder; see `CandidateIndex.bind`.

        Raises:
            CheckpointError: it holds vectors of another encoder or length, or is no pool.
            EngineError: the server can't be reached, or is older than 1.16.
        """
        collection = self._open()
        collection.link.loop.run(collection.bind(fingerprint, dim))
        self._bound = (fingerprint, dim)

    def count(self) -> int:
        """How many examples there are."""
        collection = self._open()
        return collection.link.loop.run(collection.count())

    @contextmanager
    def read(self, where: Filter | None = None) -> Iterator[QdrantReader]:
        """The pool from now on; see `CandidateIndex.read`, and above for what a reader sees.

        Raises:
            InputError: the filter asks about a field that no example has.
            EngineError: the server can't be reached, or failed.
        """
        collection = self._open()
        loop = collection.link.loop
        yield QdrantReader(loop.run(collection.view(where)), loop)

    @asynccontextmanager
    async def aread(self, where: Filter | None = None) -> AsyncIterator[AsyncQdrantReader]:
        """`read`, awaited."""
        collection = self._open()
        loop = collection.link.loop
        yield AsyncQdrantReader(await loop.arun(collection.view(where)), loop)

    def add(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: bool = False) -> None:
        """Add examples; see `CandidateIndex.add`, and above for what holds if it fails half-way.

        Raises:
            PoolError: an id is taken and `replace` is off, comes twice, or a field can't be kept; nothing was added.
            InputError: vectors of another number or length, or with numbers that are not finite; nothing was added.
            CheckpointError: the collection now belongs to another encoder; nothing was added.
            EngineError: the server can't be reached, or failed.
        """
        prepared = prepare(rows, vectors)
        collection = self._open()
        collection.link.loop.run(collection.add(prepared, replace))

    async def aadd(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: bool = False) -> None:
        """`add`, awaited."""
        prepared = await asyncio.to_thread(prepare, rows, vectors)
        collection = self._open()
        await collection.link.loop.arun(collection.add(prepared, replace))

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples, all at once; unknown ids are ignored. Returns how many there were."""
        collection = self._open()
        return collection.link.loop.run(collection.delete(ids))

    async def adelete(self, ids: Sequence[str]) -> int:
        """`delete`, awaited."""
        collection = self._open()
        return await collection.link.loop.arun(collection.delete(ids))

    def known(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids are there."""
        collection = self._open()
        return collection.link.loop.run(collection.known(ids))

    def close(self) -> None:
        """Let go of connections or the folder; a second call does nothing, any other is an `EngineError` afterwards."""
        with self._lock:
            collection, self._collection, self._closed = self._collection, None, True
        if collection is not None and self._process == os.getpid():
            if self._leave is not None:
                self._leave.detach()
            collection.link.loop.run(_close(collection.link))

    def _open(self) -> Collection:
        """The collection, by a client that belongs to this process."""
        with self._lock:
            if self._closed:
                msg = f"{self!r} is closed: make a new one"
                raise EngineError(msg)
            if self._collection is None or self._process != os.getpid():
                if self._collection is not None and self._settings.tied:
                    msg = f"{self!r} belongs to the process that opened it: use a server to share it with others"
                    raise EngineError(msg)
                if self._leave is not None:
                    self._leave.detach()
                settings = self._settings
                link = settings.link()
                link.loop.at_end.add(link.close)
                self._leave = weakref.finalize(self, _leave, link)
                self._leave.atexit = False  # the loop closes what is left
                self._process = os.getpid()
                self._collection = Collection(link, settings.collection, settings.exact, settings.hnsw_ef, self._bound)
            return self._collection


async def _close(link: Link) -> None:
    link.loop.at_end.discard(link.close)
    await link.close()


def _leave(link: Link) -> None:
    """Close a link whose index nobody holds any more."""
    if link.process != os.getpid():
        return  # after a fork; the parent has use for it
    with suppress(RuntimeError):  # the loop has ended
        link.loop.submit(_close(link))
