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

from langchain_rcr.databases.database import Database, open_database
from langchain_rcr.databases.many import Databases
from langchain_rcr.databases.schema import schema_text
from langchain_rcr.errors import InputError, ProgramError


@pytest.fixture
def database(tmp_path):
    return city_database(tmp_path)


@pytest.fixture(scope="module")
def cities(tmp_path_factory):
    """A folder with a database, and what runs queries of it."""
    folder = tmp_path_factory.mktemp("cities")
    with Database(city_database(folder)) as run:
        yield folder, run


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
def test_sqlite_is_only_read(cities, monkeypatch, program):
    folder, run = cities
    monkeypatch.chdir(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ProgramError):
        run(program)
    assert run("SELECT count(*) FROM city") == [(3,)]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


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
