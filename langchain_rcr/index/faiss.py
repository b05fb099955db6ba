"""The pool in FAISS, in this process: exact search, graphs (HNSW), inverted lists (IVF), half precision."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Self, get_args

import numpy as np

from langchain_rcr.basics.rows import FloatArray, IntArray, SparseRows, taken
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.index.base import BEST, InThisThread, PoolVectors, Row
from langchain_rcr.index.local import LocalIndex, Table
from langchain_rcr.index.memory import ColumnTable, MatrixTable
from langchain_rcr.index.ranking import Near, Ranked, best_fetched, log_sums, slack

try:
    faiss: Any = import_module("faiss")  # whose types are few and wrong
except ImportError:
    raise MissingExtraError("faiss", "faiss") from None

Kind = Literal["flat", "hnsw", "ivf"]

_AT_ONCE = 2048
"""Rows added before searches get a turn."""

_PER_LIST = 39
"""Vectors that FAISS wants for each inverted list to train on."""

_DIRECTIONS, _CLOSER = 128, 64
"""Inverted lists keep vectors along their principal directions, so many at most, in 4 bits for each two; the logits of
at least so many of the nearest are then worked out exactly. Of D = 384 that is a fiftieth of float32's bytes."""

_PROBED, _LEAST_PROBED = 10, 32
"""One inverted list in so many is looked at, and at least so many: the picks' logits then add up to some 0.3 % less
than the exact ones do (trials: 0.3 % at 100,000 drawn examples, 0.2 % of 6,800 real ones)."""

_SAMPLED = 20_000
"""Rows in which the principal directions are looked for."""

_SMALL = 4096
"""Pools up to this size are searched in full, whatever the kind: a detour would take as long."""

_RARE = 10
"""Where fewer than one row in ten can be found, all of these are looked at, whatever the kind."""


