"""One selection's view of a collection: searches over the network, and what they found kept for the rest of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from qdrant_client import models

from langchain_rcr.background import BackgroundLoop
from langchain_rcr.filters import Filter, matches
from langchain_rcr.index.base import FloatArray, IntArray, Row
from langchain_rcr.index.memory import in_order, log_sums, slack
from langchain_rcr.index.qdrant_filters import compile_filter, row_of
from langchain_rcr.index.qdrant_link import Link

T = TypeVar("T")

BEST = 1024
"""So many of the best candidates make up `log_partition`."""

_MORE = 4
"""Hits fetched beyond those needed: ties are seldom more."""

_PAGE = 1000
"""Points fetched in one request where the filter's own check is needed."""

_RARE = 20
"""In this process Qdrant runs a filter point by point for each search: where more than one point in so many passes, it
is run once for a reader instead, and searches fetch that many more."""


class _Window(NamedTuple):
    """The best hits of one state, best first.

    Args:
        keys: (W,) int64 of those that the filter lets through and nothing excludes.
        scores: (W,) float32 of each.
        last: no point that is not among the hits has a larger score; −inf where all were fetched.
    """

    keys: IntArray
    scores: FloatArray
    last: float


class _Kept(NamedTuple):
    payload: dict[str, Any]
    candidate: FloatArray
    context: FloatArray


