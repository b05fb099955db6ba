"""The pool in PostgreSQL, by pgvector: shared by many machines, several pools in one database, filters in SQL."""

from langchain_rcr.index.pgvector.engine import PgVectorIndex

__all__ = ["PgVectorIndex"]
