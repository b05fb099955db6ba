"""Rewards by running programs: results compared, and what a program may not do to the database."""

import datetime
import json
import math
import os
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from places import DATA
from rcr_trainer.data import Example, text2sql_split
from rcr_trainer.errors import ConfigError
from rcr_trainer.rewards import ProgramError, RewardError, check_reward, execution, make_reward, score

from langchain_rcr import schema_text
from langchain_rcr.databases import worker as query_worker
from langchain_rcr.databases.database import Database, address_of, is_postgresql, open_database
from langchain_rcr.databases.results import Result
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec(language="sql:sqlite")


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "a b?.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE city (name TEXT, people INT, area REAL);"
        "INSERT INTO city VALUES ('austin', 3, 0.1), ('boston', 2, 0.2), ('paris', 2, NULL);"
    )
    connection.close()
    return path


def rewards(reward, *pairs):
    predictions, references = zip(*pairs, strict=True)
    return reward(predictions, references, queries=[""] * len(pairs), contexts=[[]] * len(pairs))


# ---------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("SELECT name FROM city", "select name from city", 1.0),
        ("SELECT name FROM city ORDER BY name DESC", "SELECT name FROM city", 1.0),  # gold doesn't order
        ("SELECT name FROM city ORDER BY name DESC", "SELECT name FROM city ORDER BY name", 0.0),
        ("SELECT name FROM city", "SELECT name FROM (SELECT name FROM city ORDER BY people)", 1.0),
        ("SELECT people FROM city", "SELECT DISTINCT people FROM city", 0.0),  # a multiset, no set
        ("SELECT people + 0.0 FROM city", "SELECT people FROM city", 1.0),
        ("SELECT 0.1 + 0.2", "SELECT 0.3", 1.0),
        ("SELECT people, name FROM city", "SELECT name, people FROM city", 1.0),  # only the columns' order differs
        ("SELECT name FROM town", "SELECT name FROM city", 0.0),
        ("SELECT name FROM", "SELECT name FROM city", 0.0),
        ("", "SELECT name FROM city", 0.0),
        (None, "SELECT name FROM city", 0.0),
        ("-- nothing", "SELECT name FROM city", 0.0),
        ("SELECT name FROM city WHERE people > 9", "SELECT name FROM city WHERE people > 8", 1.0),  # both empty
        ("SELECT name FROM city", "SELECT name FROM town", None),  # gold can't be run
        ("SELECT name FROM city;", "SELECT name FROM city", 1.0),
        ("SELECT NULL", "SELECT area FROM city WHERE name = 'paris'", 1.0),
    ],
)
def test_execution_by_hand(database, answer, gold, expected):
    assert rewards(make_reward("execution", SPEC, database=str(database)), (answer, gold)) == [expected]


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


class NoNumber(Fraction):
    def __float__(self):
        raise OverflowError("too large")


@pytest.mark.parametrize("value", [nested(900), nested(100_000), {"a": nested(2_000)}, Fraction(10**400), NoNumber(1)])
def test_what_can_t_be_compared_is_a_wrong_answer_and_stops_nothing(value):
    example = Example("7", "q", "gold")
    assert Result.of([(value,)]) is None
    reward = execution({"odd": [(value,)], "gold": [(1,)]}.__getitem__, ProgramSpec())
    assert list(score(reward, ["odd", "gold"], [example] * 2, [[]] * 2)) == [0.0, 1.0]
    assert rewards(reward, ("gold", "odd")) == [None]


# ---------------------------------------------------------------- an executor of one's own


def test_an_executor_runs_each_program_once():
    calls = []

    def run(program):
        calls.append(program)
        if program == "bad":
            raise ProgramError("bad")
        return [program.upper()]

    reward = execution(run, ProgramSpec())
    assert rewards(reward, ("a", "A"), ("b", "a"), ("bad", "a"), ("a", "bad"), ("A", "a")) == [1.0, 0.0, 0.0, None, 1.0]
    assert sorted(calls) == ["A", "a", "b", "bad"]


def test_an_executors_bug_is_no_score():
    def run(program):
        raise RuntimeError("connection lost")

    with pytest.raises(RewardError, match=r"RuntimeError on example 7 .*: connection lost"):
        score(make_reward("execution", SPEC, execute=run), ["a"], [Example("7", "q", "a")], [[]])


