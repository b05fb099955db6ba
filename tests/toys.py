"""Small policies for tests that need one but don't care which."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_rcr import Item, TriEncoder
from langchain_rcr.manifest import MANIFEST, seal


def lexical(
    rows: Sequence[Mapping[str, Any]], dim: int, *, keys: tuple[str, str] = ("source", "target"), **settings: Any
) -> TriEncoder:
    """An untrained policy of the lexical family over rows of examples."""
    source, target = keys
    return TriEncoder.build("lexical", [Item(row[source], row[target]) for row in rows], dim=dim, **settings)


def reseal(checkpoint: Path) -> None:
    """Write the manifest anew, as somebody would who changed files on purpose."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    seal(checkpoint)
