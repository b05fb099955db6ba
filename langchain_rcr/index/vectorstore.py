"""The pool in any LangChain `VectorStore`, Qdrant or Chroma, say, by the methods that all of them have.

Stores rank by cosine, by distance or by inner product, and this engine needs the last. So it stores E_c, divided by a
bound on its length, with one more coordinate that makes all stored vectors 1 long, and queries with a 0 there: then
the three rankings are the same (Bachrach et al. 2014, section 3; Neyshabur & Srebro 2015, section 4). The results are
ranked again with E_c itself, which is kept beside E_z in the documents' metadata.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from numpy.typing import NDArray

from langchain_rcr.basics.progress import track
from langchain_rcr.basics.rows import FloatArray, IntArray, longest
from langchain_rcr.errors import CheckpointError, EngineError, InputError, PoolError, RCRError
from langchain_rcr.index.base import (
    Hits,
    InThisThread,
    PoolVectors,
    Reader,
    Row,
    Seen,
    check_ids,
    check_vectors,
    replaced,
)
from langchain_rcr.index.filters import Filter, fields_of, matches, unknown_field
from langchain_rcr.index.local import LocalReader
from langchain_rcr.index.memory import MatrixTable
from langchain_rcr.index.ranking import best_fetched, log_sums, slack
from langchain_rcr.index.store_filters import DIALECTS, store_filter

T = TypeVar("T")

_EMBEDDINGS = ("embedding", "embeddings", "embedding_function", "embedding_service")
"""What LangChain's integrations call the parameter that takes the embeddings."""

_NAMESPACE = uuid.UUID("6f0e3bb0-5d0c-4f6e-8d0e-7a3f6a1d7c52")
"""Of documents' ids: some stores take nothing but UUIDs."""

_HEADERS = ("", None)
"""The ids, in turn, of the document that says what the others are; no example has them, as an id is never empty."""

_AT_ONCE = 256
"""Documents written or looked up by one call of the store."""

_OF_LENGTHS = ("dim", "shape")
"""In what stores say of vectors of another length."""

_REBUILD = (
    "give the examples a new collection, or delete this one first; they are encoded anew. from_examples fits another "
    "encoder where questions or programs change"
)

_ROUNDING = 4e-6
"""How far off a store's own ranking may be, relative to the bound: float32, squared distances included."""


