"""The labelled, ordered tree that every program language is parsed into, and its local structures.

Programs come from users and from language models, so a tree may be 200,000 nodes deep. Nothing here recurses.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from langchain_rcr.errors import InputError

T = TypeVar("T")
ROOT = "<root>"
CHILD = " -> "
SIBLING = " <-> "
_LONGEST_LABEL = 100
_SPECIAL = re.compile(r"[\\(),]")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tree:
    """A node and, below it, its children in order.

    Two trees are equal if their shapes and labels are. `len(tree)` is the number of nodes; `str(tree)` is a canonical
    text such as `answer(city(all))`, different for different trees.

    Attributes:
        label: the program symbol; a string value keeps its quotes.
        children: the arguments, left to right.
    """

    label: str
    children: tuple[Tree, ...] = ()

    def walk(self) -> Iterator[Tree]:
        """Yield every node, parents before children, left to right."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            if node.children:
                stack.extend(node.children[::-1])

    def fold(self, combine: Callable[[str, list[T]], T]) -> T:
        """Return `combine(label, results of the children)` of the root, computed from the leaves up."""
        return _fold(self._preorder(), combine)

    def __len__(self) -> int:
        return sum(1 for _ in self.walk())

    def __eq__(self, other: object) -> bool:
        return self._preorder() == other._preorder() if isinstance(other, Tree) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._preorder()))

    def _preorder(self) -> list[tuple[str, int]]:
        """Each node's label and number of children, which together determine the tree."""
        return [(node.label, len(node.children)) for node in self.walk()]

    def __str__(self) -> str:
        pieces: list[str] = []
        stack: list[Tree | str] = [self]
        while stack:
            top = stack.pop()
            if isinstance(top, str):
                pieces.append(top)
                continue
            pieces.append(_SPECIAL.sub(r"\\\g<0>", top.label))
            if top.children:
                inside = [part for child in top.children for part in (", ", child)]
                stack += [")", *reversed(inside[1:]), "("]
        return "".join(pieces)

    def __repr__(self) -> str:
        return f"<Tree {self}>"


def chain(labels: Sequence[str], below: Sequence[Tree] = ()) -> Tree:
    """A tree in which each label is the only child of the one before it, and the last has the children `below`."""
    tree = Tree(labels[-1], tuple(below))
    for label in labels[-2::-1]:
        tree = Tree(label, (tree,))
    return tree


def unfold(seed: T, expand: Callable[[T], tuple[str, Sequence[T]]]) -> Tree:
    """Build a tree from the root's seed down, without recursion; `expand` gives a label and the children's seeds."""
    labels: list[str] = []
    arities: list[int] = []
    stack = [seed]
    while stack:
        label, below = expand(stack.pop())
        labels.append(label)
        arities.append(len(below))
        stack.extend(reversed(below))
    return _fold(zip(labels, arities, strict=True), lambda label, children: Tree(label, tuple(children)))


def _fold(preorder: Iterable[tuple[str, int]], combine: Callable[[str, list[T]], T]) -> T:
    # Read backwards, a node comes after all of its descendants, its first child's result last.
    results: list[T] = []
    for label, arity in reversed(list(preorder)):
        below: list[T] = []
        if arity:
            below = results[: -arity - 1 : -1]
            del results[-arity:]
        results.append(combine(label, below))
    return results[0]


def local_structures(tree: Tree, max_size: int = 4) -> frozenset[str]:
    r"""Return the names of all local structures of up to `max_size` nodes (the paper's Appendix B).

    A structure of size n is a connected set of n nodes whose leaves are consecutive siblings: a chain from parent to
    child, possibly empty, that ends in a run of one or more consecutive siblings. A virtual `<root>` above the
    program's root can begin a chain, but is not a structure by itself.

    A name looks like `with_relation -> filter <-> playing`: `->` joins a chain, `<->` siblings. In a label, a backslash
    is doubled, `->` becomes `-\>` and a label `<root>` becomes `\<root>`, so different structures have different names.
    A label of over 100 characters is cut there, and `\#` and a digest follow: time and memory are linear in its size.

    Raises:
        InputError: max_size is below 1.
    """
    if max_size < 1:
        raise InputError(f"max_size: must be at least 1, got {max_size}")
    found: set[str] = set()
    # For each family of siblings: the siblings, and the chains of 0, 1, … nodes above them, each written as a prefix.
    families: list[tuple[tuple[Tree, ...], list[str]]] = [((tree,), ["", ROOT + CHILD])]
    while families:
        siblings, above = families.pop()
        names = [_escape(node.label) for node in siblings]
        count = len(names)
        for start, node in enumerate(siblings):
            name = run = names[start]
            found.update([prefix + run for prefix in above[:max_size]])
            for end in range(start + 1, min(start + max_size, count)):
                run = run + SIBLING + names[end]
                found.update([prefix + run for prefix in above[: max_size - (end - start)]])
            if node.children:
                step = name + CHILD
                families.append((node.children, ["", *[prefix + step for prefix in above[: max_size - 1]]]))
    return frozenset(found)


def is_label(name: str) -> bool:
    """Whether a structure's name is that of a single node; labels don't contain separators, see `local_structures`."""
    return CHILD not in name and SIBLING not in name


def _escape(label: str) -> str:
    if len(label) > _LONGEST_LABEL:
        digest = hashlib.blake2b(label.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return f"{_escape(label[:_LONGEST_LABEL])}\\#{digest}"
    if "\\" in label:
        label = label.replace("\\", "\\\\")
    if "->" in label:
        label = label.replace("->", "-\\>")
    return "\\" + label if label == ROOT else label
