"""Spider's questions on many databases (Yu et al., EMNLP 2018), in the splits of Spider-SSP (Shaw et al., ACL 2021)."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from langchain_rcr.databases.database import open_database
from langchain_rcr.databases.many import LAYOUT
from langchain_rcr.errors import ProgramError
from rcr_trainer.data.examples import Example, Split, read_json_file
from rcr_trainer.errors import ConfigError, DataError

KINDS = ("random_1", "template_1", "tmcd_1", "length_1")
_INTERNAL = "sqlite_"
"""What SQLite's own tables are called; one schema of Spider lists them."""

_FIRST = "SELECT 1 FROM {} LIMIT 1"


class _Row(BaseModel):
    question: Annotated[str, Field(min_length=1)]
    query: Annotated[str, Field(min_length=1)]
    db_id: Annotated[str, Field(pattern=r"^\w+$")]


class _Schema(BaseModel):
    """Tables and columns by their numbers; column 0 is `*`, of no table."""

    db_id: str
    table_names_original: list[str]
    column_names_original: list[tuple[int, str]]
    column_types: list[str]
    primary_keys: list[int | list[int]]
    foreign_keys: list[tuple[int, int]]


def spider_split(folder: str | Path, kind: str = "template_1", databases: str | Path | None = None) -> Split:
    """Read Spider's training questions in a split of Spider-SSP.

    The questions of databases that aren't there are left out, and those whose query reads a table without rows, on
    which many queries give the same.

    Args:
        folder: with `train_spider.json` and `tables.json` as Spider has them, and `ssp/databases.json` and
            `ssp/KIND.json`, whose numbers count the questions of these databases.
        kind: one of KINDS.
        databases: the folder with `DB/DB.sqlite`; None: `database` in `folder`.

    Returns:
        The split, without development questions. An id is the question's place in the file, from 0. Fields are `db_id`
        and `schema`, the CREATE TABLE statements. `meta` names what is missing: `missing_databases`, `empty_tables`,
        and `left_out`, the number of questions by the reason.

    Raises:
        ConfigError: no such split.
        DataError: a file is missing or not of that form.
        InputError: a database can't be opened.
    """
    folder = Path(folder)
    if kind not in KINDS:
        raise ConfigError(f"there is no {kind!r} split; the splits of Spider-SSP are {', '.join(KINDS)}")
    rows = _read(folder / "train_spider.json", list[_Row])
    schemas = {schema.db_id: schema for schema in _read(folder / "tables.json", list[_Schema])}
    within = set(_read(folder / "ssp" / "databases.json", list[str]))
    numbers = _read(folder / "ssp" / f"{kind}.json", dict[str, list[int]])
    asked = [(place, row) for place, row in enumerate(rows) if row.db_id in within]
    where = Path(databases) if databases is not None else folder / "database"
    if not where.is_dir():
        raise DataError(f"{where} is no folder: unpack Spider's databases there, {LAYOUT.format(db_id='DB')}")
    missing, empty, texts = [], {}, {}
    for name in sorted({row.db_id for _, row in asked}):
        if name not in schemas:
            raise DataError(f"{folder / 'tables.json'} has no database {name!r}, which a question names")
        texts[name] = schema_of(schemas[name])
        file = where / LAYOUT.format(db_id=name)
        if not file.is_file():
            missing.append(name)
        elif found := _empty_tables(file, schemas[name].table_names_original):
            empty[name] = found
    left_out: Counter[str] = Counter()
    parts: dict[str, list[Example]] = {"train": [], "test": []}
    for part, examples in parts.items():
        for number in numbers.get(part, []):
            if not 0 <= number < len(asked):
                raise DataError(f"{folder / 'ssp' / kind}.json: {number} in {part!r} is none of {len(asked)} questions")
            place, row = asked[number]
            words = set(re.findall(r"\w+", row.query.lower()))
            if row.db_id in missing:
                left_out["their database is missing"] += 1
            elif words & {table.lower() for table in empty.get(row.db_id, ())}:
                left_out["their query reads a table without rows"] += 1
            else:
                fields = {"db_id": row.db_id, "schema": texts[row.db_id]}
                examples.append(Example(str(place), row.question.strip(), row.query.strip(), fields))
    tables = [f"{name}.{table}" for name, found in empty.items() for table in found]
    about = {"missing_databases": missing, "empty_tables": tables, "left_out": dict(left_out)}
    meta = {"task": "spider", "split": kind, "how": f"the {kind} split of Spider-SSP", **about}
    return Split(f"spider-{kind}", parts["train"], [], parts["test"], meta)


def schema_of(schema: _Schema) -> str:
    """CREATE TABLE statements of a database; Spider's files of rows may lack its keys."""
    columns = schema.column_names_original
    statements = []
    for number, table in enumerate(schema.table_names_original):
        if table.lower().startswith(_INTERNAL):
            continue
        own = [place for place, (of, _) in enumerate(columns) if of == number]
        lines = [f"{_name(columns[place][1])} {schema.column_types[place]}" for place in own]
        flat = [place for keys in schema.primary_keys for place in (keys if isinstance(keys, list) else [keys])]
        if keys := [_name(columns[place][1]) for place in flat if place in own]:
            lines.append(f"PRIMARY KEY ({', '.join(keys)})")
        for place, other in schema.foreign_keys:
            if place in own:
                target, column = schema.table_names_original[columns[other][0]], _name(columns[other][1])
                lines.append(f"FOREIGN KEY ({_name(columns[place][1])}) REFERENCES {_name(target)}({column})")
        statements.append(f"CREATE TABLE {_name(table)} ({', '.join(lines)});")
    return "\n".join(statements)


def _name(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else _quoted(name)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _empty_tables(file: Path, tables: list[str]) -> list[str]:
    """Those of a database's tables that have no rows, or aren't there."""
    with open_database(file) as run:
        try:
            known = {name.lower() for (name,) in run("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
            filled = {table for table in tables if table.lower() in known and run(_FIRST.format(_quoted(table)))}
        except ProgramError as error:
            raise DataError(f"{file} can't be read: {error}") from error
    return [table for table in tables if table not in filled and not table.lower().startswith(_INTERNAL)]


def _read(path: Path, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(read_json_file(path))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = "".join(f", {key}" for key in fault["loc"])
        raise DataError(f"{path}{where}: not of Spider's form: {fault['msg']}") from None
