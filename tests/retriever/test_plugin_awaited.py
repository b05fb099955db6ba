"""Questions awaited at the same time, with `asyncio.gather` or by many requests: one batch for the same options."""

import asyncio
import pickle
import threading
import types
from contextvars import ContextVar
from typing import Any
from unittest.mock import Mock

import pytest
from documents import same_documents
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from toys import lexical

from langchain_rcr import EngineError, InputError, Item, SequentialCompositionalRetriever, TriEncoder
from langchain_rcr.families.backbone import LangChainBackbone
from langchain_rcr.index.vectorstore import VectorStoreIndex

EXAMPLES = [
    {"source": f"how many {color} {animal} are there", "target": f"count({color}({animal}))", "big": big}
    for color, big in (("red", True), ("round", 1), ("old", 2))
    for animal in ("cats", "dogs", "mice")
]
QUERIES = ["how many red cats", "big round dogs", "mice", "old cats and red mice"]


class Counted:
    """An encoder's `judge_queries`, and how many questions each of its calls had."""

    def __init__(self, original: Any) -> None:
        self.original, self.sizes = original, list[int]()

    def __call__(self, queries: Any, *arguments: Any, **options: Any) -> Any:
        self.sizes.append(len(queries))
        if broken := {"broken", "not finite"} & {*queries}:
            raise RuntimeError("the encoder is broken") if "broken" in broken else InputError("not finite")
        return self.original(queries, *arguments, **options)


@pytest.fixture
def retriever() -> SequentialCompositionalRetriever:
    return SequentialCompositionalRetriever.from_encoder(lexical(EXAMPLES, dim=64), EXAMPLES, k=3)


@pytest.fixture
def counted(retriever: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted(retriever.store.encoder.judge_queries)
    monkeypatch.setattr(retriever.store.encoder, "judge_queries", counted)
    return counted


async def test_they_are_encoded_together_and_each_gets_its_own_picks(
    retriever: SequentialCompositionalRetriever, counted: Counted
) -> None:
    alone = [await retriever.ainvoke(query) for query in QUERIES]
    examples = await retriever.aselect_examples({"q": QUERIES[0]})
    assert counted.sizes == [1, 1, 1, 1, 1]
    found = await asyncio.gather(*map(retriever.ainvoke, QUERIES), retriever.abatch(QUERIES[:2]))
    assert counted.sizes[5:] == [6]
    assert all(map(same_documents, [*found[:4], *found[4]], [*alone, *alone[:2]]))
    several = await asyncio.gather(*(retriever.aselect_examples({"q": query}) for query in QUERIES))
    assert counted.sizes[6:] == [4]
    assert several[0] == examples


async def test_full_batches_leave_the_others_to_another_core(
    retriever: SequentialCompositionalRetriever, counted: Counted
) -> None:
    found = await asyncio.gather(*(retriever.ainvoke(query) for query in QUERIES * 10))
    assert sorted(counted.sizes) == [8, 16, 16]
    await asyncio.gather(*(retriever.abatch(QUERIES * 3) for _ in range(2)))
    assert counted.sizes[3:] == [12, 12]
    assert all(map(same_documents, found[:4], [await retriever.ainvoke(query) for query in QUERIES]))


async def test_embeddings_that_read_one_question_at_a_time_are_not_asked_one_after_the_other() -> None:
    together = threading.Barrier(3)

    class Remote(DeterministicFakeEmbedding):
        """Questions and entries have different vectors, so that questions can't be embedded in one request."""

        def embed_query(self, text: str) -> list[float]:
            if text in QUERIES:
                together.wait(timeout=60)
            return super().embed_query(f"query: {text}")

    items = [Item(str(row["source"]), str(row["target"])) for row in EXAMPLES]
    encoder = TriEncoder.build("embeddings", items, backbone=LangChainBackbone(Remote(size=16)), ngrams=0)
    remote = SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES, k=3)
    found = await asyncio.gather(*map(remote.ainvoke, QUERIES[:3]))
    assert [len(each) for each in found] == [3, 3, 3]


