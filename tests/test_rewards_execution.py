"""Rewards by running programs: results compared, and what a program may not do to the database."""

import datetime
import math
import os
import sqlite3
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from rcr_trainer.data import text2sql_split
from rcr_trainer.errors import ConfigError
from rcr_trainer.rewards import ProgramError, RewardError, check_reward, execution, make_reward, score
from rcr_trainer.rewards.execution import Result, canonical

from langchain_rcr.databases import SQLite, open_database
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
    run = SQLite(database)
    with pytest.raises(ProgramError):
        run(program)
    assert run("SELECT count(*) FROM city") == [(3,)]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_program_that_never_ends_is_stopped(database):
    run = SQLite(database, timeout_s=0.2)
    began = time.perf_counter()
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(ProgramError, match="interrupted"):
        run(endless)
    assert time.perf_counter() - began < 5
    assert run("SELECT 1") == [(1,)]


def test_too_many_rows_and_too_large_a_value(database):
    run = SQLite(database, max_rows=2)
    assert len(run("SELECT name FROM city LIMIT 2")) == 2
    with pytest.raises(ProgramError, match="more than 2 rows"):
        run("SELECT name FROM city")
    with pytest.raises(ProgramError, match="too big"):
        run("SELECT zeroblob(100000000)")


def test_text_that_is_no_utf8_is_read(tmp_path):
    path = tmp_path / "x.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript("CREATE TABLE t (a TEXT); INSERT INTO t VALUES (CAST(x'ff61' AS TEXT));")
    connection.close()
    assert SQLite(path)("SELECT a FROM t") == [("\ufffda",)]


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


class TestPostgreSQL:
    @pytest.fixture
    def run(self, postgres_url):
        psycopg = pytest.importorskip("psycopg")
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("DROP TABLE IF EXISTS city")
            connection.execute("CREATE TABLE city (name TEXT, people INT, area NUMERIC)")
            connection.execute("INSERT INTO city VALUES ('austin', 3, 0.10), ('boston', 2, 0.2)")
        return open_database(postgres_url, timeout_s=1, max_rows=5)

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
