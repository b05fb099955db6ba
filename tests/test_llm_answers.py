"""Which part of a completion is the program, and what is no program."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, Generation
from rcr_trainer.llm import Answer, program_of, programs_of
from rcr_trainer.llm.answers import cut, default_stop, read, usage


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (" answer ( all ) ", "answer ( all )"),
        ("\n\nanswer ( all )\nand more", "answer ( all )"),
        ("answer ( all )\nSource: next\nTarget: other", "answer ( all )"),
        ("Source: next\nTarget: other", ""),
        ("Target: answer ( all )", "answer ( all )"),
        ("```\nanswer ( all )\n```\nThis asks for all.", "answer ( all )"),
        ("Here you are:\n```funql\nTarget: answer ( all )\n```", "answer ( all )"),
        ("```sql\nSELECT 1", "SELECT 1"),
        ("`answer ( all )`", "answer ( all )"),
        ("`", "`"),
        ("", ""),
        (" \n ", ""),
        ("Resource: x", "Resource: x"),
    ],
)
def test_the_program_in_a_completion(text: str, program: str) -> None:
    assert program_of(text) == program


def test_programs_of_several_lines_stay_whole() -> None:
    text = "SELECT a\nFROM b\nSource: next\nTarget: c"
    assert program_of(text, multiline=True) == "SELECT a\nFROM b"
    assert program_of("```\nSELECT a\nFROM b\n```\nWell.", multiline=True) == "SELECT a\nFROM b"
    assert program_of(text) == "SELECT a"


@pytest.mark.parametrize(
    ("language", "program"),
    [("sql", "SELECT a\nFROM b"), ("sql:postgres", "SELECT a\nFROM b"), ("python", "SELECT a\nFROM b")]
    + [(language, "SELECT a") for language in ("functional", "sexpr", "json")],
)
def test_the_language_says_how_many_lines_a_program_has(language: str, program: str) -> None:
    answers = [Answer("```\nSELECT a\nFROM b\n```"), Answer(None, "refused"), Answer("Source: next"), Answer("x\n")]
    assert programs_of(answers, language) == [program, None, None, "x"]
    assert default_stop(language) == (["\n"] if program == "SELECT a" else ["\nSource:"])
    assert default_stop(language, chat=True) == ["\nSource:"]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (" a b ", ["\n"], ("a b", False)),
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
        ("a", {"finish_reason": "length"}, (None, "truncated")),
        ("a\nb", {"finish_reason": "length"}, ("a", "")),
        ("a", {"finish_reason": "MAX_TOKENS"}, (None, "truncated")),
        ("a", {"finish_reason": "content_filter"}, (None, "refused")),
        ("a", {"stop_reason": "refusal"}, (None, "refused")),
        ("", {"finish_reason": "too_long"}, (None, "too_long")),
        ("", {"finish_reason": "stop"}, (None, "empty")),
        (" \n", {"finish_reason": "stop"}, (None, "empty")),
    ],
)
def test_reasons_for_no_text(text: str, info: dict[str, Any] | None, expected: tuple[str | None, str]) -> None:
    assert read(Generation(text=text, generation_info=info), ["\n"]) == expected


def test_chat_messages_refuse_in_a_field_of_their_own() -> None:
    refusing = AIMessage("", additional_kwargs={"refusal": "No."})
    filtered = AIMessage("a", response_metadata={"finish_reason": "SAFETY"})
    blocks = AIMessage([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])
    assert read(ChatGeneration(message=refusing), []) == (None, "refused")
    assert read(ChatGeneration(message=filtered), []) == (None, "refused")
    assert read(ChatGeneration(message=blocks), []) == ("a b", "")


def test_token_counts_are_taken_from_where_models_report_them() -> None:
    counted = AIMessage("a", usage_metadata={"input_tokens": 7, "output_tokens": 2, "total_tokens": 9})
    own = Generation(text="a", generation_info={"prompt_tokens": 5, "completion_tokens": 1})
    plain = Generation(text="a")
    whole = {"token_usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    assert usage(ChatGeneration(message=counted), None) == (7, 2)
    assert usage(own, whole) == (5, 1)
    assert usage(plain, whole) == (3, 4)
    assert usage(plain, {"token_usage": {}}) is None
    assert usage(plain, None) is None
