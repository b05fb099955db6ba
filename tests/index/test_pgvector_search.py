"""A pool in PostgreSQL: the same picks as a plain reference, with equal candidates, filters, batches and deletions."""

import uuid

import numpy as np
import pytest
from plain_reader import reading

from langchain_rcr.errors import CheckpointError, InputError, PoolError
from langchain_rcr.families.state import AdditiveState
from langchain_rcr.index.base import TIE, PoolVectors, Row
from langchain_rcr.index.filters import AllOf, matches, parse_filter

psycopg = pytest.importorskip("psycopg")
from psycopg.conninfo import conninfo_to_dict, make_conninfo  # noqa: E402

from langchain_rcr.index.pgvector import PgVectorIndex  # noqa: E402
from langchain_rcr.index.pgvector import reader as pgvector_reader  # noqa: E402

DIM = 8
NOTHING = np.empty(0, dtype=np.int64)


def make(rng, count, dim=DIM, start=0):
    """Rows and vectors, one in four a copy of another one's vectors."""
    vectors = PoolVectors(*rng.normal(size=(2, count, dim)).astype(np.float32))
    for n in range(0, count - 1, 4):
        vectors.candidate[n + 1] = vectors.candidate[n]
    rows = [
        Row(f"id {start + n}", {"source": f"q {n}", "target": f"p {n % 7}", "level": n % 3, "db": "ab"[n % 2]}, n % 7)
        for n in range(count)
    ]
    return rows, vectors


@pytest.fixture
def filled(new):
    def build(count=60, seed=0, **options):
        rows, vectors = make(np.random.default_rng(seed), count)
        index = new(**options)
        index.bind("f", DIM)
        index.add(rows, vectors)
        return index, rows, vectors

    return build


def positions(reader, rows, keys):
    """Where what was found is in `rows`."""
    at = {row.id: n for n, row in enumerate(rows)}
    return [[at[row.id] for row in reader.rows(line[line >= 0])] for line in keys]


def slow_search(states, vectors, t, exclude, allowed):
    """By the definition, in float64: best first; of those within the margin of a step's best the lowest position."""
    lengths = np.linalg.norm(vectors.candidate, axis=1).max() * np.linalg.norm(states, axis=1)
    found = []
    for state, barred, length in zip(states.astype(np.float64), exclude, lengths, strict=True):
        scores = vectors.candidate.astype(np.float64) @ state
        left = [n for n in range(len(scores)) if n in allowed and n not in set(barred)]
        picks = []
        while left and len(picks) < t:
            top = max(scores[n] for n in left)
            picks.append(min(n for n in left if scores[n] >= top - TIE * length))
            left.remove(picks[-1])
        found.append(picks)
    return found


WHERE = {"$or": [{"level": {"$gte": 1}, "db": "a"}, {"target": "p 3"}]}


@pytest.mark.parametrize("where", [None, WHERE])
@pytest.mark.parametrize("t", [1, 5, 70])
def test_search_equals_the_slow_one(filled, monkeypatch, where, t):
    monkeypatch.setattr(pgvector_reader, "_STATES", 4)
    index, rows, vectors = filled()
    condition = None if where is None else parse_filter(where)
    allowed = {n for n, row in enumerate(rows) if condition is None or matches(condition, row.example)}
    rng = np.random.default_rng(t)
    states = rng.normal(size=(9, DIM)).astype(np.float32)
    exclude = [rng.integers(0, 60, rng.integers(0, 9)) for _ in states]
    exclude[3] = np.arange(60)
    with reading(index, condition) as reader:
        assert reader.size == len(allowed)
        lookup = reader.search(states[:1], 70, [NOTHING])[0][0]
        by_position = dict(zip(positions(reader, rows, lookup[None])[0], lookup[lookup >= 0].tolist(), strict=True))
        barred = [np.array([by_position.get(n, 10**9) for n in row.tolist()], dtype=np.int64) for row in exclude]
        keys, logits = reader.search(states, t, barred)
        assert (keys.dtype, logits.dtype, keys.shape) == (np.int64, np.float32, (9, t))
        found = positions(reader, rows, keys)
    assert found == slow_search(states, vectors, t, exclude, allowed)
    np.testing.assert_array_equal(keys < 0, np.isneginf(logits))
    for line, values, state in zip(found, logits, states, strict=True):
        np.testing.assert_allclose(values[: len(line)], vectors.candidate[line] @ state, rtol=1e-4, atol=1e-5)


