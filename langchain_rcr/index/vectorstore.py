"""The pool in any LangChain `VectorStore`, such as Qdrant or Chroma, using only methods that all of them have.

Stores rank by cosine, by distance or by inner product, and this engine needs the last. So it stores E_c divided by a
bound on its length, with an extra coordinate that gives all stored vectors length 1, and queries with a 0 there. Then
the three rankings are the same (Bachrach et al. 2014, section 3; Neyshabur & Srebro 2015, section 4). The results are
reranked with E_c itself, which is kept beside E_z in the documents' metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from langchain_core.vectorstores import VectorStore

from langchain_rcr.basics.rows import DoubleArray, FloatArray, IntArray, longest
from langchain_rcr.errors import CheckpointError, EngineError, InputError
from langchain_rcr.index.base import Hits, InThisThread, PoolVectors, Reader, Row, check_ids, check_vectors
from langchain_rcr.index.documents import Found, Header, StoredDocuments, store_filter
from langchain_rcr.index.filters import Filter, fields_of, matches, unknown_field
from langchain_rcr.index.memory import MatrixTable
from langchain_rcr.index.ranking import Near, best_fetched, log_sums, slack

_OF_LENGTHS = ("dim", "shape")
"""Words in stores' errors about vectors of another length."""

_REBUILD = (
    "give the examples a new collection, or delete this one first; they are encoded anew. from_examples fits another "
    "encoder where questions or programs change"
)

_ROUNDING = 4e-6
"""How far off a store's own ranking may be, relative to the bound: float32 rounding, including squared distances."""


