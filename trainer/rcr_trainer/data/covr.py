"""COVR-10: ten splits by held-out combinations of grammar rules (Bogin et al., 2022); no download needed.

The synchronous grammar is in our own notation, with weights fitted to the published examples. Its symbols encode the
limits: at most two filters per thing and two relations per chain, ``scene ( )`` only in a quantifier's condition, and
numbers as answers to questions about numbers.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from rcr_trainer.data.examples import Example, Split
from rcr_trainer.errors import ConfigError

# In tokens: the 99.9th percentile of the published examples. Longer draws are rejected.
LONGEST_PROGRAM = 113


class Rule(NamedTuple):
    """One production; ``{0}``, ``{1}``, … in both sides stand for its parts."""

    symbol: str  # what it expands
    parts: tuple[str, ...]  # the symbols that it expands into
    program: str
    utterance: str
    weight: float = 1.0  # how often it is taken, relative to the other rules of its symbol
    tag: str = ""  # its name in held-out combinations; rules may share one


class Draw(NamedTuple):
    """One derivation: its two sides, and the tags of its rules."""

    utterance: str
    program: str
    tags: frozenset[str]


# The weights match the published statistics (see tests/data/test_data_covr.py).
_FORMS = {"what": 16, "choose": 26, "and": 16, "or": 15, "single": 28}
# Statements that exist, are quantified, compare numbers, compare attributes.
_CLAUSES = {"single": (4, 9, 7.5, 7.5), "paired": (6.3, 5.3, 7, 5)}
# How often a set of things has a relation to others, and these to others again; how often a thing has a filter if it
# has no relation, if it has one, or if it ends one; how often a filtered thing has a second filter.
# "second" is a comparison's second side, "condition" the end of a condition's relation, which has at most one more.
_SETS = {
    "asked": (0.87, 0.64, 0.9, 0.6, 0.5, 0.58),
    "single": (0.76, 0.2, 0.9, 0.72, 0.48, 0.45),
    "paired": (0.35, 0.75, 0.55, 0.5, 0.56, 0.56),
    "second": (0.25, 0.3, 0.28, 0.28, 0.3, 0.42),
    "condition": (0.0, 0.4, 0.0, 0.5, 0.54, 0.4),
}
_CONDITION_RELATION = 0.7  # how often a quantifier's condition is a relation, not a filter
_CONSTANT = 0.5  # how often a comparison's second side is a constant

_TERMINALS: Mapping[str, tuple[str, ...]] = {
    "object": ("dog", "cat", "mouse", "animal"),
    "relation": ("chasing", "playing with", "looking at"),
    "attribute": ("color", "shape"),
    "property": ("black", "white", "brown", "gray", "round", "square", "triangle"),
    "number": ("2", "3", "4"),
    "quantifier": ("all", "most", "some", "none"),
}


def build_rules() -> Iterator[Rule]:
    """The grammar. The start symbol is ``question``."""
    for symbol, words in _TERMINALS.items():
        yield from (Rule(symbol, (), word, word) for word in words)
    for name, meaning in (("eq", "equal to"), ("gt", "greater than"), ("lt", "less than")):
        yield Rule("comparison", (), name, f"is {meaning}")
    yield Rule("found", ("object",), "find ( {0} )", "{0}")
    for place, chances in _SETS.items():
        yield from _set_rules(place, chances)
    for place, weights in _CLAUSES.items():
        yield from _clause_rules(place, weights)
    relation, related = "with_relation ( scene ( ) , {0} , {1} )", _CONDITION_RELATION
    yield Rule("condition", ("property",), "filter ( {0} , scene ( ) )", "{0}", 1 - related, "filter")
    yield Rule("condition", ("relation", "condition/1"), relation, "{0} {1}", related, "relation")
    choose, options, pair = "choose ( {0} , {1} , {2} )", "is {0} {1} or {2} ?", ("paired clause", "paired clause")
    yield Rule("question", ("value",), "{0}", "what is {0} ?", _FORMS["what"], "what")
    yield Rule("question", ("asked count", "number", "number"), choose, options, _FORMS["choose"] / 2)
    yield Rule("question", ("asked attribute", "property", "property"), choose, options, _FORMS["choose"] / 2)
    yield Rule("question", ("single clause",), "{0}", "{0}", _FORMS["single"], "boolean single")
    yield Rule("question", pair, "and ( {0} , {1} )", "both {0} and {1}", _FORMS["and"], "boolean pair and")
    yield Rule("question", pair, "or ( {0} , {1} )", "either {0} or {1}", _FORMS["or"], "boolean pair or")
    yield Rule("value", ("asked count",), "{0}", "{0}", tag="asked-count")
    yield Rule("value", ("asked attribute",), "{0}", "{0}")


def _clause_rules(place: str, weights: tuple[float, ...]) -> Iterator[Rule]:
    """A statement that stands alone (``single``) or is half of a pair (``paired``)."""
    exist, quantified, by_number, by_attribute = weights
    clause, numbers, attributes, things = (f"{place}{part}" for part in (" clause", " numbers", " attributes", "/2"))
    parts, compared = ("quantifier", things, "condition"), ("{1} ( {0} , {2} )", "{0} {1} {2}")
    count, attribute, equal = f"{place} count", f"{place} attribute", ("eq ( {0} , {1} )", "{0} is equal to {1}")
    yield Rule(clause, (things,), "exists ( {0} )", "there is {0}", exist, "exists")
    yield Rule(clause, parts, "{0} ( {1} , {2} )", "{0} of {1} are {2}", quantified, "quantifier")
    yield Rule(clause, (numbers,), "{0}", "{0}", by_number, "compare-count")
    yield Rule(clause, (attributes,), "{0}", "{0}", by_attribute, "compare-attribute")
    yield Rule(numbers, (count, "comparison", "number"), *compared, _CONSTANT)
    yield Rule(numbers, (count, "comparison", "second count"), *compared, 1 - _CONSTANT)
    yield Rule(attributes, (attribute, "property"), *equal, _CONSTANT)
    yield Rule(attributes, (attribute, "second attribute"), *equal, 1 - _CONSTANT)


def _set_rules(place: str, chances: tuple[float, ...]) -> Iterator[Rule]:
    """The sets described at one place; ``place/n`` has at most n relations in a chain."""
    once, twice, lone_filter, head_filter, inner_filter, second_filter = chances
    lone, head, inner, filtered = (f"{place} {thing}" for thing in ("lone", "head", "inner", "filtered"))
    related = ("with_relation ( {0} , {1} , {2} )", "{0} that is {1} {2}")
    yield Rule(f"{place}/0", (inner,), "{0}", "{0}")
    yield Rule(f"{place}/1", (inner,), "{0}", "{0}", 1 - twice)
    yield Rule(f"{place}/1", (inner, "relation", f"{place}/0"), *related, twice, "relation")
    yield Rule(f"{place}/2", (lone,), "{0}", "{0}", 1 - once)
    yield Rule(f"{place}/2", (head, "relation", f"{place}/1"), *related, once, "relation")
    for thing, chance in ((lone, lone_filter), (head, head_filter), (inner, inner_filter), (filtered, second_filter)):
        rest = "found" if thing == filtered else filtered
        yield Rule(thing, ("found",), "{0}", "{0}", 1 - chance)
        yield Rule(thing, ("property", rest), "filter ( {0} , {1} )", "{0} {1}", chance, "filter")
    yield Rule(f"{place} count", (f"{place}/2",), "count ( {0} )", "the number of {0}")
    asked = "query_attr [ {0} ] ( {1} )", "the {0} of {1}"
    yield Rule(f"{place} attribute", ("attribute", f"{place}/2"), *asked, tag="attribute")


class Sampler:
    """Draws derivations; the same seed gives the same draws on every machine and Python version."""

    def __init__(self, seed: str | int) -> None:
        # Only random() is guaranteed to give the same numbers in later Pythons, not choices() or shuffle().
        self._random = random.Random(seed).random  # noqa: S311 - data, not secrets
        self._rules: dict[str, list[Rule]] = {}
        for rule in build_rules():
            self._rules.setdefault(rule.symbol, []).append(rule)
        self._thresholds = {name: [*accumulate(rule.weight for rule in own)] for name, own in self._rules.items()}

    def draw(self) -> Draw:
        """One question with its program; draws may repeat."""
        while True:
            tags: set[str] = set()
            utterance, program = self._expand("question", tags)
            if program.count(" ") < LONGEST_PROGRAM:
                return Draw(utterance, program, frozenset(tags))

    def _expand(self, symbol: str, tags: set[str]) -> tuple[str, str]:
        rules, thresholds = self._rules[symbol], self._thresholds[symbol]
        rule = rules[bisect(thresholds, self._random() * thresholds[-1], hi=len(rules) - 1)]
        tags.update(rule.tag.split())
        parts = [self._expand(part, tags) for part in rule.parts]
        utterances, programs = [part[0] for part in parts], [part[1] for part in parts]
        return rule.utterance.format(*utterances), rule.program.format(*programs)


# An example belongs to test if its derivation uses all rules of some combination (Bogin et al., 2022).
HELD_OUT: Mapping[str, tuple[frozenset[str], ...]] = {
    name: tuple(frozenset(combination.split()) for combination in combinations)
    for name, combinations in {
        "8": ("attribute pair", "attribute single"),
        "25": ("exists filter", "quantifier filter", "compare-attribute filter", "compare-count filter"),
        "34": ("relation boolean",),
        "43": ("quantifier or", "quantifier and"),
        "48": ("attribute what",),
        "51": ("relation or", "relation and"),
        "99": ("asked-count what",),
        "100": ("exists or", "exists and"),
        "110": ("relation filter",),
        "115": ("quantifier relation",),
    }.items()
}

_PATIENCE = 200_000
"""Draws without a new example after which the grammar counts as exhausted."""


def covr_split(name: str | int, seed: int = 0, train: int = 3000, test: int = 500, dev: int = 0) -> Split:
    """Draw one of the ten COVR-10 splits, without duplicates; the default sizes are those of the paper's Appendix A.

    The same arguments give the same examples on every machine. A smaller split is the beginning of a larger one, and
    the size of dev changes neither train nor test.

    Args:
        name: one of 8, 25, 34, 43, 48, 51, 99, 100, 110, 115.
        seed: of the draws.
        train: examples without a held-out combination.
        test: examples with one.
        dev: more examples like those of train.

    Raises:
        ConfigError: no such split, or the grammar yields too few examples.
    """
    name = str(name)
    if name not in HELD_OUT:
        raise ConfigError(f"there is no COVR-10 split {name!r}; the splits are {', '.join(HELD_OUT)}")
    sampler = Sampler(f"covr-{name}-{seed}")
    sizes = {False: train + dev, True: test}
    sides: dict[bool, list[tuple[str, str]]] = {False: [], True: []}  # by whether a combination is held out
    seen: set[tuple[str, str]] = set()
    since_new = 0
    while any(len(sides[side]) < size for side, size in sizes.items()):
        draw = sampler.draw()
        since_new += 1
        if since_new > _PATIENCE:
            have = f"{len(sides[False])} of {train + dev} for train and dev, {len(sides[True])} of {test} for test"
            raise ConfigError(f"covr {name}: the grammar yields too few different examples ({have}); ask for fewer")
        side = is_held_out(name, draw.tags)
        pair = (draw.utterance, draw.program)
        if len(sides[side]) < sizes[side] and pair not in seen:
            since_new = 0
            seen.add(pair)
            sides[side].append(pair)
    meta = {"task": "covr", "split": name, "seed": seed, "how": "sampled from the grammar of COVR"}
    pairs = {"train": sides[False][:train], "dev": sides[False][train:], "test": sides[True]}
    parts = {part: [Example(f"{part}-{row}", *pair) for row, pair in enumerate(own)] for part, own in pairs.items()}
    return Split(f"covr-{name}", **parts, meta=meta)


def is_held_out(name: str, tags: frozenset[str]) -> bool:
    """Whether a derivation with these tags belongs to the split's test set."""
    return any(combination <= tags for combination in HELD_OUT[name])
