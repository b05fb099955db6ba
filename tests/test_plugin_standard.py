"""LangChain's own standard tests for retrievers."""

from typing import Any

from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import RetrieversIntegrationTests

from langchain_rcr import ExamplePool, ExampleStore, SequentialCompositionalRetriever, TriEncoder

POOL = ExamplePool([{"source": f"what is {n} plus {n}", "target": f"add({n}, {n})"} for n in range(8)])


class TestSequentialCompositionalRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return SequentialCompositionalRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"store": ExampleStore(TriEncoder.build("lexical", POOL.items(), dim=16), POOL)}

    @property
    def retriever_query_example(self) -> str:
        return "what is 3 plus 4"
