"""Bags of n-grams of question and program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from langchain_rcr.basics.items import WORD, Item, folded
from langchain_rcr.basics.rows import SparseRows
from langchain_rcr.basics.section import show
from langchain_rcr.errors import InputError
from langchain_rcr.families.encoding import Vocabulary

_TOKEN = re.compile(rf"{WORD}|[<>=!+*/%&|^~$@#:-]+|[\u2190-\u2bff\U0001f000-\U0001fbff]")
"""Words, operators, symbols and emoji, but no brackets, commas or quotes, so that `answer ( city (` has the bigram of a
call and its argument, `answer city`."""
_MAX_LENGTH = 16
"""The longest n-gram and widest gap that a saved vocabulary may have; settings allow 5."""
_MAX_IDF = 1e6
"""A generous bound: inverse document frequencies are logarithms."""
_MAX_TOKENS = 2048
"""The most tokens read of a text: a pasted document must not stall a query."""


def ngrams(item: Item, longest: int, gap: int = 0) -> Iterator[str]:
    """The n-grams (n = 1 … longest) of an item in lower case, those of the program prefixed with "⇒".

    With a gap, also pairs of words with 1 … gap others in between, and the first and last word marked as such.
    """
    for mark, text in (("", item.source), ("⇒", item.target)):
        tokens = _TOKEN.findall(folded(text[: 16 * _MAX_TOKENS]))[:_MAX_TOKENS]
        for n in range(1, longest + 1):
            for start in range(len(tokens) - n + 1):
                yield mark + " ".join(tokens[start : start + n])
        if gap and tokens:
            yield f"{mark}^ {tokens[0]}"
            yield f"{mark}{tokens[-1]} $"
        for between in range(1, gap + 1):
            for first, second in zip(tokens, tokens[between + 1 :], strict=False):
                yield f"{mark}{first} … {second}"


class NgramVocabulary(Vocabulary):
    """The n-grams (see `ngrams`) seen in training; `idf` has their weights, in the order of the bags' columns."""

    def __init__(self, idf: dict[str, float], longest: int, gap: int = 0) -> None:
        self.idf = idf
        self.longest, self.gap = longest, gap
        self._number = {ngram: number for number, ngram in enumerate(idf)}
        self._weights = np.fromiter(idf.values(), dtype=np.float32, count=len(idf))

    @classmethod
    def fit(cls, items: Sequence[Item], longest: int, max_size: int = 20_000, *, gap: int = 0) -> NgramVocabulary:
        """The `max_size` n-grams that most of the items have, with idf = log(1 + N / df)."""
        frequency = Counter(chain.from_iterable(set(ngrams(item, longest, gap)) for item in items))
        kept = sorted(frequency, key=lambda ngram: (-frequency[ngram], ngram))[:max_size]
        return cls({ngram: round(float(np.log1p(len(items) / frequency[ngram])), 4) for ngram in kept}, longest, gap)

    def __len__(self) -> int:
        return len(self.idf)

    def bags(self, items: Sequence[Item]) -> SparseRows:
        """(N, V) known n-grams of each item, weighted by (1 + log count) · idf, each row scaled to length 1."""
        number = self._number
        rows = [Counter(number[g] for g in ngrams(item, self.longest, self.gap) if g in number) for item in items]
        counts = SparseRows.of(rows, len(self))
        weights, owner = (1.0 + np.log(counts.values)) * self._weights[counts.columns], counts.owner
        norms = np.sqrt(np.bincount(owner, weights=weights.astype(np.float64) ** 2, minlength=len(rows)))
        return replace(counts, values=(weights / np.maximum(norms[owner], 1e-12)).astype(np.float32))

    def to_json(self) -> dict[str, Any]:
        """See `Vocabulary.to_json`."""
        return {"longest": self.longest, "gap": self.gap, "idf": self.idf}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> NgramVocabulary:
        """See `Vocabulary.from_json`; values that this package never writes are an `InputError`."""
        longest, gap = int(value["longest"]), int(value["gap"])
        if not (1 <= longest <= _MAX_LENGTH and 0 <= gap <= _MAX_LENGTH):
            raise InputError(
                f"n-grams of up to {show(longest)} words, with gaps of {show(gap)}: at most {_MAX_LENGTH} each"
            )
        idf = {str(k): float(v) for k, v in value["idf"].items()}
        if not all(0 <= weight < _MAX_IDF for weight in idf.values()):
            raise InputError("an n-gram's weight is not an inverse document frequency")
        return cls(idf, longest, gap)
