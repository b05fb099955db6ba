"""The suite for example selectors that LangChain lacks: the same assertions for its selectors and for ours."""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import (
    BaseExampleSelector,
    MaxMarginalRelevanceExampleSelector,
    SemanticSimilarityExampleSelector,
)
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    PromptTemplate,
)
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from toys import lexical

from langchain_rcr import InputError, Item, PoolError, SequentialCompositionalRetriever, TriEncoder, few_shot_prompt
from langchain_rcr.chains.few_shot import chat_few_shot_prompt

Make = Callable[..., Any]

EXAMPLES = [
    {"source": f"how many {color} {animal} are there", "target": f"count({color}({animal}))", "n": number}
    for number, (color, animal) in enumerate(product(["red", "round", "big"], ["cats", "dogs", "mice"]))
]
QUERY = {"source": "how many red cats and big dogs"}
NEW = {"source": "which purple zebra is tallest", "target": "argmax(purple(zebra))", "n": 99}

UNICODE = [
    {"source": "كم عدد القطط", "target": "عد(قطط)"},
    {"source": "有多少只猫", "target": "数(猫)"},
    {"source": "Wie viele Kätzchen 🐈‍⬛ gibt’s?\u2028", "target": "zähle(🐈‍⬛)\n\tzwei Zeilen"},
]
BRACES = [
    {"source": "call {tool} with {}", "target": '{"name": "tool", "arguments": {"x": [1, {"y": "{source}"}]}}'},
    {"source": "{{doubled}} and { alone", "target": "(Yield }} {0.__class__} {!r} {a[b]})"},
]


class WordCounts(Embeddings):
    """A text's words, counted, in 256 boxes."""

    def embed_query(self, text: str) -> list[float]:
        counts = np.zeros(256)
        for word in text.lower().split():
            counts[crc32(word.encode()) % 256] += 1
        return [float(count) for count in counts + 1e-6]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


def _theirs(kind: type[Any]) -> Make:
    def make(examples: list[dict[str, Any]], **fields: Any) -> BaseExampleSelector:
        fields = {"input_keys": ["source"]} | fields
        if not examples:
            return kind(vectorstore=InMemoryVectorStore(WordCounts()), **fields)
        return kind.from_examples(examples, WordCounts(), InMemoryVectorStore, **fields)

    return make


def _ours(examples: list[dict[str, Any]], **fields: Any) -> BaseExampleSelector:
    fields = {"order": "picked"} | fields  # as theirs
    items = [Item(row["source"], row["target"]) for row in [*examples, *EXAMPLES, NEW]]
    encoder = TriEncoder.build("lexical", items, dim=128)
    return SequentialCompositionalRetriever.from_encoder(encoder, examples, **fields)


