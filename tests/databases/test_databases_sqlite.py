"""SQLite is read, quickly, and not much of it: what a program may not do to the database."""

import copy
import math
import multiprocessing.spawn
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from attacked import attacked
from cities import city_database

from langchain_rcr.databases import worker as query_worker
from langchain_rcr.databases.database import Database, open_database
from langchain_rcr.databases.many import Databases
from langchain_rcr.databases.schema import schema_text
from langchain_rcr.errors import InputError, ProgramError


@pytest.fixture
def database(tmp_path):
    return city_database(tmp_path)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_a_copy_has_processes_and_limits_of_its_own(database, copied):
    with Database(database, max_rows=2, max_processes=3) as run, copied(run) as other:
        run.close()
        assert other("SELECT count(*) FROM city") == [(3,)]
        with pytest.raises(ProgramError, match="more than 2 rows"):
            other("SELECT * FROM city")
        assert other._max_processes == 3


@pytest.mark.parametrize(
    "program",
    [
        "DELETE FROM city",
        "INSERT INTO city VALUES ('x', 1, 1)",
        "UPDATE city SET people = 0",
        "DROP TABLE city",
        "CREATE TABLE x (a)",
        "CREATE TEMP TABLE x (a)",
        "ATTACH 'other.sqlite' AS other",
        "VACUUM INTO 'copy.sqlite'",
        "PRAGMA query_only = OFF",
        "PRAGMA writable_schema = ON",
        "BEGIN",
        "SELECT 1; DELETE FROM city",
        "WITH x AS (SELECT 1) DELETE FROM city",
        "SELECT load_extension('x')",
        "CREATE VIRTUAL TABLE x USING fts5(a)",
        "INSERT INTO sqlite_master VALUES ('table', 'x', 'x', 0, 'CREATE TABLE x (a)')",
        "PRAGMA data_version = 3",
        "PRAGMA page_size",
        "PRAGMA trusted_schema = ON",
        "SELECT 1 \x00",
        "SELECT '\ud800'",
    ],
)
def test_sqlite_is_only_read(tmp_path, monkeypatch, database, program):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    run = Database(database)
    with pytest.raises(ProgramError):
        run(program)
    assert run("SELECT count(*) FROM city") == [(3,)]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_it_says_what_a_program_may_do(database):
    with Database(database) as run, pytest.raises(ProgramError, match="a program may only read tables"):
        run("DELETE FROM city")


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Runs queries of a database with virtual tables, and views and columns that call functions."""
    path = tmp_path_factory.mktemp("searched") / "searched.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript("""
        CREATE TABLE t (a TEXT, j TEXT, b GENERATED ALWAYS AS (json_extract(j, '$.n[0]')));
        INSERT INTO t VALUES ('some words', '{"n": [1, 2]}');
        CREATE VIRTUAL TABLE three USING fts3 (body); INSERT INTO three VALUES ('some words');
        CREATE VIRTUAL TABLE four USING fts4 (body, tokenize=porter); INSERT INTO four VALUES ('some words');
        CREATE VIRTUAL TABLE "fi""ve" USING fts5 (body); INSERT INTO "fi""ve" VALUES ('some words');
        CREATE VIRTUAL TABLE outside USING fts5 (a, content='t'); INSERT INTO outside (outside) VALUES ('rebuild');
        CREATE VIRTUAL TABLE vocabulary USING fts5vocab (outside, 'row');
        CREATE VIRTUAL TABLE box USING rtree (id, x0, x1); INSERT INTO box VALUES (1, 0, 1);
        CREATE VIEW numbers AS SELECT t.a, value FROM t, json_each(t.j, '$.n');
        CREATE VIEW best AS SELECT a, bm25(outside) < 0 FROM outside WHERE outside MATCH 'words';
    """)
    connection.close()
    with Database(path) as run:
        yield run


@pytest.mark.parametrize(
    ("program", "rows"),
    [
        ("SELECT value FROM json_each('[1, 2]')", [(1,), (2,)]),
        ("SELECT fullkey FROM json_tree('[1]')", [("$",), ("$[0]",)]),
        ("SELECT value FROM t, json_each(t.j, '$.n')", [(1,), (2,)]),
        ("SELECT j ->> '$.n[1]', b, json_array(1), json_group_array(a) FROM t", [(2, 1, "[1]", '["some words"]')]),
        ("SELECT body FROM three WHERE three MATCH 'word*'", [("some words",)]),
        ("SELECT snippet(four), offsets(four), length(matchinfo(four)) FROM four WHERE four MATCH 'word'", None),
        ('SELECT highlight("fi""ve", 0, \'<\', \'>\') FROM "fi""ve" (\'some\') ORDER BY rank', [("<some> words",)]),
        ("SELECT bm25(outside) < 0 FROM outside WHERE outside MATCH 'some AND words'", [(1,)]),
        ("SELECT term FROM vocabulary", [("some",), ("words",)]),
        ("SELECT id FROM box WHERE x0 < 1", [(1,)]),
        ("SELECT * FROM numbers", [("some words", 1), ("some words", 2)]),
        ("SELECT * FROM best", [("some words", 1)]),
        (
            "SELECT date(0, 'unixepoch'), strftime('%Y', '2020-05-05'), julianday('now') > 0",
            [("1970-01-01", "2020", 1)],
        ),
        ("SELECT CURRENT_DATE > '2000', random() IS NULL, 'a' LIKE 'A', 'a' GLOB 'a', pow(2, 3)", [(1, 0, 1, 1, 8)]),
        ("SELECT row_number() OVER (ORDER BY a), group_concat(a) OVER (), max(1, 2) FROM t", [(1, "some words", 2)]),
    ],
)
def test_what_right_answers_call_is_allowed(searched, program, rows):
    searched.close()  # each program is a process's first
    found = searched(program)
    assert found == (found if rows is None else rows)
    assert found


@pytest.mark.parametrize(
    "call",
    [
        *("fts3_tokenizer('simple', x'4141414141414141')", "FTS3_TOKENIZER('simple')", "load_extension('x')"),
        *("sqlite_log(1, 'x')", "optimize(three)", "rtreecheck('box')", "rtreenode(2, x'00')", "fts5(1)"),
    ],
)
@pytest.mark.parametrize("query", ["SELECT {}", "SELECT a FROM t WHERE {} IS NULL", "SELECT 1 FROM three ORDER BY {}"])
def test_functions_that_can_do_harm_are_refused_by_name(searched, query, call):
    with pytest.raises(ProgramError, match=f"(?i)not authorized to use function: {call.partition('(')[0]}"):
        searched(query.format(call))
    assert searched("SELECT body FROM three WHERE three MATCH 'some'") == [("some words",)]


def test_a_view_can_t_call_them_either(tmp_path):
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE VIEW v AS SELECT sqlite_log(1, 'x')")
    connection.close()
    with pytest.raises(ProgramError, match="not authorized to use function"):
        Database(path)("SELECT * FROM v")


@pytest.mark.skipif(sys.platform != "linux", reason="the environment of another process is read in /proc")
def test_the_process_gets_no_secret_of_the_environment(database, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    monkeypatch.setenv("PGPASSWORD", "of-another-database")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("TZ", "UTC")
    with Database(database) as run:
        [process] = run._idle
        environment = Path(f"/proc/{process._process.pid}/environ").read_bytes().split(b"\0")
        assert [variable for variable in environment if not variable.startswith(b"LD_LIBRARY_PATH=")] == [
            b"TZ=UTC",
            b"",
        ]


def in_wal_mode(path):
    """A connection that writes to a new database in WAL mode."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript("PRAGMA journal_mode = WAL; CREATE TABLE t (a); INSERT INTO t VALUES (1);")
    return connection


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


