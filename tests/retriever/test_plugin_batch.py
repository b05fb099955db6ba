"""Many questions at once, and engines that are awaited: one encoding, one search a step, a run for each question."""

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
from documents import same_documents
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from langchain_core.tracers import BaseTracer
from plain_reader import PlainReader
from toys import lexical

from langchain_rcr import ExamplePool, ExampleStore, InputError, SequentialCompositionalRetriever, TriEncoder
from langchain_rcr.basics.background import background
from langchain_rcr.index.base import PoolVectors, Row

WORDS = ["cats", "dogs", "mice", "hens"]
EXAMPLES = [{"source": f"how many {word} are there", "target": f"count({word})"} for word in WORDS]
QUERIES = ["how many cats are there", "dogs and mice", "are there hens"]


@pytest.fixture(scope="module")
def encoder() -> TriEncoder:
    return lexical(EXAMPLES, dim=32)


@pytest.fixture
def retriever(encoder: TriEncoder) -> SequentialCompositionalRetriever:
    return SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES, k=2)


class Recorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.runs: dict[UUID, list[Any]] = {}

    def on_retriever_start(self, serialized: Any, query: str, *, run_id: UUID, tags: Any = None, **kwargs: Any) -> None:
        self.runs[run_id] = [query, tags, kwargs.get("metadata")]

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.runs[run_id].append(len(documents))

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self.runs[run_id].append(type(error))


