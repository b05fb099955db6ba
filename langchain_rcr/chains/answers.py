"""Reads the program in a language model's answer, for serving and training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from langchain_rcr.policy.prompt import APPENDIX_D
from langchain_rcr.programs import about, get_parser
from langchain_rcr.programs.languages import About

# Chat templates often open the thoughts in the prompt, so that the answer only has the closing tag.
_THOUGHTS = re.compile(r"\A(?:.*</think(?:ing)?>|\s*<think(?:ing)?>.*)?\s*", re.DOTALL)
# Before a program on the same line, any other word belongs to the program.
_LANGUAGE = r"(?i:sql|sqlite|postgres|postgresql|python|json|lisp|text)"
_FENCE = re.compile(rf"```(?:([\w+-]*)[ \t\r]*\n|({_LANGUAGE})[ \t]+|(?=[^`\n]+```))(.*?)(?:```|\Z)", re.DOTALL)
_NAMES = r"(?:sql(?:_?query)?|query|code|program|(?:final_)?answer|output|json|python|tool_calls?|function_calls?)"
# Elsewhere it is more likely part of a literal.
_TAG = re.compile(rf"(?:\A|(?<=[\n:.!]))[ \t]*([\[<])(?i:({_NAMES}))[\]>](.*?)(?:\1/(?i:\2)[\]>]|\Z)", re.DOTALL)
_END_TAG = re.compile(rf"(?i)[\[<]/{_NAMES}[\]>][ \t\r]*(?:\n|\Z)")
_LEAD = re.compile(
    r"(?i)\A(?:\W{0,4}(?:sure|certainly|of course|okay|ok|here|the|this|final|my|answer|query|program|output|result|"
    r"response|solution|translation|sql\w*|json)\b[^\n:;(){}\[\]<>=\"]{0,200}:"
    r"|(?:(?!--)[^\n:：;(){}\[\]<>=\"'`]){1,200}(?:：|:(?=\**\s)))\**\s*"  # in any language
)
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
_BRACKET = re.compile(r"[\[{]")
_FIELDS = frozenset({"sql", "query", "sql_query", "sqlquery", "program", "code", "answer", "final_answer", "target"})
_LONGEST_PROSE = 1 << 14
"""The longest text, in characters, that is searched for programs amid prose; a longer one is parsed as it is."""
_TRIED = 64
"""The most fences, labels, and brackets without a JSON value that are tried: a garbled answer may have any number."""


class Reading(NamedTuple):
    """What was found in an answer."""

    program: str | None  # the first of its `candidates` that parses; None if none does
    tree: Any  # the parser's result for it
    complaint: str | None  # why the likeliest text is not a program; None if there is a program
    likeliest: str | None = None  # the first candidate, whether or not it parses; None if there is none


def program_of(answer: str, language: str, labels: tuple[str, str] = APPENDIX_D.labels) -> str | None:
    """The program in an answer, or the likeliest text if nothing parses, since a database may still accept it.

    For the arguments see `candidates`.
    """
    reading = read_answer(answer, get_parser(language).parse, language, labels)
    return reading.program or reading.likeliest


def read_answer(
    answer: str, parse: Callable[[str], Any], language: str | None = None, labels: tuple[str, str] = APPENDIX_D.labels
) -> Reading:
    """The program in an answer and the parser's result, or why there is none; see `candidates`.

    If a text is not a program, `parse` raises any exception or returns None or False.
    """
    complaint = ""
    likeliest: str | None = None
    for text in candidates(answer, language, labels):
        likeliest = likeliest or text
        try:
            tree = parse(text)
        except Exception as error:  # a user's parser may raise anything
            complaint = complaint or f"{type(error).__name__}: {error}"
            continue
        if tree is not None and tree is not False:
            return Reading(text, tree, None, likeliest)
        complaint = complaint or f"it can't be parsed{f' as {language}' if language else ''}"
    return Reading(None, None, complaint or "it is empty", likeliest)


def candidates(answer: str, language: str | None = None, labels: tuple[str, str] = APPENDIX_D.labels) -> Iterator[str]:
    """The distinct texts in an answer that may be its program, likeliest first; the first that parses is the program.

    These are dropped: the model's thoughts before the answer, what follows it (a next "Source:"), "Target:" or other
    words with a colon before it, and backticks. If there are code fences, or tags such as `[SQL]…[/SQL]` and
    `<tool_call>`, only their contents count: the last first, as drafts precede final versions, and those of another
    language at the end; several calls in JSON make a list. The whole of a text comes before its first paragraph and its
    first line, but the line comes first if programs have one line each. At the end come programs amid prose, again the
    last first, what is in quotes, and fields named `sql`, `query` and the like of a JSON object.

    Args:
        answer: what the model wrote.
        language: the programs' language, see `langchain_rcr.programs.get_parser`; None: unknown.
        labels: the prompt's equivalents of "Source:" and "Target:".
    """
    known = about(language)
    text = answer[_begin(answer) :].strip()
    if labels[0]:
        text = text.split(f"\n{labels[0]}", 1)[0]
    fences = [((tag or word).lower(), inner) for tag, word, inner in _FENCE.findall(text)[: -_TRIED - 1 : -1]]
    if known.fences:  # those of another language last
        fences.sort(key=lambda fence: fence[0] != "" and not any(part in fence[0] for part in known.fences))
    seen = {""}
    for place in [inner for _, inner in fences] or [text]:
        texts = [place]
        if "]" in place or ">" in place:
            found = _TAG.findall(place)
            tagged = [inner for _, _, inner in reversed(found)]
            calls = {inner.strip(): None for _, name, inner in found if name.lower().startswith(("tool", "function"))}
            if known.is_json and len(calls) > 1:  # made together, rather than drafts of one
                tagged.insert(0, f"[{', '.join(calls)}]")
            texts = [*tagged, _END_TAG.split(place, maxsplit=1)[0], place]  # a tag may be part of a literal
            if known.on_one_line:
                texts = texts[: len(tagged) or 1]
        for inner in texts:
            for part in _parts(inner, known, labels):
                bare = _bare(part)
                if bare not in seen:
                    seen.add(bare)
                    yield bare


def cut(answer: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The stripped answer, up to the first stop sequence after its thoughts; and whether there was one."""
    begin = _begin(answer)
    ends = [end for end in (answer.find(sequence, begin) for sequence in stop) if end >= 0]
    return (answer[: min(ends)] if ends else answer).strip(), bool(ends)


