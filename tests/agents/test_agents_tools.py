"""ComposedToolSelector: which tools the model of an agent is shown."""

import json
import pickle
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from langchain.agents import create_agent
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import StructuredTool
from openai_server import OpenAIServer
from toys import lexical

from langchain_rcr import ComposedToolSelector, InputError, Item, SequentialCompositionalRetriever
from langchain_rcr.agents import last_question

EMBEDDINGS = DeterministicFakeEmbedding(size=8)
WANTS = {
    "find_flights": "fly to",
    "book_hotel": "sleep in",
    "weather": "is it warm in",
    "currency": "pay in",
    "museums": "see art in",
}
ABOUT = {name: f"Tool number {number}." for number, name in enumerate(WANTS)}
TOLD = [*combinations(WANTS, 1), *list(combinations(WANTS, 2))[1:]]
PAIRS = [
    (f"I {' and '.join(WANTS[name] for name in names)} {town}", names)
    for names, town in product(TOLD, ["rome", "oslo", "lima"])
]
UNTOLD = "I fly to and sleep in bern"
"""A set that no pair has."""


def _tool(name: str, about: str) -> StructuredTool:
    def run(what: str) -> str:
        return f"{name} {what}"

    return StructuredTool.from_function(run, name=name, description=about)


TOOLS = [_tool(name, about) for name, about in ABOUT.items()]


@pytest.fixture(scope="module")
def selector() -> ComposedToolSelector:
    return ComposedToolSelector.from_pairs(PAIRS, TOOLS, k=2, embeddings=EMBEDDINGS)


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(lambda _: "done") as served:
        yield served


def _agent(model: BaseChatModel, selector: ComposedToolSelector, tools: Any = TOOLS) -> Any:
    return create_agent(model, tools, middleware=[selector])


def _shown(server: OpenAIServer) -> list[str]:
    return [tool["function"]["name"] for tool in server.requests[-1].body.get("tools", [])]


def test_a_set_that_no_pair_has_is_composed(selector: ComposedToolSelector) -> None:
    assert {"find_flights", "book_hotel"} not in [{*names} for _, names in PAIRS]
    assert {*selector.retrieve_tools(UNTOLD)} == {"find_flights", "book_hotel"}
    assert selector.retrieve_tools("what does it cost to pay in oslo")[0] == "currency"


async def test_as_a_function_that_retrieves_tools(selector: ComposedToolSelector) -> None:
    tool = StructuredTool.from_function(selector.retrieve_tools, selector.aretrieve_tools)
    assert tool.name == "retrieve_tools"
    assert "Retrieve the names of the tools" in tool.description
    assert tool.invoke({"query": UNTOLD}) == await tool.ainvoke({"query": UNTOLD}) == selector.retrieve_tools(UNTOLD)


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_model_sees_the_picked_tools_in_their_order(
    server: OpenAIServer, model: BaseChatModel, selector: ComposedToolSelector, is_async: bool
) -> None:
    agent = _agent(model, selector, [*reversed(TOOLS)])
    asked: Any = {"messages": [HumanMessage(UNTOLD)]}
    if is_async:
        await agent.ainvoke(asked)
    else:
        agent.invoke(asked)
    assert _shown(server) == ["book_hotel", "find_flights"]


def test_what_the_pool_lacks_stays_and_what_the_agent_lacks_is_not_picked(
    server: OpenAIServer, model: BaseChatModel, selector: ComposedToolSelector
) -> None:
    others = [tool for tool in TOOLS if tool.name != "find_flights"]
    _agent(model, selector, [_tool("notes", "Take notes."), *others]).invoke({"messages": [HumanMessage(UNTOLD)]})
    shown = _shown(server)
    assert len(shown) == 3
    assert {"notes", "book_hotel"} < {*shown}


async def test_an_example_that_is_no_tool_is_named(selector: ComposedToolSelector) -> None:
    added = selector.retriever.add_example({"source": "Take a train: by rail", "target": '["trains"]'})
    with pytest.raises(InputError, match=f"'{added}' is no tool, as it has no 'name'"):
        selector.retrieve_tools("take a train by rail")
    with pytest.raises(InputError, match=added):
        await selector.aretrieve_tools("take a train by rail")
    selector.retriever.delete([added])