class PoolEmbeddings(Embeddings):
    """The embeddings that a store of a pool is made with: they hand it the vectors of the examples that it is given.

    Args:
        dim: D of the encoder (`TriEncoder.dim`).
    """

    def __init__(self, dim: int) -> None:
        self.size = dim + 1
        """How long the stored vectors are, for stores that have to be told."""
        self.vectors: dict[str, list[float]] = {}
        """Of the texts that are being added."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of documents on their way into the store; a unit vector for any other text, such as a probe."""
        return [self.vectors.get(text) or self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """A unit vector: pools are asked by vectors, never by texts."""
        return [0.0] * (self.size - 1) + [1.0]


@dataclass(frozen=True, slots=True)
class _Header:
    """What the pool is.

    Args:
        fingerprint: of the encoder.
        dim: D.
        count: examples.
        next: the next key.
        longest: no E_c was ever longer.
        bound: no E_c may be longer; 0 before the first.
        turn: the larger, the newer, where a writer was stopped between writing one and removing the last.
    """

    fingerprint: str
    dim: int
    count: int = 0
    next: int = 0
    longest: float = 0.0
    bound: float = 0.0
    turn: int = 0


class _Found(NamedTuple):
    """An example as it came out of the store."""

    key: int
    row: Row
    candidate: FloatArray
    context: FloatArray

    @classmethod
    def of(cls, document: Document) -> _Found:
        row, metadata = _loaded(document), document.metadata
        both = np.frombuffer(base64.b64decode(metadata["rcr_vectors"]), dtype="<f4").reshape(2, -1)
        return cls(int(metadata["rcr_key"]), Row(row["id"], row["example"], row["program"]), both[0], both[1])


class VectorStoreIndex(InThisThread):
    """A pool in a LangChain vector store: a `CandidateIndex`.

    The store holds a document an example: the example as JSON, its vectors in the metadata; and one document about the
    pool itself. It must be this pool's alone. Picks are exactly those of `MemoryIndex` where the store searches
    exactly, and as good as its search where it doesn't.

    What a `VectorStore` has no way to promise: a change is not seen all at once, a selection sees what is changed
    during it, and only one process may write at a time. Use `PgVectorIndex` where that matters.

    Args:
        store: the class of the store or any function that makes one and has a parameter for the embeddings
            (`QdrantVectorStore.construct_instance`, `PGVectorStore.create_sync`, a lambda); or a store that was made
            with `PoolEmbeddings`.
        pool: a name that goes into the documents' ids: it tells pools in one table apart (`PGVector`'s collections).
        longest: the length that no E_c will exceed. None: twice that of the longest of the examples added first.
            Longer ones are refused. Far too large a bound costs precision in the store.
        filter_translator: makes the store's own filter, as its searches take it (`filter=`), of a
            `langchain_rcr.index.filters.Filter`; the examples' scalar fields are metadata of the same name. It may let
            too many examples through, never too few; None from it: the store can't filter this. By default, the stores
            of `DIALECTS` are told which strings a field must be one of.
        scan_limit: examples that a filter may read where the store is told nothing of it.
        partition: candidates whose logits make up probabilities, which are upper bounds in larger pools.
        parallel: whether the store's client may be called by several threads at once.
        **options: passed on to the class or function.

    Raises:
        InputError: a function without a parameter for the embeddings, a store with other embeddings, or a number that
            is not positive.

    Every method raises EngineError, with the store's name, where the store fails or lacks a method. Pickled and copied
    with the store, if that can be.
    """

    def __init__(
        self,
        store: VectorStore | Callable[..., VectorStore],
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
            if value is not None and not value > 0:
                raise InputError(f"{name} must be a positive number, not {value!r}")
        self._pool, self._longest, self._translate = pool, longest, filter_translator
        self._scan_limit, self._partition = scan_limit, partition
        self._parallel = parallel
        self._new_locks()
        self._embeddings = PoolEmbeddings(0)
        self._store: VectorStore | None = None
        if isinstance(store, VectorStore):
            if not isinstance(store.embeddings, PoolEmbeddings) or options:
                msg = f"a {type(store).__name__} must be made with PoolEmbeddings(encoder.dim), or given as a class"
                raise InputError(msg)
            self._store, self._embeddings, self.name = store, store.embeddings, type(store).__name__
        else:
            parameter = _parameter(store)
            self._make = partial(store, **{parameter: self._embeddings}, **options)
            self.name = "the vector store"

    def _new_locks(self) -> None:
        self._lock, self._asking = threading.RLock(), nullcontext() if self._parallel else threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        made = () if self._store is None else ("_make",)
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_asking", *made)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._new_locks()

    def __repr__(self) -> str:
        return f"VectorStoreIndex({self.name})"

    def bind(self, fingerprint: str, dim: int) -> None:
        """See `CandidateIndex.bind`. Makes the store, unless it was given."""
        with self._lock:
            try:
                if self._store is None:
                    self._embeddings.size = dim + 1
                    self._store = self._ask(self._make)
                    self.name = type(self._store).__name__
                header = self._header()
                foreign = header is None and self._beside(1)
            except EngineError as error:
                # Not all stores can say what they hold without a vector of the length that they hold.
                if not any(word in str(error).lower() for word in _OF_LENGTHS):
                    raise
                msg = f"{error}; these encoders make vectors of {dim} + 1 numbers, others filled it: {_REBUILD}"
                raise CheckpointError(msg) from error
            if foreign:
                raise EngineError(f"{self.name} holds documents but no pool: add the examples to an empty collection")
            if header is None or (not header.count and header.dim == dim):
                if self._embeddings.size != dim + 1:
                    msg = f"{self.name} was made for vectors of {self._embeddings.size - 1} numbers, these have {dim}"
                    raise CheckpointError(msg)
                if header is None or header.fingerprint != fingerprint:
                    self._write_header(_Header(fingerprint, dim))
            elif (header.fingerprint, header.dim) != (fingerprint, dim):
                raise CheckpointError(
                    f"{self.name} holds {header.count} examples encoded by other encoders (fingerprint "
                    f"{header.fingerprint}, D = {header.dim}) than these (fingerprint {fingerprint}, D = {dim}): "
                    f"{_REBUILD}"
                )

    def count(self) -> int:
        """How many examples there are."""
        return self._bound().count

    @asynccontextmanager
    async def read(self, where: Filter | None = None) -> AsyncIterator[Reader]:
        """The pool as it is now, save for changes while it is read; see `CandidateIndex.read`.

        With a filter the examples that it lets through are read, and searched in this process.

        Raises:
            InputError: the filter asks about a field that no example has; the pool is too large for filters.
        """
        header = self._bound()
        if where is None:
            yield _Reader(self, header, self._partition)
        else:
            found = sorted(self._passing(where, header), key=lambda one: one.key)
            vectors = np.array([(one.candidate, one.context) for one in found], dtype=np.float32)
            candidate, context = np.ascontiguousarray(vectors.reshape(-1, 2, header.dim).swapaxes(0, 1))
            yield LocalReader(MatrixTable(PoolVectors(candidate, context)), [one.row for one in found])

    def add(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: bool | Collection[str] = False) -> None:
        """Add examples; see `CandidateIndex.add`. What the store fails to add is taken out again, as far as it can be.

        Raises:
            PoolError: an id is taken and isn't replaced, comes twice, or a field is no JSON.
            InputError: vectors of another number or length, or with numbers that are not finite, or longer than the
                bound.
        """
        with self._lock:
            header = self._bound()
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
            documents = [self._document(key, *one) for key, one in enumerate(each, start=header.next)]
            ids = [row.id for row in rows]
            going = replaced(ids, replace)
            there = self.known([*ids, *going])
            gone = there & {*going}
            check_ids(ids, (there - gone) & {*ids})
            if gone:
                self._remove(sorted(gone))
            scaled = np.zeros((len(rows), header.dim + 1), dtype=np.float64)
            scaled[:, :-1] = np.asarray(vectors.candidate) / bound
            scaled[:, -1] = np.sqrt(np.maximum(0.0, 1.0 - np.square(scaled[:, :-1]).sum(axis=1)))
            header = dataclasses.replace(
                header,
                count=header.count - len(gone),
                next=header.next + len(rows),
                longest=max(header.longest, longest_one),
                bound=bound,
            )
            self._write_header(header)
            try:
                self._put(documents, scaled)
            except EngineError:
                self._remove(ids)
                raise
            self._write_header(dataclasses.replace(header, count=header.count + len(rows)))

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples; unknown ids are ignored. Returns how many there were."""
        with self._lock:
            header, there = self._bound(), sorted(self.known(ids))
            if there:
                self._remove(there)
                self._write_header(dataclasses.replace(header, count=header.count - len(there)))
            return len(there)

    def known(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids are there."""
        return {row.id for row in self.rows(ids)}

    def rows(self, ids: Collection[str] | None = None) -> list[Row]:
        """The examples with these ids, or all that the store finds."""
        header = self._bound()
        if ids is None:
            ones = np.ones(header.dim, dtype=np.float32)
            found = self.nearest(ones, header.count) if header.count else []
            return [one.row for one in sorted(found, key=lambda one: one.key)]
        wanted = dict.fromkeys(ids)
        names = [self._name(one) for one in wanted if one]
        loaded = map(_loaded, self._documents(names, len(_HEADERS) + header.count))
        return [Row(one["id"], one["example"], one["program"]) for one in loaded if one["id"] in wanted]

    def close(self) -> None:
        """Nothing: a store has no end of its own; its client is the caller's."""

    def nearest(self, state: FloatArray, width: int, filter: Any = None) -> list[_Found]:
        """The examples that the store puts first for a state (D,), at most `width`."""
        length = float(np.linalg.norm(state.astype(np.float64)))
        query = [*(state / length).tolist(), 0.0] if length else [0.0] * len(state) + [1.0]
        options = {} if filter is None else {"filter": filter}
        # More, as headers may be among them.
        documents = self._ask(self._opened.similarity_search_by_vector, query, k=width + len(_HEADERS), **options)
        return [_Found.of(document) for document in documents if document.metadata["rcr_key"] >= 0][:width]

    # ------------------------------------------------------------------ the store

    @property
    def _opened(self) -> VectorStore:
        if self._store is None:
            raise RuntimeError("bind(fingerprint, dim) comes before anything else")
        return self._store

    def _ask(self, method: Callable[..., T], *arguments: Any, **options: Any) -> T:
        try:
            with self._asking:
                return method(*arguments, **options)
        except RCRError:
            raise
        except NotImplementedError as error:
            msg = f"{self.name} has no {getattr(method, '__name__', 'such method')}, which this engine needs ({error})"
            raise EngineError(msg) from error
        except Exception as error:  # each store has its own
            raise EngineError(f"{self.name}: {' '.join(str(error).split())[:500] or type(error).__name__}") from error

    def _bound(self) -> _Header:
        header = self._header()
        if header is None:
            raise EngineError(f"{self.name} holds no pool any more: its documents were deleted by somebody else")
        return header

    def _header(self) -> _Header | None:
        return next(iter(self._headers()), None)

    def _headers(self) -> list[_Header]:
        """The newest first."""
        documents = self._documents([self._name(one) for one in _HEADERS], len(_HEADERS))
        headers = [_Header(**_loaded(document)) for document in documents]
        return sorted(headers, key=lambda header: header.turn, reverse=True)

    def _beside(self, most: int) -> list[Document]:
        """The `most` documents that are nearest to where headers are, and nothing else."""
        place = [0.0] * (self._embeddings.size - 1) + [-1.0]
        return self._ask(self._opened.similarity_search_by_vector, place, k=most)

    def _documents(self, names: list[str], most: int) -> list[Document]:
        """Those of some ids; a store that can't look ids up is searched for the `most` documents that it has."""
        store = self._opened
        if type(store).get_by_ids is not VectorStore.get_by_ids:
            parts = [names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE)]
            return [document for part in parts for document in self._ask(store.get_by_ids, part)]
        if most > len(_HEADERS) + self._scan_limit:
            raise InputError(
                f"{self.name} can't look ids up, and holds more examples than scan_limit = {self._scan_limit:,}"
            )
        documents = self._beside(most) if names else []
        if documents and all(one.metadata["rcr_key"] >= 0 for one in documents):
            raise EngineError(
                f"{self.name} can't look ids up, and doesn't find what is nearest: its search must be exact"
            )
        wanted = set(names)
        return [one for one in documents if self._name(_id(_loaded(one))) in wanted]

    def _write_header(self, header: _Header) -> None:
        """In another place than the last one, which goes afterwards: there is always one, whoever reads or is killed.

        Not all stores overwrite by id.
        """
        old = [dataclasses.asdict(one) for one in self._headers()]
        if old[1:]:
            self._remove([_id(one) for one in old[1:]])
        new = dataclasses.asdict(header) | {"turn": old[0]["turn"] + 1 if old else 0}
        metadata = {"rcr_key": -1, "rcr_vectors": ""}
        document = Document(json.dumps(new), id=self._name(_id(new)), metadata=metadata)
        self._put([document], -np.eye(1, header.dim + 1, header.dim))
        if old:
            self._remove([_id(old[0])])

    def _put(self, documents: Sequence[Document], vectors: NDArray[np.float64]) -> None:
        for start in track(range(0, len(documents), _AT_ONCE), f"adding to {self.name}"):
            some = list(documents[start : start + _AT_ONCE])
            lists = vectors[start : start + _AT_ONCE].tolist()
            self._embeddings.vectors = {one.page_content: vector for one, vector in zip(some, lists, strict=True)}
            try:
                self._ask(self._opened.add_documents, some, ids=[one.id for one in some])
            finally:
                self._embeddings.vectors = {}

    def _remove(self, ids: Sequence[str | None]) -> None:
        self._ask(self._opened.delete, [self._name(one) for one in ids])

    def _name(self, example_id: str | None) -> str:
        return str(uuid.uuid5(_NAMESPACE, json.dumps([self._pool, example_id])))

    def _document(self, key: int, row: Row, candidate: FloatArray, context: FloatArray) -> Document:
        try:
            text = json.dumps({"id": row.id, "example": row.example, "program": row.program})
        except (TypeError, ValueError) as error:
            msg = f"example {row.id!r} has a field that is no JSON, so {self.name} can't keep it: {error}"
            raise PoolError(msg) from None
        packed = base64.b64encode(np.stack([candidate, context]).astype("<f4").tobytes()).decode()
        filters = self._translate is not None or type(self._opened).__name__ in DIALECTS
        fields = row.example.items() if filters else ()
        scalars = {name: value for name, value in fields if isinstance(value, str | int | float)}
        return Document(text, id=self._name(row.id), metadata=scalars | {"rcr_key": key, "rcr_vectors": packed})

    def _passing(self, where: Filter, header: _Header) -> list[_Found]:
        own = self._translate(where) if self._translate is not None else store_filter(self._opened, where)
        if own is None and header.count > self._scan_limit:
            raise InputError(
                f"filter: {self.name} holds {header.count:,} examples, more than scan_limit = {self._scan_limit:,}: "
                "give the index a filter_translator, which makes the store's own filter"
            )
        ones = np.ones(header.dim, dtype=np.float32)
        found = self.nearest(ones, header.count, own) if header.count else []
        if own is not None and not found and header.count <= self._scan_limit:
            # To tell a field that no example has from a value that none has.
            own, found = None, self.nearest(ones, header.count)
        known = {field for one in found for field in one.row.example}
        if header.count and own is None and fields_of(where) - known:
            raise unknown_field(where, sorted(known))
        return [one for one in found if matches(where, one.row.example)]


class _Reader:
    """A `Reader` of the whole pool; asks for one state at a time, as a `VectorStore` takes one query a call."""

    def __init__(self, index: VectorStoreIndex, header: _Header, partition: int) -> None:
        self._index, self._header, self._partition = index, header, partition
        self._seen, self._candidates = Seen(), dict[int, FloatArray]()
        self.size = header.count

    async def search(self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None) -> Hits:
        """See `Reader.search`."""
        margins, size, off = slack(states, self._header.longest), self.size, _ROUNDING * self._header.bound
        keys, logits = await best_fetched(self._fetch, states, t, exclude, margins, size, rounding=off)
        totals = None
        if tau is not None:
            _, some = await best_fetched(self._fetch, states, self._partition, exclude, 0 * margins, size, rounding=off)
            totals = log_sums(some, tau)
        return Hits(keys, logits, self._seen.rows, self._seen.contexts, totals)

    async def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (n, D) of `keys` (n,)."""
        return np.array([self._candidates[key] for key in keys.tolist()]).reshape(-1, self._header.dim)

    async def _fetch(self, states: FloatArray, width: int) -> list[tuple[IntArray, FloatArray]]:
        """See `best_fetched`."""
        near = []
        for state in states:
            found = self._index.nearest(state, width)
            self._seen.rows |= {one.key: one.row for one in found}
            self._seen.vectors |= {one.key: one.context for one in found}
            self._candidates |= {one.key: one.candidate for one in found}
            matrix = np.array([one.candidate for one in found], dtype=np.float32).reshape(-1, len(state))
            near.append((np.array([one.key for one in found], dtype=np.int64), matrix @ state))
        return near


def _parameter(make: Callable[..., VectorStore]) -> str:
    """The parameter of a class or function that takes the embeddings."""
    names = inspect.signature(make).parameters
    found = next((name for name in _EMBEDDINGS if name in names), None)
    if found is None:
        msg = f"{make!r} has no parameter for embeddings (looked for {', '.join(_EMBEDDINGS)}): wrap it in a function"
        raise InputError(msg)
    return found


def _loaded(document: Document) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(document.page_content)
    return loaded


def _id(loaded: dict[str, Any]) -> str | None:
    """An example's, or a header's."""
    found: str | None = loaded["id"] if "id" in loaded else _HEADERS[loaded.get("turn", 0) % len(_HEADERS)]
    return found
