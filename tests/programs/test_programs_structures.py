from __future__ import annotations

import itertools
import random
import time

import pytest

from langchain_rcr.errors import InputError
from langchain_rcr.programs import Tree, local_structures, parse
from langchain_rcr.programs.tree import is_label

# The table of the paper's appendix B, but for its row "with_relation <-> filter <-> playing", which must be a slip for
# with_relation -> filter <-> playing: the three are no siblings, and the table lacks the latter.
PAPER = {
    1: "count; with_relation; filter; black; find; mouse; playing; with; dog",
    2: "<root> -> count; count -> with_relation; filter -> black; filter -> find; find -> dog; find -> mouse; "
    "playing -> with; with_relation -> filter; with_relation -> find; with_relation -> playing; black <-> find; "
    "filter <-> playing; playing <-> find",
    3: "<root> -> count -> with_relation; count -> with_relation -> filter; count -> with_relation -> find; "
    "count -> with_relation -> playing; filter -> find -> mouse; filter -> black <-> find; "
    "with_relation -> filter -> black; with_relation -> filter -> find; with_relation -> find -> dog; "
    "with_relation -> playing -> with; with_relation -> filter <-> playing; with_relation -> playing <-> find; "
    "filter <-> playing <-> find",
    4: "<root> -> count -> with_relation -> filter; <root> -> count -> with_relation -> find; "
    "<root> -> count -> with_relation -> playing; count -> with_relation -> filter -> black; "
    "count -> with_relation -> filter -> find; count -> with_relation -> find -> dog; "
    "count -> with_relation -> playing -> with; count -> with_relation -> filter <-> playing; "
    "count -> with_relation -> playing <-> find; with_relation -> filter -> find -> mouse; "
    "with_relation -> filter -> black <-> find; with_relation -> filter <-> playing <-> find",
}
EXAMPLE = "count ( with_relation ( filter ( black , find ( mouse ) ) , playing with , find ( dog ) ) )"


def size_of(name: str) -> int:
    return 1 + name.count(" -> ") + name.count(" <-> ")


def slow_structures(tree: Tree, max_size: int) -> set[str]:
    """Read the definition of appendix B literally: try all sets of nodes of the tree under its virtual root."""
    labels, parents, places = ["<root>"], [-1], [0]
    stack = [(tree, 0, 0)]
    while stack:
        node, parent, place = stack.pop()
        labels.append(node.label)
        parents.append(parent)
        places.append(place)
        stack += [(child, len(labels) - 1, index) for index, child in enumerate(node.children)]
    found = set()
    for count in range(1, max_size + 1):
        for nodes in itertools.combinations(range(len(labels)), count):
            name = slow_name(nodes, labels, parents, places)
            if name is not None:
                found.add(name)
    return found


def slow_name(nodes: tuple[int, ...], labels: list[str], parents: list[int], places: list[int]) -> str | None:
    if nodes == (0,):
        return None
    siblings = [
        (x, y) for x in nodes for y in nodes if x and y and parents[x] == parents[y] and places[y] == places[x] + 1
    ]
    links = siblings + [(parents[x], x) for x in nodes if parents[x] in nodes]
    reached = {nodes[0]}
    for _ in nodes:
        reached |= {y for x, y in links if x in reached} | {x for x, y in links if y in reached}
    leaves = {x for x in nodes if x not in {parents[y] for y in nodes}}
    if reached != set(nodes) or any(not {x, y} <= leaves for x, y in siblings):
        return None
    run = sorted(leaves, key=lambda x: places[x])
    if any((x, y) not in siblings for x, y in itertools.pairwise(run)):
        return None
    chain = sorted(set(nodes) - leaves)  # numbered from the root down
    return "".join(f"{labels[x]} -> " for x in chain) + " <-> ".join(labels[x] for x in run)


def random_tree(rng: random.Random, nodes: int, labels: str) -> Tree:
    children: list[list[int]] = [[]]
    for index in range(1, nodes):
        children[rng.randrange(index)].append(index)
        children.append([])
    built: dict[int, Tree] = {}
    for index in reversed(range(nodes)):
        built[index] = Tree(rng.choice(labels), tuple(built[child] for child in children[index]))
    return built[0]


