"""What a model's response says: its text, why there is none, tokens; and what becomes of it in training."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from answering import Fake
from rcr_trainer.llm.client import _read
from rcr_trainer.llm.faults import MalformedResponseError
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.llm.settings import LLMSettings

from langchain_rcr.chains.answers import cut

THINKING = "<think>\nThey ask for all.\nTarget: no\nSource: x\n</think>\n\nanswer(city(all))"


@pytest.mark.parametrize("text", [THINKING, "hm\n</think>answer(city(all))", "<think>a</think>answer(city(all))"])
def test_training_reads_the_answers_of_models_that_think(text: str) -> None:
    with LanguageModel(Fake(lambda prompt: text)) as llm:
        answer = llm.generate(["Source: all cities\nTarget:"])[0]
        assert (answer.program, answer.reason) == ("answer(city(all))", "")
        assert not llm.stats.failures


def test_answers_on_disk_are_parsed_again(tmp_path: Path) -> None:
    """The file has what the model wrote; an answer cut off behind its program has one, one cut off within has none."""
    file, prompts = tmp_path / "a.sqlite", ["a", "b", "c", "d"]
    texts = [THINKING, "f(x)\nSource: more", "<think>only", "f(x"]
    model = Fake(dict(zip(prompts, texts, strict=True)).__getitem__)
    for paid in (4, 0):
        with LanguageModel(model, LLMSettings(stop=[]), cache_path=file) as llm:
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
    model = Fake(lambda prompt: (text, "length"))
    with LanguageModel(model, LLMSettings(stop=[]), language=language) as llm:
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
    ("text", "ending", "expected"),
    [
        ("a", "stop", ("a", "")),
        ("a", None, ("a", "")),
        ("a", "length", ("a", "truncated")),
        ("a\nb", "length", ("a", "")),
        ("a", "MAX_TOKENS", ("a", "truncated")),
        ("a", "content_filter", (None, "refused")),
        ("a", "refusal", (None, "refused")),
        ("", "too_long", (None, "too_long")),
        ("", "stop", (None, "empty")),
        (None, "stop", (None, "empty")),
        (" \n", "stop", (None, "empty")),
    ],
)
def test_reasons_for_no_text(text: str | None, ending: str | None, expected: tuple[str | None, str]) -> None:
    answer = _read({"text": text, "finish_reason": ending}, {}, ["\n"], is_chat=False)
    assert (answer.text, answer.reason) == expected
    assert answer == _read({"message": {"content": text}, "finish_reason": ending}, {}, ["\n"], is_chat=True)


def test_chat_messages_refuse_in_a_field_of_their_own() -> None:
    blocks = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [{"content": "", "refusal": "No."}, {"content": blocks}]
    found = [_read({"message": message, "finish_reason": "stop"}, {}, [], is_chat=True) for message in messages]
    assert [(answer.text, answer.reason) for answer in found] == [(None, "refused"), ("a b", "")]


@pytest.mark.parametrize(
    "choice", [{}, {"text": "a"}, {"message": None}, {"message": "a"}, {"message": {"content": 5}}]
)
def test_a_choice_without_a_message_or_text_is_malformed(choice: dict[str, Any]) -> None:
    with pytest.raises(MalformedResponseError):
        _read(choice, {}, [], is_chat=True)
    with pytest.raises(MalformedResponseError):
        _read({"text": 5}, {}, [], is_chat=False)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 2}, (7, 2)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, (-1, 0)),
        ({"completion_tokens": 3}, (-1, 3)),
        ({}, (-1, -1)),
    ],
)
def test_token_counts_are_those_reported(reported: dict[str, int], expected: tuple[int, int]) -> None:
    answer = _read({"text": "a"}, reported, [], is_chat=False)
    assert (answer.prompt_tokens, answer.completion_tokens) == expected
