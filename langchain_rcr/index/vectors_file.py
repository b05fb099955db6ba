"""The file of a pool's vectors, so that a saved pool needs no encoding when it is loaded."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from langchain_rcr.basics.files import write_bytes
from langchain_rcr.basics.rows import IntArray, Rows, SparseRows, longest
from langchain_rcr.errors import CheckpointError
from langchain_rcr.index.base import PoolVectors

_FORMAT = "langchain-rcr pool vectors"
_PROGRAMS = "programs"
_PARTS = ("starts", "columns", "values")
_KINDS = {"F32": "<f4", "I32": "<i4", "I64": "<i8"}


def save_vectors(path: Path, fingerprint: str, ids: Sequence[object], vectors: PoolVectors, programs: IntArray) -> None:
    """Write a pool's vectors to a safetensors file, atomically.

    Args:
        path: the file.
        fingerprint: of the encoder that made them.
        ids: the examples' ids, (N,), or whatever else tells them apart, as JSON takes it.
        vectors: theirs, by the order of the ids.
        programs: (N,) `Row.program` of each, which would be read off the programs again otherwise.
    """
    count, dim = vectors.candidate.shape
    meta = {"format": _FORMAT, "fingerprint": fingerprint, "count": str(count), "dim": str(dim), "ids": _digest(ids)}
    arrays = _arrays(vectors) | {_PROGRAMS: programs}
    write_bytes(path, save({name: np.ascontiguousarray(value) for name, value in arrays.items()}, meta))


def load_vectors(path: Path, fingerprint: str, ids: Sequence[object]) -> tuple[PoolVectors, IntArray]:
    """Read what `save_vectors` wrote: vectors and programs.

    Args:
        path: the file.
        fingerprint: of the encoder that is to search them.
        ids: the ids of the examples that they must belong to, in this order.

    Raises:
        CheckpointError: the file is missing, damaged, foreign, or of another encoder or other examples; the message
            says what to rebuild.
    """
    try:
        if not path.is_file():
            raise _unfit(path, "is missing")
        with safe_open(path, framework="numpy") as file:  # which checks the header
            meta = file.metadata() or {}
        if meta.get("format") != _FORMAT:
            raise _unfit(path, "holds no vectors of a pool")
        arrays = _read(path)
        programs = arrays.pop(_PROGRAMS)
        vectors = PoolVectors(*(_rows(arrays, name, int(meta["dim"])) for name in ("candidate", "context")))
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

    `safe_open` copies them out of a file that it has mapped into memory, where the process holds both at once.
    """
    arrays: dict[str, NDArray[Any]] = {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name in header.keys() - {"__metadata__"}:
            about = header[name]
            if about["dtype"] not in _KINDS:
                raise ValueError(f"{name} is of the kind {about['dtype']}")
            arrays[name] = array = np.empty(about["shape"], dtype=_KINDS[about["dtype"]])
            file.seek(8 + length + about["data_offsets"][0])
            if array.size and file.readinto(array.data) != array.nbytes:
                raise OSError("it ends too early")
    return arrays


def _arrays(vectors: PoolVectors) -> dict[str, NDArray[Any]]:
    """By their names in the file."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, rows in (("candidate", vectors.candidate), ("context", vectors.context)):
        if isinstance(rows, SparseRows):
            arrays |= {f"{name}.{part}": getattr(rows, part) for part in _PARTS}
        else:
            arrays[name] = rows
    return arrays


def _rows(arrays: dict[str, NDArray[Any]], name: str, dim: int) -> Rows:
    if name in arrays:
        return arrays[name]
    starts, columns, values = (arrays[f"{name}.{part}"] for part in _PARTS)
    return SparseRows(starts, columns, values, dim)


def _fit(rows: Rows, count: int) -> bool:
    """Whether rows read from a file are such, and so many."""
    if isinstance(rows, SparseRows):
        starts, columns, total = rows.starts, rows.columns, len(rows.values)
        kinds = starts.dtype == columns.dtype == np.int32 and starts.ndim == columns.ndim == rows.values.ndim == 1
        if not kinds or len(starts) != count + 1 or starts[0] != 0 or not starts[-1] == len(columns) == total:
            return False
        inside = not len(columns) or 0 <= columns.min() <= columns.max() < rows.dim
        # Ascending within a row: where it doesn't rise, a row begins.
        falls = 1 + np.flatnonzero(np.diff(columns) <= 0)
        if (np.diff(starts) < 0).any() or not inside or not np.isin(falls, starts).all():
            return False
    elif len(rows) != count:
        return False
    values = rows.values if isinstance(rows, SparseRows) else rows
    return values.dtype == np.float32 and math.isfinite(longest(rows))


def _unfit(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}: remove it, encode the examples again and save again")


def _digest(ids: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps([*ids]).encode()).hexdigest()