def create(path, mode):
    connection = in_wal_mode(path)
    connection.execute(f"PRAGMA journal_mode = {mode}")
    connection.close()
    return path


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


def test_no_more_queries_run_at_a_time_than_may(database, monkeypatch):
    begun = []
    monkeypatch.setattr(
        "langchain_rcr.databases.database._Process.ask",
        lambda self, _: begun.append(self) or time.sleep(0.01) or {"rows": []},
    )
    with Database(database, max_processes=2) as run, ThreadPoolExecutor(12) as threads:
        assert list(threads.map(run, ["SELECT 1"] * 48)) == [[]] * 48
        assert len(set(begun)) <= 2
        assert len(run._idle) <= 2
    with pytest.raises(InputError, match="max_processes must be a whole number of at least 1, not 0"):
        Database(database, max_processes=0)


@pytest.mark.parametrize(
    "limits",
    [{"timeout_s": value} for value in (0, -1.0, "5", None, float("inf"), float("nan"))]
    + [{"max_rows": value} for value in (0, 1.5, None)],
)
def test_what_is_no_limit_is_refused(database, limits):
    ((name, value),) = limits.items()
    with pytest.raises(InputError, match=f"^{name} must be a .*, not {value!r}$"):
        Database(database, **limits)
    with pytest.raises(InputError, match=f"^{name} must be"):
        Databases("{db_id}.sqlite", **limits)
    with pytest.raises(InputError, match="samples must be a whole number of at least 0"):
        schema_text(database, samples=-1)


