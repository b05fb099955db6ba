"""A Qdrant collection as a pool: making, checking and changing it. All that is awaited runs on the background loop."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from qdrant_client import models

from langchain_rcr.errors import CheckpointError, EngineError, InputError, PoolError
from langchain_rcr.filters import Filter, fields_of, unknown_field
from langchain_rcr.index.base import FloatArray, PoolVectors, Row
from langchain_rcr.index.qdrant_filters import INDEXES, field_of, has_field, number_fields, payload
from langchain_rcr.index.qdrant_link import Link, NotThereError
from langchain_rcr.index.qdrant_reader import View

FORMAT = 1
"""Of the points; only goes up."""

_MARK = "langchain-rcr format"

_REQUEST_BYTES = 8_000_000
"""Examples added go in requests of about this size; a server's own limit is 32 MB."""

_DIGITS = 22
"""Bytes of a number in a request, at most."""

_IDS = 10_000
"""Ids asked for in one request."""

_INDEXED_NUMBERS = 50
"""So many fields with numbers get an index of their own."""

_GRAPH = 16
"""Neighbours of a vector in the HNSW graph, Qdrant's default."""

_TICK_NS = 16_000
_EPOCH_NS = 1_577_836_800_000_000_000
"""Keys count ticks from 2020 on: 47 bits, enough for 71 years."""

_WRITER_BITS = 16


class Prepared(NamedTuple):
    """Examples on their way into a collection.

    Args:
        ids: of the points.
        payloads: of the points, without keys.
        vectors: of the points.
    """

    ids: list[str]
    payloads: list[dict[str, Any]]
    vectors: PoolVectors


def prepare(rows: Sequence[Row], vectors: PoolVectors) -> Prepared:
    """Check examples and bring them into Qdrant's form; takes time, so not for the background loop.

    Raises:
        PoolError: an id comes twice, or a field can't be kept.
        InputError: vectors of another number, or with numbers that are not finite.
    """
    number = len(vectors.candidate)
    if number != len(rows):
        msg = f"{len(rows)} examples came with {number} vectors"
        raise InputError(msg)
    if not (np.isfinite(vectors.candidate).all() and np.isfinite(vectors.context).all()):
        msg = "vectors of examples are not finite numbers: the encoder or its embeddings are broken"
        raise InputError(msg)
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise _taken(row.id)
        seen.add(row.id)
    lengths = np.linalg.norm(vectors.candidate.astype(np.float64), axis=1).tolist()
    payloads = [payload(row, 0, length) for row, length in zip(rows, lengths, strict=True)]
    return Prepared([point_id(row.id) for row in rows], payloads, vectors)


