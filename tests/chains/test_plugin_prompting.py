"""The prompt of the paper's appendix D, the plain drop-in, and braces everywhere."""

import asyncio
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from langchain_core._api import LangChainDeprecationWarning
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.example_selectors import SemanticSimilarityExampleSelector
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.load import dumpd
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    PromptTemplate,
)
from langchain_core.vectorstores import InMemoryVectorStore
from run_tree import RunTree

from langchain_rcr import FewShotPrompt, InputError, Item, SequentialCompositionalRetriever, TriEncoder, few_shot_prompt
from langchain_rcr.policy.prompt import APPENDIX_D

GEO = [
    {"source": "which capitals are in texas", "target": "answer(capital(loc_2(texas)))"},
    {"source": "what is the largest city", "target": "answer(largest(city(all)))"},
    {"source": "how long is the rio grande", "target": "answer(len(river('rio grande')))"},
]
BRACES = [
    {"source": "call {tool} with {}", "target": '{"name": "tool", "arguments": {"x": [1, {"y": "{source}"}]}}'},
    {"source": "{{doubled}} and { alone", "target": "(Yield }} {0.__class__} {!r} {a[b]})"},
]


def _retriever(rows: list[dict[str, str]], k: int = 2, **fields: Any) -> SequentialCompositionalRetriever:
    keys = list(rows[0])
    encoder = TriEncoder.build("lexical", [Item(row[keys[0]], row[keys[1]]) for row in rows], dim=512)
    return SequentialCompositionalRetriever.from_encoder(
        encoder, rows, k=k, source_key=keys[0], target_key=keys[1], **fields
    )


def _plain(selector: Any, **fields: Any) -> FewShotPromptTemplate:
    return FewShotPromptTemplate(
        example_selector=selector,
        example_prompt=PromptTemplate.from_template("Source: {source}\nTarget: {target}"),
        suffix="Source: {source}\nTarget:",
        input_variables=["source"],
        **fields,
    )


def test_the_format_of_the_papers_appendix() -> None:
    retriever = _retriever(GEO)
    question = "what is the largest capital in texas"
    first, second = retriever.select_examples({"source": question})
    assert few_shot_prompt(retriever).format(source=question) == (
        f"Source: {first['source']}\nTarget: {first['target']}\n"
        f"Source: {second['source']}\nTarget: {second['target']}\n"
        f"Source: {question}\nTarget:"
    )


def test_compose_makes_the_same_prompt() -> None:
    question = "what is the largest capital in texas"
    retriever = _retriever(GEO)
    picks = [Item(example["source"], example["target"]) for example in retriever.select_examples({"source": question})]
    assert APPENDIX_D.text(picks, question) == few_shot_prompt(retriever).format(source=question)


def test_the_plain_drop_in_makes_the_same_prompt() -> None:
    retriever = _retriever(GEO)
    ours, plain = few_shot_prompt(retriever), _plain(retriever, example_separator="\n")
    assert plain.format(source="largest city in texas") == ours.format(source="largest city in texas")
    assert plain.input_variables == ours.input_variables == ["source"]
    assert isinstance(ours, FewShotPromptTemplate)


def test_it_goes_where_langchains_own_selector_goes() -> None:
    """One changed line: the same prompt object, with the same pieces around whichever examples were picked."""
    theirs = SemanticSimilarityExampleSelector.from_examples(
        GEO, DeterministicFakeEmbedding(size=8), InMemoryVectorStore, k=2, input_keys=["source"]
    )
    question = "how long is the largest river"
    for selector in (theirs, _retriever(GEO)):
        examples = selector.select_examples({"source": question})
        assert len(examples) == 2
        shown = [f"Source: {row['source']}\nTarget: {row['target']}" for row in examples]
        expected = "\n\n".join(["Translate.", *shown, f"Source: {question}\nTarget:"])
        assert _plain(selector, prefix="Translate.").format(source=question) == expected


def test_an_added_example_enters_the_next_prompt() -> None:
    retriever = _retriever(GEO, k=1)
    prompt = few_shot_prompt(retriever)
    retriever.add_example({"source": "name all lakes", "target": "answer(lake(all))"})
    retriever.add_example({"source": "largest lake in texas", "target": "answer(largest(lake(texas)))"})
    assert "largest lake in texas" in prompt.format(source="largest lake in texas please")


def test_braces_in_examples_and_query_are_text() -> None:
    retriever = _retriever(BRACES)
    question = "what does {source} mean, {target}? {0} {{x}} }{"
    text = few_shot_prompt(retriever).format(source=question)
    for row in BRACES:
        assert f"Source: {row['source']}\nTarget: {row['target']}\n" in text
    assert text.endswith(f"\nSource: {question}\nTarget:")
    with pytest.raises((KeyError, ValueError)):
        _plain(retriever).format(source=question)


