"""The schema of a database as a prompt shows it: tables, columns, keys and sample values of SQLite and PostgreSQL."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from langchain_rcr import InputError, schema_text


def test_the_schema_of_postgresql_has_tables_columns_and_keys(postgres_url: str) -> None:
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute('DROP TABLE IF EXISTS city, river, "Bay"')
        connection.execute('CREATE TABLE river (id int PRIMARY KEY, name text, "the length" numeric(6, 1))')
        connection.execute("CREATE TABLE city (name text, river_id int REFERENCES river (id))")
        connection.execute('CREATE TABLE "Bay" (id int PRIMARY KEY) PARTITION BY RANGE (id)')
        connection.execute('CREATE TABLE "Bay of 2024" PARTITION OF "Bay" FOR VALUES FROM (0) TO (9)')
    try:
        # Other tests keep tables on this server.
        ours = ("CREATE TABLE city ", "CREATE TABLE river ", 'CREATE TABLE "Bay')
        assert [line for line in schema_text(postgres_url).splitlines() if line.startswith(ours)] == [
            'CREATE TABLE "Bay" (id integer, PRIMARY KEY (id));',
            "CREATE TABLE city (name text, river_id integer, FOREIGN KEY (river_id) REFERENCES river(id));",
            'CREATE TABLE river (id integer, name text, "the length" numeric(6,1), PRIMARY KEY (id));',
        ]
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute('DROP TABLE city, river, "Bay"')


@pytest.mark.slow
def test_a_schema_may_have_any_name(postgres_url: str) -> None:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    given = conninfo_to_dict(postgres_url).get("options") or ""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        for name in ("MySchema", "my schema", 'my"schema', "select"):
            quoted = f'"{name.replace(chr(34), chr(34) * 2)}"'
            connection.execute(f"CREATE SCHEMA {quoted} CREATE TABLE t (a int)")  # type: ignore[call-overload]
            escaped = quoted.replace(" ", "\\ ")
            address = make_conninfo(postgres_url, options=f"{given} -c search_path={escaped}")
            try:
                assert schema_text(address) == "CREATE TABLE t (a integer);"
            finally:
                connection.execute(f"DROP SCHEMA {quoted} CASCADE")  # type: ignore[call-overload]


def test_the_user_s_own_tables_are_shown_whatever_they_are_called(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE sqlitelog (id INTEGER PRIMARY KEY AUTOINCREMENT)")  # makes sqlite_sequence
        database.execute("CREATE TABLE SQLite2 (a)")
    expected = "CREATE TABLE sqlitelog (id INTEGER PRIMARY KEY AUTOINCREMENT);\nCREATE TABLE SQLite2 (a);"
    assert schema_text(f"sqlite:///{path}") == schema_text(path) == expected


def test_tables_of_search_indexes_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    shown = ["CREATE TABLE words_data (a)", 'CREATE VIRTUAL TABLE "fi""ve" USING fts5 (a)']
    shown += ["CREATE VIRTUAL TABLE four USING fts4 (a)", "CREATE VIRTUAL TABLE box USING rtree (id, a, b)"]
    with closing(sqlite3.connect(path)) as database:
        database.executescript(";".join(shown))
    assert schema_text(path).splitlines() == [f"{line};" for line in shown]


def test_a_postgresql_schema_without_tables_says_so(postgres_url: str) -> None:
    nowhere = f"{postgres_url}{'&' if '?' in postgres_url else '?'}options=-csearch_path%3Dnowhere"
    with pytest.raises(InputError, match="no tables to write queries for: the first schema of the search path"):
        schema_text(nowhere)


def test_values_are_shown_where_they_are_short(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute('CREATE TABLE "a ""b" (n, t, long, none)')
        rows = [(1, "it's", "x" * 99, None), (1.5, "it's", "y" * 99, None), (2, "a\\b\nc", b"blob", None)]
        database.executemany('INSERT INTO "a ""b" VALUES (?, ?, ?, ?)', rows)
        database.execute("CREATE TABLE empty (x)")
        database.commit()
    lines = schema_text(path, samples=2).splitlines()
    assert lines[1] == r"-- values: 1, 1.5 | 'it''s', 'a\\b\nc' |  | "
    assert lines[2:] == ["CREATE TABLE empty (x);"]


def test_large_values_don_t_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE page (title, scan)")
        database.executemany("INSERT INTO page VALUES (?, zeroblob(1000000))", [(f"p{n}",) for n in range(20)])
        database.commit()
    assert schema_text(path, samples=2).splitlines()[1:] == ["-- values: 'p0', 'p1' | "]


def test_values_of_postgresql_s_own_types_are_shown_where_they_are_plain(postgres_url: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS typed CASCADE; CREATE SCHEMA typed; SET search_path = typed")
        connection.execute("CREATE TABLE bill (paid numeric, due date, notes jsonb, parts int[])")
        rows = "(1.50, '2020-02-03', '{\"a\": 1}', '{1,2}'), (1.50, '2020-02-04', '{}', '{}')"
        connection.execute(f"INSERT INTO bill VALUES {rows}")
    typed = f"{postgres_url}{'&' if '?' in postgres_url else '?'}options=-csearch_path%3Dtyped"
    assert schema_text(typed, samples=2).splitlines()[1] == "-- values: 1.50 | '2020-02-03', '2020-02-04' |  | "
