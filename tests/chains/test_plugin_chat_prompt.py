"""chat_few_shot_prompt: a human and an AI message for each pick, whatever is in them."""

import copy
import pickle
from itertools import product
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.example_selectors import SemanticSimilarityExampleSelector
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    MessagesPlaceholder,
)
from langchain_core.vectorstores import InMemoryVectorStore
from run_tree import RunTree
from toys import lexical

from langchain_rcr import InputError, SequentialCompositionalRetriever
from langchain_rcr.chains.few_shot import FewShotMessages, chat_few_shot_prompt, few_shot_prompt

ROWS = [
    {
        "source": f"{verb} {{the}} {noun}",
        "target": f'{{"name": "{verb}", "arguments": {{"what": "{noun}"}}}} {{source}}',
    }
    for verb, noun in product(["open", "close", "paint"], ["door", "{window}"])
]
QUESTION = "open and close the {door} }{ {0}"


@pytest.fixture(scope="module")
def retriever() -> SequentialCompositionalRetriever:
    encoder = lexical(ROWS, dim=16)
    return SequentialCompositionalRetriever.from_encoder(encoder, ROWS, k=2)


def _expected(retriever: Any, question: str = QUESTION) -> list[Any]:
    picked = retriever.select_examples({"source": question})
    shots = [message for row in picked for message in (HumanMessage(row["source"]), AIMessage(row["target"]))]
    return [*shots, HumanMessage(question)]


def test_a_pair_of_messages_for_each_pick_then_the_question(retriever: SequentialCompositionalRetriever) -> None:
    prompt = chat_few_shot_prompt(retriever)
    assert isinstance(prompt, ChatPromptTemplate)
    assert prompt.input_variables == ["source"]
    assert len(_expected(retriever)) == 5
    assert prompt.format_messages(source=QUESTION) == _expected(retriever)
    assert prompt.invoke(QUESTION).to_messages() == _expected(retriever)


def test_the_same_messages_as_with_langchains_own_classes(retriever: SequentialCompositionalRetriever) -> None:
    shots = FewShotChatMessagePromptTemplate(
        example_selector=retriever,
        example_prompt=ChatPromptTemplate([("human", "{source}"), ("ai", "{target}")]),
        input_variables=["source"],
    )
    theirs = ChatPromptTemplate([("system", "In {style}: {{}}"), shots, ("human", "{source}")])
    ours = chat_few_shot_prompt(retriever, system="In {style}: {{}}")
    variables = {"source": QUESTION, "style": "{JSON}"}
    assert ours.invoke(variables) == theirs.invoke(variables)
    assert ours.invoke(variables).to_messages()[0] == SystemMessage("In {JSON}: {}")
    assert ours.input_variables == theirs.input_variables == ["source", "style"]


