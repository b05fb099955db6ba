"""`rcr-train learn`: change a served policy by the outcomes of its picks, if the change is sure to earn more.

The policy's variants are steps from its current numbers (`Family.numbers`), and those of the race (`Family.changes`).
Estimates on one half of the logged questions choose one. On the other half, which had no say in the choice, the
interval of its gain decides whether it is written, and whether the same estimate is lower whenever the served policy's
picks are drawn anew under the logged outcomes: there it shows nothing but chance (Fisher's randomisation test, 1935).

A change is ruled out if more than a twentieth of its picks could hardly have been drawn: the log says nothing about
those. For a policy far from the best, large changes are of that kind; several logs get there in small steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.files import digest
from langchain_rcr.basics.items import Item, readable
from langchain_rcr.basics.progress import track
from langchain_rcr.basics.rows import DoubleArray, FloatArray, IntArray
from langchain_rcr.errors import InputError
from langchain_rcr.families.encoding import Features
from langchain_rcr.families.state import State
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.index.ranking import blocks
from langchain_rcr.policy.checkpoint import check_folder
from langchain_rcr.pool.examples import ExamplePool
from langchain_rcr.pool.outcomes import Outcome, OutcomeLog
from langchain_rcr.pool.store import ExampleStore
from langchain_rcr.retriever import SequentialCompositionalRetriever
from rcr_trainer.data.arrays import distinct
from rcr_trainer.errors import DataError
from rcr_trainer.evaluation.metrics import FEW_PROGRAMS, interval_of
from rcr_trainer.evaluation.off_policy import described, gains, halves, predicted, walk, weights
from rcr_trainer.race import Variant, together

logger = logging.getLogger(__name__)

REACHED = 0.95
"""Minimum share of a variant's picks that could have been drawn, by weight: the mean of its clipped weights."""
_STEPS = (2**0.25, 2**0.5, 2.0)
"""Factors by which a number is changed, either way. From ω = 2, forty times the default, one in five of the picks at
ω = 0.5 could be drawn at `explore` 5 on COVR, and three in four of those at 1."""
_GLANCE, _HOPELESS = 500, 0.8
"""A variant is given up if less than this share of its picks could be drawn on this many questions."""
_TOGETHER = 3  # the most changes tried in combination
_AT_ONCE = 1 << 24  # the most numbers of one array
_REDRAWN = 39
"""A gain must beat those of this many logs of nothing but chance: one in forty such logs does, as at the lower end of a
95 % interval. The bootstrap alone took chance for better in one of fifteen small logs: most changes concern few picks,
and how much those weigh a small sample rarely shows."""
_AGREES = 0.05
"""How far the log-probability of a question's picks may be from the logged one; beyond, something else drew them."""


class Change(NamedTuple):
    """What was learnt: means over the questions that didn't choose the variant, and the gain's 95 % interval."""

    variant: Variant
    before: float
    gain: float
    low: float  # 0 or less if chance alone reaches the gain
    high: float
    questions: int


class Logged(NamedTuple):
    """B logged questions of a served policy."""

    asked: IntArray  # (B,) the numbers of the questions in `Policy.texts`
    picks: IntArray  # (B, k) positions in the pool
    log_probs: DoubleArray  # (B, k) of each pick, as logged
    outcomes: DoubleArray  # (B,)
    explore: DoubleArray  # (B,) the retriever's setting
    group: IntArray  # (B,) its number, as in `Policy.groups`

    def only(self, at: NDArray[Any] | slice) -> Logged:
        """Some of the questions."""
        return Logged._make(each[at] for each in self)


def learn(log: Path, served: Path, out: Path, *, questions: Mapping[str, str], seed: int = 0, **how: Any) -> Change:
    """Learn a change of a served policy from a log, and write the changed retriever if it is sure to earn more.

    `questions` has texts by digest, beside those in the log and the pool; `how` is passed to `from_pretrained`.

    Raises:
        DataError: the log has too few questions of the served policy, or no change is sure to earn more.
        InputError: `out` holds other files.
    """
    check_folder(out)  # before what may take an hour
    retriever = SequentialCompositionalRetriever.from_pretrained(served, **how)
    known = {digest(str(item.source)): item.source for item in _pool(retriever).items()}
    policy = Policy(retriever, seed)
    change = choose(policy, read(OutcomeLog(log), policy, {**known, **questions}))
    if not change.low > 0:  # it may be NaN
        raise DataError(f"{log}: no change is sure to earn more, so nothing is written; the best: {told(change)}")
    policy.model.vary(change.variant)
    retriever.model_copy(update={"store": ExampleStore(policy.model, _pool(retriever))}).save(out)
    return change


def told(change: Change) -> str:
    """A change in one line."""
    values = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in change.variant.items()}
    what = ", ".join(f"{name} {value}" for name, value in values.items()) or "none"
    return (
        f"{what}: {change.before:.3f} → {change.before + change.gain:.3f}, {change.gain:+.3f} (95 % interval "
        f"{change.low:+.3f} to {change.high:+.3f}) on {change.questions} questions that didn't choose it"
    )


