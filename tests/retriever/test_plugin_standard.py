"""LangChain's own standard tests for retrievers, on every engine; and the same picks on all of them."""

from typing import Any

import pytest
from documents import same_documents
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import RetrieversIntegrationTests
from tenants import selections

from langchain_rcr import ExamplePool, ExampleStore, SequentialCompositionalRetriever, TriEncoder
from langchain_rcr.programs import ProgramSpec

EXAMPLES = [{"source": f"what is {n} plus {n}", "target": f"add({n}, {n})", "n": n} for n in range(8)]
POOL = ExamplePool(EXAMPLES, ids=[str(n) for n in range(8)])


class TestSequentialCompositionalRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _on(self, index: Any) -> None:
        self.index = index

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return SequentialCompositionalRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"store": ExampleStore(TriEncoder.build("lexical", POOL.items(), dim=16), POOL, self.index)}

    @property
    def retriever_query_example(self) -> str:
        return "what is 3 plus 4"


def test_programs_that_differ_in_constants_are_one_program(index: Any) -> None:
    """On every engine as in evaluation, and by the encoder's own language."""
    spec = ProgramSpec("sql")
    targets = ["SELECT a FROM t WHERE b = 1", "select a from t where b = 2", "SELECT c FROM t"]
    examples = [{"source": f"question {n}", "target": target} for n, target in enumerate(targets)]
    encoder = TriEncoder.build("lexical", ExamplePool(examples).items(), dim=16, spec=spec)
    store = ExampleStore(encoder, ExamplePool(examples, ids=list("abc")), index)
    numbers = store.schema.extended(examples).programs.tolist()
    assert [numbers.index(one) for one in numbers] == [0, 0, 2]
    keys = [spec.key(target) for target in targets]  # what evaluation counts duplicates by
    assert [keys.index(one) for one in keys] == [0, 0, 2]
    masked = SequentialCompositionalRetriever(store=store, k=2, mask_same_program=True)
    for n in range(3):
        assert "c" in {document.id for document in masked.invoke(f"question {n}")}


@pytest.mark.slow
def test_no_selection_reads_another_tenant(index: Any) -> None:
    outcomes = selections(index, 300)
    assert len({outcome.partition(":")[0] for outcome in outcomes}) == 12
    assert sum(count for outcome, count in outcomes.items() if outcome[-1] in "12") > 60


@pytest.mark.slow
async def test_every_engine_picks_what_memory_picks(index: Any) -> None:
    encoder = TriEncoder.build("lexical", POOL.items(), dim=16)
    fields: dict[str, Any] = {"k": 3, "mask_same_program": True}
    plain = SequentialCompositionalRetriever(store=ExampleStore(encoder, POOL), **fields)
    other = SequentialCompositionalRetriever(store=ExampleStore(encoder, POOL, index), **fields)
    questions = [f"what is {n} plus {n + 1}" for n in range(4)]
    for change in ("none", "add", "replace", "delete"):
        for retriever in (plain, other):
            if change == "add":
                await retriever.aadd_examples([{"source": "3 and 4", "target": "add(3, 4)"}, EXAMPLES[3]], ["x", "y"])
            elif change == "replace":
                retriever.upsert([{"source": "two plus two", "target": "add(2, 2)", "n": 2}], ["2"])
            elif change == "delete":
                assert retriever.delete(["3", "5", "nobody"]) == 2
        for options in (
            {},
            {"k": 1},
            {"beam_width": 3},
            {"filter": {"n": {"$gte": 2}}},
            {"filter": {"n": {"$exists": False}}, "k": 1},
        ):
            if change in ("none",) and options.get("filter") == {"n": {"$exists": False}}:
                continue
            expected = plain.batch(questions, **options)
            for found in (other.batch(questions, **options), await other.abatch(questions, **options)):
                assert all(map(same_documents, found, expected)), (change, options)
        assert same_documents(await other.ainvoke(questions[0]), plain.invoke(questions[0]))
        steps = zip(other.explain(questions[1]).steps, plain.explain(questions[1]).steps, strict=True)
        assert all(mine.pick.id == theirs.pick.id for mine, theirs in steps)