def test_a_selection_is_the_slow_one_step_by_step(filled):
    """Every step one search, the state moved by E_z of its pick; 20 queries together and alone."""
    index, rows, vectors = filled(count=200, seed=1)
    queries = np.random.default_rng(2).normal(size=(20, DIM)).astype(np.float32)

    def picks(reader, some):
        state, chosen = AdditiveState(0.7).start(some), [NOTHING for _ in some]
        for _ in range(6):
            keys, _ = reader.search(state.vector(), 1, chosen)
            state = state.update(reader.vectors(keys[:, 0]))
            chosen = [np.append(row, key) for row, key in zip(chosen, keys[:, 0], strict=True)]
        return positions(reader, rows, chosen)

    state, expected = AdditiveState(0.7).start(queries), [[] for _ in queries]
    for _ in range(6):
        best = slow_search(state.vector(), vectors, 1, expected, set(range(200)))
        state = state.update(vectors.context[[row[0] for row in best]])
        expected = [row + pick for row, pick in zip(expected, best, strict=True)]
    with reading(index) as reader:
        assert picks(reader, queries) == expected
        assert [picks(reader, queries[n : n + 1])[0] for n in range(3)] == expected[:3]


def ones(count):
    return PoolVectors(*np.ones((2, count, DIM), dtype=np.float32))


def test_the_oldest_of_equal_candidates_comes_first(new):
    """More of them than are fetched at first; the oldest differs by rounding alone, and seems the worst."""
    vectors, index = ones(100), new()
    vectors.candidate[0] *= 1 - 1e-7
    index.bind("f", DIM)
    index.add([Row(str(n), {}, 0) for n in range(100)], vectors)
    with reading(index) as reader:
        keys, _ = reader.search(np.ones((1, DIM), dtype=np.float32), 3, [NOTHING])
        assert [row.id for row in reader.rows(keys[0])] == ["0", "1", "2"]


def test_the_oldest_of_very_many_equal_candidates_comes_first(new, postgres_url):
    """More of them than are ever fetched, and the newest are the first in the table's file."""
    index = new()
    index.bind("f", DIM)
    index.add([Row(str(n), {}, 0) for n in range(3000)], ones(3000))
    index.delete([str(n) for n in range(1500)])
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        ((number,),) = connection.execute("SELECT id FROM rcr_pools WHERE name = %s", [index.pool]).fetchall()
        connection.execute(f"VACUUM rcr_examples_{number}")
    index.add([Row(f"new {n}", {}, 0) for n in range(1200)], ones(1200))
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute(f"SELECT id FROM rcr_examples_{number} LIMIT 1").fetchone()[0].startswith("new")
    with reading(index) as reader:
        keys, _ = reader.search(np.ones((1, DIM), dtype=np.float32), 3, [NOTHING])
        assert [row.id for row in reader.rows(keys[0])] == ["1500", "1501", "1502"]


@pytest.mark.parametrize("where", [None, WHERE])
@pytest.mark.parametrize("tau", [0.002, 1.0])
def test_log_partition_by_its_definition(filled, where, tau):
    index, rows, vectors = filled()
    condition = parse_filter(where or {})
    states = np.random.default_rng(3).normal(size=(3, DIM)).astype(np.float32)
    with reading(index, condition) as reader:
        keys, _ = reader.search(states, 4, [NOTHING] * 3)
        barred = [keys[0], NOTHING, reader.search(states[2:], 60, [NOTHING])[0][0]]
        totals = reader.log_partition(states, tau, barred)
        picked = positions(reader, rows, keys)
    for n, out in enumerate((set(picked[0]), set())):
        left = [at for at, row in enumerate(rows) if matches(condition, row.example) and at not in out]
        scaled = vectors.candidate[left].astype(np.float64) @ states[n] / tau
        assert totals[n] == pytest.approx(scaled.max() + np.log(np.exp(scaled - scaled.max()).sum()), rel=1e-5)
    assert totals[2] == -np.inf