def test_some_tools_can_be_shown_always(
    server: OpenAIServer, model: BaseChatModel, selector: ComposedToolSelector
) -> None:
    always = ComposedToolSelector(selector.retriever, always_include=["museums"])
    _agent(model, always).invoke({"messages": [HumanMessage(UNTOLD)]})
    assert _shown(server) == ["find_flights", "book_hotel", "museums"]


def test_without_a_request_all_are_shown(
    server: OpenAIServer, model: BaseChatModel, selector: ComposedToolSelector
) -> None:
    for nothing in ("", " \n", None):
        silent = ComposedToolSelector(selector.retriever, question=lambda _, said=nothing: said)
        _agent(model, silent).invoke({"messages": [HumanMessage(UNTOLD)]})
        assert _shown(server) == [*ABOUT]


def test_a_tool_that_no_pair_uses_is_known_by_its_description() -> None:
    selector = ComposedToolSelector.from_pairs(PAIRS, ABOUT, k=2, embeddings=EMBEDDINGS)
    request = "translate a menu into english"
    assert "translate" not in selector.retrieve_tools(request)
    selector.add_tools({"translate": "Translate a text, such as a menu, into english"})
    assert selector.retrieve_tools(request)[0] == "translate"
    assert {*selector.retrieve_tools(UNTOLD)} == {"find_flights", "book_hotel"}


def test_many_added_tools_ask_for_no_refit(caplog: pytest.LogCaptureFixture) -> None:
    """It would know the tools alone, and forget the requests."""
    selector = ComposedToolSelector.from_pairs(PAIRS, ABOUT, k=2, embeddings=EMBEDDINGS, auto_refit=True)
    fitted = selector.retriever.store.fingerprint
    selector.add_tools({f"more_{n}": f"Another tool, number {n}" for n in range(len(PAIRS))})
    assert not selector.retriever.needs_refit
    assert selector.retriever.store.fingerprint == fitted
    assert "refit" not in caplog.text
    assert {*selector.retrieve_tools(UNTOLD)} == {"find_flights", "book_hotel"}


