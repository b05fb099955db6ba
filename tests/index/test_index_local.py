"""The engines in this process, one suite for all: rows in, rows out, filters, compaction, a slow reference."""

import copy
import math
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_reader import reading

from langchain_rcr.basics.rows import sparse
from langchain_rcr.errors import CheckpointError, InputError, PoolError
from langchain_rcr.index import memory
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.faiss import FaissIndex
from langchain_rcr.index.filters import matches, parse_filter
from langchain_rcr.index.memory import MatrixTable, MemoryIndex

NOTHING = np.empty(0, dtype=np.int64)
EXACT = {"memory": MemoryIndex, "faiss": FaissIndex}
ENGINES = {
    **EXACT,
    "hnsw": lambda: FaissIndex("hnsw", m=8),
    "ivf": lambda: FaissIndex("ivf", nlist=3, nprobe=3, train_from=117),
    "fp16": lambda: FaissIndex(fp16=True),
}


@pytest.fixture(params=ENGINES)
def index(request):
    made = ENGINES[request.param]()
    made.bind("encoder", 4)
    return made


@pytest.fixture(autouse=True)
def approximate_from_the_first_row(monkeypatch):
    monkeypatch.setattr("langchain_rcr.index.faiss._SMALL", 0)


def rows_of(*ids, **fields):
    return [Row(one, {"source": f"q {one}", **fields}, n) for n, one in enumerate(ids)]


def vectors(rng, size, dim=4):
    return PoolVectors(*rng.normal(size=(2, size, dim)).astype(np.float32))


def fill(index, size, seed=0, **fields):
    rng = np.random.default_rng(seed)
    rows, pool = rows_of(*(f"{seed}-{n}" for n in range(size)), **fields), vectors(rng, size)
    index.add(rows, pool)
    return rows, pool


def everything(index, where=None):
    """Ids that a search for all finds, by key."""
    with reading(index, where) as reader:
        keys, _ = reader.search(np.ones((1, 4), dtype=np.float32), max(reader.size, 1), [NOTHING])
        return [row.id for row in reader.rows(np.sort(keys[keys >= 0]))]


def test_shapes_and_rows(index):
    rows, pool = fill(index, 9)
    assert index.count() == 9
    with reading(index) as reader:
        assert reader.size == 9
        keys, logits = reader.search(np.eye(4, dtype=np.float32)[:3], 2, [NOTHING] * 3)
        assert (keys.shape, keys.dtype, logits.shape, logits.dtype) == ((3, 2), np.int64, (3, 2), np.float32)
        np.testing.assert_array_equal(keys[:, 0], pool.candidate[:, :3].argmax(axis=0))
        np.testing.assert_allclose(logits[:, 0], pool.candidate[:, :3].max(axis=0), rtol=1e-3)
        np.testing.assert_array_equal(reader.vectors(keys[:, 0]), pool.context[keys[:, 0]])
        np.testing.assert_allclose(reader.candidates(keys[:, 0]), pool.candidate[keys[:, 0]], rtol=1e-3)
        assert reader.rows(keys[0]) == [rows[key] for key in keys[0]]
    assert index.known(["0-1", "x", "0-8"]) == {"0-1", "0-8"}


def test_an_empty_index(index):
    assert index.count() == 0
    assert index.known(["a"]) == set()
    assert index.delete(["a"]) == 0
    index.add([], PoolVectors(np.empty((0, 4), np.float32), np.empty((0, 4), np.float32)))
    with reading(index) as reader:
        keys, logits = reader.search(np.ones((2, 4), dtype=np.float32), 3, [NOTHING] * 2)
        assert keys.tolist() == [[-1] * 3] * 2
        assert np.isneginf(logits).all()
        assert np.isneginf(reader.log_partition(np.ones((2, 4), dtype=np.float32), 1.0, [NOTHING] * 2)).all()
        assert reader.rows(NOTHING) == []
    with reading(index, parse_filter({"a": 1})) as reader:
        assert (reader.search(np.ones((1, 4), dtype=np.float32), 3, [NOTHING])[0] == -1).all()
    rows, pool = index.content()
    assert (rows, pool.candidate.shape) == ([], (0, 4))
    index.close()
    index.close()


