"""A SQLite database that others write to, move or damage while it is read."""

import sqlite3
import subprocess
import sys
import time

import pytest

from langchain_rcr.databases import worker as query_worker
from langchain_rcr.databases.database import Database
from langchain_rcr.errors import InputError, ProgramError


def in_wal_mode(path):
    """A connection that writes to a new database in WAL mode."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript("PRAGMA journal_mode = WAL; CREATE TABLE t (a); INSERT INTO t VALUES (1);")
    return connection


def create(path, mode):
    connection = in_wal_mode(path)
    connection.execute(f"PRAGMA journal_mode = {mode}")
    connection.close()
    return path


def test_a_database_in_wal_mode_is_read_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "x.sqlite"
    in_wal_mode(path).close()
    content = path.read_bytes()
    with Database(path) as run:
        assert run("SELECT a FROM t") == [(1,)]
        assert list(tmp_path.iterdir()) == [path]
        assert path.read_bytes() == content
        with pytest.raises(ProgramError):
            run("DELETE FROM t")
        # Then somebody writes: every query sees what is committed, and the log goes with the last who writes.
        writer = sqlite3.connect(path, isolation_level=None)
        for n in (2, 3):
            writer.execute("INSERT INTO t VALUES (?)", (n,))
            assert run("SELECT max(a) FROM t") == [(n,)]
        writer.execute("CREATE VIRTUAL TABLE f USING fts5 (body)")
        assert run("SELECT * FROM f WHERE f MATCH 'x'") == []
        time.sleep(1)  # at rest for longer than a connection is kept
        writer.close()
        assert list(tmp_path.iterdir()) == [path]
        assert run("SELECT max(a) FROM t") == [(3,)]
        assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed_to_where_it_leads_now(tmp_path):
    link = tmp_path / "current.sqlite"
    writers = {name: in_wal_mode(tmp_path / name) for name in ("old.sqlite", "new.sqlite")}
    link.symlink_to("old.sqlite")
    with Database(link) as run:
        assert run("SELECT a FROM t") == [(1,)]
        writers["new.sqlite"].execute("UPDATE t SET a = 2")
        link.unlink()
        link.symlink_to("new.sqlite")
        assert run("SELECT a FROM t") == [(2,)]
        for writer in writers.values():
            writer.close()
        (tmp_path / "old.sqlite").unlink()
        assert run("SELECT a FROM t") == [(2,)]


@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
def test_a_schema_that_changes_between_queries_is_read_anew(tmp_path, mode):
    path = tmp_path / "x.sqlite"
    with Database(path := create(path, mode)) as run:
        for n in range(3):
            writer = sqlite3.connect(path, isolation_level=None)
            writer.execute(f"CREATE VIRTUAL TABLE f{n} USING fts5 (body)")
            writer.close()
            assert run(f"SELECT * FROM f{n} WHERE f{n} MATCH 'x'") == []
            assert run("SELECT value FROM json_each('[1]')") == [(1,)]


def test_a_result_is_dropped_if_somebody_wrote_meanwhile(tmp_path):
    path = create(tmp_path / "x.sqlite", "WAL")
    many = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 500) SELECT x, a FROM n, t"
    read = query_worker.SQLite(str(path), 5.0)
    rows = read(many)
    next(rows)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("UPDATE t SET a = 2")
    writer.close()
    with pytest.raises(query_worker.AgainError, match="being written to"):
        list(rows)

    def once() -> str:
        return calls.pop()()

    def changed() -> str:
        raise query_worker.AgainError(query_worker.RefusedError("in the end"))

    calls = [lambda: "rows", changed]
    assert query_worker.again(once) == "rows"
    calls = [changed, changed]
    with pytest.raises(query_worker.RefusedError, match="in the end"):
        query_worker.again(once)
    assert {a for some in read(many) for _, a in some} == {2}


def test_a_lock_is_no_fault_of_the_program(tmp_path):
    path = create(tmp_path / "x.sqlite", "DELETE")
    with Database(path, timeout_s=0.4) as run:
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(InputError, match="can't be read: database is locked"):
            run("SELECT a FROM t")
        writer.execute("ROLLBACK")
        assert run("SELECT a FROM t") == [(1,)]
        writer.close()


@pytest.mark.parametrize("harm", ["gone", "damaged", "rolled back"])
def test_a_database_that_can_t_be_read_any_more_is_no_fault_of_the_program(tmp_path, harm):
    path = create(tmp_path / "x.sqlite", "DELETE")
    with Database(path) as run:
        assert run("SELECT a FROM t") == [(1,)]
        if harm == "gone":
            path.unlink()
        elif harm == "damaged":
            path.write_bytes(b"no database, but as long as one of them might be" * 200)
        else:  # a writer died: only another who writes can bring the file back to where it was
            hot = "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
            hot += "c.executescript('PRAGMA cache_size = 1; BEGIN; CREATE TABLE u (a);')\n"
            hot += "c.executemany('INSERT INTO u VALUES (?)', [('x' * 3000,)] * 50); os._exit(0)"
            subprocess.run([sys.executable, "-c", hot, str(path)], check=True)
        with pytest.raises(InputError, match=r"x\.sqlite can't be read: "):
            run("SELECT a FROM t")
