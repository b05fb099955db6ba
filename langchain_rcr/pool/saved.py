"""What a saved folder holds beside the encoder: the examples, one a line, their vectors, and the retriever's fields."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from langchain_rcr.basics.files import read_json, write_text
from langchain_rcr.errors import CheckpointError, InputError, PoolError
from langchain_rcr.families.untrusted import refusing
from langchain_rcr.policy.manifest import inside, verify
from langchain_rcr.pool.examples import Example, ExamplePool, random_ids

CHECKPOINT_FOLDER = "checkpoint"
"""Where a run folder keeps its checkpoint."""

POOL_FILE = "pool.jsonl"
"""The examples of a checkpoint, one a line."""

VECTORS_FILE = "pool.safetensors"
"""Their vectors, where a store was saved."""


RETRIEVER_FILE = "retriever.json"
"""The keys of question and program, and the retriever's own fields, where one was saved."""


def checkpoint_folder(path: Path) -> Path:
    """The checkpoint in a run folder, or the folder itself; a `CheckpointError` if there is none."""
    folder = path / CHECKPOINT_FOLDER
    if folder.is_dir():
        return folder
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder: give a run folder of rcr-train, a checkpoint folder or hub:ORG/NAME"
        )
    return path


def stored_fields(folder: Path) -> dict[str, Any]:
    """What `save` kept of a retriever: `source_key`, `target_key` and its `fields`; empty where none was saved."""
    if not (folder / RETRIEVER_FILE).is_file():
        return {"fields": {}}
    file = inside(folder, RETRIEVER_FILE)
    found = read_json(file, ("source_key", "target_key", "fields"))
    with refusing(f"{file} is damaged", CheckpointError):
        ExamplePool(source_key=found["source_key"], target_key=found["target_key"])
        if not (isinstance(found["target_key"], str) and isinstance(found["fields"], dict)):
            raise InputError("not the keys and fields of a retriever")
    return found


def stored_pool(folder: Path, source_key: str | Sequence[str], target_key: str) -> ExamplePool:
    """The examples of a checkpoint folder; a `CheckpointError` if there are none, or one lacks these keys."""
    file = inside(folder, POOL_FILE)
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {POOL_FILE}: pass examples=…, or the engine that holds them as index=…")
    verify(folder, pool=True)
    try:
        return read_jsonl(file, source_key=source_key, target_key=target_key)
    except PoolError as error:
        hint = "; source_key= and target_key= name other fields" if " has no '" in str(error) else ""
        raise CheckpointError(f"{error}{hint}") from error


def write_jsonl(path: Path, pool: ExamplePool, *, shown: str | os.PathLike[str] | None = None) -> None:
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
    for container in containers:
        if isinstance(container, tuple):
            raise TypeError("JSON would make a list of the tuple")
        if isinstance(container, dict):
            for key in container:
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is no string")
        parts = container.values() if isinstance(container, dict) else container
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


def read_jsonl(path: Path, *, source_key: str | Sequence[str] = "source", target_key: str = "target") -> ExamplePool:
    """Read the pool that `write_jsonl` wrote; a row without "id" gets a random one.

    Raises:
        PoolError: the file can't be read, or a row is not an example; the message names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PoolError(f"{path} can't be read: {error}") from error
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]

    def where(at: int) -> str:
        return f"{path}, line {numbers[at]}"

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
    rows = []
    for at, line in enumerate(lines):  # which finds the one that is wrong
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise PoolError(f"{where(at)}: not JSON ({error})") from error
        if not isinstance(rows[-1], dict):
            raise PoolError(f"{where(at)}: must be a JSON object, not {type(rows[-1]).__name__}")
    return rows
