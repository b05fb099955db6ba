"""Rewards by running programs: results compared, and what a program may not do to the database."""

import datetime
import json
import math
import os
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from rcr_trainer.data import text2sql_split
from rcr_trainer.errors import ConfigError
from rcr_trainer.rewards import ProgramError, RewardError, check_reward, execution, make_reward, score
from rcr_trainer.rewards.execution import Result, canonical

from langchain_rcr.databases import Database, open_database
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec(language="sql:sqlite")
DATA = Path(os.environ.get("RCR_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))


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
        ("SELECT people, name FROM city", "SELECT name, people FROM city", 0.0),
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


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (1, Decimal("1.00"), True),
        (True, 1, True),
        (np.int64(3), 3, True),
        (np.float32(0.5), Fraction(1, 2), True),
        (0.1 + 0.2, 0.3, True),
        (1234567890.1, 1234567890.2, False),
        (12345678901, 12345678902, False),
        (2**60, 2**60 + 1, False),
        (math.nan, float("nan"), True),
        (Decimal("NaN"), math.nan, True),
        (math.inf, Decimal("Infinity"), True),
        (1, "1", False),
        ("a", b"a", False),
        (None, "None", False),
        (-0.0, 0, True),
        ([1, 2], (1, 2), True),
        ({"a": 1, "b": [2]}, {"b": [2.0], "a": 1}, True),
        ({1, 2}, frozenset({2, 1}), True),
        (("a,b",), ("a", "b"), False),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 1), True),
    ],
)
def test_what_counts_as_the_same_value(one, other, same):
    assert (canonical(one) == canonical(other)) is same


def test_results_are_lists_but_for_their_order_or_tuples_with_it():
    assert Result.of([1, 2]).rows == Result.of([2, 1]).rows
    assert Result.of([1, 2]).in_order != Result.of([2, 1]).in_order
    assert Result.of((1, 2)).rows != Result.of((2, 1)).rows
    assert Result.of([1, 1, 2]).rows != Result.of([1, 2, 2]).rows
    assert Result.of(["a", "b"]).rows != Result.of(["ab"]).rows
    assert Result.of("\ud800").rows  # a lone surrogate has no UTF-8


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

    from rcr_trainer.data import Example

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
from langchain_rcr.databases import Database
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
