"""What a saved folder holds besides the encoder: the examples, their vectors, and the retriever's fields."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from langchain_rcr.basics.files import atomic_file, read_json, write_text
from langchain_rcr.basics.items import check_json
from langchain_rcr.basics.rows import IntArray, Rows, SparseRows, longest
from langchain_rcr.errors import CheckpointError, InputError, PoolError, refusing
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.policy.manifest import inside, verify
from langchain_rcr.pool.examples import Example, ExamplePool, random_ids

POOL_FILE = "pool.jsonl"
"""The examples of a checkpoint, one per line."""

VECTORS_FILE = "pool.safetensors"
"""Their vectors, if a store was saved, so that loading needs no encoding."""

RETRIEVER_FILE = "retriever.json"
"""The keys of question and program, and the retriever's own fields, if one was saved."""

_VECTORS = "langchain-rcr pool vectors"
_PROGRAMS = "programs"
_PARTS = ("starts", "columns", "values")
_KINDS = {"F32": "<f4", "I32": "<i4", "I64": "<i8"}


def stored_fields(folder: Path) -> dict[str, Any]:
    """What `save` kept of a retriever: `source_key`, `target_key` and its `fields`; empty if none was saved."""
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
    """Write a pool atomically, one example per line: `{"id": …, "source": …, "target": …}` and the other fields.

    Errors name `shown` if `path` is a temporary file.

    An example with its own field named "id" is written as `{"id": its id in the pool, "example": {…}}`.

    Raises:
        PoolError: a field that JSON can't hold as it is (tuples become lists, keys strings); the message names example,
            field and path.
    """
    lines = []
    for example_id, example in zip(pool.ids, pool.examples, strict=True):
        row = {"id": example_id, "example": example} if "id" in example else {"id": example_id, **example}
        try:
            lines.append(_line(row))
        except (TypeError, ValueError) as error:
            where = f"example {example_id!r} can't be written to {os.fspath(shown or path)}"
            raise PoolError(f"{where}: {_misfit(example)}") from error
    write_text(path, "".join(lines))


def _line(row: dict[str, Any]) -> str:
    """A row as a line of JSON; a ValueError or TypeError if JSON can't hold it, or would give something else back."""
    line = json.dumps(row, ensure_ascii=False) + "\n"
    line.encode("utf-8")
    check_json(row)
    return line


def _misfit(example: Example) -> str:
    """The first field that JSON can't hold as it is, and why."""
    for name, value in example.items():
        try:
            _line({name: value})
        except (TypeError, ValueError) as error:
            return f"field {name!r}: {error}"
    return "a field that JSON can't hold"


def read_jsonl(path: Path, *, source_key: str | Sequence[str] = "source", target_key: str = "target") -> ExamplePool:
    """The pool that `write_jsonl` wrote, or a `PoolError` that names file and line; a row without "id" gets one."""
    with refusing(f"{path} can't be read", PoolError):
        lines = path.read_text(encoding="utf-8").split("\n")
    examples, places = dict[str, dict[str, Any]](), list[str]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = _parsed(line)
        except (ValueError, RecursionError) as error:
            raise PoolError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise PoolError(f"{where}: must be a JSON object, not {type(row).__name__}")
        example_id = row.pop("id", None)
        if example_id is None:
            example_id = random_ids(1)[0]
        if not isinstance(example_id, str) or example_id in examples:
            raise PoolError(f"{where}: the id {example_id!r} is not a string or not the only one of its kind")
        nested = row.keys() == {"example"} and isinstance(row["example"], dict)
        examples[example_id] = row["example"] if nested else row
        places.append(where)
    return ExamplePool(source_key=source_key, target_key=target_key).filled(examples, places)


def _parsed(line: str) -> Any:
    with suppress(ValueError):
        return from_json(line, cache_strings="keys")  # a third of json's time; rows share the names of their fields
    return json.loads(line)  # which reads what is nested deeper, and says better what is wrong


