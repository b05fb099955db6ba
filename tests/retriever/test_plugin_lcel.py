"""Where LangChain users put a retriever: chains, tools, fallbacks, settings at call time, LangGraph nodes."""

from typing import Any, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import (
    ConfigurableField,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.tools import create_retriever_tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from run_tree import RunTree
from toys import lexical

from langchain_rcr import InputError, SequentialCompositionalRetriever, few_shot_prompt
from langchain_rcr.chains.semantic_parsing import ParsedProgram, semantic_parsing_chain

ROWS = [
    {"source": f"{asks} {table}", "target": f"SELECT {what} FROM {table}"}
    for asks, what in (("how many", "COUNT(*)"), ("name a", "name"))
    for table in ("river", "city", "lake")
]
QUESTION = "how many river are there"
GOOD = "SELECT COUNT(*) FROM river"


@pytest.fixture
def retriever() -> SequentialCompositionalRetriever:
    encoder = lexical(ROWS, dim=16)
    return SequentialCompositionalRetriever.from_encoder(encoder, ROWS, k=2)


def _joined(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


async def test_in_the_usual_retrieval_chain(retriever: SequentialCompositionalRetriever) -> None:
    prompt = ChatPromptTemplate([("human", "{examples}\n\n{question}")])
    model = GenericFakeChatModel(messages=iter(["first answer", "second answer", "third answer", "fourth answer"]))
    seen: list[str] = []
    chain = (
        {"examples": retriever | _joined, "question": RunnablePassthrough()}
        | prompt
        | RunnableLambda(lambda value: seen.append(value.to_messages()[0].content) or value)
        | model
        | StrOutputParser()
    )
    assert chain.invoke(QUESTION) == "first answer"
    assert await chain.ainvoke(QUESTION) == "second answer"
    assert list(chain.stream(QUESTION)) == ["third", " ", "answer"]
    assert [piece async for piece in chain.astream(QUESTION)] == ["fourth", " ", "answer"]
    assert seen == [f"{_joined(retriever.invoke(QUESTION))}\n\n{QUESTION}"] * 4


def test_two_settings_side_by_side(retriever: SequentialCompositionalRetriever) -> None:
    wide = retriever.model_copy(update={"k": 5})
    both = RunnableParallel(few=retriever, many=wide).invoke(QUESTION)
    assert both == {"few": retriever.invoke(QUESTION), "many": wide.invoke(QUESTION)}
    assert [len(documents) for documents in both.values()] == [2, 5]
    batched = RunnableParallel(few=retriever, many=wide).batch([QUESTION, "name a lake"])
    assert [[len(documents) for documents in one.values()] for one in batched] == [[2, 5], [2, 5]]


async def test_as_a_tool(retriever: SequentialCompositionalRetriever) -> None:
    tool = create_retriever_tool(retriever, "examples", "Finds questions with their SQL.")
    assert tool.invoke({"query": QUESTION}) == "\n\n".join(row.page_content for row in retriever.invoke(QUESTION))
    assert await tool.ainvoke({"query": QUESTION}) == tool.invoke({"query": QUESTION})
    full = create_retriever_tool(
        retriever,
        "examples",
        "Finds questions with their SQL.",
        document_prompt=PromptTemplate.from_template("{step}. {source}"),
        document_separator="; ",
        response_format="content_and_artifact",
    )
    call = {"type": "tool_call", "id": "1", "name": "examples", "args": {"query": QUESTION}}
    message = full.invoke(call)
    first, second = retriever.invoke(QUESTION)
    assert message.content == f"1. {first.metadata['source']}; 2. {second.metadata['source']}"
    assert message.artifact == [first, second]
    tree = RunTree()
    tool.invoke({"query": QUESTION}, {"callbacks": [tree]})
    assert tree.shape == [{"examples": ["SequentialCompositionalRetriever"]}]
    with pytest.raises(InputError, match="the query is blank"):
        tool.invoke({"query": " "})


async def test_with_fallbacks(retriever: SequentialCompositionalRetriever) -> None:
    empty = SequentialCompositionalRetriever.from_encoder(retriever.store.encoder, [], k=2, k_min=1)
    with pytest.raises(InputError):
        empty.invoke(QUESTION)
    safe = empty.with_fallbacks([retriever])
    assert safe.invoke(QUESTION) == await safe.ainvoke(QUESTION) == retriever.invoke(QUESTION)
    expected = [[document.id for document in retriever.invoke(query)] for query in (QUESTION, "name a lake")]
    for batched in (safe.batch([QUESTION, "name a lake"]), await safe.abatch([QUESTION, "name a lake"])):
        assert [[document.id for document in documents] for documents in batched] == expected
    only = empty.with_fallbacks([retriever], exceptions_to_handle=(ConnectionError,))
    with pytest.raises(InputError):
        only.invoke(QUESTION)


async def test_settings_at_call_time(retriever: SequentialCompositionalRetriever) -> None:
    flexible = retriever.configurable_fields(k=ConfigurableField(id="k", name="how many examples"))
    for k in (1, 3, 6):
        config: Any = {"configurable": {"k": k}}
        assert flexible.invoke(QUESTION, config) == retriever.invoke(QUESTION, k=k)
        assert await flexible.with_config(config).ainvoke(QUESTION) == retriever.invoke(QUESTION, k=k)
        assert len((flexible | _joined).invoke(QUESTION, config).split("Source: ")) == k + 1
        assert len((RunnablePassthrough() | flexible).invoke(QUESTION, config)) == k
    assert [spec.id for spec in flexible.config_specs] == ["k"]
    either = retriever.configurable_alternatives(
        ConfigurableField(id="pool"), default_key="small", large=retriever.model_copy(update={"k": 6})
    )
    assert len(either.invoke(QUESTION)) == 2
    assert len(either.invoke(QUESTION, {"configurable": {"pool": "large"}})) == 6


def test_with_config_and_bind(retriever: SequentialCompositionalRetriever) -> None:
    tree = RunTree()
    named = retriever.with_config(run_name="examples", tags=["sql"], metadata={"pool": 7}, callbacks=[tree])
    assert named.invoke(QUESTION) == retriever.invoke(QUESTION)
    assert [row[0].id for row in named.batch([QUESTION, QUESTION])] == [retriever.invoke(QUESTION)[0].id] * 2
    assert tree.shape == ["examples"] * 3
    for run in tree.roots:
        assert run.tags == ["sql"]
        assert run.metadata["pool"] == 7
        assert run.run_type == "retriever"
    assert retriever.bind(k=3).invoke(QUESTION) == retriever.invoke(QUESTION, k=3)


async def test_retries_and_events(retriever: SequentialCompositionalRetriever, monkeypatch: Any) -> None:
    failures = iter([ConnectionError("gone"), None])
    original = SequentialCompositionalRetriever._get_relevant_documents

    def flaky(self: Any, query: str, *, run_manager: Any, **options: Any) -> Any:
        if error := next(failures, None):
            raise error
        return original(self, query, run_manager=run_manager, **options)

    expected = retriever.invoke(QUESTION)
    monkeypatch.setattr(SequentialCompositionalRetriever, "_get_relevant_documents", flaky)
    assert retriever.with_retry(wait_exponential_jitter=False).invoke(QUESTION) == expected
    events = [event async for event in retriever.astream_events(QUESTION, version="v2")]
    assert [event["event"] for event in events] == ["on_retriever_start", "on_retriever_end"]
    assert events[-1]["data"]["output"] == expected


# ---------------------------------------------------------------- subclasses, as LangChain documents them


class Last(SequentialCompositionalRetriever):
    """Keeps the last of its picks."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any, **options: Any) -> list[Document]:
        return super()._get_relevant_documents(query, run_manager=run_manager, **options)[-1:]


class LastAlsoAwaited(Last):
    async def _aget_relevant_documents(self, query: str, *, run_manager: Any, **options: Any) -> list[Document]:
        found = await SequentialCompositionalRetriever._aget_relevant_documents(
            self, query, run_manager=run_manager, **options
        )
        return found[-1:]


class Plain(SequentialCompositionalRetriever):
    """As in LangChain's documentation, without a run manager."""

    def _get_relevant_documents(self, query: str) -> list[Document]:  # type: ignore[override]
        return [Document(query)]


async def test_a_subclass_is_asked_however_it_is_called(retriever: SequentialCompositionalRetriever) -> None:
    for kind in (Last, LastAlsoAwaited):
        own = kind(store=retriever.store, k=2)
        for options in ({}, {"k": 3}, {"filter": {"target": {"$ne": GOOD}}}):
            expected = retriever.invoke(QUESTION, **options)[-1:]
            assert own.invoke(QUESTION, **options) == await own.ainvoke(QUESTION, **options) == expected
            assert own.batch([QUESTION], **options) == await own.abatch([QUESTION], **options) == [expected]
        assert (own.bind(k=3) | _joined).invoke(QUESTION) == retriever.invoke(QUESTION, k=3)[2].page_content
        tree = RunTree()
        await own.ainvoke(QUESTION, {"callbacks": [tree]})
        own.batch([QUESTION], {"callbacks": [tree]})
        assert tree.shape == [kind.__name__] * 2
    model = FakeListLLM(responses=[GOOD])
    assert len(semantic_parsing_chain(model, own, "sql").invoke(QUESTION).picks) == 1
    plain = Plain(store=retriever.store)
    assert plain.invoke(QUESTION) == await plain.ainvoke(QUESTION) == plain.batch([QUESTION])[0] == [Document(QUESTION)]
    with pytest.raises(TypeError, match="'filter'"):  # LangChain would drop it, and show what it excludes
        plain.invoke(QUESTION, filter={"target": GOOD})


# ---------------------------------------------------------------- LangGraph


class State(TypedDict, total=False):
    source: str
    documents: list[Document]
    prompt: str
    parsed: ParsedProgram


async def test_in_langgraph_nodes(retriever: SequentialCompositionalRetriever) -> None:
    prompt = few_shot_prompt(retriever)

    async def retrieve(state: State) -> State:
        return {"documents": await retriever.ainvoke(state["source"])}

    def write(state: State) -> State:
        return {"prompt": prompt.format(source=state["source"])}

    graph = StateGraph(State)
    graph.add_node("retrieve", RunnableLambda(lambda state: {"documents": retriever.invoke(state["source"])}, retrieve))
    graph.add_node("write", write)
    graph.add_edge(START, "retrieve")
    graph.add_edge("retrieve", "write")
    graph.add_edge("write", END)
    app = graph.compile()
    expected = {"source": QUESTION, "documents": retriever.invoke(QUESTION), "prompt": prompt.format(source=QUESTION)}
    tree = RunTree()
    assert app.invoke({"source": QUESTION}, {"callbacks": [tree]}) == expected
    assert await app.ainvoke({"source": QUESTION}) == expected
    assert [*app.stream({"source": QUESTION}, stream_mode="updates")] == [
        {"retrieve": {"documents": expected["documents"]}},
        {"write": {"prompt": expected["prompt"]}},
    ]
    assert [run.run_type for run in tree.find("SequentialCompositionalRetriever")] == ["retriever"] * 2
    assert len(tree.roots) == 1


async def test_a_semantic_parser_in_a_graph_that_branches(retriever: SequentialCompositionalRetriever) -> None:
    model = FakeListLLM(responses=["no idea", "still none", GOOD])
    chain = semantic_parsing_chain(model, retriever, "sql", retries=0)
    graph = StateGraph(State)
    graph.add_node("parse", RunnablePassthrough.assign(parsed=chain))
    graph.add_edge(START, "parse")
    graph.add_conditional_edges("parse", lambda state: END if state["parsed"].ok else "parse")
    app = graph.compile()
    steps = [step async for step in app.astream({"source": QUESTION}, stream_mode="values")]
    assert [step["parsed"].program for step in steps[1:]] == [None, None, GOOD]
    assert steps[-1]["parsed"].picks == tuple(retriever.invoke(QUESTION))


def test_settings_reach_a_retriever_inside_a_graph(retriever: SequentialCompositionalRetriever) -> None:
    flexible = retriever.configurable_fields(k=ConfigurableField(id="k"))
    graph = StateGraph(State)
    graph.add_node("retrieve", (lambda state: state["source"]) | flexible | (lambda found: {"documents": found}))
    graph.add_edge(START, "retrieve")
    app = graph.compile()
    assert len(app.invoke({"source": QUESTION}, {"configurable": {"k": 5}})["documents"]) == 5
    assert len(app.invoke({"source": QUESTION})["documents"]) == 2


class Agent(GenericFakeChatModel):
    """Calls the tool that it was given, then answers with the program of the first example that comes back."""

    messages: Any = None
    tools: list[Any] = []  # noqa: RUF012 - a field of a pydantic model

    def bind_tools(self, tools: Any, **kwargs: Any) -> "Agent":
        return self.model_copy(update={"tools": list(tools)})

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        if isinstance(messages[-1], ToolMessage):
            answer = AIMessage(messages[-1].text.split("Target: ")[1].splitlines()[0])
        else:
            call = {"name": self.tools[0].name, "args": {"query": messages[-1].text}, "id": "1"}
            answer = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=answer)])


async def test_an_agent_has_the_retriever_as_a_tool(retriever: SequentialCompositionalRetriever) -> None:
    tool = create_retriever_tool(retriever, "examples", "Finds questions like this one, with their SQL.")
    model = Agent().bind_tools([tool])
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([tool]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    app = graph.compile()
    tree = RunTree()
    said = app.invoke({"messages": [("human", QUESTION)]}, {"callbacks": [tree]})["messages"]
    assert [type(message).__name__ for message in said] == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
    assert said[2].text == "\n\n".join(document.page_content for document in retriever.invoke(QUESTION))
    assert said[3].text == GOOD
    assert [run.run_type for run in tree.find("SequentialCompositionalRetriever")] == ["retriever"]
    assert (await app.ainvoke({"messages": [("human", QUESTION)]}))["messages"][3].text == GOOD
