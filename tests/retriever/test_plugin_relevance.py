"""`min_relevance`: nothing is picked for questions on other matters."""

import asyncio
import pickle
from itertools import product
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import FakeListLLM
from test_plugin_selectors import WordCounts

from langchain_rcr import InputError, Item, PoolError, SequentialCompositionalRetriever, semantic_parsing_chain
from langchain_rcr.families.structure import kernel
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

WORDS = ("how many", "name the"), ("red", "round", "big", "old"), ("cats", "dogs", "mice", "owls")
ROWS = [
    {"source": f"{verb} {color} {animal}", "target": f"{verb.split()[0]}({color}({animal}))"}
    for verb, color, animal in product(*WORDS)
]
NEAR, FAR = "name the big red owls", "what is the weather in Paris today"


@pytest.fixture(scope="module")
def fitted() -> SequentialCompositionalRetriever:
    return SequentialCompositionalRetriever.from_examples(ROWS, WordCounts(), language="functional", min_relevance=0.05)


def test_only_what_is_relevant_gets_examples(retriever: SequentialCompositionalRetriever) -> None:
    assert [len(found) for found in retriever.batch([FAR, NEAR, FAR])] == [0, 4, 0]
    assert [len(found) for found in asyncio.run(retriever.abatch([NEAR, FAR]))] == [4, 0]
    assert retriever.select_examples({"source": FAR}) == []
    assert retriever.model_copy(update={"k_min": 2}).invoke(FAR) == []
    plain = retriever.model_copy(update={"min_relevance": 0.0})
    assert len(plain.invoke(FAR)) == 4
    assert plain.invoke(NEAR) == retriever.invoke(NEAR)
    assert retriever.relevance(FAR) < 0.05 < retriever.relevance(NEAR) <= 1
    assert pickle.loads(pickle.dumps(retriever)).relevance(NEAR) == retriever.relevance(NEAR)
    with pytest.raises(PoolError, match=r"no relevance of 0.05 \(min_relevance\)"):
        retriever.explain(FAR)
    assert len(retriever.explain(NEAR).steps) == 4
    with pytest.raises(InputError, match="min_relevance must be less than 1, not 1"):
        SequentialCompositionalRetriever(store=retriever.store, min_relevance=1)
    with pytest.raises(InputError, match="the query is blank"):
        retriever.relevance(" ")


@pytest.mark.parametrize("neighbours", [0.0, 0.1, 0.5])
def test_it_is_a_rank_among_questions_held_out(
    retriever: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch, neighbours: float
) -> None:
    monkeypatch.setattr(kernel, "NEIGHBOURS", neighbours)
    encoder: Any = retriever.store.encoder.query
    vectors = encoder.landmarks.vectors
    spec = retriever.store.encoder.spec
    nearest = []
    for at, row in enumerate(ROWS):
        others = [
            -1.0 if spec.key(other["target"]) == spec.key(row["target"]) else float(vectors[at] @ vectors[n])
            for n, other in enumerate(ROWS)
        ]
        nearest.append(sorted(others, reverse=True)[int(neighbours * len(ROWS))])
    np.testing.assert_allclose(encoder.landmarks.nearest_held_out(encoder.learnt[:, 1]), nearest, atol=1e-6)
    for question in (NEAR, FAR, "name the old old mice", ROWS[3]["source"]):
        own = encoder.views([Item(question)]).vectors[0]
        expected = np.mean([each <= max(vectors @ own) for each in nearest])
        assert retriever.relevance(question) == pytest.approx(expected, abs=2 / len(ROWS))
    assert retriever.relevance(ROWS[3]["source"]) == 1


def test_an_added_question_is_relevant(retriever: SequentialCompositionalRetriever) -> None:
    retriever.add_example({"source": FAR, "target": "weather(paris)"})
    assert retriever.relevance(FAR) == 1
    assert retriever.invoke(FAR)[-1].metadata["target"] == "weather(paris)"


def test_an_added_question_is_relevant_without_frozen_vectors_too() -> None:
    items = [Item(row["source"], row["target"]) for row in ROWS]
    encoder = TriEncoder.fitted(items, spec=ProgramSpec("functional"), base="none")
    retriever = SequentialCompositionalRetriever.from_encoder(encoder, ROWS, min_relevance=0.05)
    assert retriever.relevance(FAR) < 0.05 < retriever.relevance(NEAR)
    retriever.add_example({"source": FAR, "target": "weather(paris)"})
    assert retriever.relevance(FAR) == 1
    assert retriever.invoke(FAR)[-1].metadata["target"] == "weather(paris)"


def test_a_chain_says_so_or_asks_without_examples(retriever: SequentialCompositionalRetriever) -> None:
    model = FakeListLLM(responses=["name(big(owls))"])
    chain = semantic_parsing_chain(model, retriever, "functional")
    assert chain.invoke(FAR).program == "name(big(owls))"
    chain = semantic_parsing_chain(model, retriever, "functional", needs_examples=True, drafts=1)
    refused, answered = chain.batch([FAR, NEAR])
    assert (refused.ok, refused.answers, refused.error) == (False, (), "no example is relevant to the question")
    assert answered.ok


def test_a_family_that_cannot_tell_says_so(caplog: pytest.LogCaptureFixture) -> None:
    few = SequentialCompositionalRetriever.from_examples(
        ROWS[:5], WordCounts(), language="functional", min_relevance=0.5
    )
    assert "min_relevance has no effect: the embeddings family can't tell" in caplog.text
    assert few.relevance(FAR) == 1
    assert len(few.invoke(FAR)) == 4
