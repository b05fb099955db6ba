"""semantic_parsing_chain: from a question to a program that parses, or to the reason why there is none."""

import asyncio
import copy
import json
import pickle
import threading
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.example_selectors import LengthBasedExampleSelector, SemanticSimilarityExampleSelector
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    PromptTemplate,
)
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableParallel
from langchain_core.vectorstores import InMemoryVectorStore
from openai_server import OpenAIServer
from pydantic import Field
from run_tree import RunTree
from toys import lexical

from langchain_rcr import InputError, SequentialCompositionalRetriever, few_shot_prompt
from langchain_rcr.chains.few_shot import chat_few_shot_prompt
from langchain_rcr.chains.semantic_parsing import ParsedProgram, semantic_parsing_chain
from langchain_rcr.programs import Tree, get_parser

TABLES = ("river", "city", "state", "lake", "mountain")
ROWS = [
    {"source": f"{asks} {table}", "target": f"SELECT {what} FROM {table}", "n": f"{asks[0]}{table[0]}"}
    for asks, what in (("how many", "COUNT(*)"), ("name a", "name"))
    for table in TABLES
]
QUESTIONS = [f"how many {table} are there" for table in TABLES]
GOOD = "SELECT COUNT(*) FROM river"
BAD = "SELECT FROM ((river"


class Chat(BaseChatModel):
    """Answers the n-th attempt at a question with the n-th of its answers; keeps what it was asked."""

    answers: dict[str, list[Any]]
    asked: list[list[BaseMessage]] = Field(default_factory=list)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, *_: Any, **__: Any) -> ChatResult:
        self.asked.append(messages)
        texts = [str(message.content) for message in messages]
        question = next(text for text in texts if text in self.answers)
        answer = self.answers[question][sum(text.startswith("That is not a program") for text in texts)]
        if isinstance(answer, Exception):
            raise answer
        return ChatResult(generations=[ChatGeneration(message=AIMessage(answer))])

    @property
    def _llm_type(self) -> str:
        return "chat"


class Completion(BaseLLM):
    """Answers the prompts of its n-th call with the n-th function; keeps the calls."""

    answers: list[Any]
    calls: list[list[str]] = Field(default_factory=list)
    stops: list[Any] = Field(default_factory=list)

    def _generate(self, prompts: list[str], stop: Any = None, *_: Any, **__: Any) -> LLMResult:
        answer = self.answers[len(self.calls)]
        self.calls.append(prompts)
        self.stops.append(stop)
        return LLMResult(generations=[[Generation(text=answer(prompt))] for prompt in prompts])

    @property
    def _llm_type(self) -> str:
        return "completion"


def asked_in(prompt: str) -> str:
    return prompt.rpartition("Source: ")[2].removesuffix("\nTarget:")


def sql_for(prompt: str) -> str:
    return f" SELECT COUNT(*) FROM {asked_in(prompt).split()[2]}"


@pytest.fixture
def retriever() -> SequentialCompositionalRetriever:
    encoder = lexical(ROWS, dim=16)
    return SequentialCompositionalRetriever.from_encoder(encoder, ROWS, k=2)


def fake(*answers: str) -> GenericFakeChatModel:
    return GenericFakeChatModel(messages=iter(answers))


# ---------------------------------------------------------------- one question


def test_a_question_becomes_a_typed_result(retriever: SequentialCompositionalRetriever) -> None:
    result = semantic_parsing_chain(fake(GOOD), retriever, "sql").invoke({"source": QUESTIONS[0]})
    assert isinstance(result, ParsedProgram)
    assert result == ParsedProgram(
        program=GOOD,
        tree=get_parser("sql").parse(GOOD),
        picks=tuple(retriever.invoke(QUESTIONS[0])),
        answers=(GOOD,),
        error=None,
    )
    assert result.ok
    assert isinstance(result.tree, Tree)
    assert [pick.metadata["step"] for pick in result.picks if isinstance(pick, Document)] == [1, 2]