def test_an_executor_by_name(tmp_path, monkeypatch):
    (tmp_path / "runs_programs.py").write_text("def run(program):\n    return len(program)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    reward = make_reward("execution", ProgramSpec(), execute="runs_programs:run")
    assert rewards(reward, ("ab", "cd"), ("a", "cd")) == [1.0, 0.0]


def test_either_a_database_or_an_executor(database):
    for options in ({}, {"database": str(database), "execute": len}):
        with pytest.raises(ConfigError, match="needs either"):
            make_reward("execution", SPEC, **options)


# ---------------------------------------------------------------- SQLite is read, quickly, and not much of it


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


@pytest.fixture
def searched(tmp_path):
    """A database with virtual tables, and views and columns that call functions."""
    path = tmp_path / "searched.sqlite"
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
    return path


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
    found = Database(searched)(program)
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
    run = Database(searched)
    with pytest.raises(ProgramError, match=f"(?i)not authorized to use function: {call.partition('(')[0]}"):
        run(query.format(call))
    assert run("SELECT body FROM three WHERE three MATCH 'some'") == [("some words",)]


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
    with pytest.raises(InputError, match="max_processes must be at least 1, not 0"):
        Database(database, max_processes=0)


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


ATTACKS = """
import json, resource, sys
from contextlib import suppress
from langchain_rcr.databases.database import Database
from langchain_rcr.errors import ProgramError

found = []
for program in ["not a query", *json.load(sys.stdin)]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Database(sys.argv[1], timeout_s=float(sys.argv[2])) as run:
        try:
            rows = run(program)
        except ProgramError as error:
            rows = str(error)
        alive = False
        for _ in range(20):  # on a busy machine even this may take longer
            with suppress(ProgramError):
                alive = alive or run("SELECT 1") == [(1,)]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found.append({"rows": rows, "alive": alive, "cpu": cpu, "kilobytes": after.ru_maxrss})
# Not ru_maxrss, which begins with the parent's.
own = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
starting = found.pop(0)["cpu"]  # of a process; whoever exceeds a limit may have taken two
for told in found:
    told["cpu"] -= starting
print(json.dumps({"own": own, "found": found}))
"""


def attacked(database, limit, programs):
    command = [sys.executable, "-c", ATTACKS, str(database), str(limit)]
    done = subprocess.run(command, input=json.dumps(programs), capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["own"] < 200_000  # kB: what isn't passed on is in no memory here
    return told["found"]


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


def test_queries_from_many_threads_get_their_own_rows(database):
    with Database(database) as run, ThreadPoolExecutor(6) as threads:
        assert list(threads.map(run, [f"SELECT {n}" for n in range(200)])) == [[(n,)] for n in range(200)]


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


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "geography_sql").is_dir(), reason="the Geography database is not there (RCR_DATA)")
def test_geographys_own_queries_run():
    split = text2sql_split(DATA / "geography_sql" / "geography.json")
    reward = make_reward("execution", SPEC, database=str(DATA / "geography_sql" / "geography.sqlite"))
    assert check_reward(reward, split.train).mean() > 0.95


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("given", "place", "postgres"),
    [
        ("a b?.sqlite", "a b?.sqlite", False),
        (Path("host=x"), "host=x", False),
        ("sqlite:///books.sqlite", "books.sqlite", False),
        ("sqlite+pysqlite:////srv/b%20c.db?timeout=3", "/srv/b c.db", False),
        (r"sqlite:///C:\books.db", r"C:\books.db", False),
        ("postgres://ann:p@h/db", "postgresql://ann:p@h/db", True),
        ("postgresql+psycopg://ann:p@h/db?x=1", "postgresql://ann:p@h/db?x=1", True),
        ("PostgreSQL+psycopg2://h/db", "postgresql://h/db", True),
        ("host=h user=ann password=p", "host=h user=ann password=p", True),
    ],
)
def test_addresses_may_be_sqlalchemy_s(given, place, postgres):
    assert address_of(given) == (place, postgres)
    assert is_postgresql(given) is postgres


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("mysql+pymysql://ann:s3cret@h/db", "kind 'mysql'"),
        ("snowflake://ann:s3cret@account/db", "kind 'snowflake'"),
        ("mssql+pyodbc:///?odbc_connect=DRIVER=x;PWD=s3cret", "kind 'mssql'"),
        ("jdbc:postgresql://h/db?user=ann&password=s3cret", "kind 'jdbc:postgresql'"),
        ("postgresql+psycopg2://ann:s3cret@127.0.0.1:1/db", "no connection"),
        ("postgresql://ann:s3cret@[::1/db", "the database's address isn't one that PostgreSQL takes"),
        ("postgresql://ann:s3cret%zz@127.0.0.1/db", "the database's address isn't one"),
        ("postgresql://ann:s3cret@127.0.0.1:1/db?nothing=1", "the database's address isn't one"),
        ("host=127.0.0.1 port=1 password=s3cret", "no connection"),
        ("host=127.0.0.1 port=1 password='s3cret", "the database's address isn't one"),
        ("Driver={x};Server=y;PWD=s3cret", "no such file"),
        ("server=y; Password = 's3cret ;x'; UID=z", "no such file"),
        ("ann:s3cret@h/db", "no such file"),
        ("sqlite:///ann:s3cret@h/db", "no such file"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:?x=s3cret", "in memory"),
    ],
)
def test_what_can_t_be_opened_is_said_without_the_password(given, said):
    with pytest.raises(InputError, match=said) as error:
        schema_text(given)
    assert "s3cret" not in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- PostgreSQL


