"""Training episodes: COVR examples whose constructs get new names in every episode.

An episode is a prompt in the paper's format: a few demonstrations, then a query with its program. Each construct
of the grammar gets one of five names, drawn afresh, so that only the programs shown before reveal which.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from rcr_trainer.data.covr import HELD_OUT, Sampler, covr_split
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

# The first name of each construct is COVR's own.
NAMES: dict[str, tuple[str, ...]] = {
    "count": ("count", "number_of", "size", "tally", "cardinality"),
    "filter": ("filter", "restrict", "keep", "where", "only"),
    "with_relation": ("with_relation", "related", "linked", "join", "connect"),
    "find": ("find", "lookup", "objects", "entities", "all_of_kind"),
    "query_attr": ("query_attr", "attribute", "property_of", "get_value", "read"),
    "scene": ("scene", "world", "everything", "universe", "context"),
    "choose": ("choose", "select", "pick", "either_of", "decide"),
    "eq": ("eq", "equals", "same", "is_equal", "matches"),
    "gt": ("gt", "greater", "more_than", "exceeds", "above"),
    "lt": ("lt", "less", "fewer_than", "under", "below"),
    "exists": ("exists", "any", "nonempty", "there_is", "present"),
    "or": ("or", "disjunction", "one_of", "union", "alternatively"),
    "and": ("and", "conjunction", "both_of", "together", "also"),
    "all": ("all", "every", "each", "forall", "entirely"),
    "most": ("most", "majority", "mostly", "over_half", "usually"),
    "some": ("some", "part", "several", "a_few", "partly"),
    "none": ("none", "no", "zero_of", "never", "nothing"),
}
ROLES = tuple(NAMES)
VARIANTS = 5

# The place of COVR's own name among the five. For a name it hasn't been shown, a model may prefer the place of most
# names shown so far; if COVR's own were always at the same place, it could guess them.
OWN = np.arange(len(ROLES)) * 2 % VARIANTS

SPECIAL = ("<unk>", "<pad>", "\n", "Source:", "Target:")
_PUNCTUATION = (")", ") ,", ",", "] (")
# A word with its bracket is one token, and so is a two-word relation: this makes prompts a third shorter.
PATTERN = r"\n|looking at|playing with|\) ,|\S+ [(\[]|\S+"
_TOKENS = re.compile(PATTERN)


def name_tokens(number: int) -> list[str]:
    """The tokens of a construct's five names, in order of place."""
    own, *others = NAMES[ROLES[number]]
    others.insert(OWN[number], own)
    bracket = "[" if ROLES[number] == "query_attr" else "("
    return [f"{name} {bracket}" for name in others]


def build_vocabulary() -> dict[str, int]:
    """All tokens: the specials, punctuation, the grammar's words, then the names, five by five."""
    sampler = Sampler("vocabulary")
    symbols = [token for number in range(len(ROLES)) for token in name_tokens(number)]
    words: set[str] = set()
    for _ in range(3000):
        draw = sampler.draw()
        words.update(_TOKENS.findall(draw.utterance), _TOKENS.findall(draw.program))
    words -= {*symbols, *_PUNCTUATION}
    return {token: number for number, token in enumerate([*SPECIAL, *_PUNCTUATION, *sorted(words), *symbols])}


