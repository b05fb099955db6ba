"""The pool in PostgreSQL with pgvector: shared by many machines, several pools per database, filters in SQL."""

from langchain_rcr.errors import MissingExtraError

try:
    import pgvector.psycopg  # noqa: F401 - imports psycopg, too
except ImportError:
    raise MissingExtraError("psycopg", "pgvector") from None

from langchain_rcr.index.pgvector.engine import PgVectorIndex

__all__ = ["PgVectorIndex"]
