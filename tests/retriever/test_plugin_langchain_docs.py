"""The examples of selectors in LangChain's documentation, run with LangChain's class and with ours in its place.

Of "Select by similarity", "Select by maximal marginal relevance", "Few-shot prompt templates", "Few-shot examples in
chat models" and "Prompting strategies for SQL". Their OpenAIEmbeddings are counts of words here.
"""

import logging
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.example_selectors import MaxMarginalRelevanceExampleSelector, SemanticSimilarityExampleSelector
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    PromptTemplate,
)
from langchain_core.vectorstores import InMemoryVectorStore
from test_plugin_selectors import WordCounts

from langchain_rcr import SequentialCompositionalRetriever, VectorStoreIndex

Store = tuple[Any, dict[str, Any]]
NEAREST = {SequentialCompositionalRetriever: -1}
"""Where an example selector shows what it finds first: LangChain's at the top, ours next to the question."""

ANTONYMS = [
    {"input": "happy", "output": "sad"},
    {"input": "tall", "output": "short"},
    {"input": "energetic", "output": "lethargic"},
    {"input": "sunny", "output": "gloomy"},
    {"input": "windy", "output": "calm"},
]
QUESTIONS = [
    {"question": "Who lived longer, Muhammad Ali or Alan Turing?", "answer": "So the final answer is: Muhammad Ali"},
    {"question": "When was the founder of craigslist born?", "answer": "So the final answer is: December 6, 1952"},
    {"question": "Who was the maternal grandfather of George Washington?", "answer": "The answer is: Joseph Ball"},
    {"question": "Are both directors of Jaws and Casino Royale from the same country?", "answer": "No {either}"},
]
ARTISTS = [
    {"input": "List all artists.", "query": "SELECT * FROM Artist;"},
    {"input": "Find all albums for the artist 'AC/DC'.", "query": "SELECT * FROM Album WHERE ArtistId = 1;"},
    {"input": "How many employees are there", "query": 'SELECT COUNT(*) FROM "Employee"'},
    {"input": "List all customers from Canada.", "query": "SELECT * FROM Customer WHERE Country = 'Canada';"},
    {"input": "Which albums are from the year 2000?", "query": "SELECT * FROM Album WHERE Year = '2000';"},
    {"input": "Find the total number of invoices.", "query": "SELECT COUNT(*) FROM Invoice;"},
]


def _chroma() -> Store:
    kind = pytest.importorskip("langchain_chroma").Chroma
    settings = pytest.importorskip("chromadb.config").Settings(anonymized_telemetry=False)
    return kind, {"collection_name": f"p{uuid.uuid4().hex}", "client_settings": settings}


def _qdrant() -> Store:
    kind = pytest.importorskip("langchain_qdrant").QdrantVectorStore
    return kind, {"collection_name": "examples", "location": ":memory:"}


STORES: dict[str, Callable[[], Store]] = {
    "memory": lambda: (InMemoryVectorStore, {}),
    "chroma": _chroma,
    "qdrant": _qdrant,
}


@pytest.fixture(params=["memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chroma", "qdrant"))])
def store(request: pytest.FixtureRequest) -> Store:
    """The class that a user passes, and its options."""
    return STORES[request.param]()