async def test_a_bare_string_and_await_do_the_same(retriever: SequentialCompositionalRetriever) -> None:
    chain = semantic_parsing_chain(fake(GOOD, GOOD, GOOD), retriever, "sql")
    result = chain.invoke({"source": QUESTIONS[0]})
    assert chain.invoke(QUESTIONS[0]) == result
    assert await chain.ainvoke(QUESTIONS[0]) == result


def test_a_chat_model_gets_the_picks_as_messages(retriever: SequentialCompositionalRetriever) -> None:
    model = Chat(answers={QUESTIONS[0]: [GOOD]})
    semantic_parsing_chain(model, retriever, "sql").invoke(QUESTIONS[0])
    assert model.asked == [chat_few_shot_prompt(retriever).format_messages(source=QUESTIONS[0])]


def test_a_completion_model_gets_the_papers_prompt_and_a_stop(retriever: SequentialCompositionalRetriever) -> None:
    model = Completion(answers=[sql_for])
    result = semantic_parsing_chain(model, retriever, "sql").invoke(QUESTIONS[0])
    assert result.program == GOOD
    assert model.calls == [[few_shot_prompt(retriever).format(source=QUESTIONS[0])]]
    assert model.stops == [["\nSource:"]]


def test_a_stop_of_the_users_is_left_alone(retriever: SequentialCompositionalRetriever) -> None:
    model = Completion(answers=[sql_for] * 2)
    semantic_parsing_chain(model.bind(stop=["\n"]), retriever, "sql").invoke(QUESTIONS[0])
    semantic_parsing_chain(model, retriever, "sql", prompt=few_shot_prompt(retriever)).invoke(QUESTIONS[0])

    class Stopping(Completion):
        stop: list[str] = Field(default_factory=lambda: ["\n"])

    own = Stopping(answers=[sql_for])
    semantic_parsing_chain(own, retriever, "sql").invoke(QUESTIONS[0])
    assert (model.stops, own.stops) == ([["\n"], None], [None])
    assert [asked_in(prompt) for call in model.calls for prompt in call] == QUESTIONS[:1] * 2


@pytest.mark.parametrize(
    ("wrap", "completes"),
    [
        (lambda model: model.with_retry(), True),
        (lambda model: model.with_fallbacks([FakeListLLM(responses=["x"])]), True),
        (lambda model: model | StrOutputParser(), True),
        (lambda model: model.configurable_fields(answers=ConfigurableField(id="a")), True),
        (lambda model: model.with_config(tags=["x"]).bind(stop=["\n"]).with_retry(), True),
        (lambda model: RunnableLambda(model.invoke), False),
    ],
)
def test_a_wrapped_model_is_known_by_what_is_inside(
    retriever: SequentialCompositionalRetriever, wrap: Any, completes: bool
) -> None:
    model = Completion(answers=[lambda prompt: GOOD])
    assert semantic_parsing_chain(wrap(model), retriever, "sql").invoke(QUESTIONS[0]).program == GOOD
    assert model.calls[0][0].startswith("Source: " if completes else "Human: ")


# ---------------------------------------------------------------- answers that are no program


def test_a_chat_model_is_told_what_is_wrong(retriever: SequentialCompositionalRetriever) -> None:
    model = Chat(answers={QUESTIONS[0]: [BAD, GOOD]})
    result = semantic_parsing_chain(model, retriever, "sql").invoke(QUESTIONS[0])
    assert (result.program, result.answers, result.error) == (GOOD, (BAD, GOOD), None)
    first, second = model.asked
    assert second[: len(first)] == first
    assert second[len(first)] == AIMessage(BAD)
    assert second[len(first) + 1 :] == [
        HumanMessage("That is not a program: it can't be parsed as sql. Answer with the program alone.")
    ]


