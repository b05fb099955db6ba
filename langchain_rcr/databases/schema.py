"""What a prompt says about a database: its CREATE TABLE statements, with some of the values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from langchain_rcr.databases.database import address_of, check_limits, open_database
from langchain_rcr.errors import InputError, ProgramError

_ROWS = 50
"""How many of a table's first rows are searched for sample values."""
_LONGEST = 40
"""Characters of a sample value; questions don't name values from columns with longer ones."""
# Names quoted for SQL, and statements.
_SQLITE = """
SELECT '"' || replace(name, '"', '""') || '"', sql FROM sqlite_master
WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite^_%' ESCAPE '^' ORDER BY rowid
"""
# Columns in order, then keys.
_POSTGRESQL = """
SELECT name, 'CREATE TABLE ' || name || ' (' || string_agg(line, ', ' ORDER BY is_key, number) || ')' FROM (
SELECT quote_ident(c.relname), 0, a.attnum, quote_ident(a.attname) || ' ' || format_type(a.atttypid, a.atttypmod)
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname = current_schema() AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT quote_ident(c.relname), 1, row_number() OVER (PARTITION BY c.oid ORDER BY k.contype DESC, k.conname),
    pg_get_constraintdef(k.oid)
FROM pg_class c JOIN pg_constraint k ON k.conrelid = c.oid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE k.contype IN ('p', 'f') AND n.nspname = current_schema()
) AS lines (name, is_key, number, line) GROUP BY name ORDER BY name
"""


def schema_text(database: str | Path, *, samples: int = 0) -> str:
    """The CREATE TABLE statements of a database, for a prompt.

    Args:
        database: as in `text_to_sql_chain`, but a single one; in PostgreSQL, the first schema of the search path.
        samples: at most this many values per column, in a comment below its table; short ones, from the first rows.

    Raises:
        InputError: it can't be opened, or its schema is too large or takes too long to read.
        MissingExtraError: PostgreSQL without psycopg.
    """
    check_limits(least=0, samples=samples)
    with open_database(database) as execute:
        try:
            tables = execute(_POSTGRESQL if address_of(database)[1] else _SQLITE)
        except ProgramError as error:
            raise InputError(f"the schema can't be read: {error}; write down the tables that matter") from error
        return "\n".join(f"{text};{sampled(execute, name, samples) if samples else ''}" for name, text in tables)


def sampled(execute: Callable[[str], Any], table: str, samples: int) -> str:
    """A line with values of each column of a table (its name quoted for SQL); empty if it can't be read or has none."""
    try:
        rows = execute(f"SELECT * FROM {table} LIMIT {_ROWS}")  # noqa: S608 — quoted
    except ProgramError:
        return ""
    columns = []
    for values in zip(*rows, strict=True):
        plain = [str(value) if isinstance(value, date | time) else value for value in values]
        known = dict.fromkeys(value for value in plain if isinstance(value, int | float | str | Decimal))
        texts = [str(value) if isinstance(value, Decimal) else repr(value) for value in known]
        columns.append(", ".join([text for text in texts if len(text) <= _LONGEST][:samples]))
    return f"\n-- values: {' | '.join(columns)}" if any(columns) else ""


def quoted(name: str) -> str:
    """A name quoted for SQL, whatever it contains."""
    return '"' + name.replace('"', '""') + '"'