@pytest.fixture(params=[SemanticSimilarityExampleSelector, SequentialCompositionalRetriever])
def selector_class(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_select_by_similarity(selector_class: Any, store: Store) -> None:
    kind, options = store
    example_prompt = PromptTemplate(input_variables=["input", "output"], template="Input: {input}\nOutput: {output}")
    example_selector = selector_class.from_examples(ANTONYMS, WordCounts(), kind, k=1, **options)
    similar_prompt = FewShotPromptTemplate(
        example_selector=example_selector,
        example_prompt=example_prompt,
        prefix="Give the antonym of every input",
        suffix="Input: {adjective}\nOutput:",
        input_variables=["adjective"],
    )
    assert similar_prompt.format(adjective="sunny") == (
        "Give the antonym of every input\n\nInput: sunny\nOutput: gloomy\n\nInput: sunny\nOutput:"
    )
    (selected,) = example_selector.select_examples({"adjective": "worried"})
    assert any(row.items() <= selected.items() for row in ANTONYMS)  # Qdrant adds two fields of its own to theirs
    new = {"input": "enthusiastic", "output": "apathetic"}
    assert isinstance(similar_prompt.example_selector.add_example(new), str)
    assert "Input: enthusiastic\nOutput: apathetic" in similar_prompt.format(adjective="enthusiastic")


@pytest.mark.parametrize("selector_class", [MaxMarginalRelevanceExampleSelector, SequentialCompositionalRetriever])
def test_select_by_maximal_marginal_relevance(selector_class: Any) -> None:
    example_selector = selector_class.from_examples(ANTONYMS, WordCounts(), InMemoryVectorStore, k=2, fetch_k=5)
    picked = example_selector.select_examples({"adjective": "happy"})
    assert picked.pop(NEAREST.get(selector_class, 0)) == ANTONYMS[0]
    assert picked[0] in ANTONYMS[1:]


def test_few_shot_prompt_templates(selector_class: Any, store: Store) -> None:
    kind, options = store
    example_prompt = PromptTemplate.from_template("Question: {question}\n{answer}")
    example_selector = selector_class.from_examples(QUESTIONS, WordCounts(), kind, k=1, **options)
    question = "Who was the father of Mary Ball Washington?"
    (selected,) = example_selector.select_examples({"question": question})
    assert QUESTIONS[2].items() <= selected.items()
    prompt = FewShotPromptTemplate(
        example_selector=example_selector,
        example_prompt=example_prompt,
        suffix="Question: {input}",
        input_variables=["input"],
    )
    assert prompt.invoke({"input": question}).to_string().endswith(f"Joseph Ball\n\nQuestion: {question}")


def test_few_shot_examples_in_chat_models(selector_class: Any) -> None:
    example_selector = selector_class.from_examples(QUESTIONS, WordCounts(), InMemoryVectorStore, k=2)
    few_shot_prompt = FewShotChatMessagePromptTemplate(
        input_variables=["input"],
        example_selector=example_selector,
        example_prompt=ChatPromptTemplate.from_messages([("human", "{question}"), ("ai", "{answer}")]),
    )
    final_prompt = ChatPromptTemplate.from_messages(
        [("system", "You are a wondrous wizard of trivia."), few_shot_prompt, ("human", "{input}")]
    )
    messages = final_prompt.invoke({"input": "When was the founder of craigslist born?"}).to_messages()
    assert [message.type for message in messages] == ["system", "human", "ai", "human", "ai", "human"]
    assert messages[2:5:2][NEAREST.get(selector_class, 0)].content == QUESTIONS[1]["answer"]


async def test_prompting_strategies_for_sql(selector_class: Any) -> None:
    example_selector = await selector_class.afrom_examples(
        ARTISTS, WordCounts(), InMemoryVectorStore, k=5, input_keys=["input"], example_keys=["input", "query"]
    )
    example_prompt = PromptTemplate.from_template("User input: {input}\nSQL query: {query}")
    prompt = FewShotPromptTemplate(
        example_selector=example_selector,
        example_prompt=example_prompt,
        prefix="You are a SQLite expert.\n{table_info}\n",
        suffix="User input: {input}\nSQL query: ",
        input_variables=["input", "top_k", "table_info"],
    )
    text = await prompt.aformat(input="How many artists are there?", top_k=3, table_info="CREATE TABLE Artist (…)")
    assert text.count("SQL query: SELECT") == 5
    assert text.startswith("You are a SQLite expert.\nCREATE TABLE Artist (…)")


def test_of_few_examples_the_likeness_of_questions_decides_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        selector = SequentialCompositionalRetriever.from_examples(ANTONYMS, WordCounts(), InMemoryVectorStore)
    assert [record.getMessage() for record in caplog.records] == [
        "too few examples to learn structures from (5, of which 0 have a program that parses as 'sql'; it takes 20): "
        "falling back to question similarity"
    ]
    assert isinstance(selector.store.index, VectorStoreIndex)
    assert (selector.source_keys, selector.target_key) == (("input",), "output")
    for row in ANTONYMS:
        picks = selector.select_examples({"adjective": row["input"]})
        assert (len(picks), picks[-1]) == (4, row)


def test_what_is_passed_on_to_each_search_is_a_filter() -> None:
    rows = [{**row, "level": "easy" if n else "hard"} for n, row in enumerate(ANTONYMS)]
    keys = {"source_key": "input", "target_key": "output"}
    selector = SequentialCompositionalRetriever.from_examples(
        rows, WordCounts(), None, vectorstore_kwargs={"filter": {"level": "hard"}}, **keys
    )
    assert selector.select_examples({"input": "windy"}) == rows[:1]
    with pytest.raises(ValueError, match="vectorstore_kwargs: unknown 'score_threshold'; known: filter"):
        SequentialCompositionalRetriever.from_examples(
            rows, WordCounts(), None, vectorstore_kwargs={"score_threshold": 0.5}, **keys
        )