async def test_async_awaits_the_selector(
    retriever: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _expected(retriever)
    prompt = chat_few_shot_prompt(retriever)
    monkeypatch.setattr(SequentialCompositionalRetriever, "select_examples", None)
    assert (await prompt.ainvoke({"source": QUESTION})).to_messages() == expected
    assert await prompt.aformat_messages(source=QUESTION) == expected


def test_partial_also_after_a_run_and_of_the_question(retriever: SequentialCompositionalRetriever) -> None:
    prompt = chat_few_shot_prompt(retriever, system="In {style}, {date}")
    prompt.invoke({"source": QUESTION, "style": "a", "date": "b"})
    partial = prompt.partial(style="JSON", date=lambda: "today")
    assert partial.invoke(QUESTION).to_messages() == [SystemMessage("In JSON, today"), *_expected(retriever)]
    fixed = chat_few_shot_prompt(retriever).partial(source=QUESTION)
    assert fixed.invoke({}).to_messages() == _expected(retriever)


def test_it_can_be_extended_with_messages_and_history(retriever: SequentialCompositionalRetriever) -> None:
    prompt = chat_few_shot_prompt(retriever) + MessagesPlaceholder("more") + ("and {x}")
    messages = prompt.invoke({"source": QUESTION, "more": [AIMessage("{a}")], "x": "{b}"}).to_messages()
    assert messages == [*_expected(retriever), AIMessage("{a}"), HumanMessage("and {b}")]


async def test_it_pipes_into_chat_models(retriever: SequentialCompositionalRetriever) -> None:
    seen = []

    class Model(GenericFakeChatModel):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(messages)
            return super()._generate(messages, *args, **kwargs)

    chain = chat_few_shot_prompt(retriever) | Model(messages=iter(["one", "two", "th ree"])) | StrOutputParser()
    assert chain.invoke({"source": QUESTION}) == "one"
    assert await chain.ainvoke({"source": QUESTION}) == "two"
    assert list(chain.stream(QUESTION)) == ["th", " ", "ree"]
    assert seen == [_expected(retriever)] * 3


def test_keys_come_from_the_retriever_the_selector_or_the_caller() -> None:
    rows = [{"q": row["source"], "sql": row["target"]} for row in ROWS]
    encoder = lexical(rows, dim=16, keys=("q", "sql"))
    ours = SequentialCompositionalRetriever.from_encoder(encoder, rows, source_key="q", target_key="sql", k=1)
    assert chat_few_shot_prompt(ours).input_variables == ["q"]
    assert chat_few_shot_prompt(ours, query_key="input").input_variables == ["input"]
    assert chat_few_shot_prompt(ours, query_key="input").invoke("open").to_messages()[0].content in [
        row["q"] for row in rows
    ]
    theirs = SemanticSimilarityExampleSelector.from_examples(
        rows, DeterministicFakeEmbedding(size=8), InMemoryVectorStore, k=1, input_keys=["q"]
    )
    messages = chat_few_shot_prompt(theirs, source_key="q", target_key="sql").invoke({"q": rows[2]["q"]}).to_messages()
    assert [message.content for message in messages] == [rows[2]["q"], rows[2]["sql"], rows[2]["q"]]


async def test_a_wrong_key_is_named(retriever: SequentialCompositionalRetriever) -> None:
    prompt = chat_few_shot_prompt(retriever, target_key="sql", source_key="source")
    message = "the prompt shows 'sql' of each example, but one has 'source', 'target': set source_key and target_key"
    with pytest.raises(InputError, match=message):
        prompt.invoke({"source": "x"})
    with pytest.raises(InputError, match=message):
        await prompt.ainvoke({"source": "x"})
    with pytest.raises(InputError, match="must be a LangChain example selector, not dict"):
        chat_few_shot_prompt({})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'a-b' can't be the name of a template variable"):
        chat_few_shot_prompt(retriever, query_key="a-b")


@pytest.mark.parametrize("make", [few_shot_prompt, chat_few_shot_prompt])
def test_a_prompt_by_its_name_is_refused_in_a_line(retriever: SequentialCompositionalRetriever, make: Any) -> None:
    with pytest.raises(InputError, match=r"prompt must be a Prompt, such as Prompt\(name='chat'\), not str"):
        make(retriever, prompt="chat")


def test_it_can_be_printed_which_langchains_cannot(
    retriever: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = chat_few_shot_prompt(retriever, system="In {style}", query_key="q")
    monkeypatch.setattr(SequentialCompositionalRetriever, "select_examples", None)
    lines = [line for line in prompt.pretty_repr().splitlines() if line]
    assert [line.strip("= ") for line in lines] == [
        "System Message",
        "In {style}",
        "Human Message",
        "{source}",
        "AI Message",
        "{target}",
        "… (as many as SequentialCompositionalRetriever picks)",
        "Human Message",
        "{q}",
    ]
    fields = {name: getattr(prompt.messages[1], name) for name in ("example_selector", "example_prompt")}
    with pytest.raises(NotImplementedError):
        FewShotChatMessagePromptTemplate(**fields).pretty_repr()
    fixed = FewShotMessages(examples=ROWS, example_prompt=fields["example_prompt"])
    assert "picks" not in fixed.pretty_repr()
    assert len(fixed.format_messages()) == 2 * len(ROWS)


def test_clones_and_descriptions(retriever: SequentialCompositionalRetriever) -> None:
    prompt = chat_few_shot_prompt(retriever)
    for clone in (pickle.loads(pickle.dumps(prompt)), copy.deepcopy(prompt)):
        assert clone.format_messages(source=QUESTION) == _expected(retriever)
    described = dumpd(prompt)
    assert described["kwargs"]["messages"][0]["type"] == "not_implemented"
    assert ROWS[0]["target"] not in str(described)
    assert prompt.get_input_jsonschema()["required"] == ["source"]


async def test_the_selectors_run_is_inside_the_prompts(retriever: SequentialCompositionalRetriever) -> None:
    tree = RunTree()
    chain = chat_few_shot_prompt(retriever) | GenericFakeChatModel(messages=iter(["a", "b"]))
    chain.invoke({"source": QUESTION}, {"callbacks": [tree]})
    await chain.ainvoke({"source": QUESTION}, {"callbacks": [tree]})
    expected = {
        "RunnableSequence": [
            {"ChatPromptTemplate": ["SequentialCompositionalRetriever"]},
            "GenericFakeChatModel",
        ]
    }
    assert tree.shape == [expected, expected]