def test_what_is_added_is_found_at_once_and_deletes_are_gone_at_once(index):
    fill(index, 5)
    with reading(index) as before:
        index.add(rows_of("new"), PoolVectors(*np.full((2, 1, 4), 9, dtype=np.float32)))
        with reading(index) as reader:
            keys, _ = reader.search(np.ones((1, 4), dtype=np.float32), 1, [NOTHING])
            assert (keys.tolist(), reader.rows(keys[0])[0].id) == ([[5]], "new")
            assert index.delete(["new", "unknown", "new", "0-0"]) == 2
            assert everything(index) == ["0-1", "0-2", "0-3", "0-4"]
            assert index.count() == 4
            assert index.known(["new", "0-0", "0-1"]) == {"0-1"}
            # Readers that began earlier see what was there.
            assert reader.size == 6
            assert reader.search(np.ones((1, 4), dtype=np.float32), 1, [NOTHING])[0].tolist() == [[5]]
        assert before.size == 5
        assert 5 not in before.search(np.ones((1, 4), dtype=np.float32), 5, [NOTHING])[0]
    index.add(rows_of("new"), vectors(np.random.default_rng(1), 1))
    assert everything(index) == ["0-1", "0-2", "0-3", "0-4", "new"]


def test_a_reader_that_began_between_two_deletes_sees_the_first_alone(index):
    fill(index, 9)
    index.delete(["0-1"])
    with reading(index) as reader:
        index.delete(["0-2"])
        keys, _ = reader.search(np.ones((1, 4), dtype=np.float32), 9, [NOTHING])
        assert sorted(keys[0].tolist()) == [-1, 0, 2, 3, 4, 5, 6, 7, 8]
    assert index.count() == 7


def test_replacing_gives_a_new_row_with_a_key_of_its_own(index):
    fill(index, 4, level=1)
    index.add(
        [Row("0-2", {"source": "other", "kind": "x"}, 7), Row("more", {"source": "more"}, 8)],
        PoolVectors(*np.full((2, 2, 4), 5, dtype=np.float32)),
        replace=["0-2", "more"],
    )
    assert index.count() == 5
    assert everything(index) == ["0-0", "0-1", "0-3", "0-2", "more"]
    with reading(index) as reader:
        keys, _ = reader.search(np.ones((1, 4), dtype=np.float32), 1, [NOTHING])
        assert reader.rows(keys[0]) == [Row("0-2", {"source": "other", "kind": "x"}, 7)]
    assert everything(index, parse_filter({"level": 1})) == ["0-0", "0-1", "0-3"]


