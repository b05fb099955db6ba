"""Where the program may be in what a language model answers."""

from __future__ import annotations

import re

_THOUGHT = re.compile(r"\A\s*<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)
_NEXT_QUESTION = re.compile(r"\nSource:")
_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LABEL = re.compile(r"(?:^|\n)[ \t]*Target:[ \t]*")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")

_ON_ONE_LINE = frozenset({"functional", "sexpr", "json"})


def candidates(answer: str, language: str | None = None) -> list[str]:
    """The texts in an answer that may be its program, the likeliest first; the first that parses is the program.

    A model's thoughts before the answer and what it goes on with after it (a next "Source:") are dropped, and so are
    a leading "Target:" and backticks. Where there are code fences, only what is in them counts. Where programs may
    have several lines (SQL, Python, unknown), all of a text comes first, then its first paragraph, then its first
    line; elsewhere the first line comes before those.

    Args:
        answer: what the model wrote.
        language: of the programs, see `langchain_rcr.programs.get_parser`; None: unknown.

    Returns:
        Different texts, none blank.
    """
    text = _NEXT_QUESTION.split(_THOUGHT.sub("", answer).strip(), maxsplit=1)[0]
    found = [part for place in _FENCE.findall(text) or [text] for part in _parts(place, language)]
    return [*dict.fromkeys(part for part in map(_bare, found) if part)]


def _parts(text: str, language: str | None) -> list[str]:
    # A label in the middle of a line is a part of the program, or of prose.
    text = _LABEL.split(text, maxsplit=1)[-1].strip()
    if text.startswith("Source:"):
        return []
    line, paragraph = text.split("\n", 1)[0], _BLANK_LINE.split(text, maxsplit=1)[0]
    return [line, text, paragraph] if language in _ON_ONE_LINE else [text, paragraph, line]


def _bare(text: str) -> str:
    text = text.strip()
    quoted = text[:1] == text[-1:] == "`" and "\n" not in text
    return text.strip("`").strip() if quoted else text
