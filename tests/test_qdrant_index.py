"""`QdrantIndex` as an engine: same picks as the memory engine, in this process and behind a server."""

import asyncio
import copy
import gc
import importlib
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("qdrant_client")
pytest.importorskip("qdrant_edge")
from qdrant_client import QdrantClient, models
from qdrant_server import QdrantServer

from langchain_rcr.errors import CheckpointError, EngineError, InputError, MissingExtraError, PoolError
from langchain_rcr.filters import parse_filter
from langchain_rcr.index import qdrant_collection
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.index.qdrant import QdrantIndex
from langchain_rcr.index.qdrant_collection import Keys, point_id

DIM = 4
NOTHING = np.empty(0, dtype=np.int64)


@pytest.fixture(scope="module")
def server():
    with QdrantServer() as server:
        yield server


@pytest.fixture(params=["memory", "server"])
def where(request, server):
    return {"memory": ":memory:", "server": server.url}[request.param]


@pytest.fixture
def opened(request):
    """Makes indexes that are bound, named after the test, and closed at its end."""
    made = []

    def make(where, name=None, dim=DIM, **options):
        index = QdrantIndex(where, name or request.node.name, **options)
        index.bind("fingerprint", dim)
        made.append(index)
        return index

    yield make
    for index in made:
        index.close()