@pytest.mark.parametrize(
    ("rows", "replace", "message"),
    [
        (rows_of("a", "0-1"), [], "the id '0-1' is taken by another example"),
        (rows_of("a", "a"), ["a"], "the id 'a' is taken by another example"),
    ],
)
def test_a_taken_id_adds_nothing(index, rows, replace, message):
    fill(index, 3)
    with pytest.raises(PoolError, match=message):
        index.add(rows, vectors(np.random.default_rng(1), 2), replace=replace)
    assert everything(index) == ["0-0", "0-1", "0-2"]
    assert index.known(["a"]) == set()


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (PoolVectors(*np.ones((2, 2, 4), np.float32)), "1 examples came with 2 vectors"),
        (PoolVectors(*np.ones((2, 1, 5), np.float32)), "vectors of 5 numbers can't enter an index .* vectors of 4"),
        (PoolVectors(np.ones((1, 4), np.float32), np.full((1, 4), np.inf, np.float32)), "not finite numbers"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(index, pool, message):
    fill(index, 2)
    with pytest.raises(InputError, match=message):
        index.add(rows_of("a"), pool)
    assert everything(index) == ["0-0", "0-1"]


def test_binding(index):
    index.bind("other", 3)  # empty: taken on
    index.bind("encoder", 4)
    fill(index, 2)
    index.bind("encoder", 4)
    with pytest.raises(CheckpointError, match=r"of another encoder \(encoder, not other\): encode the examples again"):
        index.bind("other", 4)
    with pytest.raises(CheckpointError, match="vectors of 4 numbers, the encoder makes 3: encode the examples again"):
        index.bind("encoder", 3)
    index.delete(["0-0", "0-1"])
    index.bind("other", 3)
    index.add(rows_of("a"), vectors(np.random.default_rng(0), 1, 3))
    assert index.count() == 1


def test_an_unbound_index_takes_the_first_length():
    for make in ENGINES.values():
        index = make()
        index.add(rows_of("a"), vectors(np.random.default_rng(0), 1, 3))
        with pytest.raises(InputError, match="vectors of 2 numbers"):
            index.add(rows_of("b"), vectors(np.random.default_rng(0), 1, 2))
        index.bind("encoder", 3)


def test_filters_see_one_and_true_as_different(index):
    values = [1, True, 1.0, "1", None, [1]]
    index.add(
        [Row(str(n), {"source": "q", "v": value}, n) for n, value in enumerate(values)],
        vectors(np.random.default_rng(0), len(values)),
    )
    for _ in range(2):  # the second time from memory
        assert everything(index, parse_filter({"v": 1})) == ["0", "2"]
        assert everything(index, parse_filter({"v": True})) == ["1"]
        assert everything(index, parse_filter({"v": "1"})) == ["3"]
        assert everything(index, parse_filter({"v": {"$in": []}})) == []


def test_fields_are_those_of_the_examples_that_are_there(index):
    fill(index, 3, level=1)
    index.add([Row("x", {"source": "q", "rare": None}, 0)], vectors(np.random.default_rng(1), 1))
    assert everything(index, parse_filter({"rare": None})) == ["x"]
    index.delete(["x"])
    with pytest.raises(InputError, match=r"no example has a field 'rare' \(fields there: 'level', 'source'\)"):
        everything(index, parse_filter({"rare": None}))
    assert everything(index, parse_filter({"rare": {"$exists": True}})) == []


def test_compaction_keeps_rows_vectors_filters_and_old_readers(index):
    rows, pool = fill(index, 300, level=1)
    index.add([Row("last", {"source": "q", "level": 2}, 5)], PoolVectors(*np.full((2, 1, 4), 9, dtype=np.float32)))
    with reading(index, parse_filter({"level": 1})) as old:
        keys, logits = old.search(np.eye(4, dtype=np.float32), 2, [NOTHING] * 4)
        for n in range(0, 260, 20):
            index.delete([row.id for row in rows[n : n + 20]])
        assert len(index._now) < 301  # no public way to it: that compaction took place changes nothing else
        again, values = old.search(np.eye(4, dtype=np.float32), 2, [NOTHING] * 4)
        np.testing.assert_array_equal(again, keys)
        np.testing.assert_array_equal(values, logits)
        assert [row.id for row in old.rows(keys[:, 0])] == [rows[key].id for key in keys[:, 0]]
    assert index.count() == 41
    assert everything(index) == [row.id for row in rows[260:]] + ["last"]
    assert everything(index, parse_filter({"level": 2})) == ["last"]
    kept, left = index.content()
    assert kept == [*rows[260:], Row("last", {"source": "q", "level": 2}, 5)]
    np.testing.assert_allclose(left.candidate[:-1], pool.candidate[260:], rtol=1e-3)
    np.testing.assert_array_equal(left.context[:-1], pool.context[260:])
    with reading(index) as reader:
        keys, _ = reader.search(np.ones((1, 4), dtype=np.float32), 1, [NOTHING])
        assert reader.rows(keys[0])[0].id == "last"
    index.add(rows_of("0-0"), vectors(np.random.default_rng(1), 1))
    assert everything(index)[-2:] == ["last", "0-0"]


def test_pickles_and_copies(index):
    fill(index, 130, level=1)  # enough for inverted lists
    index.delete(["0-3", "0-7"])
    states = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    for other in (pickle.loads(pickle.dumps(index)), copy.deepcopy(index), copy.copy(index)):
        for where in (None, parse_filter({"level": 1})):
            with reading(index, where) as mine, reading(other, where) as theirs:
                assert theirs.size == 128
                answers = [one.search(states, 3, [NOTHING] * 5) for one in (mine, theirs)]
                np.testing.assert_array_equal(answers[0][0], answers[1][0])
                np.testing.assert_array_equal(mine.vectors(answers[0][0][:, 0]), theirs.vectors(answers[0][0][:, 0]))
        other.add(rows_of("only there"), vectors(np.random.default_rng(1), 1))
        other.delete(["0-0"])
        assert (other.count(), index.count()) == (128, 128)
        assert index.known(["only there", "0-0"]) == {"0-0"}
        index.add(rows_of("only here"), vectors(np.random.default_rng(2), 1))
        assert (everything(other)[-1], everything(index)[-1]) == ("only there", "only here")
        index.delete(["only here"])
        with pytest.raises(CheckpointError):
            other.bind("another", 4)


def test_a_change_that_fails_half_way_leaves_all_as_it_was(index, monkeypatch):
    fill(index, 4)

    def fails(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(index, "_publish", fails)
        with pytest.raises(MemoryError):
            index.add(rows_of("a", "b"), vectors(np.random.default_rng(1), 2))
        with pytest.raises(MemoryError):
            index.delete(["0-1"])
    assert everything(index) == ["0-0", "0-1", "0-2", "0-3"]
    index.add(rows_of("c", level=3), PoolVectors(*np.full((2, 1, 4), 9, dtype=np.float32)))
    assert everything(index, parse_filter({"level": 3})) == ["c"]
    assert everything(index) == ["0-0", "0-1", "0-2", "0-3", "c"]


class Plain:
    """What an engine means, in lists."""

    def __init__(self):
        self.rows = []

    def add(self, rows, pool):
        ids = {row.id for row in rows}
        self.rows = [entry for entry in self.rows if entry[0].id not in ids]
        self.rows += list(zip(rows, pool.candidate, pool.context, strict=True))

    def delete(self, ids):
        self.rows = [entry for entry in self.rows if entry[0].id not in ids]

    def picks(self, state, t, where, barred):
        """Ids, best first; the vectors are small whole numbers, so that equal logits are exactly equal."""
        there = [(row, float(c @ state)) for row, c, _ in self.rows if matches(where, row.example)]
        left = [(row, logit) for row, logit in there if row.id not in barred]
        return [row.id for row, _ in sorted(left, key=lambda pair: -pair[1])[:t]]

    def total(self, state, tau, where, barred):
        logits = [c @ state / tau for row, c, _ in self.rows if matches(where, row.example) and row.id not in barred]
        return math.log(sum(math.exp(logit) for logit in logits)) if logits else -math.inf


step = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True)),
    st.tuples(st.just("delete"), st.lists(st.integers(0, 12), max_size=6)),
)
where = st.sampled_from([{}, {"level": 0}, {"level": {"$gt": 0}}, {"$not": {"level": {"$in": [1]}}}])


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(step, max_size=12),
    asked=st.lists(st.tuples(where, st.integers(1, 9), st.sets(st.integers(0, 12), max_size=4)), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_history_gives_the_picks_of_the_plain_one(name, steps, asked, seed):
    rng = np.random.default_rng(seed)
    index, plain = ENGINES[name](), Plain()
    index.bind("encoder", 2)
    for what, numbers in steps:
        ids = [str(n) for n in numbers]
        if what == "delete":
            index.delete(ids)
            plain.delete(ids)
        else:
            rows = [Row(one, {"source": "q", "level": int(rng.integers(0, 3))}, 0) for one in ids]
            pool = PoolVectors(*rng.integers(-1, 2, size=(2, len(ids), 2)).astype(np.float32))  # many duplicates
            index.add(rows, pool, replace=ids)
            plain.add(rows, pool)
    assert index.count() == len(plain.rows)
    assert everything_of(index) == [entry[0].id for entry in plain.rows]
    for spec, t, barred in asked if plain.rows else []:
        condition = parse_filter(spec)
        states = rng.integers(-2, 3, size=(3, 2)).astype(np.float32)
        with reading(index, condition) as reader:
            key_of = reader.keys(2)
            exclude = [np.array([key_of[str(n)] for n in barred if str(n) in key_of], dtype=np.int64)] * 3
            keys, _ = reader.search(states, t, exclude)
            totals = reader.log_partition(states, 0.5, exclude)
            for state, row_keys, total in zip(states, keys, totals, strict=True):
                names = {str(n) for n in barred}
                found = [row.id for row in reader.rows(row_keys[row_keys >= 0])]
                assert found == plain.picks(state, t, condition, names)
                assert total == pytest.approx(plain.total(state, 0.5, condition, names), rel=1e-5)


def everything_of(index):
    return [row.id for row in index.content()[0]]


def test_many_filters_while_the_pool_grows(index, monkeypatch):
    """More than are remembered; what is remembered of each is brought up to date, and readers keep their moment."""
    monkeypatch.setattr("langchain_rcr.index.local._KEPT_BYTES", 2000)
    index.add([Row(str(n), {"n": n}, n) for n in range(6)], vectors(np.random.default_rng(0), 6))
    with reading(index, parse_filter({"n": {"$gte": 4}})) as before:
        for n in range(6, 12):
            index.add([Row(str(n), {"n": n}, n)], vectors(np.random.default_rng(n), 1))
            index.delete([str(n - 6)])
            for least in range(n - 5, n + 1):
                assert everything(index, parse_filter({"n": {"$gte": least}})) == [str(m) for m in range(least, n + 1)]
        assert before.size == 2


@pytest.mark.slow
def test_filters_of_hundreds_of_tenants_are_remembered(monkeypatch):
    index, looked_at = MemoryIndex(), []
    index.bind("encoder", 4)
    index.add([Row(str(n), {"tenant": n}, n) for n in range(300)], vectors(np.random.default_rng(0), 300))
    monkeypatch.setattr("langchain_rcr.index.local.matches", lambda *each: looked_at.append(each) or matches(*each))
    for _ in range(2):
        assert [everything(index, parse_filter({"tenant": n})) for n in range(300)] == [[str(n)] for n in range(300)]
    assert len(looked_at) == 300 * 300


def test_a_field_that_few_examples_have_is_not_looked_for_again():
    class Looked(dict):
        def __contains__(self, key):
            looked_at.append(key)
            return super().__contains__(key)

    index, looked_at, where = MemoryIndex(), [], parse_filter({"rare": {"$ne": 2}})
    index.bind("encoder", 4)
    rows = [Row(str(n), Looked({"rare": 1} if n == 98 else {}), n) for n in range(100)]
    index.add(rows, vectors(np.random.default_rng(0), 100))
    found = everything(index, where)
    looked_at.clear()
    assert everything(index, where) == found == [str(n) for n in range(100)]
    assert len(looked_at) == 1
    index.delete(["98"])
    with pytest.raises(InputError, match="no example has a field 'rare'"):
        everything(index, where)


@pytest.mark.slow
def test_filters_of_a_small_pool_are_forgotten_too(monkeypatch):
    """Each new value, such as a time, is another filter: a server that ran for days kept a gigabyte of them."""
    monkeypatch.setattr("langchain_rcr.index.local._KEPT_BYTES", 50_000)
    index = MemoryIndex()
    index.bind("encoder", 4)
    index.add([Row("a", {"at": "x"}, 0)], vectors(np.random.default_rng(0), 1))

    def ask(numbers):
        for n in numbers:
            everything(index, parse_filter({"at": {"$in": [f"{n}{'x' * 1000}"]}}))

    ask(range(200))
    tracemalloc.start()
    ask(range(200, 800))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 200_000


@pytest.mark.parametrize("kind", [np.asarray, sparse])
def test_where_few_rows_can_be_found_only_these_are_read(kind, monkeypatch):
    """With the keys, ties and partitions of a search that looks at all rows."""
    rng = np.random.default_rng(0)
    pool = kind(rng.integers(-1, 2, size=(400, 6)).astype(np.float32))
    allowed = np.zeros(400, dtype=bool)
    allowed[rng.choice(400, 39, replace=False)] = True
    table = MatrixTable(PoolVectors(pool, pool)).allowing(allowed)
    states, exclude = rng.integers(-2, 3, size=(5, 6)).astype(np.float32), np.empty((5, 0), dtype=np.int64)
    few, read = table.opened(), list[int]()
    product = memory.product
    for t in (1, 7, 38, 60):
        expected = table.found(states, t, exclude, 0.5)
        with monkeypatch.context() as patched:
            patched.setattr(memory, "product", lambda states, rows: read.append(len(rows)) or product(states, rows))
            found = few.found(states, t, exclude, 0.5)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert allowed[found[0][found[0] >= 0]].all()
        exclude = np.concatenate([exclude, found[0][:, :1]], axis=1)
    assert set(read) == {39}
