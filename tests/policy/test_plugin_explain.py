"""Explaining a choice: the parts of every logit, the runner-ups, the structures that each pick brings."""

import json
from itertools import product

import numpy as np
import pytest
from toys import lexical

from langchain_rcr import InputError, Item, SequentialCompositionalRetriever
from langchain_rcr.programs import ProgramSpec

EXAMPLES = [
    {"source": f"how many {color} {animal} are there", "target": f"count({color}({animal}))", "db": animal}
    for color, animal in product(["red", "round", "big"], ["cats", "dogs", "mice"])
]
QUERY = "how many red cats and big dogs are there"


@pytest.fixture(scope="module")
def retriever() -> SequentialCompositionalRetriever:
    encoder = lexical(EXAMPLES, dim=64)
    return SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES, ids=list("abcdefghi"), k=3)


def test_the_steps_are_the_picks_and_the_parts_add_up(retriever: SequentialCompositionalRetriever) -> None:
    explanation = retriever.explain(QUERY)
    documents = retriever.invoke(QUERY)
    assert [step.pick.id for step in explanation.steps] == [document.id for document in documents]
    encoder = retriever.store.encoder
    vectors = encoder.encode_pool([Item(row["source"], row["target"]) for row in EXAMPLES])
    query = encoder.encode_queries([QUERY])[0]
    before = np.zeros_like(query)
    for step, document in zip(explanation.steps, documents, strict=True):
        assert step.pick.logit == pytest.approx(document.metadata["logit"], abs=1e-4)
        assert step.pick.probability == pytest.approx(document.metadata["probability"], abs=1e-4)
        for one in (step.pick, *step.runner_ups):
            at = "abcdefghi".index(one.id)
            assert one.relevance == pytest.approx(float(vectors.candidate[at] @ query), abs=1e-4)
            assert one.context == pytest.approx(float(vectors.candidate[at] @ before), abs=1e-4)
            assert one.logit == pytest.approx(one.relevance + one.context, abs=1e-5)
            assert (one.source, one.target) == (EXAMPLES[at]["source"], EXAMPLES[at]["target"])
        before = before + encoder.config.lam * vectors.context["abcdefghi".index(step.pick.id)]
    assert explanation.steps[0].pick.context == 0


def test_runner_ups_are_the_next_best_and_no_picks(retriever: SequentialCompositionalRetriever) -> None:
    explanation = retriever.explain(QUERY, k=2, runner_ups=5)
    everything = retriever.explain(QUERY, k=1, runner_ups=8).steps[0]
    assert [len(step.runner_ups) for step in explanation.steps] == [5, 5]
    logits = [one.logit for one in (everything.pick, *everything.runner_ups)]
    assert logits == sorted(logits, reverse=True)
    assert {one.id for one in (everything.pick, *everything.runner_ups)} == set("abcdefghi")
    assert explanation.steps[0].pick.id not in {one.id for one in explanation.steps[1].runner_ups}
    for k in (9, 10**12):
        assert [len(step.runner_ups) for step in retriever.explain(QUERY, k=k).steps] == [3, 3, 3, 3, 3, 3, 2, 1, 0]
    assert retriever.explain(QUERY, runner_ups=0).steps[0].runner_ups == ()


def test_structures_are_told_where_they_come_first(retriever: SequentialCompositionalRetriever) -> None:
    assert all(step.covered == () for step in retriever.explain(QUERY).steps)
    spec = ProgramSpec("functional", anonymize=False)
    steps = retriever.explain(QUERY, structures=spec.structures).steps
    seen: set[str] = set()
    for step in steps:
        has = spec.structures(step.pick.target)
        assert set(step.covered) == has - seen
        seen |= has
    assert steps[0].covered == tuple(sorted(spec.structures(steps[0].pick.target)))


def test_data_and_table(retriever: SequentialCompositionalRetriever) -> None:
    spec = ProgramSpec("functional")
    explanation = retriever.explain(QUERY, runner_ups=1, structures=spec.structures)
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["query"] == QUERY
    assert data["steps"][1]["pick"]["id"] == explanation.steps[1].pick.id
    table = str(explanation).splitlines()
    assert table[0] == f"Picks for: {QUERY}"
    first = explanation.steps[0].pick
    assert table[2].split()[:5] == ["1", f"{first.logit:.3f}", "=", f"{first.relevance:.3f}", "+0.000"]
    assert table[2].endswith(first.source)
    assert table[4].split(" structures: ")[1].startswith(explanation.steps[0].covered[0])


def test_a_long_question_is_cut_though_it_has_no_spaces() -> None:
    rows = [{"source": f"{n}件以上の" + "とても" * 40, "target": f"count({n})"} for n in range(3)]
    retriever = SequentialCompositionalRetriever.from_encoder(lexical(rows, dim=8), rows, k=1)
    shown = str(retriever.explain("1件以上の")).splitlines()[2].split("%  ")[1]
    assert shown.startswith("1件以上のとても")
    assert shown.endswith("も …")
    assert len(shown) == 70


def test_it_takes_the_same_options_as_selecting(retriever: SequentialCompositionalRetriever) -> None:
    explanation = retriever.explain(QUERY, filter={"db": "mice"}, k=3)
    assert sorted(step.pick.id for step in explanation.steps) == ["c", "f", "i"]
    with pytest.raises(InputError, match="blank"):
        retriever.explain(" ")
    with pytest.raises(InputError, match="k must be"):
        retriever.explain(QUERY, k=0)
    with pytest.raises(InputError, match="runner_ups must be greater than or equal to 0, not -1"):
        retriever.explain(QUERY, runner_ups=-1)
