"""Documents compared as far as float32 allows: a matrix product's rounding depends on how many go through together."""

from collections.abc import Sequence

import pytest
from langchain_core.documents import Document

FLOATS = ("logit", "probability")


def same_documents(found: Sequence[Document], expected: Sequence[Document]) -> bool:
    """Whether two lists hold the same documents in the same order."""
    return [_exact(one) for one in found] == [_exact(one) for one in expected] and all(
        one.metadata.get(name) == pytest.approx(other.metadata.get(name), rel=1e-4, abs=1e-5)
        for one, other in zip(found, expected, strict=True)
        for name in FLOATS
    )


def _exact(document: Document) -> tuple[object, ...]:
    metadata = {name: value for name, value in document.metadata.items() if name not in FLOATS}
    return document.id, document.page_content, metadata
