"""What a retriever can be told: filters, beams, order, budgets, keys; by field, by call and by configuration."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import same_documents
from langchain_core.runnables import ConfigurableField
from toys import lexical

from langchain_rcr import InputError, Item, MemoryIndex, SequentialCompositionalRetriever, TriEncoder, few_shot_prompt

EXAMPLES = [
    {"source": f"how many {color} {animal} are there", "target": f"count({color}({animal}))", "db": animal, "n": number}
    for number, (color, animal) in enumerate(product(["red", "round", "big"], ["cats", "dogs", "mice"]))
]
QUERY = "how many red cats and big dogs are there"


@pytest.fixture(scope="module")
def encoder() -> TriEncoder:
    return lexical(EXAMPLES, dim=64)


def make(encoder: TriEncoder, **fields: Any) -> SequentialCompositionalRetriever:
    return SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES, ids=list("abcdefghi"), **fields)


@pytest.fixture
def retriever(encoder: TriEncoder) -> SequentialCompositionalRetriever:
    return make(encoder)


def ids(documents: Any) -> str:
    return "".join(document.id for document in documents)


def test_every_document_has_its_probability_over_what_was_left(
    retriever: SequentialCompositionalRetriever, encoder: TriEncoder
) -> None:
    vectors = encoder.encode_pool([Item(row["source"], row["target"]) for row in EXAMPLES])
    state, left = encoder.encode_queries([QUERY])[0], list(range(9))
    for document in retriever.invoke(QUERY, k=9):
        weights = np.exp((vectors.candidate[left] @ state).astype(np.float64) / encoder.config.tau)
        at = left.index("abcdefghi".index(document.id))
        assert document.metadata["probability"] == pytest.approx(weights[at] / weights.sum(), rel=1e-3)
        state = state + encoder.config.lam * vectors.context[left.pop(at)]
    assert document.metadata["probability"] == pytest.approx(1)
    retriever.probabilities = False
    assert "probability" not in retriever.invoke(QUERY)[0].metadata


def test_a_filter_decides_what_may_be_picked(encoder: TriEncoder, retriever: SequentialCompositionalRetriever) -> None:
    cats = make(encoder, filter={"db": "cats"}, k=3)
    assert sorted(ids(cats.invoke(QUERY))) == ["a", "d", "g"]
    assert sorted(ids(retriever.invoke(QUERY, k=3, filter={"db": {"$in": ["dogs"]}}))) == ["b", "e", "h"]
    # The field's filter holds, whatever the call's says.
    early = {"n": {"$lt": 5}}
    assert sorted(ids(cats.invoke(QUERY, filter=early))) == ["a", "d"]
    assert [sorted(ids(found)) for found in cats.batch([QUERY], filter=early)] == [["a", "d"]]
    assert {step.pick.id for step in cats.explain(QUERY, filter=early).steps} == {"a", "d"}
    assert cats.invoke(QUERY, filter={"db": "dogs"}) == []
    assert ids(cats.invoke(QUERY, k=9, filter={})) == ids(cats.invoke(QUERY, k=9))
    with pytest.raises(InputError, match="filter: must be a mapping of fields to values, not list"):
        retriever.invoke(QUERY, filter=[])
    assert {row["db"] for row in cats.select_examples({"source": QUERY})} == {"cats"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"colour": "red"}, r"filter: no example has a field 'colour' \(fields there: 'db', 'n', 'source', 'target'\)"),
        ({"n": {"$near": 3}}, r"filter: unknown operator '\$near' at 'n'"),
        ({"n": [1]}, r"filter: 'n' can be compared with text, numbers, true, false and null, not \[1\]"),
    ],
)
def test_a_filter_that_cannot_be_met_says_why(
    retriever: SequentialCompositionalRetriever, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        retriever.invoke(QUERY, filter=spec)


def test_what_a_narrow_filter_lets_through_is_all_there_is(
    encoder: TriEncoder, retriever: SequentialCompositionalRetriever
) -> None:
    narrow, none = {"db": "cats", "n": 0}, {"db": "cats", "n": 1}
    assert ids(retriever.invoke(QUERY, filter=narrow)) == "a"
    assert retriever.invoke(QUERY, filter=none) == []
    assert [ids(found) for found in retriever.batch([QUERY, QUERY], filter=narrow)] == ["a", "a"]
    strict = make(encoder, k_min=2)
    assert len(strict.invoke(QUERY)) == 4
    for where, count in ((narrow, 1), (none, 0)):
        with pytest.raises(InputError, match=f"k_min = 2, but only {count} examples can be picked"):
            strict.invoke(QUERY, filter=where)
    with pytest.raises(InputError, match="k_min must be greater than or equal to 0, not -1"):
        make(encoder, k_min=-1)
    with pytest.raises(InputError, match="k_min = 2 is more than k = 1"):
        strict.invoke(QUERY, k=1)
    one = strict.invoke(QUERY)[0].page_content
    with pytest.raises(InputError, match="k_min = 2, but only 1 examples can be picked"):
        make(encoder, k_min=2, max_tokens=len(one) + 1, tokenizer=len).invoke(QUERY)


def test_beams_are_asked_for_by_field_and_by_call(
    encoder: TriEncoder, retriever: SequentialCompositionalRetriever
) -> None:
    def chance(documents: Any) -> float:
        return float(np.prod([document.metadata["probability"] for document in documents]))

    wide = retriever.invoke(QUERY, beam_width=20)
    assert chance(wide) >= chance(retriever.invoke(QUERY)) - 1e-5
    assert ids(make(encoder, beam_width=20).invoke(QUERY)) == ids(wide)


def test_what_is_assigned_later_is_checked_too(encoder: TriEncoder) -> None:
    for name, value in {"order": "similar", "k_min": "2", "min_relevance": 5, "example_keys": "target"}.items():
        retriever = make(encoder)
        with pytest.raises(InputError, match=f"{name} must be .*, not {value!r}"):
            setattr(retriever, name, value)
    retriever.order = "reversed"
    assert ids(retriever.invoke(QUERY)) == ids(make(encoder, order="reversed").invoke(QUERY))


def test_the_order_of_the_picks(encoder: TriEncoder, retriever: SequentialCompositionalRetriever) -> None:
    picked = retriever.invoke(QUERY)
    ordered = make(encoder, order="reversed")
    assert ids(ordered.invoke(QUERY)) == ids(picked)[::-1]
    for query, found in zip([QUERY, "big dogs"], ordered.batch([QUERY, "big dogs"]), strict=True):
        assert same_documents(found, ordered.invoke(query))
    assert ordered.invoke(QUERY)[-1].metadata["step"] == 1


@pytest.mark.parametrize("order", [None, "reversed", "picked"])
def test_the_first_pick_comes_last_unless_the_checkpoint_or_the_retriever_says_otherwise(
    tmp_path: Path, order: str | None
) -> None:
    items = [Item(row["source"], row["target"]) for row in EXAMPLES]
    policy = TriEncoder.build("lexical", items, dim=64, **({"order": order} if order else {}))
    make(policy).save(tmp_path / "saved")
    for trained in (make(policy), SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved")):
        picks = ids(make(policy, order="picked").invoke(QUERY))
        assert picks == "".join(step.pick.id for step in trained.explain(QUERY).steps)
        shown = picks if order == "picked" else picks[::-1]
        documents = trained.invoke(QUERY)
        assert ids(documents) == ids(trained.batch([QUERY])[0]) == shown
        assert [document.metadata["step"] for document in documents] == [picks.index(one) + 1 for one in shown]
        rows = [EXAMPLES["abcdefghi".index(one)] for one in shown]
        assert trained.select_examples({"source": QUERY}) == rows
        text = few_shot_prompt(trained).format(source=QUERY)
        assert re.findall("Source: (.*)", text) == [*(row["source"] for row in rows), QUERY]
        for given, as_given in (("picked", picks), ("reversed", picks[::-1])):
            other = trained.model_copy(update={"order": given})
            assert ids(other.invoke(QUERY)) == as_given


def test_a_token_budget_holds_whole_examples(encoder: TriEncoder) -> None:
    def words(text: str) -> int:
        return len(text.split())

    short = {"source": "red cats", "target": "x"}
    every = [*EXAMPLES, short]
    roomy = SequentialCompositionalRetriever.from_encoder(encoder, every, max_tokens=10_000, tokenizer=words, k=10)
    assert len(roomy.invoke(QUERY)) == 10
    one = words(f"Source: {EXAMPLES[0]['source']}\nTarget: {EXAMPLES[0]['target']}")
    tight = SequentialCompositionalRetriever.from_encoder(
        encoder, every, max_tokens=2 * one + words("Source: red cats\nTarget: x"), tokenizer=words, k=10
    )
    documents = tight.invoke(QUERY)
    assert len(documents) == 3
    assert sum(words(document.page_content) for document in documents) <= 2 * one + 5
    assert any(document.page_content.endswith("Target: x") for document in documents)


def test_a_tokenizer_may_return_tokens_or_their_number(encoder: TriEncoder) -> None:
    class Encoding:
        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    encoding = Encoding()
    short = {"source": "red cats", "target": "x"}

    def picked(tokenizer: Any) -> list[Any]:
        every = [*EXAMPLES, short]
        made = SequentialCompositionalRetriever.from_encoder(encoder, every, max_tokens=20, tokenizer=tokenizer, k=10)
        return made.select_examples({"source": QUERY})

    expected = picked(encoding)
    assert 1 < len(expected) < 10
    ways: list[Callable[[str], Any]] = [
        encoding.encode,
        str.split,
        lambda text: tuple(text.split()),
        lambda text: np.array(encoding.encode(text)),
        lambda text: torch.tensor(encoding.encode(text)),
        lambda text: len(text.split()),
        lambda text: float(len(text.split())),
        lambda text: np.int64(len(text.split())),
        lambda text: np.array(len(text.split())),
        lambda text: torch.tensor(len(text.split())),
    ]
    for way in ways:
        assert picked(way) == expected
    for wrong, kind in (
        (lambda text: None, r"NoneType \(None\)"),
        (lambda text: text, r"str \('"),
        (lambda text: text.encode(), r"bytes \(b'"),
        (lambda text: {"input_ids": text.split()}, r"dict \(\{'input_ids'"),
        (lambda text: np.array([encoding.encode(text)]), r"ndarray \("),
        (lambda text: float("nan"), r"float \(nan\)"),
        (lambda text: float("inf"), r"float \(inf\)"),
        (lambda text: iter(text.split()), r"list_iterator \("),
    ):
        with pytest.raises(InputError, match=f"tokenizer must return tokens or their number, not {kind}"):
            picked(wrong)


def test_example_keys_choose_the_fields(encoder: TriEncoder) -> None:
    keyed = make(encoder, example_keys=["target"], k=1)
    assert [list(row) for row in keyed.select_examples({"source": QUERY})] == [["target"]]
    assert make(encoder, example_keys=[], k=1).select_examples({"source": QUERY})[0].keys() >= {"source", "target"}
    with pytest.raises(InputError, match=r"example_keys names 'sql', which the example '.' lacks: it has 'source'"):
        make(encoder, example_keys=["sql"]).select_examples({"source": QUERY})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width must be greater than or equal to 1, not 0"),
        ({"max_tokens": 0, "tokenizer": len}, "max_tokens must be greater than or equal to 1, not 0"),
        (
            {"max_tokens": 5},
            "max_tokens = 5 needs a tokenizer: tokenizer=a LangChain model, a tokenizer with encode, or",
        ),
        ({"max_tokens": 5, "tokenizer": 3}, "tokenizer must be a LangChain model, .* not int"),
        ({"vectorstore": None}, "a filled vectorstore has no vectors of ours: use from_examples"),
        ({"min_relevance": 1.0}, "min_relevance must be less than 1, not 1.0"),
        ({"index": "faiss"}, r"index must be an engine, such as MemoryIndex\(\) or VectorStoreIndex\(…\), not 'faiss'"),
        ({"index": MemoryIndex}, r"index must be an engine, .*, not <class .*MemoryIndex"),
        ({"explore": 5, "log": "outcomes.jsonl"}, "log must be an instance of OutcomeLog, not 'outcomes.jsonl'"),
        ({"order": "random"}, "order must be 'picked' or 'reversed', not 'random'"),
        ({"input_keys": "source"}, r"input_keys must be a list, as in \[source\], not 'source'"),
        ({"example_keys": [1]}, "example_keys must be a valid string, not 1"),
        ({"example_keys": map(str, ["target"])}, "example_keys must be an instance of Sequence, not <map"),
        ({"filter": {1: 2}}, "filter: a field must be a non-empty string, not 1"),
        ({"filter": {"$what": 1}}, r"filter: unknown operator '\$what'"),
        ({"group": 3}, "^group must be a valid string, not 3$"),
        ({"stop_early": "x", "tags": "y"}, "stop_early must be a valid boolean, not 'x'|tags must be a list, as in"),
        ({"kk": 3}, "^SequentialCompositionalRetriever: unknown 'kk'; did you mean 'k'.* known: auto_refit, "),
        ({"target_key": ["sql"]}, r"target_key must be a valid string, not \['sql'\]"),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(encoder: TriEncoder, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(encoder, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vectorstore": None, "k": 4}, "a filled vectorstore has no vectors of ours: use from_examples"),
        ({"k": 4}, "create it with from_pretrained, from_examples or from_encoder"),
    ],
)
def test_one_without_a_store_says_how_it_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SequentialCompositionalRetriever(**fields)


async def test_an_unknown_option_of_a_call_is_named(retriever: SequentialCompositionalRetriever) -> None:
    for name in ("foo", "seen"):
        with pytest.raises(InputError, match=f"unknown '{name}'; known: beam_width, draft, filter, k"):
            retriever.invoke(QUERY, **{name: 1})
    with pytest.raises(InputError, match="unknown 'K'; did you mean 'k'"):
        await retriever.ainvoke(QUERY, K=1)
    with pytest.raises(InputError, match="unknown 'draft'; did you mean 'drafts'"):
        retriever.batch([QUERY], draft="f")


def test_k_beams_and_filter_are_configurable(retriever: SequentialCompositionalRetriever) -> None:
    flexible = retriever.configurable_fields(
        k=ConfigurableField(id="k"), filter=ConfigurableField(id="where"), beam_width=ConfigurableField(id="beams")
    )
    chosen = flexible.invoke(QUERY, {"configurable": {"k": 3, "where": {"db": "mice"}, "beams": 2}})
    assert sorted(ids(chosen)) == ["c", "f", "i"]


def test_early_ends_give_fewer(retriever: SequentialCompositionalRetriever) -> None:
    gained = [document.metadata["logit"] > 0 for document in retriever.invoke(QUERY, k=9)]
    retriever.stop_early = True
    assert len(retriever.invoke(QUERY, k=9)) == (gained.index(False) if False in gained else 9)
