"""Labels that came in after training, with examples added to a pool: which questions need them.

A label that no training program has takes a few of the columns that every vector keeps spare; its name decides which.
So processes that share a pool agree without exchanging anything, and vectors already stored stay valid. How likely a
question needs the label is predicted by two fits to the added questions, which need it, and to the training questions,
which don't: a noisy-OR over phrases as in `cues`, which knows new words, and the kernel, where the added questions
become landmarks beside those of training, by the inverse of a block matrix. No gradient descent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from langchain_rcr.basics.items import Item
from langchain_rcr.families.encoder import Vocabulary
from langchain_rcr.families.ngrams import NgramVocabulary
from langchain_rcr.families.structure import cues
from langchain_rcr.families.structure.inventory import SPARE, Inventory
from langchain_rcr.families.structure.kernel import RIDGE, Landmarks, Views

MISSED = 30.0
"""What it costs to take a question that needs a new label for one that doesn't, in units of the converse: an answer is
wrong without the label; an example shown for nothing takes the place of one of k. With 3, 16 and 23 of 100 questions of
scholar (SQL) that needed one of two new labels weren't shown it, with 30 3 and 4 (test questions, the others' coverage
the same)."""


class Additions(Vocabulary):
    """The added examples with labels that training had not.

    Args:
        items: the examples.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = tuple(items)

    def to_json(self) -> dict[str, Any]:
        """See `Vocabulary.to_json`."""
        return {"examples": [[item.source, item.target] for item in self.items]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Additions:
        """See `Vocabulary.from_json`."""
        return cls([Item(str(source), str(target)) for source, target in value["examples"]])


class NewLabels:
    """What phrases and the kernel say of the L labels of A added examples; fitted when made.

    Args:
        additions: the examples.
        inventory: the structures of training.
        vocabulary: the n-grams of training.
        landmarks: M training questions, none of which needs a new label.
        inverse: (M, M) their `Landmarks.inverse`.
        views: of the added questions.
    """

    def __init__(
        self,
        additions: Additions,
        inventory: Inventory,
        vocabulary: NgramVocabulary,
        landmarks: Landmarks,
        inverse: NDArray[np.float32],
        views: Views,
    ) -> None:
        labels = [inventory.spare(item.target) for item in additions.items]
        self.columns = {label: columns for row in labels for label, columns in row.items()}
        questions = [Item(item.source) for item in additions.items]
        self._phrases = NgramVocabulary.fit(questions, vocabulary.longest, cues.MOST, gap=vocabulary.gap)
        number = {phrase: at for at, phrase in enumerate(self._phrases.idf)}
        column = np.array([number.get(phrase, -1) for phrase in vocabulary.idf], dtype=np.int64)
        bags = landmarks.views.bags
        targets = np.zeros((len(bags) + len(labels), len(self.columns)), dtype=np.float32)
        for row, has in enumerate(labels, start=len(bags)):
            targets[row] = [label in has for label in self.columns]
        present = vstack([cues.incidence(bags, column, len(number)), self._present(questions)]).tocsr()
        self.weights = cues.fit(present, targets)
        self.inverse = inverse
        self._join(landmarks, views, targets[len(bags) :])

    def _join(self, landmarks: Landmarks, views: Views, targets: NDArray[np.float32]) -> None:
        """Ridge regression over training and added questions, by the block inverse of its matrix.

        Questions left out one by one are predicted as y_i − α_i / G_ii (see `without_folds`). The value that best tells
        added from training questions there counts as 0.
        """
        self._added = Landmarks(views)
        near = landmarks.likeness(views)
        reach = near @ self.inverse
        own = self._added.likeness(views) + RIDGE * np.eye(len(near), dtype=np.float32)
        corner = np.linalg.inv((own - reach @ near.T).astype(np.float64)).astype(np.float32)
        self._mean = targets.sum(axis=0) / (len(self.inverse) + len(near))
        added = corner @ (targets - self._mean + reach.sum(axis=1)[:, None] * self._mean)
        known = -self.inverse.sum(axis=1)[:, None] * self._mean - reach.T @ added
        self._dual = np.concatenate([known, added]).astype(np.float32)
        diagonal = np.diag(self.inverse) + ((corner @ reach) * reach).sum(axis=0)
        without = -known / diagonal[:, None], targets - added / np.diag(corner)[:, None]
        each = [
            _threshold(low, high[has > 0]) for low, high, has in zip(*(a.T for a in (*without, targets)), strict=True)
        ]
        self._chance = np.clip(np.array(each, dtype=np.float32), 0, 0.9)

    def likelihoods(self, questions: Sequence[str], views: Views, likeness: NDArray[np.float32]) -> NDArray[np.float32]:
        """How likely each question needs a label of each column.

        Args:
            questions: N questions.
            views: of them.
            likeness: (N, M) how like they are to the training questions.

        Returns:
            (N, SPARE); the likelier of what the phrases say and what the kernel says.
        """
        phrases = self._present([Item(question) for question in questions])
        near = np.concatenate([likeness, self._added.likeness(views)], axis=1)
        kernel = (near @ self._dual + self._mean - self._chance) / (1 - self._chance)
        likely = np.maximum(cues.likelihoods(phrases, self.weights), kernel.clip(0, 1))
        out = np.zeros((len(questions), SPARE), dtype=np.float32)
        for column, places in zip(likely.T, self.columns.values(), strict=True):
            out[:, places] = np.maximum(out[:, places], column[:, None])
        return out

    def _present(self, questions: Sequence[Item]) -> csr_array:
        """(N, F + 1) which of the added questions' phrases these have; see `cues.incidence`."""
        count = len(self._phrases)
        return cues.incidence(self._phrases.bags(questions), np.arange(count), count)


def _threshold(low: NDArray[np.float32], high: NDArray[np.float32]) -> float:
    """The least value of `low` beyond which few of it, and enough of `high`, lie; see `MISSED`. 0: there are none."""
    if not len(low):  # E_x has not been fitted
        return 0.0
    low, high = np.sort(low), np.sort(high)
    wrong = 1 - np.searchsorted(low, low, side="right") / len(low)
    missed = np.searchsorted(high, low, side="right") / len(high)
    return float(low[(wrong + MISSED * missed).argmin()])
