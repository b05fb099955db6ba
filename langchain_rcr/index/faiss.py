"""The pool in FAISS, in this process: exact search, graphs (HNSW), inverted lists (IVF), half precision."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Self, get_args

import numpy as np

from langchain_rcr.basics.rows import FloatArray, IntArray, SparseRows, taken
from langchain_rcr.basics.section import check_limits
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.index.base import BEST, InThisThread, PoolVectors, Row
from langchain_rcr.index.local import LocalIndex, Table
from langchain_rcr.index.memory import ColumnTable, MatrixTable
from langchain_rcr.index.ranking import Near, Ranked, best_fetched, log_sums, slack

try:
    faiss: Any = import_module("faiss")  # its type hints are few and wrong
except ImportError:
    raise MissingExtraError("faiss", "faiss") from None

Kind = Literal["flat", "hnsw", "ivf"]

_AT_ONCE = 2048
"""Rows added at a time, before searches get a turn."""

_PER_LIST = 39
"""Vectors per inverted list that FAISS wants for training."""

_DIRECTIONS, _CLOSER = 128, 64
"""Inverted lists keep at most this many principal components of each vector, in 4 bits per pair; the logits of at least
the second number of nearest rows are then computed exactly. For D = 384 that is a fiftieth of float32's bytes."""

_PROBED, _LEAST_PROBED = 10, 32
"""A search looks at one inverted list in `_PROBED`, and at least `_LEAST_PROBED`. The picks' logits then sum to about
0.3 % less than exact picks' (trials: 0.3 % at 100,000 drawn examples, 0.2 % of 6,800 real ones)."""

_SAMPLED = 20_000
"""Rows that the principal directions are computed from."""

_SMALL = 4096
"""Pools up to this size are searched in full, whatever the kind: approximate search would take as long."""

_RARE = 10
"""If fewer than one row in ten can be found, all of these are looked at, whatever the kind."""

