"""Every engine that a retriever may have: a new one is a line more, and the standard tests run on it. A fitted one."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_plugin_relevance import ROWS, WordCounts
from vector_stores import STORES

from langchain_rcr import SequentialCompositionalRetriever
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


@pytest.fixture(scope="module")
def fitted() -> SequentialCompositionalRetriever:
    """Fitted once for a module."""
    return SequentialCompositionalRetriever.from_examples(ROWS, WordCounts(), language="functional", k=2)


@pytest.fixture
def retriever(fitted: SequentialCompositionalRetriever) -> SequentialCompositionalRetriever:
    """A copy that a test may change."""
    return copy.deepcopy(fitted)