def test_a_batch_encodes_once(retriever: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = retriever.store.encoder.judge_queries
    monkeypatch.setattr(
        retriever.store.encoder, "judge_queries", lambda q, *a, **b: calls.append(len(q)) or original(q, *a, **b)
    )
    together = retriever.batch(QUERIES)
    assert calls == [3]
    assert all(same_documents(found, retriever.invoke(query)) for query, found in zip(QUERIES, together, strict=True))
    assert [len(documents) for documents in retriever.batch(QUERIES, k=3)] == [3, 3, 3]
    assert retriever.batch([]) == []


@pytest.mark.parametrize("is_async", [False, True])
def test_every_question_has_a_run_of_its_own(retriever: SequentialCompositionalRetriever, is_async: bool) -> None:
    recorders = [Recorder() for _ in QUERIES]
    configs = [{"callbacks": [one], "tags": [f"t{n}"], "metadata": {"n": n}} for n, one in enumerate(recorders)]
    if is_async:
        asyncio.run(retriever.abatch(QUERIES, configs))
    else:
        retriever.batch(QUERIES, tuple(configs))  # as LangChain takes any sequence
    for n, (query, recorder) in enumerate(zip(QUERIES, recorders, strict=True)):
        [(asked, tags, metadata, found)] = recorder.runs.values()
        assert (asked, tags, found) == (query, [f"t{n}"], 2)
        assert metadata["n"] == n
        assert metadata["ls_retriever_name"] == "sequential_compositional"


def test_a_run_has_the_id_that_the_caller_gives(retriever: SequentialCompositionalRetriever) -> None:
    ids, recorder = [uuid4() for _ in range(3)], Recorder()
    retriever.invoke(QUERIES[0], {"callbacks": [recorder]}, run_id=ids[0])  # as LangChain's retrievers take it
    asyncio.run(retriever.ainvoke(QUERIES[0], {"callbacks": [recorder]}, run_id=ids[1]))
    retriever.batch(QUERIES[:1], {"callbacks": [recorder], "run_id": ids[2]})
    assert [*recorder.runs] == ids


@pytest.mark.parametrize("is_async", [False, True])
def test_a_bad_question_costs_the_others_nothing(retriever: SequentialCompositionalRetriever, is_async: bool) -> None:
    queries: list[Any] = [QUERIES[0], " ", QUERIES[1], None]
    recorder = Recorder()

    def batch(**options: Any) -> Any:
        if is_async:
            return asyncio.run(retriever.abatch(queries, {"callbacks": [recorder]}, **options))
        return retriever.batch(queries, {"callbacks": [recorder]}, **options)

    good, blank, other, none = batch(return_exceptions=True)
    assert [d.id for d in good] == [d.id for d in retriever.invoke(QUERIES[0])]
    assert [d.id for d in other] == [d.id for d in retriever.invoke(QUERIES[1])]
    assert isinstance(blank, InputError)
    assert "must be a string, not NoneType" in str(none)
    assert [run[-1] for run in recorder.runs.values()] == [2, InputError, 2, InputError]
    with pytest.raises(InputError, match="blank"):
        batch()
    with pytest.raises(InputError, match="unknown 'return_exceptions'"):
        retriever.invoke(QUERIES[0], return_exceptions=True)
    with pytest.raises(InputError, match="k must be greater than or equal to 1, not 0"):
        retriever.batch(QUERIES, k=0)
    assert [len(one) for one in retriever.batch(QUERIES, k=9)] == [4] * len(QUERIES)


@pytest.mark.parametrize("is_async", [False, True])
def test_too_few_picks_for_one_question_cost_the_others_nothing(encoder: TriEncoder, is_async: bool) -> None:
    """The budget has room for a long example or for two short ones."""
    rows = [{"source": f"cats {'very ' * 8}", "target": "count(cats)"}, *EXAMPLES[1:]]
    limits = {"k_min": 2, "max_tokens": 16, "tokenizer": lambda text: len(text.split())}
    strict = SequentialCompositionalRetriever.from_encoder(encoder, rows, k=2, **limits)
    asked = ["cats very very", "dogs"]
    if is_async:
        few, enough = asyncio.run(strict.abatch(asked, return_exceptions=True))
    else:
        few, enough = strict.batch(asked, return_exceptions=True)
    assert isinstance(few, InputError)
    assert str(few) == "k_min = 2, but only 1 examples can be picked"
    assert len(enough) == 2
    with pytest.raises(InputError, match="k_min = 2"):
        strict.batch(asked)
    with pytest.raises(InputError, match="k_min = 2"):
        strict.select_examples({"source": asked[0]})


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("method", ["on_retriever_start", "on_retriever_end"])
def test_a_handler_that_raises_costs_the_others_nothing(
    retriever: SequentialCompositionalRetriever, is_async: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strict(Recorder):
        raise_error = True

    recorder, original = Strict(), getattr(Recorder, method)

    def raising(self: Recorder, *given: Any, run_id: UUID, **more: Any) -> None:
        original(self, *given, run_id=run_id, **more)
        if self.runs[run_id][0] == QUERIES[1]:
            raise RuntimeError("no more")

    monkeypatch.setattr(Strict, method, raising)

    def batch(**options: Any) -> Any:
        if is_async:
            return asyncio.run(retriever.abatch(QUERIES, {"callbacks": [recorder]}, **options))
        return retriever.batch(QUERIES, {"callbacks": [recorder]}, **options)

    first, failed, last = batch(return_exceptions=True)
    assert isinstance(failed, RuntimeError)
    assert [d.id for d in first] == [d.id for d in retriever.invoke(QUERIES[0])]
    assert [d.id for d in last] == [d.id for d in retriever.invoke(QUERIES[2])]
    with pytest.raises(RuntimeError, match="no more"):
        batch()


class Tracer(BaseTracer):
    def __init__(self) -> None:
        super().__init__()
        self.roots: list[Any] = []

    def _persist_run(self, run: Any) -> None:
        self.roots.append(run)


@pytest.mark.parametrize("is_async", [False, True])
def test_selecting_is_a_run_inside_the_prompts_trace(
    retriever: SequentialCompositionalRetriever, is_async: bool
) -> None:
    prompt = FewShotPromptTemplate(
        example_selector=retriever,
        example_prompt=PromptTemplate.from_template("{source} {target}"),
        suffix="{source}",
        input_variables=["source"],
    )
    tracer = Tracer()
    if is_async:
        asyncio.run(prompt.ainvoke({"source": QUERIES[0]}, {"callbacks": [tracer]}))
    else:
        prompt.invoke({"source": QUERIES[0]}, {"callbacks": [tracer]})
    [root] = tracer.roots
    [child] = root.child_runs
    assert (root.run_type, child.run_type) == ("prompt", "retriever")
    assert child.inputs == {"query": QUERIES[0]}
    assert len(child.outputs["documents"]) == 2


class AwaitedIndex:
    """An engine that can only be awaited for reading, as one behind a network; the plain reader answers."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        nothing = np.zeros((0, 32), dtype=np.float32)
        self.vectors = PoolVectors(nothing, nothing)
        self.opened: list[str] = []

    def bind(self, fingerprint: str, dim: int) -> None:
        assert dim == 32

    def count(self) -> int:
        return len(self.rows)

    def known(self, ids: Any) -> set[str]:
        return {row.id for row in self.rows} & set(ids)

    def add(self, rows: Any, vectors: PoolVectors, *, replace: bool = False) -> None:
        self.rows = [*self.rows, *rows]
        self.vectors = PoolVectors(
            np.concatenate([self.vectors.candidate, vectors.candidate]),
            np.concatenate([self.vectors.context, vectors.context]),
        )

    def delete(self, ids: Any) -> int:
        return 7

    @asynccontextmanager
    async def read(self, where: Any = None) -> Any:
        self.opened.append(threading.current_thread().name)
        yield PlainReader(self.vectors, self.rows, waits=True)

    def run(self, work: Any) -> Any:
        return background().run(work)

    async def arun(self, work: Any) -> Any:
        return await background().arun(work)


async def test_an_engine_with_io_is_awaited(encoder: TriEncoder, retriever: SequentialCompositionalRetriever) -> None:
    index = AwaitedIndex()
    pool = ExamplePool(EXAMPLES, ids=list("abcd"))
    awaited = SequentialCompositionalRetriever(store=ExampleStore(encoder, pool, index), k=2)
    expected = [[d.page_content for d in retriever.invoke(query)] for query in QUERIES]
    assert [[d.page_content for d in found] for found in await awaited.abatch(QUERIES)] == expected
    assert [d.page_content for d in await awaited.ainvoke(QUERIES[0])] == expected[0]
    assert [d.page_content for d in awaited.invoke(QUERIES[0])] == expected[0]
    assert index.opened == ["langchain-rcr"] * 3
    await awaited.aadd_example({"source": QUERIES[1], "target": "x"}, id="new")
    assert (await awaited.ainvoke(QUERIES[1]))[0].id == "new"
    assert await awaited.adelete(["new"]) == 7