class Policy:
    """The served policy and its variants over logged questions."""

    def __init__(self, retriever: SequentialCompositionalRetriever, seed: int = 0) -> None:
        self.retriever, self.model, self.seed = retriever, retriever.store.encoder, seed
        self.texts: list[str] = []  # the different questions
        self._pool = self.model.featurize_pool(_pool(retriever).items(self.model.prefer))
        self._settings = self.model.config
        within = retriever.picks_within
        examples = (row.example for row in retriever.store.index.rows())
        self.groups = distinct([repr(example.get(within)) for example in examples])[1]
        """(N,) the number of each example's group; a question gets only those of its own."""
        # A variant is walked twice, and described by the served policy's vectors.
        self._under = lru_cache(maxsize=2)(self._computed)

    @cached_property
    def _questions(self) -> Features:
        return self.model.query.featurize(readable(map(Item, self.texts)))

    @property
    def changes(self) -> list[Variant]:
        """The variants that picks can judge; the order of a prompt isn't logged."""
        model, found = self.model, list[Variant]()
        for step, (name, value) in product(_STEPS, model.family.numbers(model.encoders, self._settings).items()):
            found += [{name: value * step}, {name: value / step}]
        found += [change for change in model.family.changes_to(model.encoders, self._settings) if "order" not in change]
        now, valid = self._settings.model_dump(), list[Variant]()
        for change in found:
            with suppress(InputError):
                model.family.settings(**{**now, **{name: value for name, value in change.items() if name in now}})
                valid.append(change)
        return valid

    def under(self, variant: Variant) -> tuple[FloatArray, State[Any], PoolVectors]:
        """E_x of `texts`, a fresh state and the pool's vectors under a variant; don't change them."""
        return self._under(tuple(variant.items()))

    def _computed(self, variant: tuple[tuple[str, Any], ...]) -> tuple[FloatArray, State[Any], PoolVectors]:
        with self.model.varied(dict(variant)):
            return self.model.query.vectors(self._questions), self.model.state(), self.model.pool_vectors(*self._pool)

    def follow(self, variant: Variant, logged: Logged) -> DoubleArray:
        """(B, k) log-probabilities of the logged picks under a variant."""
        return self._walked(variant, logged)[1]

    def drawn(self, variant: Variant, logged: Logged, time: int = 0) -> Logged:
        """The log with picks that a variant draws at a time. Its outcomes stay, and are chance to these picks."""
        picks, log_probs = self._walked(variant, logged, np.random.default_rng([self.seed, time]))
        return logged._replace(picks=picks, log_probs=log_probs)

    def _walked(
        self, variant: Variant, logged: Logged, random: np.random.Generator | None = None
    ) -> tuple[IntArray, DoubleArray]:
        """Picks (B, k), the logged ones or, given a generator, drawn ones, and their log-probabilities (B, k)."""
        picks, log_probs = logged.picks.copy(), np.empty(logged.picks.shape)
        queries, state, pool = self.under(variant)
        for some in blocks(len(picks), max(pool.candidate.shape), _AT_ONCE):
            part = logged.only(some)
            walked = queries[part.asked], state, pool, part.explore * self._settings.tau
            picks[some], log_probs[some] = walk(*walked, (part.group, self.groups), part.picks, random)
        return picks, log_probs

    def described(self, logged: Logged, picks: IntArray) -> DoubleArray:
        """See `off_policy.described`, under the served policy."""
        queries, state, pool = self.under({})
        parts = blocks(len(picks), max(pool.candidate.shape), _AT_ONCE)
        return np.concatenate([described(queries[logged.asked[some]], state, pool, picks[some]) for some in parts])


class Estimates:
    """Estimates of what variants earn on logged questions.

    The outcome model is fitted to `fitted`; if None, to each half of `logged` to predict the other.
    """

    def __init__(self, policy: Policy, logged: Logged, fitted: Logged | None = None) -> None:
        self._policy, self._logged, self._features = policy, logged, policy.described(logged, logged.picks)
        # Which questions are predicted from which other questions' features and outcomes.
        if fitted is not None:
            every, features = np.ones(len(logged.asked), dtype=bool), policy.described(fitted, fitted.picks)
            self._fitting = [(every, features, fitted.outcomes)]
        else:
            first = halves(logged.asked, policy.seed + 1)
            self._fitting = [(at, self._features[~at], logged.outcomes[~at]) for at in (first, ~first)]

    def of(self, variant: Variant, time: int = 0) -> tuple[DoubleArray, float]:
        """How much more a variant earns on each question (B,), and the share of its picks that could be drawn."""
        weight = weights(self._policy.follow(variant, self._logged), self._logged.log_probs)
        new = self._policy.described(self._logged, self._policy.drawn(variant, self._logged, time).picks)
        expected, expected_new = np.empty(len(new)), np.empty(len(new))
        for at, features, outcomes in self._fitting:
            expected[at], expected_new[at] = predicted(features, outcomes, self._features[at], new[at])
        return gains(weight, self._logged.outcomes, expected, expected_new), float(weight.mean())

    def low(self, variant: Variant) -> float | None:
        """A variant's mean gain minus two standard errors, by question; None if too few picks could be drawn."""
        some = self._logged.only(slice(_GLANCE))
        if weights(self._policy.follow(variant, some), some.log_probs).mean() < _HOPELESS:
            return None
        gain, reached = self.of(variant)
        totals = np.bincount(self._logged.asked, gain - gain.mean())
        return float(gain.mean() - 2 * np.sqrt(totals @ totals) / len(gain)) if reached >= REACHED else None