MAKERS = {
    "similarity": _theirs(SemanticSimilarityExampleSelector),
    "mmr": _theirs(MaxMarginalRelevanceExampleSelector),
    "ours": _ours,
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


@pytest.fixture(params=["similarity", "mmr"])
def make_theirs(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


# ---------------------------------------------------------------- what they agree on


def test_it_is_a_selector_and_gives_the_examples_as_they_were(make: Make) -> None:
    selector = make(EXAMPLES, k=4)
    assert isinstance(selector, BaseExampleSelector)
    picked = selector.select_examples(QUERY)
    assert len(picked) == 4
    assert all(type(row) is dict and row in EXAMPLES for row in picked)
    assert len({row["n"] for row in picked}) == 4


@pytest.mark.parametrize("k", [1, 3, 9])
def test_k_is_honoured_and_may_be_changed(make: Make, k: int) -> None:
    selector = make(EXAMPLES, k=k)
    assert len(selector.select_examples(QUERY)) == k
    selector.k = 2
    assert len(selector.select_examples(QUERY)) == 2
    assert len(make(EXAMPLES).select_examples(QUERY)) == 4


def test_more_picks_begin_with_the_same_ones(make: Make) -> None:
    all_of_them = make(EXAMPLES, k=9).select_examples(QUERY)
    assert [make(EXAMPLES, k=k).select_examples(QUERY) for k in (1, 2, 5)] == [all_of_them[:k] for k in (1, 2, 5)]


def test_an_example_is_found_by_its_own_question(make: Make) -> None:
    selector = make(EXAMPLES, k=1)
    for row in EXAMPLES:
        assert selector.select_examples({"source": row["source"]}) == [row]


def test_the_question_decides(make: Make) -> None:
    selector = make(EXAMPLES, k=1)
    assert "round" in selector.select_examples({"source": "round mice"})[0]["source"]
    assert "red" in selector.select_examples({"source": "red mice"})[0]["source"]


def test_an_added_example_is_visible_at_once(make: Make) -> None:
    selector = make(EXAMPLES, k=1)
    new_id = selector.add_example(NEW)
    assert isinstance(new_id, str)
    assert selector.select_examples({"source": NEW["source"]}) == [NEW]
    other = selector.add_example({"source": "name all ostriches", "target": "ostrich", "n": 100})
    assert other not in ("", new_id)
    selector.k = 11
    assert sorted(row["n"] for row in selector.select_examples(QUERY)) == [*range(9), 99, 100]


async def test_async_does_the_same(make: Make) -> None:
    selector = make(EXAMPLES, k=3)
    assert await selector.aselect_examples(QUERY) == selector.select_examples(QUERY)
    assert isinstance(await selector.aadd_example(NEW), str)
    assert (await selector.aselect_examples({"source": NEW["source"]}))[0] == NEW
    together = await asyncio.gather(*[selector.aselect_examples({"source": row["source"]}) for row in EXAMPLES])
    assert [rows[0] for rows in together] == EXAMPLES


async def test_made_asynchronously() -> None:
    for kind in (SemanticSimilarityExampleSelector, MaxMarginalRelevanceExampleSelector):
        theirs = await kind.afrom_examples(EXAMPLES, WordCounts(), InMemoryVectorStore, k=1, input_keys=["source"])
        assert await theirs.aselect_examples({"source": EXAMPLES[4]["source"]}) == [EXAMPLES[4]]
    encoder = lexical(EXAMPLES, dim=128)
    ours = await SequentialCompositionalRetriever.afrom_encoder(encoder, EXAMPLES, k=1)
    assert await ours.aselect_examples({"source": EXAMPLES[4]["source"]}) == [EXAMPLES[4]]


def test_input_keys_say_which_variables_are_the_question(make: Make) -> None:
    selector = make(EXAMPLES, k=3, input_keys=["source"])
    expected = selector.select_examples(QUERY)
    assert selector.select_examples({**QUERY, "style": "round mice round mice", "a": "big big big"}) == expected
    two = make(EXAMPLES, k=3, input_keys=["source", "target"])
    split = two.select_examples({"target": "cats and big dogs", "source": "how many red"})
    assert split == make(EXAMPLES, k=3, input_keys=["source", "target"]).select_examples(
        {"source": "how many red cats", "target": "and big dogs"}
    )
    with pytest.raises((KeyError, InputError), match="source"):
        selector.select_examples({"style": "terse"})


def test_example_keys_say_which_fields_come_back(make: Make) -> None:
    selector = make(EXAMPLES, k=3, example_keys=["n", "target"])
    whole = make(EXAMPLES, k=3).select_examples(QUERY)
    assert selector.select_examples(QUERY) == [{"n": row["n"], "target": row["target"]} for row in whole]
    with pytest.raises((KeyError, InputError), match="absent"):
        make(EXAMPLES, example_keys=["absent"]).select_examples(QUERY)


def test_nothing_is_shared_with_the_caller(make: Make) -> None:
    given = copy.deepcopy(EXAMPLES)
    selector = make(given, k=9)
    before = copy.deepcopy(selector.select_examples(QUERY))
    for row in [*given, *selector.select_examples(QUERY)]:
        row["source"] = "changed by the caller"
        row["more"] = 1
    assert selector.select_examples(QUERY) == before
    variables = dict(QUERY)
    selector.select_examples(variables)
    assert variables == QUERY


def test_choosing_is_repeatable(make: Make) -> None:
    first = make(EXAMPLES, k=5)
    chosen = first.select_examples(QUERY)
    assert first.select_examples(QUERY) == make(EXAMPLES, k=5).select_examples(QUERY) == chosen
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: first.select_examples(QUERY), range(16))) == [chosen] * 16


