from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache

import places
import pytest
from rcr_trainer.data.covr import HELD_OUT, LONGEST_PROGRAM, Draw, Sampler, covr_split, is_held_out
from rcr_trainer.errors import ConfigError

from langchain_rcr.programs import parse

DATA = places.DATA / "covr10"

# Of 3,240 published training pairs: percentiles, and shares in percent.
PERCENTILES = (5, 25, 50, 75, 95, 99.9)
WORDS = (9, 14, 18, 23, 36, 47)
TOKENS = (22, 32, 42, 58, 93, 113)
FIRST = {
    "choose": 26, "and": 16, "or": 15, "eq": 10, "query_attr": 8, "count": 8, "exists": 4, "all": 3, "lt": 3,
    "some": 2, "gt": 2, "none": 2, "most": 2,
}  # fmt: skip
RELATIONS = (19, 30, 38, 8, 5, 1)
FILTERS = (9, 17, 31, 18, 13, 7, 3, 2)
DEEPEST_FILTER = (9, 29, 62)
SCENE = 21


@cache
def _draws(count: int = 3240) -> list[Draw]:
    sampler, draws = Sampler("statistics"), {}
    while len(draws) < count:
        draw = sampler.draw()
        draws.setdefault((draw.utterance, draw.program), draw)
    return list(draws.values())


def _depth(program: str, function: str) -> int:
    """How deep calls of a function are nested in each other."""
    stack, deepest = [False], 0
    for token, following in zip(program.split(), [*program.split()[1:], ""], strict=True):
        if following == "(":
            stack.append(token == function)
            deepest = max(deepest, sum(stack))
        elif token == ")":
            stack.pop()
    return deepest


@pytest.mark.slow
def test_examples_from_the_literature_are_worded_so() -> None:
    pairs = {
        "count ( find ( dog ) )": "what is the number of dog ?",
        "exists ( filter ( round , find ( cat ) ) )": "there is round cat",
        "all ( find ( mouse ) , filter ( round , scene ( ) ) )": "all of mouse are round",
        "some ( find ( cat ) , with_relation ( scene ( ) , chasing , filter ( brown , find ( cat ) ) ) )":
            "some of cat are chasing brown cat",
        "choose ( query_attr [ color ] ( filter ( gray , find ( animal ) ) ) , brown , black )":
            "is the color of gray animal brown or black ?",
        "or ( exists ( find ( animal ) ) , gt ( count ( find ( cat ) ) , 2 ) )":
            "either there is animal or the number of cat is greater than 2",
    }  # fmt: skip
    # Which nouns, properties and so on stand there doesn't matter: any draw of the same form will do.
    forms = {_form(program): _form(utterance) for program, utterance in pairs.items()}
    found: dict[str, str] = {}
    sampler = Sampler("wording")
    for _ in range(50_000):
        draw = sampler.draw()
        form = _form(draw.program)
        if form in forms:
            found[form] = _form(draw.utterance)
        if len(found) == len(forms):
            break
    assert found == forms


def _form(text: str) -> str:
    text = re.sub(r"\b(dog|cat|mouse|animal)\b", "THING", text)
    text = re.sub(r"\b(all|some|most|none)\b", "QUANTIFIER", text)
    text = re.sub(r"\b(black|white|brown|gray|round|square|triangle)\b", "PROPERTY", text)
    text = re.sub(r"\b(chasing|playing with|looking at)\b", "RELATION", text)
    return re.sub(r"\b(color|shape)\b", "ATTRIBUTE", re.sub(r"\b[234]\b", "NUMBER", text))


@pytest.mark.slow
def test_utterances_are_words_in_lower_case() -> None:
    for draw in _draws():
        assert re.fullmatch(r"[a-z234]+( [a-z234]+)*( \?)?", draw.utterance), draw.utterance
        assert " are that is " not in draw.utterance


@pytest.mark.slow
def test_every_program_parses_and_keeps_the_limits() -> None:
    for draw in _draws():
        assert parse(draw.program) is not None
        assert draw.program.count(" ") < LONGEST_PROGRAM
        assert _depth(draw.program, "filter") <= 2
        assert _depth(draw.program, "with_relation") <= 2
        # a number is chosen among numbers, an attribute among attributes
        if draw.program.startswith("choose"):
            asked_for_count = draw.program.startswith("choose ( count")
            assert asked_for_count == bool(re.search(r", [234] , [234] \)$", draw.program))


def test_lengths_are_those_of_the_published_data() -> None:
    words = sorted(len(draw.utterance.split()) for draw in _draws())
    tokens = sorted(len(draw.program.split()) for draw in _draws())
    for percentile, published_words, published_tokens in zip(PERCENTILES, WORDS, TOKENS, strict=True):
        place = int(len(words) * percentile / 100)
        assert words[place] == pytest.approx(published_words, abs=1, rel=0.08), percentile
        assert tokens[place] == pytest.approx(published_tokens, abs=2, rel=0.1), percentile