def rows_of(ids) -> list[Row]:
    return [Row(f"id {at}", {"source": f"question {at}", "db": "abc"[at % 3], "level": at % 5}, at // 2) for at in ids]


def vectors_of(count: int, seed: int, dim: int = DIM, whole: bool = True) -> PoolVectors:
    """Small whole numbers: many candidates with exactly equal logits, in any arithmetic."""
    rng = np.random.default_rng(seed)
    draw = (lambda: rng.integers(-1, 2, (count, dim))) if whole else (lambda: rng.normal(size=(count, dim)))
    return PoolVectors(draw().astype(np.float32), draw().astype(np.float32))


def selection(reader, queries, steps: int, t: int) -> tuple[list, list]:
    """Greedy picks: the ids of each step's t best, and all the numbers that a reader can tell about them."""
    ids, numbers = [reader.size], []
    states, picked = queries, [NOTHING] * len(queries)
    for _ in range(steps):
        keys, logits = reader.search(states, t, picked)
        ids += [[row.id for row in reader.rows(row_keys[row_keys >= 0])] for row_keys in keys]
        numbers += [logits.tolist(), reader.log_partition(states, 0.5, picked).tolist()]
        numbers += [reader.candidates(keys[:, 0]).tolist()]
        states = states + 0.5 * reader.vectors(keys[:, 0])
        picked = [np.append(row, key) for row, key in zip(picked, keys[:, 0], strict=True)]
    return ids, numbers


def same(told: tuple[list, list], wanted: tuple[list, list]) -> bool:
    pairs = zip(told[1], wanted[1], strict=True)
    return told[0] == wanted[0] and all(np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)


FILTERS = [
    None,
    parse_filter({"db": "a"}),
    parse_filter({"$or": [{"db": {"$ne": "a"}}, {"level": {"$gt": 3}}]}),
    parse_filter({"level": {"$gte": 1, "$lt": 4}}),
]


@pytest.mark.parametrize(
    ("engine", "seed", "whole"),
    [("memory", 1, True), ("memory", 2, False), ("server", 4, True), ("server", 5, False)],
)
def test_same_picks_as_memory(opened, server, engine, seed, whole) -> None:
    where = {"memory": ":memory:", "server": server.url}[engine]
    index, reference = opened(where, f"picks {seed}"), MemoryIndex()
    reference.bind("fingerprint", DIM)
    for engine in (index, reference):
        engine.add(rows_of(range(120)), vectors_of(120, seed, whole=whole))
        engine.add(rows_of(range(120, 150)), vectors_of(30, seed + 10, whole=whole))
        assert engine.delete([f"id {at}" for at in range(0, 150, 7)]) == 22
        engine.add(rows_of(range(1, 151, 5)), vectors_of(30, seed + 20, whole=whole), replace=True)
    queries = vectors_of(5, seed + 30, whole=whole).candidate
    for condition in FILTERS:
        for t in (1, 6):
            with index.read(condition) as ours, reference.read(condition) as theirs:
                assert same(selection(ours, queries, 4, t), selection(theirs, queries, 4, t))


def test_ties_far_beyond_the_window(opened, where) -> None:
    """The lowest key is at the end of 300 equal ones as Qdrant orders them, or anywhere else."""
    index = opened(where)
    same = np.ones((300, DIM), dtype=np.float32)
    index.add(rows_of(range(300)), PoolVectors(same, same))
    with index.read() as reader:
        keys, logits = reader.search(same[:2], 3, [NOTHING, NOTHING])
        assert [row.id for row in reader.rows(keys[0])] == ["id 0", "id 1", "id 2"]
        assert logits.tolist() == [[4.0] * 3] * 2
        again, _ = reader.search(same[:2], 3, [keys[0], keys[0][:1]])
        assert [row.id for row in reader.rows(again[0])] == ["id 3", "id 4", "id 5"]
        assert [row.id for row in reader.rows(again[1])] == ["id 1", "id 2", "id 3"]


def test_fewer_candidates_than_asked_for(opened, where) -> None:
    index = opened(where)
    vectors = vectors_of(3, 1)
    index.add(rows_of(range(3)), vectors)
    with index.read() as reader:
        keys, logits = reader.search(vectors.candidate, 5, [NOTHING, np.array([1, 2, 3]), NOTHING])
        assert ((keys >= 0).sum(axis=1) == 3).all()
        assert (keys[:, 3:] == -1).all()
        assert np.isneginf(logits[:, 3:]).all()
        nothing, _ = reader.search(vectors.candidate[:1], 2, [keys[0]])
        assert (nothing == -1).all()
        assert np.isneginf(reader.log_partition(vectors.candidate[:1], 1.0, [keys[0]])).all()
        assert reader.vectors(NOTHING).shape == (0, DIM)


def test_an_empty_pool(opened, where) -> None:
    index = opened(where)
    index.add([], vectors_of(0, 0))
    assert index.count() == 0
    assert index.delete(["id 1"]) == 0
    assert index.known(["id 1"]) == set()
    with index.read() as reader:
        assert reader.size == 0
        assert reader.search(np.ones((2, DIM), dtype=np.float32), 1, [NOTHING] * 2)[0].tolist() == [[-1], [-1]]
    with pytest.raises(InputError, match=r"fields there: none"), index.read(parse_filter({"db": "a"})):
        pass


def test_log_partition_is_over_the_best_alone_in_a_larger_pool(opened, where, monkeypatch) -> None:
    monkeypatch.setattr("langchain_rcr.index.qdrant_reader.BEST", 10)
    index = opened(where)
    vectors = vectors_of(50, 4, whole=False)
    index.add(rows_of(range(50)), vectors)
    query = np.ones((1, DIM), dtype=np.float32)
    with index.read() as reader:
        best, _ = reader.search(query, 2, [NOTHING])
        scores = np.sort(vectors.candidate.astype(np.float64) @ query[0])[::-1] / 0.3
        assert reader.log_partition(query, 0.3, [NOTHING])[0] == pytest.approx(np.log(np.exp(scores[:10]).sum()))
        assert reader.log_partition(query, 0.3, [best[0]])[0] == pytest.approx(np.log(np.exp(scores[2:12]).sum()))


def test_a_reader_keeps_what_it_found(opened, where) -> None:
    index = opened(where)
    vectors = vectors_of(20, 2, whole=False)
    index.add(rows_of(range(20)), vectors)
    query = vectors.candidate[:1]
    with index.read() as reader:
        keys, _ = reader.search(query, 2, [NOTHING])
        picked = [row.id for row in reader.rows(keys[0])]
        assert index.delete(picked) == 2
        assert [row.id for row in reader.rows(keys[0])] == picked
        assert reader.vectors(keys[0]).tolist() == vectors.context[[int(one[3:]) for one in picked]].tolist()
        row = reader.rows(keys[0])[0]
        row.example["source"] = "changed"
        assert reader.rows(keys[0])[0].example["source"] != "changed"
        later, _ = reader.search(query, 2, [NOTHING])
        assert not set(later[0].tolist()) & set(keys[0].tolist())


@pytest.mark.parametrize("change", ["delete", "replace"])
def test_what_vanishes_between_search_and_fetch_is_passed_over(opened, server, change) -> None:
    index = opened(server.url)
    vectors = vectors_of(10, 6, whole=False)
    index.add(rows_of(range(10)), vectors)
    query = vectors.candidate[3:4] * 10
    order = np.argsort(-(vectors.candidate @ query[0]))
    best = f"id {order[0]}"

    def meddle(method: str, path: str) -> None:
        if path.endswith("/points") and method == "POST":
            server.fault_of = None
            collection = server.collections[index._settings.collection].shard
            import qdrant_edge as edge

            operation = edge.UpdateOperation.delete_points([point_id(best)])
            if change == "replace":
                new = {"id": best, "key": 2**62, "program": 1, "example": "{}", "length": 1.0, "fields": []}
                zero = {"candidate": [0.0] * DIM, "context": [0.0] * DIM}
                operation = edge.UpdateOperation.upsert_points([edge.Point(point_id(best), zero, new)])
            collection.update(operation)

    with index.read() as reader:
        server.fault_of = meddle
        keys, _ = reader.search(query, 2, [NOTHING])
        assert server.fault_of is None
        assert [row.id for row in reader.rows(keys[0])] == [f"id {at}" for at in order[1:3]]


def test_all_or_none(opened, where) -> None:
    index = opened(where)
    index.add(rows_of(range(3)), vectors_of(3, 1))
    with pytest.raises(PoolError, match="the id 'id 2' is taken"):
        index.add(rows_of([5, 2]), vectors_of(2, 1))
    with pytest.raises(PoolError, match="the id 'id 7' is taken"):
        index.add(rows_of([7, 7]), vectors_of(2, 1), replace=True)
    with pytest.raises(PoolError, match="field 'a'"):
        index.add([*rows_of([8]), Row("x", {"a": object()}, 1)], vectors_of(2, 1))
    with pytest.raises(InputError, match="2 examples came with 3 vectors"):
        index.add(rows_of([8, 9]), vectors_of(3, 1))
    with pytest.raises(InputError, match="vectors of 3 numbers can't enter an index that holds vectors of 4"):
        index.add(rows_of([8]), vectors_of(1, 1, dim=3))
    broken = np.array([[np.nan] * DIM], dtype=np.float32)
    with pytest.raises(InputError, match="not finite"):
        index.add(rows_of([8]), PoolVectors(broken, broken))
    with index.read() as reader, pytest.raises(InputError, match="not finite"):
        reader.search(broken, 1, [NOTHING])
    assert index.known([f"id {at}" for at in range(10)]) == {"id 0", "id 1", "id 2"}
    assert index.count() == 3


def test_a_replaced_example_gets_a_new_key(opened, where) -> None:
    index = opened(where)
    same = np.ones((2, DIM), dtype=np.float32)
    index.add(rows_of([0, 1]), PoolVectors(same, same))
    index.add([Row("id 0", {"source": "new"}, 9)], PoolVectors(same[:1], same[:1]), replace=True)
    with index.read() as reader:
        keys, _ = reader.search(same[:1], 2, [NOTHING])
        assert [row.id for row in reader.rows(keys[0])] == ["id 1", "id 0"]
        assert reader.rows(keys[0])[1].example == {"source": "new"}
    assert index.count() == 2


def test_what_is_in_a_folder_or_server_stays(server, tmp_path) -> None:
    queries = vectors_of(3, 9).candidate
    for where in (server.url, tmp_path):
        told = []
        for time_opened in range(2):
            index = QdrantIndex(where, "stays")
            index.bind("fingerprint", DIM)
            if not time_opened:
                index.add(rows_of(range(20)), vectors_of(20, 1))
                index.delete(["id 3"])
            with index.read(FILTERS[2]) as reader:
                told.append(selection(reader, queries, 3, 2))
            assert index.count() == 19
            index.close()
        assert told[0] == told[1]


def test_the_encoder_is_checked(opened, where) -> None:
    index = opened(where)
    index.bind("fingerprint", DIM)
    for fingerprint, dim in (("another", DIM), ("fingerprint", 5), ("another", 6)):
        index.bind(fingerprint, dim)  # nothing in it: taken over
        index.add(rows_of([dim]), vectors_of(1, 1, dim=dim))
        for wrong in (("third", dim), (fingerprint, dim + 1)):
            with pytest.raises(
                CheckpointError, match=rf"another encoder \({fingerprint}, {dim} numbers; not {wrong[0]}"
            ):
                index.bind(*wrong)
        index.delete([f"id {dim}"])


def test_a_collection_made_anew_for_another_encoder_takes_no_vectors_of_this(opened, server) -> None:
    index = opened(server.url)
    other = QdrantIndex(server.url, index._settings.collection)
    other.bind("another", DIM)
    with pytest.raises(CheckpointError, match="another encoder"):
        index.add(rows_of([1]), vectors_of(1, 1))
    other.close()


def test_collections_that_are_no_pools() -> None:
    with QdrantServer() as server, QdrantServer(keeps_metadata=False) as old:
        client = QdrantClient(url=server.url, check_compatibility=False)
        sizes = {"candidate": models.VectorParams(size=DIM, distance=models.Distance.DOT)}
        client.create_collection("theirs", vectors_config=sizes)
        client.create_collection("later", vectors_config=sizes, metadata={"langchain-rcr format": 2})
        client.close()
        for url, name, error, says in (
            (server.url, "theirs", CheckpointError, "is no pool of langchain-rcr"),
            (server.url, "later", CheckpointError, "has format 2, from a newer langchain-rcr"),
            (old.url, "new", EngineError, "version 1.16 or newer"),
        ):
            index = QdrantIndex(url, name)
            with pytest.raises(error, match=says):
                index.bind("fingerprint", DIM)
            index.close()


def test_two_that_bind_a_new_collection_at_once(server) -> None:
    barrier = threading.Barrier(4)

    def bind(_: int) -> None:
        index = QdrantIndex(server.url, "at once")
        barrier.wait()
        index.bind("fingerprint", DIM)
        index.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(bind, range(4)))


# ---------------------------------------------------------------- texts


def test_any_text_is_an_id_a_field_a_value(opened, where) -> None:
    index = opened(where)
    texts = ["", "'; DROP--", '"', "a/b?c#d", "\0", "\U0001f600", "x" * 1_000_000, "é" * 100_000, "%s {0}", "\\u0000"]
    rows = [Row(text, {"source": text, text: text}, 2**63 - 1) for text in texts]
    vectors = vectors_of(len(texts), 3)
    index.add(rows, vectors)
    assert index.known([*texts, "no"]) == set(texts)
    for text in texts:
        with index.read(parse_filter({"source": text})) as reader:
            keys, _ = reader.search(vectors.candidate[:1], 2, [NOTHING])
            assert reader.rows(keys[0][:1]) == [row for row in rows if row.id == text]
            assert reader.size == 1
    assert index.delete(texts) == len(texts)


# ---------------------------------------------------------------- threads, loops, processes


def test_thirty_two_threads(opened, where) -> None:
    """Half of them change the pool, half select; nobody sees what isn't there, and nothing gets lost."""
    index = opened(where)
    index.add(rows_of(range(1000, 1040)), vectors_of(40, 1, whole=False))
    queries = vectors_of(2, 5, whole=False).candidate

    def change(thread: int) -> None:
        mine = rows_of(range(thread * 10, thread * 10 + 10))
        index.add(mine, vectors_of(10, thread, whole=False))
        index.add(mine[:3], vectors_of(3, thread + 50, whole=False), replace=True)
        assert index.delete([row.id for row in mine[5:]]) == 5

    def select(_: int) -> None:
        with index.read() as reader:
            picked = [NOTHING, NOTHING]
            for _ in range(3):
                keys, logits = reader.search(queries, 1, picked)
                scores = np.einsum("bd,bd->b", queries, reader.candidates(keys[:, 0]))
                np.testing.assert_allclose(logits[:, 0], scores, atol=1e-5)
                assert len(reader.rows(keys[:, 0])) == 2
                picked = [np.append(row, key) for row, key in zip(picked, keys[:, 0], strict=True)]
            assert len(set(picked[0].tolist())) == 3

    with ThreadPoolExecutor(32) as threads:
        done = [threads.submit(change if at % 2 else select, at) for at in range(32)]
        for one in done:
            one.result(60)
    assert index.count() == 40 + 16 * 5


def test_any_number_of_event_loops(opened, where) -> None:
    index = opened(where)
    index.add(rows_of(range(30)), vectors_of(30, 1, whole=False))
    queries = vectors_of(3, 5, whole=False).candidate
    with index.read(FILTERS[3]) as reader:
        wanted = selection(reader, queries, 3, 2)

    async def select() -> list:
        async with index.aread(FILTERS[3]) as reader:

            class Awaited:
                size = reader.size

                def __getattr__(self, name):
                    return lambda *arguments: asyncio.run_coroutine_threadsafe(
                        getattr(reader, name)(*arguments), loop
                    ).result()

            loop = asyncio.get_running_loop()
            return await asyncio.to_thread(selection, Awaited(), queries, 3, 2)

    async def everything(thread: int) -> list:
        extra = [Row(f"extra {thread}", {"level": 99}, 0)]
        await index.aadd(extra, vectors_of(1, 1))
        told = await asyncio.gather(*(select() for _ in range(3)))
        with pytest.raises(PoolError, match="is taken"):
            await index.aadd(extra, vectors_of(1, 1))
        assert await index.adelete([f"extra {thread}"]) == 1
        return told

    for _ in range(2):
        assert asyncio.run(everything(0)) == [wanted] * 3
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda at: asyncio.run(everything(at)), range(4))) == [[wanted] * 3] * 4


