"""Replaces values by constants: which city a question names has no bearing on the structure of its program (section 3).

Only leaves are values: the function `round` stays, the shape `round` is replaced. In a chain of tokens any may be.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

from langchain_rcr.programs.tree import Tree

ANON_STRING = "ANON_STRING"
ANON_NUMBER = "ANON_NUMBER"
ANON_VALUE = "ANON_VALUE"
ANON_TABLE = "ANON_TABLE"
ANON_COLUMN = "ANON_COLUMN"

COVR_CLASSES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("black", "white", "brown", "gray", "round", "square", "triangle"), "ANON_TYPE_VALUE")
    | dict.fromkeys(("dog", "cat", "mouse", "animal"), "ANON_ENTITY")
    | dict.fromkeys(("chasing", "playing with", "looking at"), "ANON_RELATION")
    | dict.fromkeys(("color", "shape"), "ANON_TYPE")
)
"""The classes of COVR's symbols: the first three as in the paper's appendix B; it names none for color and shape."""

# Possessive: a long run of digits in something else costs one scan.
_NUMBER = re.compile(r"[+-]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?[lL]?")


def anonymize(
    tree: Tree, classes: Mapping[str, str] | None = None, *, everywhere: bool = False, kept: Collection[str] = ()
) -> Tree:
    """Return the tree with its values replaced; doing it twice changes nothing more.

    A leaf that is a string (in quotes) becomes ANON_STRING, a number ANON_NUMBER, `_` ANON_VALUE.

    Args:
        tree: the program.
        classes: further values and what replaces each, such as COVR_CLASSES. A key of several words stands for a
            chain: `playing with` replaces playing → with by a single leaf.
        everywhere: also replace labels of inner nodes, which keep their children (language `tokens`).
        kept: values that stay.
    """
    classes = classes or {}
    longest = max((key.count(" ") + 1 for key in classes), default=1)

    def combine(label: str, below: list[tuple[Tree, tuple[str, ...]]]) -> tuple[Tree, tuple[str, ...]]:
        # Beside each new tree, its old labels if it was a chain no longer than the longest key.
        words: tuple[str, ...] = ()
        if not below:
            words = (label,)
        elif len(below) == 1 and 0 < len(below[0][1]) < longest:
            words = (label, *below[0][1])
        replacement = classes.get(" ".join(words)) if words else None
        if replacement is not None:
            return Tree(replacement), words
        if (everywhere or not below) and label not in kept:
            label = classes.get(label) or _constant(label)
        return Tree(label, tuple([child for child, _ in below])), words

    return tree.fold(combine)[0]


def values(tree: Tree, *, everywhere: bool = False) -> set[str]:
    """The strings and numbers in a tree, which `anonymize` replaces."""
    labels = {node.label for node in tree.walk() if everywhere or not node.children}
    return {label for label in labels if label != "_" and _constant(label) != label}


def _constant(label: str) -> str:
    if label == "_":
        return ANON_VALUE
    if len(label) > 1 and label[0] in "'\"" and label[-1] == label[0]:
        return ANON_STRING
    return ANON_NUMBER if _NUMBER.fullmatch(label) else label
