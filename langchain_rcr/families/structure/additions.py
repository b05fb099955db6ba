"""What examples added after training teach, without a new fit.

Their questions become landmarks beside the training questions. The inverse of a block matrix extends the ridge
regression to all of them, so an added question is known to need what its own program has.

A label that no training program has takes a few of the columns that every vector keeps spare; its name decides which.
So processes that share a pool agree on them without communicating, and stored vectors stay valid. The kernel predicts
these columns like the others. A noisy-OR over phrases (`cues`) adds words that training never saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import FloatArray, IntArray, SparseRows
from langchain_rcr.families.encoding import Vocabulary
from langchain_rcr.families.ngrams import NgramVocabulary
from langchain_rcr.families.structure import cues
from langchain_rcr.families.structure.homes import sole_homes
from langchain_rcr.families.structure.inventory import SPARE
from langchain_rcr.families.structure.kernel import RIDGE, Views

MOST = 1000
"""Added questions that become landmarks, besides at most as many of the fit's own whose labels have no column; memory
grows with the square of all landmarks."""
MISSED = 30.0
"""The cost of missing a question that needs a new label, relative to a false alarm. Without the label the answer is
wrong; an example shown needlessly only takes one of k places. Of 100 test questions of scholar (SQL) that needed one of
two new labels, 16 and 23 weren't shown it with 3, and 3 and 4 with 30, at the same coverage of the other questions."""


class Additions(Vocabulary):
    """The added examples that E_x has learnt from."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = tuple(items)

    def to_json(self) -> dict[str, Any]:
        """See `Vocabulary.to_json`."""
        return {"examples": [list(item) if item.home else [item.source, item.target] for item in self.items]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Additions:
        """See `Vocabulary.from_json`."""
        return cls([Item(str(source), str(target), *map(str, home[:1])) for source, target, *home in value["examples"]])


@dataclass(frozen=True, slots=True)
class Grown:
    """What M training questions and A added ones tell, by ridge regression."""

    landmarks: Views  # the training questions
    inverse: FloatArray  # (M + A, M + A) the inverse G of the kernel plus the ridge
    dual: FloatArray  # (M + A, C) weights of the columns, the spare ones last
    mean: FloatArray  # (C,) the prediction where nothing is near
    sole: IntArray  # see `sole_homes`
    added: Views  # the added questions
    questions: Sequence[str]  # their texts
    has: FloatArray  # (A, C) which columns their programs have
    labels: NewLabels | None = None  # which questions need a new label; None: there is none

    def likeness(self, views: Views) -> FloatArray:
        """(N, M + A)."""
        return np.concatenate([self.landmarks.likeness(views), self.added.likeness(views)], axis=1)

    def joined(self, views: Views, questions: Sequence[str], targets: FloatArray, vocabulary: NgramVocabulary) -> Grown:
        """With further questions and their columns (a, C), as if all had been fitted at once."""
        near = self.likeness(views)
        reach = near @ self.inverse
        own = views.likeness(views) + RIDGE * np.eye(len(near), dtype=np.float32)
        corner = np.linalg.inv((own - reach @ near.T).astype(np.float64)).astype(np.float32)
        new = corner @ (targets - self.mean - near @ self.dual)
        side = -reach.T @ corner
        inverse = np.block([[self.inverse - side @ reach, side], [side.T, corner]])
        dual = np.concatenate([self.dual - reach.T @ new, new])
        sole = sole_homes(self.sole, targets[:, :-SPARE], views.homes)
        questions, has = [*self.questions, *questions], np.concatenate([self.has, targets])
        added = self.added.followed_by(views)
        grown = Grown(self.landmarks, inverse, dual, self.mean, sole, added, questions, has)
        return replace(grown, labels=NewLabels(grown, vocabulary)) if has[:, -SPARE:].any() else grown


class NewLabels:
    """Which questions need labels that appeared after training, by column; fitted on construction.

    `vocabulary` has the n-grams of training.
    """

    def __init__(self, joined: Grown, vocabulary: NgramVocabulary) -> None:
        targets, questions = joined.has[:, -SPARE:], joined.questions
        trained = len(joined.dual) - len(targets)
        every = np.concatenate([np.zeros((trained, SPARE), dtype=np.float32), targets])
        # The leave-one-out prediction for each landmark: y − α / G_ii (`without_folds`).
        without = every - joined.dual[:, -SPARE:] / np.diag(joined.inverse)[:, None]
        chances = [_threshold(of[has == 0], of[has > 0]) for of, has in zip(without.T, every.T, strict=True)]
        self.chance = np.clip(np.array(chances, dtype=np.float32), 0, 0.9)
        # Only phrases of questions that need a new label: other phrases are no evidence for one.
        items = [Item(questions[row]) for row in np.flatnonzero(targets.any(axis=1)).tolist()]
        self._phrases = NgramVocabulary.fit(items, vocabulary.longest, cues.MOST, gap=vocabulary.gap)
        number = {phrase: at for at, phrase in enumerate(self._phrases.idf)}
        column = np.array([number.get(phrase, -1) for phrase in vocabulary.idf], dtype=np.int64)
        known = cues.incidence(joined.landmarks.bags, column, len(number))
        self.weights = cues.fit(known.above(self._present(questions)), every)

    def likelihoods(self, questions: Sequence[str], predicted: FloatArray) -> FloatArray:
        """(N, SPARE) how likely questions need each column, by the kernel (`predicted`) or the phrases: the larger."""
        kernel = (predicted - self.chance) / (1 - self.chance)
        return np.asarray(np.maximum(cues.likelihoods(self._present(questions), self.weights), kernel.clip(0, 1)))

    def _present(self, questions: Sequence[str]) -> SparseRows:
        """(N, F + 1) which of the added questions' phrases these have; see `cues.incidence`."""
        count = len(self._phrases)
        return cues.incidence(self._phrases.bags([Item(each) for each in questions]), np.arange(count), count)


def _threshold(low: FloatArray, high: FloatArray) -> float:
    """The value of `low` that, as a threshold, minimises false positives + `MISSED` × misses; 0 if either is empty."""
    if not len(low) or not len(high):
        return 0.0
    low, high = np.sort(low), np.sort(high)
    wrong = 1 - np.searchsorted(low, low, side="right") / len(low)
    missed = np.searchsorted(high, low, side="right") / len(high)
    return float(low[(wrong + MISSED * missed).argmin()])