@pytest.mark.parametrize("database", ["", " "])
def test_a_blank_database_is_not_the_working_folder(database):
    with pytest.raises(InputError, match="the database is blank"):
        Databases(database)


def test_a_program_that_never_ends_is_stopped(database):
    run = Database(database, timeout_s=0.2)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(ProgramError, match=r"longer than 0\.2 s"):
        run(endless)
    assert run("SELECT 1") == [(1,)]


def test_too_many_rows_and_too_large_a_value(database):
    run = Database(database, max_rows=2)
    assert len(run("SELECT name FROM city LIMIT 2")) == 2
    with pytest.raises(ProgramError, match="more than 2 rows"):
        run("SELECT name FROM city")
    with pytest.raises(ProgramError, match="too big"):
        run("SELECT zeroblob(100000000)")


def test_large_values_of_the_database_are_counted(tmp_path):
    path = tmp_path / "photos.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE photo (name, image)")
        connection.execute("INSERT INTO photo VALUES ('a', zeroblob(20000000)), ('b', zeroblob(3000000)), ('c', NULL)")
    connection.close()
    run = Database(path)
    assert run("SELECT count(image), count(*) FROM photo WHERE image IS NOT NULL") == [(2, 2)]
    assert run("SELECT name, substr(image, 1, 1) FROM photo ORDER BY length(image) DESC LIMIT 1") == [("a", b"\0")]
    assert [len(image) for (image,) in run("SELECT image FROM photo WHERE name = 'b'")] == [3000000]
    with pytest.raises(ProgramError, match="rows of more than 8388608 bytes"):
        run("SELECT * FROM photo")


MEGABYTE = "hex(zeroblob(500000))"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit memory otherwise, or not at all")
def test_no_query_takes_more_than_twice_its_time_or_more_than_its_memory(database):
    """One function that computes one value isn't interrupted by SQLite; one row may be larger than all memory."""
    instr = f"instr({MEGABYTE}, substr({MEGABYTE}, 700000) || '1')"
    wide = ", ".join([MEGABYTE] * 1900)
    programs = [
        f"SELECT {instr}",
        f"SELECT {' + '.join([instr] * 4)}",
        "SELECT printf('%.*c', 1000000000, 'a')",
        f"SELECT {wide}",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 9000) SELECT hex(zeroblob(50000)) FROM n",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n ORDER BY -x",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n",
    ]
    limit = 0.5
    for program, told in zip(programs, attacked(database, limit, programs), strict=True):
        assert isinstance(told["rows"], str), program[:80]
        assert told["alive"]
        assert told["cpu"] <= 2 * limit, (program[:80], told)
        assert told["kilobytes"] <= (1 << 29) / 1024, (program[:80], told)


