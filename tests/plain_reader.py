"""A slow, plain engine for tests: the meaning of `Reader` in a few lines, called or awaited."""

from __future__ import annotations

import asyncio

import numpy as np

from langchain_rcr.index.base import PoolVectors, Row


class PlainReader:
    """All rows and vectors in lists; counts what it is asked."""

    def __init__(self, vectors: PoolVectors, rows: list[Row] | None = None) -> None:
        self.pool = vectors
        self._rows = rows or [Row(str(n), {"source": f"q {n}", "target": f"p {n}"}, n) for n in range(self.size)]
        self.asked: list[str] = []

    @property
    def size(self) -> int:
        return len(self.pool.candidate)

    def search(self, states, t, exclude):
        self.asked.append("search")
        keys = np.full((len(states), t), -1, dtype=np.int64)
        logits = np.full((len(states), t), -np.inf, dtype=np.float32)
        for b, state in enumerate(states):
            left = [n for n in range(self.size) if n not in set(exclude[b].tolist())]
            ranked = sorted(left, key=lambda n: (-round(float(self.pool.candidate[n] @ state), 5), n))[:t]
            keys[b, : len(ranked)] = ranked
            logits[b, : len(ranked)] = [self.pool.candidate[n] @ state for n in ranked]
        return keys, logits

    def vectors(self, keys):
        self.asked.append("vectors")
        return self.pool.context[keys]

    def candidates(self, keys):
        return self.pool.candidate[keys]

    def rows(self, keys):
        self.asked.append("rows")
        return [self._rows[key] for key in keys.tolist()]

    def log_partition(self, states, tau, exclude):
        self.asked.append("log_partition")
        totals = []
        for b, state in enumerate(states):
            left = [n for n in range(self.size) if n not in set(exclude[b].tolist())]
            totals.append(np.log(sum(np.exp(float(self.pool.candidate[n] @ state) / tau) for n in left)))
        return np.array(totals)


class AwaitedReader:
    """The same, awaited; other coroutines get their turn in between."""

    def __init__(self, plain: PlainReader) -> None:
        self.plain = plain
        self.size = plain.size

    def __getattr__(self, name):
        if not hasattr(PlainReader, name):
            raise AttributeError(name)

        async def answer(*arguments):
            await asyncio.sleep(0)
            return getattr(self.plain, name)(*arguments)

        return answer
