"""Questions of several keys: values in the order of the sorted keys, joined by spaces, as in LangChain's selectors."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from langchain_core.example_selectors import SemanticSimilarityExampleSelector
from langchain_core.language_models import FakeListLLM
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from test_plugin_selectors import WordCounts

from langchain_rcr import (
    ExamplePool,
    InputError,
    Item,
    PoolError,
    SequentialCompositionalRetriever,
    few_shot_prompt,
    semantic_parsing_chain,
)

torch.set_num_threads(1)

KEYS = {"input_keys": ["question", "context"], "example_keys": ["context", "question", "program"]}
ROWS = [
    {"question": f"how many {what} are {how}", "context": f"about {place}", "program": f"count({how}({what}({place})))"}
    for what, how, place in product(("cats", "dogs"), ("red", "old"), ("rome", "oslo", "bern"))
]
NEW = {"question": "which zebra sleeps", "context": "about cairo", "program": "first(sleeping(zebra(cairo)))", "n": 1}
MIXED = {"question": "how many dogs are old", "context": "about bern"}
"""The question of four programs; with the context, of one."""


class Noted(WordCounts):
    """Keeps the texts that it is asked about."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def embed_query(self, text: str) -> list[float]:
        self.texts.append(text)
        return super().embed_query(text)


def ours(rows: list[dict[str, Any]] = ROWS, **options: Any) -> SequentialCompositionalRetriever:
    return SequentialCompositionalRetriever.from_examples(
        rows, WordCounts(), None, **{"k": 1, "language": "functional"} | KEYS | options
    )


def of_langchain(rows: list[dict[str, Any]] = ROWS, **options: Any) -> Any:
    options = {"k": 1} | KEYS | options
    return SemanticSimilarityExampleSelector.from_examples(rows, WordCounts(), InMemoryVectorStore, **options)


Make = Callable[..., Any]
both = pytest.mark.parametrize("make", [of_langchain, ours])


def test_what_is_fitted_to_and_what_is_asked_is_the_joined_text() -> None:
    embeddings = Noted()
    selector = SequentialCompositionalRetriever.from_examples(ROWS, embeddings, language="functional", k=1, **KEYS)
    joined = [f"{row['context']} {row['question']}" for row in ROWS]
    assert set(joined) <= set(embeddings.texts)
    assert not {row["question"] for row in ROWS} & set(embeddings.texts)
    embeddings.texts.clear()
    selector.select_examples({**MIXED, "style": "brief"})
    assert embeddings.texts == ["about bern how many dogs are old"]
    assert selector.store.schema.item(ROWS[0]) == Item(joined[0], ROWS[0]["program"])
    assert (selector.source_keys, selector.target_key) == (("context", "question"), "program")


@both
async def test_picks(make: Make) -> None:
    selector = make()
    for row in ROWS:
        question = {"question": row["question"], "context": row["context"], "style": "brief"}
        assert selector.select_examples(question) == [row]
        assert await selector.aselect_examples(question) == [row]


@both
async def test_added_examples(make: Make) -> None:
    selector = make()
    assert isinstance(selector.add_example(NEW), str)
    asked = {"question": NEW["question"], "context": NEW["context"]}
    shown = {key: NEW[key] for key in ("context", "question", "program")}
    assert selector.select_examples(asked) == [shown]
    other = {**NEW, "context": "about lima", "program": "last(zebra)"}
    assert isinstance(await selector.aadd_example(other), str)
    assert selector.select_examples({**asked, "context": "about lima"})[0]["program"] == "last(zebra)"


@both
def test_an_empty_part(make: Make) -> None:
    rows = [{**row, "context": ""} if n % 2 else row for n, row in enumerate(ROWS)]
    selector = make(rows, input_keys=["context", "question", "context"])
    assert selector.select_examples({"question": rows[1]["question"], "context": ""})[0]["context"] == ""


@both
async def test_in_langchains_prompt(make: Make) -> None:
    prompt = FewShotPromptTemplate(
        example_selector=make(),
        example_prompt=PromptTemplate.from_template("{context}: {question}\n{program}"),
        suffix="{context}: {question}\n",
        input_variables=["question", "context"],
        example_separator="\n",
    )
    expected = "about bern: how many dogs are old\ncount(old(dogs(bern)))\nabout bern: how many dogs are old\n"
    assert prompt.invoke(MIXED).to_string() == expected
    assert (await prompt.ainvoke(MIXED)).to_string() == expected