def test_the_vectors_of_what_was_found(filled):
    index, rows, vectors = filled()
    with reading(index) as reader:
        keys, _ = reader.search(np.ones((1, DIM), dtype=np.float32), 60, [NOTHING])
        at = positions(reader, rows, keys)[0]
        mixed = [5, 5, 0, 59]
        np.testing.assert_array_equal(reader.vectors(keys[0][mixed]), vectors.context[[at[n] for n in mixed]])
        np.testing.assert_array_equal(reader.candidates(keys[0][mixed]), vectors.candidate[[at[n] for n in mixed]])
        assert reader.candidates(NOTHING).shape == (0, DIM)


def test_a_reader_sees_the_pool_as_it_was(filled):
    index, rows, _ = filled(count=20)
    states = np.ones((1, DIM), dtype=np.float32)
    with reading(index) as before:
        assert index.delete([row.id for row in rows[:15]]) == 15
        index.add(*make(np.random.default_rng(9), 3, start=100))
        keys, _ = before.search(states, 30, [NOTHING])
        assert sorted(positions(before, rows, keys)[0]) == list(range(20))
        assert before.rows(keys[0, :1])[0].id in {row.id for row in rows}
    with reading(index) as after:
        assert after.size == index.count() == 8


def test_adding_replacing_and_deleting(filled):
    index, rows, vectors = filled(count=10)
    state = np.full((1, DIM), 0.1, dtype=np.float32)
    with pytest.raises(PoolError, match="the id 'id 3' is taken"):
        index.add(*make(np.random.default_rng(1), 1, start=3))
    with pytest.raises(PoolError, match="the id 'id 0' is taken by another example"):
        index.add(rows, vectors)
    with pytest.raises(PoolError, match="'twice' is taken"):
        index.add([Row("twice", {}, 0)] * 2, make(np.random.default_rng(1), 2)[1])
    assert index.count() == 10
    with reading(index) as reader:
        old = reader.search(state, 10, [NOTHING])[0]
        highest = old.max()
    new_rows, new_vectors = make(np.random.default_rng(2), 4, start=8)
    index.add(new_rows, new_vectors, replace=[row.id for row in new_rows])
    assert index.count() == 12
    assert index.known(["id 0", "id 11", "id 12", "", "\0", "\ud800"]) == {"id 0", "id 11"}
    with reading(index) as reader:
        keys = reader.search(state, 12, [NOTHING])[0][0]
        there = {row.id: (key, row) for key, row in zip(keys.tolist(), reader.rows(keys), strict=True)}
        assert [there[f"id {n}"][1] for n in range(8, 12)] == new_rows
        # Later ones have larger keys, in the order given.
        later = [there[f"id {n}"][0] for n in range(8, 12)]
        assert later == sorted(later)
        assert later[0] > highest
        np.testing.assert_array_equal(reader.vectors(np.array(later)), new_vectors.context)
    assert index.delete(["id 0", "id 0", "nobody", "\0"]) == 1
    assert index.delete([]) == 0
    assert index.count() == 11
    index.add([], PoolVectors(*np.empty((2, 0, DIM), dtype=np.float32)))


def test_an_empty_pool_and_a_missing_one(new):
    index = new()
    assert (index.count(), index.delete(["x"]), index.known(["x"])) == (0, 0, set())
    for bound in (False, True):
        if bound:
            index.bind("f", DIM)
        with reading(index) as reader:
            assert reader.size == 0
            keys, logits = reader.search(np.ones((2, DIM), dtype=np.float32), 3, [NOTHING] * 2)
            assert (keys == -1).all()
            assert np.isneginf(logits).all()
            assert np.isneginf(reader.log_partition(np.ones((2, DIM), dtype=np.float32), 1.0, [NOTHING] * 2)).all()
        with reading(index, parse_filter({"db": 1})) as reader:
            assert reader.size == 0
    with reading(index, AllOf(())) as reader:
        assert reader.size == 0


