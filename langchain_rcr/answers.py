"""Reads the program in a language model's answer, for serving and training."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from langchain_rcr.programs import get_parser
from langchain_rcr.prompt import APPENDIX_D

# Chat templates often open the thoughts in the prompt, so that the answer has the closing tag alone.
_THOUGHTS = re.compile(r"\A(?:.*</think(?:ing)?>|\s*<think(?:ing)?>.*)", re.DOTALL)
# Before a program on the same line, any other word is the program's.
_LANGUAGE = r"(?i:sql|sqlite|postgres|postgresql|python|json|lisp|text)"
_FENCE = re.compile(rf"```(?:[\w+-]*[ \t]*\n|{_LANGUAGE}[ \t]+|(?=[^`\n]+```))(.*?)(?:```|\Z)", re.DOTALL)
_BLANK_LINE = re.compile(r"\n[ \t]*\n")

_ON_ONE_LINE = frozenset({"functional", "sexpr", "json"})


class Reading(NamedTuple):
    """What an answer says.

    Attributes:
        program: the first text in the answer that parses; None if none does.
        tree: what the parser made of it.
        complaint: why the most likely text is not a program; None if there is a program.
    """

    program: str | None
    tree: Any
    complaint: str | None


def program_of(answer: str, language: str, labels: tuple[str, str] = APPENDIX_D.labels) -> str | None:
    """The program in an answer; None if there is no text that could be one.

    If nothing parses, it is the most likely text: the database may accept what the parser doesn't.

    Args:
        answer: what the model wrote.
        language: the programs' language, see `langchain_rcr.programs.get_parser`.
        labels: what precedes a question and a program in the prompt (`Prompt.labels`).
    """
    found = candidates(answer, language, labels)
    return read_answer(answer, get_parser(language).parse, language, labels).program or (found[0] if found else None)


def read_answer(
    answer: str,
    parse: Callable[[str], Any],
    language: str | None = None,
    labels: tuple[str, str] = APPENDIX_D.labels,
) -> Reading:
    """The program in an answer with what a parser makes of it, or why there is none.

    Args:
        answer: what the model wrote.
        parse: raises any exception, or returns None or False, if a text is not a program.
        language: the programs' language, see `candidates`.
        labels: as in `program_of`.
    """
    complaint = ""
    for text in candidates(answer, language, labels):
        try:
            tree = parse(text)
        except Exception as error:  # a user's parser may raise anything
            complaint = complaint or f"{type(error).__name__}: {error}"
            continue
        if tree is not None and tree is not False:
            return Reading(text, tree, None)
        complaint = complaint or f"it can't be parsed{f' as {language}' if language else ''}"
    return Reading(None, None, complaint or "it is empty")


def candidates(answer: str, language: str | None = None, labels: tuple[str, str] = APPENDIX_D.labels) -> list[str]:
    """The texts in an answer that may be its program, most likely first; the first that parses is the program.

    Dropped are a model's thoughts before the answer, whatever follows it (a next "Source:"), a leading "Target:" and
    backticks. If there are code fences, only their content counts. Where programs may
    have several lines (SQL, Python, tokens, unknown), all of a text comes first, then its first paragraph, then its
    first line; elsewhere the first line comes before those.

    Args:
        answer: what the model wrote.
        language: the programs' language, see `langchain_rcr.programs.get_parser`; None: unknown.
        labels: those of the prompt in the place of "Source:" and "Target:".

    Returns:
        Different texts, none blank.
    """
    text = answer[_thoughts(answer) :].strip()
    if labels[0]:
        text = text.split(f"\n{labels[0]}", 1)[0]
    found = [part for place in _FENCE.findall(text) or [text] for part in _parts(place, language, labels)]
    return [*dict.fromkeys(part for part in map(_bare, found) if part)]


def cut(answer: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The answer up to the first stop sequence after the model's thoughts, and whether there was one.

    Args:
        answer: what the model wrote; blanks around it are dropped.
        stop: sequences that end an answer, as in a request to a server.
    """
    answer = answer.lstrip()
    begin = _thoughts(answer)
    begin += len(answer[begin:]) - len(answer[begin:].lstrip())
    ends = [end for end in (answer.find(sequence, begin) for sequence in stop) if end >= 0]
    return (answer[: min(ends)] if ends else answer).strip(), bool(ends)


def _thoughts(answer: str) -> int:
    """How many characters of an answer are thoughts that precede it."""
    found = _THOUGHTS.match(answer)
    return found.end() if found else 0


def _parts(text: str, language: str | None, labels: tuple[str, str]) -> list[str]:
    question, program = labels
    if program:
        # A label in the middle of a line is a part of the program, or of prose.
        text = re.split(rf"(?:^|\n)[ \t]*{re.escape(program)}[ \t]*", text, maxsplit=1)[-1]
    text = text.strip()
    if question and text.startswith(question):
        return []
    line, paragraph = text.split("\n", 1)[0], _BLANK_LINE.split(text, maxsplit=1)[0]
    return [line, text, paragraph] if language in _ON_ONE_LINE else [text, paragraph, line]


def _bare(text: str) -> str:
    text = text.strip()
    quoted = text[:1] == text[-1:] == "`" and "\n" not in text
    return text.strip("`").strip() if quoted else text
