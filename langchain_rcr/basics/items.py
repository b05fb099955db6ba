"""What an encoder reads: a question (a query) or a question with its program (an example)."""

from __future__ import annotations

import copy
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal, NamedTuple
from unicodedata import normalize

from langchain_rcr.errors import PoolError, refusing

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
)
"""Scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
MARKS = (
    "\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u05bf-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed"
    "\u0711-\u07f3\u0816-\u082d\u0859-\u085b\u0897-\u0963\u0966-\u0df3\u0f71-\u0fbc\u180b-\u180f\u1b00-\u1b44\u200c\u200d"
)
"""What continues a word though it isn't in \\w: accents, and vowels of Hindi, Tamil, Arabic, Hebrew and the like."""
NAME = rf"(?:\w++[{MARKS}]*+)++"
"""Matches letters of any script, digits and underscores."""
WORD = rf"[{_UNSPACED}]|(?:[^\W{_UNSPACED}]++[{MARKS}]*+)++"
"""Matches a word or, in these scripts, a letter, so that a clause isn't a single word."""
_FOLDS = str.maketrans({"ı": "i", **dict.fromkeys("\u0307\u00ad\u0640\u200b\u2060\ufeff")})
"""What is left of Turkish İ in lower case goes, and what nobody types: soft hyphens, stretched Arabic, zero widths."""
_PARTS = re.compile(r"\s*\S{1,512}|\s+")
"""Words, as accents belong to the letter before; no longer ones, as sorting a run of accents takes quadratic time."""
_PLAIN = frozenset((str, int, float, bool, type(None)))


DATABASE = "db_id"
"""The field in Spider, BIRD and similar data that says which database a question is about."""


class Item(NamedTuple):
    """One text to encode: a question, its program if known, and its home.

    `home` is its database, tenant or the like; a question prefers examples with the same home. Empty: none.
    """

    source: str
    target: str = ""
    home: str = ""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Other fields: none."""
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
    """The field that `Item.home` is read from, if any: `prefer` ("": none); None: "db_id", if examples differ in it."""
    if prefer is not None:
        return prefer or None
    values = (example.get(DATABASE) for example in examples)
    return DATABASE if len({value for value in values if isinstance(value, str | int)}) > 1 else None


def readable(items: Iterable[Item]) -> list[Item]:
    """Items as encoders and fits read them: questions in Unicode's NFKC, which makes full-width letters plain.

    Programs stay as they are, since parsers distinguish such letters (not NFC from NFD, see `ProgramSpec`).
    """
    return [item if item.source.isascii() else item._replace(source=normal(item.source, "NFKC")) for item in items]


def folded(text: str) -> str:
    """A text as words are compared: in NFKC and without case, with ss for ß and i for Turkish ı and İ."""
    return text.lower() if text.isascii() else normal(text, "NFKC").casefold().translate(_FOLDS)


def normal(text: str, form: Literal["NFC", "NFKC"]) -> str:
    """A text in a normal form of Unicode."""
    return text if text.isascii() else "".join(normalize(form, part) for part in _PARTS.findall(text))


def text_hash(text: str) -> int:
    """64 bits of a text's digest, signed."""
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little", signed=True)


def escaped(text: str) -> str:
    """A template that renders as this text."""
    return text.replace("{", "{{").replace("}", "}}")


def names_in(template: str) -> Iterator[str]:
    """The names in a template, which must be plain: attributes or formats could do more than insert text."""
    for _, name, spec, conversion in string.Formatter().parse(template):
        if name is not None:
            if not name.isidentifier() or spec or conversion:
                raise ValueError(f"{{{name}}} is not a plain name in braces (literal braces are doubled)")
            yield name


def copied(examples: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Deep copies of examples' fields; a `PoolError` names the id of one that can't be copied."""
    copies = list(map(dict, examples))
    if _PLAIN.issuperset(map(type, chain.from_iterable(map(dict.values, copies)))):
        return copies
    return map(_deep_copy, copies, ids)


def _deep_copy(fields: dict[str, Any], example_id: str) -> dict[str, Any]:
    with refusing(f"example {example_id!r} has a field that can't be copied", PoolError):
        return copy.deepcopy(fields)


def check_json(value: Any, *, tuples: bool = False) -> None:
    """Raise a TypeError if JSON would change a value: keys become strings and, unless `tuples` may, tuples lists."""
    containers = [value]  # none contains itself, or there would be no JSON
    for container in containers:
        if isinstance(container, tuple) and not tuples:
            raise TypeError("JSON would make a list of the tuple")
        if isinstance(container, dict):
            for key in container:
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is not a string")
        parts = container.values() if isinstance(container, dict) else container
        containers += [part for part in parts if isinstance(part, (dict, list, tuple))]
