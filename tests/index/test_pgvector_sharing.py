"""One index for threads, event loops, processes, copies; many writers; nothing left open."""

import asyncio
import copy
import gc
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from plain_reader import reading

from langchain_rcr.basics.background import BackgroundLoop
from langchain_rcr.errors import PoolError
from langchain_rcr.index.base import PoolVectors, Row

pytestmark = pytest.mark.slow

psycopg = pytest.importorskip("psycopg")
from langchain_rcr.index.pgvector import PgVectorIndex  # noqa: E402

DIM = 4
NOTHING = np.empty(0, dtype=np.int64)
STATE = np.ones((1, DIM), dtype=np.float32)


def rows(*ids, value=0):
    vectors = np.random.default_rng(0).normal(size=(2, len(ids), DIM)).astype(np.float32)
    return [Row(one, {"source": one, "value": value}, 0) for one in ids], PoolVectors(*vectors)


@pytest.fixture
def new(new):
    def build(name="", **options):
        index = new(name, **options)
        index.bind("f", DIM)
        return index

    return build


@pytest.fixture
def admin(postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


def connections(admin, name):
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    return admin.execute(query, [name]).fetchone()[0]


def named(postgres_url, name):
    return f"{postgres_url}{'&' if '?' in postgres_url else '?'}application_name={name}"


def until(check):
    deadline = time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_event_loops_and_none(new):
    index = new()

    async def look(one):
        async with index.read() as reader:
            hits = await reader.search(STATE, 50, [NOTHING], 1.0)
            keys = hits.keys[hits.keys >= 0]
            assert hits.logits.shape == (1, 50)
            assert (await reader.candidates(keys)).shape == (len(keys), DIM)
            assert np.isfinite(hits.log_partition).all()
            assert one in {hits.rows[key].id for key in keys.tolist()}
            return reader.size

    async def use(one):
        await asyncio.to_thread(index.add, *rows(one, one + "!"))
        assert await asyncio.to_thread(index.delete, [one + "!", "nobody"]) == 1
        return await index.arun(look(one))

    assert asyncio.run(use("a")) == 1
    assert index.count() == 1  # without a loop
    assert asyncio.run(use("b")) == 2

    async def together():
        return await asyncio.gather(*(use(f"c{n}") for n in range(20)))

    sizes = asyncio.run(together())
    assert index.count() == 22
    assert 3 <= min(sizes) <= max(sizes) <= 42  # some saw what others were about to delete

    async def inside():
        return index.count()  # a sync call under a running loop

    assert asyncio.run(inside()) == 22


def test_a_waiting_call_holds_up_no_loop_and_can_be_cancelled(new, admin):
    """Also one that is cancelled while it gets its connection: there is but one, and it comes back."""
    index = new(max_connections=1)
    index.add(*rows("a"))

    async def look():
        async with index.read() as reader:
            return reader.size

    async def use():
        with admin.transaction():
            admin.execute("LOCK TABLE rcr_pools IN ACCESS EXCLUSIVE MODE")
            waiting = asyncio.create_task(index.arun(look()))
            for _ in range(20):
                await asyncio.sleep(0.002)
            assert not waiting.done()  # its transaction waits for the lock
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(use())
    assert index.count() == 1


def test_readers_never_see_half_a_change(new):
    """32 threads read while two others add pairs and take them away."""
    index, stop, wrong = new(max_connections=6), threading.Event(), []
    index.add(*rows("x", "y"))

    def write(name):
        while not stop.is_set():
            index.add(*rows(f"{name}1", f"{name}2"))
            index.delete([f"{name}1", f"{name}2"])

    def read(_):
        for _ in range(4):
            with reading(index) as reader:
                found = reader.search(STATE, 8, [NOTHING])[0][0]
                ids = {row.id for row in reader.rows(found[found >= 0])}
                if len(ids) % 2 or len(ids) != reader.size or ("p1" in ids) != ("p2" in ids):
                    wrong.append(ids)

    writers = [threading.Thread(target=write, args=(name,)) for name in "pq"]
    for writer in writers:
        writer.start()
    try:
        with ThreadPoolExecutor(32) as threads:
            list(threads.map(read, range(32)))
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert wrong == []
    assert index.count() == 2


def test_concurrent_writers(new):
    """Same ids in opposite orders: no deadlock, no half change, one winner each."""
    index = new()
    other = new(index.pool)
    ids = [str(n) for n in range(40)]

    def replace(n):
        which = (index, other)[n % 2]
        which.add(*rows(*(ids if n % 2 else reversed(ids)), value=n), replace=ids)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(replace, range(24)))
    with reading(other) as reader:
        assert reader.size == index.count() == 40
        found = reader.rows(reader.search(STATE, 40, [NOTHING])[0][0])
    assert len({row.example["value"] for row in found}) == 1  # all of one writer
    assert {row.id for row in found} == set(ids)

    def claim(n):
        try:
            (index, other)[n % 2].add(*rows("wanted", f"only {n}"))
        except PoolError:
            return 0
        return 1

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(claim, range(8))) == 1
    assert index.count() == 42


