"""What an encoder reads: a question (a query) or a question with its program (an example)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple
from unicodedata import normalize

from langchain_rcr.errors import PoolError

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
)
"""Scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
WORD = rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+"
"""Matches a word or, in these scripts, a letter, so that a clause isn't one word."""
_PIECE = 512
_PLAIN = frozenset((str, int, float, bool, type(None)))


DATABASE = "db_id"
"""What Spider, BIRD and data like theirs call the field that says which database a question is asked of."""


class Item(NamedTuple):
    """One text to encode: a question, its program unless that is unknown, and what it is of.

    `home` is its database, tenant or the like, of which examples are preferred for a question; empty: none.
    """

    source: str
    target: str = ""
    home: str = ""

    @property
    def fields(self) -> Mapping[str, Any]:
        """What else is known of it: nothing."""
        return {}

    @property
    def asked(self) -> Item:
        """The question, without the program."""
        return self._replace(target="")

    @property
    def text(self) -> str:
        """What a text encoder reads: the question and, on the next line, the program if there is one."""
        return f"{self.source}\n{self.target}" if self.target else self.source


def home_field(prefer: str | None, examples: Iterable[Mapping[str, Any]]) -> str | None:
    """The field that `Item.home` is read from; None: there is none.

    Args:
        prefer: its name; "": none; None: "db_id", where examples have it and differ in it.
        examples: with their fields.
    """
    if prefer is not None:
        return prefer or None
    values = (example.get(DATABASE) for example in examples)
    return DATABASE if len({value for value in values if isinstance(value, str | int)}) > 1 else None


def readable(items: Iterable[Item]) -> list[Item]:
    """Items as encoders and fits read them: questions in Unicode's NFKC, where full-width letters are plain ones.

    Programs stay as they are, since parsers tell such letters apart; prompts show questions as they were written.
    """
    items = list(items)
    if all(item.source.isascii() for item in items):
        return items
    return [item._replace(source=_nfkc(item.source)) for item in items]


def _nfkc(text: str) -> str:
    # In pieces: sorting a long run of accents takes quadratic time.
    return "".join(normalize("NFKC", text[start : start + _PIECE]) for start in range(0, len(text), _PIECE))


def copied(examples: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Deep copies of examples' fields; a `PoolError` names the id of one that can't be copied."""
    copies = list(map(dict, examples))
    if _PLAIN.issuperset(map(type, chain.from_iterable(map(dict.values, copies)))):
        return copies
    return map(_deep_copy, copies, ids)


def _deep_copy(fields: dict[str, Any], example_id: str) -> dict[str, Any]:
    try:
        return copy.deepcopy(fields)
    except Exception as error:  # whatever a user's class raises
        raise PoolError(f"example {example_id!r} has a field that can't be copied: {error}") from error
