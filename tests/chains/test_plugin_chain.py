"""semantic_parsing_chain: from a question to a program that parses, or to the reason why there is none."""

import asyncio
import json
from typing import Any

import pytest
from chain_models import BAD, GOOD, QUESTIONS, ROWS, Chat, Completion, asked_in, fake, sql_for
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.example_selectors import LengthBasedExampleSelector, SemanticSimilarityExampleSelector
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    PromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import Field
from toys import lexical

from langchain_rcr import InputError, SequentialCompositionalRetriever, few_shot_prompt
from langchain_rcr.chains.few_shot import PickedExamples, chat_few_shot_prompt
from langchain_rcr.chains.semantic_parsing import ParsedProgram, semantic_parsing_chain
from langchain_rcr.programs import Tree, get_parser


@pytest.fixture
def retriever() -> SequentialCompositionalRetriever:
    encoder = lexical(ROWS, dim=16)
    return SequentialCompositionalRetriever.from_encoder(encoder, ROWS, k=2)


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
    ("wrap", "stops"),
    [
        (lambda model: model.with_retry(), ["\nSource:"]),
        (lambda model: model.bind(temperature=0).with_config(tags=["x"]), ["\nSource:"]),
        (lambda model: model | StrOutputParser(), ["\nSource:"]),
        (lambda model: model.with_fallbacks([Completion(answers=[])]), ["\nSource:"]),
        (lambda model: model.with_fallbacks([fake()]), None),  # which may refuse one
        (lambda model: model.bind(stop=["\n"]).with_retry() | StrOutputParser(), ["\n"]),
    ],
)
def test_a_wrapped_completion_model_is_stopped_too(
    retriever: SequentialCompositionalRetriever, wrap: Any, stops: list[str] | None
) -> None:
    model = Completion(answers=[sql_for])
    semantic_parsing_chain(wrap(model), retriever, "sql").invoke(QUESTIONS[0])
    assert model.stops == [stops]


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
        ({"retries": -1}, "retries must be a whole number of at least 0, not -1"),
        ({"retries": True}, "retries must be a whole number of at least 0, not True"),
        ({"retriever": "runs/demo"}, "retriever must be a retriever or an example selector, not str"),
        ({"retriever": FakeListLLM(responses=[""])}, "the model comes first, then the retriever: not .*FakeListLLM$"),
        ({"llm": PickedExamples()}, "the model comes first, then the retriever: not PickedExamples, "),
        ({"llm": "gpt"}, "llm must be a model or another runnable, not 'gpt'"),
        ({"llm": FakeListLLM}, "llm must be a model or another runnable, not <class"),
        ({"parser": asyncio.sleep}, "parser must be .* or a function, not <function"),
        ({"execute": asyncio.sleep}, "execute must be a function that runs a program and isn't async, not <function"),
        ({"execute": "books.sqlite"}, "execute must be a function that runs a program and isn't async, not 'books"),
        ({"prompt": PromptTemplate.from_template("{source}")}, "prompt has no place for the picks"),
        ({"prompt": ChatPromptTemplate([("human", "{source}")])}, "prompt has no place for the picks"),
        ({"prompt": "Translate {source}"}, "prompt has no place for the picks"),
        ({"query_key": "a b"}, "'a b' can't be the name of a template variable"),
        ({"source_key": ["a"]}, r"\['a'\] can't be the name of a template variable"),
        ({"needs_examples": "x"}, "^SemanticParsingChain: needs_examples must be a valid boolean, not 'x'$"),
    ],
)
def test_wrong_arguments_are_named(
    retriever: SequentialCompositionalRetriever, arguments: dict[str, Any], message: str
) -> None:
    given = {"llm": fake(), "retriever": retriever, "parser": "sql"} | arguments
    with pytest.raises(InputError, match=message):
        semantic_parsing_chain(given.pop("llm"), given.pop("retriever"), given.pop("parser"), **given)


@pytest.mark.parametrize("key", ["step", "logit", "probability"])
def test_a_chain_shows_no_number_of_the_pick_in_place_of_its_program(key: str) -> None:
    rows = [{"source": row["source"], key: row["target"]} for row in ROWS]
    encoder = lexical(rows, dim=16, keys=("source", key))
    ours = SequentialCompositionalRetriever.from_encoder(encoder, rows, target_key=key, k=2)
    assert ROWS[0]["target"] in few_shot_prompt(ours).format(source=QUESTIONS[0])
    with pytest.raises(InputError, match=f"a chain can't show the field '{key}' of an example"):
        semantic_parsing_chain(fake(GOOD), ours, "sql")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"question": "x"}, "the input must have a string under 'source': it has 'question'"),
        ({"source": 3}, "the input must have a string under 'source', not int"),
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


@pytest.mark.parametrize("form", ["text", "chat", "system"])
def test_a_custom_prompt_keeps_its_text_and_gets_the_picks(
    retriever: SequentialCompositionalRetriever, form: str
) -> None:
    retriever.input_keys = ["q"]
    if form == "chat":
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
        if form == "system":
            prompt = ChatPromptTemplate([SystemMessagePromptTemplate(prompt=prompt), ("human", "{q}")])
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
