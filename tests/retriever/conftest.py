"""Every engine that a retriever may have: a new one is a line more, and the standard tests run on it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vector_stores import STORES

from langchain_rcr.index.faiss import FaissIndex
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.index.pgvector import PgVectorIndex

ENGINES: dict[str, Callable[[pytest.FixtureRequest], Any]] = {
    "memory": lambda request: MemoryIndex(),
    "faiss": lambda request: FaissIndex(),
    "pgvector": lambda request: PgVectorIndex(request.getfixturevalue("postgres_url"), pool=request.node.name),
    **STORES,
}
"""Each makes an empty engine; a new engine is a line more."""
PARAMS = [name if name in ("memory", "faiss") else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES]


@pytest.fixture(params=PARAMS)
def index(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty engine of each kind."""
    made = ENGINES[request.param](request)
    yield made
    made.close()
