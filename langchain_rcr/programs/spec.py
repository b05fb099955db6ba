"""How a run reads its programs: an object that all stages share, so that they see the same structures.

Values in programs are replaced by constants: which city a question names has no bearing on the structure of its program
(section 3), and the name can be copied. But a value that the question implies without naming it (1200 and 1800 for the
afternoon) stays, since it must be shown to the language model, like any symbol of the program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from sys import intern
from typing import Any, Literal

from langchain_rcr.basics.items import WORD, folded, normal
from langchain_rcr.basics.progress import track
from langchain_rcr.errors import InputError
from langchain_rcr.programs.languages import about, get_parser
from langchain_rcr.programs.remembering import remembered
from langchain_rcr.programs.tree import Tree, local_structures

LARGEST = 8
"""The limit of `max_size`: time and memory grow with its square."""
FEWEST = 3
"""An implied value must be in at least this many programs; in fewer it may be an accident."""
MOST = 4000
"""The most pairs that are read for implied values; more are sampled evenly."""

# Possessive, so that a long run of digits in something else costs one scan.
_NUMBER = re.compile(r"[+-]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?[lL]?")
_THOUSANDS = re.compile(r"(?<=\d)[,，.'’٬\u00a0\u202f](?=(?:\d\d,){0,5}\d{3}(?!\d))")
"""As in 1,000, 1.000, 1’000, 1,00,000 or with a space that doesn't break."""
_DIGIT = re.compile(r"[^\D0-9]")
"""A digit of another script."""
_WORD = re.compile(WORD)


@dataclass(frozen=True)
class ProgramSpec:
    """How programs are parsed (in Unicode's NFC), anonymised and cut into local structures.

    Attributes:
        language: the program language, see `get_parser`.
        anonymize: replace strings, numbers and `_` by constants (section 3); "names": also the names of tables and
            columns, in a language that has them (sql), for pools of several databases.
        max_size: the size of the largest local structures, the paper's l = 4; 1 to 8.
        implied: values that stay, since questions don't name them; see `implied_values`.

    Raises:
        InputError: an unknown language, max_size out of its range, or `implied` doesn't hold strings.
        MissingExtraError: the language needs a package that is not installed.
    """

    language: str = "functional"
    anonymize: bool | Literal["names"] = True
    max_size: int = 4
    implied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not all(isinstance(value, str) for value in self.implied):
            raise InputError(f"implied: strings were expected, not {self.implied!r:.80}")
        object.__setattr__(self, "implied", tuple(self.implied))  # JSON gives a list
        if not isinstance(self.language, str):
            raise InputError(f"language: a name was expected, not {self.language!r:.80}")
        parser = get_parser(self.language)
        if self.anonymize == "names" and not hasattr(parser, "shape"):
            raise InputError(f"anonymize: names: programs in '{self.language}' have no tables and columns; sql has")
        if not 1 <= self.max_size <= LARGEST:
            raise InputError(f"max_size: must be from 1 to {LARGEST}, got {self.max_size:.9g}")

    @property
    def named(self) -> ProgramSpec:
        """The same with the names of tables and columns kept, for judging answers."""
        return replace(self, anonymize=bool(self.anonymize))

    def to_json(self) -> dict[str, Any]:
        """Return the attributes, with `implied` only if there are any, so that digests match earlier versions."""
        first = {"language": self.language, "anonymize": self.anonymize, "covr_classes": False}
        return {**first, "max_size": self.max_size, **({"implied": self.implied} if self.implied else {})}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ProgramSpec:
        """Read what `to_json` returned; a `TypeError` if it is something else."""
        fields = {**value}
        if fields.pop("covr_classes", False):
            raise InputError("covr_classes: COVR's words are no longer replaced by classes: train again")
        return cls(**fields)

    def tree(self, text: str) -> Tree | None:
        """Return the program's tree, anonymised if the spec says so, or None for what is not a program."""
        tree = _parsed(self.language, self.anonymize == "names", text)
        if tree is None or not self.anonymize:
            return tree
        return anonymize(tree, everywhere=about(self.language).inner_values, kept=frozenset(self.implied))

    def values(self, text: str) -> set[str]:
        """Return the strings and numbers of a program as they are written there, quotes included."""
        tree, everywhere = _parsed(self.language, self.anonymize == "names", text), about(self.language).inner_values
        labels = {node.label for node in tree.walk() if everywhere or not node.children} if tree is not None else set()
        return {label for label in labels if label != "_" and _constant(label) != label}

    def structures(self, text: str) -> frozenset[str]:
        """Return the program's local structures; none if it doesn't parse."""
        return frozenset(self._read(text)[1])

    def key(self, text: str) -> str:
        """Return a canonical form, the same for texts that are the same program up to its values, implied ones too.

        A text that doesn't parse is its own key, with runs of whitespace as one space.
        """
        return self._read(text)[0]

    # Fitting, holding out and encoding ask for key and structures of the same programs, and parsing takes nearly all of
    # the time. Structures are interned, as programs share most of them, and no set, which takes six times the memory.
    # Takes about 10 bytes per character, up to 50.
    @remembered(1 << 25)
    def _read(self, text: str) -> tuple[str, tuple[str, ...]]:
        tree = self.tree(text)
        if tree is None:
            return " ".join(text.split()), ()
        key = replace(self, implied=()).tree(text) if self.implied else tree
        return str(key), tuple(map(intern, local_structures(tree, self.max_size)))


