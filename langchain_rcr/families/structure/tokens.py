"""A question as a bag of its words in context: words that mean similar things there count as similar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from langchain_rcr.basics.rows import FloatArray, IntArray, product
from langchain_rcr.families.encoding import norms, times

_WIDTH = 4.0
"""γ of the kernel exp(−γ · (1 − cosine)) of two words; set by hand, no published trial compares values."""
_RARITY = 12.0
"""γ of the narrower kernel that counts how many training words are similar to a word; also set by hand."""
_UNSEEN = 1e-4
"""Added to the share of similar training words, so that a word similar to none weighs −log of this, about 9."""
_MOST = 1024
"""The most anchors; bounds the cost of a question and the size of a checkpoint."""
_SMALLEST = 1e-3
"""Eigenvalues of the anchors' kernel below this are left out: their square root would magnify rounding."""
_FRONT = 1024
"""Tokens among which the farthest are sought at once."""
_BLOCK = 1 << 13
"""Tokens compared with the anchors at once, to bound memory."""


@dataclass(frozen=True)
class TokenBags:
    """Token vectors of a text → one unit vector; inner products sum a kernel over all pairs of tokens, scaled.

    A token weighs −log of the share of training tokens similar to it. Exact for texts whose tokens are among the K
    anchors, otherwise the Nyström approximation. Anchors are far apart, so that rare words have their own.
    """

    centre: FloatArray  # (d,) the mean of the training tokens
    anchors: FloatArray  # (K, d) some of them, minus the centre, as unit vectors
    mass: FloatArray  # (K,) the share of training tokens nearest to each
    root: FloatArray  # (K, rank) the inverse root of the anchors' kernel

    @classmethod
    def fit(cls, texts: Sequence[FloatArray]) -> TokenBags:
        """From the tokens (T_i, d) of training texts; without any, K is 0."""
        if not texts:
            none = np.zeros((0, 0), dtype=np.float32)
            return cls(none, none, none, none)
        tokens = np.concatenate(texts)
        centre = tokens.mean(axis=0)
        tokens = _unit(tokens - centre)
        anchors = tokens[_far_apart(tokens, _MOST)]
        values, vectors = np.linalg.eigh(np.exp(_WIDTH * (anchors @ anchors.T - 1)).astype(np.float64))
        kept = values > _SMALLEST
        root = vectors[:, kept] / np.sqrt(values[kept])
        blocks = range(0, len(tokens), _BLOCK)
        nearest = np.concatenate([(tokens[start : start + _BLOCK] @ anchors.T).argmax(axis=1) for start in blocks])
        mass = np.bincount(nearest, minlength=len(anchors)) / len(tokens)
        return cls(*(np.asarray(part, dtype=np.float32, order="C") for part in (centre, anchors, mass, root)))

    def arrays(self) -> dict[str, FloatArray]:
        """All arrays, by name."""
        return vars(self)

    def of(self, arrays: Mapping[str, FloatArray]) -> TokenBags:
        """Others: the inverse of `arrays`."""
        return TokenBags(**arrays)

    def vectors(self, texts: Sequence[FloatArray]) -> FloatArray:
        """(N, rank) unit vectors of texts given by their tokens (T_i, d); zeros for one without tokens."""
        centre, anchors, mass, root = self.centre, self.anchors, self.mass, self.root
        out = np.zeros((len(texts), len(anchors)), dtype=np.float32)
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        ends, start = np.cumsum(lengths), 0
        while start < len(texts):
            before = ends[start] - lengths[start]
            stop = max(start + 1, int(np.searchsorted(ends, before + _BLOCK, side="right")))
            tokens = _unit(np.concatenate(texts[start:stop]).astype(np.float32) - centre)
            below = product(tokens, anchors) - 1
            near, narrow = np.exp(_WIDTH * below), np.exp(_RARITY * below)
            near *= -np.log(np.minimum(narrow @ mass, 1) + _UNSEEN)[:, None]
            filled = start + np.flatnonzero(lengths[start:stop])
            if len(filled):
                out[filled] = np.add.reduceat(near, ends[filled] - lengths[filled] - before, axis=0)
            start = stop
        return _unit(times(out, root))


def _unit(vectors: FloatArray) -> FloatArray:
    return np.asarray(vectors / np.maximum(norms(vectors), 1e-12), dtype=np.float32)


def _far_apart(vectors: FloatArray, most: int) -> IntArray:
    """Rows chosen one by one, each the farthest from those before it, until all are near one.

    A row can only get nearer to those chosen, so one that was near isn't looked at until the others are as near.
    """
    nearest = np.full(len(vectors), -np.inf, dtype=np.float32)
    rows, known = [0], 0
    while True:
        nearest = np.maximum(nearest, (vectors @ vectors[rows[known:]].T).max(axis=1))
        known = len(rows)
        front = np.argsort(nearest, kind="stable")[: _FRONT + 1]
        front, bound = (front[:-1], nearest[front[-1]]) if len(front) > _FRONT else (front, np.inf)
        near, there = nearest[front], vectors[front]
        while (closest := near.min()) <= bound:
            if closest > 0.999 or len(rows) == most:
                return np.array(rows, dtype=np.int64)
            at = int(near.argmin())
            rows.append(int(front[at]))
            near = np.maximum(near, there @ there[at])