def choose(policy: Policy, logged: Logged) -> Change:
    """The variant surest to earn more by one half of the questions, judged on the other half."""
    first = halves(logged.asked, policy.seed)
    choosing, judging = logged.only(first), logged.only(~first)
    estimates = Estimates(policy, choosing)

    def surest(variants: Iterable[Variant]) -> list[tuple[float, Variant]]:
        """The variants that can be judged, surest first, each with the lower end of its gain's interval."""
        each = track([*variants], "trying changes")
        told = [(low, variant) for variant in each if (low := estimates.low(variant)) is not None]
        return sorted(told, key=itemgetter(0), reverse=True)

    alone = surest(policy.changes)
    best = [variant for _, variant in alone][:_TOGETHER]
    found = max(alone[:1] + surest(together(best, 2)), key=itemgetter(0), default=None)
    if found is None:
        return Change({}, float(judging.outcomes.mean()), 0.0, 0.0, 0.0, len(judging.asked))
    gain = Estimates(policy, judging, choosing).of(found[1])[0]
    low, high = interval_of(gain[:, None], judging.asked.tolist())[:, 0].tolist()
    if low > 0:
        times = track(range(1, 2 * _REDRAWN, 2), "comparing with chance")
        logs = ((policy.drawn({}, judging, time), time + 1) for time in times)
        chance = [Estimates(policy, log, choosing).of(found[1], time)[0].mean() for log, time in logs]
        low = min(low, float(gain.mean() - max(chance)))
    return Change(found[1], float(judging.outcomes.mean()), float(gain.mean()), low, high, len(gain))


def read(log: OutcomeLog, policy: Policy, texts: Mapping[str, str]) -> Logged:
    """The questions of a log that are usable for a served policy; if too few are, a `DataError` counts the reasons."""
    places = {row.id: at for at, row in enumerate(policy.retriever.store.index.rows())}
    why = Counter[str]()
    found: list[tuple[Outcome, str]] = []
    for each in log.read():
        text = each.text or texts.get(each.question)
        lacking = _lacking(each, policy.retriever.store.fingerprint, places)
        if lacking or text is None:
            why[lacking or "whose text is not known (--questions)"] += 1
        else:
            found.append((each, text))
    lengths = Counter(len(each.picks) for each, _ in found)
    k = max(lengths, key=lambda length: lengths[length], default=0)
    why["another number of picks"] += len(found) - lengths[k]
    found = [(each, text) for each, text in found if len(each.picks) == k]
    logged = None
    if found:
        policy.texts, asked = distinct([text for _, text in found])
        picks = np.array([[places[one] for one in each.picks] for each, _ in found], dtype=np.int64)
        chances, outcomes, explore = (
            np.array([getattr(each, name) for each, _ in found], dtype=np.float64)
            for name in ("probabilities", "outcome", "explore")
        )
        # A question's group is that of its picks.
        logged = Logged(asked, picks, np.log(chances), outcomes, explore, policy.groups[picks[:, 0]])
        agrees = np.abs((policy.follow({}, logged) - logged.log_probs).sum(axis=1)) <= _AGREES
        strange = "picked under a filter, a constraint, a preference or a draft, or from other examples"
        why[strange] = int((~agrees).sum())
        logged = logged.only(agrees)
    used = 0 if logged is None else len(logged.asked)
    reasons = "; ".join(f"{count} {reason}" for reason, count in why.items() if count)
    logger.info("%d logged questions%s", used, f"; left out: {reasons}" if reasons else "")
    different = 0 if logged is None else len({*logged.asked.tolist()})
    if logged is None or different < 2 * FEW_PROGRAMS:
        few = f"{used} questions, {different} of them distinct, are too few to learn from"
        raise DataError(f"{log.path}: {few} (it takes {2 * FEW_PROGRAMS} distinct ones); left out: {reasons or 'none'}")
    return logged


def _lacking(each: Outcome, policy: str, places: Mapping[str, int]) -> str:
    """Why a logged question is unusable; empty if it is usable."""
    if each.policy != policy:
        return "of another policy"
    if each.outcome is None:
        return "without an outcome"
    if not each.explore or not each.picks or not all(each.probabilities):
        return "picked without exploring"
    return "" if all(one in places for one in each.picks) else "with picks that the served folder lacks"


def _pool(retriever: SequentialCompositionalRetriever) -> ExamplePool:
    store, rows = retriever.store, retriever.store.index.rows()
    return store.schema.extended([row.example for row in rows], [row.id for row in rows])
