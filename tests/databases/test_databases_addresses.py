"""Addresses of databases: which are taken, and what is said of the others."""

from pathlib import Path

import pytest

from langchain_rcr import schema_text
from langchain_rcr.databases.database import address_of, open_database
from langchain_rcr.errors import InputError, MissingExtraError


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


def test_without_psycopg_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match="psycopg is not installed: pip install"):
        open_database("postgresql://localhost/x")
