"""Turns questions into picks, with a trained encoder and the engine that holds the examples' vectors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from langchain_rcr.basics.items import copied
from langchain_rcr.basics.rows import BoolArray, FloatArray
from langchain_rcr.errors import EngineError, InputError, PoolError
from langchain_rcr.index.base import CandidateIndex, Row
from langchain_rcr.index.local import LocalIndex
from langchain_rcr.policy.explanation import Explanation, Structures, explain
from langchain_rcr.policy.selection import Options, select
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.pool.examples import ExamplePool, flaw_of

logger = logging.getLogger(__name__)

Asked = tuple[str, str | None]
"""A question, and a draft of its program or None."""
_Key = tuple[asyncio.AbstractEventLoop, str]
_TOGETHER = 16
"""How many questions make a batch full: the next begins another one, which another core may take."""


@dataclass(frozen=True, slots=True)
class Pick:
    """One pick for one query.

    Its probability is π among the candidates left at its step, or that with which it was drawn (`Options.explore`).
    """

    id: str
    example: dict[str, Any]  # its fields, a copy
    step: int  # 1 for the first pick, up to k
    logit: float  # in the state in which it was picked (Eq. 4)
    probability: float | None = None  # None if not requested

    def shown(self, keys: Sequence[str] | None) -> dict[str, Any]:
        """The example's fields, or those that the retriever's `example_keys` name."""
        if not keys:  # as in LangChain's selectors
            return self.example
        lacking = next((key for key in keys if key not in self.example), None)
        if lacking is not None:
            has = ", ".join(repr(key) for key in self.example)
            raise InputError(f"example_keys names {lacking!r}, which the example {self.id!r} lacks: it has {has}")
        return {key: self.example[key] for key in keys}


@dataclass(slots=True)
class _Batch:
    """Questions that are awaited in the same turn of an event loop with the same options."""

    task: asyncio.Task[tuple[FloatArray, BoolArray, list[list[Pick] | InputError]]] = field(init=False)
    asked: list[Asked] = field(default_factory=list)
    callers: int = 0  # that still wait
    shared: bool = False  # by several callers


@dataclass(frozen=True, slots=True)
class Served:
    """Answers questions until a refit replaces it."""

    encoder: TriEncoder
    engine: CandidateIndex
    fingerprint: str
    schema: ExamplePool
    _next: dict[_Key, _Batch] = field(default_factory=dict, init=False, repr=False, compare=False)

    async def select(
        self, asked: Sequence[Asked], options: Options, *, is_async: bool = False
    ) -> list[list[Pick] | InputError]:
        """Pick examples for questions, each conditioned on those before it; all questions go through together.

        With `is_async`, encode in a thread, and search there too, or where a network engine has its connections. Calls
        with the same options that come in the same turn of the event loop (`asyncio.gather`) are one batch, up to the
        search if the engine isn't in this process. Otherwise nothing here waits, and `InThisThread` can run it.

        There are fewer than k picks only if the pool or what the filter allows has fewer, or `options` ends a sequence
        early. If they are fewer than `options.k_min`, an error takes their place: other questions may have enough.
        """
        self.encoder.check_drafts([draft for _, draft in asked])
        if not is_async:
            return self.engine.run(self._selection(*self._judged(asked, options), options))
        backbone, loop = self.encoder.backbone, asyncio.get_running_loop()
        # Embeddings that aren't symmetric read one question after the other.
        if len(asked) >= _TOGETHER or not (backbone is None or backbone.symmetric):
            return await self._awaited(asked, options)
        key = loop, repr(options)  # True and 1 are equal, their representations aren't
        batch = self._next.get(key)
        if batch is None or len(batch.asked) + len(asked) > _TOGETHER:
            batch = self._next[key] = _Batch()
            batch.task = loop.create_task(self._batch(batch, key, options))
        else:
            batch.shared = True
        part = slice(len(batch.asked), len(batch.asked) + len(asked))
        batch.asked += asked
        batch.callers += 1
        found = None
        try:
            found = await asyncio.shield(batch.task)
        except Exception as error:
            if isinstance(error, EngineError) or not batch.shared:
                raise
        finally:
            batch.callers -= 1
            if not batch.callers:
                batch.task.cancel()  # all have been cancelled, or it is done
                if self._next.get(key) is batch:
                    del self._next[key]
        if found is None:  # it may be another's text that can't be embedded
            return await self._awaited(asked, options)
        vectors, relevant, picks = found
        return picks[part] or await self.engine.arun(self._selection(vectors[part], relevant[part], options))

    async def _batch(
        self, batch: _Batch, key: _Key, options: Options
    ) -> tuple[FloatArray, BoolArray, list[list[Pick] | InputError]]:
        await asyncio.sleep(0)  # until all that is ready now has had its turn, even if tasks start eagerly
        self._next.pop(key, None)  # or a later one, which nobody else joins then
        # Several callers' questions are read in no caller's context: another's trace shouldn't have them.
        context = Context() if batch.shared else copy_context()
        vectors, relevant = await asyncio.to_thread(context.run, self._judged, batch.asked, options)
        if not isinstance(self.engine, LocalIndex):
            return vectors, relevant, []
        return vectors, relevant, await self.engine.arun(self._selection(vectors, relevant, options))

    async def _awaited(self, asked: Sequence[Asked], options: Options) -> list[list[Pick] | InputError]:
        judged = await asyncio.to_thread(self._judged, asked, options)
        return await self.engine.arun(self._selection(*judged, options))

    def explain(self, asked: Asked, options: Options, *, runner_ups: int, structures: Structures | None) -> Explanation:
        """Pick the best examples for a question, and say why; see `explanation.explain`."""
        if error := error_of(asked[0]):
            raise error
        vectors, relevant = self._judged([asked], options)
        if not relevant.all():
            raise PoolError(f"there are no picks to explain: no relevance of {options.min_relevance} (min_relevance)")

        async def explained() -> Explanation:
            async with self.engine.read(options.where) as reader:
                if not reader.size:
                    raise PoolError("there are no candidates to explain picks from")
                possible = replace(options, k=min(options.k, reader.size), explore=0.0, random=None)
                state, item = self.encoder.state(), self.schema.item
                return await explain(
                    asked[0], vectors, state, possible, reader, runner_ups=runner_ups, item=item, structures=structures
                )

        return self.engine.run(explained())

    def _judged(self, asked: Sequence[Asked], options: Options) -> tuple[FloatArray, BoolArray]:
        """E_x of questions (B, D), and which of them are relevant enough to pick for (B,)."""
        queries, drafts = zip(*asked, strict=True)
        homes, judge = [options.home] * len(queries), options.min_relevance > 0
        vectors, relevance = self.encoder.judge_queries(queries, drafts, homes, judge=judge)
        return vectors, relevance >= options.min_relevance

    async def _selection(
        self, vectors: FloatArray, relevant: BoolArray, options: Options
    ) -> list[list[Pick] | InputError]:
        if not relevant.all():
            found = iter(await self._selection(vectors[relevant], relevant[relevant], options))
            return [next(found) if each else [] for each in relevant]
        if not len(vectors):
            return []
        state = self.encoder.state()
        async with self.engine.read(options.where) as reader:
            if options.k > reader.size:
                logger.info("k = %d examples asked for, but there are only %d: all are picked", options.k, reader.size)
                options = replace(options, k=reader.size)
            picks = await select(vectors, state, options, reader)
            chosen = picks.examples
        known = options.scored or options.explore
        each = zip(chosen, picks.logits.tolist(), picks.probabilities.tolist(), strict=True)
        return [
            _picks(rows, logits, chances if known else [None] * len(rows))
            if len(rows) >= options.k_min
            else InputError(f"k_min = {options.k_min}, but only {len(rows)} examples can be picked")
            for rows, logits, chances in each
        ]


def _picks(rows: Sequence[Row], logits: Sequence[float], chances: Sequence[float | None]) -> list[Pick]:
    ids = [row.id for row in rows]
    each = zip(ids, copied([row.example for row in rows], ids), count(1), logits, chances, strict=False)
    return [Pick(*one) for one in each]


def error_of(query: object) -> InputError | None:
    """What is wrong with a question, or None; it must be a string of valid Unicode that isn't blank."""
    wrong = flaw_of(query) if isinstance(query, str) else f"must be a string, not {type(query).__name__}"
    return InputError(f"the query {wrong}") if wrong else None
