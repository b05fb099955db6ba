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
    _check(size, train)
    order = _shuffled(range(size), seed)
    return sorted(order[:train]), sorted(order[train:])


def template_split(templates: Sequence[Hashable], train: int, seed: str | int) -> Positions:
    """A split where no template is on both sides (Finegan-Dollak et al., 2018).

    Templates are taken in random order; each goes to train whole if it still fits in there.

    Args:
        templates: the template of each example, e.g. its anonymised program.
        train: the wanted size of train; reached exactly where the templates' sizes allow it, else just missed.
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
    return _sides([template in chosen for template in templates])


def length_split(lengths: Sequence[int], train: int, seed: str | int) -> Positions:
    """A split where nothing in test is shorter than anything in train; ties are broken at random."""
    _check(len(lengths), train)
    order = sorted(_shuffled(range(len(lengths)), seed), key=lambda position: lengths[position])
    return sorted(order[:train]), sorted(order[train:])


def tmcd_split(trees: Sequence[Tree], train: int, seed: str | int, divergence: float | None = None) -> Positions:
    """A split of large compound divergence whose test has no atom that train lacks.

    From a random split, pairs are swapped between the sides as long as a swap raises the divergence of the
    compounds and train keeps every atom (target maximum compound divergence, Shaw et al., 2021, section 4.2).

    Args:
        trees: the examples' programs.
        train: the size of train.
        seed: of the start and of the order in which swaps are tried.
        divergence: swap no further once the split has this one; None: until no swap is left that gains.

    Raises:
        ConfigError: train is too small to hold every atom.
    """
    _check(len(trees), train)
    search = _SwapSearch(trees, train, seed)
    search.run(divergence or 1.0)
    return _sides(search.in_train)


def atoms(tree: Tree) -> frozenset[str]:
    """The atoms of a program: its symbols."""
    return frozenset(node.label for node in tree.walk())


def compounds(tree: Tree) -> Counter[tuple[str, int, int, str]]:
    """The compounds of a program and how often each occurs: a function with one of its arguments in its place.

    Each is (function, its number of arguments, the argument's place, the argument's symbol), the definition of
    Shaw et al. (2021) for FunQL.
    """
    return Counter(
        (node.label, len(node.children), place, child.label)
        for node in tree.walk()
        for place, child in enumerate(node.children)
    )


def compound_divergence(train: Iterable[Tree], test: Iterable[Tree]) -> float:
    """How unlike the compounds of two sets of programs are, from 0 (equal) to 1 (nothing shared).

    1 - Σ p^0.1 q^0.9, where p and q are the shares of each compound in train and in test (Keysers et al., 2020).
    """
    counts = _matrix([chain.from_iterable(compounds(tree).elements() for tree in side) for side in (train, test)])
    return float(_divergence(counts[0], counts[1]))


class _SwapSearch:
    """A TMCD search over n examples, C compounds and A atoms.

    Examples with equal compounds and atoms are of one kind, and swapping either of two of a kind is the same.
    """

    def __init__(self, trees: Sequence[Tree], train: int, seed: str | int) -> None:
        self._order: list[int] = _shuffled(range(len(trees)), seed)
        of_compounds = _matrix([compounds(tree).elements() for tree in trees])
        of_atoms = _matrix([atoms(tree) for tree in trees])
        kinds, inverse = np.unique(np.hstack([of_compounds, of_atoms]), axis=0, return_inverse=True)
        self._kind = inverse.reshape(-1)
        self._compounds, self._atoms = np.hsplit(kinds, [of_compounds.shape[1]])  # (K, C) and (K, A) counts
        self.in_train = self._start(train)

    def _start(self, train: int) -> NDArray[np.bool_]:
        """Examples that bring a new atom start in train; the rest of it is filled up in random order."""
        has = self._atoms[self._kind] > 0
        in_train = np.zeros(len(has), dtype=np.bool_)
        covered = np.zeros(has.shape[1], dtype=np.bool_)
        for position in self._order:
            if (has[position] & ~covered).any():
                in_train[position] = True
                covered |= has[position]
        missing = train - int(in_train.sum())
        if missing < 0:
            raise ConfigError(f"tmcd: {train} training examples are too few to hold every symbol of the programs")
        in_train[[position for position in self._order if not in_train[position]][:missing]] = True
        return in_train

    def run(self, most: float) -> None:
        """Swap each example of train for the best one of test, over and over until no swap is a gain, or it is enough.

        Args:
            most: the divergence that is enough.
        """
        fruitless: set[int] = set()
        while True:
            before = self.in_train.copy()
            for position in self._order:
                kind = int(self._kind[position])
                if not self.in_train[position] or kind in fruitless:
                    continue
                if self._divergence() >= most:
                    return
                partner = self._best_partner(kind)
                if partner is None:
                    fruitless.add(kind)
                else:
                    self.in_train[position], self.in_train[partner] = False, True
                    fruitless.clear()
            if (before == self.in_train).all():
                return

    def _sums(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many of each kind are on either side, (K,) each."""
        sides = [
            np.bincount(self._kind[side], minlength=len(self._compounds)) for side in (self.in_train, ~self.in_train)
        ]
        return sides[0], sides[1]

    def _divergence(self) -> float:
        left, right = self._sums()
        return float(_divergence(left @ self._compounds, right @ self._compounds))

    def _best_partner(self, kind: int) -> int | None:
        test = np.flatnonzero(~self.in_train)
        partners, first = np.unique(self._kind[test], return_index=True)
        left, right = self._sums()
        gain = self._compounds[partners] - self._compounds[kind]
        train_compounds, test_compounds = left @ self._compounds, right @ self._compounds
        scores = _divergence(train_compounds + gain, test_compounds - gain)
        atoms_left = left @ self._atoms + self._atoms[partners] - self._atoms[kind]
        scores[(atoms_left <= 0).any(axis=1)] = -1.0
        best = int(scores.argmax())
        if scores[best] <= _divergence(train_compounds, test_compounds) + _LEAST_GAIN:
            return None
        return int(test[first[best]])


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