class Words(Embeddings):
    """Texts by the words that they have."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [
            [sum(crc32(word.encode()) % 64 == place for word in text.lower().split()) + 0.01 for place in range(64)]
            for text in texts
        ]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def test_an_unused_tool_among_used_ones_is_found_by_its_description(tmp_path: Path) -> None:
    about = {**ABOUT, "translate": "turns a menu into english"}
    selector = ComposedToolSelector.from_pairs(PAIRS, about, k=2, embeddings=Words())
    request = "turns menu and fly to lima"
    assert {*selector.retrieve_tools(request)} == {"find_flights", "translate"}
    assert {*selector.retrieve_tools(UNTOLD)} == {"find_flights", "book_hotel"}
    selector.retriever.save(tmp_path / "tools")
    read = SequentialCompositionalRetriever.from_pretrained(tmp_path / "tools", embeddings=Words())
    assert ComposedToolSelector(read).retrieve_tools(request) == selector.retrieve_tools(request)
    # What finds it is the likeness of its description, in standard deviations over the requests.
    query = selector.retriever.store.encoder.query
    likely = query.likelihoods(query.featurize([Item(request)]))[0]
    (column,) = (at for at, names in enumerate(query.inventory.columns) if "translate" in str(names))
    (row,) = (row for row, described in query.descriptions.pairs if described == column)
    vectors = np.array(Words().embed_documents([request, *(pair[0] for pair in PAIRS)]))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    likeness = vectors @ query.landmarks.vectors[row]
    told = 0.1 * (likeness[0] - likeness[1:].mean()) / likeness[1:].std()
    described = [column for _, column in query.descriptions.pairs]
    both = np.array(query.raw(query.featurize([Item(request)]))[0])
    query.describe([])
    by_landmarks = np.array(query.raw(query.featurize([Item(request)]))[0])
    assert likely[column].item() == pytest.approx(min(by_landmarks[column] + told, 1), abs=1e-3)
    assert {*np.flatnonzero(np.abs(both - by_landmarks) > 1e-4).tolist()} <= {*described}


def test_of_many_pairs_each_set_is_learnt() -> None:
    many = [*PAIRS, *((f"take me to {n}, I want to fly to it", ["find_flights"]) for n in range(100))]
    selector = ComposedToolSelector.from_pairs(many, ABOUT, k=2, embeddings=EMBEDDINGS, landmarks=2 * len(TOLD))
    assert len(selector.retriever.store.encoder.query.dual) == 2 * len(TOLD) + len(ABOUT)
    assert {*selector.retrieve_tools(UNTOLD)} == {"find_flights", "book_hotel"}


def test_a_rare_tool_counts_little_more_than_a_common_one(selector: ComposedToolSelector) -> None:
    query = selector.retriever.store.encoder.query
    uses = {name: sum(name in names for _, names in PAIRS) + 1 for name in ABOUT}  # and its own description
    share = {name: count / (len(PAIRS) + len(ABOUT)) for name, count in uses.items()} | {"set": 0.98}  # the root
    idf = np.array([-np.log(share[name]) for name in query.inventory.names])
    np.testing.assert_allclose(np.exp(query.tensors()["worth"]), (idf / idf.mean()) ** 0.25, rtol=1e-5)
    described = query.descriptions.pairs
    query.describe([Item(f"{name.replace('_', ' ')}: {text}", json.dumps([name])) for name, text in ABOUT.items()])
    assert query.descriptions.pairs == described
    np.testing.assert_allclose(np.exp(query.tensors()["worth"]), (idf / idf.mean()) ** 0.25, rtol=1e-5)


def test_saved_and_read_again(selector: ComposedToolSelector, tmp_path: Path) -> None:
    selector.retriever.save(tmp_path / "tools")
    read = SequentialCompositionalRetriever.from_pretrained(tmp_path / "tools", embeddings=EMBEDDINGS, k=2)
    assert ComposedToolSelector(read).retrieve_tools(UNTOLD) == selector.retrieve_tools(UNTOLD)
    assert pickle.loads(pickle.dumps(selector)).retrieve_tools(UNTOLD) == selector.retrieve_tools(UNTOLD)


def test_a_retriever_without_tools_is_refused() -> None:
    examples = [{"source": "how many", "target": "count ( all )"}]
    plain = SequentialCompositionalRetriever.from_encoder(lexical(examples, 4), examples)
    with pytest.raises(InputError, match="the retriever's programs are 'functional', not tools"):
        ComposedToolSelector(plain)
    with pytest.raises(InputError, match="must be a SequentialCompositionalRetriever, not str"):
        ComposedToolSelector("tools")  # type: ignore[arg-type]


def test_with_few_pairs_descriptions_decide() -> None:
    about = {"weather": "The weather in a town", "trains": "Trains between two towns"}
    selector = ComposedToolSelector.from_pairs(PAIRS[:2], about, k=1, embeddings=EMBEDDINGS)
    assert len(selector.retrieve_tools("the weather in a town")) == 1


@pytest.mark.parametrize("pair", [("fly", "find_flights"), ("fly", [1]), ("fly",), (" ", ["weather"]), 3, (1, ["a"])])
def test_a_pair_that_is_none_is_named(pair: Any) -> None:
    with pytest.raises(InputError, match="pair 30 is not a request with a list"):
        ComposedToolSelector.from_pairs([*PAIRS[:30], pair], ABOUT, embeddings=EMBEDDINGS)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (["weather"], "tools must be LangChain tools, or a mapping of names to descriptions, not 'weather'"),
        ([last_question], "tools must be LangChain tools, .* not <function last_question"),
        ({"weather": None}, "tools: not a name with a description: 'weather', None"),
        ({"": "The weather"}, "tools: not a name with a description: '', 'The weather'"),
    ],
)
def test_a_tool_that_is_none_is_named(tools: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ComposedToolSelector.from_pairs(PAIRS[:30], tools, embeddings=EMBEDDINGS)
    with pytest.raises(InputError, match="always_include must be a sequence of names, not one"):
        ComposedToolSelector.from_pairs(PAIRS[:30], ABOUT, embeddings=EMBEDDINGS, always_include="weather")