async def test_a_cancelled_call_ends_and_the_next_works(opened, server) -> None:
    index = await asyncio.to_thread(opened, server.url)
    server.faults.append("hang")
    task = asyncio.create_task(index.adelete(["id 1"]))
    while server.faults:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await index.adelete(["id 1"]) == 0


def test_the_callers_event_loop_goes_on_meanwhile(opened, where, server, monkeypatch) -> None:
    """Also where Qdrant is Python code in this process."""
    real = QdrantClient.retrieve
    monkeypatch.setattr(QdrantClient, "retrieve", lambda *given, **named: time.sleep(0.2) or real(*given, **named))
    index = opened(where)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    async def work() -> None:
        counting = asyncio.create_task(count_turns())
        await index.adelete(["id 1"])
        counting.cancel()

    server.fault_of = lambda method, path: time.sleep(0.2)
    asyncio.run(work())
    server.fault_of = None
    assert turns > 10


def test_qdrant_in_this_process_is_asked_by_one_thread_at_a_time(opened, monkeypatch) -> None:
    running, most = 0, 0
    real = QdrantClient.count

    def count(*given, **named):
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1
        return real(*given, **named)

    monkeypatch.setattr(QdrantClient, "count", count)
    index = opened(":memory:")
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: index.count(), range(16))) == [0] * 16
    assert most == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_its_own_client_or_says_no(opened, server, tmp_path) -> None:
    remote, local = opened(server.url), opened(tmp_path)
    for index in (remote, local):
        index.add(rows_of([1]), vectors_of(1, 1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert remote.count() == 1
            remote.close()
            with pytest.raises(EngineError, match="belongs to the process that opened it"):
                local.count()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert remote.count() == local.count() == 1


def test_pickles_with_its_settings_alone(opened, server) -> None:
    index = opened(server.url, api_key="secret", exact=False, hnsw_ef=32)
    index.add(rows_of([1]), vectors_of(1, 1))
    for other in (pickle.loads(pickle.dumps(index)), copy.deepcopy(index), copy.copy(index)):
        assert other is not index
        other.add(rows_of([2]), vectors_of(1, 1), replace=True)
        assert other.count() == 2
        with pytest.raises(InputError, match="vectors of 3 numbers"):
            other.add(rows_of([3]), vectors_of(1, 1, dim=3))
        assert other._settings == index._settings
        other.close()
    assert "secret" not in repr(index)
    assert "secret" not in repr(index._settings)


def test_without_a_server_it_does_not_pickle_and_copies_are_the_same(opened, tmp_path) -> None:
    client = QdrantClient(":memory:")
    for where in (":memory:", tmp_path, client):
        index = opened(where)
        with pytest.raises(InputError, match="can't be pickled"):
            pickle.dumps(index)
        assert copy.deepcopy(index) is index
    client.close()


def test_a_clients_owner_goes_on_using_it(opened, server) -> None:
    for client in (QdrantClient(":memory:"), QdrantClient(url=server.url, check_compatibility=False)):
        index = opened(client, "lent")
        index.add(rows_of([1]), vectors_of(1, 1))
        index.close()
        assert client.count("lent").count == 1
        client.close()
    client = QdrantClient(url=server.url, check_compatibility=False, prefer_grpc=True)
    with pytest.raises(InputError, match="REST"):
        QdrantIndex(client, "lent")
    client.close()


def test_closed_is_closed(opened, where) -> None:
    index = opened(where)
    index.close()
    index.close()
    for call in (index.count, lambda: index.bind("f", DIM), lambda: index.delete([]), index.read().__enter__):
        with pytest.raises(EngineError, match="is closed"):
            call()


# The client lets go of the lock file that it could not lock without closing it.
@pytest.mark.filterwarnings("ignore:.*lock:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file .*lock:ResourceWarning")
def test_a_folder_that_is_open_elsewhere(opened, tmp_path) -> None:
    opened(tmp_path)
    other = QdrantIndex(tmp_path, "other")
    with pytest.raises(EngineError, match="already accessed by another instance"):
        other.count()
    other.close()
    gc.collect()


def test_large_pools_in_this_process_do_not_warn(opened, monkeypatch, tmp_path) -> None:
    from qdrant_client.common import client_warnings
    from qdrant_client.local.local_collection import LocalCollection
    from qdrant_client.local.qdrant_local import QdrantLocal

    for kind in (QdrantLocal, LocalCollection):
        assert kind.LARGE_DATA_THRESHOLD == 20_000
        monkeypatch.setattr(kind, "LARGE_DATA_THRESHOLD", 20)
    monkeypatch.setattr(client_warnings, "SEEN_MESSAGES", set())
    for _ in range(2):
        index = opened(tmp_path, "large")
        index.add(rows_of(range(30)), vectors_of(30, 1), replace=True)
        index.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("http://user:secret@host:6333", "c"), "must come without user"),
        (("https://host?api-key=secret", "c"), "must come without user"),
        (("ftp://host:6333", "c"), "must look like http://host:6333"),
        (("http://host:port", "c"), "must look like http://host:6333"),
        (("localhost:6333", "c"), "must look like http://host:6333"),
        ((":memory:", ""), "must have a name"),
    ],
)
def test_arguments_that_make_no_sense(arguments, says) -> None:
    with pytest.raises(InputError, match=says) as caught:
        QdrantIndex(*arguments)
    assert "secret" not in str(caught.value)
    with pytest.raises(InputError, match="timeout_s must be a positive number"):
        QdrantIndex(":memory:", "c", timeout_s=0)