@pytest.mark.parametrize("rows", [UNICODE, BRACES], ids=["unicode", "braces"])
def test_any_text_comes_back_as_it_was(make: Make, rows: list[dict[str, str]]) -> None:
    selector = make(rows, k=1)
    for row in rows:
        assert selector.select_examples({"source": row["source"]}) == [row]
    for question in ("🦓" * 50, "{source} {0} }{", "x " * 5_000, "'; DROP TABLE examples; --", "\u0000"):
        assert selector.select_examples({"source": question})[0] in rows


def test_other_fields_may_hold_anything(make: Make) -> None:
    rows = [
        {"source": f"question {n}", "target": f"t{n}", "nested": {"a": [n, None]}, "flag": n == 1} for n in range(3)
    ]
    assert sorted(make(rows, k=3).select_examples(QUERY), key=lambda row: row["target"]) == rows


def test_in_a_few_shot_prompt(make: Make) -> None:
    selector = make(EXAMPLES, k=2)
    prompt = FewShotPromptTemplate(
        example_selector=selector,
        example_prompt=PromptTemplate.from_template("{source} -> {target}"),
        prefix="In {style}.",
        suffix="{source} ->",
    )
    first, second = selector.select_examples({**QUERY, "style": "terse"})
    expected = (
        f"In terse.\n\n{first['source']} -> {first['target']}\n\n{second['source']} -> {second['target']}\n\n"
        f"{QUERY['source']} ->"
    )
    assert prompt.format(**QUERY, style="terse") == expected
    assert prompt.partial(style=lambda: "terse").format(**QUERY) == expected


async def test_in_a_few_shot_chat_prompt(make: Make) -> None:
    selector = make(EXAMPLES, k=2)
    shots = FewShotChatMessagePromptTemplate(
        example_selector=selector,
        example_prompt=ChatPromptTemplate([("human", "{source}"), ("ai", "{target}")]),
        input_variables=["source"],
    )
    prompt = ChatPromptTemplate([("system", "Answer."), shots, ("human", "{source}")])
    texts = [row[key] for row in selector.select_examples(QUERY) for key in ("source", "target")]
    for value in (prompt.invoke(QUERY), await prompt.ainvoke(QUERY)):
        assert [message.content for message in value.to_messages()] == ["Answer.", *texts, QUERY["source"]]


async def test_in_a_chain(make: Make) -> None:
    selector = make(EXAMPLES, k=1)
    prompt = FewShotPromptTemplate(
        example_selector=selector,
        example_prompt=PromptTemplate.from_template("{source}"),
        suffix="{source}",
    )
    chain = prompt | RunnableLambda(lambda value: value.to_string().split("\n\n")) | (lambda pieces: pieces[0])
    questions = [{"source": row["source"]} for row in EXAMPLES]
    expected = [row["source"] for row in EXAMPLES]
    assert chain.batch(questions) == await chain.abatch(questions) == expected
    assert [*chain.stream(questions[3])] == expected[3:4]
    assert RunnableLambda(selector.select_examples).invoke(questions[3]) == EXAMPLES[3:4]
    assert (prompt | FakeListLLM(responses=["done"])).invoke(questions[0]) == "done"


def test_in_our_prompts_braces_are_safe_with_every_selector(make: Make) -> None:
    selector = make(BRACES, k=2)
    question = "what does {source} mean? {0} {{x}} }{"
    rows = selector.select_examples({"source": question})
    shown = [f"Source: {row['source']}\nTarget: {row['target']}" for row in rows]
    assert few_shot_prompt(selector).format(source=question) == "\n".join([*shown, f"Source: {question}\nTarget:"])
    messages = chat_few_shot_prompt(selector).invoke({"source": question}).to_messages()
    assert [message.content for message in messages[:-1:2]] == [row["source"] for row in rows]
    assert [message.content for message in messages[1::2]] == [row["target"] for row in rows]
    theirs = FewShotPromptTemplate(
        example_selector=selector, example_prompt=PromptTemplate.from_template("{target}"), suffix="{source}"
    )
    with pytest.raises((KeyError, ValueError, IndexError)):
        theirs.format(source=question)