async def test_the_async_prompt_is_the_same_and_awaits_the_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = _retriever(BRACES)
    prompt = few_shot_prompt(retriever)
    expected = prompt.format(source="call {x}")
    chosen = retriever.select_examples({"source": "call {x}"})
    awaited = []

    async def aselect(self: Any, variables: Any) -> Any:
        await asyncio.sleep(0)
        awaited.append(variables)
        return chosen

    monkeypatch.setattr(SequentialCompositionalRetriever, "select_examples", None)
    monkeypatch.setattr(SequentialCompositionalRetriever, "aselect_examples", aselect)
    assert await prompt.aformat(source="call {x}") == expected
    assert (await prompt.ainvoke({"source": "call {x}"})).to_string() == expected
    assert [value.to_string() for value in await prompt.abatch([{"source": "call {x}"}])] == [expected]
    assert awaited == [{"source": "call {x}"}] * 3


def test_prefix_is_a_template_of_its_own() -> None:
    prompt = few_shot_prompt(_retriever(BRACES, k=1), prefix="Answer in {style}: {{}}").partial(style="JSON")
    text = prompt.format(source="call {tool}")
    assert text.startswith("Answer in JSON: {}\nSource: call {tool} with {}\nTarget: {")


def test_a_missing_variable_is_still_an_error() -> None:
    with pytest.raises(KeyError, match=r"missing variables \{'source'\}"):
        few_shot_prompt(_retriever(GEO)).invoke({"question": "largest city"})


def test_keys_come_from_the_retriever_or_the_caller() -> None:
    rows = [{"question": row["source"], "sql": row["target"]} for row in GEO]
    prompt = few_shot_prompt(_retriever(rows, k=1))
    assert prompt.input_variables == ["question"]
    assert prompt.format(question="largest city") == (
        "Source: what is the largest city\nTarget: answer(largest(city(all)))\nSource: largest city\nTarget:"
    )
    asked = few_shot_prompt(_retriever(rows, k=1), query_key="input")
    assert asked.format(input="largest city") == prompt.format(question="largest city")


def test_an_empty_pools_keys_count_too() -> None:
    encoder = TriEncoder.build("lexical", [Item("a", "b")], dim=8)
    retriever = SequentialCompositionalRetriever.from_encoder(encoder, [], source_key="q", target_key="sql", k=1)
    prompt = few_shot_prompt(retriever)
    retriever.add_example({"q": "x", "sql": "y"})
    assert prompt.format(q="z") == "Source: x\nTarget: y\nSource: z\nTarget:"


def test_any_selector_serves_and_only_selectors_do() -> None:
    theirs = SemanticSimilarityExampleSelector.from_examples(
        BRACES, DeterministicFakeEmbedding(size=8), InMemoryVectorStore, k=2
    )
    assert BRACES[0]["target"] in few_shot_prompt(theirs).format(source="{}")
    with pytest.raises(InputError, match="must be a LangChain example selector, not list"):
        few_shot_prompt(GEO)  # type: ignore[arg-type]
    for key, why in (("a b", "letters, digits"), ("{x}", "letters"), ("stop", "LangChain"), ("self", "LangChain")):
        with pytest.raises(InputError, match=f"'{key}' can't be the name of a template variable: {why}"):
            few_shot_prompt(theirs, query_key=key)
    with pytest.raises(InputError, match="shows 'question' of each example, but one has 'source', 'target'"):
        few_shot_prompt(theirs, source_key="question").format(question="x")


def test_the_question_is_the_variable_that_the_selector_reads() -> None:
    asked = few_shot_prompt(_retriever(GEO, input_keys=["question"]))
    assert asked.format(question="largest city") == few_shot_prompt(_retriever(GEO)).format(source="largest city")
    other = few_shot_prompt(_retriever(GEO), query_key="question", prefix="{style}").partial(style="terse")
    assert other.format(question="largest city") == "terse\n" + asked.format(question="largest city")
    several = few_shot_prompt(_retriever(GEO, input_keys=["source", "topic"]))
    assert several.input_variables == ["source"]
    assert several.format(source="how long is", topic="the rio grande").endswith("\nSource: how long is\nTarget:")


def test_partial_variables_also_after_a_run() -> None:
    """LangChain's own refuses `partial` once the prompt has been invoked (langchain-core 1.7.2)."""
    calls = []

    def today() -> str:
        calls.append(1)
        return f"day {len(calls)}"

    prompt = few_shot_prompt(_retriever(BRACES, k=1), prefix="{style}, {date}:")
    assert prompt.input_variables == ["date", "source", "style"]
    prompt.invoke({"source": "x", "style": "terse", "date": "today"})
    partial = prompt.partial(style="{braces}").partial(date=today)
    assert partial.input_variables == ["source"]
    assert isinstance(partial, FewShotPrompt)
    assert [partial.invoke(text).to_string().split(":")[0] for text in "ab"] == ["{braces}, day 1", "{braces}, day 2"]
    assert partial.format(source="x", style="long").startswith("long, ")
    assert prompt.input_variables == ["date", "source", "style"]
    fixed = prompt.partial(source="call {tool}", style="x", date="y")
    assert (fixed.input_variables, fixed.format()) == ([], prompt.format(source="call {tool}", style="x", date="y"))
    checked = prompt.model_copy(update={"validate_template": True}).partial(date=today, style="x")
    assert checked.input_variables == ["source"]
    assert checked.partial(style="long").invoke("a").to_string().startswith("long, ")


