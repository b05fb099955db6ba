"""What a prompt says about a database: its CREATE TABLE statements, with some of the values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from langchain_rcr.basics.section import check_limits
from langchain_rcr.databases.database import address_of, open_database
from langchain_rcr.errors import InputError, ProgramError

_ROWS = (50, 5, 1)
"""How many of a table's first rows are searched for sample values; fewer if these are too large."""
_LONGEST = 40
"""Characters of a sample value; questions don't name values from columns with longer ones."""
# Names quoted for SQL, and statements; not the tables in which full-text and spatial indexes keep their data.
_SQLITE = """
SELECT '"' || replace(name, '"', '""') || '"', sql FROM sqlite_master
WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite^_%' ESCAPE '^' AND name NOT IN (
    SELECT virtual.name || column1 FROM sqlite_master AS virtual, (VALUES ('_data'), ('_idx'), ('_content'),
        ('_docsize'), ('_config'), ('_segments'), ('_segdir'), ('_stat'), ('_node'), ('_rowid'), ('_parent'))
    WHERE virtual.sql LIKE 'create virtual table%'
) ORDER BY rowid
"""
# What the role may read, columns in order, then keys; a partition's rows are in its table.
_POSTGRESQL = """
WITH tables AS (
    SELECT oid, quote_ident(relname) AS name FROM pg_class
    WHERE relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT relispartition
        AND relnamespace = to_regnamespace(quote_ident(current_schema())) AND has_any_column_privilege(oid, 'SELECT')
)
SELECT '(SELECT ' || string_agg(own, ', ' ORDER BY number) || ' FROM ' || name || ') AS readable',
    'CREATE TABLE ' || name || ' (' || string_agg(line, ', ' ORDER BY is_key, number) || ')' FROM (
SELECT name, 0, attnum, quote_ident(attname) || ' ' || format_type(atttypid, atttypmod), quote_ident(attname)
FROM tables JOIN pg_attribute ON attrelid = oid
WHERE attnum > 0 AND NOT attisdropped AND has_column_privilege(oid, attnum, 'SELECT')
UNION ALL
SELECT name, 1, row_number() OVER (PARTITION BY conrelid ORDER BY contype DESC, conname), pg_get_constraintdef(k.oid),
    NULL
FROM tables JOIN pg_constraint k ON conrelid = tables.oid WHERE contype IN ('p', 'f')
) AS lines (name, is_key, number, line, own) GROUP BY name ORDER BY name
"""


def schema_text(database: str | Path, *, samples: int = 0) -> str:
    """The CREATE TABLE statements of a database, for a prompt.

    Args:
        database: as in `text_to_sql_chain`, but a single one; in PostgreSQL, what the role may read in the first schema
            of the search path.
        samples: at most this many values per column, in a comment below its table; short ones, from the first rows.

    Raises:
        InputError: it can't be opened, has no tables, or its schema is too large or takes too long to read.
        MissingExtraError: PostgreSQL without psycopg.
    """
    check_limits(least=0, samples=samples)
    postgres = address_of(database)[1]
    with open_database(database) as execute:
        try:
            tables = execute(_POSTGRESQL if postgres else _SQLITE)
        except ProgramError as error:
            raise InputError(f"the schema can't be read: {error}; give the tables that matter as schema=") from error
        if not tables:
            where = "the first schema of the search path has none that this role may read" if postgres else database
            raise InputError(f"no tables to write queries for: {where}")
        return "\n".join(f"{text};{sampled(execute, name, samples) if samples else ''}" for name, text in tables)


def sampled(execute: Callable[[str], Any], table: str, samples: int) -> str:
    """A line with values of each column of a table (its name quoted for SQL); empty if it can't be read or has none."""
    rows, columns = [], []
    for count in _ROWS:
        with suppress(ProgramError):
            rows = execute(f"SELECT * FROM {table} LIMIT {count}")  # noqa: S608 — quoted
            break
    for values in zip(*rows, strict=True):
        plain = [str(value) if isinstance(value, date | time) else value for value in values]
        known = dict.fromkeys(value for value in plain if isinstance(value, int | float | str | Decimal))
        texts = [_literal(value) for value in known]
        columns.append(", ".join([text for text in texts if len(text) <= _LONGEST][:samples]))
    return f"\n-- values: {' | '.join(columns)}" if any(columns) else ""


def _literal(value: float | str | Decimal) -> str:
    """A value as a query writes it; control characters are escaped, to keep it on its line."""
    if isinstance(value, str) and value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    return str(value) if isinstance(value, Decimal) else repr(value)


def quoted(name: str) -> str:
    """A name quoted for SQL, whatever it contains."""
    return '"' + name.replace('"', '""') + '"'
