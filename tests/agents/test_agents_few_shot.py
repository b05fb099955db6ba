"""FewShotMiddleware: what the model of an agent is asked, over HTTP."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.example_selectors import LengthBasedExampleSelector
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from openai_server import OpenAIServer
from toys import lexical

from langchain_rcr import FewShotMiddleware, InputError, OutcomeLog, OutcomeRecorder, SequentialCompositionalRetriever
from langchain_rcr.agents import ModelRequest


def _call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


ROWS = [
    {"source": f"{verb} the {noun}", "target": _call(verb, what=noun), "result": f"{noun}: done", "house": house}
    for verb, noun, house in product(["open", "close", "paint"], ["door", "window"], ["red", "blue"])
]


@tool("open")
def open_(what: str) -> str:
    """Open a thing."""
    return f"{what} is open"


@dataclass
class House:
    """The agent's context."""

    house: str


@pytest.fixture(scope="module")
def retriever() -> SequentialCompositionalRetriever:
    return SequentialCompositionalRetriever.from_encoder(lexical(ROWS, dim=16), ROWS, k=2)


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    """A model that calls `open` once for each question, and then says so."""

    def answer(_: str) -> str | dict[str, Any]:
        messages = served.requests[-1].body["messages"]
        if messages[-1]["role"] == "tool":
            return "It is open now."
        call = {"id": f"c{len(messages)}", "type": "function"}
        return {"content": None, "tool_calls": [call | {"function": {"name": "open", "arguments": '{"what": "door"}'}}]}

    with OpenAIServer(answer) as served:
        yield served


def _agent(model: BaseChatModel, middleware: FewShotMiddleware, **options: Any) -> Any:
    return create_agent(model, [open_], system_prompt="You open.", middleware=[middleware], **options)


def _asked(server: OpenAIServer) -> list[list[dict[str, Any]]]:
    return [request.body["messages"] for request in server.requests]


def _messages(retriever: Any, question: str = "open the door", **options: Any) -> list[Any]:
    """What a model is asked."""
    seen: list[Any] = []
    request = ModelRequest(model=None, messages=[HumanMessage(question)])
    FewShotMiddleware(retriever, **options).wrap_model_call(request, lambda asked: seen.extend(asked.messages))
    return seen


def test_the_model_sees_calls_and_results_between_system_message_and_conversation(
    server: OpenAIServer, model: BaseChatModel, retriever: SequentialCompositionalRetriever
) -> None:
    question = {"role": "user", "content": "open the door"}
    said = _agent(model, FewShotMiddleware(retriever)).invoke({"messages": [question]})["messages"]
    assert [message.type for message in said] == ["human", "ai", "tool", "ai"]  # no example among them
    first, second = _asked(server)
    assert [message["role"] for message in first] == ["system", *["user", "assistant", "tool"] * 2, "user"]
    row = retriever.select_examples({"source": "open the door"})[0]
    (call,) = first[2]["tool_calls"]
    assert first[1]["content"] == row["source"]
    assert json.loads(call["function"]["arguments"]) == json.loads(row["target"])["arguments"]
    assert first[3] == {"role": "tool", "content": row["result"], "tool_call_id": call["id"]}
    assert second[: len(first)] == first  # what a provider's cache can use again