def test_without_psycopg_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match="psycopg is not installed: pip install"):
        open_database("postgresql://localhost/x")


@pytest.fixture(scope="module")
def run(postgres_url):
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS city")
        connection.execute("CREATE TABLE city (name TEXT, people INT, area NUMERIC)")
        connection.execute("INSERT INTO city VALUES ('austin', 3, 0.10), ('boston', 2, 0.2)")
    with open_database(postgres_url, timeout_s=1, max_rows=5) as database:
        yield database


def stat(process):
    """Parent of a process, and seconds of CPU time: its own, that of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    user, system, of_children, in_system = (int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in fields[11:15])
    return int(fields[1]), user + system, of_children + in_system


def servers_cpu(url):
    """Seconds of CPU time that this run's own server has taken so far, with all its processes; 0 for another's."""
    import psycopg

    if "TEST_POSTGRES_URL" in os.environ:
        return 0.0

    with psycopg.connect(url) as connection:
        [own] = connection.execute("SELECT pg_backend_pid()").fetchone()
        server = stat(own)[0]
    total = sum(stat(server)[1:])
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile
            parent, seconds, _ = stat(folder.name)
            total += seconds if parent == server else 0
    return total


class TestPostgreSQL:
    def test_rows_come_back(self, run):
        assert run("SELECT name, area FROM city ORDER BY 1;") == [
            ("austin", Decimal("0.10")),
            ("boston", Decimal("0.2")),
        ]
        assert run("SELECT count(*) FROM city WHERE name LIKE 'a%'") == [(1,)]

    @pytest.mark.parametrize(
        "program",
        [
            "DELETE FROM city",
            "DROP TABLE city",
            "SELECT 1; DELETE FROM city",
            "SELECT 1; COMMIT; DELETE FROM city",
            "COMMIT",
            "WITH gone AS (DELETE FROM city RETURNING *) SELECT * FROM gone",
            "SET TRANSACTION READ WRITE",
            "COPY city TO '/tmp/x'",
            "SELECT set_config('transaction_read_only', 'off', false)",
            "SELECT name FROM",
            "SELECT * FROM nowhere",
            "SELECT generate_series(1, 6)",
            "SELECT pg_sleep(5)",
            "SELECT pg_terminate_backend(pg_backend_pid())",
            "",
            "SELECT 1 \x00",
        ],
    )
    def test_it_is_only_read(self, run, program):
        with pytest.raises(ProgramError):
            run(program)
        assert run("SELECT count(*) FROM city") == [(2,)]

    def test_values_of_its_own_types(self, run):
        query = "SELECT date '2020-02-01', timestamp '2020-02-01 03:04:05.6', interval '1 day 2 s', '\\xff'::bytea, "
        query += "array[1.5, NULL], '{\"a\": [1]}'::jsonb, time '03:04', 'nan'::float8, '::1'::inet"
        values = [datetime.date(2020, 2, 1), datetime.datetime(2020, 2, 1, 3, 4, 5, 600_000)]
        values += [datetime.timedelta(days=1, seconds=2), b"\xff", [Decimal("1.5"), None], {"a": [1]}]
        [row] = run(query)
        assert row[:7] == (*values, datetime.time(3, 4))
        assert math.isnan(row[7])
        assert row[8] == "::1"

    @pytest.mark.slow
    def test_rows_of_gigabytes_and_time_limits_that_a_query_lifts(self, run, postgres_url):
        programs = [
            "SELECT repeat('x', 100000000) FROM generate_series(1, 40)",
            "SELECT pg_sleep(0.01), set_config('statement_timeout', '0', false) FROM generate_series(1, 500)",
            "SELECT set_config('statement_timeout', '0', false), count(*) FROM generate_series(1, 10000000000)",
            "SELECT sum(length(md5(a::text || b::text))) FROM generate_series(1, 99999) a, generate_series(1, 99999) b",
        ]
        limit = 0.8
        for program in programs:
            before = servers_cpu(postgres_url)
            [told] = attacked(postgres_url, limit, [program])
            assert isinstance(told["rows"], str), program
            assert told["alive"]
            assert told["cpu"] + servers_cpu(postgres_url) - before <= 2 * limit, program
            assert told["kilobytes"] <= (1 << 29) / 1024

    @pytest.mark.slow
    def test_what_keeps_within_the_limits_comes_back(self, run, postgres_url):
        slow = "SELECT pg_sleep(0.001), set_config('statement_timeout', '0', false), n FROM generate_series(1, 250) n"
        with open_database(postgres_url, timeout_s=30) as database:
            assert [row[2] for row in database(slow)] == list(range(1, 251))
            assert database("SELECT repeat('x', 1000000) FROM generate_series(1, 4)") == [("x" * 1_000_000,)] * 4

    def test_advisory_locks_are_released(self, run, postgres_url):
        psycopg = pytest.importorskip("psycopg")
        run("SELECT pg_advisory_lock(7)")
        with psycopg.connect(postgres_url, options="-c statement_timeout=20000") as connection:
            connection.execute("SELECT pg_advisory_lock(7)")

    def test_a_session_setting_does_not_outlive_its_program(self, run):
        run("SELECT set_config('statement_timeout', '0', false)")
        now = "SELECT current_setting('statement_timeout'), current_setting('transaction_read_only')"
        assert run(now) == [("1s", "on")]

    def test_a_connection_that_was_lost_meanwhile_is_renewed(self, run, postgres_url):
        psycopg = pytest.importorskip("psycopg")
        [(number,)] = run("SELECT pg_backend_pid()")
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(%s, 5000)", (number,))
        assert run("SELECT count(*) FROM city") == [(2,)]
        assert run("SELECT pg_backend_pid()") != [(number,)]

    def test_options_in_the_address_stay_but_for_the_limits(self, run, postgres_url):
        own = "-c%20search_path%3Dpg_catalog%20-c%20default_transaction_read_only%3Doff"
        executor = open_database(f"{postgres_url}{'&' if '?' in postgres_url else '?'}options={own}", timeout_s=1)
        now = "SELECT current_setting('search_path'), current_setting('transaction_read_only')"
        assert executor(now) == [("pg_catalog", "on")]

    def test_it_tells_right_answers_from_wrong_ones(self, run, postgres_url):
        reward = make_reward("execution", ProgramSpec(language="sql:postgres"), database=postgres_url)
        gold = "SELECT name FROM city WHERE area < 0.15"
        answers = [
            "SELECT name\nFROM city\nORDER BY area\nLIMIT 1",
            "SELECT name FROM city",
            "SELECT area FROM city",
            None,
        ]
        assert rewards(reward, *[(answer, gold) for answer in answers]) == [1.0, 0.0, 0.0, 0.0]
        assert rewards(reward, ("SELECT 1", "SELECT * FROM nowhere")) == [None]

    def test_no_connection_says_so_without_the_password(self):
        with pytest.raises(InputError, match="no connection to the PostgreSQL database") as error:
            open_database("postgresql://nobody:secret@127.0.0.1:1/x")
        assert "secret" not in str(error.value)

    @pytest.mark.parametrize(
        "value",
        [
            *("10::numeric ^ 5000", "-(10::numeric ^ 5000) + 0.5", "(repeat('[', 900) || repeat(']', 900))::json"),
            *("(repeat('[', 9000) || repeat(']', 9000))::json", "('[' || repeat('1', 5000) || ']')::json"),
            *("'infinity'::timestamp", "timestamp '20000-01-01'", "date '0044-03-15 BC'", "time '24:00'"),
            *("interval '178000000 years'", '\'{"a": "\\ud800"}\'::json', "'NaN'::numeric", "'[1,3)'::int4range"),
            *("row(1, 'a')", "array[[1, 2], [3, NULL]]", "5::money", "B'101'", "gen_random_uuid()", "point '(1, 2)'"),
        ],
    )
    def test_no_value_stops_a_run(self, run, postgres_url, value):
        reward = make_reward("execution", ProgramSpec(language="sql:postgres"), database=postgres_url)
        example = Example("7", "q", "SELECT 1")
        assert list(score(reward, [f"SELECT {value}"], [example], [[]])) == [0.0]
        assert rewards(reward, ("SELECT 1", f"SELECT {value}")) in ([0.0], [None])

    @pytest.mark.slow
    def test_queries_that_the_server_goes_on_computing_are_bounded(self, run, postgres_url):
        endless = "SELECT length(translate(repeat('a', 28000), repeat('b', 28000), ''))"
        with open_database(postgres_url, timeout_s=0.2, max_processes=1) as database:
            with pytest.raises(ProgramError, match=r"longer than 0\.2 s"):
                database(endless)
            begin = time.monotonic()
            with pytest.raises(InputError, match=r"still computes 1 queries that took longer than 0\.2 s: try again"):
                database("SELECT 1")
            assert time.monotonic() - begin < 5
            while time.monotonic() - begin < 120:  # until that one has ended
                with suppress(InputError):
                    assert database("SELECT 1") == [(1,)]
                    break
                time.sleep(0.1)
            assert database("SELECT 2") == [(2,)]
        # A run waits.
        with open_database(postgres_url, timeout_s=0.2, max_processes=1, patience_s=120) as database:
            with pytest.raises(ProgramError):
                database(endless)
            assert database("SELECT 1") == [(1,)]

    @pytest.mark.slow
    def test_psycopg_is_found_where_this_process_finds_it(self, run, postgres_url):
        """Such as in a folder of PYTHONPATH alone: the other process doesn't see that variable."""
        code = "import sys; from langchain_rcr import open_database; print(open_database(sys.argv[1])('SELECT 7'))"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-S", "-c", code, postgres_url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("[(7,)]\n", "")

    def test_a_query_is_cancelled_where_the_server_keeps_no_limit(self, run, postgres_url, monkeypatch):
        """A pooler, for one, may not pass it on."""
        import psycopg

        connect = psycopg.connect
        monkeypatch.setattr(psycopg, "connect", lambda url, options, **more: connect(url, **more))
        monkeypatch.setattr(query_worker, "say", lambda message: None)
        begin = time.monotonic()
        with pytest.raises(query_worker.RefusedError, match=r"longer than 0\.3 s"):
            list(query_worker.postgresql(postgres_url, 0.3)("SELECT pg_sleep(5)"))
        assert time.monotonic() - begin < 3

    def test_a_lock_of_the_server_is_no_fault_of_the_program(self, run, postgres_url):
        import psycopg

        with psycopg.connect(postgres_url) as connection:
            connection.execute("LOCK TABLE city")
            connection.execute("SELECT pg_advisory_lock(8)")
            with pytest.raises(InputError, match="database can't be read: canceling statement due to lock timeout"):
                run("SELECT count(*) FROM city")
            with pytest.raises(ProgramError, match="lock timeout"):
                run("SELECT pg_advisory_lock(8)")
        assert run("SELECT count(*) FROM city") == [(2,)]

    @pytest.mark.slow
    def test_a_query_that_an_administrator_ended_is_run_again(self, run, postgres_url):
        with open_database(postgres_url, timeout_s=20) as database, ThreadPoolExecutor(1) as thread:
            found = thread.submit(database, "SELECT pg_sleep(1), 7")
            end_the_query(postgres_url)
            assert found.result() == [("", 7)]

    @pytest.mark.slow
    def test_a_server_that_is_lost_is_no_fault_of_the_program(self, run, postgres_url, tmp_path_factory):
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        host = conninfo_to_dict(postgres_url)["host"]
        if not host.startswith("/"):
            pytest.skip("it isn't reached through a file")
        socket = tmp_path_factory.mktemp("s") / ".s.PGSQL.5432"
        socket.symlink_to(Path(host) / socket.name)
        address = make_conninfo(postgres_url, host=str(socket.parent))
        with open_database(address, timeout_s=20) as database, ThreadPoolExecutor(1) as thread:
            found = thread.submit(database, "SELECT pg_sleep(3)")
            wait_for_the_query(postgres_url)
            socket.unlink()
            end_the_query(postgres_url)
            with pytest.raises(InputError, match="no connection to the PostgreSQL database"):
                found.result()


def wait_for_the_query(url, what="pid"):
    """The numbers of the backends that run a program."""
    import psycopg

    active = (
        f"SELECT {what} FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'FETCH%' AND wait_event = 'PgSleep'"
    )
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(200):
            if found := connection.execute(active).fetchall():
                return found
            time.sleep(0.05)
    raise AssertionError("no query began")


def end_the_query(url):
    wait_for_the_query(url, "pg_terminate_backend(pid)")
