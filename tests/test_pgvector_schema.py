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
from langchain_rcr.index.pgvector import tables as pgvector_tables  # noqa: E402

DIM = 4
NEXT = (*pgvector_tables.MIGRATIONS, "ALTER TABLE {schema}.rcr_pools ADD COLUMN note text NOT NULL DEFAULT 'new'")


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


def versions(admin, schema):
    query = psycopg.sql.SQL("SELECT version FROM {} ORDER BY 1").format(table(schema, "rcr_format"))
    return [version for (version,) in admin.execute(query).fetchall()]


@pytest.mark.slow
def test_many_begin_at_once_with_nothing(postgres_url, admin, schema):
    indexes = [PgVectorIndex(postgres_url, f"p{n % 2}", schema=schema) for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda index: index.bind("f", DIM), indexes))
    assert versions(admin, schema) == [1]
    fill(indexes[0], "a")
    assert [index.count() for index in indexes] == [1, 0] * 4
    for index in indexes:
        index.close()


def test_a_schema_without_a_format_is_format_0(postgres_url, admin, schema):
    admin.execute(psycopg.sql.SQL("CREATE SCHEMA {}").format(psycopg.sql.Identifier(schema)))
    make = "CREATE TABLE {} (version integer PRIMARY KEY, applied timestamptz NOT NULL DEFAULT now())"
    admin.execute(psycopg.sql.SQL(make).format(table(schema, "rcr_format")))
    index = PgVectorIndex(postgres_url, schema=schema)
    fill(index, "a")
    assert versions(admin, schema) == [1]
    index.close()


def test_an_older_format_is_brought_forward_and_a_newer_one_refused(postgres_url, admin, schema, monkeypatch):
    old = PgVectorIndex(postgres_url, schema=schema)
    fill(old, "a", "b")
    monkeypatch.setattr(pgvector_tables, "MIGRATIONS", NEXT)
    new = PgVectorIndex(postgres_url, schema=schema)
    assert new.count() == 2
    assert versions(admin, schema) == [1, 2]
    assert admin.execute(psycopg.sql.SQL("SELECT note FROM {}").format(table(schema, "rcr_pools"))).fetchone() == (
        "new",
    )
    monkeypatch.undo()
    late = PgVectorIndex(postgres_url, schema=schema)
    for call in (late.count, lambda: late.bind("f", DIM), reading(late).__enter__):
        with pytest.raises(CheckpointError, match=r"have format 2, from a newer langchain-rcr; this one knows up to 1"):
            call()
    for index in (old, new, late):
        index.close()


def test_a_step_that_fails_leaves_the_old_format(postgres_url, admin, schema, monkeypatch):
    index = PgVectorIndex(postgres_url, schema=schema)
    fill(index, "a")
    index.close()
    monkeypatch.setattr(pgvector_tables, "MIGRATIONS", (*NEXT, "SELECT 1 / 0"))
    with pytest.raises(EngineError, match="division by zero"):
        index.count()
    assert versions(admin, schema) == [1]
    monkeypatch.undo()
    assert index.count() == 1
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
@pytest.mark.parametrize("tables_too", [True, False])
def test_an_extension_that_is_made_again(database, tables_too):
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
        if tables_too:
            connection.execute("DROP SCHEMA s CASCADE")
        connection.execute("DROP EXTENSION vector CASCADE; CREATE EXTENSION vector")
    with pytest.raises(EngineError, match="does not exist"):
        fill(index, "c")
    if not tables_too:  # the vectors are gone and the examples left
        assert index.delete(["a", "b"]) == 2
    fill(index, "a", "b")
    search_thrice()
    index.close()


def test_roles_that_may_not(database):
    owner, limited, role = database()
    with pytest.raises(
        EngineError, match=r"an administrator must .* run CREATE EXTENSION vector; here \(permission denied"
    ):
        PgVectorIndex(limited).count()
    with psycopg.connect(owner, autocommit=True) as connection:
        # Where neither the search path nor the tables' schema finds it.
        connection.execute("CREATE SCHEMA elsewhere; CREATE EXTENSION vector SCHEMA elsewhere")
        connection.execute(f"GRANT USAGE ON SCHEMA elsewhere TO {role}")
        with pytest.raises(EngineError, match="permission denied for schema public"):
            PgVectorIndex(limited).count()
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


def test_a_database_that_is_not_unicode(database):
    owner, *_ = database("ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    with pytest.raises(EngineError, match="encoding is LATIN1, and examples may hold any text: it must be UTF8"):
        PgVectorIndex(owner).count()


def test_a_search_path_without_schema(database):
    owner, *_ = database()
    with pytest.raises(EngineError, match="names no schema that is there: pass schema="):
        PgVectorIndex(make_conninfo(owner, options="-csearch_path=nowhere")).count()
