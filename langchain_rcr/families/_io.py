"""Reading and writing an encoder's files; what is missing or foreign becomes one CheckpointError."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from langchain_rcr.errors import CheckpointError


def read_json(path: Path, required: Sequence[str]) -> dict[str, Any]:
    """A JSON object that has the required keys.

    Raises:
        CheckpointError: the file is missing, is not JSON, or lacks a key.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        msg = f"{path.parent} is not a complete checkpoint: {path.name} is missing"
        raise CheckpointError(msg) from None
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} can't be read as JSON: {error}"
        raise CheckpointError(msg) from None
    if not isinstance(value, dict):
        msg = f"{path} holds no JSON object"
        raise CheckpointError(msg)
    lacking = [key for key in required if key not in value]
    if lacking:
        msg = f"{path} was not written by langchain-rcr: it has no '{lacking[0]}'"
        raise CheckpointError(msg)
    return value


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors as safetensors (contiguous, on the CPU)."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def read_tensors(path: Path, module: nn.Module) -> None:
    """Fill a module's parameters from a safetensors file.

    Raises:
        CheckpointError: the file is missing or damaged, or its tensors are not the module's.
    """
    if not path.is_file():
        msg = f"{path.parent} is not a complete checkpoint: {path.name} is missing"
        raise CheckpointError(msg)
    try:
        module.load_state_dict(load_file(path), strict=True)
    except (SafetensorError, OSError) as error:
        msg = f"{path} is damaged: {error}"
        raise CheckpointError(msg) from None
    except RuntimeError as error:
        msg = f"{path} holds the weights of another model: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(msg) from None


def digest(value: Any) -> str:
    """A short SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def check_digest(path: Path, found: str, expected: object) -> None:
    """Refuse a vocabulary that is not the one its encoder was saved with.

    Raises:
        CheckpointError: naming the file.
    """
    if found != expected:
        msg = f"{path} is not the one that {path.parent.name}/encoder.json was written with (files of two checkpoints?)"
        raise CheckpointError(msg)
