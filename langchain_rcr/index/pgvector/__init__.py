"""The pool in PostgreSQL with pgvector: shared by many machines, several pools per database, filters in SQL."""

from langchain_rcr.index.pgvector.engine import PgVectorIndex

__all__ = ["PgVectorIndex"]