def test_without_the_package_the_extra_is_named(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("langchain_rcr.index.qdrant", "qdrant_client"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'langchain-rcr\[qdrant\]'"):
        importlib.import_module("langchain_rcr.index.qdrant")


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_a_process_that_never_closes_it_ends_at_once_and_says_nothing(server, tmp_path, kind) -> None:
    where = {"folder": str(tmp_path), "server": server.url}[kind]
    script = f"""
import numpy as np
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.qdrant import QdrantIndex
for turn in range(2):
    index = QdrantIndex({where!r}, "never closed " + str(turn) * ({kind!r} != "folder"))
    index.bind("f", 2)
    index.add([Row("a", {{}}, 1)], PoolVectors(np.ones((1, 2), "f4"), np.ones((1, 2), "f4")))
    if {kind!r} == "folder":
        break
print(index.count())
"""
    command = [sys.executable, "-W", "error::ResourceWarning", "-W", "error::RuntimeWarning", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


# ---------------------------------------------------------------- writing


def test_keys_grow_with_any_clock(monkeypatch) -> None:
    keys = Keys()
    first = keys.take(3, 0)
    monkeypatch.setattr(time, "time_ns", lambda: qdrant_collection._EPOCH_NS + 10**9)  # a clock set back
    second = keys.take(2, first[-1])
    other = Keys().take(2, second[-1])
    taken = first + second + other
    assert taken == sorted(set(taken))
    ticks = (2091 - 2020) * 365 * 86_400 * 10**9 // qdrant_collection._TICK_NS
    assert 0 < taken[-1] < (ticks << qdrant_collection._WRITER_BITS) < 2**63


def test_several_writers_of_the_same_ids_at_once(opened, server) -> None:
    """As from several machines: each id is added exactly once, all examples of a writer or none."""
    indexes = [opened(server.url, "writers") for _ in range(4)]
    barrier = threading.Barrier(4)

    def write(at: int) -> list[str]:
        won = []
        for turn in range(5):
            barrier.wait()
            try:
                rows = [Row(f"{turn} {n}", {"writer": at}, 0) for n in range(6)]
                indexes[at].add(rows, vectors_of(6, at))
                won.append(turn)
            except PoolError:
                pass
        return won

    with ThreadPoolExecutor(4) as threads:
        won = list(threads.map(write, range(4)))
    turns = sorted(turn for one in won for turn in one)
    assert len(turns) == len(set(turns))
    with indexes[0].read() as reader:
        assert reader.size == 6 * len(turns)
        keys, _ = reader.search(np.ones((1, DIM), dtype=np.float32), reader.size or 1, [NOTHING])
        assert len(set(keys[0].tolist())) == reader.size
        for row in reader.rows(keys[0]):
            assert int(row.id.split()[0]) in won[row.example["writer"]]


def test_many_examples_go_in_several_requests(opened, server, monkeypatch) -> None:
    monkeypatch.setattr(qdrant_collection, "_REQUEST_BYTES", 5_000)
    monkeypatch.setattr(qdrant_collection, "_IDS", 13)
    index = opened(server.url)
    server.asked.clear()
    index.add(rows_of(range(100)), vectors_of(100, 1))
    assert [method for method, path in server.asked].count("PUT") > 4
    assert index.count() == 100
    assert index.known([f"id {at}" for at in range(50, 150)]) == {f"id {at}" for at in range(50, 100)}
    assert index.delete([f"id {at}" for at in range(100)]) == 100


def test_only_so_many_number_fields_are_indexed(opened, server, monkeypatch) -> None:
    monkeypatch.setattr(qdrant_collection, "_INDEXED_NUMBERS", 3)
    index = opened(server.url)
    collection = server.collections[index._settings.collection]
    for at in range(2):
        rows = [Row(f"{at} {n}", {f"field {n}": n, f"n{n}": 1.5}, 0) for n in range(4)]
        index.add(rows, vectors_of(4, 1))
        assert sum(name.startswith("numbers.") for name in collection.indexes) == 3
    with index.read(parse_filter({"field 3": {"$gt": 2}})) as reader:
        assert reader.size == 2


def test_exact_search_needs_no_graph_and_the_option_makes_one(opened, server) -> None:
    index = opened(server.url, "graph")
    vectors = server.collections["graph"].vectors
    assert vectors["candidate"]["hnsw_config"] == {"m": 0}
    assert vectors["context"]["on_disk"] is True
    approximate = opened(server.url, "graph", exact=False, hnsw_ef=40)
    assert vectors["candidate"]["hnsw_config"] == {"m": 16}
    index.add(rows_of(range(50)), vectors_of(50, 1, whole=False))
    queries = vectors_of(2, 2, whole=False).candidate
    with index.read() as exact, approximate.read() as other:
        assert same(selection(exact, queries, 2, 3), selection(other, queries, 2, 3))


def test_a_step_is_one_search_for_all_states(opened, server) -> None:
    index = opened(server.url)
    index.add(rows_of(range(50)), vectors_of(50, 1, whole=False))
    queries = vectors_of(20, 2, whole=False).candidate
    with index.read() as reader:
        server.asked.clear()
        keys, _ = reader.search(queries, 1, [NOTHING] * 20)
        reader.vectors(keys[:, 0])
        reader.rows(keys[:, 0])
        assert server.count_of("/query/batch") == 1
        assert len(server.asked) == 2