class VectorStoreIndex(InThisThread):
    """A pool in a LangChain vector store: a `CandidateIndex`.

    The store holds one document per example, with the example as JSON and its vectors in the metadata, and one about
    the pool itself. It must not be shared with anything else. Picks are exactly those of `MemoryIndex` if the store
    searches exactly, and otherwise as good as its search.

    A `VectorStore` can't make changes atomic or isolate a selection from changes made during it, and only one process
    may write at a time. Use `PgVectorIndex` where that matters.

    Args:
        store: the class of the store, or any function that creates one and has a parameter for the embeddings
            (`QdrantVectorStore.construct_instance`, `PGVectorStore.create_sync`, a lambda).
        pool: a name that goes into the documents' ids, to tell apart pools in one table (`PGVector`'s collections).
        longest: an upper bound on the length of E_c. None: twice the longest of the examples added first. Longer ones
            are refused. A far too large bound costs precision in the store.
        filter_translator: makes the store's own filter, as its searches take it (`filter=`), from a
            `langchain_rcr.index.filters.Filter`; the examples' scalar fields are metadata of the same name. It may let
            too many examples through, never too few; it returns None if the store can't filter this. By default, the
            stores in `DIALECTS` apply conditions on strings.
        scan_limit: the most examples that a filter may read if the store can't apply any of it.
        partition: how many candidates probabilities sum over; in larger pools they are upper bounds.
        parallel: whether the store's client may be called by several threads at once.
        **options: passed on to the class or function.

    Raises:
        InputError: a function without a parameter for the embeddings, or a number that is not positive.

    Every method raises an EngineError that names the store if it fails. Pickled and copied with it, if it can be.
    """

    def __init__(
        self,
        store: Callable[..., VectorStore],
        *,
        pool: str = "pool",
        longest: float | None = None,
        filter_translator: Callable[[Filter], Any] | None = None,
        scan_limit: int = 10_000,
        partition: int = 256,
        parallel: bool = False,
        **options: Any,
    ) -> None:
        for name, value in (("longest", longest), ("scan_limit", scan_limit), ("partition", partition)):
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise InputError(f"{name} must be a positive number, not {value!r}")
        self._longest, self._translate = longest, filter_translator
        self._scan_limit, self._partition = scan_limit, partition
        own = filter_translator is not None
        self.documents = StoredDocuments(store, pool, scan_limit, filters=own, parallel=parallel, **options)

    @property
    def name(self) -> str:
        """The store's name."""
        return self.documents.name

    def __repr__(self) -> str:
        return f"VectorStoreIndex({self.name})"

    def bind(self, fingerprint: str, dim: int) -> None:
        """See `CandidateIndex.bind`. Creates the store."""
        with self.documents.changing:
            try:
                self.documents.open(dim)
                header = next(iter(self.documents.headers()), None)
                foreign = header is None and self.documents.beside_header(1)
            except EngineError as error:
                # Some stores can't say what they hold without a vector of the right length.
                if not any(word in str(error).lower() for word in _OF_LENGTHS):
                    raise
                msg = f"{error}; these encoders make vectors of {dim} + 1 numbers, others filled it: {_REBUILD}"
                raise CheckpointError(msg) from error
            if foreign:
                raise EngineError(f"{self.name} holds documents but no pool: add the examples to an empty collection")
            if header is not None and (header.fingerprint, header.dim) == (fingerprint, dim):
                return
            if header is not None and (header.most or header.dim != dim):
                raise CheckpointError(
                    f"{self.name} holds {header.most} examples encoded by other encoders (fingerprint "
                    f"{header.fingerprint}, D = {header.dim}) than these (fingerprint {fingerprint}, D = {dim}): "
                    f"{_REBUILD}"
                )
            self.documents.write_header(Header(fingerprint, dim))

    def count(self) -> int:
        """How many examples there are."""
        return self._settled().count

    @asynccontextmanager
    async def read(self, where: Filter | None = None) -> AsyncIterator[Reader]:
        """The pool as it is now, except for changes while it is read; see `CandidateIndex.read`.

        With a filter, the examples that pass are read, and searched in this process; the pool may be too large for it.
        """
        header = self._bound()
        if where is None:
            yield _Reader(self.documents, header, self._partition)
        else:
            found = self._passing(where, header)
            vectors = np.array([(one.candidate, one.context) for one in found], dtype=np.float32)
            candidate, context = np.ascontiguousarray(vectors.reshape(-1, 2, header.dim).swapaxes(0, 1))
            yield MatrixTable(PoolVectors(candidate, context), [one.row for one in found]).opened()

    def add(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: Collection[str] = ()) -> None:
        """See `CandidateIndex.add`; too long vectors are refused. A failure is undone as far as possible."""
        with self.documents.changing:
            header = self._settled()
            check_vectors(len(rows), vectors, header.dim)
            if not rows:
                return
            longest_one = longest(vectors.candidate)
            bound = header.bound or self._longest or 2 * longest_one or 1.0
            if longest_one > bound:
                raise InputError(
                    f"an example's vector has the length {longest_one:.4g}, and {self.name} was filled for lengths up "
                    f"to {bound:.4g}: fill a new collection, with longest= for the longest that may come"
                )
            each = zip(rows, vectors.candidate, vectors.context, strict=True)
            documents = [self.documents.document(key, *one) for key, one in enumerate(each, start=header.next)]
            ids = [row.id for row in rows]
            there = self._found([*ids, *replace], header)
            gone = sorted(there.keys() & {*replace})
            check_ids(ids, there.keys() - {*gone})
            header = dataclasses.replace(
                header,
                count=header.count - len(gone),
                unsure=len(gone) + len(rows),
                next=header.next + len(rows),
                longest=max(header.longest, longest_one),
                bound=bound,
            )
            self.documents.write_header(header)
            self.documents.remove(gone)
            try:
                self.documents.put(documents, _placed(vectors.candidate, bound))
            except EngineError:
                self.documents.remove(ids)
                if gone:
                    before = [there[one] for one in gone]
                    documents = [self.documents.document(*one) for one in before]
                    self.documents.put(documents, _placed([one.candidate for one in before], bound))
                raise
            self.documents.write_header(dataclasses.replace(header, count=header.count + len(rows), unsure=0))

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples; unknown ids are ignored. Returns how many there were."""
        with self.documents.changing:
            header, there = self._settled(), sorted(self.known(ids))
            if there:
                header = dataclasses.replace(header, count=header.count - len(there), unsure=len(there))
                self.documents.write_header(header)
                self.documents.remove(there)
                self.documents.write_header(dataclasses.replace(header, unsure=0))
            return len(there)

    def known(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids exist."""
        return {row.id for row in self.rows(ids)}

    def rows(self, ids: Collection[str] | None = None) -> list[Row]:
        """The examples with these ids, or all that the store finds."""
        header = self._bound()
        return [one.row for one in (self._all(header) if ids is None else self._found(ids, header).values())]

    def _bound(self) -> Header:
        headers = self.documents.headers()
        if not headers:
            raise EngineError(f"{self.name} holds no pool any more: its documents were deleted by somebody else")
        return headers[0]

    def _settled(self) -> Header:
        """The header, with what a change that was cut short has left counted."""
        header = self._bound()
        return dataclasses.replace(header, count=len(self.rows()), unsure=0) if header.unsure else header

    def _all(self, header: Header, own: Any = None) -> list[Found]:
        """All examples that pass the store's own filter, in the order of adding."""
        found = self.documents.nearest(np.ones(header.dim, dtype=np.float32), header.most, own) if header.most else []
        return sorted(found, key=lambda one: one.key)

    def _found(self, ids: Collection[str], header: Header) -> dict[str, Found]:
        """The examples with these ids, by id."""
        names = [self.documents.name_of(one) for one in dict.fromkeys(ids) if one]
        return {one.row.id: one for one in map(Found.of, self.documents.by_names(names, header.most))}

    def _passing(self, where: Filter, header: Header) -> list[Found]:
        readable = header.most <= self._scan_limit
        if self._translate is not None:
            own = self._translate(where)
        else:
            own = store_filter(self.documents.store, where, header.most if readable else None)
        if own is None and not readable:
            raise InputError(
                f"filter: {self.name} holds {header.most:,} examples, more than scan_limit = {self._scan_limit:,}: "
                "give the index a filter_translator, which makes the store's own filter"
            )
        found = self._all(header, own)
        passing = [one for one in found if matches(where, one.row.example)]
        if own is not None and not passing and readable:
            # To tell a field that no example has from a value that no example has.
            own, found = None, self._all(header)
        known = {field for one in found for field in one.row.example}
        if found and own is None and fields_of(where) - known:
            raise unknown_field(where, sorted(known))
        return passing