def _begin(answer: str) -> int:
    """Where an answer begins, after blanks and thoughts."""
    return _THOUGHTS.match(answer).end()  # type: ignore[union-attr]  # it always matches


def _parts(text: str, known: About, labels: tuple[str, str]) -> Iterator[str]:
    question, program = labels
    texts = [text]
    if program:
        # A label in the middle of a line is part of the program, or of prose.
        texts = re.split(rf"(?:^|\n)[ \t]*{re.escape(program)}[ \t]*", text)
    for each in map(str.strip, reversed(texts[1:][-_TRIED:] or texts)):
        if question and each.startswith(question):
            continue
        lead = _LEAD.match(each)
        own = [each] if lead is None else [each[lead.end() :], each]
        if known.like_prose:
            own.reverse()
        for one in own:
            line, paragraph = known.first_line.match(one)[0], _BLANK_LINE.split(one, maxsplit=1)[0]  # type: ignore[index]
            if known.on_one_line:
                yield line
            yield one
            if len(one) <= _LONGEST_PROSE:
                yield from known.in_prose(one)
            if len(paragraph) > len(line):
                yield paragraph
            yield line
        if each[:1] in ("'", '"') and each.endswith(each[0]):
            yield each[1:-1]
        for value in _values(each) if "{" in each and len(each) <= _LONGEST_PROSE else ():
            yield from (value[0],) if known.is_json else _programs_in(value[1])


def _values(text: str) -> list[tuple[str, Any]]:
    """The JSON values in a text, as text and parsed: objects, then lists (or brackets in prose), the last first."""
    found, failed, at = [], 0, 0
    decoder = json.JSONDecoder(strict=False)  # models write line breaks as they are
    while failed < _TRIED and (bracket := _BRACKET.search(text, at)):
        try:
            value, at = decoder.raw_decode(text, bracket.start())
            found.append((text[bracket.start() : at], value))
        except (ValueError, RecursionError):
            failed, at = failed + 1, bracket.end()
    found.reverse()
    return sorted(found, key=lambda pair: not isinstance(pair[1], dict))


def _programs_in(value: Any) -> Iterator[str]:
    """The texts in fields of a JSON value with a name for programs, such as a tool's argument `query`."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, str) and str(name).lower() in _FIELDS:
                yield inner
            else:
                yield from _programs_in(inner)
    elif isinstance(value, list):
        for inner in reversed(value):
            yield from _programs_in(inner)
    elif isinstance(value, str) and value.startswith("{"):  # a call's arguments, in OpenAI's form
        for _, inner in _values(value):
            yield from _programs_in(inner)


def _bare(text: str) -> str:
    text = text.strip()
    quoted = text[:1] == text[-1:] == "`" and "\n" not in text
    return text.strip("`").strip() if quoted else text
