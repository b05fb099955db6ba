"""Where the program is in an answer."""

import time

import pytest

from langchain_rcr.answers import candidates, program_of


@pytest.mark.parametrize(
    ("answer", "first"),
    [
        ("SELECT 1", "SELECT 1"),
        (" SELECT a\nFROM b \n", "SELECT a\nFROM b"),
        ("Target: SELECT 1", "SELECT 1"),
        ("\nTarget:\nSELECT 1", "SELECT 1"),
        ("`SELECT 1`", "SELECT 1"),
        ("```SELECT 1```", "SELECT 1"),
        ("```sql SELECT 1```", "SELECT 1"),
        ("```SQL SELECT a\nFROM b\n```", "SELECT a\nFROM b"),
        ("It is ```sql SELECT 1```, or ```SELECT 2```.", "SELECT 1"),
        ("It is ```SELECT 1```.", "SELECT 1"),
        ("SELECT 1\nSource: next?\nTarget: SELECT 2", "SELECT 1"),
        ("SELECT 'Source: x'", "SELECT 'Source: x'"),
        ("SELECT x AS 'Target: y'", "SELECT x AS 'Target: y'"),
        ("Sure! Here it is:\n```sql\nSELECT a\nFROM b\n```\nIt selects a.", "SELECT a\nFROM b"),
        ("```\nSELECT 1", "SELECT 1"),
        ("```sql\nTarget: SELECT 1\n```", "SELECT 1"),
        ("The query:\nTarget: SELECT 1", "SELECT 1"),
        ("Source: the question\nTarget: SELECT 1\nSource: another", "SELECT 1"),
        ("<think>SELECT 0 would\n```\nSELECT 9\n```</think>\n\nSELECT 1", "SELECT 1"),
        ("<thinking>no</thinking>SELECT 1", "SELECT 1"),
        ("the prompt opened the thoughts\n</think>\nSELECT 1", "SELECT 1"),
        ("SELECT '<think>'", "SELECT '<think>'"),
    ],
)
def test_the_likeliest_place_of_a_program_of_several_lines(answer: str, first: str) -> None:
    for language in ("sql", "sql:postgres", "python", None):
        assert candidates(answer, language)[0] == first


@pytest.mark.parametrize("language", ["functional", "sexpr", "json"])
def test_a_program_of_one_line_comes_before_what_follows_it(language: str) -> None:
    assert candidates("count(a)\nThis counts.\n\nBye.", language) == [
        "count(a)",
        "count(a)\nThis counts.\n\nBye.",
        "count(a)\nThis counts.",
    ]
    assert candidates('Target: {\n "a": 1\n}', language)[:2] == ["{", '{\n "a": 1\n}']


def test_what_comes_after_in_what_order() -> None:
    assert candidates("SELECT 1\nFROM a\n\nIt selects.", "sql") == [
        "SELECT 1\nFROM a\n\nIt selects.",
        "SELECT 1\nFROM a",
        "SELECT 1",
    ]
    fences = "First:\n```sql\nSELECT 1\n```\nbetter:\n```sql\nSELECT 2\n```"
    assert candidates(fences, "sql") == ["SELECT 1", "SELECT 2"]


def test_prose_around_a_fence_is_no_program() -> None:
    """It would be one in a language where a word alone is."""
    assert candidates("Sure\n```\ncount((\n```\nBye", "functional") == ["count(("]


@pytest.mark.parametrize(
    "answer", ["", " \n\t", "``", "<think>hm</think>", "<think>cut off", "Source: x", "Target:", "Target: \n"]
)
def test_nothing_is_no_candidate(answer: str) -> None:
    assert candidates(answer, "sql") == candidates(answer, "functional") == []


@pytest.mark.parametrize("piece", ["`", "```\n", "<think>", "\n", "Target: ", "\nTarget:", "\n \n", "x\nSource:"])
def test_odd_answers_take_no_time(piece: str) -> None:
    began = time.process_time()
    candidates(piece * 50_000, "sql")
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (" answer ( all ) ", "answer ( all )"),
        ("\n\nanswer ( all )\nand more", "answer ( all )"),
        ("answer ( all )\nSource: next\nTarget: other", "answer ( all )"),
        ("Source: next\nTarget: other", "other"),
        ("Source: next", None),
        ("Target: answer ( all )", "answer ( all )"),
        ("```\nanswer ( all )\n```\nThis asks for all.", "answer ( all )"),
        ("Here you are:\n```funql\nTarget: answer ( all )\n```", "answer ( all )"),
        ("```sql\nSELECT 1", "SELECT 1"),
        ("`answer ( all )`", "answer ( all )"),
        ("<think>\nTarget: no\n</think>answer(city(all))", "answer(city(all))"),
        ("<think>answer(city(all))", None),
        ("not ( a program", "not ( a program"),
        ("", None),
        (" \n ", None),
        ("Resource: x", "Resource: x"),
    ],
)
def test_the_program_in_an_answer(text: str, program: str | None) -> None:
    assert program_of(text, "functional") == program


@pytest.mark.parametrize(
    ("language", "program"),
    [("sql", "SELECT a\nFROM b"), ("sql:postgres", "SELECT a\nFROM b"), ("tokens", "SELECT a\nFROM b")]
    + [(language, "SELECT a") for language in ("functional", "sexpr", "json")],
)
def test_the_language_says_how_many_lines_a_program_has(language: str, program: str) -> None:
    for text in ("```\nSELECT a\nFROM b\n```\nWell.", "SELECT a\nFROM b\nSource: next\nTarget: c"):
        assert program_of(text, language) == program
