"""A pool's documents in a LangChain `VectorStore`: writes, finds and deletes them with what all stores have."""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from langchain_rcr.basics.items import check_json
from langchain_rcr.basics.progress import track
from langchain_rcr.basics.rows import DoubleArray, FloatArray
from langchain_rcr.errors import EngineError, InputError, PoolError, RCRError, refusing
from langchain_rcr.index.base import Row
from langchain_rcr.index.filters import AllOf, Compare, Filter

T = TypeVar("T")

_EMBEDDINGS = ("embedding", "embeddings", "embedding_function", "embedding_service")
"""Names of the parameter that takes the embeddings in LangChain's integrations."""
_NAMESPACE = uuid.UUID("6f0e3bb0-5d0c-4f6e-8d0e-7a3f6a1d7c52")
"""Of documents' ids: some stores only take UUIDs."""
_HEADERS = ("", None)
"""The alternating ids of the header document; no example has them, as an id is never empty."""
_AT_ONCE = 256
"""Documents written or looked up per call of the store."""


class PoolEmbeddings(Embeddings):
    """The embeddings that a pool's store is created with: they supply the vectors of the examples being added."""

    def __init__(self) -> None:
        self.size = 0  # length of the stored vectors: D + 1
        self.vectors: dict[str, list[float]] = {}  # of the texts being added
        self.asked = False  # whether the store has asked for any of them

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of documents on their way into the store; a unit vector for any other text, such as a probe."""
        self.asked |= any(text in self.vectors for text in texts)
        return [self.vectors.get(text) or self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """A unit vector: pools are searched by vectors, never by texts."""
        return [0.0] * (self.size - 1) + [1.0]


@dataclass(frozen=True, slots=True)
class Header:
    """What the pool is."""

    fingerprint: str  # of the encoder
    dim: int  # D
    count: int = 0  # examples
    next: int = 0  # the next key
    longest: float = 0.0  # no E_c was ever longer
    bound: float = 0.0  # no E_c may be longer; 0 before the first
    turn: int = 0  # the largest is the newest; several exist if a writer was stopped before removing the old one
    unsure: int = 0  # up to how many more there are, of a change that isn't finished, or was cut short

    @property
    def most(self) -> int:
        """No more examples than this are there."""
        return self.count + self.unsure


class Found(NamedTuple):
    """An example as it came out of the store."""

    key: int
    row: Row
    candidate: FloatArray
    context: FloatArray

    @classmethod
    def of(cls, document: Document) -> Found:
        """What a document holds."""
        key = _key(document)
        both = np.frombuffer(base64.b64decode(document.metadata["rcr_vectors"]), dtype="<f4").reshape(2, -1)
        return cls(key, Row(**json.loads(document.page_content)), *both)


class StoredDocuments:
    """The documents of one pool: one per example, as JSON with its vectors in the metadata, and the header.

    The arguments are those of `VectorStoreIndex`; with `filters`, fields are also metadata, whatever the store's class.
    Every method raises EngineError, with the store's name, if the store fails or lacks a method.
    """

    def __init__(
        self,
        make: Callable[..., VectorStore],
        pool: str,
        scan_limit: int,
        *,
        filters: bool,
        parallel: bool,
        **options: Any,
    ) -> None:
        self._pool, self._scan_limit, self._filters, self._parallel = pool, scan_limit, filters, parallel
        self.embeddings = PoolEmbeddings()
        self._make = partial(make, **{_parameter(make): self.embeddings}, **options)
        self._store: VectorStore | None = None
        self.name = "the vector store"
        self._unlock()

    def _unlock(self) -> None:
        self._asking: Any = nullcontext() if self._parallel else threading.RLock()
        self.changing = threading.RLock()  # held while changing the pool

    def __getstate__(self) -> dict[str, Any]:
        made = () if self._store is None else ("_make",)
        return {name: value for name, value in self.__dict__.items() if name not in ("_asking", "changing", *made)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._unlock()

    @property
    def store(self) -> VectorStore:
        """The store, once created."""
        if self._store is None:
            raise RuntimeError("bind(fingerprint, dim) comes before anything else")
        return self._store

    def open(self, dim: int) -> None:
        """Create the store for vectors of D numbers, unless it exists."""
        if self._store is None:
            self.embeddings.size = dim + 1
            self._store = self.ask(self._make)
            self.name = type(self._store).__name__

    def ask(self, method: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a method of the store."""
        try:
            with self._asking:
                return method(*arguments, **options)
        except RCRError:
            raise
        except NotImplementedError as error:
            msg = f"{self.name} has no {getattr(method, '__name__', 'such method')}, which this engine needs ({error})"
            raise EngineError(msg) from error
        except Exception as error:  # each store has its own exceptions
            raise EngineError(f"{self.name}: {' '.join(str(error).split())[:500] or type(error).__name__}") from error

    # ------------------------------------------------------------------ the header

    def headers(self) -> list[Header]:
        """The newest header first; none in an empty store, or one that holds something else."""
        documents = self.by_names([self.name_of(one) for one in _HEADERS], 0)
        headers = [Header(**json.loads(document.page_content)) for document in documents]
        return sorted(headers, key=lambda header: header.turn, reverse=True)

    def write_header(self, header: Header) -> None:
        """Write the new header before deleting the old, so that one always exists.

        They have different ids, as not all stores overwrite by id.
        """
        old = [dataclasses.asdict(one) for one in self.headers()]
        self.remove([_id(one) for one in old[1:]])
        new = dataclasses.asdict(header) | {"turn": old[0]["turn"] + 1 if old else 0}
        metadata = {"rcr_key": -1, "rcr_vectors": ""}
        document = Document(json.dumps(new), id=self.name_of(_id(new)), metadata=metadata)
        self.put([document], -np.eye(1, header.dim + 1, header.dim))
        self.remove([_id(one) for one in old[:1]])

    # ------------------------------------------------------------------ the examples

    def nearest(self, state: FloatArray, width: int, filter: Any = None) -> list[Found]:
        """The examples that the store ranks first for a state (D,), at most `width`."""
        length = float(np.linalg.norm(state.astype(np.float64)))
        query = [*(state / length).tolist(), 0.0] if length else [0.0] * len(state) + [1.0]
        options = {} if filter is None else {"filter": filter}
        # Ask for more, as headers may be among them.
        documents = self.ask(self.store.similarity_search_by_vector, query, k=width + len(_HEADERS), **options)
        return [Found.of(document) for document in documents if _key(document) >= 0][:width]

    def beside_header(self, most: int) -> list[Document]:
        """The `most` documents nearest to the place of headers, where no example is."""
        place = [0.0] * (self.embeddings.size - 1) + [-1.0]
        return self.ask(self.store.similarity_search_by_vector, place, k=most)

    def by_names(self, names: list[str], count: int) -> list[Document]:
        """The documents with these ids; a store that can't look ids up is searched for all `count` examples."""
        store = self.store
        if type(store).get_by_ids is not VectorStore.get_by_ids:
            parts = [names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE)]
            return [document for part in parts for document in self.ask(store.get_by_ids, part)]
        if count > self._scan_limit:
            raise InputError(
                f"{self.name} can't look ids up, and holds more examples than scan_limit = {self._scan_limit:,}"
            )
        documents = self.beside_header(len(_HEADERS) + count) if names else []
        if documents and all(_key(one) >= 0 for one in documents):
            raise EngineError(
                f"{self.name} can't look ids up, and doesn't find what is nearest: its search must be exact"
            )
        wanted = set(names)
        return [one for one in documents if self.name_of(_id(json.loads(one.page_content))) in wanted]

    def put(self, documents: Sequence[Document], vectors: DoubleArray) -> None:
        """Add documents with their vectors (n, D + 1); other embeddings than ours would place them anywhere."""
        for start in track(range(0, len(documents), _AT_ONCE), f"adding to {self.name}"):
            some = list(documents[start : start + _AT_ONCE])
            lists = vectors[start : start + _AT_ONCE].tolist()
            self.embeddings.vectors = {one.page_content: vector for one, vector in zip(some, lists, strict=True)}
            self.embeddings.asked = False
            try:
                self.ask(self.store.add_documents, some, ids=[one.id for one in some])
            finally:
                self.embeddings.vectors = {}
            if not self.embeddings.asked:
                self.ask(self.store.delete, [one.id for one in some])
                raise InputError(
                    f"{self.name} doesn't take its vectors from the embeddings that it is given: pass the class, or a "
                    "function that makes a store with them, not one that returns a store made elsewhere"
                )

    def remove(self, ids: Sequence[str | None]) -> None:
        """Delete the documents of some examples, or of a header."""
        if ids:
            self.ask(self.store.delete, [self.name_of(one) for one in ids])

    def name_of(self, example_id: str | None) -> str:
        """The document id of an example or a header."""
        return str(uuid.uuid5(_NAMESPACE, json.dumps([self._pool, example_id])))

    def document(self, key: int, row: Row, candidate: FloatArray, context: FloatArray) -> Document:
        """An example as a document; a `PoolError` if a field isn't JSON."""
        with refusing(f"example {row.id!r} has a field that isn't JSON, so {self.name} can't keep it", PoolError):
            text = json.dumps(row._asdict())
            check_json(row.example, tuples=True)
        packed = base64.b64encode(np.stack([candidate, context]).astype("<f4").tobytes()).decode()
        kinds = str | int | float if self._filters else str
        fields = row.example.items() if self._filters or type(self.store).__name__ in DIALECTS else ()
        some = {name: one for name, one in fields if isinstance(one, kinds) and (self._filters or _is_name(name))}
        return Document(text, id=self.name_of(row.id), metadata=some | {"rcr_key": key, "rcr_vectors": packed})