async def test_a_lone_question_is_embedded_in_its_own_context_and_several_in_that_of_none() -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")
    seen = list[tuple[str, list[str]]]()

    class Traced(DeterministicFakeEmbedding):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            seen.append((user.get(), texts))
            return super().embed_documents(texts)

        def embed_query(self, text: str) -> list[float]:
            return self.embed_documents([text])[0]

    async def asked(query: str) -> Any:
        user.set(query)
        return await remote.ainvoke(query)

    items = [Item(str(row["source"]), str(row["target"])) for row in EXAMPLES]
    encoder = TriEncoder.build("embeddings", items, backbone=LangChainBackbone(Traced(size=16)), ngrams=0)
    remote = SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES, k=3)
    del seen[:]
    await asyncio.gather(asked("mice"))
    tasks = [asyncio.create_task(asked(query)) for query in QUERIES[:2]]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await asyncio.gather(*map(asked, QUERIES[:3]))
    assert seen == [("mice", ["mice"]), ("nobody", QUERIES[:2]), ("nobody", QUERIES[:3])]


async def test_a_store_outside_this_process_is_asked_side_by_side(retriever: SequentialCompositionalRetriever) -> None:
    together, ready = threading.Barrier(4), threading.Event()

    class Remote(InMemoryVectorStore):
        def similarity_search_by_vector(self, *arguments: Any, **options: Any) -> Any:
            if ready.is_set() and threading.current_thread().ident not in met:
                met.add(threading.current_thread().ident)
                together.wait(timeout=60)
            return super().similarity_search_by_vector(*arguments, **options)

    met = set[int | None]()
    encoder, index = retriever.store.encoder, VectorStoreIndex(Remote, parallel=True)
    remote = SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES, k=3, index=index)
    ready.set()
    found = await asyncio.gather(*map(remote.ainvoke, QUERIES))
    assert all(map(same_documents, found, retriever.batch(QUERIES)))


async def test_options_and_filters_of_one_have_no_effect_on_another(
    retriever: SequentialCompositionalRetriever, counted: Counted
) -> None:
    given = [{"k": 1}, {"k": 2}, {"filter": {"big": True}}, {"filter": {"big": 1}}, {"filter": {"big": 2}}, {}]
    alone = [await retriever.ainvoke("cats", **options) for options in given]
    del counted.sizes[:]
    found = await asyncio.gather(*(retriever.ainvoke("cats", **options) for options in given for _ in range(2)))
    assert counted.sizes == [2] * 6
    assert all(map(same_documents, found[::2], alone))
    assert all(map(same_documents, found[1::2], alone))
    assert [each.metadata["big"] for each in found[4]] == [True] * 3


async def test_one_that_is_refused_takes_no_other_with_it(retriever: SequentialCompositionalRetriever) -> None:
    alone = await retriever.ainvoke("mice")
    tasks = retriever.ainvoke(" "), retriever.ainvoke("mice"), retriever.ainvoke("mice", draft="count(mice)")
    blank, found, drafted = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(blank, InputError)
    assert isinstance(drafted, InputError)  # this family takes no drafts
    assert isinstance(found, list)
    assert same_documents(found, alone)


async def test_one_that_is_cancelled_takes_no_other_with_it(
    retriever: SequentialCompositionalRetriever, counted: Counted
) -> None:
    alone = await retriever.ainvoke("mice")
    first, second, third = (asyncio.create_task(retriever.ainvoke("mice")) for _ in range(3))
    await asyncio.sleep(0)  # all three are waiting
    first.cancel()
    assert same_documents(await second, alone)
    assert same_documents(await third, alone)
    assert first.cancelled()


