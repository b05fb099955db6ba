"""Filters in the words of LangChain's vector stores: what a store can be told of a metadata filter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from langchain_rcr.index.filters import AllOf, Compare, Filter

Required: TypeAlias = dict[str, list[str]]
"""Fields, and the strings of which each must be one."""


def _operators(_: Any, required: Required) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{field: {"$in": values}} for field, values in required.items()]
    return parts[0] if len(parts) == 1 else {"$and": parts}


def _conditions(store: Any, required: Required) -> Any:
    from qdrant_client import models

    return models.Filter(
        must=[
            models.FieldCondition(key=f"{store.metadata_payload_key}.{field}", match=models.MatchAny(any=values))
            for field, values in required.items()
        ]
    )


def _function(_: Any, required: Required) -> Callable[[Any], bool]:
    return lambda document: all(document.metadata.get(field) in values for field, values in required.items())


DIALECTS: dict[str, Callable[[Any, Required], Any]] = {
    "Chroma": _operators,
    "InMemoryVectorStore": _function,
    "PGVector": _operators,
    "QdrantVectorStore": _conditions,
}
"""Class of a store → what makes its own filter."""


def store_filter(store: Any, where: Filter) -> Any:
    """The store's own filter of what it can be told; None where it can't be told anything."""
    make, required = DIALECTS.get(type(store).__name__), _required(where)
    return None if make is None or not required else make(store, required)


def _required(where: Filter) -> Required:
    """What a filter requires of strings. Stores disagree on numbers, on null and on what is missing: not of those."""
    if isinstance(where, AllOf):
        return {field: values for part in where.parts for field, values in _required(part).items()}
    if isinstance(where, Compare) and where.op in ("eq", "in") and where.key.isidentifier():
        values = [*where.value] if where.op == "in" else [where.value]
        return {where.key: values} if values and all(isinstance(value, str) for value in values) else {}
    return {}