def _parameter(make: Callable[..., VectorStore]) -> str:
    """The parameter of a class or function that takes the embeddings."""
    if not callable(make):
        raise InputError(f"give the class of a store, or a function that makes one, not {make!r:.80}")
    names = inspect.signature(make).parameters
    found = next((name for name in _EMBEDDINGS if name in names), None)
    if found is None:
        msg = f"{make!r} has no parameter for embeddings (looked for {', '.join(_EMBEDDINGS)}): wrap it in a function"
        raise InputError(msg)
    return found


def _key(document: Document) -> int:
    """The key of an example; a header's is negative."""
    if not {"rcr_key", "rcr_vectors"} <= document.metadata.keys():
        text = document.page_content
        raise EngineError(f"the vector store holds a document that isn't the pool's, or lost its vectors: {text!r:.80}")
    return int(document.metadata["rcr_key"])


def _id(content: dict[str, Any]) -> str | None:
    """The id of an example or a header."""
    found: str | None = content["id"] if "id" in content else _HEADERS[content.get("turn", 0) % len(_HEADERS)]
    return found


# ------------------------------------------------------------------ a store's own filters

_FEW = 100
"""With more values, Qdrant in this process takes longer than reading all examples."""

Required: TypeAlias = dict[str, list[str]]
"""Field → the strings, one of which it must be."""


