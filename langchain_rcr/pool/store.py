"""A trained encoder, a pool and the engine that holds it: what retrievers share, and where questions become picks."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from langchain_rcr.basics.files import atomic_directory, write_json
from langchain_rcr.basics.items import copied, made
from langchain_rcr.basics.rows import BoolArray, FloatArray
from langchain_rcr.basics.section import printable
from langchain_rcr.errors import InputError, PoolError
from langchain_rcr.families.folds import text_hash
from langchain_rcr.index.base import Row
from langchain_rcr.index.filters import Filter
from langchain_rcr.index.local import LocalIndex
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.index.vectors_file import load_vectors, save_vectors
from langchain_rcr.policy.explanation import Explanation, Structures, explain
from langchain_rcr.policy.manifest import seal
from langchain_rcr.policy.selection import Hit, Options, select
from langchain_rcr.policy.triencoder import FEWEST
from langchain_rcr.pool.examples import Example, ExamplePool, changed, check_text, earlier, write_jsonl
from langchain_rcr.pool.saved import POOL_FILE, RETRIEVER_FILE, VECTORS_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from langchain_rcr.index.base import CandidateIndex
    from langchain_rcr.policy.triencoder import TriEncoder

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    """The encoder and the engine with its vectors, which a refit exchanges together."""

    encoder: TriEncoder
    engine: CandidateIndex
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Pick:
    """One pick for one query.

    Args:
        id: the example's id.
        example: its fields, a copy.
        step: 1 for the first pick, up to k.
        logit: of the pick in the state that it was picked in (Eq. 4).
        probability: π of the pick among the candidates left at its step, or the probability by which it was drawn
            (`Options.explore`); None where it wasn't asked for.
        relevance: the logit that it has for the question alone; None where it wasn't asked for.
    """

    id: str
    example: dict[str, Any]
    step: int
    logit: float
    probability: float | None = None
    relevance: float | None = None


class ExampleStore:
    """A trained encoder, a pool and the pool's vectors in an engine: what several retrievers share.

    Safe to read and change from many threads: a query sees the pool as it was before or after a change. What an engine
    holds besides, such as what another process added, teaches the encoder as `add` does.

    Args:
        encoder: the trained encoder; put in inference mode.
        pool: what the engine shall hold, and the keys of questions and programs. Examples that it has are left as they
            are; those that are new or have changed are encoded here, and changed ones replaced.
        index: the engine; None: one in memory.
        folder: where `save` may have left the vectors of the pool; then nothing is encoded.
        append: whether examples that the engine holds and that aren't in `pool` stay beside it.

    Raises:
        PoolError: the engine holds others, and `append` is off.
        CheckpointError: the engine or the folder holds vectors of another encoder, or the folder those of another pool.
    """

    def __init__(
        self,
        encoder: TriEncoder,
        pool: ExamplePool,
        index: CandidateIndex | None = None,
        *,
        folder: Path | None = None,
        append: bool = False,
    ) -> None:
        self._changing = RLock()
        self.schema = pool.only([], encoder.spec)
        self._now = Served(encoder.eval(), MemoryIndex() if index is None else index, encoder.fingerprint())
        self.index.bind(self.fingerprint, encoder.dim)
        saved = None
        if folder is not None and (folder / VECTORS_FILE).is_file():
            saved = load_vectors(folder / VECTORS_FILE, self.fingerprint, _signatures(pool))
        fresh, gone = self._changes(pool, append)
        if fresh:
            new = pool.only(fresh, encoder.spec)
            if saved is None:
                vectors = self.encoder.encode_pool(new.items())
                self.encoder.grow(new.items(), labels_only=True)
            else:
                vectors, programs = saved
                new.programs = programs[fresh]
                vectors = vectors if len(fresh) == len(pool) else vectors.take(np.array(fresh, dtype=np.int64))
            try:
                self.index.add(_rows(new), vectors, replace=gone)
            except PoolError:
                if self._changes(pool, append)[0]:
                    raise  # else another process that opened the same pool was faster
            if folder is None:  # of a checkpoint's own examples training has said so
                self._say_unread(new)
        self._learn_stored(pool)

    @property
    def encoder(self) -> TriEncoder:
        """The encoder."""
        return self._now.encoder

    @property
    def index(self) -> CandidateIndex:
        """The engine."""
        return self._now.engine

    @property
    def fingerprint(self) -> str:
        """The encoder's, by which vectors and outcomes are told apart."""
        return self._now.fingerprint

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_changing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _changing=RLock())

    def _changes(self, pool: ExamplePool, append: bool) -> tuple[list[int], list[str]]:
        """What makes the engine hold the pool: the positions of the examples to add, and the ids that they replace."""
        count = self.index.count()
        known = self.index.known(pool.ids) if count else set()
        fresh, gone = [at for at, example_id in enumerate(pool.ids) if example_id not in known], list[str]()
        if count > len(known) and not append:
            # Read only where it can matter: it is the whole engine.
            rows = self.index.rows() if count - len(known) <= len(fresh) else []
            gone = earlier(pool, fresh, {row.id: row.example for row in rows if row.id not in known})
            if count - len(known) > len(gone):
                raise PoolError(
                    f"{type(self.index).__name__} holds {count - len(known)} examples that are not among these "
                    f"{len(pool)}: append=True keeps them in the pool; otherwise give it a collection, table or object "
                    "of its own, or delete them there first (index.rows() lists them, index.delete(ids) deletes)"
                )
        if known and not pool.of_content:  # ids made of content change with it
            others = changed(pool, {row.id: row.example for row in self.index.rows(known)})
            fresh, gone = sorted([*fresh, *others]), [*gone, *(pool.ids[at] for at in others)]
        return fresh, gone

    def _learn_stored(self, pool: ExamplePool) -> None:
        """Teach the encoder examples that the engine held before, and the fit hasn't seen; all others are in `pool`."""
        if not self.encoder.family.fits or self.index.count() <= len(pool):
            return
        own = {*pool.ids}
        others = [row for row in self.index.rows() if row.id not in own]
        items = [self.schema.item(row.example, f"the example {row.id!r}") for row in others]
        names = [(text_hash(item.source), row.program) for item, row in zip(items, others, strict=True)]
        unseen = self.encoder.query.unseen(np.array(names, dtype=np.int64).reshape(-1, 2))
        self.encoder.grow([items[at] for at in np.flatnonzero(unseen).tolist()])

    def __repr__(self) -> str:
        return f"ExampleStore({self.index.count()} examples in {type(self.index).__name__}, keys {self.schema.keys})"

    def _say_unread(self, pool: ExamplePool) -> None:
        """Warn of examples that the policy can't use."""
        if not self.encoder.family.structured:
            return
        spec = self.encoder.spec
        unread = [item.target for item in pool.items() if not spec.structures(item.target)]
        if unread:
            logger.warning(
                "%d of %d added programs don't parse as '%s': their tokens stand for structures (the first: '%.80s')",
                *(len(unread), len(pool), spec.language, printable(" ".join(unread[0].split()))),
            )

    # ------------------------------------------------------------------ changes

    def add(self, examples: Sequence[Example], ids: Sequence[str] | None = None, *, replace: bool = False) -> list[str]:
        """Encode examples (only these) and add them; the next query can pick them.

        The encoder learns what their questions need, for all stores that share it (`TriEncoder.grow`).

        Args:
            examples: mappings with the two keys, and any other fields.
            ids: one for each; None for random ones.
            replace: an example whose id is there takes the other's place.

        Returns:
            Their ids.

        Raises:
            PoolError: an example or an id can't enter the pool; then nothing was added.
            InputError: the ids don't match the examples in number.
        """
        with self._changing:
            pool, stale = self.schema.extended(examples, ids), self.needs_refit
            self.index.add(_rows(pool), self.encoder.encode_pool(pool.items()), replace=replace)
            self.encoder.grow(pool.items())
            self._say_unread(pool)
            if not stale and self.needs_refit:
                logger.warning(
                    "%d examples, many of them new to the fit: call refit(), or await arefit()", self.index.count()
                )
        return list(pool.ids)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples; no query that begins later can pick them. Unknown ids are ignored.

        Returns:
            How many there were.
        """
        with self._changing:
            return self.index.delete(_ids(ids))

    @property
    def needs_refit(self) -> bool:
        """Whether a tenth as many examples were added as were fitted to, or 1,000; without a fit, enough for one."""
        return self.encoder.query.stale or (self.encoder.is_fallback and self.index.count() >= FEWEST)

    def refit(self, index: CandidateIndex | None = None, *, seed: int = 0) -> None:
        """Fit the encoder anew to all examples, and put it and their new vectors in the place of the old ones, at once.

        Until then questions are answered as before, and what is added or deleted meanwhile isn't lost.

        Args:
            index: an empty engine for the vectors; None: another of the same kind, for one in this process.
            seed: of what is drawn at random.

        Raises:
            InputError: the engine is elsewhere and no other was given, or the family isn't fitted to examples.
        """
        before = self._now
        if index is None:
            if not isinstance(before.engine, LocalIndex):
                kind = type(before.engine).__name__
                raise InputError(f"the vectors in {kind} belong to the old fit: give an empty engine, refit(index=…)")
            index = before.engine.emptied()
        old = {row.id: row for row in before.engine.rows()}
        pool = self.schema.extended([row.example for row in old.values()], [*old])
        fresh = ExampleStore(before.encoder.refitted(pool.items(), seed=seed), pool, index)
        with self._changing:
            new = {row.id: row for row in before.engine.rows()}
            late = {one: row.example for one, row in new.items() if one not in old or row != old[one]}
            fresh.index.delete([one for one in old if one not in new])
            fresh.add([*late.values()], [*late], replace=True)
            self.schema, self._now = fresh.schema, fresh._now

    # ------------------------------------------------------------------ selection

    def select(
        self,
        queries: Sequence[str],
        options: Options,
        where: Filter | None = None,
        drafts: Sequence[str | None] | None = None,
    ) -> list[list[Pick]]:
        """Pick examples for questions, each in the light of those before it; all questions go through together.

        Args:
            queries: the questions.
            options: k, and how to select.
            where: which examples may be picked.
            drafts: for each question a program that it may have, or None.

        Returns:
            For each question its picks; fewer than k only where the pool, or what the filter lets through, has fewer,
            or `options` ends a sequence early; none for a question of less than `options.min_relevance`.

        Raises:
            InputError: a question is not a string, blank or not valid Unicode; a draft is not a string, or the
                encoder's family can't use any; there are fewer picks than `options.k_min`.
            EngineError: the engine can't be reached.
        """
        now = self._now
        return now.engine.run(self._selection(now, *self._queries(now, queries, drafts, options), options, where))

    async def aselect(
        self,
        queries: Sequence[str],
        options: Options,
        where: Filter | None = None,
        drafts: Sequence[str | None] | None = None,
    ) -> list[list[Pick]]:
        """`select`: encoding happens in a thread; searching, too, or where a network engine has its connections."""
        now = self._now
        judged = await asyncio.to_thread(self._queries, now, queries, drafts, options)
        return await now.engine.arun(self._selection(now, *judged, options, where))

    def explain(
        self,
        query: str,
        options: Options,
        where: Filter | None = None,
        *,
        draft: str | None = None,
        runner_ups: int = 3,
        structures: Structures | None = None,
    ) -> Explanation:
        """Pick the best examples for a question, and say why. Arguments: see `select` and `explanation.explain`."""
        now = self._now
        vectors, relevant = self._queries(now, [query], [draft], options)
        if not relevant.all():
            raise PoolError(f"there are no picks to explain: no relevance of {options.min_relevance} (min_relevance)")
        item = self.schema.item

        async def explained() -> Explanation:
            async with now.engine.read(where) as reader:
                if not reader.size:
                    raise PoolError("there are no candidates to explain picks from")
                possible = replace(options, k=min(options.k, reader.size), explore=0.0, random=None)
                state = now.encoder.state()
                return await explain(
                    query, vectors, state, possible, reader, runner_ups=runner_ups, item=item, structures=structures
                )

        return now.engine.run(explained())

    def relevance(self, query: str) -> float:
        """How near a question is to what the encoder was fitted to, from 0 to 1; see `Encoder.relevance`."""
        check_query(query)
        return float(self.encoder.judge_queries([query], judge=True)[1][0])

    def _queries(
        self, now: Served, queries: Sequence[str], drafts: Sequence[str | None] | None, options: Options
    ) -> tuple[FloatArray, BoolArray]:
        """E_x of questions (B, D), and which of them are relevant enough to pick for (B,)."""
        for query in queries:
            check_query(query)
        wrong = next((one for one in drafts or () if one is not None and not isinstance(one, str)), None)
        if wrong is not None:
            raise InputError(f"a draft must be a program as a string, not {type(wrong).__name__}")
        if not options.min_relevance:
            return now.encoder.encode_queries(queries, drafts), np.ones(len(queries), dtype=np.bool_)
        vectors, relevance = now.encoder.judge_queries(queries, drafts, judge=True)
        return vectors, relevance >= options.min_relevance

    async def _selection(
        self, now: Served, vectors: FloatArray, relevant: BoolArray, options: Options, where: Filter | None
    ) -> list[list[Pick]]:
        if not relevant.all():
            found = iter(await self._selection(now, vectors[relevant], relevant[relevant], options, where))
            return [next(found) if each else [] for each in relevant]
        if not len(vectors):
            return []
        state = now.encoder.state()
        async with now.engine.read(where) as reader:
            if options.k > reader.size:
                logger.info("k = %d examples asked for, but there are only %d: all are picked", options.k, reader.size)
                options = replace(options, k=reader.size)
            picks = await select(vectors, state, options, reader)
            fewest = min(map(len, picks.hits), default=options.k_min)
            if fewest < options.k_min:
                raise InputError(f"k_min = {options.k_min}, but only {fewest} examples can be picked")
            alone: dict[int, FloatArray] = {}
            if options.relevance and (picks.positions >= 0).any():
                keys = np.unique(picks.positions[picks.positions >= 0])
                products = await reader.candidates(keys) @ state.start(vectors).vector().T
                alone = dict(zip(keys.tolist(), products, strict=True))
        return [
            [
                Pick(
                    hit.row.id,
                    example,
                    step,
                    hit.logit,
                    float(picks.probabilities[query, step - 1]) if options.scored or options.explore else None,
                    float(alone[hit.key][query]) if options.relevance else None,
                )
                for step, (hit, example) in enumerate(zip(hits, _examples(hits), strict=True), start=1)
            ]
            for query, hits in enumerate(picks.hits)
        ]

    # ------------------------------------------------------------------ files

    def save(self, folder: str | os.PathLike[str], fields: Mapping[str, Any] | None = None) -> None:
        """Write encoder, examples and vectors as one checkpoint folder, whole or not at all.

        An engine that keeps the pool elsewhere goes on keeping it: then the folder holds no examples.

        Args:
            folder: where.
            fields: the retriever's own, JSON values.

        Raises:
            PoolError: an example has a field that JSON can't hold as it is.
        """
        with atomic_directory(folder) as path:
            self.encoder.save_pretrained(path)
            keys = {"source_key": [*self.schema.source_keys], "target_key": self.schema.target_key}
            write_json(path / RETRIEVER_FILE, {**keys, "fields": dict(fields or {})})
            if isinstance(self.index, LocalIndex):
                rows, vectors = self.index.content()
                pool = self.schema.extended([row.example for row in rows], [row.id for row in rows])
                write_jsonl(path / POOL_FILE, pool, shown=folder)
                save_vectors(path / VECTORS_FILE, self.encoder.fingerprint(), _signatures(pool), vectors, pool.programs)
            seal(path)


def check_query(query: object) -> None:
    """Raise an error unless `query` is a question.

    Raises:
        InputError: it is not a string, blank, or not valid Unicode.
    """
    if not isinstance(query, str):
        raise InputError(f"the query must be a string, not {type(query).__name__}")
    try:
        check_text(query)
    except ValueError as error:
        raise InputError(f"the query {error}") from None


def _rows(pool: ExamplePool) -> list[Row]:
    return list(made(Row, pool.ids, pool.examples, pool.programs.tolist()))


def _examples(hits: Sequence[Hit]) -> Iterable[dict[str, Any]]:
    """The examples of hits, for the caller to keep."""
    return copied([hit.row.example for hit in hits], [hit.row.id for hit in hits])


def _signatures(pool: ExamplePool) -> list[tuple[str, ...]]:
    """Of each example its id and what the encoders read of it: what its vectors belong to."""
    return [(example_id, *item) for example_id, item in zip(pool.ids, pool.items(), strict=True)]


def _ids(ids: Sequence[str]) -> list[str]:
    if isinstance(ids, str):
        raise InputError(f"ids must be a sequence of ids, not one string: [{ids!r}]")
    if not isinstance(ids, Iterable):
        raise InputError(f"ids must be a sequence of ids, not {ids!r}")
    given = list(ids)
    wrong = next((one for one in given if not isinstance(one, str)), None)
    if wrong is not None:
        raise InputError(f"an id must be a string, not {wrong!r}")
    return given
