"""Labels that came in after training, with examples added to a pool: which questions need them.

A label that no training program has stands in a few of the columns that every vector has to spare, which ones its name
decides. So processes that share a pool agree without a word, and vectors already stored stay as they are. How likely a
question needs it is a noisy-OR over phrases as in `cues`, fitted to the added questions, which need it, and to the
training questions, which don't: some milliseconds, no gradient descent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from langchain_rcr.families.encoder import Vocabulary
from langchain_rcr.families.ngrams import Bags, NgramVocabulary, ngrams
from langchain_rcr.families.structure import cues
from langchain_rcr.families.structure.inventory import SPARE, Inventory
from langchain_rcr.items import Item


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
    """What phrases say of the labels of added examples; fitted when made.

    Args:
        additions: the examples.
        inventory: the structures of training.
        vocabulary: the n-grams of training.
        bags: the n-grams of M training questions, none of which needs a new label.
    """

    def __init__(self, additions: Additions, inventory: Inventory, vocabulary: NgramVocabulary, bags: Bags) -> None:
        self.longest, self.gap = vocabulary.longest, vocabulary.gap
        labels = [inventory.spare(item.target) for item in additions.items]
        self.columns = {label: columns for row in labels for label, columns in row.items()}
        found = [self._phrases(item.source) for item in additions.items]
        counts = Counter(phrase for row in found for phrase in row)
        most = sorted(counts, key=lambda phrase: (-counts[phrase], phrase))[: cues.MOST]
        self._number = {phrase: number for number, phrase in enumerate(most)}

        place = np.array([self._number.get(phrase, -1) for phrase in vocabulary.idf], dtype=np.int64)
        column, owner = place[bags.indices], np.repeat(np.arange(len(bags)), np.diff(bags.starts))
        negative = _incidence(owner[column >= 0], column[column >= 0], len(bags), len(most))
        targets = np.zeros((len(bags) + len(labels), len(self.columns)), dtype=np.float32)
        for row, has in enumerate(labels, start=len(bags)):
            targets[row] = [label in has for label in self.columns]
        self.weights = cues.fit(vstack([negative, self._present(found)]).tocsr(), targets)

    def likelihoods(self, questions: Sequence[str]) -> NDArray[np.float32]:
        """(N, SPARE) how likely each question needs a label of each column."""
        likely = cues.likelihoods(self._present([self._phrases(question) for question in questions]), self.weights)
        out = np.zeros((len(questions), SPARE), dtype=np.float32)
        for column, places in zip(likely.T, self.columns.values(), strict=True):
            out[:, places] = np.maximum(out[:, places], column[:, None])
        return out

    def _phrases(self, question: str) -> set[str]:
        return set(ngrams(Item(question), self.longest, "source", self.gap))

    def _present(self, found: Sequence[set[str]]) -> csr_array:
        pairs = [(row, self._number[p]) for row, phrases in enumerate(found) for p in phrases if p in self._number]
        rows, columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return _incidence(rows, columns, len(found), len(self._number))


def _incidence(rows: NDArray[np.int64], columns: NDArray[np.int64], count: int, width: int) -> csr_array:
    """(count, width + 1) ones at these places and in the last column."""
    every = np.arange(count)
    rows, columns = np.concatenate([rows, every]), np.concatenate([columns, np.full(count, width)])
    return csr_array((np.ones(len(rows), dtype=np.float32), (rows, columns)), shape=(count, width + 1))