@dataclass(frozen=True, slots=True)
class FaissOptions:
    """Which FAISS index, and its parameters.

    Args:
        kind: `flat`: exact; without `fp16` it is the engine in memory, and FAISS has no part in it. `hnsw`: a graph;
            approximate, fast, slow to add to. `ivf`: inverted lists; approximate, the logits exact. Both are exact up
            to 4,096 rows, and `ivf` until there are enough to train on. Sparse vectors stay sparse with `ivf` and
            `flat`: their lists are their columns (`ColumnTable`), and no parameter below has a part in them.
        fp16: keep E_c in half precision: half the memory, logits to about three digits.
        m: neighbours of a vector in the graph (hnsw).
        ef_construction: candidates looked at when a vector is added (hnsw).
        ef_search: candidates looked at in a search (hnsw).
        nlist: inverted lists (ivf); None: 4 · √N of the N rows trained on.
        nprobe: lists looked at in a search (ivf); None: one in 10, at least 32.
        train_from: rows that begin training (ivf), at least 39 · nlist.
    """

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
        for name in ("m", "ef_construction", "ef_search", "nlist", "nprobe", "train_from"):
            value, least = getattr(self, name), 2 if name == "m" else 1
            if value is None and name in ("nlist", "nprobe"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} must be a whole number from {least} on, not {value!r}")

    @property
    def exact(self) -> bool:
        """Whether searches and logits are those of a full search in float32."""
        return self.kind == "flat" and not self.fp16

    def probes(self, lists: int) -> int:
        """How many of so many inverted lists to look at."""
        return min(lists, self.nprobe or max(_LEAST_PROBED, lists // _PROBED))

    def lists(self, rows: int) -> int:
        """How many inverted lists to train on this many rows; 0: too few rows."""
        wanted = self.nlist or max(1, min(int(4 * rows**0.5), max(rows, self.train_from) // _PER_LIST))
        return wanted if self.kind == "ivf" and rows >= max(self.train_from, wanted * _PER_LIST) else 0


class FaissIndex(LocalIndex):
    """The engine that searches with FAISS; see `LocalIndex` and, for the arguments, `FaissOptions`.

    FAISS uses as many threads as OMP_NUM_THREADS says.

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

    def _table(self, vectors: PoolVectors, rows: Iterable[Row]) -> Table:
        if self.options.kind == "ivf" and isinstance(vectors.candidate, SparseRows):
            return ColumnTable(vectors, rows)
        # FAISS's exact search is one product a question; a matrix product for all of them does less work.
        return MatrixTable(vectors, rows) if self.options.exact else FaissTable(vectors, self.options, rows)


class FaissTable(Table):
    """E_c in a FAISS index whose ids are row numbers, E_z in a matrix; see `Table`.

    Tables that grew out of each other share one FAISS index, which rows are only ever appended to; each looks at its
    own rows alone. What must not be found is left out by a selector inside FAISS; picks are left out by fetching more.

    Args:
        vectors: the pool's E_c and E_z; E_c is copied, E_z isn't.
        options: which index.
        rows: see `Table`.
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
        retrain = not self._shared.trained and self._options.lists(len(table))
        if retrain or self._shared.count != start:
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
        """See `Table.found`; approximate where the kind of index is. Partitions sum over the `BEST` best."""
        states = np.ascontiguousarray(states, dtype=np.float32)
        keys, logits = self._best(states, t, exclude)
        if tau is None:
            return keys, logits, None
        return keys, logits, log_sums(self._best(states, min(BEST, max(1, self.size)), exclude)[1], tau)

    def _best(self, states: FloatArray, t: int, exclude: IntArray) -> Near:
        """Keys and logits (B, t) of the best."""
        found = best_fetched(self._fetch, states, t, exclude, slack(states, self._longest), self.size, most=self.size)
        return InThisThread().run(found)

    async def _fetch(self, states: FloatArray, width: int) -> list[Near]:
        """See `best_fetched`."""
        everything = len(self) <= _SMALL or _RARE * self.size < len(self)
        keys, scores = self._ask(states, width, everything)
        short = np.flatnonzero(keys[:, -1] < 0)
        if len(short) and not everything:
            keys[short], scores[short] = self._ask(states[short], width, True)
        return [(row[row >= 0], values[row >= 0]) for row, values in zip(keys, scores, strict=True)]

    def _ask(self, states: FloatArray, width: int, everything: bool) -> Near:
        """One FAISS search among the rows that can be found; approximate unless `everything` is to be looked at.

        Keys and scores (B, width), best first; −1 and any score where there are fewer.
        """
        with self._shared.entered() as index:
            selector = None
            if self._allowed is not None:
                selector = faiss.IDSelectorBitmap(np.packbits(self._allowed, bitorder="little"))
            elif index.ntotal > len(self):
                selector = faiss.IDSelectorRange(0, len(self))
            if isinstance(index, faiss.IndexHNSW) and not everything:
                ef = max(self._options.ef_search, width)
                params = faiss.SearchParametersHNSW(sel=selector, efSearch=ef)
            elif isinstance(index, faiss.IndexRefine) and not everything:
                probes = self._options.probes(faiss.extract_index_ivf(index).nlist)
                lists = faiss.SearchParametersIVF(sel=selector, nprobe=probes)
                turned = faiss.SearchParametersPreTransform(index_params=lists)
                params = faiss.IndexRefineSearchParameters(k_factor=max(1, _CLOSER / width), base_index_params=turned)
            else:
                params = None if selector is None else faiss.SearchParameters(sel=selector)
            searched = _in_full(index) if everything else index
            scores, keys = searched.search(states, width, params=params)
        return keys, scores


class _Shared:
    """A FAISS index that many may enter to search, or one, alone, to change it: it can't be searched while it grows.

    First come, first served: who comes while another waits to change it waits, too, until that one is done.
    """

    def __init__(self, index: Any) -> None:
        self._index = index
        self._inside, self._alone = 0, False
        self._queue = list[object]()
        self._turn = threading.Condition()

    def __reduce__(self) -> tuple[Any, ...]:
        with self.entered() as index:
            return _restored, (faiss.serialize_index(index).tobytes(),)

    @property
    def count(self) -> int:
        with self.entered() as index:
            return int(index.ntotal)

    @property
    def trained(self) -> bool:
        """Whether it is one of inverted lists."""
        return isinstance(self._index, faiss.IndexRefine)

    def append(self, vectors: FloatArray) -> None:
        for start in range(0, len(vectors), _AT_ONCE):
            with self.entered(alone=True) as index:
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
    """An empty FAISS index for vectors of this length, trained on these."""
    dim, product, half = vectors.shape[1], faiss.METRIC_INNER_PRODUCT, faiss.ScalarQuantizer.QT_fp16
    lists = options.lists(len(vectors))
    if options.kind == "hnsw":
        if options.fp16:
            index = faiss.IndexHNSWSQ(dim, half, options.m, product)
        else:
            index = faiss.IndexHNSWFlat(dim, options.m, product)
        index.hnsw.efConstruction = options.ef_construction
    else:
        index = faiss.IndexScalarQuantizer(dim, half, product) if options.fp16 else faiss.IndexFlatIP(dim)
        if lists:
            index = faiss.IndexRefine(_inverted(vectors, lists), index)
    if not index.is_trained:
        index.train(np.ascontiguousarray(vectors, dtype=np.float32))
    return index


def _inverted(vectors: FloatArray, lists: int) -> Any:
    """Inverted lists, to be trained, of these vectors' (N, D) first principal directions, in 4 bits for each two."""
    some, length = vectors[:: -(-len(vectors) // _SAMPLED)], vectors.shape[1]
    halves = max(1, min(length, _DIRECTIONS) // 2)
    turn = faiss.LinearTransform(length, min(length, 2 * halves), False)
    # The largest last; not FAISS's PCA, which moves the centre, so that inner products are other ones.
    directions = np.linalg.eigh(some.T @ some)[1][:, -turn.d_out :]
    faiss.copy_array_to_vector(np.ascontiguousarray(directions.T, dtype=np.float32).ravel(), turn.A)
    turn.is_trained = True
    index = faiss.IndexIVFPQFastScan(
        faiss.IndexFlatIP(turn.d_out), turn.d_out, lists, halves, 4, faiss.METRIC_INNER_PRODUCT
    )
    index.cp.max_points_per_centroid = _PER_LIST  # a million rows train in 20 seconds and not in two minutes
    return faiss.IndexPreTransform(turn, index)


def _in_full(index: Any) -> Any:
    """What searches all rows of an index exactly, as far as they are kept so."""
    if isinstance(index, faiss.IndexHNSW):
        return faiss.downcast_index(index.storage)
    return faiss.downcast_index(index.refine_index) if isinstance(index, faiss.IndexRefine) else index


def _restored(serialized: bytes) -> _Shared:
    return _Shared(faiss.deserialize_index(np.frombuffer(serialized, dtype=np.uint8)))