def test_a_completion_model_gets_a_note_before_the_same_prompt(retriever: SequentialCompositionalRetriever) -> None:
    model = Completion(answers=[lambda _: BAD, lambda _: "", sql_for])
    result = semantic_parsing_chain(model, retriever, "sql", retries=2).invoke(QUESTIONS[0])
    assert (result.program, result.answers) == (GOOD, (BAD, "", " " + GOOD))
    [first], [second], [third] = model.calls
    assert second == (
        "The last question below was answered with this, which is not a program (it can't be parsed as sql):\n"
        f"{BAD}\nAnswer with a program alone.\n\n{first}"
    )
    assert third.endswith(f"(it is empty):\n\nAnswer with a program alone.\n\n{first}")
    assert BAD not in third


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_after_the_last_retry_the_failure_is_a_result(
    retriever: SequentialCompositionalRetriever, retries: int
) -> None:
    model = Completion(answers=[lambda _: "no idea"] * 9)
    result = semantic_parsing_chain(model, retriever, "sql", retries=retries).invoke(QUESTIONS[0])
    assert not result.ok
    assert (result.program, result.tree, result.error) == (None, None, "it can't be parsed as sql")
    assert result.answers == ("no idea",) * (retries + 1)
    assert result.picks == tuple(retriever.invoke(QUESTIONS[0]))
    assert len(model.calls) == retries + 1


def test_an_empty_answer_is_not_sent_back(retriever: SequentialCompositionalRetriever) -> None:
    model = Chat(answers={QUESTIONS[0]: [" \n", ""]})
    result = semantic_parsing_chain(model, retriever, "sql").invoke(QUESTIONS[0])
    assert result.error == "it is empty"
    assert [type(message) for message in model.asked[1][-2:]] == [HumanMessage, HumanMessage]


def test_a_rambling_answer_is_cut_before_it_is_paid_for_again(retriever: SequentialCompositionalRetriever) -> None:
    model = Completion(answers=[lambda _: "word " * 10_000, sql_for])
    result = semantic_parsing_chain(model, retriever, "sql").invoke(QUESTIONS[0])
    assert len(result.answers[0]) == 50_000
    assert len(model.calls[1][0]) < 2_000 + 500 + len(model.calls[0][0])


def test_picks_are_chosen_once(retriever: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    original = type(retriever.store.now).select

    def select(*args: Any, **kwargs: Any) -> Any:
        chosen.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(type(retriever.store.now), "select", select)
    semantic_parsing_chain(fake(BAD, BAD, GOOD), retriever, "sql", retries=2).invoke(QUESTIONS[0])
    assert chosen == [1]


# ---------------------------------------------------------------- parsers


def test_a_custom_parser(retriever: SequentialCompositionalRetriever) -> None:
    def parse(text: str) -> Any:
        if "DROP" in text:
            raise PermissionError("DROP is not allowed here")
        return text.split() if text.startswith("SELECT") else None

    model = Chat(answers={QUESTIONS[0]: ["DROP TABLE river", "SELECT 1"]})
    result = semantic_parsing_chain(model, retriever, parse).invoke(QUESTIONS[0])
    assert (result.program, result.tree) == ("SELECT 1", ["SELECT", "1"])
    assert "That is not a program: PermissionError: DROP is not allowed here." in str(model.asked[1][-1].content)
    assert semantic_parsing_chain(fake("no"), retriever, parse, retries=0).invoke("x").error == "it can't be parsed"
    assert semantic_parsing_chain(fake("no"), retriever, str.isdigit, retries=0).invoke("x").program is None


def test_a_parser_object_and_langchains_output_parsers(retriever: SequentialCompositionalRetriever) -> None:
    model = fake('{"a": [1}', '```json\n{\n  "a": [1]\n}\n```')
    result = semantic_parsing_chain(model, retriever, JsonOutputParser()).invoke("x")
    assert (result.tree, json.loads(result.program or "")) == ({"a": [1]}, {"a": [1]})
    assert semantic_parsing_chain(fake("f(x)"), retriever, get_parser("functional")).invoke("x").tree == Tree(
        "f", (Tree("x"),)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parser": "sqll"}, "did you mean 'sql'"),
        ({"parser": 3}, "parser must be a language, an object with parse.text., or a function, not 3"),
        ({"parser": JsonOutputParser}, "parser must be a language"),
        ({"retries": -1}, "retries must be a whole number from 0 on, not -1"),
        ({"retries": True}, "retries must be a whole number from 0 on, not True"),
        ({"retriever": "runs/demo"}, "retriever must be a retriever or an example selector, not str"),
        ({"llm": "gpt"}, "llm must be a model or another runnable, not str"),
        ({"prompt": PromptTemplate.from_template("{source}")}, "prompt has no place for the picks"),
        ({"prompt": ChatPromptTemplate([("human", "{source}")])}, "prompt has no place for the picks"),
        ({"prompt": "Translate {source}"}, "prompt has no place for the picks"),
        ({"query_key": "a b"}, "'a b' can't be the name of a template variable"),
    ],
)
def test_wrong_arguments_are_named(
    retriever: SequentialCompositionalRetriever, arguments: dict[str, Any], message: str
) -> None:
    given = {"llm": fake(), "retriever": retriever, "parser": "sql"} | arguments
    with pytest.raises(InputError, match=message):
        semantic_parsing_chain(given.pop("llm"), given.pop("retriever"), given.pop("parser"), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"question": "x"}, "the input must have a string under 'source': it has 'question'"),
        ({"source": 3}, "the input must have a string under 'source'"),
        (3, "the input must be a question or a mapping with 'source', not int"),
        ("  ", "the query is blank"),
    ],
)
async def test_wrong_input_is_named(retriever: SequentialCompositionalRetriever, given: Any, message: str) -> None:
    chain = semantic_parsing_chain(fake(GOOD, GOOD), retriever, "sql")
    with pytest.raises(InputError, match=message):
        chain.invoke(given)
    with pytest.raises(InputError, match=message):
        await chain.ainvoke(given)
    wrong, right = chain.batch([given, QUESTIONS[0]], return_exceptions=True)
    assert isinstance(wrong, InputError)
    assert right.program == GOOD


