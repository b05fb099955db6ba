"""FAISS against the matrix in memory: same picks where it is exact, measured recall where it isn't."""

import pickle
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

import langchain_rcr
from langchain_rcr.basics.rows import longest
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.families.state import AdditiveState
from langchain_rcr.index import faiss as module
from langchain_rcr.index.base import InThisThread, PoolVectors, Row
from langchain_rcr.index.faiss import FaissIndex, FaissOptions, FaissTable
from langchain_rcr.index.memory import MatrixTable
from langchain_rcr.index.ranking import slack
from langchain_rcr.policy.selection import Options, greedy, select

NOTHING = np.empty(0, dtype=np.int64)


@pytest.fixture(autouse=True)
def approximate_from_the_first_row(monkeypatch):
    monkeypatch.setattr("langchain_rcr.index.faiss._SMALL", 0)


def vectors(rng, size, dim=32):
    return PoolVectors(*rng.normal(size=(2, size, dim)).astype(np.float32))


def candidates(table, keys):
    return table.pool_vectors(keys).candidate


def with_duplicates(rng, size, dim, kinds):
    kind = rng.integers(0, kinds, size) if kinds < size else np.arange(size)
    return PoolVectors(*(rng.normal(size=(2, kinds, dim)).astype(np.float32)[:, kind]))


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("kinds", [40, *(pytest.param(kinds, marks=pytest.mark.slow) for kinds in (1, 1013))])
def test_flat_finds_what_the_matrix_finds(batch, kinds):
    rng = np.random.default_rng(batch)
    pool = with_duplicates(rng, 1013, 384, kinds)
    states = rng.normal(size=(batch, 384)).astype(np.float32)
    exclude = [rng.integers(0, 1013, rng.integers(0, 40)) for _ in states]
    allowed = rng.random(1013) < 0.4
    matrix, flat = MatrixTable(pool), FaissTable(pool, FaissOptions())
    for one, other in ((matrix, flat), (matrix.allowing(allowed), flat.allowing(allowed))):
        assert one.size == other.size
        for t in (1, 5, 60):
            keys, logits, _ = other.found(states, t, exclude)
            expected, values, _ = one.found(states, t, exclude)
            # Logits that differ by just the slack fall on either side of it, by rounding.
            close = np.abs(logits - values) < 2 * slack(states, longest(pool.candidate))[:, None]
            assert close.all()
            assert (keys != expected).sum() <= 0.002 * keys.size * (kinds == 1013)


def test_the_flat_kind_is_the_engine_in_memory():
    pool = vectors(np.random.default_rng(0), 20)
    index = FaissIndex()
    index.bind("f", 32)
    index.add([Row(str(n), {}, n) for n in range(20)], pool)

    async def exact():
        async with index.read() as reader:
            return reader

    assert isinstance(index.run(exact()), MatrixTable)
    index = FaissIndex("flat", fp16=True)
    assert isinstance(index.run(exact()), FaissTable)


def test_greedy_picks_are_the_same():
    rng = np.random.default_rng(0)
    pool, queries = with_duplicates(rng, 1500, 64, 300), rng.normal(size=(20, 64)).astype(np.float32)
    reader = FaissTable(pool, FaissOptions()).opened()
    for lam in (-0.5, 0.3):
        ours = InThisThread().run(select(queries, AdditiveState(lam), Options(6), reader))
        np.testing.assert_array_equal(ours.positions, greedy(queries, pool, AdditiveState(lam), 6).positions)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
