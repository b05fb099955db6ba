"""The file of a pool's vectors, so that a saved pool needs no encoding when it is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from langchain_rcr.errors import CheckpointError
from langchain_rcr.files import write_bytes
from langchain_rcr.index.base import PoolVectors

_FORMAT = "langchain-rcr pool vectors"


def save_vectors(path: str | os.PathLike[str], fingerprint: str, ids: Sequence[str], vectors: PoolVectors) -> None:
    """Write a pool's vectors to a safetensors file, atomically.

    Args:
        path: the file.
        fingerprint: of the encoder that made them.
        ids: the examples' ids, (N,).
        vectors: theirs, by the order of the ids.
    """
    count, dim = vectors.candidate.shape
    meta = {"format": _FORMAT, "fingerprint": fingerprint, "count": str(count), "dim": str(dim), "ids": _digest(ids)}
    tensors = {"candidate": vectors.candidate, "context": vectors.context}
    tensors = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in tensors.items()}
    write_bytes(path, save(tensors, meta))


def load_vectors(path: str | os.PathLike[str], fingerprint: str, ids: Sequence[str]) -> PoolVectors:
    """Read what `save_vectors` wrote.

    Args:
        path: the file.
        fingerprint: of the encoder that is to search them.
        ids: the ids of the examples that they must belong to, in this order.

    Raises:
        CheckpointError: the file is missing, damaged, foreign, or of another encoder or other examples; the message
            says what to rebuild.
    """
    try:
        if not Path(path).is_file():
            raise _unfit(path, "is missing")
        with safe_open(path, framework="numpy") as file:
            meta = file.metadata() or {}
            if meta.get("format") != _FORMAT or set(file.keys()) != {"candidate", "context"}:
                raise _unfit(path, "holds no vectors of a pool")
            vectors = PoolVectors(file.get_tensor("candidate"), file.get_tensor("context"))
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise _unfit(path, f"is damaged ({error})") from error
    if meta.get("fingerprint") != fingerprint:
        raise _unfit(path, f"is of another encoder ({meta.get('fingerprint')}, not {fingerprint})")
    if meta.get("ids") != _digest(ids):
        raise _unfit(path, f"belongs to other examples than those of the pool ({meta.get('count')}, not {len(ids)})")
    right = all(
        matrix.dtype == np.float32 and len(matrix) == len(ids) and np.isfinite(matrix).all()
        for matrix in (vectors.candidate, vectors.context)
    )
    if not right or meta.get("dim") != str(vectors.candidate.shape[1]):
        raise _unfit(path, "is damaged (the vectors are not what its header says)")
    return vectors


def _unfit(path: str | os.PathLike[str], what: str) -> CheckpointError:
    return CheckpointError(f"{os.fspath(path)} {what}: remove it, encode the examples again and save again")


def _digest(ids: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([*ids]).encode()).hexdigest()