def test_printing_a_prompt_asks_no_selector(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    prompt = few_shot_prompt(_retriever(BRACES), prefix="In {style}:", query_key="q").partial(style="JSON")
    monkeypatch.setattr(SequentialCompositionalRetriever, "select_examples", None)
    assert prompt.pretty_repr() == (
        "In JSON:\nSource: {source}\nTarget: {target}\n… (as many as SequentialCompositionalRetriever picks)\n"
        "Source: {q}\nTarget:"
    )
    prompt.pretty_print()
    assert capsys.readouterr().out == prompt.pretty_repr() + "\n"
    fixed = FewShotPrompt(examples=BRACES, example_prompt=PromptTemplate.from_template("{source}"), suffix="{q}")
    assert fixed.pretty_repr() == f"{BRACES[0]['source']}\n\n{BRACES[1]['source']}\n\n{{q}}"


def test_what_a_prompt_tells_of_itself() -> None:
    prompt = few_shot_prompt(_retriever(GEO), prefix="{style}")
    schema = prompt.get_input_jsonschema()
    assert schema["required"] == ["source", "style"]
    assert {field["type"] for field in schema["properties"].values()} == {"string"}
    assert prompt.partial(style="x").invoke("largest city") == prompt.invoke({"source": "largest city", "style": "x"})


def test_serialising_is_refused_as_langchain_does_and_pickling_works(tmp_path: Path) -> None:
    prompt = few_shot_prompt(_retriever(BRACES))
    described = dumpd(prompt)
    assert (described["type"], described["id"][-1]) == ("not_implemented", "FewShotPrompt")
    assert BRACES[0]["target"] not in json.dumps(described)
    with pytest.warns(LangChainDeprecationWarning), pytest.raises(ValueError, match="Saving an example selector is"):
        prompt.save(tmp_path / "prompt.json")
    for clone in (pickle.loads(pickle.dumps(prompt)), copy.deepcopy(prompt)):
        assert clone.format(source="call {x}") == prompt.format(source="call {x}")


@pytest.mark.parametrize("make", [few_shot_prompt, _plain])
async def test_the_selectors_run_is_inside_the_prompts(make: Any) -> None:
    prompt = make(_retriever(GEO))
    name = type(prompt).__name__
    expected = {name: ["SequentialCompositionalRetriever"]}
    tree = RunTree()
    prompt.invoke({"source": "largest city"}, {"callbacks": [tree], "tags": ["mine"]})
    await prompt.ainvoke({"source": "largest city"}, {"callbacks": [tree], "tags": ["mine"]})
    prompt.batch([{"source": "largest city"}] * 2, {"callbacks": [tree], "tags": ["mine"]})
    assert tree.shape == [expected] * 4
    for run in tree.find("SequentialCompositionalRetriever"):
        assert (run.run_type, run.inputs, run.tags) == ("retriever", {"query": "largest city"}, ["mine"])
        assert len((run.outputs or {})["documents"]) == 2


def test_chat_prompts_and_chains_take_it() -> None:
    retriever = _retriever(BRACES)
    shots = FewShotChatMessagePromptTemplate(
        example_selector=retriever,
        example_prompt=ChatPromptTemplate.from_messages([("human", "{source}"), ("ai", "{target}")]),
        input_variables=["source"],
    )
    prompt = ChatPromptTemplate.from_messages([shots, ("human", "{source}")])
    messages = prompt.format_messages(source="call {x}")
    picked = retriever.select_examples({"source": "call {x}"})
    texts = [text for row in picked for text in (row["source"], row["target"])]
    assert [message.content for message in messages] == [*texts, "call {x}"]
    chain = few_shot_prompt(retriever) | FakeListLLM(responses=["one", "two"])
    assert sorted(chain.batch([{"source": "call a"}, {"source": "call b"}])) == ["one", "two"]


def test_fixed_examples_serve_as_in_langchain() -> None:
    prompt = FewShotPrompt(
        examples=BRACES,
        example_prompt=PromptTemplate.from_template("{source}|{target}"),
        suffix="",
        input_variables=[],
    )
    assert prompt.format() == "\n\n".join(f"{row['source']}|{row['target']}" for row in BRACES)
