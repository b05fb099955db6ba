"""The mutable state that retrievers share: a trained encoder, a pool and the engine that holds it."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from langchain_rcr.basics.files import atomic_directory, write_json
from langchain_rcr.basics.items import text_hash
from langchain_rcr.basics.progress import Stopped, stoppable
from langchain_rcr.basics.rows import IntArray
from langchain_rcr.errors import EngineError, InputError, PoolError, printable
from langchain_rcr.index.base import CandidateIndex, Row
from langchain_rcr.index.local import LocalIndex
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.policy.checkpoint import Runtime, check_folder
from langchain_rcr.policy.manifest import seal
from langchain_rcr.policy.triencoder import FEWEST, TriEncoder
from langchain_rcr.pool.examples import Example, ExamplePool, changed, earlier
from langchain_rcr.pool.saved import POOL_FILE, RETRIEVER_FILE, VECTORS_FILE, load_vectors, save_vectors, write_jsonl
from langchain_rcr.pool.served import Served

logger = logging.getLogger(__name__)

_MOST_READ_AT_ONCE = 5_000
"""Opening a filled engine waits until up to this many of its examples are read; more are read in the background."""
_LOOK_S = 30.0
"""Seconds between looks for what other processes have added to an engine of at most so many examples."""
_BURST_S = 1.0
"""Wait after the addition that makes a fit due, so that a burst of additions needs only one fit."""
_REST = 9.0
"""The next fit waits this many times as long as the last one took, so fits take at most a tenth of the time."""
_LONGEST_END_S = 10.0
"""How long the end of the process waits for a fit to notice it."""
_OPENMP = {"faiss": "omp_set_num_threads", "torch": "set_num_threads"}
"""Libraries whose threads don't exist in a forked process, where they would be waited for, and what says how many."""
_ending = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_stores: weakref.WeakSet[ExampleStore] = weakref.WeakSet()


