"""The values in programs: which are replaced by constants, and which stay.

Which city a question names has no bearing on the structure of its program (section 3), and the name can be copied. But
a value that the question implies without naming it (1200 and 1800 for the afternoon) must be shown to the language
model, like any symbol of the program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from langchain_rcr.basics.items import WORD, folded
from langchain_rcr.basics.progress import track
from langchain_rcr.programs.tree import Tree

if TYPE_CHECKING:
    from langchain_rcr.programs.spec import ProgramSpec

FEWEST = 3
"""An implied value must be in at least this many programs; in fewer it may be an accident."""
MOST = 4000
"""The most pairs that are read for implied values; more are sampled evenly."""

# Possessive, so that a long run of digits in something else costs one scan.
_NUMBER = re.compile(r"[+-]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?[lL]?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
_WORD = re.compile(WORD)


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


def values(tree: Tree, *, everywhere: bool = False) -> set[str]:
    """The strings and numbers in a tree, which `anonymize` replaces."""
    labels = {node.label for node in tree.walk() if everywhere or not node.children}
    return {label for label in labels if label != "_" and _constant(label) != label}


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
        named.update(value for value in present if _names(text, value))
    return tuple(sorted(value for value, count in found.items() if count >= FEWEST and 2 * named[value] < count))


def _names(text: str, value: str) -> bool:
    """Whether a question has the words of a value; a long last word may have an ending, as in a plural."""
    words = _words(value)
    last = words.split()[-1:]
    if last and last[0].isalpha() and len(last[0]) > 3:
        words = words.rstrip()
    return bool(last) and words in text


def _words(text: str) -> str:
    return f" {' '.join(_WORD.findall(_THOUSANDS.sub('', folded(text.casefold())).replace('_', ' ')))} "