def test_system_messages_of_the_conversation_stay_in_front(
    server: OpenAIServer, model: BaseChatModel, retriever: SequentialCompositionalRetriever
) -> None:
    """Anthropic and many chat templates accept none after another message."""
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "open the door"}]
    for prompt, count in ((None, 1), ("You open.", 2)):
        agent = create_agent(model, [open_], system_prompt=prompt, middleware=[FewShotMiddleware(retriever)])
        agent.invoke({"messages": said})
        roles = [message["role"] for message in _asked(server)[-2]]
        assert roles == ["system"] * count + ["user", "assistant", "tool"] * 2 + ["user"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_streamed_with_a_checkpointer_over_two_turns(
    server: OpenAIServer, model: BaseChatModel, retriever: SequentialCompositionalRetriever, is_async: bool
) -> None:
    agent = _agent(model, FewShotMiddleware(retriever), checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    for _ in range(2):
        asked: Any = {"messages": [HumanMessage("open the door")]}
        if is_async:
            parts = [part async for part in agent.astream(asked, thread, stream_mode="messages")]
        else:
            parts = [*agent.stream(asked, thread, stream_mode="messages")]
        assert "".join(part.text for part, _ in parts if part.type == "AIMessageChunk") == "It is open now."
        assert {part.text for part, _ in parts if part.type == "tool"} == {"door is open"}
    kept = agent.get_state(thread).values["messages"]
    assert [message.type for message in kept] == ["human", "ai", "tool", "ai"] * 2
    calls = _asked(server)
    assert len(calls) == 4
    for before, after in pairwise(calls):
        assert after[: len(before)] == before


def test_the_variables_may_name_a_group_of_the_context(
    server: OpenAIServer, model: BaseChatModel, retriever: Any
) -> None:
    grouped = retriever.model_copy(update={"group": "house"})
    middleware = FewShotMiddleware(
        grouped, variables=lambda request: {"source": request.messages[0].text, "house": request.runtime.context.house}
    )
    agent = _agent(model, middleware, context_schema=House)
    for house in ("red", "blue"):
        agent.invoke({"messages": [HumanMessage("open the door")]}, context=House(house))
        rows = grouped.select_examples({"source": "open the door", "house": house})
        assert {row["house"] for row in rows} == {house}
        assert [message["content"] for message in _asked(server)[-1][1:6:3]] == [row["source"] for row in rows]


def test_programs_that_are_no_calls_are_texts() -> None:
    rows = [{"question": f"add {n}", "program": f"add({n})"} for n in range(3)]
    encoder = lexical(rows, 8, keys=("question", "program"))
    keys = {"source_key": "question", "target_key": "program"}
    retriever = SequentialCompositionalRetriever.from_encoder(encoder, rows, k=1, **keys)
    assert _messages(retriever, "add 2") == [HumanMessage("add 2"), AIMessage("add(2)"), HumanMessage("add 2")]


def test_keys_may_be_any_names() -> None:
    """As the columns of a spreadsheet; they enter no template."""
    rows = [{"User question": f"add {n}", "tool-call": f"add({n})"} for n in range(3)]
    keys = {"source_key": "User question", "target_key": "tool-call"}
    encoder = lexical(rows, 8, keys=("User question", "tool-call"))
    retriever = SequentialCompositionalRetriever.from_encoder(encoder, rows, k=1, **keys)
    assert _messages(retriever, "add 2")[1] == AIMessage("add(2)")


def test_several_calls_have_a_result_each() -> None:
    calls = f"[{_call('a', n=1, deep={'x': [2.5, None]})}, {_call('b')}]"
    rows = [{"source": "both", "target": calls, "result": ["one", "two"]}]
    retriever = SequentialCompositionalRetriever.from_encoder(lexical(rows, 8), rows)
    _, ai, one, two, _ = _messages(retriever, "both")
    ids = [call["id"] for call in ai.tool_calls]
    assert [(call["name"], call["args"]) for call in ai.tool_calls] == [
        ("a", {"n": 1, "deep": {"x": [2.5, None]}}),
        ("b", {}),
    ]
    assert [one, two] == [
        ToolMessage("one", tool_call_id=ids[0], name="a"),
        ToolMessage("two", tool_call_id=ids[1], name="b"),
    ]
    assert len({*ids}) == 2
    assert all(len(name) == 9 and name.isalnum() for name in ids)
    bad = SequentialCompositionalRetriever.from_encoder(lexical(rows, 8), [rows[0] | {"result": ["one"]}])
    with pytest.raises(InputError, match="2 calls and 1 result"):
        _messages(bad, "both")


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "You have correctly called this tool."),
        ({"doors": ["é"]}, '{"doors": ["é"]}'),
        (3, "3"),
        ([{"doors": 1}], '[{"doors": 1}]'),
        (["red", "blue"], '["red", "blue"]'),
        ([], "[]"),
    ],
)
def test_what_a_tool_gave_may_be_anything(result: Any, told: str) -> None:
    call = _call("open", what="door")
    for target, given in ((call, result), (f" [{call}]", [result])):
        rows = [{"source": "open the door", "target": target, "result": given}]
        retriever = SequentialCompositionalRetriever.from_encoder(lexical(rows, dim=8), rows, k=1)
        assert _messages(retriever)[2].content == told


def test_without_a_question_there_are_no_examples(retriever: SequentialCompositionalRetriever) -> None:
    assert _messages(retriever, " ") == [HumanMessage(" ")]
    assert _messages(retriever, variables=lambda _: None) == [HumanMessage("open the door")]
    picture = HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])
    grouped = retriever.model_copy(update={"group": "house"})
    for text in ("", " ", picture.text):
        variables = lambda _, text=text: {"source": text, "house": "red"}  # noqa: E731
        assert _messages(grouped, variables=variables) == [HumanMessage("open the door")]


def test_bad_arguments_are_named(retriever: SequentialCompositionalRetriever) -> None:
    with pytest.raises(InputError, match="must be a LangChain example selector, not str"):
        FewShotMiddleware("retriever")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"\['source'\] can't be the name"):
        FewShotMiddleware(retriever, source_key=["source"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="shows 'sorce' of each example"):
        _messages(retriever, source_key="sorce", variables=lambda _: {"sorce": "open"})
    with pytest.raises(InputError, match="variables must give a mapping of names to values, not str"):
        _messages(retriever, variables=lambda _: "open the door")
    rows = [{"source": "open the door", "target": {"name": "open"}}]
    others = LengthBasedExampleSelector(examples=rows, example_prompt=PromptTemplate.from_template("{source}"))
    with pytest.raises(InputError, match=r"must be texts, not 'open the door', \{'name': 'open'\}"):
        _messages(others)


def test_a_run_that_waits_for_a_human_has_no_outcome_yet(
    server: OpenAIServer, model: BaseChatModel, retriever: SequentialCompositionalRetriever, tmp_path: Path
) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    logged = retriever.model_copy(update={"log": log})
    judged: list[str] = []

    def outcome(output: dict[str, Any]) -> float:
        judged.append(output["messages"][-1].text)
        return 1.0

    middleware = [FewShotMiddleware(logged), HumanInTheLoopMiddleware({"open": True})]
    agent = create_agent(model, [open_], middleware=middleware, checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}, "callbacks": [OutcomeRecorder(logged, outcome)]}
    assert "__interrupt__" in agent.invoke({"messages": [HumanMessage("open the door")]}, config)
    agent.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config)
    assert judged == ["It is open now."]
    assert [each.outcome for each in log.read()] == [None, 1.0]
