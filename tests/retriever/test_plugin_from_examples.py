"""`from_examples`: a retriever that fits itself, with the arguments of LangChain's selectors."""

import inspect
import logging
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import MaxMarginalRelevanceExampleSelector, SemanticSimilarityExampleSelector
from langchain_core.vectorstores import InMemoryVectorStore
from test_plugin_selectors import WordCounts

from langchain_rcr import InputError, SequentialCompositionalRetriever, VectorStoreIndex

torch.set_num_threads(1)

WORDS = ("how many", "name the"), ("red", "round", "big", "old"), ("cats", "dogs", "mice", "owls")
ROWS = [
    {"source": f"{verb} {color} {animal}", "target": f"{verb.split()[0]}({color}({animal}))"}
    for verb, color, animal in product(*WORDS)
]
SQL = [{"question": f"list the {c} of {t}", "query": f"SELECT {c} FROM {t}"} for c, t in product("abcde", "uvwxy")]


def made(rows: list[dict[str, Any]], *arguments: Any, **options: Any) -> SequentialCompositionalRetriever:
    options = {"language": "functional"} | options
    return SequentialCompositionalRetriever.from_examples(rows, WordCounts(), *arguments, **options)


def test_the_arguments_come_in_langchains_order() -> None:
    ours = list(inspect.signature(SequentialCompositionalRetriever.from_examples).parameters)
    theirs = list(inspect.signature(MaxMarginalRelevanceExampleSelector.from_examples).parameters)
    assert ours[: len(theirs) - 1] == theirs[:-1]
    assert {*inspect.signature(SemanticSimilarityExampleSelector.from_examples).parameters} <= {*theirs}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 10, 30])
def test_from_one_example_to_thirty(count: int) -> None:
    rng = np.random.default_rng(0)
    rows = [ROWS[row] for row in rng.permutation(len(ROWS))[:count]]
    selector = made(rows)
    for row in rows:
        picks = selector.select_examples({"source": row["source"]})
        assert len(picks) == min(4, count)
        assert picks[-1] == row
    assert selector.store.encoder.family.name == ("structure" if count == 30 else "embeddings")


def test_no_examples_yet() -> None:
    selector = made([], order="picked")
    assert selector.invoke("how many red cats") == []
    selector.add_examples(ROWS[:5])
    assert selector.select_examples({"source": ROWS[2]["source"]})[0] == ROWS[2]


@pytest.mark.slow
def test_what_was_never_combined_is_shown_in_parts() -> None:
    rows = [row for row in ROWS if "red" not in row["source"] or "owls" not in row["source"]]
    picks = made(rows, k=2).select_examples({"source": "name the red owls"})
    shown = " ".join(row["target"] for row in picks)
    assert "red" in shown
    assert "owls" in shown