def save_vectors(path: Path, fingerprint: str, ids: Sequence[object], vectors: PoolVectors, programs: IntArray) -> None:
    """Write a pool's vectors to a safetensors file, atomically, with the fingerprint of the encoder that made them.

    `ids` (N,) are JSON values that identify the examples, `programs` (N,) their `Row.program`, which are slow to make.
    """
    count, dim = vectors.candidate.shape
    meta = {"format": _VECTORS, "fingerprint": fingerprint, "count": str(count), "dim": str(dim), "ids": _digest(ids)}
    arrays = _arrays(vectors) | {_PROGRAMS: programs}
    with atomic_file(path) as file:  # by name: `safetensors.numpy.save` would hold the vectors three times
        save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, file.name, meta)


def load_vectors(path: Path, fingerprint: str, ids: Sequence[object]) -> tuple[PoolVectors, IntArray]:
    """What `save_vectors` wrote for this encoder and these examples, or a `CheckpointError`."""
    try:
        if not path.is_file():
            raise _unfit(path, "is missing")
        with safe_open(path, framework="numpy") as file:  # checks the header
            meta = file.metadata() or {}
        if meta.get("format") != _VECTORS:
            raise _unfit(path, "holds no vectors of a pool")
        arrays = _read(path)
        programs = arrays.pop(_PROGRAMS)
        vectors = PoolVectors(*(_matrix(arrays, name, int(meta["dim"])) for name in ("candidate", "context")))
    except KeyError as error:
        raise _unfit(path, f"holds no vectors of a pool (it has no {error})") from error
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise _unfit(path, f"is damaged ({error})") from error
    if meta.get("fingerprint") != fingerprint:
        raise _unfit(path, f"is of another encoder ({meta.get('fingerprint')}, not {fingerprint})")
    if meta.get("ids") != _digest(ids):
        raise _unfit(path, f"belongs to other examples than those of the pool ({meta.get('count')}, not {len(ids)})")
    right = (meta["dim"] == str(one.shape[1]) and _fit(one, len(ids)) for one in (vectors.candidate, vectors.context))
    same = programs.dtype == np.int64 and programs.shape == (len(ids),) and _arrays(vectors).keys() == arrays.keys()
    if not all(right) or not same:
        raise _unfit(path, "is damaged (the vectors are not what its header says)")
    return vectors, programs


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file, by name.

    Not with `safe_open`: it copies them out of a memory-mapped file, so the process would hold both at once.
    """
    arrays: dict[str, NDArray[Any]] = {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name in header.keys() - {"__metadata__"}:
            about = header[name]
            if about["dtype"] not in _KINDS:
                raise ValueError(f"{name} is of the kind {about['dtype']}")
            file.seek(8 + length + about["data_offsets"][0])
            values = np.fromfile(file, _KINDS[about["dtype"]], math.prod(about["shape"]))
            arrays[name] = values.reshape(about["shape"])
    return arrays


def _arrays(vectors: PoolVectors) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for name, rows in (("candidate", vectors.candidate), ("context", vectors.context)):
        if isinstance(rows, SparseRows):
            arrays |= {f"{name}.{part}": getattr(rows, part) for part in _PARTS}
        else:
            arrays[name] = rows
    return arrays


def _matrix(arrays: dict[str, NDArray[Any]], name: str, dim: int) -> Rows:
    if name in arrays:
        return arrays[name]
    starts, columns, values = (arrays[f"{name}.{part}"] for part in _PARTS)
    return SparseRows(starts, columns, values, dim)


def _fit(rows: Rows, count: int) -> bool:
    """Whether rows read from a file are valid and `count` in number."""
    if isinstance(rows, SparseRows):
        # Columns ascend within a row, so a row begins where they don't rise.
        if not rows.is_sound(count) or not np.isin(1 + np.flatnonzero(np.diff(rows.columns) <= 0), rows.starts).all():
            return False
    elif len(rows) != count:
        return False
    values = rows.values if isinstance(rows, SparseRows) else rows
    return values.dtype == np.float32 and math.isfinite(longest(rows))


def _unfit(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}: remove it, encode the examples again and save again")


def _digest(ids: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps([*ids]).encode()).hexdigest()