class ExampleStore:
    """A trained encoder, a pool and the pool's vectors in an engine, shared by several retrievers.

    Safe to read and change from many threads: a query, which `now` answers, sees the pool either before or after a
    change. Other examples in the engine, such as those another process added, teach the encoder as `add` does.

    Args:
        encoder: the trained encoder; put in inference mode.
        pool: what the engine should hold, and the keys of questions and programs. Examples that it already has are left
            alone; new and changed ones are encoded here, and changed ones replaced.
        index: the engine; None: one in memory.
        folder: where `save` may have left the pool's vectors; then nothing is encoded.
        append: whether to keep examples in the engine that aren't in `pool`.

    Raises:
        PoolError: the engine holds other examples, and `append` is off.
        CheckpointError: the engine or the folder holds another encoder's vectors, or the folder those of another pool.
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
        index, schema = MemoryIndex() if index is None else index, pool.only([], encoder.spec)
        if isinstance(index, type) or not hasattr(index, "bind"):
            raise InputError(
                f"index must be an engine, such as MemoryIndex() or VectorStoreIndex(…), not {index!r:.80}"
            )
        self._begin(Served(encoder.eval(), index, encoder.fingerprint(), schema))
        self.index.bind(self.fingerprint, encoder.dim)
        fresh, gone = self._changes(pool, append)
        if fresh:
            new = pool.only(fresh, encoder.spec)
            stored = None if folder is None else folder / VECTORS_FILE
            if stored is not None and stored.is_file() and len(fresh) == len(pool):
                vectors, programs = load_vectors(stored, self.fingerprint, _signatures(pool, encoder))
            else:
                programs = new.programs
                vectors = self.encoder.encode_pool(new.items(encoder.prefer))
                self.encoder.grow(new.items(), labels_only=True)
            try:
                self.index.add(_rows(new, programs), vectors, replace=gone)
            except PoolError:
                if self._changes(pool, append)[0]:
                    raise  # otherwise another process that opened the same pool was faster
            if folder is None:  # training has already warned of a checkpoint's own examples
                self._say_unread(new)
        self._count = self.index.count() if encoder.family.fits else 0
        more = self._count - len(pool)
        if more > _MOST_READ_AT_ONCE:
            where = type(self.index).__name__
            logger.info("learning in the background from %d examples in %s", more, where)
            _started(partial(_learn_stored, self.now, pool), f"nothing was learnt from the examples in {where}")
        elif more > 0:
            _learn_stored(self.now, pool)

    def _begin(self, now: Served) -> None:
        self.now = now
        self._changing, self._refitting = threading.RLock(), threading.RLock()
        self._stale, self._unfit = False, False  # whether a fit is due, and whether one in the background has failed
        self._enough = FEWEST  # how many examples make a first fit worth trying
        self._fitting: threading.Thread | None = None
        self._count, self._look_at = -1, time.monotonic() + _LOOK_S  # examples in the engine when last looked
        _stores.add(self)

    def current(self) -> Served:
        """What answers a question. Now and then, a thread learns what other processes have added to the engine."""
        now = self.now
        if time.monotonic() > self._look_at and now.encoder.family.fits and not isinstance(now.engine, LocalIndex):
            self._look_at = math.inf
            _started(self._look, f"nothing was learnt from what was added to {type(now.engine).__name__}")
        return now

    def _look(self) -> None:
        try:
            before, self._count = self._count, self.index.count()
            if before != self._count <= _MOST_READ_AT_ONCE:
                _learn_stored(self.now, self.schema)
        except EngineError:
            self._count = -1  # the next look may succeed
        finally:
            self._look_at = time.monotonic() + _LOOK_S

    @property
    def encoder(self) -> TriEncoder:
        """The encoder."""
        return self.now.encoder

    @property
    def index(self) -> CandidateIndex:
        """The engine."""
        return self.now.engine

    @property
    def schema(self) -> ExamplePool:
        """An empty pool with the keys of questions and programs."""
        return self.now.schema

    @property
    def fingerprint(self) -> str:
        """The encoder's fingerprint, which identifies the origin of vectors and outcomes."""
        return self.now.fingerprint

    def __getstate__(self) -> Served:
        return replace(self.now)  # without the questions that are being answered

    def __setstate__(self, state: Served) -> None:
        self._begin(state)

    def _changes(self, pool: ExamplePool, append: bool) -> tuple[list[int], list[str]]:
        """The changes that make the engine hold the pool: positions of examples to add, and ids that they replace."""
        count = self.index.count()
        known = self.index.known(pool.ids) if count else set()
        fresh, gone = [at for at, example_id in enumerate(pool.ids) if example_id not in known], list[str]()
        if count > len(known) and not append:
            # This reads the whole engine, so only if it can matter.
            rows = self.index.rows() if count - len(known) <= len(fresh) else []
            gone = earlier(pool, fresh, {row.id: row.example for row in rows if row.id not in known})
            if count - len(known) > len(gone):
                raise PoolError(
                    f"{type(self.index).__name__} holds {count - len(known)} examples that are not among these "
                    f"{len(pool)}: append=True keeps them in the pool; otherwise give it a collection, table or object "
                    "of its own, or delete them there first (index.rows() lists them, index.delete(ids) deletes)"
                )
        if known and not pool.of_content:  # ids derived from content change with it
            others = changed(pool, {row.id: row.example for row in self.index.rows(known)})
            fresh, gone = sorted([*fresh, *others]), [*gone, *(pool.ids[at] for at in others)]
        return fresh, gone

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
                "%d of %d programs don't parse as '%s': their tokens stand for structures (the first: '%.80s')",
                *(len(unread), len(pool), spec.language, printable(" ".join(unread[0].split()))),
            )

    # ------------------------------------------------------------------ changes

    def add(
        self,
        examples: Sequence[Example],
        ids: Sequence[str] | None = None,
        *,
        replace: bool = False,
        refit: bool = False,
    ) -> list[str]:
        """Encode examples (only these) and add them; the next query can pick them. Returns their ids.

        The encoder learns what their questions need, for all stores that share it (`TriEncoder.grow`).

        Args:
            examples: mappings with the two keys, and any other fields.
            ids: one for each; None for random ones.
            replace: whether an example with a known id replaces the old one.
            refit: whether to `refit` in the background once it is worth its time; has no effect for an engine outside
                this process, or after such a fit has failed.

        Raises:
            PoolError: an example or an id can't enter the pool; then nothing was added.
            InputError: there are more or fewer ids than examples.
        """
        with self._changing:
            pool, stale = self.schema.extended(examples, ids), self._stale
            self._put(pool, pool.ids if replace else ())
            self._count += 0 if replace else len(pool)
            if self.needs_refit:
                if refit and isinstance(self.index, LocalIndex) and not self._unfit:
                    if self._fitting is None:
                        failure = "a refit in the background failed; refit() tries again"
                        self._fitting = _started(partial(_keep_fitted, weakref.ref(self)), failure)
                elif not stale:
                    logger.warning(
                        "%d examples, many of them new to the fit: call refit(), or await arefit(), which fit to these "
                        "examples alone",
                        self.index.count(),
                    )
        return list(pool.ids)

    def _put(self, pool: ExamplePool, replace: Sequence[str]) -> None:
        vectors = self.encoder.encode_pool(pool.items(self.encoder.prefer))
        self.index.add(_rows(pool, pool.programs), vectors, replace=replace)
        self.encoder.grow(pool.items())
        self._say_unread(pool)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples and return how many there were; no query that begins later can pick them."""
        if isinstance(ids, str) or not isinstance(ids, Iterable):
            raise InputError(f"ids must be a sequence of ids, not {ids!r}")
        given = list(ids)
        if odd := [one for one in given if not isinstance(one, str)]:
            raise InputError(f"an id must be a string, not {odd[0]!r}")
        with self._changing:
            gone = self.index.delete(given)
            self._count -= gone
            return gone

    @property
    def needs_refit(self) -> bool:
        """Whether additions reach a tenth of the fitted examples, or 1,000; without a fit, whether there are enough."""
        if not self._stale:  # once true, it stays true until a refit
            self._stale = self.encoder.query.stale or (self.encoder.is_fallback and self.index.count() >= self._enough)
        return self._stale

    def refit(self, index: CandidateIndex | None = None, *, seed: int = 0) -> None:
        """Fit the encoder anew to all examples, then replace it and their vectors at one moment.

        Until then questions are answered as before, and what is added or deleted meanwhile isn't lost.

        Args:
            index: an empty engine for the vectors; None: a new one of the same kind, if in this process.
            seed: of the random parts.

        Raises:
            InputError: the engine is outside this process and no other was given, or the family isn't fitted to
                examples.
        """
        with self._refitting:
            before, began = self.now, time.monotonic()
            if index is None:
                if not isinstance(before.engine, LocalIndex):
                    kind = type(before.engine).__name__
                    raise InputError(
                        f"the vectors in {kind} belong to the old fit: give an empty engine, refit(index=…)"
                    )
                index = before.engine.emptied()
            old = {row.id: row for row in before.engine.rows()}
            pool = self.schema.extended([row.example for row in old.values()], [*old])
            fresh = ExampleStore(before.encoder.refitted(pool.items(before.encoder.prefer), seed=seed), pool, index)
            with self._changing:
                new = {row.id: row for row in before.engine.rows()}
                late = {one: row.example for one, row in new.items() if one not in old or row != old[one]}
                fresh.index.delete([one for one in old if one not in new])
                fresh._put(self.schema.extended([*late.values()], [*late]), [*late])
                self.now, self._stale, self._unfit = fresh.now, False, False
                self._enough = max(FEWEST, int(1.1 * len(pool)))  # if too few of these parse
            logger.info("fitted anew to %d examples in %.1f s", len(pool), time.monotonic() - began)

    # ------------------------------------------------------------------ files

    def save(
        self, folder: str | os.PathLike[str], fields: Mapping[str, Any] | None = None, *, runtime: Runtime | None = None
    ) -> None:
        """Write encoder, examples and vectors as one checkpoint folder; `fields` are the retriever's, as JSON values.

        Otherwise as the retriever's `save`.
        """
        check_folder(Path(folder))
        with atomic_directory(folder) as path:
            with self._changing:  # else the encoder might not have learnt from an example that is written
                now = self.now
                now.encoder.save_pretrained(path, runtime=runtime)
                content = now.engine.content() if isinstance(now.engine, LocalIndex) else None
            keys = {"source_key": [*now.schema.source_keys], "target_key": now.schema.target_key}
            write_json(path / RETRIEVER_FILE, {**keys, "fields": dict(fields or {})})
            if content is not None:
                rows, vectors = content
                pool = now.schema.extended([row.example for row in rows], [row.id for row in rows])
                write_jsonl(path / POOL_FILE, pool, shown=folder)
                names = _signatures(pool, now.encoder)
                save_vectors(path / VECTORS_FILE, now.fingerprint, names, vectors, pool.programs)
            seal(path)


def _learn_stored(now: Served, pool: ExamplePool) -> None:
    """Teach the encoder what the engine held before that the fit hasn't seen; the rest of the engine is in `pool`."""
    own = {*pool.ids}
    others = [row for row in now.engine.rows() if row.id not in own]
    items = [now.schema.item(row.example, f"the example {row.id!r}") for row in others]
    names = [(text_hash(item.source), row.program) for item, row in zip(items, others, strict=True)]
    unseen = now.encoder.query.unseen(np.array(names, dtype=np.int64).reshape(-1, 2))
    now.encoder.grow([items[at] for at in np.flatnonzero(unseen).tolist()])


