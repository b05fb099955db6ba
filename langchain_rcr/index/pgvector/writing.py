"""Examples on their way into a pool's table."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.types.json import Jsonb
from psycopg.types.numeric import Int8

from langchain_rcr.errors import PoolError
from langchain_rcr.index.base import PoolVectors, Row, check_vectors
from langchain_rcr.index.pgvector.statements import shown, storable, to_json

Connection = AsyncConnection[tuple[Any, ...]]

_REFUSED = (psycopg.DataError, psycopg.errors.ProgramLimitExceeded, psycopg.errors.StatementTooComplex)


@dataclass(frozen=True, slots=True)
class Packed:
    """A row as it is written.

    Args:
        digest: of the id.
        id: the example's id.
        example: its fields, as JSON.
        program: see `Row`.
    """

    digest: bytes
    id: str
    example: str
    program: int


def digest_of(example_id: str) -> bytes:
    """What ids are told apart by in the index of the table, which can't hold long texts."""
    return hashlib.sha256(example_id.encode()).digest()


def pack(rows: Sequence[Row], vectors: PoolVectors, dim: int) -> list[Packed]:
    """Make examples ready, and check all that can be checked without the database.

    Raises:
        PoolError: an id comes twice, or PostgreSQL can't keep it or a field.
        InputError: vectors of another number or length, or with numbers that are not finite.
    """
    check_vectors(len(rows), vectors, dim)
    packed, seen = [], set()
    for row in rows:
        if not storable(row.id):
            msg = f"the id {shown(row.id)} contains a NUL character or a lone surrogate: PostgreSQL can't keep it"
            raise PoolError(msg)
        if row.id in seen:
            msg = f"the id {shown(row.id)} is taken by another example"
            raise PoolError(msg)
        seen.add(row.id)
        packed.append(Packed(digest_of(row.id), row.id, to_json(row.example, row.id), row.program))
    return packed


async def refuse_taken(connection: Connection, table: sql.Composable, digests: list[bytes]) -> None:
    """Make sure that none of these ids is there.

    Raises:
        PoolError: some are; the message names a few.
    """
    query = sql.SQL("SELECT left(id, 200) FROM {} WHERE digest = ANY (%s) ORDER BY key LIMIT 4").format(table)
    cursor = await connection.execute(query, [digests])
    taken = [shown(one) for (one,) in await cursor.fetchall()]
    if taken:
        which = f"the id {taken[0]} is" if len(taken) == 1 else f"the ids {', '.join(taken[:3])} are"
        msg = f"{which} taken by another example{', and so are more' if len(taken) > 3 else ''}"
        raise PoolError(msg)


async def delete_rows(connection: Connection, table: sql.Composable, digests: list[bytes]) -> int:
    """Delete what has one of these ids; returns how many there were."""
    cursor = await connection.execute(sql.SQL("DELETE FROM {} WHERE digest = ANY (%s)").format(table), [digests])
    return cursor.rowcount


async def copy_rows(
    connection: Connection, table: sql.Composable, packed: Sequence[Packed], vectors: PoolVectors
) -> None:
    """Write examples and vectors; their keys are numbered in this order.

    Raises:
        PoolError: PostgreSQL refuses one of them.
    """
    columns = "COPY {} (digest, id, example, program, candidate, context) FROM STDIN (FORMAT BINARY)"
    try:
        async with connection.cursor() as cursor, cursor.copy(sql.SQL(columns).format(table)) as copy:
            for row, candidate, context in zip(packed, vectors.candidate, vectors.context, strict=True):
                example = Jsonb(row.example, dumps=str)
                await copy.write_row((row.digest, row.id, example, Int8(row.program), candidate, context))
    except _REFUSED as error:
        msg = f"PostgreSQL can't keep one of the examples: {' '.join(str(error).split())}"
        raise PoolError(msg) from None
