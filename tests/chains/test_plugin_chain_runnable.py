"""semantic_parsing_chain as a Runnable like others: batches, traces, fallbacks, threads, real servers."""

import copy
import inspect
import pickle
import threading
from typing import Any

import pytest
from chain_models import BAD, GOOD, QUESTIONS, ROWS, TABLES, Chat, Completion, asked_in, fake, sql_for
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableParallel
from openai_server import OpenAIServer
from run_tree import RunTree
from toys import lexical

from langchain_rcr import Prompt, SequentialCompositionalRetriever, few_shot_prompt
from langchain_rcr.chains.semantic_parsing import ParsedProgram, semantic_parsing_chain


@pytest.fixture
def retriever() -> SequentialCompositionalRetriever:
    encoder = lexical(ROWS, dim=16)
    return SequentialCompositionalRetriever.from_encoder(encoder, ROWS, k=2)


# ---------------------------------------------------------------- many questions


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_batch_asks_retriever_and_model_once_an_attempt(
    retriever: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    searches = []
    for name in ("batch", "abatch"):
        original = getattr(SequentialCompositionalRetriever, name)
        monkeypatch.setattr(
            SequentialCompositionalRetriever,
            name,
            lambda self, inputs, *args, original=original, **kwargs: (
                searches.append(inputs) or original(self, inputs, *args, **kwargs)
            ),
        )

    def first(prompt: str) -> str:
        return BAD if asked_in(prompt) in (QUESTIONS[0], QUESTIONS[3]) else sql_for(prompt)

    model = Completion(answers=[first, sql_for])
    chain = semantic_parsing_chain(model, retriever, "sql")
    results = await chain.abatch(QUESTIONS) if awaited else chain.batch(QUESTIONS)
    assert [result.program for result in results] == [f"SELECT COUNT(*) FROM {table}" for table in TABLES]
    assert [len(result.answers) for result in results] == [2, 1, 1, 2, 1]
    assert searches == [QUESTIONS]
    for question, result in zip(QUESTIONS, results, strict=True):
        assert [pick.id for pick in result.picks] == [document.id for document in retriever.invoke(question)]
    assert [[asked_in(prompt) for prompt in call] for call in model.calls] == [QUESTIONS, [QUESTIONS[0], QUESTIONS[3]]]


@pytest.mark.parametrize("awaited", [False, True])
async def test_one_failing_call_leaves_the_others_alone(
    retriever: SequentialCompositionalRetriever, awaited: bool
) -> None:
    answers: dict[str, list[Any]] = {question: [GOOD] for question in QUESTIONS}
    answers[QUESTIONS[1]] = [ConnectionError("gone")]
    answers[QUESTIONS[2]] = [BAD, TimeoutError("late")]
    chain = semantic_parsing_chain(Chat(answers=answers), retriever, "sql")
    results: list[Any] = (
        await chain.abatch(QUESTIONS, return_exceptions=True)
        if awaited
        else chain.batch(QUESTIONS, return_exceptions=True)
    )
    assert [type(result) for result in results] == [
        ParsedProgram,
        ConnectionError,
        TimeoutError,
        ParsedProgram,
        ParsedProgram,
    ]
    with pytest.raises(ConnectionError, match="gone"):
        await chain.abatch(QUESTIONS) if awaited else chain.batch(QUESTIONS)
    assert chain.batch([]) == await chain.abatch([]) == []


# ---------------------------------------------------------------- a Runnable like others


async def test_errors_of_the_model_pass_for_fallbacks_and_retries(retriever: SequentialCompositionalRetriever) -> None:
    down = Chat(answers={QUESTIONS[0]: [ConnectionError("gone")]})
    chain = semantic_parsing_chain(down, retriever, "sql")
    for call in (chain.invoke, chain.batch):
        with pytest.raises(ConnectionError, match="gone"):
            call(QUESTIONS[0] if call == chain.invoke else QUESTIONS[:1])  # type: ignore[operator]
    safe = chain.with_fallbacks([semantic_parsing_chain(fake(GOOD, GOOD), retriever, "sql")])
    assert safe.invoke(QUESTIONS[0]).program == GOOD
    assert (await safe.ainvoke(QUESTIONS[0])).program == GOOD
    flaky = iter([ConnectionError("gone"), GOOD])

    def answer(_: Any) -> str:
        outcome = next(flaky)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    again = semantic_parsing_chain(RunnableLambda(answer), retriever, "sql").with_retry(wait_exponential_jitter=False)
    assert again.invoke(QUESTIONS[0]).program == GOOD


async def test_the_trace_is_readable(retriever: SequentialCompositionalRetriever) -> None:
    attempt = ["GenericFakeChatModel", "parse_program"]
    expected = {"SemanticParsingChain": ["SequentialCompositionalRetriever", "ChatPromptTemplate", *attempt, *attempt]}
    tree = RunTree()
    chain = semantic_parsing_chain(fake(BAD, GOOD, BAD, GOOD), retriever, "sql")
    chain.invoke(QUESTIONS[0], {"callbacks": [tree], "tags": ["mine"], "metadata": {"user": 3}})
    await chain.ainvoke(QUESTIONS[0], {"callbacks": [tree], "tags": ["mine"], "metadata": {"user": 3}})
    assert tree.shape == [expected, expected]
    for root in tree.roots:
        for run in (root, *root.child_runs):
            assert run.tags == ["mine"]
            assert run.metadata["user"] == 3
            assert run.error is None
        assert root.inputs == {"input": QUESTIONS[0]}
        assert root.outputs["output"].program == GOOD  # type: ignore[index]
        assert root.child_runs[0].run_type == "retriever"
    named = RunTree()
    semantic_parsing_chain(fake(GOOD), retriever, "sql").invoke("x", {"callbacks": [named], "run_name": "parse it"})
    assert [run.name for run in named.roots] == ["parse it"]
    assert named.roots[0].child_runs[2].name == "GenericFakeChatModel"


def test_a_batch_may_be_any_sequence(retriever: SequentialCompositionalRetriever) -> None:
    chain = semantic_parsing_chain(FakeListLLM(responses=[GOOD]), retriever, "sql")
    assert [answer.program for answer in chain.batch(("a", {"source": "b"}))] == [GOOD, GOOD]
    for batch in (chain.batch, chain.abatch):  # a checker refuses `list[str]` as a list of texts or mappings
        assert inspect.signature(batch).parameters["inputs"].annotation.startswith("Sequence[")


def test_every_question_of_a_batch_has_its_own_trace(retriever: SequentialCompositionalRetriever) -> None:
    trees = [RunTree(), RunTree()]
    answers: dict[str, list[Any]] = {QUESTIONS[0]: [BAD, GOOD], QUESTIONS[1]: [ConnectionError("gone")]}
    chain = semantic_parsing_chain(Chat(answers=answers), retriever, "sql")
    chain.batch(QUESTIONS[:2], [{"callbacks": [tree]} for tree in trees], return_exceptions=True)
    front = ["SequentialCompositionalRetriever", "ChatPromptTemplate"]
    assert trees[0].shape == [{"SemanticParsingChain": [*front, "Chat", "parse_program", "Chat", "parse_program"]}]
    assert trees[1].shape == [{"SemanticParsingChain": [*front, "Chat"]}]
    assert trees[0].roots[0].error is None
    assert "gone" in str(trees[1].roots[0].error)


def test_callers_context_is_the_parent(retriever: SequentialCompositionalRetriever) -> None:
    tree = RunTree()
    chain = semantic_parsing_chain(fake(GOOD), retriever, "sql")
    outer = RunnableLambda(chain.invoke, name="outer")
    outer.invoke(QUESTIONS[0], {"callbacks": [tree]})
    assert [run.name for run in tree.roots] == ["outer"]
    assert [run.name for run in tree.roots[0].child_runs] == ["SemanticParsingChain"]


async def test_composing_and_streaming(retriever: SequentialCompositionalRetriever) -> None:
    chain = semantic_parsing_chain(fake(*[GOOD] * 9), retriever, "sql")
    both = RunnableParallel(program=chain | (lambda result: result.program), examples=retriever)
    assert both.invoke(QUESTIONS[0]) == {"program": GOOD, "examples": retriever.invoke(QUESTIONS[0])}
    assert [result.program for result in chain.stream(QUESTIONS[0])] == [GOOD]
    assert [result.program async for result in chain.astream(QUESTIONS[0])] == [GOOD]
    tokens = [
        event["data"]["chunk"].content
        async for event in chain.astream_events(QUESTIONS[0], version="v2")
        if event["event"] == "on_chat_model_stream"
    ]
    assert "".join(tokens) == GOOD
    assert len(tokens) > 1


def test_schemas_clones_and_settings(retriever: SequentialCompositionalRetriever) -> None:
    chain = semantic_parsing_chain(FakeListLLM(responses=[GOOD]), retriever, "sql")
    assert {kind["type"] for kind in chain.get_input_jsonschema()["anyOf"]} == {"string", "object"}
    assert {"program", "tree", "picks", "answers", "error", "result"} == set(
        chain.get_output_jsonschema()["$defs"]["ParsedProgram"]["properties"]
    )
    shown = Prompt(name="sql", db_schema="CREATE TABLE river (name TEXT)")
    for each in (chain, semantic_parsing_chain(FakeListLLM(responses=[GOOD]), retriever, "sql", prompt=shown)):
        for clone in (copy.deepcopy(each), pickle.loads(pickle.dumps(each))):
            assert clone.invoke(QUESTIONS[0]) == each.invoke(QUESTIONS[0])
    patient = semantic_parsing_chain(FakeListLLM(responses=["?"]), retriever, "sql").configurable_fields(
        retries=ConfigurableField(id="retries")
    )
    assert len(patient.invoke("x").answers) == 2
    assert len(patient.invoke("x", {"configurable": {"retries": 3}}).answers) == 4


def test_many_threads_and_concurrency_limits(retriever: SequentialCompositionalRetriever) -> None:
    running, peak, lock = 0, 0, threading.Lock()

    class Counting(BaseCallbackHandler):
        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            nonlocal running, peak
            with lock:
                running += 1
                peak = max(peak, running)

        def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
            nonlocal running
            with lock:
                running -= 1

    model = Chat(answers={question: [BAD, GOOD] for question in QUESTIONS})
    chain = semantic_parsing_chain(model, retriever, "sql")
    results = chain.batch(QUESTIONS * 4, {"max_concurrency": 2, "callbacks": [Counting()]})
    assert [len(result.answers) for result in results] == [2] * 20
    assert 1 <= peak <= 2


# ---------------------------------------------------------------- a real protocol


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ChatOpenAI", "OpenAI"])
async def test_over_http(retriever: SequentialCompositionalRetriever, kind: str) -> None:
    import httpx
    import langchain_openai
    import openai

    def answer(prompt: str) -> str:
        again = "not a program" in prompt
        return f"```sql\n{GOOD}\n```" if again else "I'd say rivers."

    with OpenAIServer(answer) as server:
        async with httpx.AsyncClient() as client:
            options: dict[str, Any] = {"base_url": server.base_url, "api_key": "k", "max_retries": 0}
            options |= {"http_async_client": client} | ({"batch_size": 1} if kind == "OpenAI" else {})
            model = getattr(langchain_openai, kind)(model="m", **options)
            chain = semantic_parsing_chain(model, retriever, "sql")
            expected = chain.invoke(QUESTIONS[0])
            assert expected.program == GOOD
            assert await chain.ainvoke(QUESTIONS[0]) == expected
            assert len(server.requests) == 4
            first, second = (request.body for request in server.requests[:2])
            if kind == "ChatOpenAI":
                assert [message["role"] for message in first["messages"]] == ["user", "assistant"] * 2 + ["user"]
                assert second["messages"][:5] == first["messages"]
                assert [message["role"] for message in second["messages"][5:]] == ["assistant", "user"]
            else:
                assert server.requests[0].prompt == few_shot_prompt(retriever).format(source=QUESTIONS[0])
                assert first["stop"] == ["\nSource:"]
            assert {result.program for result in chain.batch(QUESTIONS)} == {GOOD}
            assert {result.program for result in await chain.abatch(QUESTIONS)} == {GOOD}

            server.fail("empty", "empty")
            assert chain.invoke(QUESTIONS[0]).error == "it is empty"
            server.fail("500")
            with pytest.raises(openai.InternalServerError):
                chain.invoke(QUESTIONS[0])
            server.fail("500", "500")
            assert chain.with_retry(wait_exponential_jitter=False).invoke(QUESTIONS[0]) == expected


def test_a_refusal_is_a_result(retriever: SequentialCompositionalRetriever) -> None:
    from langchain_openai import ChatOpenAI

    with OpenAIServer() as server:
        server.fail("refusal", "refusal")
        model = ChatOpenAI(model="m", base_url=server.base_url, api_key="k", max_retries=0)  # type: ignore[arg-type]
        result = semantic_parsing_chain(model, retriever, "functional").invoke(QUESTIONS[0])
    assert (result.ok, result.error) == (False, "it is empty")
