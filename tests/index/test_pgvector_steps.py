"""All steps of a selection in one statement: the picks, logits and probabilities of the steps one by one."""

import uuid

import numpy as np
import pytest

from langchain_rcr.families.state import AdditiveState, SaturatingState, State
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.filters import parse_filter
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.policy.selection import Options, select

pytest.importorskip("psycopg")
from langchain_rcr.index.pgvector import PgVectorIndex
from langchain_rcr.index.pgvector.database import Transaction

DIM, COUNT = 12, 200
STATES = [AdditiveState(-0.4), AdditiveState(1e-20), SaturatingState(0.8), SaturatingState(1.0, 4.0)]


class Unsaid(AdditiveState):
    """A state without SQL, as another distribution's may be."""

    name = "unsaid"
    sql = State.sql


@pytest.fixture(scope="module")
def pools(postgres_url):
    """The same pool in memory, in PostgreSQL and by an HNSW index there; every fifth has its neighbour's vectors."""
    rng = np.random.default_rng(0)
    candidate, context = rng.normal(size=(2, COUNT, DIM)).astype(np.float32)
    context = np.where(rng.random((COUNT, DIM)) < 0.4, np.abs(context), 0).clip(0, 1)
    candidate[1::5], context[1::5] = candidate[::5], context[::5]
    context[7] = 0
    rows = [Row(f"{n}", {"source": f"q {n}", "level": n % 4}, n % 9) for n in range(COUNT)]
    name = uuid.uuid4().hex
    indexes = MemoryIndex(), PgVectorIndex(postgres_url, name), PgVectorIndex(postgres_url, name, kind="hnsw")
    for index in indexes:
        index.bind("f", DIM)
    for index in indexes[:2]:
        index.add(rows, PoolVectors(candidate, context))
    yield indexes
    for index in indexes[1:]:
        index.close()


@pytest.fixture
def asked(monkeypatch):
    """The searches that a server was asked for."""
    texts, fetch = [], Transaction.fetch

    async def counted(self, text, parameters=()):
        if "WITH RECURSIVE" in text:
            texts.append(text)
        return await fetch(self, text, parameters)

    monkeypatch.setattr(Transaction, "fetch", counted)
    return texts


def picked(index, state, options, count=5, where=None):
    queries = np.random.default_rng(1).normal(size=(count, DIM)).astype(np.float32)

    async def picks():
        async with index.read(None if where is None else parse_filter(where)) as reader:
            return await select(queries, state, options, reader)

    return index.run(picks())


def same(found, expected):
    ids = [[[row.id for row in rows] for rows in picks.examples] for picks in (found, expected)]
    assert ids[0] == ids[1]
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.probabilities, expected.probabilities, rtol=1e-4)


@pytest.mark.parametrize("state", STATES, ids=lambda state: f"{state.name} {state.lam} {state.fade}")
@pytest.mark.parametrize("where", [None, {"level": {"$in": [1, 3]}}])
@pytest.mark.parametrize("count", [1, 5])
def test_one_statement_for_all_steps(pools, asked, state, where, count):
    memory, exact, indexed = pools
    expected = picked(memory, state, Options(6), count, where)
    for index in (exact, indexed):
        asked.clear()
        same(picked(index, state, Options(6), count, where), expected)
        assert len(asked) == 1
    asked.clear()
    scored = Options(6, probabilities=True, tau=0.7)
    same(picked(exact, state, scored, count, where), picked(memory, state, scored, count, where))
    assert len(asked) == 2


@pytest.mark.slow
def test_steps_that_are_not_foreseen_are_taken_one_by_one(pools, asked, monkeypatch):
    memory, exact, _ = pools
    state = AdditiveState(-0.4)
    for options, searches in (
        (Options(3, different_programs=True), 3),
        (Options(3, beam_width=2), 6),
        (Options(4, stop_early=True), 1),
        (Options(COUNT), COUNT),  # many equal ones are left at the end
    ):
        asked.clear()
        same(picked(exact, state, options), picked(memory, state, options))
        assert 1 <= len(asked) <= 2 * searches
    asked.clear()
    same(picked(exact, Unsaid(-0.4), Options(3)), picked(memory, Unsaid(-0.4), Options(3)))
    assert len(asked) == 3
    monkeypatch.setattr("langchain_rcr.index.pgvector.reader._LOGITS", COUNT)  # a statement would take too long
    asked.clear()
    same(picked(exact, state, Options(3), 2), picked(memory, state, Options(3), 2))
    assert len(asked) == 6


def test_equal_candidates_beyond_those_that_are_fetched(postgres_url, asked):
    """The oldest of many that are equal is found all the same: by the search that fetches on."""
    index = PgVectorIndex(postgres_url, uuid.uuid4().hex)
    vectors = PoolVectors(*np.ones((2, 60, DIM), dtype=np.float32))
    vectors.candidate[0] *= 1 - 1e-7
    index.bind("f", DIM)
    index.add([Row(str(n), {}, 0) for n in range(60)], vectors)
    queries = np.ones((1, DIM), dtype=np.float32)

    async def picks():
        async with index.read() as reader:
            return await select(queries, AdditiveState(0.1), Options(3), reader)

    found = index.run(picks())
    index.close()
    assert [row.id for row in found.examples[0]] == ["0", "1", "2"]
    assert len(asked) > 3