@pytest.mark.parametrize("op", ["$in", "$nin"])
def test_a_filter_of_many_values(filled, op):
    """Compared one by one, they nested deeper than PostgreSQL's stack."""
    index, *_ = filled(count=20)
    known = index.rows()[3].example["source"]
    where = parse_filter({"source": {op: [known, *map(str, range(20_000))]}})
    with reading(index, where) as reader:
        assert reader.size == sum(matches(where, row.example) for row in index.rows())


def test_a_filter_about_a_field_that_no_example_has(filled):
    index, *_ = filled(count=5)
    condition = parse_filter({"db": "a", "year": {"$gt": 3}})
    with pytest.raises(InputError, match=r"no example has a field 'year' \(fields there: 'db', 'level', 'source', 'ta"):
        reading(index, condition).__enter__()
    with reading(index, parse_filter({"year": {"$exists": False}})) as reader:
        assert reader.size == 5


def test_several_pools_of_different_dimensions(new):
    first, second = new("one" + uuid.uuid4().hex), new()
    for index, dim, count in ((first, 3, 5), (second, 16_000, 2)):
        index.bind(f"f{dim}", dim)
        index.add(*make(np.random.default_rng(dim), count, dim=dim))
    assert (first.count(), second.count()) == (5, 2)
    first.delete(["id 0"])
    assert second.known(["id 0"]) == {"id 0"}
    vectors = make(np.random.default_rng(16_000), 2, dim=16_000)[1]
    with reading(second) as reader:
        keys, logits = reader.search(vectors.context[:1], 2, [NOTHING])
        np.testing.assert_array_equal(reader.vectors(np.sort(keys[0])), vectors.context)
        np.testing.assert_allclose(np.sort(logits[0]), np.sort(vectors.candidate @ vectors.context[0]), rtol=1e-3)


def test_vectors_of_other_encoders_are_refused(new, postgres_url):
    name = uuid.uuid4().hex
    index, other = new(name), new(name)
    index.bind("f", DIM)
    other.bind("g", 5)  # takes the empty pool over
    index.bind("f", DIM)
    index.bind("f", DIM)
    rows, vectors = make(np.random.default_rng(0), 3)
    index.add(rows, vectors)
    # A process that was bound before the first examples came can't mix its own among them.
    with pytest.raises(CheckpointError, match=r"holds 3 examples encoded by other encoders \(fingerprint f, D = 8\)"):
        other.add(*make(np.random.default_rng(0), 3, dim=5, start=3))
    with pytest.raises(CheckpointError, match="add the examples to a pool of another name"):
        other.bind("g", DIM)
    with pytest.raises(CheckpointError, match=r"fingerprint g, D = 5"), reading(other):
        pass
    assert index.count() == 3
    index.delete([row.id for row in rows])
    other.add(*make(np.random.default_rng(0), 3, dim=5))
    with pytest.raises(CheckpointError, match="D = 5"):
        index.add(rows, vectors)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_vectors_that_do_not_fit(filled, new, bad):
    index, rows, vectors = filled(count=3)
    more, some = make(np.random.default_rng(4), 3, start=3)
    some.context[1, 2] = bad
    with pytest.raises(InputError, match="not finite"):
        index.add(more, some)
    with pytest.raises(InputError, match="3 examples came with 2 vectors"):
        index.add(more, PoolVectors(some.candidate[:2], some.context[:2]))
    with pytest.raises(InputError, match="vectors of 5 numbers can't enter"):
        index.add(*make(np.random.default_rng(4), 3, dim=5, start=3))
    with reading(index) as reader:
        with pytest.raises(InputError, match="not finite"):
            reader.search(np.full((1, DIM), bad, dtype=np.float32), 1, [NOTHING])
        with pytest.raises(InputError, match="states have 5 numbers each, the vectors in the pool 8"):
            reader.search(np.ones((1, 5), dtype=np.float32), 1, [NOTHING])
    with pytest.raises(RuntimeError, match="bind"):
        new().add(rows, vectors)
    for dim in (0, 16_001):
        with pytest.raises(InputError, match="vectors of 1 to 16,000"):
            new().bind("f", dim)
    with pytest.raises(InputError, match=r"up to 2,000 numbers.*these have 2,001: use kind='exact'"):
        new(kind="hnsw").bind("f", 2001)


