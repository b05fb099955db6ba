"""Pools in real LangChain vector stores: whole pick sequences of memory, changes, bounds, filters, failures."""

import copy
import math
import pickle
import uuid
from contextlib import suppress

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from plain_reader import reading
from vector_stores import STORES

from langchain_rcr.errors import CheckpointError, EngineError, InputError, PoolError
from langchain_rcr.families.state import AdditiveState
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.documents import DIALECTS, store_filter
from langchain_rcr.index.filters import Compare, matches, parse_filter
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.index.vectorstore import VectorStoreIndex
from langchain_rcr.policy.selection import Options, select

pytestmark = pytest.mark.slow

DIM, COUNT = 12, 300
NOTHING = np.empty(0, dtype=np.int64)
ONES = np.ones((1, DIM), dtype=np.float32)


def part(vectors, rows):
    return PoolVectors(vectors.candidate[rows], vectors.context[rows])


def equal(count, value):
    return PoolVectors(*np.full((2, count, DIM), value, dtype=np.float32))


def drawn(seed, count):
    """Rows and vectors of very different lengths, one in five a copy of its neighbour's."""
    rng = np.random.default_rng(seed)
    vectors = PoolVectors(*rng.normal(size=(2, count, DIM)).astype(np.float32))
    vectors.candidate[:] *= rng.uniform(0.05, 3, size=(count, 1)).astype(np.float32)
    for n in range(0, count - 1, 5):
        vectors.candidate[n + 1] = vectors.candidate[n]
    rows = [Row(f"{n}", {"source": f"q {n}", "level": n % 4, "tags": [n]}, n % 9) for n in range(count)]
    return rows, vectors


@pytest.fixture(params=STORES)
def make(request):
    return lambda **options: STORES[request.param](request, **options)


def filled(index, rows, vectors):
    index.bind("f", DIM)
    index.add(rows, vectors)
    return index


def picks(index, queries, options, where=None):
    async def work():
        async with index.read(where) as reader:
            return await select(queries, AdditiveState(-0.4), options, reader)

    found = index.run(work())
    return found.examples, found