async def test_where_all_are_cancelled_nothing_is_done_and_the_next_starts_anew(
    retriever: SequentialCompositionalRetriever, counted: Counted
) -> None:
    tasks = [asyncio.create_task(retriever.ainvoke("mice")) for _ in range(2)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    late = asyncio.create_task(retriever.ainvoke("mice"))
    await asyncio.wait([*tasks, late])
    assert [task.cancelled() for task in tasks] == [True, True]
    assert len(late.result()) == 3
    assert sum(counted.sizes) <= 3
    assert not retriever.store.now._next


async def test_where_every_task_is_cancelled_the_next_question_is_answered(
    retriever: SequentialCompositionalRetriever,
) -> None:
    before = asyncio.all_tasks()
    task = asyncio.create_task(retriever.ainvoke("mice"))
    await asyncio.sleep(0)
    for each in (others := asyncio.all_tasks() - before):
        each.cancel()
    await asyncio.wait(others)
    assert task.cancelled()
    assert len(await asyncio.wait_for(retriever.ainvoke("mice"), timeout=60)) == 3
    assert not retriever.store.now._next


def test_tasks_may_start_eagerly(retriever: SequentialCompositionalRetriever, counted: Counted) -> None:
    @types.coroutine
    def rest(coro: Any, waits_for: Any, ended: list[Any]) -> Any:
        while not ended:
            sent = yield waits_for
            try:
                waits_for = coro.send(sent)
            except StopIteration as stop:
                ended = [stop.value]
        return ended[0]

    def eager(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """What `asyncio.eager_task_factory` does (Python 3.12), as long as nothing fails."""
        waits_for, ended = None, list[Any]()
        try:
            waits_for = coro.send(None)
        except StopIteration as stop:
            ended = [stop.value]
        return asyncio.Task(rest(coro, waits_for, ended), loop=loop, **options)

    async def asked() -> list[Any]:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(eager)
        try:
            return await asyncio.gather(*map(retriever.ainvoke, QUERIES))
        finally:
            loop.set_task_factory(None)

    alone = retriever.batch(QUERIES)
    assert all(map(same_documents, asyncio.run(asked()), alone))
    assert counted.sizes == [4, 4]


async def test_a_text_that_cannot_be_embedded_fails_alone(
    retriever: SequentialCompositionalRetriever, counted: Counted
) -> None:
    alone = await retriever.ainvoke("mice")
    tasks = retriever.ainvoke("broken"), retriever.ainvoke("mice"), retriever.ainvoke("cats")
    broken, found, _ = await asyncio.gather(*tasks, return_exceptions=True)
    odd, others = await asyncio.gather(*map(retriever.ainvoke, ("not finite", "mice")), return_exceptions=True)
    assert isinstance(broken, RuntimeError)
    assert isinstance(found, list)
    assert same_documents(found, alone)
    assert isinstance(odd, InputError)
    assert isinstance(others, list)
    assert same_documents(others, alone)
    assert counted.sizes == [1, 3, 1, 1, 1, 2, 1, 1]
    with pytest.raises(RuntimeError, match="the encoder is broken"):
        await retriever.ainvoke("broken")
    assert counted.sizes[8:] == [1]


async def test_an_outage_of_the_engine_reaches_all_at_once(
    retriever: SequentialCompositionalRetriever, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(retriever.store.index, "read", Mock(side_effect=EngineError("the engine is down")))
        found = await asyncio.gather(*map(retriever.ainvoke, QUERIES), return_exceptions=True)
    assert [str(each) for each in found] == ["the engine is down"] * 4
    assert counted.sizes == [4]
    assert len(await retriever.ainvoke("mice")) == 3


async def test_a_retriever_is_pickled_while_it_answers(retriever: SequentialCompositionalRetriever) -> None:
    task = asyncio.create_task(retriever.ainvoke("mice"))
    await asyncio.sleep(0)
    assert retriever.store.now._next
    again = pickle.loads(pickle.dumps(retriever))
    assert same_documents(await again.ainvoke("mice"), await task)


def test_each_event_loop_has_its_own(retriever: SequentialCompositionalRetriever, counted: Counted) -> None:
    alone = retriever.invoke("mice")
    for _ in range(3):
        assert same_documents(asyncio.run(retriever.ainvoke("mice")), alone)
    assert counted.sizes == [1] * 4
    assert not retriever.store.now._next