class View:
    """What one `read` works with. Its coroutines run on the background loop; the rest may be called from anywhere.

    Args:
        link: to the server.
        collection: its name there.
        where: the filter.
        dim: D.
        params: how to search; None for an engine in this process, which knows one way.
    """

    def __init__(
        self, link: Link, collection: str, where: Filter | None, dim: int, params: models.SearchParams | None
    ) -> None:
        self.size = 0
        self.longest = 0.0
        """Max |E_c| over the collection."""
        self._link, self._collection, self._dim, self._params = link, collection, dim, params
        self._where = where
        self._filter, self._exact = (None, True) if where is None else compile_filter(where)
        self._allowed: set[int] | None = None
        """What the filter lets through, where Qdrant's own doesn't say it exactly, or would be slow to."""
        self._each, self._most = 1, 0
        """Hits to fetch for each that is needed, and how many there are."""
        self._point_of: dict[int, models.ExtendedPointId] = {}
        self._kept: dict[int, _Kept] = {}
        self._gone: set[int] = set()

    async def measure(self) -> None:
        """Find out `size` and `longest`, and what the filter lets through."""
        order = models.OrderBy(key="length", direction=models.Direction.DESC)
        points, _ = await self._call("scroll", order_by=order, limit=1, with_payload=["length"], with_vectors=False)
        self.longest = float(_payload(points[0])["length"]) if points else 0.0
        in_process = self._link.in_process and self._where is not None
        if self._exact and not in_process:
            self.size = (await self._call("count", count_filter=self._filter, exact=True)).count
            return
        self._allowed, self._most = await self._list(sys.maxsize if in_process else _PAGE)
        self.size = len(self._allowed)
        if in_process:
            everything = (await self._call("count", exact=True)).count
            if self.size * _RARE >= everything:
                self._filter, self._most = None, everything
        self._each = -(-self._most // self.size) if self.size else 1

    async def _list(self, page: int) -> tuple[set[int], int]:
        """What the filter lets through, and how many points Qdrant's own does."""
        allowed: set[int] = set()
        count, offset = 0, None
        wanted = ["key"] if self._exact else ["key", "example"]
        while True:
            points, offset = await self._call(
                "scroll", scroll_filter=self._filter, limit=page, offset=offset, with_payload=wanted, with_vectors=False
            )
            count += len(points)
            for payload in map(_payload, points):
                if self._exact or self._where is None or matches(self._where, json.loads(payload["example"])):
                    allowed.add(payload["key"])
            if offset is None:
                return allowed, count

    async def search(self, states: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]:
        """See `Searcher.search`; what is found is kept, and dropped if it is deleted at the very moment."""
        margins = slack(states, self.longest)
        keys = np.full((len(states), t), -1, dtype=np.int64)
        logits = np.full((len(states), t), -np.inf, dtype=np.float32)
        todo = list(range(len(states)))
        while todo:
            found = await self._until(states, todo, exclude, t, _best_of(margins, t))
            await self._keep(sorted({key for picks, _ in found for key in picks.tolist()} - self._kept.keys()))
            again = []
            for at, (picks, values) in zip(todo, found, strict=True):
                if self._gone.isdisjoint(picks.tolist()):
                    keys[at, : len(picks)], logits[at, : len(picks)] = picks, values
                else:
                    again.append(at)
            todo = again
        return keys, logits

    async def log_partition(self, states: FloatArray, tau: float, exclude: Sequence[IntArray]) -> NDArray[np.float64]:
        """See `Searcher.log_partition`; over the `BEST` best candidates."""
        slack(states, self.longest)

        def enough(_: int, window: _Window) -> float | None:
            if len(window.keys) < BEST and window.last > -np.inf:
                return None
            return float(log_sums(window.scores[None, :BEST].copy(), tau, [])[0])

        everything = list(range(len(states)))
        return np.array(await self._until(states, everything, exclude, BEST, enough), dtype=np.float64)

    def vectors(self, keys: IntArray) -> FloatArray:
        """E_z (B, D) of what was found."""
        return self._stacked([self._kept[key].context for key in keys.tolist()])

    def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (B, D) of what was found."""
        return self._stacked([self._kept[key].candidate for key in keys.tolist()])

    def rows(self, keys: IntArray) -> list[Row]:
        """The examples found, as copies."""
        return [row_of(self._kept[key].payload) for key in keys.tolist()]

    async def _until(
        self,
        states: FloatArray,
        which: Sequence[int],
        exclude: Sequence[IntArray],
        t: int,
        enough: Callable[[int, _Window], T | None],
    ) -> list[T]:
        """For each of some states what `enough` makes of its window, which grows as long as that is None."""
        needed = {at: t + len(np.unique(exclude[at])) + _MORE for at in which}
        limits = {at: min(self._each * count, self._most + count) for at, count in needed.items()}
        results: dict[int, T] = {}
        while len(results) < len(limits):
            todo = [at for at in which if at not in results]
            answers = await self._call(
                "query_batch_points", requests=[self._request(states[at], limits[at]) for at in todo]
            )
            for at, answer in zip(todo, answers, strict=True):
                result = enough(at, self._window(answer.points, limits[at], exclude[at]))
                if result is None:
                    limits[at] *= 4
                else:
                    results[at] = result
        return [results[at] for at in which]

    def _request(self, state: FloatArray, limit: int) -> models.QueryRequest:
        return models.QueryRequest(
            query=state.tolist(),
            using="candidate",
            filter=self._filter,
            params=self._params,
            limit=limit,
            with_payload=["key"],
            with_vector=False,
        )

    def _window(self, points: Sequence[models.ScoredPoint], limit: int, exclude: IntArray) -> _Window:
        barred = {*exclude.tolist(), *self._gone}
        keys, scores = [], []
        for point in points:
            key = _payload(point)["key"]
            if key not in barred and (self._allowed is None or key in self._allowed):
                self._point_of[key] = point.id
                keys.append(key)
                scores.append(point.score)
        last = points[-1].score if len(points) == limit else -np.inf
        return _Window(np.array(keys, dtype=np.int64), np.array(scores, dtype=np.float32), last)

    async def _keep(self, keys: Sequence[int]) -> None:
        """Fetch what picks need; those that are not there any more, or were replaced, are gone."""
        if not keys:
            return
        points = await self._call(
            "retrieve", ids=[self._point_of[key] for key in keys], with_payload=True, with_vectors=True
        )
        for point in points:
            payload, vectors = _payload(point), point.vector
            self._kept[payload["key"]] = _Kept(payload, _array(vectors["candidate"]), _array(vectors["context"]))
        self._gone |= {key for key in keys if key not in self._kept}

    async def _call(self, method: str, **arguments: Any) -> Any:
        return await self._link.call(method, collection_name=self._collection, **arguments)

    def _stacked(self, vectors: Sequence[FloatArray]) -> FloatArray:
        return np.stack(vectors) if vectors else np.empty((0, self._dim), dtype=np.float32)


class QdrantReader:
    """A `Reader` of a collection, for callers without an event loop."""

    def __init__(self, view: View, loop: BackgroundLoop) -> None:
        self._view, self._loop = view, loop

    @property
    def size(self) -> int:
        """How many candidates there were at the beginning."""
        return self._view.size

    def search(self, states: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]:
        """See `Searcher.search`."""
        return self._loop.run(self._view.search(states, t, exclude))

    def vectors(self, keys: IntArray) -> FloatArray:
        """E_z (B, D) of `keys` (B,)."""
        return self._view.vectors(keys)

    def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (B, D) of `keys` (B,)."""
        return self._view.candidates(keys)

    def log_partition(self, states: FloatArray, tau: float, exclude: Sequence[IntArray]) -> NDArray[np.float64]:
        """See `Searcher.log_partition`; over the `BEST` best candidates."""
        return self._loop.run(self._view.log_partition(states, tau, exclude))

    def rows(self, keys: IntArray) -> list[Row]:
        """The examples of `keys` (n,)."""
        return self._view.rows(keys)


class AsyncQdrantReader:
    """An `AsyncReader` of a collection; see `QdrantReader`."""

    def __init__(self, view: View, loop: BackgroundLoop) -> None:
        self._view, self._loop = view, loop

    @property
    def size(self) -> int:
        """How many candidates there were at the beginning."""
        return self._view.size

    async def search(self, states: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]:
        """See `Searcher.search`."""
        return await self._loop.arun(self._view.search(states, t, exclude))

    async def vectors(self, keys: IntArray) -> FloatArray:
        """E_z (B, D) of `keys` (B,)."""
        return self._view.vectors(keys)

    async def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (B, D) of `keys` (B,)."""
        return self._view.candidates(keys)

    async def log_partition(self, states: FloatArray, tau: float, exclude: Sequence[IntArray]) -> NDArray[np.float64]:
        """See `Searcher.log_partition`; over the `BEST` best candidates."""
        return await self._loop.arun(self._view.log_partition(states, tau, exclude))

    async def rows(self, keys: IntArray) -> list[Row]:
        """The examples of `keys` (n,)."""
        return self._view.rows(keys)


def _best_of(margins: FloatArray, t: int) -> Callable[[int, _Window], tuple[IntArray, FloatArray] | None]:
    """The t best of a window, or None while hits beyond it might be among them, or tie with them."""

    def best(at: int, window: _Window) -> tuple[IntArray, FloatArray] | None:
        margin = float(margins[at])
        keys, scores = in_order(window.keys, window.scores, margin, t)
        whole = window.last == -np.inf
        if whole or (len(keys) == t and window.last < float(scores.min()) - margin):
            return keys, scores
        return None

    return best


def _payload(point: models.ScoredPoint | models.Record) -> dict[str, Any]:
    return point.payload or {}


def _array(vector: Any) -> FloatArray:
    return np.asarray(vector, dtype=np.float32)
