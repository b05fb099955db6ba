"""What a model's response says: its text, why there is none, tokens; and what becomes of it in training."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, Generation
from rcr_trainer.llm.client import answer_of
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.llm.settings import LLMSettings

from langchain_rcr.chains.answers import cut

THINKING = "<think>\nThey ask for all.\nTarget: no\nSource: x\n</think>\n\nanswer(city(all))"


@pytest.mark.parametrize("text", [THINKING, "hm\n</think>answer(city(all))", "<think>a</think>answer(city(all))"])
def test_training_reads_the_answers_of_models_that_think(text: str) -> None:
    with LanguageModel(FakeListLLM(responses=[text])) as llm:
        answer = llm.generate(["Source: all cities\nTarget:"])[0]
        assert (answer.program, answer.reason) == ("answer(city(all))", "")
        assert not llm.stats.failures


def test_answers_on_disk_are_parsed_again(tmp_path: Path) -> None:
    """The file has what the model wrote; an answer cut off behind its program has one, one cut off within has none."""
    file, prompts = tmp_path / "a.sqlite", ["a", "b", "c", "d"]
    texts = [THINKING, "f(x)\nSource: more", "<think>only", "f(x"]
    settings = LLMSettings(stop=[], concurrency=1)  # in order
    for paid in (4, 0):
        with LanguageModel(FakeListLLM(responses=texts), settings, cache_path=file, identity={"named": "m"}) as llm:
            answers = llm.generate(prompts)
            assert [(answer.program, answer.reason) for answer in answers] == [
                ("answer(city(all))", ""),
                ("f(x)", ""),
                (None, "empty"),
                ("f(x", ""),
            ]
            assert llm.stats.paid == paid
            assert llm.stats.failures == {"empty": 1}
    with closing(sqlite3.connect(file)) as database:
        rows = database.execute("SELECT text FROM answers").fetchall()
    assert {text for (text,) in rows} == set(texts)


@pytest.mark.parametrize(
    ("text", "language", "program"),
    [
        ("f(x)\nand", "functional", "f(x)"),
        ("f(x)", "functional", None),
        ("SELECT a\nFROM b", "sql", None),
        ("```sql\nSELECT a\nFROM b\n```\nThis", "sql", "SELECT a\nFROM b"),
        ("SELECT a\nFROM b\nSource: an", "sql", "SELECT a\nFROM b"),
        ("<think>long and", "functional", None),
        ("a b c", "tokens", None),
    ],
)
def test_an_answer_cut_off_has_a_program_only_where_it_was_complete(
    text: str, language: str, program: str | None
) -> None:
    class Cut(FakeListLLM):
        async def _agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> Any:
            result = await super()._agenerate(prompts)
            result.generations[0][0].generation_info = {"finish_reason": "length"}
            return result

    with LanguageModel(Cut(responses=[text]), LLMSettings(stop=[]), language=language) as llm:
        answer = llm.generate(["a"])[0]
        assert (answer.program, answer.reason) == (program, "truncated")


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (" a b ", ["\n"], ("a b", False)),
        ("<think>\na\n</think>\n\nb\nc", ["\n"], ("<think>\na\n</think>\n\nb", True)),
        ("<think>\na\n", ["\n"], ("<think>\na", False)),
        ("\n a \n b", ["\n"], ("a", True)),
        ("a;b\nc", ["\n", ";"], ("a", True)),
        ("a\nb", [], ("a\nb", False)),
    ],
)
def test_text_ends_before_the_first_stop_sequence(text: str, stop: list[str], expected: tuple[str, bool]) -> None:
    assert cut(text, stop) == expected


@pytest.mark.parametrize(
    ("text", "info", "expected"),
    [
        ("a", {"finish_reason": "stop"}, ("a", "")),
        ("a", None, ("a", "")),
        ("a", {"finish_reason": "length"}, ("a", "truncated")),
        ("a\nb", {"finish_reason": "length"}, ("a", "")),
        ("a", {"finish_reason": "MAX_TOKENS"}, ("a", "truncated")),
        ("a", {"finish_reason": "content_filter"}, (None, "refused")),
        ("a", {"stop_reason": "refusal"}, (None, "refused")),
        ("", {"finish_reason": "too_long"}, (None, "too_long")),
        ("", {"finish_reason": "stop"}, (None, "empty")),
        (" \n", {"finish_reason": "stop"}, (None, "empty")),
    ],
)
def test_reasons_for_no_text(text: str, info: dict[str, Any] | None, expected: tuple[str | None, str]) -> None:
    answer = answer_of(Generation(text=text, generation_info=info), ["\n"])
    assert (answer.text, answer.reason) == expected


def test_chat_messages_refuse_in_a_field_of_their_own() -> None:
    refusing = AIMessage("", additional_kwargs={"refusal": "No."})
    filtered = AIMessage("a", response_metadata={"finish_reason": "SAFETY"})
    blocks = AIMessage([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])
    found = [answer_of(ChatGeneration(message=message), []) for message in (refusing, filtered, blocks)]
    assert [(answer.text, answer.reason) for answer in found] == [(None, "refused"), (None, "refused"), ("a b", "")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_calls": [{"name": "run", "args": {}, "id": "1"}]}, (None, "tool_call")),
        ({"invalid_tool_calls": [{"name": "run", "args": "{", "id": "1", "error": None}]}, (None, "tool_call")),
        ({"additional_kwargs": {"function_call": {"name": "run", "arguments": "{}"}}}, (None, "tool_call")),
        ({"content": "a", "tool_calls": [{"name": "run", "args": {}, "id": "1"}]}, ("a", "")),
    ],
)
def test_a_tool_call_is_no_empty_answer(fields: dict[str, Any], expected: tuple[str | None, str]) -> None:
    message = AIMessage(**{"content": "", "response_metadata": {"finish_reason": "tool_calls"}, **fields})
    answer = answer_of(ChatGeneration(message=message), [])
    assert (answer.text, answer.reason) == expected


def test_token_counts_are_taken_from_where_models_report_them() -> None:
    counted = AIMessage("a", usage_metadata={"input_tokens": 7, "output_tokens": 2, "total_tokens": 9})
    own = Generation(text="a", generation_info={"prompt_tokens": 5, "completion_tokens": 1})
    plain = Generation(text="a")
    whole = {"token_usage": {"prompt_tokens": 3, "completion_tokens": 4}}

    def usage(generation: Generation, output: dict[str, Any] | None) -> tuple[int, int]:
        answer = answer_of(generation, [], output)
        return answer.prompt_tokens, answer.completion_tokens

    assert usage(ChatGeneration(message=counted), None) == (7, 2)
    assert usage(own, whole) == (5, 1)
    assert usage(plain, whole) == (3, 4)
    assert usage(plain, {"token_usage": {}}) == (-1, -1)
    assert usage(plain, None) == (-1, -1)