def _placed(candidates: Any, bound: float) -> DoubleArray:
    """Stored vectors (n, D + 1), of length 1, of E_c (n, D) no longer than the bound."""
    scaled = np.asarray(candidates, dtype=np.float64) / bound
    return np.column_stack((scaled, np.sqrt(np.maximum(0.0, 1.0 - np.square(scaled).sum(axis=1)))))


class _Reader:
    """A `Reader` of the whole pool; searches for one state at a time, as a `VectorStore` takes one query per call."""

    def __init__(self, documents: StoredDocuments, header: Header, partition: int) -> None:
        self._documents, self._header, self._partition = documents, header, partition
        self._found = dict[int, Found]()
        self.size = header.most

    async def search(self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None) -> Hits:
        margins, size, off = slack(states, self._header.longest), self.size, _ROUNDING * self._header.bound
        keys, logits = await best_fetched(self._fetch, states, t, exclude, margins, size, rounding=off)
        totals = None
        if tau is not None:
            _, some = await best_fetched(self._fetch, states, self._partition, exclude, 0 * margins, size, rounding=off)
            totals = log_sums(some, tau)
        rows = {key: one.row for key, one in self._found.items()}
        return Hits(keys, logits, rows, self._contexts, totals)

    async def candidates(self, keys: IntArray) -> FloatArray:
        return np.array([self._found[key].candidate for key in keys.tolist()]).reshape(-1, self._header.dim)

    def _contexts(self, keys: IntArray) -> FloatArray:
        return np.stack([self._found[key].context for key in keys.tolist()])

    async def _fetch(self, states: FloatArray, width: int) -> list[Near]:
        near = []
        for state in states:
            found = self._documents.nearest(state, width)
            self._found |= {one.key: one for one in found}
            matrix = np.array([one.candidate for one in found], dtype=np.float32).reshape(-1, len(state))
            near.append((np.array([one.key for one in found], dtype=np.int64), matrix @ state))
        return near