def build_tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    """A word-level tokenizer; decoding joins with spaces, as COVR writes programs."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="removed", invert=True)
    return tokenizer


def forbidden_utterances(seeds: Iterable[int] = range(5)) -> frozenset[str]:
    """The test utterances of all ten splits, white space normalised: never trained on."""
    return frozenset(
        " ".join(example.source.split())
        for name in HELD_OUT
        for seed in seeds
        for example in covr_split(name, seed).test
    )


@dataclass(frozen=True, slots=True)
class Encoded:
    """One example in tokens.

    Args:
        ids: of "Source: … \\n Target: … \\n" (int64); a construct has the number of COVR's own name.
        roles: the construct at each position, -1 if none.
        start: position of the program's first token.
        constructs: the constructs that the program uses.
    """

    ids: np.ndarray
    roles: np.ndarray
    start: int
    constructs: frozenset[int]


def encode(utterance: str, program: str, vocabulary: dict[str, int]) -> Encoded:
    """An example with COVR's own names as tokens."""
    words = _TOKENS.findall(utterance)
    text = ["Source:", *words, "\n", "Target:", *_TOKENS.findall(program), "\n"]
    ids = np.array([vocabulary[token] for token in text], dtype=np.int64)
    first = len(vocabulary) - len(ROLES) * VARIANTS
    roles = np.where(ids >= first, (ids - first) // VARIANTS, -1)
    return Encoded(ids, roles, len(words) + 3, frozenset(roles[roles >= 0].tolist()))


@dataclass(frozen=True, slots=True)
class Episode:
    """A prompt with its answer.

    Args:
        ids: (T,) tokens.
        weights: (T,) the weight of a token in the loss; 0 for what the preceding tokens leave open.
        roles: (T,) the construct, -1 if none.
        shown: (T,) whether a construct's name occurs in the tokens before.
        query: position where the query's program begins.
    """

    ids: np.ndarray
    weights: np.ndarray
    roles: np.ndarray
    shown: np.ndarray
    query: int


def assemble(examples: Sequence[Encoded], variants: np.ndarray, first: int, symbol_weight: float = 4.0) -> Episode:
    """Demonstrations and a query (the last) as one episode.

    Args:
        examples: the demonstrations in order, then the query.
        variants: (17,) for each construct, the place among the five of its name in this episode (`OWN`: COVR's).
        first: the vocabulary's first name.
        symbol_weight: for a name that the context determines; other determined tokens have weight 1.
    """
    ids = np.concatenate([example.ids for example in examples])
    roles = np.concatenate([example.roles for example in examples])
    is_name = roles >= 0
    ids[is_name] = first + roles[is_name] * VARIANTS + variants[roles[is_name]]
    shown = np.zeros(len(ids), dtype=bool)
    for role in np.unique(roles[is_name]):
        shown[np.flatnonzero(roles == role)[1:]] = True
    weights = np.concatenate([np.arange(len(example.ids)) >= example.start for example in examples]).astype(np.float32)
    weights[is_name & shown] = symbol_weight
    weights[is_name & ~shown] = 0.0
    return Episode(ids, weights, roles, shown, len(ids) - len(examples[-1].ids) + examples[-1].start)


@dataclass
class EpisodeSampler:
    """Draws episodes from a pool of examples.

    Args:
        pool: encoded examples.
        first: the vocabulary's first name.
        covering: share of the demonstrations drawn for a construct of the query.
        demonstrations: their smallest and largest number.
        asked: (17,) relative frequency with which a query is drawn for each construct; even unless changed.
    """

    pool: Sequence[Encoded]
    first: int
    covering: float = 0.85
    demonstrations: tuple[int, int] = (4, 4)
    asked: np.ndarray = field(default_factory=lambda: np.ones(len(ROLES)))
    _by_role: list[np.ndarray] = field(init=False)
    _all: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        order = np.argsort([len(example.ids) for example in self.pool], kind="stable")
        self._all = order
        self._by_role = [
            np.array([row for row in order if role in self.pool[row].constructs]) for role in range(len(ROLES))
        ]

    def draw(self, rng: np.random.Generator, shortest: float = 1.0) -> Episode:
        """One episode.

        Args:
            rng: the random generator.
            shortest: the share of each construct's examples to draw from, shortest first.
        """
        query = self._pick(rng, self._by_role[rng.choice(len(ROLES), p=self.asked / self.asked.sum())], shortest)
        low, high = self.demonstrations
        missing = list(query.constructs)
        rng.shuffle(missing)
        picks = []
        for _ in range(rng.integers(low, high + 1)):
            rows = self._all
            if rng.random() < self.covering:
                rows = self._by_role[missing[0] if missing else rng.choice(list(query.constructs))]
            picks.append(self._pick(rng, rows, shortest))
            missing = [role for role in missing if role not in picks[-1].constructs]
        picks = [picks[place] for place in rng.permutation(len(picks))]
        return assemble([*picks, query], rng.integers(VARIANTS, size=len(ROLES)), self.first)

    def _pick(self, rng: np.random.Generator, rows: np.ndarray, shortest: float) -> Encoded:
        return self.pool[rows[int(rng.random() * max(1.0, shortest * len(rows)))]]


def batches(
    sampler: EpisodeSampler, rng: np.random.Generator, tokens: int, episodes: int, shortest: float = 1.0
) -> list[list[Episode]]:
    """Batches, in random order, of episodes of similar length; about `tokens` tokens each."""
    drawn = sorted((sampler.draw(rng, shortest) for _ in range(episodes)), key=lambda episode: len(episode.ids))
    made: list[list[Episode]] = [[]]
    for episode in drawn:
        if made[-1] and (len(made[-1]) + 1) * len(episode.ids) > tokens:
            made.append([])
        made[-1].append(episode)
    return [made[place] for place in rng.permutation(len(made))]


def draw_pool(seed: str, size: int, forbidden: frozenset[str]) -> list[tuple[str, str]]:
    """Distinct pairs of utterance and program from the whole grammar, without the forbidden utterances."""
    sampler = Sampler(seed)
    pairs: dict[str, str] = {}
    while len(pairs) < size:
        draw = sampler.draw()
        if draw.utterance not in forbidden:
            pairs.setdefault(draw.utterance, draw.program)
    return list(pairs.items())
