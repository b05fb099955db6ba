"""A slow, plain reader for tests, and a view of any engine's reader that asks one thing at a time."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import numpy as np

from langchain_rcr.index.base import Hits, InThisThread, PoolVectors, Row


def run(work):
    """Run a coroutine over a reader that never waits."""
    return InThisThread().run(work)


class PlainReader:
    """The meaning of `Reader` in a few lines: all rows and vectors in lists; keeps how many states each search had.

    Args:
        waits: let other coroutines have their turn in between, as a network engine does.
    """

    def __init__(self, vectors: PoolVectors, rows: list[Row] | None = None, *, waits: bool = False) -> None:
        self.pool, self._waits, self.states = vectors, waits, list[int]()
        self._rows = rows or [Row(str(n), {"source": f"q {n}", "target": f"p {n}"}, n) for n in range(self.size)]

    @property
    def size(self) -> int:
        return len(self.pool.candidate)

    async def search(self, states, t, exclude, tau=None) -> Hits:
        self.states.append(len(states))
        if self._waits:
            await asyncio.sleep(0)
        keys = np.full((len(states), t), -1, dtype=np.int64)
        logits = np.full((len(states), t), -np.inf, dtype=np.float32)
        totals = []
        for b, state in enumerate(states):
            scores = self.pool.candidate @ state
            left = [n for n in range(self.size) if n not in set(exclude[b].tolist())]
            ranked = sorted(left, key=lambda n: (-round(float(scores[n]), 5), n))[:t]
            keys[b, : len(ranked)], logits[b, : len(ranked)] = ranked, scores[ranked]
            if tau is not None:
                totals.append(np.log(sum(np.exp(float(scores[n]) / tau) for n in left)))
        return Hits(keys, logits, self._rows, self._contexts, None if tau is None else np.array(totals))

    def _contexts(self, keys):
        return self.pool.context[keys]

    async def candidates(self, keys):
        return self.pool.candidate[keys]


class Reading:
    """A reader of an engine, one question at a time, from outside of any event loop."""

    def __init__(self, index, reader) -> None:
        self._index, self._reader, self._found = index, reader, {}
        self.size = reader.size

    def hits(self, states, t, exclude, tau=None) -> Hits:
        hits = self._index.run(self._reader.search(states, t, exclude, tau))
        for key in hits.keys[hits.keys >= 0].tolist():
            self._found[key] = hits.contexts(np.array([key]))[0], hits.rows[key]
        return hits

    def search(self, states, t, exclude):
        hits = self.hits(states, t, exclude)
        assert hits.keys.shape == hits.logits.shape == (len(states), t)
        return hits.keys, hits.logits

    def log_partition(self, states, tau, exclude):
        return self.hits(states, 1, exclude, tau).log_partition

    def vectors(self, keys):
        return np.stack([self._found[key][0] for key in keys.tolist()])

    def everything(self, dim):
        """The rows of all that can be found, by key."""
        hits = self._all(dim)
        return [hits.rows[key] for key in hits.keys[0].tolist() if key >= 0]

    def keys(self, dim):
        """The key of each example that can be found, by its id."""
        hits = self._all(dim)
        return {hits.rows[key].id: key for key in hits.keys[0].tolist() if key >= 0}

    def _all(self, dim):
        states = np.zeros((1, dim), dtype=np.float32)
        return self.hits(states, max(1, self.size), [np.empty(0, dtype=np.int64)])

    def rows(self, keys):
        return [self._found[key][1] for key in keys.tolist()]

    def candidates(self, keys):
        return self._index.run(self._reader.candidates(keys))


@contextmanager
def reading(index, where=None):
    """The pool of an index as it is now."""
    opened = index.read(where)
    reader = index.run(opened.__aenter__())
    try:
        yield Reading(index, reader)
    finally:
        index.run(opened.__aexit__(None, None, None))
