"""Ways to divide examples into train and test: at random, by template, by length, by compound divergence.

All work on positions 0 … n-1 and return (train, test), both sorted. The same seed gives the same split.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rcr_trainer.errors import ConfigError

if TYPE_CHECKING:
    from langchain_rcr.programs import Tree

Positions = tuple[list[int], list[int]]
_Floats = NDArray[np.float64]
_T = TypeVar("_T")

# Of the Chernoff coefficient of compounds: small, so that it matters whether train has a compound rather than
# how often (Keysers et al., 2020, section 2.2).
ALPHA = 0.1
_LEAST_GAIN = 1e-9


def random_split(size: int, train: int, seed: str | int) -> Positions:
    """A split at random, `train` of `size` on the first side."""
    return length_split([0] * size, train, seed)


def template_split(templates: Sequence[Hashable], train: int, seed: str | int) -> Positions:
    """A split where no template is on both sides (Finegan-Dollak et al., 2018).

    Templates are taken in random order; each goes to train whole if it still fits in there.

    Args:
        templates: of each example, such as its anonymised program.
        train: the size of train; missed by a little where the templates' sizes don't add up to it.
        seed: of the order.
    """
    _check(len(templates), train)
    sizes = Counter(templates)
    chosen: set[Hashable] = set()
    room = train
    for template in _shuffled(sizes, seed):
        if sizes[template] <= room:
            chosen.add(template)
            room -= sizes[template]
    return _sides(template in chosen for template in templates)


def length_split(lengths: Sequence[int], train: int, seed: str | int) -> Positions:
    """A split where nothing in test is shorter than anything in train; ties are broken at random."""
    _check(len(lengths), train)
    order = sorted(_shuffled(range(len(lengths)), seed), key=lambda position: lengths[position])
    return sorted(order[:train]), sorted(order[train:])


def tmcd_split(trees: Sequence[Tree], train: int, seed: str | int, divergence: float | None = None) -> Positions:
    """A split of large compound divergence whose test has no atom that train lacks.

    From a random split, each example of train is swapped for the best one of test, over and over, as long as that
    raises the divergence of the compounds and train keeps every atom (target maximum compound divergence, Shaw et al.,
    2021, section 4.2).

    Args:
        trees: the examples' programs.
        train: the size of train.
        seed: of the start and of the order in which swaps are tried.
        divergence: stop at this one; None: when no swap gains.

    Raises:
        ConfigError: train is too small to hold every atom.
    """
    _check(len(trees), train)
    order = _shuffled(range(len(trees)), seed)
    compounds_of, atoms_of = _matrix([compounds(tree).elements() for tree in trees]), _matrix(list(map(atoms, trees)))
    in_train = _with_every_atom(atoms_of > 0, order, train)
    # Examples with equal compounds and atoms are of one kind: swapping one is like swapping another.
    kinds, inverse = np.unique(np.hstack([compounds_of, atoms_of]), axis=0, return_inverse=True)
    kind_of = inverse.reshape(-1)
    compounds_of, atoms_of = np.hsplit(kinds, [compounds_of.shape[1]])  # (K, C) and (K, A), by kind
    fruitless: set[int] = set()
    while True:
        before = in_train.copy()
        for position in order:
            kind = int(kind_of[position])
            if not in_train[position] or kind in fruitless:
                continue
            left, right = (np.bincount(kind_of[side], minlength=len(kinds)) for side in (in_train, ~in_train))
            train_compounds, test_compounds = left @ compounds_of, right @ compounds_of
            reached = _divergence(train_compounds, test_compounds)
            if reached >= (divergence or 1.0):
                return _sides(in_train)
            test = np.flatnonzero(~in_train)
            partners, first = np.unique(kind_of[test], return_index=True)
            change = compounds_of[partners] - compounds_of[kind]
            scores = _divergence(train_compounds + change, test_compounds - change)
            atoms_left = left @ atoms_of + atoms_of[partners] - atoms_of[kind]
            scores[(atoms_left <= 0).any(axis=1)] = -1.0
            best = int(scores.argmax())
            if scores[best] > reached + _LEAST_GAIN:
                in_train[position], in_train[test[first[best]]] = False, True
                fruitless.clear()
            else:
                fruitless.add(kind)
        if (before == in_train).all():
            return _sides(in_train)


def _with_every_atom(has: NDArray[np.bool_], order: Sequence[int], train: int) -> NDArray[np.bool_]:
    """(N,) which examples start in train: those that bring a new atom, then others in random order."""
    in_train = np.zeros(len(has), dtype=np.bool_)
    covered = np.zeros(has.shape[1], dtype=np.bool_)
    for position in order:
        if (has[position] & ~covered).any():
            in_train[position] = True
            covered |= has[position]
    missing = train - int(in_train.sum())
    if missing < 0:
        raise ConfigError(f"tmcd: {train} training examples are too few to hold every symbol of the programs")
    in_train[[position for position in order if not in_train[position]][:missing]] = True
    return in_train


def atoms(tree: Tree) -> frozenset[str]:
    """The atoms of a program: its symbols."""
    return frozenset(node.label for node in tree.walk())


def compounds(tree: Tree) -> Counter[tuple[str, int, int, str]]:
    """How often a program has each compound: function, number of arguments, place, argument (Shaw et al., 2021)."""
    return Counter(
        (node.label, len(node.children), place, child.label)
        for node in tree.walk()
        for place, child in enumerate(node.children)
    )


def compound_divergence(train: Iterable[Tree], test: Iterable[Tree]) -> float:
    """How unlike the compounds of two sets of programs are, from 0 (equal) to 1 (nothing shared).

    1 - Σ p^0.1 q^0.9 of each compound's shares in train and in test (Keysers et al., 2020).
    """
    counts = _matrix([chain.from_iterable(compounds(tree).elements() for tree in side) for side in (train, test)])
    return float(_divergence(counts[0], counts[1]))


def _sides(in_train: Iterable[bool]) -> Positions:
    sides: Positions = ([], [])
    for position, first in enumerate(in_train):
        sides[not first].append(position)
    return sides


def _divergence(left: _Floats, right: _Floats) -> _Floats:
    """The divergence of compound counts (…, C): shape (…)."""
    p = left / left.sum(axis=-1, keepdims=True)
    q = right / right.sum(axis=-1, keepdims=True)
    divergence: _Floats = 1.0 - (p**ALPHA * q ** (1 - ALPHA)).sum(axis=-1)
    # Rounded, so that a tie stays a tie whatever the machine's last digit says.
    return np.round(divergence, 10)


def _matrix(bags: Sequence[Iterable[Any]]) -> _Floats:
    """How often each bag (row) holds each of all bags' names (column, in sorted order)."""
    counters = [Counter(bag) for bag in bags]
    columns = {name: column for column, name in enumerate(sorted(set().union(*counters)))}
    matrix = np.zeros((len(counters), len(columns)))
    for row, counter in enumerate(counters):
        for name, count in counter.items():
            matrix[row, columns[name]] = count
    return matrix


def _shuffled(items: Iterable[_T], seed: str | int) -> list[_T]:
    # By sorting on random(), whose numbers later Pythons keep; shuffle() has no such promise.
    draw = random.Random(seed).random  # noqa: S311 - data, not secrets
    return [item for _, _, item in sorted((draw(), place, item) for place, item in enumerate(items))]


def _check(size: int, train: int) -> None:
    if not 0 < train < size:
        raise ConfigError(f"train must be between 1 and {size - 1} of {size} examples, got {train}")
