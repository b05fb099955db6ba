"""Questions are read in NFKC, wherever they go into an encoder; prompts show them as they were written."""

import time
from itertools import product
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
from test_plugin_selectors import WordCounts
from toys import lexical

from langchain_rcr import Item, SequentialCompositionalRetriever
from langchain_rcr.basics.items import normal, readable

WORDS = ("how many", "name the", "where are"), ("red", "round", "big", "old", "wet"), ("cats", "dogs", "mice", "owls")
ROWS = [{"source": " ".join(words), "target": f"{words[0][:3]}({words[1]}({words[2]}))"} for words in product(*WORDS)]


def wide(text: str) -> str:
    """A text in full-width Latin, as East Asian keyboards write it."""
    return "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else "\u3000" for letter in text)


WIDE = [{**row, "source": wide(row["source"])} for row in ROWS]


def lexically(rows: list[dict[str, Any]]) -> Any:
    return SequentialCompositionalRetriever.from_encoder(lexical(rows, 512), rows, k=2)


def fitted(rows: list[dict[str, Any]]) -> Any:
    return SequentialCompositionalRetriever.from_examples(
        rows, WordCounts(), k=2, language="functional", order="picked"
    )


@pytest.mark.parametrize("make", [lexically, pytest.param(fitted, marks=pytest.mark.slow)])
def test_full_width_questions_find_their_own_examples_as_plain_ones_do(make: Any) -> None:
    plain, other = make(ROWS), make(WIDE)
    assert plain.store.encoder.fingerprint() == other.store.encoder.fingerprint()
    for n, row in enumerate(ROWS):
        expected = plain.select_examples({"source": row["source"]})
        assert expected[0] == row
        assert plain.select_examples({"source": WIDE[n]["source"]}) == expected
        for query in (row, WIDE[n]):
            picks = other.select_examples({"source": query["source"]})
            assert picks == [WIDE[ROWS.index(pick)] for pick in expected]
    assert wide("how many") in other.invoke(ROWS[0]["source"])[0].page_content


def test_an_added_example_is_read_so_too() -> None:
    retriever = lexically(ROWS)
    retriever.add_example({"source": wide("how many red bats"), "target": "how(red(bats))"}, id="bats")
    retriever.add_example({"source": "how many blue bats", "target": "how(blue(bats))"}, id="plain")
    assert retriever.invoke("how many red bats")[0].id == "bats"


def test_what_nfkc_does_not_change_has_the_very_same_vectors() -> None:
    texts = ["how many red cats", "wie große Mäuse", "東京の人口", "où est l’été ?", "e" + "\u0301" * 2000 + " x"]
    texts = [normalize("NFKC", text) for text in texts] + [""] + [f"{'ü' * n}ber" for n in range(500, 520)]
    rows = [{"source": text, "target": f"f({n})"} for n, text in enumerate(texts) if text]
    encoder = lexical(rows, 64)
    assert readable(Item(text) for text in texts) == [Item(text) for text in texts]
    assert np.array_equal(
        encoder.encode_queries(texts), encoder.query.vectors(encoder.query.featurize([Item(text) for text in texts]))
    )
    items = [Item(row["source"], row["target"]) for row in rows]
    assert np.array_equal(
        encoder.encode_pool(items).candidate, encoder.candidate.rows(encoder.candidate.featurize(items))
    )


def test_programs_are_left_as_they_are() -> None:
    item = Item("\uff21", "f('\uff07')")
    assert readable([item]) == [Item("A", "f('\uff07')")]
    assert item.source == "\uff21"


def test_a_long_run_of_accents_is_no_burden() -> None:
    """Putting them in order takes the square of their number."""
    began = time.process_time()
    readable([Item("a" + "\u0301\u0316" * 500_000)])
    assert time.process_time() - began < 1


def test_an_accent_stays_with_its_letter_wherever_it_is_in_a_long_text() -> None:
    for form in ("NFC", "NFKC"):
        for text in (f"{'x' * n} Huế là {'é ' * 300}" for n in range(505, 515)):
            assert normal(normalize("NFD", text), form) == normalize(form, text)
