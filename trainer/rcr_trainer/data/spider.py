"""Spider's questions on many databases (Yu et al., 2018), in its own split or Spider-SSP's (Shaw et al., 2021)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from langchain_rcr.databases.database import open_database
from langchain_rcr.databases.many import LAYOUT
from langchain_rcr.databases.schema import quoted, sampled
from langchain_rcr.errors import ProgramError
from rcr_trainer.data.examples import Example, Split, read_json_as
from rcr_trainer.errors import DataError

KINDS = ("random_1", "template_1", "tmcd_1", "length_1", "dev")
"""Spider-SSP's, and `dev`, Spider's own: its test questions are of databases without training questions."""


class _Row(BaseModel):
    question: Annotated[str, Field(min_length=1)]
    query: Annotated[str, Field(min_length=1)]
    db_id: Annotated[str, Field(pattern=r"^\w+$")]


class _Schema(BaseModel):
    """Tables and columns by number; column 0 is `*`, of no table."""

    db_id: str
    table_names_original: list[str]
    column_names_original: list[tuple[int, str]]
    column_types: list[str]
    primary_keys: list[int | list[int]]
    foreign_keys: list[tuple[int, int]]


def spider_split(
    folder: str | Path, kind: str = "template_1", databases: str | Path | None = None, samples: int = 0
) -> Split:
    """Read Spider's questions in one of its splits.

    Left out are questions of missing databases, and those whose query reads a table without rows, on which many queries
    give the same result.

    Args:
        folder: with `train_spider.json` and `tables.json` as Spider has them. For `dev`, also `dev.json`; otherwise
            `ssp/databases.json` and `ssp/KIND.json`, whose numbers count the training questions of these databases.
        kind: one of KINDS.
        databases: the folder with `DB/DB.sqlite`; None: `database` in `folder`.
        samples: most values of each column that the schema shows, as in `schema_text`.

    Returns:
        The split, without development questions. An id is the question's place in its file, from 0; in `dev.json` "dev"
        precedes it. Fields are `db_id` and `schema`, the CREATE TABLE statements. `meta` names what is missing:
        `missing_databases`, `empty_tables`, and `left_out`, the number of questions by reason.

    Raises:
        DataError: a file is missing or not of that form.
        InputError: a database can't be opened.
    """
    folder = Path(folder)
    schemas = {schema.db_id: schema for schema in read_json_as(list[_Schema], folder / "tables.json", "Spider's")}
    rows = _parts(folder, kind)
    where = Path(databases or folder / "database")
    if not where.is_dir():
        raise DataError(f"{where} is not a folder: unpack Spider's databases there, {LAYOUT.format(db_id='DB')}")
    names = sorted({row.db_id for part in rows.values() for row in part.values()})
    if unknown := [name for name in names if name not in schemas]:
        raise DataError(f"{folder / 'tables.json'} has no database {unknown[0]!r}, which a question names")
    missing = [name for name in names if not (where / LAYOUT.format(db_id=name)).is_file()]
    found = {
        name: _described(where / LAYOUT.format(db_id=name), statements_of(schemas[name]), samples)
        for name in names
        if name not in missing
    }
    left_out: Counter[str] = Counter()
    parts: dict[str, list[Example]] = {"train": [], "test": []}
    for part, examples in parts.items():
        for identifier, row in rows[part].items():
            words = set(re.findall(r"\w+", row.query.lower()))
            if row.db_id in missing:
                left_out["their database is missing"] += 1
            elif words & {table.lower() for table in found[row.db_id][1]}:
                left_out["their query reads a table without rows"] += 1
            else:
                fields = {"db_id": row.db_id, "schema": found[row.db_id][0]}
                examples.append(Example(identifier, row.question.strip(), row.query.strip(), fields))
    tables = [f"{name}.{table}" for name, (_, empty) in found.items() for table in empty]
    about = {"missing_databases": missing, "empty_tables": tables, "left_out": dict(left_out)}
    how = "Spider's own split" if kind == "dev" else f"the {kind} split of Spider-SSP"
    meta = {"task": "spider", "split": kind, "how": how, **about}
    return Split(f"spider-{kind}", parts["train"], [], parts["test"], meta)


def _parts(folder: Path, kind: str) -> dict[str, dict[str, _Row]]:
    rows = [*enumerate(read_json_as(list[_Row], folder / "train_spider.json", "Spider's"))]
    if kind == "dev":
        test = read_json_as(list[_Row], folder / "dev.json", "Spider's")
        return {"train": {str(n): row for n, row in rows}, "test": {f"dev{n}": row for n, row in enumerate(test)}}
    within = set(read_json_as(list[str], folder / "ssp" / "databases.json", "Spider's"))
    numbers = read_json_as(dict[str, list[int]], folder / "ssp" / f"{kind}.json", "Spider's")
    asked = [(str(n), row) for n, row in rows if row.db_id in within]
    for part, of in numbers.items():
        if out := [number for number in of if not 0 <= number < len(asked)]:
            raise DataError(f"{folder / 'ssp' / kind}.json: {out[0]} in {part!r} is not among {len(asked)} questions")
    return {part: dict(asked[number] for number in numbers.get(part, [])) for part in ("train", "test")}


def _described(file: Path, statements: Mapping[str, str], samples: int) -> tuple[str, list[str]]:
    """The schema of a database, and its tables without rows."""
    texts, empty = [], []
    with open_database(file) as run:
        for table, text in statements.items():
            try:
                has_rows = bool(run(f"SELECT 1 FROM {quoted(table)} LIMIT 1"))  # noqa: S608 — quoted
            except ProgramError:  # it isn't there
                has_rows = False
            empty += [] if has_rows else [table]
            texts.append(text + (sampled(run, quoted(table), samples) if samples else ""))
    return "\n".join(texts), empty


def statements_of(schema: _Schema) -> dict[str, str]:
    """The CREATE TABLE statement of each table; Spider's SQLite files may lack the keys."""
    columns = schema.column_names_original
    statements = {}
    for number, table in enumerate(schema.table_names_original):
        if table.lower().startswith("sqlite_"):
            continue  # SQLite's own, which one of Spider's schemas lists
        own = [place for place, (of, _) in enumerate(columns) if of == number]
        lines = [f"{_name(columns[place][1])} {schema.column_types[place]}" for place in own]
        flat = [place for keys in schema.primary_keys for place in (keys if isinstance(keys, list) else [keys])]
        if keys := [_name(columns[place][1]) for place in flat if place in own]:
            lines.append(f"PRIMARY KEY ({', '.join(keys)})")
        for place, other in schema.foreign_keys:
            if place in own:
                target, column = schema.table_names_original[columns[other][0]], _name(columns[other][1])
                lines.append(f"FOREIGN KEY ({_name(columns[place][1])}) REFERENCES {_name(target)}({column})")
        statements[table] = f"CREATE TABLE {_name(table)} ({', '.join(lines)});"
    return statements


def _name(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else quoted(name)
