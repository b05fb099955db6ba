"""Threads: every read sees a pool that existed, while others add, replace and delete."""

import asyncio
import inspect
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from plain_reader import reading

from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.faiss import FaissIndex
from langchain_rcr.index.filters import parse_filter
from langchain_rcr.index.memory import MemoryIndex

NOTHING = np.empty(0, dtype=np.int64)
ENGINES = {
    "memory": MemoryIndex,
    "faiss": FaissIndex,
    "hnsw": lambda: FaissIndex("hnsw", m=8),
    "ivf": lambda: FaissIndex("ivf", nlist=2, train_from=80),
}
GROUP = 4
"""Examples come and go in groups: a read that sees a part of one saw half a change."""


@pytest.fixture(autouse=True)
def approximate_from_the_first_row(monkeypatch):
    monkeypatch.setattr("langchain_rcr.index.faiss._SMALL", 0)


async def test_what_is_cancelled_before_a_thread_is_free_is_closed():
    """Python would warn of a coroutine that nobody awaited."""
    loop, free = asyncio.get_running_loop(), threading.Event()
    with ThreadPoolExecutor(1) as only:
        loop.set_default_executor(only)
        busy = loop.run_in_executor(None, free.wait)
        work = asyncio.sleep(0)
        task = asyncio.create_task(MemoryIndex().arun(work))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
        free.set()
        await busy


def ids_of(number):
    return [f"{number}-{n}" for n in range(GROUP)]


def group(number, version):
    rows = [
        Row(f"{number}-{n}", {"source": f"q {number}", "group": number, "version": version, "n": n}, number)
        for n in range(GROUP)
    ]
    candidate = np.full((GROUP, 3), 1 + number / 7, dtype=np.float32)
    context = np.full((GROUP, 3), [number, version, 0], dtype=np.float32)
    context[:, 2] = np.arange(GROUP)
    return rows, PoolVectors(candidate, context)


def check(reader, where):
    """The groups that a reader sees, each whole and of one version."""
    keys, logits = reader.search(np.ones((2, 3), dtype=np.float32), max(1, reader.size), [NOTHING] * 2)
    assert (keys[0] == keys[1]).all()
    assert reader.size == (keys[0] >= 0).sum()
    found = keys[0][keys[0] >= 0]
    rows, contexts, candidates = reader.rows(found), reader.vectors(found), reader.candidates(found)
    seen = {}
    for row, context, candidate, logit in zip(rows, contexts, candidates, logits[0], strict=False):
        number, version, n = (row.example[name] for name in ("group", "version", "n"))
        assert context.tolist() == [number, version, n]
        assert candidate[0] == np.float32(1 + number / 7)
        assert logit == pytest.approx(3 * candidate[0], rel=1e-5)
        seen.setdefault(number, []).append((version, n))
    for number, members in seen.items():
        assert sorted(n for _, n in members) == list(range(GROUP))
        assert len({version for version, _ in members}) == 1
        assert where is None or number == 3
    return frozenset(seen)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_32_readers_see_whole_changes_alone(name, monkeypatch):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    index, wrong, done = ENGINES[name](), [], threading.Event()
    index.bind("encoder", 3)
    index.add(*group(3, 0))
    only = parse_filter({"group": 3})
    reads = []

    def read(which):
        count = 0
        try:
            while not done.is_set():
                where = only if which % 2 else None
                with reading(index, where) as reader:
                    first = check(reader, where)
                    assert check(reader, where) == first
                    assert 3 in first
                count += 1
        except Exception as error:
            wrong.append(error)
        reads.append(count)

    def write(which):
        rng = np.random.default_rng(which)
        try:
            for version in range(25):
                number = int(rng.integers(which * 10 + 10, which * 10 + 20))
                if rng.random() < 0.4:
                    index.delete(ids_of(number))
                else:
                    index.add(*group(number, version), replace=ids_of(number))
                index.add(*group(3, version + 100 * which), replace=ids_of(3))
        except Exception as error:
            wrong.append(error)

    try:
        readers = [threading.Thread(target=read, args=(n,)) for n in range(32)]
        writers = [threading.Thread(target=write, args=(n,)) for n in range(3)]
        for thread in (*readers, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        done.set()
        for thread in readers:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong, wrong[0]
    assert min(reads) >= 1
    with reading(index) as reader:
        assert index.count() == GROUP * len(check(reader, None))


def test_writers_do_not_lose_each_others_rows():
    index = MemoryIndex()
    index.bind("encoder", 3)

    def write(which):
        for n in range(20):
            index.add(*group(which * 100 + n, 0))
            if n % 2:
                index.delete([f"{which * 100 + n}-0"])

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {f"{w * 100 + n}-{m}" for w in range(8) for n in range(20) for m in range(GROUP) if m or not n % 2}
    assert index.count() == len(expected)
    assert index.known(list(expected)) == expected
    assert {row.id for row in index.content()[0]} == expected


@pytest.mark.parametrize("held", [lambda index: index._lock, lambda index: index._now.rows.lock])
def test_a_forked_process_frees_what_a_thread_held(held):
    index = MemoryIndex()
    index.add([Row("a", {"n": 1}, 1)], PoolVectors(*np.ones((2, 1, 3), dtype=np.float32)))
    held(index).acquire()
    index.forked()
    assert not held(index).locked()
    with reading(index, parse_filter({"n": 1})) as reader:
        assert reader.size == index.delete(["a"]) == 1