def _rows(pool: ExamplePool, programs: IntArray) -> list[Row]:
    return list(map(Row, pool.ids, pool.examples, programs.tolist()))


def _signatures(pool: ExamplePool, encoder: TriEncoder) -> list[tuple[str, ...]]:
    """Each example's id and what the encoders read of it, which together identify its vectors."""
    items = pool.items(encoder.prefer)
    return [(one, *item[:2], *filter(None, item[2:])) for one, item in zip(pool.ids, items, strict=True)]


def _keep_fitted(reference: weakref.ref[ExampleStore]) -> None:
    """Refit a store again and again while so much has been added that a fit is worth its time."""
    pause = _BURST_S
    while not _ending.wait(pause) and (store := reference()) is not None:
        with store._changing:
            if not store.needs_refit:
                store._fitting = None
                return
        began = time.monotonic()
        try:
            store.refit()
        except Exception:
            store._unfit, store._fitting = True, None
            raise
        pause = max(_BURST_S, _REST * (time.monotonic() - began))
        del store


def _started(work: Callable[[], None], failure: str) -> threading.Thread:
    """A thread that does some work and is told to stop when the process ends; failures are logged as `failure`."""

    def run() -> None:
        try:
            with suppress(Stopped), stoppable(_ending):
                work()
        except Exception:
            if not _ending.is_set():  # at the end all sorts of things fail
                logger.warning("%s", failure, exc_info=True)

    thread = threading.Thread(target=run, name="langchain-rcr-store", daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@atexit.register
def _stop() -> None:
    _ending.set()
    until = time.monotonic() + _LONGEST_END_S
    for thread in tuple(_threads):
        thread.join(max(0.0, until - time.monotonic()))


def _forked() -> None:
    """A forked process has none of the threads that may hold the locks of stores and engines, or refit."""
    for store in tuple(_stores):
        store._begin(store.now)
        if isinstance(store.index, LocalIndex):
            store.index.forked()
    for library, limit in _OPENMP.items() if _stores else ():
        if library in sys.modules:
            getattr(sys.modules[library], limit)(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