# ---------------------------------------------------------------- prompts and selectors


@pytest.mark.parametrize("chat", [False, True])
def test_a_custom_prompt_keeps_its_text_and_gets_the_picks(
    retriever: SequentialCompositionalRetriever, chat: bool
) -> None:
    retriever.input_keys = ["q"]
    if chat:
        shots = FewShotChatMessagePromptTemplate(
            example_selector=retriever,
            example_prompt=ChatPromptTemplate([("human", "{source} ({n})"), ("ai", "{target}")]),
            input_variables=["q"],
        )
        prompt: Any = ChatPromptTemplate([("system", "In {dialect}."), shots, ("human", "{q}")])
    else:
        prompt = FewShotPromptTemplate(
            example_selector=retriever,
            example_prompt=PromptTemplate.from_template("{source} ({n})\n{target}"),
            prefix="In {dialect}.",
            suffix="{q}",
        )
    seen = []
    model = RunnableLambda(lambda value: seen.append(value) or GOOD)
    chain = semantic_parsing_chain(model, retriever, "sql", prompt=prompt.partial(dialect="SQLite"))
    result = chain.invoke({"q": QUESTIONS[0]})
    assert chain.invoke(QUESTIONS[0]) == result
    assert seen[0] == seen[1] == prompt.invoke({"q": QUESTIONS[0], "dialect": "SQLite"})
    assert seen[0].to_string().count(" (h") + seen[0].to_string().count(" (n") == 2
    several = semantic_parsing_chain(model, retriever, "sql", prompt=prompt, query_key="q")
    assert several.invoke({"q": QUESTIONS[0], "dialect": "SQLite"}) == result
    with pytest.raises(KeyError, match="dialect"):
        several.invoke(QUESTIONS[0])
    assert prompt.invoke({"q": QUESTIONS[0], "dialect": "SQLite"}) == seen[0]


async def test_any_selector_serves_and_is_awaited() -> None:
    theirs = SemanticSimilarityExampleSelector.from_examples(
        ROWS, DeterministicFakeEmbedding(size=8), InMemoryVectorStore, k=2, input_keys=["source"]
    )
    chain = semantic_parsing_chain(fake(BAD, GOOD, GOOD), theirs, "sql")
    result = chain.invoke(ROWS[3]["source"])
    assert result.picks == tuple(theirs.select_examples(ROWS[3]))
    assert result.picks[0] == ROWS[3]

    class Awaited(LengthBasedExampleSelector):
        async def aselect_examples(self, input_variables: dict[str, str]) -> list[dict[str, Any]]:
            await asyncio.sleep(0)
            return [{"source": "awaited", "target": "x"}]

    example_prompt = PromptTemplate.from_template("{source} {target}")
    awaited = Awaited(examples=[], example_prompt=example_prompt)
    result = await semantic_parsing_chain(fake(GOOD), awaited, "sql").ainvoke({"source": "x", "other": 3})
    assert result.picks == ({"source": "awaited", "target": "x"},)
    none = LengthBasedExampleSelector(examples=[], example_prompt=example_prompt)
    assert semantic_parsing_chain(fake(GOOD), none, "sql").invoke("x").picks == ()