@pytest.mark.parametrize(
    ("statistic", "published"),
    [
        (lambda draw: draw.program.split()[0], FIRST),
        (lambda draw: draw.program.split().count("with_relation"), dict(enumerate(RELATIONS))),
        (lambda draw: draw.program.split().count("filter"), dict(enumerate(FILTERS))),
        (lambda draw: _depth(draw.program, "filter"), dict(enumerate(DEEPEST_FILTER))),
        (lambda draw: "scene" in draw.program, {True: SCENE, False: 100 - SCENE}),
    ],
    ids=["first function", "relations", "filters", "deepest filter", "scene"],
)
def test_shares_are_those_of_the_published_data(statistic, published) -> None:
    counts = Counter(statistic(draw) for draw in _draws())
    shares = {value: 100 * counts[value] / len(_draws()) for value in published}
    for value, share in published.items():
        assert shares[value] == pytest.approx(share, abs=5), (value, shares)
    assert sum(abs(shares[value] - share) for value, share in published.items()) < 14, shares


@pytest.mark.parametrize("name", HELD_OUT)
def test_a_split_has_its_sizes_and_no_duplicates(name: str) -> None:
    split = covr_split(name, train=300, test=50, dev=20)
    assert split.name == f"covr-{name}"
    assert split.counts() == {"train": 300, "dev": 20, "test": 50}
    everything = split.train + split.dev + split.test
    assert len({(example.source, example.target) for example in everything}) == 370
    assert len({example.id for example in everything}) == 370


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes() -> None:
    first = covr_split(110, seed=4, train=50, test=20)
    assert covr_split("110", seed=4, train=50, test=20) == first
    assert covr_split(110, seed=5, train=50, test=20).train != first.train
    code = "from rcr_trainer.data.covr import covr_split as split; print(repr(split(110, 4, 50, 20)), end='')"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
        assert output.decode() == repr(first)


def test_smaller_draws_are_beginnings_of_larger_ones() -> None:
    large, small = covr_split(43, train=100, test=30, dev=10), covr_split(43, train=60, test=10)
    assert small.train == large.train[:60]
    assert small.test == large.test[:10]
    assert covr_split(43, train=100, test=30).test == large.test


def test_membership_by_hand() -> None:
    # "there is round cat": exists with a filter, no relation
    tags = frozenset({"boolean", "single", "exists", "filter"})
    assert [name for name in HELD_OUT if is_held_out(name, tags)] == ["25"]
    # "what is the color of cat that is chasing round dog ?"
    tags = frozenset({"what", "attribute", "relation", "filter"})
    assert [name for name in HELD_OUT if is_held_out(name, tags)] == ["48", "110"]


def test_dev_is_like_train_and_holds_no_held_out_combination() -> None:
    split = covr_split(110, train=200, test=30, dev=100)
    for example in split.train + split.dev:
        assert not ("with_relation" in example.target and "filter" in example.target)
    for example in split.test:
        assert "with_relation" in example.target
        assert "filter" in example.target


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": 9}, "no COVR-10 split '9'; the splits are 8, 25, 34"),
        ({"name": 99, "train": 0, "test": 10**6}, "the grammar yields too few"),
    ],
)
def test_impossible_wishes_are_named(arguments, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rcr_trainer.data.covr._PATIENCE", 10)
    with pytest.raises(ConfigError, match=message):
        covr_split(**arguments)


# ---- the published grammar as a judge ----

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no COVR grammar at {DATA}")


class _PublishedGrammar:
    """Which rules of the published grammar a program's derivation uses; slow and plain."""

    def __init__(self, text: str) -> None:
        self.rules: dict[str, list[tuple[str, list[str]]]] = {}
        for line in text.splitlines():
            if "->" not in line:
                continue
            symbol, right = (side.strip() for side in line.split("->"))
            for alternative in right.split("&")[0].split(" | "):
                parts = re.findall(r"'[^']*'|\w+", alternative)
                self.rules.setdefault(symbol, []).append((f"{symbol} -> {alternative.strip()}", parts))

    def used(self, program: str) -> frozenset[str]:
        tokens = tuple(program.split())
        derivations = [used for end, used in self._derive("answer", tokens, 0) if end == len(tokens)]
        assert len(derivations) == 1, (program, derivations)
        return derivations[0]

    def _derive(self, symbol: str, tokens: tuple[str, ...], start: int) -> list[tuple[int, frozenset[str]]]:
        if symbol.startswith("'"):
            words = tuple(symbol.strip("'").split())
            end = start + len(words)
            return [(end, frozenset())] if tokens[start:end] == words else []
        found = []
        for rule, parts in self.rules[symbol]:
            partial = [(start, frozenset({rule}))]
            for part in parts:
                partial = [(end, used | more) for at, used in partial for end, more in self._derive(part, tokens, at)]
            found += partial
        return found


@pytest.mark.slow
@needs_data
def test_the_published_grammar_derives_every_program_and_agrees_on_every_held_out_set() -> None:
    grammar = _PublishedGrammar((DATA / "grammar.txt").read_text())
    published = {
        name: [frozenset(rules) for rules in split["held_out_rule_combinations"]]
        for name, split in json.loads((DATA / "splits.json").read_text()).items()
    }
    assert published.keys() == HELD_OUT.keys()
    agreeing = Counter()
    for draw in _draws()[:1500]:
        used = grammar.used(draw.program)
        for name, combinations in published.items():
            expected = any(combination <= used for combination in combinations)
            assert is_held_out(name, draw.tags) == expected, (name, draw)
            agreeing[name, expected] += 1
    assert all(agreeing[name, side] > 20 for name in published for side in (True, False)), agreeing