def test_copies_and_pickles_open_their_own(new, postgres_url):
    index = new()
    index.add(*rows("a"))
    data = pickle.dumps(index)
    assert len(data) < 2000
    for twin in (pickle.loads(data), copy.deepcopy(index), copy.copy(index)):
        index.close()
        twin.add(*rows("b"))  # bound as the first one was
        assert twin.delete(["b"]) == 1
        assert twin.count() == index.count() == 1
        twin.close()
        twin.close()
        assert twin.count() == 1  # opened again
        twin.close()
    assert "secret" not in repr(PgVectorIndex("postgresql+psycopg://me:secret@host/shop", "p"))
    assert repr(PgVectorIndex("postgresql+psycopg://me:secret@host/shop", "p")) == (
        "PgVectorIndex(pool 'p' at host/shop, exact)"
    )


def test_a_forked_process_opens_its_own(new):
    index = new()
    index.add(*rows("a"))
    with reading(index) as reader, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, for forking with threads
        context = multiprocessing.get_context("fork")
        answers = context.Queue()

        def child():
            index.add(*rows("b"))
            gc.collect()
            answers.put(index.count())
            index.close()

        process = context.Process(target=child)
        process.start()
        process.join(20)
        assert (process.exitcode, answers.get(timeout=5)) == (0, 2)
        # The parent's own connections and loop are as they were.
        assert reader.size == 1
        assert reader.search(STATE, 2, [NOTHING])[0].tolist()[0][1] == -1
    assert index.count() == 2


def test_what_is_forgotten_is_closed(postgres_url, admin):
    name = f"rcr-{uuid.uuid4().hex}"
    index = PgVectorIndex(named(postgres_url, name), uuid.uuid4().hex)
    index.bind("f", DIM)
    with reading(index):
        assert connections(admin, name) >= 1
    del index
    gc.collect()
    until(lambda: connections(admin, name) == 0)


@pytest.mark.parametrize(
    "ending", ["", "index.run(reader.__aenter__())", "index.close()", "index.close(); index.count()"]
)
def test_a_process_may_end_without_closing(postgres_url, ending):
    code = f"""
import numpy as np
from langchain_rcr.index.pgvector import PgVectorIndex
index = PgVectorIndex({postgres_url!r}, "p")
index.count()
reader = index.read()
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_caller_that_leaves_cancels_its_work():
    loop, ends = BackgroundLoop(), []

    async def work():
        try:
            await asyncio.sleep(0.05)
        finally:
            ends.append(asyncio.current_task().cancelling())
        return "result"

    async def leave(seconds):
        async with asyncio.timeout(seconds):
            return await loop.arun(work())

    try:
        assert asyncio.run(leave(5)) == loop.run(work()) == "result"
        with pytest.raises(TimeoutError):
            asyncio.run(leave(0.01))
        until(lambda: len(ends) == 3)
        assert ends == [0, 0, 1]
    finally:
        loop.stop()
    assert loop.loop.is_closed()
    with pytest.raises(RuntimeError):
        loop.run(work())
