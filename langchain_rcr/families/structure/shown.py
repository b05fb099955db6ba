"""What an example shows: the structures of its program, its home, and the words of its question.

It shows words of the question asked, as Set-BSR does by their vectors (Gupta, Gardner and Singh, 2023). A word's hash
gives it one of `WORDS` columns, so words that appear after training have one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from langchain_rcr.basics.items import Item, text_hash
from langchain_rcr.basics.rows import FloatArray, SparseRows
from langchain_rcr.families.encoding import BaseEncoder
from langchain_rcr.families.ngrams import ngrams
from langchain_rcr.families.structure import LEAST
from langchain_rcr.families.structure.homes import HOMES, home_rows
from langchain_rcr.families.structure.inventory import SPARE, Inventory

WORDS = 256
"""Number of columns. Picks with 512, or with one per word, were nearly the same in trials."""
_IN_ALL = 0.1
"""Makes a word that is in all questions count too."""
_READ = 64
"""Letters read of a word: a cache of arbitrarily long words would be unbounded."""
FULL_LENGTH = 5.0
"""Norm of a program's structures at which the length penalty changes nothing; it only scales the logits."""


class NumpyProgramEncoder(BaseEncoder):
    """E_c or E_z: which structures an example's program has, each times a trained weight that starts at 1.

    E_c also has its home and the words of its question. A pick covers its home by half, and no words: E_z has none.

    Args:
        inventory: the structures.
        scale: a constant factor: 1, or below 0 for E_z of the additive state.
        context: whether it is E_z, whose weights stay between 0 and 1: nothing can be covered more than fully.
        length_penalty: α ≥ 0: structures are divided by (their norm / 5)^α.
        homes: whether there are home columns; the attribute holds their number.
    """

    arguments = ("scale", "context", "length_penalty")
    optional = ("homes",)
    vocabularies: ClassVar = {"inventory": Inventory}
    weight: Any

    def __init__(
        self,
        inventory: Inventory,
        *,
        scale: float = 1.0,
        context: bool = False,
        length_penalty: float = 0.0,
        homes: bool | int = False,
    ) -> None:
        super().__init__()
        self.inventory, self.scale, self.context = inventory, float(scale), context
        self.length_penalty = float(length_penalty)
        self.homes, self.structures = HOMES if homes else 0, len(inventory) + SPARE
        self.dim = self.structures + self.homes + WORDS
        self.keep("weight", np.ones(len(inventory), dtype=np.float32), trained=True)

    def featurize(self, items: Sequence[Item]) -> SparseRows:
        """(N, D) the share of each column's structures that a program has, its new labels, home and words.

        The same for E_c and E_z.
        """
        rows = self.inventory.rows([item.target for item in items], spare=True)
        if self.homes:
            rows = rows.beside(home_rows([item.home for item in items]))
        return rows.beside(word_rows([item.source for item in items]))

    def forward(self, features: SparseRows) -> Any:
        """See `BaseEncoder.forward`."""
        features, columns, values = self._shown(features)
        out = self.given(np.zeros(features.shape, dtype=np.float32))
        out[self.given(features.owner), columns] = values
        return out

    def rows(self, features: SparseRows) -> SparseRows:
        """See `BaseEncoder.rows`."""
        features, _, values = self._shown(features)
        return replace(features, values=self.taken(values))

    def _shown(self, features: SparseRows) -> tuple[SparseRows, Any, Any]:
        """The features shown of the items, with the column and value of each."""
        features = features.only(features.columns < self.dim - WORDS) if self.context else features
        shares = features.values
        if self.length_penalty:
            structures, owner = features.columns < self.structures, features.owner
            norms = np.sqrt(np.bincount(owner, structures * shares**2, minlength=len(features)))
            by_length = (np.maximum(norms, LEAST) / FULL_LENGTH) ** -self.length_penalty
            shares = shares * np.where(structures, by_length.astype(np.float32)[owner], 1)
        columns, values = self.given(features.columns.astype(np.int64)), self.given(shares)
        weight = self.xp.clip(self.weight, 0, 1) if self.context else self.weight
        weight = self.xp.concatenate([weight, self.given(np.ones(self.dim - len(weight), dtype=np.float32))])
        shown = self.scale * values * weight[columns]
        # A question's home is negative, so covering it must be positive, whatever the state.
        if self.context:
            shown = self.xp.where(columns >= self.structures, self.xp.abs(shown), shown)
        return features, columns, shown

    def reads(self) -> tuple[Any, ...]:
        """The inventory."""
        return (self.inventory.digest,)


def word_rows(questions: Sequence[str]) -> SparseRows:
    """(N, WORDS) 1 in the columns of each question's words."""
    columns = [sorted({_column(word[:_READ]) for word in ngrams(Item(question), 1)}) for question in questions]
    return SparseRows.of([dict.fromkeys(places, 1.0) for places in columns], WORDS)


def rarity(questions: Sequence[str]) -> FloatArray:
    """(WORDS,) each column's rarity: log((N + 1) / (n + 1)) if n of the N questions have it, and a little more."""
    counts = np.bincount(word_rows(questions).columns, minlength=WORDS)
    return (np.log((len(questions) + 1) / (counts + 1)) + _IN_ALL).astype(np.float32)


@lru_cache(maxsize=1 << 14)
def _column(word: str) -> int:
    return text_hash(word) % WORDS