def test_whole_sequences_are_those_of_memory(make):
    rows, vectors = drawn(0, COUNT)
    indexes = [filled(index, rows, vectors) for index in (MemoryIndex(), make(partition=COUNT))]
    for index in indexes:
        assert index.delete([str(n) for n in range(0, COUNT, 7)]) == len(range(0, COUNT, 7))
        index.add(rows[20:40], part(vectors, slice(20, 40)), replace=[row.id for row in rows[20:40]])
    queries = np.random.default_rng(1).normal(size=(8, DIM)).astype(np.float32)
    odd, beams = parse_filter({"level": {"$in": [1, 3]}}), Options(3, beam_width=3, tau=0.5)
    for options, where in ((Options(6), None), (Options(6), odd), (beams, None), (beams, odd)):
        (expected, plain), (found, other) = (picks(index, queries, options, where) for index in indexes)
        assert found == expected
        np.testing.assert_allclose(other.logits, plain.logits, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(other.probabilities, plain.probabilities, rtol=1e-4)


def test_what_is_there_and_what_is_not(make):
    rows, vectors = drawn(2, 10)
    index = make()
    index.bind("f", DIM)
    assert (index.count(), index.known(["0"]), index.delete(["0"])) == (0, set(), 0)
    with reading(index) as reader:
        assert (reader.search(ONES, 2, [NOTHING])[0] == -1).all()
    assert picks(index, ONES, Options(1), parse_filter({"db": 1}))[0] == [[]]
    index.add(rows, vectors)
    index.bind("f", DIM)
    assert (index.count(), index.known(["0", "9", "10"])) == (10, {"0", "9"})
    with pytest.raises(PoolError, match="the id '0' is taken by another example"):
        index.add(rows[:1], part(vectors, [0]))
    with pytest.raises(PoolError, match="field that isn't JSON"):
        index.add([Row("new", {"a": object()}, 0)], part(vectors, [0]))
    with reading(index) as reader:
        keys, _ = reader.search(ONES, 12, [np.array([3, 3, 99])])
        assert sorted(keys[0].tolist()) == [-1, -1, -1, 0, 1, 2, 4, 5, 6, 7, 8, 9]
        assert reader.rows(np.array([9])) == [rows[9]]
        np.testing.assert_array_equal(reader.candidates(np.array([9, 0])), vectors.candidate[[9, 0]])
        np.testing.assert_array_equal(reader.vectors(np.array([9, 0])), vectors.context[[9, 0]])
        keys, logits = reader.search(0 * ONES, 2, [NOTHING])
        assert (keys.tolist(), logits.tolist()) == ([[0, 1]], [[0.0, 0.0]])  # all equal
    with pytest.raises(CheckpointError, match=r"holds 10 examples encoded by other encoders \(fingerprint f, D = 12\)"):
        index.bind("g", DIM)
    with pytest.raises(InputError, match=r"no example has a field 'db' \(fields there: 'level', 'source', 'tags'\)"):
        picks(index, ONES, Options(1), parse_filter({"db": 1}))
    assert index.delete(["0", "0"]) == 1
    assert index.delete([str(n) for n in range(10)]) == 9
    index.bind("g", DIM)
    assert index.count() == 0


def test_the_oldest_of_many_equal_candidates_comes_first(make):
    index = filled(make(), [Row(str(n), {}, 0) for n in range(60)], equal(60, 1))
    with reading(index) as reader:
        assert reader.search(ONES, 3, [NOTHING])[0].tolist() == [[0, 1, 2]]


def test_a_vector_longer_than_the_bound_is_refused(make):
    rows, _ = drawn(3, 4)
    index = filled(make(), rows[:2], equal(2, 1))
    index.add(rows[2:], equal(2, 1.9))  # there is room for twice the length
    with pytest.raises(InputError, match=r"has the length 10\.39, and .* was filled for lengths up to 6\.928: "):
        index.add([Row("x", {}, 0)], equal(1, 3))
    assert index.count() == 4


def test_a_bound_may_be_given():
    rows, _ = drawn(3, 2)
    index = filled(VectorStoreIndex(InMemoryVectorStore, longest=20.0), rows, equal(2, 1))
    index.add([Row("x", {}, 0)], equal(1, 3))
    with reading(index) as reader:
        assert reader.search(ONES, 1, [NOTHING])[0].tolist() == [[2]]


@pytest.mark.parametrize("distance", ["DOT", "COSINE", "EUCLID"])
def test_every_metric_gives_the_same_picks(request, distance):
    rows, vectors = drawn(4, 80)
    index = filled(STORES["QdrantVectorStore"](request, distance=distance), rows, vectors)
    queries = np.random.default_rng(5).normal(size=(5, DIM)).astype(np.float32)
    assert picks(index, queries, Options(5))[0] == picks(filled(MemoryIndex(), rows, vectors), queries, Options(5))[0]


def test_filters_of_the_store():
    """InMemoryVectorStore takes a function of a document; what it lets through too many is left out."""
    asked = []

    def translated(where):
        asked.append(where)
        return lambda document: document.metadata.get("level", 0) >= 1

    rows, vectors = drawn(6, 40)
    index = filled(VectorStoreIndex(InMemoryVectorStore, filter_translator=translated, scan_limit=10), rows, vectors)
    where = parse_filter({"level": {"$gte": 2}})
    with reading(index, where) as reader:
        assert reader.size == sum(matches(where, row.example) for row in rows)
    assert asked == [where]
    plain = filled(VectorStoreIndex(InMemoryVectorStore, scan_limit=10), rows, vectors)
    with pytest.raises(InputError, match="holds 40 examples, more than scan_limit = 10: give the index a filter_trans"):
        plain.run(plain.read(where).__aenter__())


@pytest.mark.parametrize("store", DIALECTS)
def test_the_store_itself_filters_by_strings(request, store):
    """Of a pool that may not be read, only what the store lets through is."""
    rows, vectors = drawn(6, 40)
    index = filled(STORES[store](request, scan_limit=10), rows, vectors)
    some = {"source": {"$in": [f"q {n}" for n in range(5, 25)]}}
    memory = filled(MemoryIndex(), rows, vectors)
    queries = np.random.default_rng(8).normal(size=(3, DIM)).astype(np.float32)
    for spec in (some, {**some, "level": {"$gte": 2}}, {"$and": [{"level": 1}, {"source": "q 5"}]}):
        where, options = parse_filter(spec), Options(1 if "$and" in spec else 4)
        assert picks(index, queries, options, where)[0] == picks(memory, queries, options, where)[0]
    for spec in ({"level": 1}, {"$or": [some, {"level": 1}]}, {"source": {"$ne": "q 5"}}):
        with pytest.raises(InputError, match="give the index a filter_translator"):
            picks(index, queries, Options(1), parse_filter(spec))


@pytest.mark.parametrize("store", DIALECTS)
def test_fields_and_values_that_a_store_has_no_words_for(request, store):
    fields = ("gro\u0308\u00dfe", "rcr_key", "$x", "a.b", "a b", "", 'q"')
    rows = [
        Row(f"{n}", {"db": "geo", field: "1", "size": 2**70, "share": math.nan}, n) for n, field in enumerate(fields)
    ]
    index = filled(STORES[store](request), rows, equal(len(rows), 0.1))
    assert len(index.rows()) == len(rows)
    for n, field in enumerate(fields):
        for where in (Compare(field, "eq", "1"), Compare(field, "in", ("1", "2"))):
            assert [row.id for row in picks(index, ONES, Options(1), where)[0][0]] == [f"{n}"]
    with pytest.raises(InputError, match="no example has a field 'levle'"):  # though some are of this database
        picks(index, ONES, Options(1), parse_filter({"db": "geo", "levle": 1}))


@pytest.mark.parametrize("store", DIALECTS)
def test_a_filter_of_more_values_than_examples_reads_them_all(request, store):
    """Qdrant in this process compared each example with each value, and Chroma refuses tens of thousands."""
    rows, vectors = drawn(6, 40)
    index = filled(STORES[store](request), rows, vectors)
    many = [f"q {n}" for n in range(5, 40_000)]
    assert store_filter(index.documents.store, parse_filter({"source": {"$in": many}}), len(rows)) is None
    for spec in ({"source": {"$in": many}}, {"$and": [{"source": {"$in": many}}, {"source": {"$in": ["q 1", "q 7"]}}]}):
        where = parse_filter(spec)
        found = picks(index, ONES, Options(40), where)[0][0]
        assert {row.id for row in found} == {row.id for row in rows if matches(where, row.example)}


def test_keys_that_json_would_change_are_refused(make):
    index = filled(make(), *drawn(6, 4))
    for field in ({5: "x"}, {"k": [{None: "x"}]}):
        with pytest.raises(PoolError, match=r"example 'a' has a field that isn't JSON, .*: the key (5|None) is not"):
            index.add([Row("a", {"source": "q"} | field, 0)], equal(1, 0.1))
    index.add([Row("a", {"source": "q", "k": (1, 2)}, 0)], equal(1, 0.1))
    assert index.rows(["a"])[0].example["k"] == [1, 2]


def test_what_makes_a_store_takes_the_embeddings_of_pools():
    rows, vectors = drawn(7, 5)
    index = filled(VectorStoreIndex(InMemoryVectorStore), rows, vectors)
    assert (index.count(), repr(index)) == (5, "VectorStoreIndex(InMemoryVectorStore)")
    with pytest.raises(InputError, match=r"has no parameter for embeddings .*: wrap it in a function"):
        VectorStoreIndex(lambda name: InMemoryVectorStore(embedding=name))
    with pytest.raises(InputError, match=r"give the class of a store, .*, not <.*InMemoryVectorStore object"):
        VectorStoreIndex(InMemoryVectorStore(DeterministicFakeEmbedding(size=3)))
    with pytest.raises(RuntimeError, match="bind"):
        VectorStoreIndex(InMemoryVectorStore).count()
    for limit in (0, "10"):
        with pytest.raises(InputError, match="scan_limit must be a positive number"):
            VectorStoreIndex(InMemoryVectorStore, scan_limit=limit)


def test_a_store_with_other_embeddings_is_refused_and_left_as_it_was():
    """Such as one that was there already, or one that another index has made."""
    rows, vectors = drawn(7, 5)
    own = InMemoryVectorStore(DeterministicFakeEmbedding(size=DIM + 1))
    with pytest.raises(InputError, match="InMemoryVectorStore doesn't take its vectors from the embeddings"):
        VectorStoreIndex(lambda embedding: own).bind("f", DIM)
    assert own.store == {}
    index = filled(VectorStoreIndex(InMemoryVectorStore), rows[:4], part(vectors, slice(4)))
    other = VectorStoreIndex(lambda embedding: index.documents.store)
    other.bind("f", DIM)
    assert other.count() == 4
    with pytest.raises(InputError, match="doesn't take its vectors"):
        other.add(rows[4:], part(vectors, [4]))
    index.add(rows[4:], part(vectors, [4]))
    assert (index.count(), len(other.rows())) == (5, 5)


def test_pickled_and_copied_with_its_store():
    rows, vectors = drawn(7, 5)
    unbound = pickle.loads(pickle.dumps(VectorStoreIndex(InMemoryVectorStore, longest=100.0)))
    index = filled(unbound, rows[:4], part(vectors, slice(4)))
    for other in (pickle.loads(pickle.dumps(index)), copy.deepcopy(index)):
        other.add(rows[4:], part(vectors, [4]))
        assert (index.count(), other.count()) == (4, 5)
    made = filled(VectorStoreIndex(lambda embedding, **_: InMemoryVectorStore(embedding)), rows, vectors)
    assert pickle.loads(pickle.dumps(made)).count() == 5


def test_a_store_that_fails_and_one_that_lacks_a_method(monkeypatch):
    rows, vectors = drawn(8, 5)
    index = filled(VectorStoreIndex(InMemoryVectorStore), rows[:2], part(vectors, slice(2)))
    add = InMemoryVectorStore.add_documents

    def failing(self, documents, **options):
        add(self, documents, **options)
        if len(documents) > 1:
            raise OSError("disk\nfull")

    monkeypatch.setattr(InMemoryVectorStore, "add_documents", failing)
    with pytest.raises(EngineError, match=r"^InMemoryVectorStore: disk full$"):
        index.add(rows[2:], part(vectors, slice(2, 5)))
    monkeypatch.undo()
    assert (index.count(), index.known([row.id for row in rows])) == (2, {"0", "1"})
    index.add(rows[2:], part(vectors, slice(2, 5)))
    assert index.count() == 5

    class Forgetful(InMemoryVectorStore):
        def get_by_ids(self, ids, /):
            raise NotImplementedError("not yet")

    with pytest.raises(EngineError, match=r"Forgetful has no get_by_ids, which this engine needs \(not yet\)"):
        VectorStoreIndex(Forgetful).bind("f", DIM)


def test_a_store_without_a_look_up_by_id_is_searched():
    class Searched(InMemoryVectorStore):
        get_by_ids = VectorStore.get_by_ids

    rows, vectors = drawn(8, 5)
    index = filled(VectorStoreIndex(Searched, scan_limit=5), rows, vectors)
    assert (index.count(), index.known(["0", "4", "5", ""])) == (5, {"0", "4"})
    with pytest.raises(PoolError, match="the id '0' is taken"):
        index.add(rows[:1], part(vectors, [0]))
    assert index.delete(["0", "0", "nobody"]) == 1
    index.add([*rows[:1], Row("x", {}, 0)], part(vectors, [0, 1]))
    with pytest.raises(InputError, match=r"Searched can't look ids up, .* holds more examples than scan_limit = 5"):
        index.known(["0"])


def test_a_pool_that_stays(tmp_path):
    chroma = pytest.importorskip("langchain_chroma")
    rows, vectors = drawn(9, 6)
    options = {"collection_name": f"p{uuid.uuid4().hex}", "persist_directory": str(tmp_path)}
    filled(VectorStoreIndex(chroma.Chroma, **options), rows, vectors)
    again = VectorStoreIndex(chroma.Chroma, **options)
    again.bind("f", DIM)
    assert (again.count(), again.known(["5", "6"])) == (6, {"5"})


class Killed(BaseException):
    pass


CHANGES = {
    "add": lambda index, rows, vectors: index.add(rows[4:7], part(vectors, [4, 5, 6])),
    "replace": lambda index, rows, vectors: index.add(rows[3:5], part(vectors, [3, 4]), replace=["2", "3"]),
    "delete": lambda index, rows, vectors: index.delete(["2", "3"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_writer_killed_at_any_call_leaves_its_pool(make, monkeypatch, change):
    """What a change has left is counted, filtered and listed as it is found, and the next change goes on from it."""
    rows, vectors = drawn(9, 20)
    index = filled(make(), rows[:4], part(vectors, slice(4)))
    ask, calls, ended = index.documents.ask, 0, False
    while not ended:
        left = iter(range(calls := calls + 1))

        def killed(*arguments, left=left, **options):
            if next(left, None) is None:
                raise Killed
            return ask(*arguments, **options)

        monkeypatch.setattr(index.documents, "ask", killed)
        with suppress(Killed):
            CHANGES[change](index, rows, vectors)
            ended = True
        monkeypatch.undo()
        index.bind("f", DIM)
        with pytest.raises(CheckpointError):
            index.bind("g", DIM)
        there = index.known([row.id for row in rows])
        assert there >= {"0", "1"}
        assert (index.count(), {row.id for row in index.rows()}) == (len(there), there)
        for where in (None, parse_filter({"source": {"$ne": ""}})):
            assert {row.id for row in picks(index, ONES, Options(9), where)[0][0]} == there
        lacking = [n for n in range(4) if rows[n].id not in there]
        index.add([rows[n] for n in lacking], part(vectors, lacking))
        index.delete([row.id for row in rows[4:]])
        assert (index.count(), len(index.rows())) == (4, 4)
    assert calls > 5


def test_a_failed_replacement_leaves_what_was_there(make, monkeypatch):
    rows, vectors = drawn(9, 4)
    index, queries = filled(make(), rows, vectors), np.eye(3, DIM, dtype=np.float32)
    before, put = picks(index, queries, Options(4))[0], index.documents.put

    def failing(documents, *arguments):
        if any("refused" in one.page_content for one in documents):
            put(documents[:1], arguments[0][:1])
            raise EngineError("full")
        put(documents, *arguments)

    monkeypatch.setattr(index.documents, "put", failing)
    with pytest.raises(EngineError, match="full"):
        index.add([Row(one, {"source": "refused"}, 0) for one in ("2", "3", "4")], equal(3, 0.1), replace=["2", "3"])
    assert (index.count(), index.rows()) == (4, rows)
    assert picks(index, queries, Options(4))[0] == before


def test_documents_that_are_no_pool_are_not_taken_for_an_empty_one():
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=DIM + 1))
    store.add_texts(["of somebody else"])
    with pytest.raises(EngineError, match="InMemoryVectorStore holds documents but no pool: add the examples to an e"):
        VectorStoreIndex(lambda embedding: store).bind("f", DIM)


def test_a_document_of_somebody_else_among_a_pool_s_is_named():
    index = filled(VectorStoreIndex(InMemoryVectorStore), *drawn(6, 4))
    index.documents.store.add_texts(["of somebody else"])
    with pytest.raises(EngineError, match=r"holds a document that isn't the pool's, .*: 'of somebody else'"):
        picks(index, ONES, Options(4))