# Shared by specs with and without implied values. Takes about 10 bytes per character, up to 80.
@remembered(1 << 21)
def _parsed(language: str, shape: bool, text: str) -> Tree | None:
    parser: Any = get_parser(language)
    text = normal(text, "NFC")
    tree: Tree | None = parser.shape(text) if shape else parser.parse(text)
    return tree


def anonymize(tree: Tree, *, everywhere: bool = False, kept: Collection[str] = ()) -> Tree:
    """Return the tree with its values replaced; doing it twice changes nothing more.

    A leaf that is a string (in quotes) becomes ANON_STRING, a number ANON_NUMBER, `_` ANON_VALUE. Inner nodes stay.

    Args:
        tree: the program.
        everywhere: also replace labels of inner nodes, which keep their children (language `tokens`).
        kept: values that stay.
    """

    def combine(label: str, below: list[Tree]) -> Tree:
        is_value = (everywhere or not below) and label not in kept
        return Tree(_constant(label) if is_value else label, tuple(below))

    return tree.fold(combine)


def _constant(label: str) -> str:
    if label == "_":
        return "ANON_VALUE"
    if len(label) > 1 and label[0] in "'\"" and label[-1] == label[0]:
        return "ANON_STRING"
    return "ANON_NUMBER" if _NUMBER.fullmatch(label) else label


def implied_values(pairs: Sequence[tuple[str, str]], spec: ProgramSpec) -> tuple[str, ...]:
    """The values that most of their programs' questions don't name.

    Args:
        pairs: questions and their programs; a pair that is repeated counts once.
        spec: how programs are read.

    Returns:
        The values as `ProgramSpec.values` has them, sorted; none if nothing is anonymised.
    """
    if not spec.anonymize:
        return ()
    found: Counter[str] = Counter()
    named: Counter[str] = Counter()
    read = min(len(pairs), MOST)
    chosen = dict.fromkeys(pairs[at * len(pairs) // read] for at in range(read))
    for question, program in track([*chosen], "reading values"):
        text = _words(question)
        present = spec.values(program)
        found.update(present)
        named.update(value for value in present if _is_named(text, value))
    return tuple(sorted(value for value, count in found.items() if count >= FEWEST and 2 * named[value] < count))


def _is_named(text: str, value: str) -> bool:
    """Whether a question has the words of a value; a long last word may have an ending, as in a plural.

    Two letters and more beyond ASCII may be part of a word, as Korean attaches particles and Hebrew prepositions.
    """
    words = _words(value.rstrip("lL") if _NUMBER.fullmatch(value) else value)  # Lispress's 1L
    last = words.split()[-1:]
    if not words.isascii() and len(words.strip()) > 1:
        words = words.strip()
    elif last and last[0].isalpha() and len(last[0]) > 3:
        words = words.rstrip()
    return bool(last) and words in text


def _words(text: str) -> str:
    text = folded(_DIGIT.sub(lambda digit: str(int(digit[0])), _THOUSANDS.sub("", text)))
    return f" {' '.join(_WORD.findall(text.replace('_', ' ')))} "