def point_id(example_id: str) -> str:
    """The UUID of an example's point: Qdrant takes no other text."""
    digest = blake2b(example_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return str(uuid.UUID(bytes=digest))


class Keys:
    """Makes keys for one writer."""

    def __init__(self) -> None:
        self._writer = secrets.randbelow(1 << _WRITER_BITS)
        self._last = 0

    def take(self, count: int, largest: int) -> list[int]:
        """Keys above `largest` and all taken before, and (by the clock) above those of other writers."""
        now = (time.time_ns() - _EPOCH_NS) // _TICK_NS
        start = max(now, (max(largest, self._last) >> _WRITER_BITS) + 1)
        keys = [(tick << _WRITER_BITS) | self._writer for tick in range(start, start + count)]
        self._last = keys[-1]
        return keys


class Collection:
    """The collection, as one process sees it.

    Args:
        link: to Qdrant.
        name: the collection's.
        exact: whether searches look at all vectors.
        hnsw_ef: how many they look at otherwise.
        bound: the fingerprint and dimension that it was bound to before.
    """

    def __init__(
        self, link: Link, name: str, exact: bool, hnsw_ef: int | None, bound: tuple[str, int] | None = None
    ) -> None:
        self.link = link
        self._name, self._exact, self._bound = name, exact, bound
        self._params = None if link.in_process else models.SearchParams(exact=exact, hnsw_ef=hnsw_ef)
        self._writing = asyncio.Lock()
        self._indexed: set[str] = set()
        self._keys = Keys()

    async def call(self, method: str, **arguments: Any) -> Any:
        """A method of the client, for this collection."""
        return await self.link.call(method, collection_name=self._name, **arguments)

    # ------------------------------------------------------------------ binding

    async def bind(self, fingerprint: str, dim: int) -> None:
        """See `CandidateIndex.bind`."""
        info = await self._info() or await self._made(fingerprint, dim)
        found = self._binding(info)
        if found != (fingerprint, dim) and await self.count() == 0:
            if found[1] != dim:
                await self.call("delete_collection")
                await self._create(fingerprint, dim)
            else:
                await self.call("update_collection", metadata=_metadata(fingerprint, dim))
            info = await self._info()
            found = self._binding(info)
        if info is None or found != (fingerprint, dim):
            raise self._foreign(found, (fingerprint, dim))
        self._bound = found
        if not self.link.in_process:
            await self._index(info)

    async def _made(self, fingerprint: str, dim: int) -> models.CollectionInfo | None:
        """The collection, made anew unless another process is faster."""
        try:
            await self._create(fingerprint, dim)
        except EngineError:
            info = await self._info()
            if info is None:
                raise
            return info
        info = await self._info()
        if info is not None and not info.config.metadata:
            raise self.link.error("the server keeps no metadata of collections: version 1.16 or newer is needed")
        return info

    def _binding(self, info: models.CollectionInfo | None) -> tuple[str, int]:
        metadata = (info.config.metadata if info else None) or {}
        version = metadata.get(_MARK)
        if not isinstance(version, int):
            msg = f"the Qdrant collection {self._name!r} ({self.link.place}) is no pool of langchain-rcr: name another"
            raise CheckpointError(msg)
        if version > FORMAT:
            msg = (
                f"the Qdrant collection {self._name!r} has format {version}, from a newer langchain-rcr; "
                f"this one knows up to {FORMAT}: upgrade it"
            )
            raise CheckpointError(msg)
        return str(metadata["fingerprint"]), int(metadata["dim"])

    def _foreign(self, found: tuple[str, int], ours: tuple[str, int]) -> CheckpointError:
        msg = (
            f"the Qdrant collection {self._name!r} ({self.link.place}) holds vectors of another encoder "
            f"({found[0]}, {found[1]} numbers; not {ours[0]}, {ours[1]}): name another collection, or delete this one, "
            "and add the examples anew"
        )
        return CheckpointError(msg)

    async def _info(self) -> models.CollectionInfo | None:
        try:
            info: models.CollectionInfo = await self.call("get_collection")
        except NotThereError:
            return None
        return info

    async def _create(self, fingerprint: str, dim: int) -> None:
        # Without neighbours there is no graph to build, which an exact search has no use for.
        none = models.HnswConfigDiff(m=0)
        dot = models.Distance.DOT
        await self.call(
            "create_collection",
            vectors_config={
                "candidate": models.VectorParams(size=dim, distance=dot, hnsw_config=none if self._exact else None),
                "context": models.VectorParams(size=dim, distance=dot, hnsw_config=none, on_disk=True),
            },
            metadata=_metadata(fingerprint, dim),
        )

    async def _index(self, info: models.CollectionInfo) -> None:
        """See to the indexes of the payload, and to the graph, if it is wanted."""
        self._indexed = set(info.payload_schema)
        for field, schema in INDEXES.items():
            if field not in self._indexed:
                await self.call("create_payload_index", field_name=field, field_schema=schema, wait=True)
                self._indexed.add(field)
        vectors = info.config.params.vectors
        graph = vectors["candidate"].hnsw_config if isinstance(vectors, dict) else None
        if not self._exact and graph is not None and graph.m == 0:
            wanted = models.VectorParamsDiff(hnsw_config=models.HnswConfigDiff(m=_GRAPH))
            await self.call("update_collection", vectors_config={"candidate": wanted})

    # ------------------------------------------------------------------ reading

    async def count(self) -> int:
        """How many examples there are."""
        return int((await self.call("count", exact=True)).count)

    async def known(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids are there."""
        there = await self._there({point_id(one) for one in ids})
        return {one for one in ids if point_id(one) in there}

    async def view(self, where: Filter | None) -> View:
        """What a reader works with; see `CandidateIndex.read`."""
        view = View(self.link, self._name, where, self._bound[1] if self._bound else 0, self._params)
        if where is not None:
            asked = sorted(fields_of(where))
            there = await asyncio.gather(*(self._has(field) for field in asked))
            if not all(there):
                lacking = {field for field, has in zip(asked, there, strict=True) if not has}
                answer = await self.call("facet", key="fields", limit=1000, exact=True)
                raise unknown_field(where, sorted({field_of(str(hit.value)) for hit in answer.hits} - lacking))
        await view.measure()
        return view

    async def _has(self, field: str) -> bool:
        points, _ = await self.call(
            "scroll", scroll_filter=has_field(field), limit=1, with_payload=False, with_vectors=False
        )
        return bool(points)

    async def _there(self, points: Iterable[str]) -> set[str]:
        return {str(point.id) for point in await self._retrieve(points, with_payload=False)}

    async def _retrieve(self, points: Iterable[str], with_payload: bool | list[str]) -> list[models.Record]:
        ids, found = list(points), []
        for start in range(0, len(ids), _IDS):
            found += await self.call(
                "retrieve", ids=ids[start : start + _IDS], with_payload=with_payload, with_vectors=False
            )
        return found

    # ------------------------------------------------------------------ writing

    async def add(self, prepared: Prepared, replace: bool) -> None:
        """See `CandidateIndex.add`."""
        if not prepared.ids:
            return
        async with self._writing:
            self._check(await self.call("get_collection"), prepared.vectors.candidate.shape[1])
            there = await self._there(prepared.ids)
            if there and not replace:
                raise _taken(next(row["id"] for at, row in zip(*prepared[:2], strict=True) if at in there))
            order = models.OrderBy(key="key", direction=models.Direction.DESC)
            last, _ = await self.call("scroll", order_by=order, limit=1, with_payload=["key"], with_vectors=False)
            largest = _key(last[0]) if last else 0
            keys = dict(zip(prepared.ids, self._keys.take(len(prepared.ids), largest), strict=True))
            await self._index_numbers(prepared.payloads)
            # In this process there is no other writer, and older clients would never add again what was deleted.
            over = replace or self.link.in_process
            mode = models.UpdateMode.UPSERT if over else models.UpdateMode.INSERT_ONLY
            fresh: dict[str, int] = {}
            try:
                for batch in _batches(prepared, keys):
                    fresh |= {str(one): keys[str(one)] for one in batch.ids if str(one) not in there}
                    await self._change("upsert", points=batch, update_mode=mode)
                    if not over:
                        await self._check_ours(batch, keys)
            except BaseException:
                with contextlib.suppress(EngineError):
                    await self._take_back(fresh)
                raise

    async def delete(self, ids: Sequence[str]) -> int:
        """See `CandidateIndex.delete`."""
        async with self._writing:
            there = await self._there({point_id(one) for one in ids})
            if there:
                await self._change("delete", points_selector=models.PointIdsList(points=sorted(there)))
            return len(there)

    async def _change(self, method: str, **arguments: Any) -> None:
        result = await self.call(method, wait=True, **arguments)
        if result.status != models.UpdateStatus.COMPLETED:
            raise self.link.error(f"{method} is not done yet ({result.status}); it may be later")

    def _check(self, info: models.CollectionInfo, dim: int) -> None:
        """Whether vectors may enter: the collection may have been made anew for another encoder since it was bound."""
        found = self._binding(info)
        if self._bound is not None and found != self._bound:
            raise self._foreign(found, self._bound)
        if found[1] != dim:
            msg = f"vectors of {dim} numbers can't enter an index that holds vectors of {found[1]}"
            raise InputError(msg)

    async def _check_ours(self, batch: models.Batch, keys: Mapping[str, int]) -> None:
        """Whether none of these points is another writer's, who added the same id at the same time."""
        ids = [str(one) for one in batch.ids]
        for point in await self._retrieve(ids, ["key", "id"]):
            if _key(point) != keys[str(point.id)]:
                raise _taken((point.payload or {})["id"])

    async def _take_back(self, fresh: Mapping[str, int]) -> None:
        points = await self._retrieve(fresh, ["key"])
        ours = [point.id for point in points if _key(point) == fresh[str(point.id)]]
        if ours:
            await self._change("delete", points_selector=models.PointIdsList(points=ours))

    async def _index_numbers(self, payloads: Sequence[Mapping[str, Any]]) -> None:
        if self.link.in_process:
            return
        fields = {field for one in payloads for field in number_fields(one)} - self._indexed
        room = max(0, _INDEXED_NUMBERS - len(self._indexed - INDEXES.keys()))
        for field in sorted(fields)[:room]:
            float_type = models.PayloadSchemaType.FLOAT
            await self.call("create_payload_index", field_name=field, field_schema=float_type, wait=True)
            self._indexed.add(field)


def _metadata(fingerprint: str, dim: int) -> dict[str, Any]:
    return {_MARK: FORMAT, "fingerprint": fingerprint, "dim": dim}


def _key(point: models.Record) -> int:
    return int((point.payload or {})["key"])


def _taken(example_id: str) -> PoolError:
    return PoolError(f"the id {example_id!r} is taken by another example")


def _batches(prepared: Prepared, keys: Mapping[str, int]) -> Iterator[models.Batch]:
    """Requests of about `_REQUEST_BYTES`, made when they are needed."""
    numbers = 2 * prepared.vectors.candidate.shape[1] * _DIGITS
    start, size = 0, 0
    for at, one in enumerate(prepared.payloads):
        size += numbers + 2 * len(one["example"])
        if size >= _REQUEST_BYTES or at + 1 == len(prepared.payloads):
            yield _batch(prepared, keys, slice(start, at + 1))
            start, size = at + 1, 0


def _batch(prepared: Prepared, keys: Mapping[str, int], part: slice) -> models.Batch:
    ids = prepared.ids[part]
    payloads = [one | {"key": keys[at]} for at, one in zip(ids, prepared.payloads[part], strict=True)]
    vectors = {"candidate": _lists(prepared.vectors.candidate[part]), "context": _lists(prepared.vectors.context[part])}
    return models.Batch(ids=list(ids), payloads=payloads, vectors=dict(vectors))


def _lists(matrix: FloatArray | NDArray[Any]) -> list[list[float]]:
    rows: list[list[float]] = np.asarray(matrix, dtype=np.float32).tolist()
    return rows