@pytest.mark.slow
def test_programs_that_do_not_parse(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    broken = [{"source": f"nonsense {n}", "target": "count(("} for n in range(3)]
    assert len(made([*ROWS, *broken]).invoke("how many red cats")) == 4
    assert "3 of 35 programs don't parse as 'functional': their tokens stand for structures" in caplog.text
    caplog.clear()
    prose = [{"source": row["source"], "target": f"please ( {row['source']}"} for row in ROWS]
    selector = made(prose)
    assert "none of the 32 programs parses as 'functional'" in caplog.text
    assert selector.store.encoder.spec.language == "tokens"
    assert selector.select_examples({"source": prose[5]["source"]})[-1] == prose[5]


@pytest.mark.parametrize("readable", [0, 5])
def test_programs_of_another_language_than_the_default_are_recognised(
    readable: int, caplog: pytest.LogCaptureFixture
) -> None:
    calls = [{"source": row["question"], "target": f'{{"name": "list", "args": [{n}]}}'} for n, row in enumerate(SQL)]
    rows = [*calls, *({"source": row["question"], "target": row["query"]} for row in SQL[:readable])]
    made(rows, language="sql")
    hint = f"; 25 of {len(rows)} programs parse as json, 25 as python"
    assert hint in caplog.records[0].getMessage()
    assert caplog.records[0].getMessage().endswith(": pass language='json'")
    caplog.clear()
    made([{"source": row["question"], "target": row["query"]} for row in SQL[:5]], language="sql:sqlite")
    assert caplog.records[0].getMessage().endswith("falling back to question similarity")
    caplog.clear()
    guessed = made(rows, language=None)
    assert guessed.store.encoder.spec.language == "json"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(readable)  # of five that don't parse


def test_a_language_is_guessed_only_if_sql_reads_few(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    words = [{"source": row["question"], "target": f"yes {n}"} for n, row in enumerate(SQL)]
    sql = [{"source": row["question"], "target": row["query"]} for row in SQL]
    for rows, language in ((ROWS, "functional"), (sql, "sql"), ([*sql, *ROWS[: len(sql)]], "sql"), (words, "tokens")):
        caplog.clear()
        assert made(rows, language=None).store.encoder.spec.language == language
        assert ("read as 'functional'" in caplog.text) == (language == "functional")
    assert made([], language=None).store.encoder.spec.language == "sql"


@pytest.mark.slow
def test_keys_are_those_of_the_examples() -> None:
    selector = made(SQL, k=1, input_keys=["question"], language="sql")
    assert (selector.source_keys, selector.target_key) == (("question",), "query")
    assert selector.select_examples({"question": SQL[7]["question"], "style": "brief"}) == [SQL[7]]
    named = made([{**row, "n": 1} for row in SQL], source_key="question", target_key="query", example_keys=["query"])
    assert named.select_examples({"question": SQL[7]["question"]})[0].keys() == {"query"}
    guessed = made(SQL[:5])
    assert (guessed.source_keys, guessed.target_key) == (("question",), "query")
    with pytest.raises(
        InputError, match=r"which fields are question and program.*'question', 'query', 'n': set source"
    ):
        made([{**row, "n": 1} for row in SQL])


def test_of_many_fields_the_program_is_the_only_one_that_parses() -> None:
    rows = [{"n": 1, "db": "a b", **row} for row in SQL[:6]]
    assert made(rows, input_keys=["question"], language="sql").target_key == "query"
    assert made(rows, source_key="question", language="sql").target_key == "query"
    for both in ([{**row, "gold": row["query"]} for row in rows], [{**rows[0], "query": "SELECT FROM"}]):
        with pytest.raises(InputError, match="which fields are question and program"):
            made(both, input_keys=["question"], language="sql")


def test_of_two_fields_the_programs_are_those_that_parse() -> None:
    turned = [{"sql": row["query"], "question": row["question"]} for row in SQL[:6]]
    for rows in (turned, [{"question": row["question"], "sql": row["sql"]} for row in turned]):
        selector = made(rows, language="sql")
        assert (selector.source_keys, selector.target_key) == (("question",), "sql")
        assert selector.select_examples({"question": rows[4]["question"]})[-1] == rows[4]
        # Some that don't parse, or aren't text where they should be, change nothing.
        odd = [{**rows[0], "sql": "SELECT FROM WHERE"}, *rows[1:]]
        assert made(odd, language="sql").target_key == "sql"
    # Names come first, and where both parse, or neither, the order.
    named = [{"target": row["question"], "answer": row["query"]} for row in SQL[:4]]
    assert made(named, language="sql").target_key == "target"
    assert made(turned, language="sql", target_key="question").source_keys == ("sql",)
    assert made(turned, language="sql", input_keys=["sql"]).target_key == "question"
    assert made(turned, language="tokens").source_keys == ("sql",)
    assert made(turned, language="json").source_keys == ("sql",)
    with pytest.raises(ValueError, match=r"examples\[0\].*must be a string, not int"):
        made([{"sql": 1, "question": "how many"}], language="sql")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (SQL, {"source_key": "q"}, "no field 'q'; their fields: 'question', 'query'"),
        (SQL, {"source_key": ["question", "q"]}, "examples.0. has no 'q': it has 'question', 'query'"),
        (SQL, {"example_keys": ["quesiton"]}, "example_keys: unknown 'quesiton'; did you mean 'question'"),
        (SQL, {"language": 5}, "language: a name was expected, not 5"),
        (SQL, {"language": ["sql"]}, "language: a name was expected, not .'sql'."),
        (None, {}, "examples must be a sequence of mappings, not NoneType"),
        (5, {}, "examples must be a sequence of mappings, not int"),
    ],
)
def test_what_does_not_fit_the_examples_is_named(rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        made(rows, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_vector_store_holds_the_pool() -> None:
    options = {"k": 3, "mask_same_program": True}
    stored, plain = (made(ROWS, store, **options) for store in (InMemoryVectorStore, None))
    assert isinstance(stored.store.index, VectorStoreIndex)
    for row in ROWS[:5]:
        assert stored.select_examples(row) == plain.select_examples(row)
    with pytest.raises(InputError, match="from_examples: unknown 'collection'"):
        made(ROWS, collection="x")
    with pytest.raises(InputError, match="k must be greater than or equal to 1"):
        made(ROWS, None, 0)


@pytest.mark.slow
async def test_made_asynchronously_and_the_same_again() -> None:
    made_twice = [
        await SequentialCompositionalRetriever.afrom_examples(ROWS, WordCounts(), None, 3, language="functional")
        for _ in range(2)
    ]
    one, other = [await selector.aselect_examples({"source": "name the old dogs"}) for selector in made_twice]
    assert one == other
    assert len(one) == 3


class Counting(WordCounts):
    """Counts the requests that a server would get."""

    def __init__(self) -> None:
        self.requests = 0

    def embed_query(self, text: str) -> list[float]:
        self.requests += 1
        return super().embed_query(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.requests += 1
        return [WordCounts.embed_query(self, text) for text in texts]


def test_embeddings_that_read_questions_as_documents_are_asked_in_batches() -> None:
    embeddings: Embeddings = Counting()
    SequentialCompositionalRetriever.from_examples(ROWS, embeddings, language="functional")
    assert embeddings.requests < 10  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_saved_one_serves_again(tmp_path: Any) -> None:
    selector = made(ROWS)
    selector.save(tmp_path / "saved")
    again = SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved", embeddings=WordCounts())
    for row in ROWS[:5]:
        assert again.select_examples(row) == selector.select_examples(row)


def test_input_keys_that_the_examples_lack() -> None:
    with pytest.raises(InputError, match=r"input_keys: unknown 'qestion'; did you mean 'question'\?.*give source_key"):
        made(SQL, input_keys=["qestion"], language="sql")
    asked = made(SQL[:5], input_keys=["ask"], source_key="question", language="sql")
    assert len(asked.select_examples({"ask": "list the a of u", "other": 3})) == 4  # type: ignore[dict-item]
