from __future__ import annotations

import gc

import pytest

from langchain_rcr.programs import Tree
from langchain_rcr.programs.tree import unfold

LEAF = Tree("c")
SMALL = Tree("a", (Tree("b", (LEAF,)), LEAF))


def deep(depth: int, leaf: str = "x") -> Tree:
    tree = Tree(leaf)
    for _ in range(depth - 1):
        tree = Tree("f", (tree,))
    return tree


def test_walk_is_preorder_and_len_counts_nodes() -> None:
    assert [node.label for node in SMALL.walk()] == ["a", "b", "c", "c"]
    assert len(SMALL) == 4
    assert bool(LEAF)


def test_equality_and_hash_depend_on_labels_order_and_shape() -> None:
    same = Tree("a", (Tree("b", (Tree("c"),)), Tree("c")))
    others = [
        Tree("a", (Tree("c"), Tree("b", (Tree("c"),)))),
        Tree("a", (Tree("b"), Tree("c"), Tree("c"))),
        Tree("a", (Tree("b", (Tree("c"),)), Tree("d"))),
        Tree("a", (Tree("b", (Tree("c", (Tree("c"),)),)),)),
    ]
    assert same == SMALL
    assert hash(same) == hash(SMALL)
    assert all(other != SMALL for other in others)
    assert len({SMALL, same, *others}) == 5
    assert SMALL != "a(b(c), c)"


def test_is_frozen() -> None:
    with pytest.raises(AttributeError):
        LEAF.label = "d"  # type: ignore[misc]


def test_str_is_readable_and_differs_for_different_trees() -> None:
    assert str(SMALL) == "a(b(c), c)"
    assert str(Tree("f", (Tree("a, b"),))) != str(Tree("f", (Tree("a"), Tree("b"))))
    assert str(Tree("f(x)")) != str(Tree("f", (Tree("x"),)))
    assert str(Tree("f", (Tree("\\"), Tree("b")))) != str(Tree("f", (Tree("\\, b"),)))


def test_repr_shows_the_program() -> None:
    assert repr(SMALL) == "<Tree a(b(c), c)>"


def test_fold_sees_children_in_order() -> None:
    shown = SMALL.fold(lambda label, below: label + "".join(f"<{part}>" for part in below))
    assert shown == "a<b<c>><c>"


def test_unfold_inverts_fold() -> None:
    assert unfold(SMALL, lambda node: (node.label, node.children)) == SMALL


@pytest.mark.slow
@pytest.mark.parametrize("depth", [10_000, 200_000])
def test_no_operation_recurses(depth: int) -> None:
    tree, same, other = deep(depth), deep(depth), deep(depth, "y")
    assert len(tree) == depth
    assert tree == same
    assert hash(tree) == hash(same)
    assert tree != other
    assert str(tree).endswith("(x" + ")" * (depth - 1))
    assert repr(tree).startswith("<Tree f(f(")
    assert tree.fold(lambda _, below: 1 + sum(below)) == depth
    del tree, same, other
    gc.collect()
