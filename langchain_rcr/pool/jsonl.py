"""A pool as a JSON Lines file, an example a line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from langchain_rcr.basics.files import write_text
from langchain_rcr.errors import PoolError
from langchain_rcr.pool.examples import Example, ExamplePool, random_ids


def write_jsonl(
    path: str | os.PathLike[str], pool: ExamplePool, *, shown: str | os.PathLike[str] | None = None
) -> None:
    """Write a pool, an example a line, atomically: `{"id": …, "source": …, "target": …}` and the further fields.

    An error names `shown`, where `path` is a temporary one.

    An example with a field of its own named "id" is written as `{"id": its id in the pool, "example": {…}}`.

    Raises:
        PoolError: a field that JSON can't hold, or not as it is (tuples become lists, keys strings); the message names
            example, field and path.
    """
    lines = []
    for example_id, example in zip(pool.ids, pool.examples, strict=True):
        row = {"id": example_id, "example": example} if "id" in example else {"id": example_id, **example}
        try:
            line = json.dumps(row, ensure_ascii=False) + "\n"
            line.encode("utf-8")
            _check_unchanged(example)
        except (TypeError, ValueError) as error:
            where = f"example {example_id!r} can't be written to {os.fspath(shown or path)}"
            raise PoolError(f"{where}: {_misfit(example)}") from error
        lines.append(line)
    write_text(path, "".join(lines))


def _check_unchanged(value: Any) -> None:
    """Raise a TypeError for what JSON would give back as something else; nothing in `value` may hold itself."""
    containers = [value]
    for inside in containers:
        if isinstance(inside, tuple):
            raise TypeError("JSON would make a list of the tuple")
        if isinstance(inside, dict):
            for key in inside:
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is no string")
        parts = inside.values() if isinstance(inside, dict) else inside
        containers += [part for part in parts if isinstance(part, (dict, list, tuple))]


def _misfit(example: Example) -> str:
    """The first field that JSON can't hold as it is, and why."""
    for name, value in example.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode("utf-8")
            _check_unchanged({name: value})
        except (TypeError, ValueError) as error:
            return f"field {name!r}: {error}"
    return "a field that JSON can't hold"


def read_jsonl(
    path: str | os.PathLike[str],
    *,
    source_key: str | Sequence[str] = "source",
    target_key: str = "target",
) -> ExamplePool:
    """Read the pool that `write_jsonl` wrote; a row without "id" gets a random one.

    Raises:
        PoolError: the file can't be read, or a row is not an example; the message names file and line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PoolError(f"{os.fspath(path)} can't be read: {error}") from error
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]

    def where(at: int) -> str:
        return f"{os.fspath(path)}, line {numbers[at]}"

    ids: dict[str, None] = {}
    examples: list[dict[str, Any]] = []
    for at, row in enumerate(_rows([lines[number - 1] for number in numbers], where)):
        example_id = row.pop("id", None)
        if example_id is None:
            example_id = random_ids(1)[0]
        if not isinstance(example_id, str) or example_id in ids:
            raise PoolError(f"{where(at)}: the id {example_id!r} is not a string or not the only one of its kind")
        ids[example_id] = None
        examples.append(row["example"] if row.keys() == {"example"} and isinstance(row["example"], dict) else row)
    return ExamplePool(source_key=source_key, target_key=target_key).filled([*ids], examples, where)


def _rows(lines: Sequence[str], where: Callable[[int], str]) -> list[dict[str, Any]]:
    """The object on each line."""
    try:
        # At once: twice as fast, and the rows share the names of their fields.
        rows = json.loads(f"[{','.join(lines)}]")
        if len(rows) == len(lines) and {*map(type, rows)} <= {dict}:
            return list(rows)
    except (ValueError, RecursionError):
        pass
    # One by one, which finds the line that is wrong.
    return [_row(line, where(at)) for at, line in enumerate(lines)]


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PoolError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise PoolError(f"{where}: must be a JSON object, not {type(row).__name__}")
    return row
