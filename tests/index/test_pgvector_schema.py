"""The tables in PostgreSQL: from nothing, from an older format, from a newer one; what a role may not do."""

import os
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from plain_reader import reading

from langchain_rcr.errors import CheckpointError, EngineError
from langchain_rcr.index.base import PoolVectors, Row

psycopg = pytest.importorskip("psycopg")
from psycopg.conninfo import conninfo_to_dict, make_conninfo  # noqa: E402

from langchain_rcr.index.pgvector import PgVectorIndex  # noqa: E402

DIM = 4


def fill(index, *ids):
    vectors = np.random.default_rng(0).normal(size=(2, len(ids), DIM)).astype(np.float32)
    index.bind("f", DIM)
    index.add([Row(one, {"source": one}, 0) for one in ids], PoolVectors(*vectors))


@pytest.fixture
def admin(postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def schema(admin):
    """The name of a schema that isn't there yet."""
    name = f'new "{uuid.uuid4().hex}" $1 \'{{}}'
    yield name
    admin.execute(psycopg.sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(psycopg.sql.Identifier(name)))


def table(schema, name):
    return psycopg.sql.Identifier(schema, name)


@pytest.mark.slow
def test_many_begin_at_once_with_nothing(postgres_url, admin, schema):
    indexes = [PgVectorIndex(postgres_url, f"p{n % 2}", schema=schema) for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda index: index.bind("f", DIM), indexes))
    fill(indexes[0], "a")
    assert [index.count() for index in indexes] == [1, 0] * 4
    for index in indexes:
        index.close()


def test_a_newer_format_is_refused(postgres_url, admin, schema):
    index = PgVectorIndex(postgres_url, schema=schema)
    fill(index, "a", "b")
    admin.execute(psycopg.sql.SQL("UPDATE {} SET format = 2").format(table(schema, "rcr_pools")))
    for call in (index.count, lambda: index.bind("f", DIM), lambda: fill(index, "c"), reading(index).__enter__):
        with pytest.raises(CheckpointError, match=r"has format 2, from a newer langchain-rcr; this one knows up to 1"):
            call()
    index.close()


@pytest.fixture
def database(admin, postgres_url):
    """Makes databases, and tells how to reach them as a role that may do nothing but connect."""
    if os.environ.get("TEST_POSTGRES_URL"):
        pytest.skip("no databases and roles are made on the server of TEST_POSTGRES_URL")
    made, role = [], f"limited_{uuid.uuid4().hex}"
    admin.execute(f"CREATE ROLE {role} LOGIN")

    def build(options=""):
        name = f"db_{uuid.uuid4().hex}"
        admin.execute(f"CREATE DATABASE {name} {options}")
        made.append(name)
        parts = conninfo_to_dict(postgres_url) | {"dbname": name}
        return make_conninfo(**parts), make_conninfo(**parts | {"user": role}), role

    yield build
    for name in made:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    admin.execute(f"DROP ROLE {role}")


@pytest.mark.slow
def test_an_extension_that_is_made_again(database):
    """Its type has another number then, which connections from before must not go on using."""
    owner, *_ = database()
    index, state = PgVectorIndex(owner, schema="s"), np.ones((1, DIM), dtype=np.float32)
    fill(index, "a", "b")

    def search_thrice():
        with reading(index) as one, reading(index) as two, reading(index) as three:
            for reader in (one, two, three):
                keys, _ = reader.search(state, 2, [np.empty(0, dtype=np.int64)])
                assert sorted(row.id for row in reader.rows(keys[0])) == ["a", "b"]

    search_thrice()
    with psycopg.connect(owner, autocommit=True) as connection:
        connection.execute("DROP SCHEMA s CASCADE")
        connection.execute("DROP EXTENSION vector CASCADE; CREATE EXTENSION vector")
    with pytest.raises(EngineError, match="does not exist"):
        fill(index, "c")
    fill(index, "a", "b")
    search_thrice()
    index.close()


def test_roles_that_may_not(database):
    owner, limited, role = database()
    with pytest.raises(
        EngineError, match=r"permission denied .*; this .*: an administrator must .* run CREATE EXTENSION vector"
    ):
        PgVectorIndex(limited).bind("f", DIM)
    with psycopg.connect(owner, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
        with pytest.raises(EngineError, match="permission denied for schema public"):
            PgVectorIndex(limited).bind("f", DIM)
        index = PgVectorIndex(owner, kind="hnsw")
        fill(index, "a", "b")
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        # One that only reads may bind and search.
        reader_only = PgVectorIndex(limited, kind="hnsw")
        reader_only.bind("f", DIM)
        with reading(reader_only) as reader:
            keys, _ = reader.search(np.ones((1, DIM), dtype=np.float32), 2, [np.empty(0, dtype=np.int64)])
            assert sorted(row.id for row in reader.rows(keys[0])) == ["a", "b"]
        with pytest.raises(EngineError, match="permission denied for table rcr_pools"):
            fill(reader_only, "c")
        with pytest.raises(EngineError, match="permission denied for table rcr_pools"):
            reader_only.delete(["a"])
        assert index.count() == 2
        connection.execute(f"DROP OWNED BY {role}")
    index.close()
    reader_only.close()


def test_a_search_path_without_schema(database):
    owner, *_ = database()
    with pytest.raises(EngineError, match="no schema has been selected to create in"):
        PgVectorIndex(make_conninfo(owner, options="-csearch_path=nowhere")).bind("f", DIM)