def test_a_retriever_may_be_wrapped_and_options_go_to_it(retriever: SequentialCompositionalRetriever) -> None:
    flexible = retriever.configurable_fields(k=ConfigurableField(id="k"))
    chain = semantic_parsing_chain(fake(*[GOOD] * 9), flexible, "sql")
    assert len(chain.invoke(QUESTIONS[0]).picks) == 2
    assert len(chain.invoke(QUESTIONS[0], {"configurable": {"k": 3}}).picks) == 3
    assert len(chain.with_config(configurable={"k": 4}).invoke(QUESTIONS[0]).picks) == 4
    assert len(semantic_parsing_chain(fake(GOOD), retriever, "sql").invoke(QUESTIONS[0], k=5).picks) == 5
    empty = SequentialCompositionalRetriever.from_encoder(retriever.store.encoder, [], k=2, k_min=1)
    with pytest.raises(InputError, match="k_min = 1, but only 0"):
        semantic_parsing_chain(fake(GOOD), empty, "sql").invoke("x")
    saved = semantic_parsing_chain(fake(GOOD), empty.with_fallbacks([retriever]), "sql").invoke("x")
    assert len(saved.picks) == 2


def test_what_a_runnable_must_return(retriever: SequentialCompositionalRetriever) -> None:
    documents = RunnableLambda(lambda query: [Document("x", metadata={"source": query, "target": "y"})])
    result = semantic_parsing_chain(fake(GOOD), documents, "sql").invoke("q")
    assert result.picks == (Document("x", metadata={"source": "q", "target": "y"}),)
    chain = semantic_parsing_chain(fake(GOOD), RunnableLambda(lambda query: query), "sql")
    with pytest.raises(InputError, match="must return a list of documents or examples, not str"):
        chain.invoke("q")
    with pytest.raises(InputError, match="the prompt shows 'target' of each example, but one has 'source'"):
        semantic_parsing_chain(
            fake(GOOD), RunnableLambda(lambda query: [Document("x", metadata={"source": "y"})]), "sql"
        ).invoke("q")
    chain = semantic_parsing_chain(RunnableLambda(lambda value: 3), retriever, "sql")
    with pytest.raises(InputError, match="the model must answer with text or a message, not int"):
        chain.invoke("q")


def test_other_keys_and_several_input_keys() -> None:
    rows = [{"q": row["source"], "sql": row["target"]} for row in ROWS]
    encoder = lexical(rows, dim=16, keys=("q", "sql"))
    fields = {"source_key": "q", "target_key": "sql", "k": 2}
    ours = SequentialCompositionalRetriever.from_encoder(encoder, rows, **fields)
    result = semantic_parsing_chain(fake(GOOD), ours, "sql").invoke({"q": QUESTIONS[0]})
    assert result.picks == tuple(ours.invoke(QUESTIONS[0]))
    two = SequentialCompositionalRetriever.from_encoder(encoder, rows, input_keys=["topic", "q"], **fields)
    chain = semantic_parsing_chain(fake(GOOD), two.with_config(tags=["x"]), "sql")
    result = chain.invoke({"topic": "lake", "q": "how many"})
    assert [pick.id for pick in result.picks] == [pick.id for pick in ours.invoke("how many lake")]
    with pytest.raises(InputError, match="must have a string under 'topic': it has 'q'"):
        chain.invoke({"q": "how many"})


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
    for clone in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert clone.invoke(QUESTIONS[0]) == chain.invoke(QUESTIONS[0])
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
