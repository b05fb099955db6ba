"""Small policies for tests that need one but don't care which."""

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_rcr import Item, TriEncoder


def lexical(
    rows: Sequence[Mapping[str, Any]], dim: int, *, keys: tuple[str, str] = ("source", "target"), **settings: Any
) -> TriEncoder:
    """An untrained policy of the lexical family over rows of examples."""
    source, target = keys
    return TriEncoder.build("lexical", [Item(row[source], row[target]) for row in rows], dim=dim, **settings)
