"""COVR-10: ten splits of questions and programs by held-out combinations of grammar rules; no download needed."""

from __future__ import annotations

from collections.abc import Mapping

from rcr_trainer.data.covr_grammar import Sampler
from rcr_trainer.data.examples import Example, Split
from rcr_trainer.errors import ConfigError

# An example belongs to test where its derivation uses all rules of one combination (Bogin et al., 2022).
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

_Pair = tuple[str, str]

# Draws without a new example after which the grammar counts as exhausted.
_PATIENCE = 200_000


def covr_split(name: str | int, seed: int = 0, train: int = 3000, test: int = 500, dev: int = 0) -> Split:
    """Draw one of the ten COVR-10 splits (sizes in the paper's Appendix A: 3,000 train, 500 test).

    The same arguments give the same examples on every machine. Within a seed the draws are one fixed sequence:
    a smaller split is the beginning of a larger one, and the size of dev changes neither train nor test.

    Args:
        name: one of 8, 25, 34, 43, 48, 51, 99, 100, 110, 115.
        seed: of the draws.
        train: how many examples without a held-out combination go to train.
        test: how many examples with one go to test.
        dev: how many more, drawn as train is, go to dev. Unlike test they hold nothing new.

    Returns:
        A split without duplicates, within its parts or across them.

    Raises:
        ConfigError: no such split, a size below 0, or more examples wanted than the grammar yields.
    """
    name = str(name)
    if name not in HELD_OUT:
        raise ConfigError(f"there is no COVR-10 split {name!r}; the splits are {', '.join(HELD_OUT)}")
    for part, size in (("train", train), ("test", test), ("dev", dev)):
        if size < 0:
            raise ConfigError(f"covr: {part} must be 0 or more, got {size}")
    known, held_out = _draw(name, seed, train + dev, test)
    parts = {"train": known[:train], "dev": known[train:], "test": held_out}
    examples = {
        part: [Example(f"{part}-{row}", *pair) for row, pair in enumerate(pairs)] for part, pairs in parts.items()
    }
    meta = {"task": "covr", "split": name, "seed": seed, "how": "sampled from the grammar of COVR"}
    return Split(f"covr-{name}", examples["train"], examples["dev"], examples["test"], meta)


def is_held_out(name: str, tags: frozenset[str]) -> bool:
    """Whether a derivation that uses the rules of these tags belongs to the split's test set."""
    return any(combination <= tags for combination in HELD_OUT[name])


def _draw(name: str, seed: int, known: int, held_out: int) -> tuple[list[_Pair], list[_Pair]]:
    """The first `known` new pairs without a held-out combination, and the first `held_out` with one."""
    sampler = Sampler(f"covr-{name}-{seed}")
    sizes = {False: known, True: held_out}
    pairs: dict[bool, list[_Pair]] = {False: [], True: []}
    seen: set[_Pair] = set()
    since_new = 0
    while any(len(pairs[side]) < size for side, size in sizes.items()):
        draw = sampler.draw()
        since_new += 1
        if since_new > _PATIENCE:
            have = f"{len(pairs[False])} of {known} for train and dev, {len(pairs[True])} of {held_out} for test"
            raise ConfigError(f"covr {name}: the grammar yields too few different examples ({have}); ask for fewer")
        side = is_held_out(name, draw.tags)
        pair = (draw.utterance, draw.program)
        if len(pairs[side]) < sizes[side] and pair not in seen:
            since_new = 0
            seen.add(pair)
            pairs[side].append(pair)
    return pairs[False], pairs[True]