def test_papers_example() -> None:
    tree = parse(EXAMPLE)
    assert tree is not None
    found = local_structures(tree)
    by_size = {n: {name for name in found if size_of(name) == n} for n in PAPER}
    assert by_size == {n: set(names.split("; ")) for n, names in PAPER.items()}
    assert [len(by_size[n]) for n in (1, 2, 3, 4)] == [9, 13, 13, 12]


@pytest.mark.parametrize("max_size", [1, 2, 3, 5])
def test_max_size(max_size: int) -> None:
    tree = parse(EXAMPLE)
    assert tree is not None
    assert local_structures(tree, max_size) == {name for name in local_structures(tree, 9) if size_of(name) <= max_size}


def test_single_node() -> None:
    assert local_structures(Tree("a")) == {"a", "<root> -> a"}
    assert local_structures(Tree("a"), 1) == {"a"}


def test_max_size_below_one_is_an_error() -> None:
    with pytest.raises(InputError, match="max_size: must be at least 1, got 0"):
        local_structures(Tree("a"), 0)


@pytest.mark.parametrize("seed", range(60))
def test_equals_a_literal_reading_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, rng.randint(1, 9), "abc" if seed % 2 else "abcdefghij")
    max_size = rng.randint(1, 5)
    assert local_structures(tree, max_size) == slow_structures(tree, max_size)


def test_names_stay_apart_whatever_the_labels() -> None:
    trees = [
        Tree("a -> b"),
        Tree("a", (Tree("b"),)),
        Tree("a <-> b"),
        Tree("r", (Tree("a"), Tree("b"))),
        Tree("a -\\> b"),
        Tree("<root>"),
        Tree("\\<root>"),
        Tree("x", (Tree("y" * 101),)),
        Tree("x", (Tree("y" * 102),)),
        Tree("x", (Tree("y" * 100),)),
    ]
    whole = [max(local_structures(tree), key=lambda name: (size_of(name), name)) for tree in trees]
    assert len(set(whole)) == len(trees)
    assert "<root>" not in local_structures(Tree("<root>"))
    assert local_structures(Tree("<root>"), 2) == {"\\<root>", "<root> -> \\<root>"}
    assert "a -> b" not in local_structures(Tree("a -> b"))


@pytest.mark.parametrize("label", ["a", "a -> b", "a <-> b", "<root>", "\\<root>", "y" * 101, "-> " * 50])
def test_labels_are_the_structures_of_one_node_whatever_their_text(label: str) -> None:
    tree = Tree("r", (Tree(label), Tree("b", (Tree(label),))))
    assert {name for name in local_structures(tree) if is_label(name)} == local_structures(tree, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree",
    [
        Tree("f", tuple(Tree(f"c{i}") for i in range(100_000))),
        Tree("f" * 1_000_000, tuple(Tree(f"c{i}") for i in range(1_000))),
    ],
    ids=["wide", "long label"],
)
def test_linear_for_wide_trees(tree: Tree) -> None:
    started = time.process_time()
    found = local_structures(tree)
    assert time.process_time() - started < 2
    n = len(tree.children)
    # <root> and f: 3. Runs of 1, 2, 3 below f alone and below <root> and f, runs up to 4 without.
    assert len(found) == 2 + (n + (n - 1) + (n - 2) + (n - 3)) + (n + (n - 1) + (n - 2)) + (n + (n - 1))
    assert max(map(len, found)) < 1_000


@pytest.mark.slow
def test_linear_for_deep_trees() -> None:
    tree = Tree("x")
    for i in range(100_000):
        tree = Tree(f"f{i}", (tree,))
    started = time.process_time()
    found = local_structures(tree)
    assert time.process_time() - started < 2
    assert len(found) == 4 * 100_001 - 6 + 3  # chains of up to 4 nodes, and the 3 that begin at <root>
