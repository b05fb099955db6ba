"""Local structures of a program (the paper's Appendix B).

A structure of size n is a connected set of n nodes whose leaves are consecutive siblings: a chain from parent to child,
possibly empty, that ends in a run of one or more consecutive siblings. A virtual `<root>` above the program's root can
begin a chain, but is not a structure by itself.
"""

from __future__ import annotations

import hashlib

from langchain_rcr.errors import InputError
from langchain_rcr.programs.tree import Tree

ROOT = "<root>"
CHILD = " -> "
SIBLING = " <-> "
_LONGEST_LABEL = 100


def local_structures(tree: Tree, max_size: int = 4) -> frozenset[str]:
    r"""Return the names of all local structures of up to `max_size` nodes.

    A name looks like `with_relation -> filter <-> playing`: `->` joins a chain, `<->` siblings. In a label, a backslash
    is doubled, `->` becomes `-\>` and a label `<root>` becomes `\<root>`, so different structures have different names.
    A label of more than 100 characters is cut there and followed by `\#` and a digest. So time and memory are linear in
    the size of the program, whatever its shape.

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