@pytest.mark.slow
def test_an_hnsw_index_is_made_and_used(filled, postgres_url, monkeypatch):
    index, rows, vectors = filled(count=1500, seed=6)
    asked, plain = [], pgvector_reader.PgVectorReader._nearest

    async def nearest(self, states, width, *, ship, exact=False):
        asked.append(exact)
        return await plain(self, states, width, ship=ship, exact=exact)

    monkeypatch.setattr(pgvector_reader.PgVectorReader, "_nearest", nearest)
    # With the index wherever PostgreSQL can use it, and not where it thinks it pays.
    given = conninfo_to_dict(postgres_url)
    url = make_conninfo(**given | {"options": f"{given.get('options', '')} -c enable_seqscan=off"})
    approximate = PgVectorIndex(url, index.pool, kind="hnsw", m=8, ef_construction=32, ef_search=40)
    exact = PgVectorIndex(url, index.pool)
    states = np.random.default_rng(7).normal(size=(30, DIM)).astype(np.float32)
    none, everyone = [NOTHING] * 30, set(range(1500))
    for one in (approximate, exact, approximate):
        one.bind("f", DIM)
    for where, allowed in ((None, everyone), (parse_filter({"level": 2}), set(range(2, 1500, 3)))):
        expected = slow_search(states, vectors, 60, none, allowed)
        with reading(approximate, where) as reader:
            asked.clear()
            found = positions(reader, rows, reader.search(states, 60, none)[0])
            assert asked == [False]
            recall = np.mean([len(set(a) & set(b)) / 60 for a, b in zip(found, expected, strict=True)])
            assert 0.9 < recall < 1
            total = reader.log_partition(states, 0.2, none)
        with reading(exact, where) as reader:
            assert positions(reader, rows, reader.search(states, 60, none)[0]) == expected
            np.testing.assert_allclose(total, reader.log_partition(states, 0.2, none), rtol=0.02)
    with reading(approximate) as reader:
        # An index may miss some for ever: where it gives too few, all are looked at.
        asked.clear()
        keys, _ = reader.search(states[:1], 1500, none[:1])
        assert set(positions(reader, rows, keys)[0]) == everyone
        assert asked in ([False], [False, True])
    approximate.close()
    exact.close()


@pytest.mark.slow
def test_a_hundred_thousand_examples(new):
    """Added in one go; the best of them found, with and without a filter, and the oldest of equal ones."""
    count, dim = 100_000, 16
    vectors = PoolVectors(*np.random.default_rng(0).normal(size=(2, count, dim)).astype(np.float32))
    vectors.candidate[70_000] = vectors.candidate[5]
    index = new()
    index.bind("f", dim)
    index.add([Row(str(n), {"source": f"q {n}", "part": n % 10}, n) for n in range(count)], vectors)
    states = np.concatenate([vectors.candidate[5:6] * 10, np.random.default_rng(1).normal(size=(3, dim))])
    states = states.astype(np.float32)
    for where, allowed in ((None, np.arange(count)), (parse_filter({"part": 5}), np.arange(5, count, 10))):
        with reading(index, where) as reader:
            assert reader.size == len(allowed)
            keys, _ = reader.search(states, 8, [NOTHING] * 4)
            for n, state in enumerate(states):
                scores = vectors.candidate[allowed] @ state
                best = allowed[np.lexsort((allowed, -scores))[:8]]
                assert [int(row.id) for row in reader.rows(keys[n])] == best.tolist()
