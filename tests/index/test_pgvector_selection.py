"""Whole selections: the picks, logits and probabilities of the engine in memory, called and awaited."""

import asyncio
import threading
import uuid

import numpy as np
import pytest

from langchain_rcr.families.state import AdditiveState
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.filters import parse_filter
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.policy.selection import Options, select

pytest.importorskip("psycopg")
from langchain_rcr.index.pgvector import PgVectorIndex

pytestmark = pytest.mark.slow

DIM, COUNT = 12, 400


@pytest.fixture(scope="module")
def both(postgres_url):
    """The same pool twice, one in five a copy of its neighbour's vectors, some of it deleted and replaced."""
    rng = np.random.default_rng(0)
    vectors = PoolVectors(*rng.normal(size=(2, COUNT, DIM)).astype(np.float32))
    vectors.candidate[1::5] = vectors.candidate[::5]
    rows = [Row(f"{n}", {"source": f"q {n}", "target": f"p {n % 9}", "level": n % 4}, n % 9) for n in range(COUNT)]
    indexes = MemoryIndex(), PgVectorIndex(postgres_url, uuid.uuid4().hex)
    some = PoolVectors(vectors.candidate[20:40], vectors.context[20:40])
    for index in indexes:
        index.bind("f", DIM)
        index.add(rows, vectors)
        index.delete([str(n) for n in range(0, COUNT, 7)])
        index.add(rows[20:40], some, replace=[row.id for row in rows[20:40]])
    assert indexes[0].count() == indexes[1].count()
    yield indexes
    indexes[1].close()


@pytest.mark.parametrize("where", [None, {"level": {"$in": [1, 3]}}])
@pytest.mark.parametrize(
    "options",
    [
        Options(6),
        Options(4, probabilities=True, tau=0.3),
        Options(3, beam_width=4, tau=0.5),
        Options(9, different_programs=True),
        Options(12, different_programs=True, stop_early=True),
        Options(3, fits=lambda rows: len({row.example["level"] for row in rows}) == len(rows)),
    ],
    ids=["greedy", "probabilities", "beams", "programs", "until nothing is left", "what fits"],
)
def test_same_picks_as_in_memory(both, options, where):
    queries = np.random.default_rng(1).normal(size=(7, DIM)).astype(np.float32)
    condition = None if where is None else parse_filter(where)

    async def picks(index, some=queries):
        async with index.read(condition) as reader:
            return await select(some, AdditiveState(-0.4), options, reader)

    def ids(picks):
        return [[row.id for row in rows] for rows in picks.examples]

    memory, postgres = both
    expected, found = memory.run(picks(memory)), postgres.run(picks(postgres))
    assert ids(found) == ids(expected)
    assert ids(postgres.run(picks(postgres, queries[2:3]))) == ids(expected)[2:3]
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.probabilities, expected.probabilities, rtol=1e-4)
    np.testing.assert_array_equal(asyncio.run(postgres.arun(picks(postgres))).positions, found.positions)


def test_a_tokenizer_does_not_hold_up_the_event_loop(both):
    threads = set()

    def fits(rows):
        threads.add(threading.current_thread().name)
        return True

    async def picks():
        async with both[1].read() as reader:
            return await select(np.ones((1, DIM), dtype=np.float32), AdditiveState(0), Options(2, fits=fits), reader)

    assert both[1].run(picks()).positions.min() >= 0
    assert threads
    assert "langchain-rcr" not in threads  # the event loop's