# ---------------------------------------------------------------- where they differ, and how


def test_a_pool_smaller_than_k_is_shown_whole(make: Make) -> None:
    assert len(make(EXAMPLES, k=20).select_examples(QUERY)) == 9


def test_an_empty_pool_gives_nothing(make: Make) -> None:
    selector = make([], k=1)
    assert selector.select_examples(QUERY) == []
    selector.add_example(EXAMPLES[0])
    assert selector.select_examples(QUERY) == [EXAMPLES[0]]


def test_a_variable_that_is_no_text_is_named_by_ours(make_theirs: Make) -> None:
    with pytest.raises(TypeError, match="expected str instance, int found"):
        make_theirs(EXAMPLES).select_examples({"source": 3})
    with pytest.raises(InputError, match="the input variable 'source' must be a string, not int"):
        _ours(EXAMPLES).select_examples({"source": 3})


def test_without_input_keys_ours_reads_the_question_theirs_all_variables(make_theirs: Make) -> None:
    rows = [{"source": row["source"], "target": row["target"]} for row in EXAMPLES]
    variables = {"source": rows[0]["source"], "style": "big mice " * 20}
    assert make_theirs(rows, k=1, input_keys=None).select_examples(variables) == [rows[8]]
    assert _ours(rows, k=1).select_examples(variables) == [rows[0]]


def test_ours_reads_input_keys_of_the_question_alone(make_theirs: Make) -> None:
    """Theirs take the same names from an example that is added; ours knows an example by its own keys."""
    new = {"source": "a", "target": "b"}
    with pytest.raises(KeyError, match="input"):
        make_theirs(EXAMPLES, input_keys=["source"]).model_copy(update={"input_keys": ["input"]}).add_example(new)
    ours = _ours(EXAMPLES, k=10, input_keys=["input"])
    ours.add_example(new)
    assert new in ours.select_examples({"input": "a"})


def test_ours_refuses_an_example_without_a_program(make_theirs: Make) -> None:
    assert make_theirs(EXAMPLES).add_example({"source": "a"})
    with pytest.raises(PoolError, match=r"has no 'target' \(the program\)"):
        _ours(EXAMPLES).add_example({"source": "a"})


def test_the_same_program_need_not_come_twice_with_ours() -> None:
    copies = [{**row, "source": f"{row['source']} {word}"} for row in EXAMPLES for word in ("now", "today", "here")]
    similar = MAKERS["similarity"](copies, k=6).select_examples(QUERY)
    assert len({row["target"] for row in similar}) < 6
    masked = _ours(copies, k=6, mask_same_program=True).select_examples(QUERY)
    assert len({row["target"] for row in masked}) == 6


def test_nested_values_are_not_shared_with_ours(make_theirs: Make) -> None:
    rows = [{"source": "a", "target": "b", "nested": [1]}]
    for maker, expected in ((make_theirs, [1, 2]), (_ours, [1])):
        selector = maker(copy.deepcopy(rows), k=1)
        selector.select_examples({"source": "a"})[0]["nested"].append(2)
        assert selector.select_examples({"source": "a"})[0]["nested"] == expected
    added = {"source": "which zebra", "target": "c", "nested": [1]}
    selector.add_example(added)
    added["nested"].append(2)
    assert selector.select_examples({"source": "which zebra"}) == [{**added, "nested": [1]}]


def test_ids_are_checked_before_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TriEncoder, "fitted", lambda *_, **__: pytest.fail("fitted"))
    with pytest.raises(InputError, match="ids must be a sequence of 9 strings, one for each example, not list of 1"):
        SequentialCompositionalRetriever.from_examples(EXAMPLES, WordCounts(), ids=["a"])