def _operators(_: Any, required: Required) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{field: {"$in": values}} for field, values in required.items()]
    return parts[0] if len(parts) == 1 else {"$and": parts}


def _conditions(store: Any, required: Required) -> Any:
    from qdrant_client import models

    return models.Filter(
        must=[
            models.FieldCondition(key=f'{store.metadata_payload_key}."{field}"', match=models.MatchAny(any=values))
            for field, values in required.items()
        ]
    )


def _function(_: Any, required: Required) -> Callable[[Any], bool]:
    allowed = {field: frozenset(values) for field, values in required.items()}
    return lambda document: all(document.metadata.get(field) in values for field, values in allowed.items())


DIALECTS: dict[str, Callable[[Any, Required], Any]] = {
    "Chroma": _operators,
    "InMemoryVectorStore": _function,
    "PGVector": _operators,
    "QdrantVectorStore": _conditions,
}
"""Class of a store → function that makes its own filter."""


def store_filter(store: Any, where: Filter, readable: int | None) -> Any:
    """The part of a filter that the store itself can apply; None if there is none.

    If so few examples are there that all may be read (`readable`), conditions with more values are left out: reading
    takes less time, and Chroma refuses tens of thousands. Qdrant in this process compares each example with each value.
    """
    make, required = DIALECTS.get(type(store).__name__), _required(where)
    if readable is not None:
        local = make is _conditions and type(store.client._client).__name__ == "QdrantLocal"
        most = min(readable, _FEW) if local else readable
        required = {field: values for field, values in required.items() if len(values) <= most}
    return None if make is None or not required else make(store, required)


def _required(where: Filter) -> Required:
    """What a filter requires of strings. Numbers, null and missing fields are left out, as stores disagree on them."""
    if isinstance(where, AllOf):
        return {field: values for part in where.parts for field, values in _required(part).items()}
    if isinstance(where, Compare) and where.op in ("eq", "in") and _is_name(where.key):
        values = [*where.value] if where.op == "in" else [where.value]
        return {where.key: values} if values and all(isinstance(value, str) for value in values) else {}
    return {}


def _is_name(field: object) -> bool:
    """Whether a store can be asked about a field: not all take other names, and this engine has its own."""
    return isinstance(field, str) and field.isidentifier() and not field.startswith("rcr_")