_CHANGING = threading.Lock()
"""Held while a FAISS index changes: a fork waits, since its process would have half a change."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_CHANGING.acquire, after_in_parent=_CHANGING.release, after_in_child=_CHANGING.release)


@dataclass(frozen=True, slots=True)
class FaissOptions:
    """Which FAISS index, and its parameters; see `FaissIndex`."""

    kind: Kind = "flat"
    fp16: bool = False
    m: int = 32
    ef_construction: int = 200
    ef_search: int = 128
    nlist: int | None = None
    nprobe: int | None = None
    train_from: int = 10_000

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InputError(f"kind must be one of {', '.join(get_args(Kind))}, not {self.kind!r}")
        check_limits(least=2, m=self.m)
        check_limits(ef_construction=self.ef_construction, ef_search=self.ef_search, train_from=self.train_from)
        lists = {"nlist": self.nlist, "nprobe": self.nprobe}
        check_limits(**{name: value for name, value in lists.items() if value is not None})

    def lists(self, rows: int) -> int:
        """How many inverted lists to train on this many rows; 0: too few rows."""
        wanted = self.nlist or max(1, min(int(4 * rows**0.5), max(rows, self.train_from) // _PER_LIST))
        return wanted if self.kind == "ivf" and rows >= max(self.train_from, wanted * _PER_LIST) else 0


class FaissIndex(LocalIndex):
    """The engine that searches with FAISS, which uses as many threads as OMP_NUM_THREADS says; see `LocalIndex`.

    Args:
        kind: `flat`: exact; without `fp16` it is the engine in memory, and FAISS isn't used. `hnsw`: a graph;
            approximate, fast to search, slow to add to. `ivf`: inverted lists; approximate, but with exact logits. Both
            are exact up to 4,096 rows, and `ivf` until there are enough to train on. With `ivf` and `flat`, sparse
            vectors stay sparse: their columns serve as lists (`ColumnTable`), and the parameters below don't apply.
        fp16: keep E_c in half precision: half the memory, logits to about three digits.
        m: neighbours per vector in the graph (hnsw).
        ef_construction: candidates looked at when a vector is added (hnsw).
        ef_search: candidates looked at in a search (hnsw).
        nlist: inverted lists (ivf); None: 4 · √N of the N rows trained on.
        nprobe: lists looked at in a search (ivf); None: one in 10, at least 32.
        train_from: the number of rows at which training starts (ivf), at least 39 · nlist.

    Raises:
        MissingExtraError: FAISS is not installed (when this module is imported).
        InputError: an option is out of range.
    """

    def __init__(
        self,
        kind: Kind = "flat",
        *,
        fp16: bool = False,
        m: int = 32,
        ef_construction: int = 200,
        ef_search: int = 128,
        nlist: int | None = None,
        nprobe: int | None = None,
        train_from: int = 10_000,
    ) -> None:
        self.options = FaissOptions(kind, fp16, m, ef_construction, ef_search, nlist, nprobe, train_from)
        super().__init__()

    def forked(self) -> None:
        """See `LocalIndex.forked`."""
        super().forked()
        if isinstance(self._now, FaissTable):
            self._now._shared.unlock()

    def _table(self, vectors: PoolVectors, rows: Iterable[Row]) -> Table:
        if self.options.kind == "ivf" and isinstance(vectors.candidate, SparseRows):
            return ColumnTable(vectors, rows)
        if self.options.kind == "flat" and not self.options.fp16:
            # FAISS's exact search does one product per question; a matrix product for all of them is less work.
            return MatrixTable(vectors, rows)
        return FaissTable(vectors, self.options, rows)


class FaissTable(Table):
    """E_c in a FAISS index whose ids are row numbers, E_z in a matrix; see `Table`.

    Tables extended from one another share one append-only FAISS index, which copies E_c; each looks only at its own
    rows. Rows that must not be found are excluded by a selector inside FAISS, picks by fetching more.
    """

    def __init__(self, vectors: PoolVectors, options: FaissOptions, rows: Iterable[Row] = ()) -> None:
        super().__init__(vectors, rows)
        self._options = options
        candidate = np.asarray(vectors.candidate)
        self._shared = _Shared(_new_index(candidate, options))
        self._shared.append(candidate)

    def extended(self, vectors: PoolVectors) -> Self:
        """See `Table.extended`."""
        table, start, candidate = super().extended(vectors), len(self), np.asarray(vectors.candidate)
        with self._shared.entered() as index:
            retrain = not isinstance(index, faiss.IndexRefine) and self._options.lists(len(table))
            shared = index.ntotal == start
        if retrain or not shared:
            candidate = np.concatenate([np.asarray(self.pool_vectors(np.arange(start)).candidate), candidate])
            table._shared = _Shared(_new_index(candidate, self._options))
        table._shared.append(candidate)
        return table

    def pool_vectors(self, keys: IntArray) -> PoolVectors:
        """See `Table.pool_vectors`; E_c to half precision with `fp16`."""
        with self._shared.entered() as index:
            found = index.reconstruct_batch(np.ascontiguousarray(keys)) if len(keys) else np.empty((0, index.d), "<f4")
        return PoolVectors(found, taken(self._context.rows, keys))

    def found(self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None) -> Ranked:
        """See `Table.found`; approximate if the kind of index is. Partitions sum over the `BEST` best."""
        states = np.ascontiguousarray(states, dtype=np.float32)
        keys, logits = self._best(states, t, exclude)
        if tau is None:
            return keys, logits, None
        return keys, logits, log_sums(self._best(states, min(BEST, max(1, self.size)), exclude)[1], tau)

    def _best(self, states: FloatArray, t: int, exclude: IntArray) -> Near:
        found = best_fetched(self._fetch, states, t, exclude, slack(states, self._longest), self.size, most=self.size)
        return InThisThread().run(found)

    async def _fetch(self, states: FloatArray, width: int) -> list[Near]:
        everything = len(self) <= _SMALL or _RARE * self.size < len(self)
        keys, scores = self._ask(states, width, everything)
        short = np.flatnonzero(keys[:, -1] < 0)
        if len(short) and not everything:
            keys[short], scores[short] = self._ask(states[short], width, True)
        return [(row[row >= 0], values[row >= 0]) for row, values in zip(keys, scores, strict=True)]

    def _ask(self, states: FloatArray, width: int, everything: bool) -> Near:
        """One FAISS search among the rows that can be found; approximate unless `everything`.

        Keys and scores (B, width), best first; −1 and an arbitrary score where there are fewer.
        """
        with self._shared.entered() as index:
            selector = None
            if self.size < len(self):
                selector = faiss.IDSelectorBitmap(np.packbits(self.allowed, bitorder="little"))
            elif index.ntotal > len(self):
                selector = faiss.IDSelectorRange(0, len(self))
            if isinstance(index, faiss.IndexHNSW) and not everything:
                ef = max(self._options.ef_search, width)
                params = faiss.SearchParametersHNSW(sel=selector, efSearch=ef)
            elif isinstance(index, faiss.IndexRefine) and not everything:
                inverted = faiss.extract_index_ivf(index).nlist
                probes = self._options.nprobe or max(_LEAST_PROBED, inverted // _PROBED)
                lists = faiss.SearchParametersIVF(sel=selector, nprobe=min(inverted, probes))
                turned = faiss.SearchParametersPreTransform(index_params=lists)
                params = faiss.IndexRefineSearchParameters(k_factor=max(1, _CLOSER / width), base_index_params=turned)
            else:
                params = None if selector is None else faiss.SearchParameters(sel=selector)
            searched = _in_full(index) if everything else index
            scores, keys = searched.search(states, width, params=params)
        return keys, scores


class _Shared:
    """A FAISS index with a readers-writer lock: many may search it, or one may change it, as it can't be searched then.

    First come, first served: those who arrive while a writer waits also wait until it is done.
    """

    def __init__(self, index: Any) -> None:
        self._index = index
        self.unlock()

    def unlock(self) -> None:
        """Let everybody in: nobody is inside."""
        self._inside, self._alone = 0, False
        self._queue = list[object]()
        self._turn = threading.Condition()

    def __getstate__(self) -> Any:
        with self.entered() as index:
            return faiss.serialize_index(index)

    def __setstate__(self, state: Any) -> None:
        self.__init__(faiss.deserialize_index(state))  # type: ignore[misc]

    def append(self, vectors: FloatArray) -> None:
        for start in range(0, len(vectors), _AT_ONCE):
            with self.entered(alone=True) as index, _CHANGING:
                index.add(np.ascontiguousarray(vectors[start : start + _AT_ONCE], dtype=np.float32))

    @contextmanager
    def entered(self, *, alone: bool = False) -> Iterator[Any]:
        ticket = object()
        with self._turn:
            self._queue.append(ticket)
            try:
                self._turn.wait_for(
                    lambda: self._queue[0] is ticket and not self._alone and not (alone and self._inside)
                )
                self._inside, self._alone = self._inside + 1, alone
            finally:
                self._queue.remove(ticket)
                self._turn.notify_all()
        try:
            yield self._index
        finally:
            with self._turn:
                self._inside, self._alone = self._inside - 1, False
                self._turn.notify_all()


def _new_index(vectors: FloatArray, options: FaissOptions) -> Any:
    """An empty FAISS index for vectors like these, trained on them."""
    storage = "SQfp16" if options.fp16 else "Flat"
    kind = f"HNSW{options.m},{storage}" if options.kind == "hnsw" else storage
    index = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
    if options.kind == "hnsw":
        index.hnsw.efConstruction = options.ef_construction
    elif lists := options.lists(len(vectors)):
        index = faiss.IndexRefine(_inverted(vectors, lists), index)
    if not index.is_trained:
        index.train(np.ascontiguousarray(vectors, dtype=np.float32))
    return index


def _inverted(vectors: FloatArray, lists: int) -> Any:
    """Untrained inverted lists over the first principal components of vectors (N, D), in 4 bits per pair."""
    some, length = vectors[:: -(-len(vectors) // _SAMPLED)], vectors.shape[1]
    halves = max(1, min(length, _DIRECTIONS) // 2)
    turn = faiss.LinearTransform(length, min(length, 2 * halves), False)
    # The largest come last. Not FAISS's PCA, which shifts the centre and so changes inner products.
    directions = np.linalg.eigh(some.T @ some)[1][:, -turn.d_out :]
    faiss.copy_array_to_vector(np.ascontiguousarray(directions.T, dtype=np.float32).ravel(), turn.A)
    turn.is_trained = True
    index = faiss.IndexIVFPQFastScan(
        faiss.IndexFlatIP(turn.d_out), turn.d_out, lists, halves, 4, faiss.METRIC_INNER_PRODUCT
    )
    index.cp.max_points_per_centroid = _PER_LIST  # a million rows train in 20 seconds instead of two minutes
    return faiss.IndexPreTransform(turn, index)


def _in_full(index: Any) -> Any:
    """The part of an index that searches all rows, exactly as far as they are stored exactly."""
    if isinstance(index, faiss.IndexHNSW):
        return faiss.downcast_index(index.storage)
    return faiss.downcast_index(index.refine_index) if isinstance(index, faiss.IndexRefine) else index
