from __future__ import annotations

import numpy as np
import pytest
from rcr_trainer.data.dividing import (
    atoms,
    compound_divergence,
    compounds,
    length_split,
    random_split,
    template_split,
    tmcd_split,
)
from rcr_trainer.errors import ConfigError

from langchain_rcr.programs import Tree, parse


def _tree(text: str) -> Tree:
    tree = parse(text)
    assert tree is not None
    return tree


def _random_trees(count: int, seed: int) -> list[Tree]:
    rng = np.random.default_rng(seed)

    def grow(depth: int) -> Tree:
        label = "abcdefg"[rng.integers(7)]
        arguments = rng.integers(0, 3) if depth else 0
        return Tree(label, tuple(grow(depth - 1) for _ in range(arguments)))

    return [grow(3) for _ in range(count)]


def test_random_split_parts_everything_once_and_by_seed() -> None:
    train, test = random_split(10, 7, "a")
    assert len(train) == 7
    assert sorted(train + test) == list(range(10))
    assert random_split(10, 7, "a") == (train, test)
    assert random_split(10, 7, "b") != (train, test)


def test_draws_are_the_same_on_every_machine() -> None:
    assert random_split(6, 3, 0) == ([2, 3, 5], [0, 1, 4])


def test_template_split_shares_no_template() -> None:
    templates = list("aaabbccdefgh") * 5
    train, test = template_split(templates, 30, 3)
    assert len(train) == 30
    assert sorted(train + test) == list(range(60))
    assert not {templates[position] for position in train} & {templates[position] for position in test}


def test_template_split_just_misses_an_unreachable_size() -> None:
    train, _ = template_split(["a"] * 4 + ["b"] * 4, 6, 0)
    assert len(train) == 4


def test_length_split_puts_the_longest_into_test_and_breaks_ties_by_seed() -> None:
    lengths = [5, 1, 3, 3, 3, 3, 2, 9]
    train, test = length_split(lengths, 4, "a")
    assert max(lengths[position] for position in train) <= min(lengths[position] for position in test)
    assert len({tuple(length_split(lengths, 4, str(seed))[0]) for seed in range(20)}) > 1


def test_atoms_and_compounds_of_a_program() -> None:
    tree = _tree("answer(most(state(all), loc_1, state(all)))")
    assert atoms(tree) == {"answer", "most", "state", "all", "loc_1"}
    assert compounds(tree) == {
        ("answer", 1, 0, "most"): 1,
        ("most", 3, 0, "state"): 1,
        ("most", 3, 1, "loc_1"): 1,
        ("most", 3, 2, "state"): 1,
        ("state", 1, 0, "all"): 2,
    }


def test_divergence_by_hand() -> None:
    ab, ac = _tree("a(b)"), _tree("a(c)")
    assert compound_divergence([ab], [ab]) == pytest.approx(0)
    assert compound_divergence([ab], [ac]) == 1
    # p = (1/2, 1/2), q = (1, 0): 1 - 0.5^0.1 · 1^0.9
    assert compound_divergence([ab, ac], [ab]) == pytest.approx(1 - 0.5**0.1)
    assert compound_divergence([ab], [ab, ac]) == pytest.approx(1 - 0.5**0.9)


@pytest.mark.slow
def test_tmcd_keeps_every_atom_in_train_and_no_swap_is_left_that_gains() -> None:
    trees = _random_trees(40, seed=1)
    train, test = tmcd_split(trees, 20, 0)
    assert sorted(train + test) == list(range(40))
    assert len(train) == 20

    def unseen(train: list[int], test: list[int]) -> frozenset[str]:
        seen = {atom for position in train for atom in atoms(trees[position])}
        return frozenset(atom for position in test for atom in atoms(trees[position])) - seen

    def score(train: list[int], test: list[int]) -> float:
        return compound_divergence([trees[position] for position in train], [trees[position] for position in test])

    assert not unseen(train, test)
    reached = score(train, test)
    assert reached > score(*random_split(40, 20, 0)) + 0.1
    for out in train:
        for into in test:
            swapped = [p for p in train if p != out] + [into], [p for p in test if p != into] + [out]
            assert unseen(*swapped) or score(*swapped) <= reached + 1e-8


def test_tmcd_ends_where_the_divergence_is_enough() -> None:
    trees = _random_trees(40, seed=1)

    def reached(enough: float | None) -> float:
        train, test = tmcd_split(trees, 20, 0, enough)
        return compound_divergence([trees[position] for position in train], [trees[position] for position in test])

    start, end = reached(1e-9), reached(None)
    middle = (start + end) / 2
    assert start < middle <= reached(middle) < end


def test_tmcd_says_when_train_cannot_hold_every_atom() -> None:
    trees = [_tree(name) for name in "abcdef"]
    with pytest.raises(ConfigError, match="3 training examples are too few to hold every symbol"):
        tmcd_split(trees, 3, 0)


@pytest.mark.parametrize("train", [0, 5, 6, -1])
def test_sizes_out_of_range(train: int) -> None:
    with pytest.raises(ConfigError, match="train must be between 1 and 4 of 5 examples"):
        random_split(5, train, 0)