def test_no_examples_yet() -> None:
    selector = ours([])
    assert selector.select_examples(MIXED) == []
    selector.add_example(NEW)
    assert selector.select_examples(MIXED) == [{key: NEW[key] for key in KEYS["example_keys"]}]


def test_saved_and_loaded(tmp_path: Any) -> None:
    ours().save(tmp_path / "saved")
    again = SequentialCompositionalRetriever.from_pretrained(
        tmp_path / "saved",
        embeddings=WordCounts(),
        source_key=["question", "context"],
        target_key="program",
        k=1,
    )
    for row in ROWS:
        assert again.select_examples({"question": row["question"], "context": row["context"]}) == [row]


def test_options_read_the_joined_text() -> None:
    apart = ours(k=2, mask_same_program=False)
    why = apart.explain("about bern how many dogs are old")
    assert why.steps[0].pick.source == "about bern how many dogs are old"
    assert apart.invoke("about bern how many dogs are old")[-1].page_content == (
        "Source: about bern how many dogs are old\nTarget: count(old(dogs(bern)))"
    )


def test_in_our_prompt_and_in_a_chain() -> None:
    selector = ours()
    with pytest.raises(InputError, match=r"question consists of 'context', 'question'.*set source_key"):
        few_shot_prompt(selector)
    prompt = few_shot_prompt(selector, source_key="question")
    with pytest.raises(InputError, match="input_keys names 'context', but the input variables are 'question'"):
        prompt.invoke({"question": MIXED["question"]})
    assert prompt.invoke(MIXED).to_string() == (
        "Source: how many dogs are old\nTarget: count(old(dogs(bern)))\nSource: how many dogs are old\nTarget:"
    )
    chain = semantic_parsing_chain(FakeListLLM(responses=["count(x)"]), selector, "functional", source_key="question")
    assert chain.invoke(MIXED).picks[0].metadata["context"] == "about bern"
    with pytest.raises(InputError, match="must have a string under 'context'"):
        chain.invoke("how many dogs are old")


def test_our_prompt_asks_for_all_keys_where_only_the_pool_names_them() -> None:
    selector = ours()
    unnamed = selector.model_copy(update={"input_keys": None})
    prompt = few_shot_prompt(unnamed, source_key="question")
    assert prompt.invoke(MIXED) == few_shot_prompt(selector, source_key="question").invoke(MIXED)
    chain = semantic_parsing_chain(FakeListLLM(responses=["count(x)"]), unnamed, "functional", source_key="question")
    assert chain.invoke(MIXED).picks[0].metadata["context"] == "about bern"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": None}, r"examples\[0\]: 'context' must be a string, not NoneType"),
        ({"context": "\ud800"}, r"examples\[0\]: 'context' is not valid Unicode text"),
        ({"context": " ", "question": ""}, r"examples\[0\]: 'context' and 'question' are blank"),
    ],
)
def test_what_is_no_question(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PoolError, match=message):
        ours().add_example({**NEW, **change})
    lacking = {"question": "which", "program": "first(zebra)"}
    with pytest.raises(PoolError, match=r"examples\[0\] has no 'context': it has 'question', 'program'"):
        ours().add_example(lacking)


def test_keys_of_a_pool() -> None:
    pool = ExamplePool(ROWS, source_key=["question", "context"], target_key="program")
    assert (pool.source_keys, len(pool)) == (("context", "question"), len(ROWS))
    assert repr(pool) == "ExamplePool(12 examples, keys 'context' + 'question' and 'program')"
    with pytest.raises(InputError, match="source_key and target_key are both 'program'"):
        ExamplePool(ROWS, source_key=["question", "program"], target_key="program")
    with pytest.raises(InputError, match="source_key must be a name or several, not"):
        ExamplePool(ROWS, source_key=[], target_key="program")


def test_a_query_lacks_a_part() -> None:
    with pytest.raises(InputError, match="input_keys names 'context', but the input variables are 'question'"):
        ours().select_examples({"question": "how many"})
    unnamed = ours().model_copy(update={"input_keys": None})
    with pytest.raises(
        InputError, match=r"which variable is the query\? Expected 'context' and 'question' or a single"
    ):
        unnamed.select_examples({"question": "how many", "style": "brief"})
