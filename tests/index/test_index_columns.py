"""Approximate search of large sparse pools beside exact search."""

import numpy as np
import pytest

from langchain_rcr.basics.rows import sparse
from langchain_rcr.families.state import SaturatingState
from langchain_rcr.index import memory as module
from langchain_rcr.index.base import InThisThread, PoolVectors, Row
from langchain_rcr.index.faiss import FaissIndex
from langchain_rcr.index.memory import ColumnTable, MatrixTable
from langchain_rcr.policy.selection import Options, select

NOTHING = np.empty((1, 0), dtype=np.int64)


@pytest.fixture(autouse=True, params=[True, False])
def approximate_from_the_first_row(monkeypatch, request):
    monkeypatch.setattr("langchain_rcr.basics.rows.LARGE", 0)
    monkeypatch.setattr("langchain_rcr.basics.rows.TRIALS", 0)
    monkeypatch.setattr("langchain_rcr.basics.rows.installed", lambda package: request.param)
    monkeypatch.setattr(module, "BEST", 40)


def drawn(seed, size=2000, dim=60):
    """A pool with frequent and rare columns, and what questions need, of which a few columns make up most."""
    rng = np.random.default_rng(seed)
    often = 0.3 / (1 + np.arange(dim) / 20)
    has = (rng.random((size, dim)) < often).astype(np.float32)
    needs = (rng.random((30, dim)) ** 12 - 0.02).astype(np.float32)
    return PoolVectors(sparse(has), sparse(has)), needs


def picked(table, needs, k=4, tau=None):
    options = Options(k, probabilities=tau is not None, tau=tau or 1.0)
    return InThisThread().run(select(needs, SaturatingState(1.0), options, table.opened()))


def test_little_is_lost_and_little_is_read(monkeypatch):
    pool, needs = drawn(0)
    read = []
    partly = type(pool.candidate).partly
    monkeypatch.setattr(
        type(pool.candidate), "partly", lambda rows, state, most: read.append(most) or partly(rows, state, most)
    )
    exact, found = picked(MatrixTable(pool), needs), picked(ColumnTable(pool), needs)
    assert read == [600] * 120
    assert 0.9 * exact.logits.sum() < found.logits.sum()
    assert (found.positions != exact.positions).any()  # so this is the approximate search
    assert all(len({*row}) == 4 for row in found.positions.tolist())
    monkeypatch.setattr(module, "_READ", 60)
    monkeypatch.setattr(module, "BEST", 2000)
    np.testing.assert_array_equal(picked(ColumnTable(pool), needs).positions, exact.positions)


def test_logits_are_exact_and_in_order():
    pool, needs = drawn(1)
    keys, logits, totals = ColumnTable(pool).opened().found(needs[:1], 9, NOTHING, 0.5)
    np.testing.assert_allclose(logits[0], np.asarray(pool.candidate)[keys[0]] @ needs[0], rtol=1e-5)
    assert (np.diff(logits[0]) <= 0).all()
    every = np.asarray(pool.candidate) @ needs[0] / 0.5
    assert np.log(np.exp(logits[0] / 0.5).sum()) < totals[0] < np.log(np.exp(every).sum())


def test_filters_and_what_is_excluded():
    pool, needs = drawn(2)
    allowed = np.random.default_rng(0).random(2000) < 0.5
    for share in (allowed, allowed & (np.arange(2000) < 100)):  # the second is so rare that all are looked at
        table = ColumnTable(pool).allowing(share).opened()
        keys = table.found(needs[:1], 20, NOTHING)[0]
        assert share[keys[0]].all()
        again = table.found(needs[:1], 20, keys)[0]
        assert not {*again[0].tolist()} & {*keys[0].tolist()}
    exact = MatrixTable(pool).allowing(share).found(needs[:1], 20, keys)[0]
    np.testing.assert_array_equal(again, exact)


@pytest.mark.parametrize("need", [0.0, -1.0])
def test_where_columns_tell_nothing_all_rows_are_looked_at(need):
    pool, _ = drawn(3)
    states = np.full((1, 60), need, dtype=np.float32)
    found, exact = (table(pool).opened().found(states, 5, NOTHING)[0] for table in (ColumnTable, MatrixTable))
    np.testing.assert_array_equal(found, exact)


def test_inverted_lists_of_sparse_vectors_are_columns():
    pool, _ = drawn(4)
    index = FaissIndex("ivf")
    index.bind("f", 60)
    index.add([Row(str(n), {}, n) for n in range(2000)], pool)

    async def table():
        async with index.read() as reader:
            return reader

    assert isinstance(index.run(table()), ColumnTable)