@pytest.mark.parametrize("fp16", [False, True])
def test_recall(kind, fp16):
    rng = np.random.default_rng(1)
    pool, states = vectors(rng, 3000), rng.normal(size=(50, 32)).astype(np.float32)
    table = FaissTable(pool, FaissOptions(kind, fp16, nlist=20, nprobe=14, train_from=1000))
    exclude = [rng.integers(0, 3000, 4) for _ in states]
    expected = MatrixTable(pool).found(states, 10, exclude)[0]
    keys, logits, _ = table.found(states, 10, exclude)
    hits = np.mean([len(set(one) & set(other)) / 10 for one, other in zip(keys, expected, strict=True)])
    assert hits > 0.9
    assert not any(set(row) & set(barred) for row, barred in zip(keys, exclude, strict=True))
    exact = np.einsum("bd,btd->bt", states, pool.candidate[keys])
    np.testing.assert_allclose(logits, exact, atol=2e-2 if fp16 else 1e-4)
    np.testing.assert_allclose(candidates(table, keys[0]), pool.candidate[keys[0]], atol=2e-3 if fp16 else 0)
    np.testing.assert_array_equal(table.vectors(keys[0]), pool.context[keys[0]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_a_rare_filter_is_searched_exactly_and_nothing_is_lacking(kind):
    rng = np.random.default_rng(2)
    pool, states = vectors(rng, 3000), rng.normal(size=(20, 32)).astype(np.float32)
    table = FaissTable(pool, FaissOptions(kind, m=4, ef_search=1, nlist=60, nprobe=1, train_from=1000))
    rare = rng.random(3000) < 0.01
    found = table.allowing(rare).found(states, 5, [NOTHING] * 20)[0]
    np.testing.assert_array_equal(found, MatrixTable(pool).allowing(rare).found(states, 5, [NOTHING] * 20)[0])
    # Approximate search would find enough of these, but not the best.
    wide = FaissTable(pool, FaissOptions(kind, m=4, ef_search=16, nlist=60, nprobe=20, train_from=1000))
    rare = rng.random(3000) < 0.08
    found = wide.allowing(rare).found(states, 5, [NOTHING] * 20)[0]
    np.testing.assert_array_equal(found, MatrixTable(pool).allowing(rare).found(states, 5, [NOTHING] * 20)[0])
    for allowed in (rng.random(3000) < 0.2, np.arange(3000) >= 0):
        some = table.allowing(allowed)
        keys, _, _ = some.found(states, 700, [NOTHING] * 20)
        expected = min(700, some.size)
        assert ((keys >= 0).sum(axis=1) == expected).all()
        assert all(len(set(row[row >= 0])) == expected and allowed[row[row >= 0]].all() for row in keys)


def test_small_pools_are_searched_exactly(monkeypatch):
    monkeypatch.setattr(module, "_SMALL", 1500)
    rng = np.random.default_rng(8)
    pool, states = vectors(rng, 1500), rng.normal(size=(20, 32)).astype(np.float32)
    for kind in ("hnsw", "ivf"):
        table = FaissTable(pool, FaissOptions(kind, m=2, ef_search=1, nlist=30, nprobe=1, train_from=1000))
        expected = MatrixTable(pool).found(states, 5, [NOTHING] * 20)[0]
        np.testing.assert_array_equal(table.found(states, 5, [NOTHING] * 20)[0], expected)
        more = table.extended(vectors(rng, 1))
        assert (more.found(states, 5, [NOTHING] * 20)[0] != expected).any()


def test_ties_are_fetched_until_the_lowest_key_is_sure(monkeypatch):
    fetched = []
    real = FaissTable._fetch
    monkeypatch.setattr(FaissTable, "_fetch", lambda self, s, w: fetched.append((len(s), w)) or real(self, s, w))
    candidate = np.ones((500, 3), dtype=np.float32)
    candidate[490:] += np.arange(1, 11, dtype=np.float32)[:, None]
    table = FaissTable(PoolVectors(candidate, candidate), FaissOptions())
    states = np.array([[1, 1, 1], [-1, -1, -1]], dtype=np.float32)
    keys, _, _ = table.found(states, 3, [np.array([0, 1])] * 2)
    assert keys.tolist() == [[499, 498, 497], [2, 3, 4]]
    assert fetched[0] == (2, 13)  # 8 more than are needed
    assert [rows for rows, _ in fetched[1:]] == [1] * (len(fetched) - 1)
    assert fetched[-1][1] == 500


def has_lists(table):
    with table._shared.entered() as index:
        return isinstance(index, module.faiss.IndexRefine)


def test_inverted_lists_begin_when_there_are_enough_rows():
    rng = np.random.default_rng(3)
    table = FaissTable(vectors(rng, 0), FaissOptions("ivf", nlist=4, train_from=200))
    first = table.extended(vectors(rng, 199))
    assert not has_lists(first)
    states = rng.normal(size=(5, 32)).astype(np.float32)
    before = first.found(states, 3, [NOTHING] * 5)[0]
    second = first.extended(vectors(rng, 1))
    assert has_lists(second)
    with second._shared.entered() as index:
        assert index.ntotal == 200
    third = second.extended(vectors(rng, 30))
    assert third._shared is second._shared
    np.testing.assert_array_equal(first.found(states, 3, [NOTHING] * 5)[0], before)
    np.testing.assert_array_equal(candidates(third, np.arange(199)), candidates(first, np.arange(199)))


@pytest.mark.parametrize(
    ("options", "rows", "lists"),
    [
        (FaissOptions("ivf"), 9_999, 0),
        (FaissOptions("ivf"), 10_000, 256),
        (FaissOptions("ivf"), 1_000_000, 4000),
        (FaissOptions("ivf", nlist=1000), 38_999, 0),
        (FaissOptions("ivf", nlist=1000), 39_000, 1000),
        (FaissOptions("ivf", train_from=1), 39, 1),
        (FaissOptions("flat"), 1_000_000, 0),
    ],
)
def test_how_many_lists(options, rows, lists):
    assert options.lists(rows) == lists


def test_two_extensions_of_one_table_do_not_meet():
    rng = np.random.default_rng(4)
    base = FaissTable(vectors(rng, 5), FaissOptions())
    one, other = vectors(rng, 2), vectors(rng, 3)
    first, second = base.extended(one), base.extended(other)
    np.testing.assert_array_equal(candidates(first, np.arange(5, 7)), one.candidate)
    np.testing.assert_array_equal(candidates(second, np.arange(5, 8)), other.candidate)
    assert set(base.found(np.ones((1, 32), dtype=np.float32), 9, [NOTHING])[0][0]) == {0, 1, 2, 3, 4, -1}


@pytest.mark.parametrize("options", [FaissOptions("hnsw"), FaissOptions(fp16=True)])
def test_log_partition_sums_over_the_best_alone(monkeypatch, options):
    monkeypatch.setattr(module, "BEST", 20)
    rng = np.random.default_rng(5)
    pool, states = vectors(rng, 300, 8), rng.normal(size=(4, 8)).astype(np.float32)
    table, exclude = FaissTable(pool, options), [np.arange(n) for n in range(4)]
    logits = np.where(np.arange(300) >= np.arange(4)[:, None], states @ pool.candidate.T, -np.inf)
    best = np.sort(logits, axis=1)[:, -20:]
    expected = np.log(np.exp(best / 0.5).sum(axis=1))
    np.testing.assert_allclose(table.found(states, 1, exclude, 0.5)[2], expected, rtol=2e-3)


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
@pytest.mark.parametrize("fp16", [False, True])
def test_pickles_with_its_faiss_index(kind, fp16):
    rng = np.random.default_rng(6)
    table = FaissTable(vectors(rng, 400), FaissOptions(kind, fp16, nlist=4, train_from=200))
    states = rng.normal(size=(9, 32)).astype(np.float32)
    again = pickle.loads(pickle.dumps(table))
    for one, other in zip(table.found(states, 5, [NOTHING] * 9), again.found(states, 5, [NOTHING] * 9), strict=True):
        np.testing.assert_array_equal(one, other)
    more = vectors(rng, 3)
    np.testing.assert_allclose(candidates(again.extended(more), np.arange(400, 403)), more.candidate, atol=2e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "pq"}, "kind must be one of flat, hnsw, ivf, not 'pq'"),
        ({"m": 1}, "m must be a whole number of at least 2, not 1"),
        ({"nprobe": 0}, "nprobe must be a whole number of at least 1, not 0"),
        ({"ef_search": 1.5}, "ef_search must be a whole number"),
        ({"nlist": True}, "nlist must be a whole number"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(InputError, match=message):
        FaissIndex(**options)


def test_a_state_that_is_not_finite_is_an_error():
    table = FaissTable(vectors(np.random.default_rng(7), 3), FaissOptions())
    with pytest.raises(InputError, match="not finite"):
        table.found(np.full((1, 32), np.nan, dtype=np.float32), 1, [NOTHING])


def test_without_faiss_the_extra_is_named(monkeypatch):
    assert langchain_rcr.FaissIndex is FaissIndex
    monkeypatch.delitem(vars(langchain_rcr), "FaissIndex")
    monkeypatch.delitem(sys.modules, "langchain_rcr.index.faiss")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r"faiss is not installed: pip install 'langchain-rcr\[faiss\]'"):
        langchain_rcr.FaissIndex()


class Slow:
    """In the place of a FAISS index: notes who is in it together."""

    def __init__(self):
        self.inside, self.log = [], []

    def work(self, who):
        self.inside.append(who)
        self.log.append(tuple(self.inside))
        time.sleep(0.002)
        self.inside.remove(who)


@pytest.mark.slow
def test_many_read_or_one_writes_and_neither_keeps_the_other_out():
    slow = Slow()
    shared = module._Shared(slow)
    stop, turns = time.monotonic() + 0.6, {"read": 0, "write": 0}

    def work(kind, lock):
        while time.monotonic() < stop:
            with lock() as index:
                index.work(kind)
            turns[kind] += 1

    threads = [threading.Thread(target=work, args=("read", shared.entered)) for _ in range(6)]
    threads += [threading.Thread(target=work, args=("write", partial(shared.entered, alone=True))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(set(inside) == {"read"} or inside == ("write",) for inside in slow.log)
    assert max(map(len, slow.log)) > 1
    assert min(turns.values()) > 20