def test_a_folder_with_a_name_in_latin_1(tmp_path):
    folder = tmp_path / os.fsdecode(b"gr\xf6\xdfe")
    folder.mkdir()
    with closing(sqlite3.connect(folder / "a.sqlite")) as connection:
        connection.execute("CREATE TABLE a (x)")
    with open_database(folder / "a.sqlite") as run:
        assert run("SELECT count(*) FROM a") == [(0,)]


def test_queries_from_many_threads_get_their_own_rows(database):
    with Database(database) as run, ThreadPoolExecutor(6) as threads:
        assert list(threads.map(run, [f"SELECT {n}" for n in range(200)])) == [[(n,)] for n in range(200)]


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on open files")
def test_a_server_with_more_than_a_thousand_open_files_can_ask(database):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("too few files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Database(database) as run:
            assert run("SELECT count(*) FROM city") == [(3,)]
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.slow
def test_a_process_forked_during_a_query_waits_for_none(tmp_path, several):
    code = """if True:
        import os, sys, threading, time
        from langchain_rcr.databases.database import Database
        from langchain_rcr.databases.many import Databases
        path, several = sys.argv[1:]
        if several:
            databases = Databases(path, timeout_s=2)
            run = lambda program: databases(program, {"name": "city"})
        else:
            run = Database(path, timeout_s=2, max_processes=1)

        def endless():
            try:
                run("WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n")
            except Exception as error:
                say(error)

        def say(text):  # in one write, since both threads may come to it at once
            os.write(1, f"{text}\\n".encode())

        thread = threading.Thread(target=endless)
        thread.start()
        time.sleep(0.3)
        forked = os.fork()
        say(*run("SELECT 'child'" if not forked else "SELECT 'parent'"))
        if not forked:
            os._exit(0)
        os.waitpid(forked, 0)
        thread.join()
    """
    path = city_database(tmp_path).rename(tmp_path / "city.sqlite")
    given = [str(path.with_stem("{name}") if several else path), "several" if several else ""]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *given], capture_output=True, text=True, check=False, timeout=120
    )
    assert sorted(done.stdout.splitlines()) == ["('child',)", "('parent',)", "longer than 2 s"], done.stderr


def test_the_interpreter_can_be_named_where_another_program_contains_it(database):
    python = multiprocessing.spawn.get_executable()
    try:
        multiprocessing.set_executable(shutil.which("false"))
        with pytest.raises(InputError, match=r"does not start with /\S+/false \(multiprocessing\.set_executable names"):
            Database(database)
        multiprocessing.set_executable(python)
        with pytest.MonkeyPatch.context() as patch, Database(database) as run:
            patch.setattr(sys, "executable", "/usr/bin/uwsgi")
            run.close()
            assert run("SELECT 1") == [(1,)]
    finally:
        multiprocessing.set_executable(python)


def test_a_closed_database_begins_anew(database):
    with Database(database) as run:
        assert run("SELECT 1") == [(1,)]
    assert run("SELECT 2") == [(2,)]
    run.close()


def test_rows_of_too_many_bytes(database):
    with Database(database, max_bytes=1000) as run:
        with pytest.raises(ProgramError, match="more than 1000 bytes"):
            run("SELECT hex(zeroblob(600))")
        assert run("SELECT x'00ff', 0.1, NULL, 9007199254740993, 1e999, 'é'") == [
            (b"\x00\xff", 0.1, None, 9007199254740993, math.inf, "é")
        ]


def test_text_that_is_no_utf8_is_read(tmp_path):
    path = tmp_path / "x.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript("CREATE TABLE t (a TEXT); INSERT INTO t VALUES (CAST(x'ff61' AS TEXT));")
    connection.close()
    assert Database(path)("SELECT a FROM t") == [("\ufffda",)]


@pytest.mark.parametrize("content", [None, b"no database, but long enough to look like a file of some kind" * 20])
def test_a_database_that_is_none(tmp_path, content):
    path = tmp_path / "x.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"x.sqlite can't be read: (no such file|file is not a database)"):
        open_database(str(path))
    assert path.exists() is (content is not None)
