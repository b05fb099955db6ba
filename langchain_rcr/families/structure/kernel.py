"""Compares new questions with training questions, the kernel of the `structure` family, and with descriptions.

A question is above all a bag of its words in context: words that mean similar things there count as similar. An example
may describe a structure, as a text describes a tool: similarity to a description is a sign of need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.rows import DoubleArray, FloatArray, IntArray, SparseRows, product
from langchain_rcr.families.encoding import norms, times
from langchain_rcr.families.structure import LEAST

_WIDTH = 1.5
"""γ of the radial kernel exp(−γ · |u − v|²) of unit vectors; set by hand, no published trial compares values."""
RIDGE = 0.01
"""ρ of the ridge regression, beside a kernel whose diagonal is 1; set by hand, no published trial compares values."""
TOKENS = 0.75
"""The weight of the words in context; vectors and n-grams share the rest equally. On folds of GeoQuery and SQL, 0.75
covered 0.4 and 0.2 points more than 0.5, and 0.9 as much as 0.75."""
OTHER_HOME = 0.75
"""Factor on the similarity to questions of other homes: databases are tasks of one process (Bonilla, Chai and Williams,
2007). On held-out questions, templates or databases of Spider, 0.7 and 0.8 predicted programs better than 1 (mean
average precision of structures 0.77 and 0.80, not 0.74 and 0.78, on two splits' templates), 0.5 a little less so."""
NEIGHBOURS = 0.01
"""The share of training questions that are held out with each one: its nearest. Holding out only those with its
program, a threshold of 5 % refused 37 % of the test questions of COVR's split 110, which recombine structures; with
0.01, 1 % there, none or 1 % on GeoQuery and scholar, and 95 to 100 % of off-topic questions."""
TOLD, TOLD_ALONE = 0.04, 0.1
"""Likelihood that a structure gains per standard deviation of a question's similarity to its description; the second is
for a structure that no other example has (docs/agents.md)."""
RARITY_OF_DESCRIBED = 0.5
"""Factor on the exponent of rarity where structures are described, as a request needs all its tools equally. With 1,
0.5 and 0, five tools covered the needs of 26.3, 27.6 and 27.7 % of ToolLens's requests on four folds without sets of
tools, and of 93.0, 92.8 and 92.0 % on one whose sets recur (1,500 or 4,000 pairs, 400 requests each)."""
_ALL = 0.999
"""A structure in more than this share of programs counts as common to all, such as their root."""
_WORD_WIDTH = 4.0
"""γ of the kernel exp(−γ · (1 − cosine)) of two words; set by hand, no published trial compares values."""
_WORD_RARITY = 12.0
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
        values, vectors = np.linalg.eigh(np.exp(_WORD_WIDTH * (anchors @ anchors.T - 1)).astype(np.float64))
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
            near, narrow = np.exp(_WORD_WIDTH * below), np.exp(_WORD_RARITY * below)
            near *= -np.log(np.minimum(narrow @ mass, 1) + _UNSEEN)[:, None]
            filled = start + np.flatnonzero(lengths[start:stop])
            if len(filled):
                out[filled] = np.add.reduceat(near, ends[filled] - lengths[filled] - before, axis=0)
            start = stop
        return _unit(times(out, root))


@dataclass(slots=True)
class Views:
    """N questions as the kernel sees them: new ones, or the training landmarks that these are compared with."""

    vectors: FloatArray  # (N, d) unit vectors of the whole text; d = 0: there are none
    tokens: FloatArray  # (N, r) unit vectors of the bags of words in context; r = 0: there are none
    bags: SparseRows  # (N, V) n-grams
    homes: IntArray  # (N,) hashes of their homes (`Item.home`); 0: none

    def followed_by(self, others: Views) -> Views:
        """These questions and then the others."""
        return Views(
            np.concatenate([self.vectors, others.vectors]),
            np.concatenate([self.tokens, others.tokens]),
            self.bags.above(others.bags),
            np.concatenate([self.homes, others.homes]),
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All arrays, by name."""
        bags = self.bags
        own: dict[str, NDArray[Any]] = {"vectors": self.vectors, "tokens": self.tokens, "homes": self.homes}
        return own | {"starts": bags.starts, "columns": bags.columns, "values": bags.values}

    def of(self, arrays: Mapping[str, NDArray[Any]]) -> Views:
        """Others, over the same n-grams: the inverse of `arrays`."""
        bags = SparseRows(arrays["starts"], arrays["columns"], arrays["values"], self.bags.dim)
        homes = arrays.get("homes", np.zeros(max(0, bags.starts.size - 1), dtype=np.int64))
        return Views(arrays["vectors"], arrays["tokens"], bags, homes)

    def likeness(self, questions: Views) -> FloatArray:
        """The similarity of each of N questions to each of these landmarks, (N, M).

        Three quarters of it are the cosine of the token bags, an eighth the radial kernel of the frozen vectors, an
        eighth the cosine of the n-gram bags. Features that questions lack don't count. Another home reduces it.
        """
        vectors, tokens, bags = questions.vectors, questions.tokens, questions.bags
        # Laid out so that `product` reads them faster.
        self.vectors, self.tokens = np.asfortranarray(self.vectors), np.asfortranarray(self.tokens)
        parts = pairwise(bags.starts.tolist())
        rows = [self.bags.mixed(bags.columns[start:end], bags.values[start:end]) for start, end in parts]
        out = np.stack(rows) if rows else np.zeros((0, len(self.bags)), dtype=np.float32)
        if vectors.shape[1]:
            radial = np.exp(2 * _WIDTH * (product(vectors, self.vectors) - 1))
            out = (out + radial) / 2
        if tokens.shape[1]:
            out = (1 - TOKENS) * out + TOKENS * product(tokens, self.tokens)
        if self.homes.any():
            out = np.where(questions.homes[:, None] == self.homes, out, np.float32(OTHER_HOME) * out)
        return out

    def ridged(self) -> DoubleArray:
        """(M, M): K + ρI, where K is the similarity between landmarks."""
        kernel = self.likeness(self).astype(np.float64)
        kernel[np.diag_indices(len(kernel))] += RIDGE
        return kernel

    def nearest_held_out(self, programs: IntArray) -> FloatArray:
        """(M,): each training question's similarity to the nearest one left when it is held out.

        The questions with the same program (M,) and the nearest `NEIGHBOURS` of the others are held out with it, as
        future questions may make combinations that none of these has.
        """
        likeness = self.vectors @ self.vectors.T if self.vectors.shape[1] else self.likeness(self)
        among = np.sort(np.where(programs[:, None] == programs, -1, likeness), axis=1)
        return among[:, -1 - int(NEIGHBOURS * len(among))] if len(among) else among.ravel()


class Descriptions:
    """Which landmarks describe a structure; `pairs` has each landmark's number and the structure's column."""

    def __init__(self, pairs: Sequence[Sequence[int]] = ()) -> None:
        self.pairs = [[int(row), int(column)] for row, column in pairs]
        self._usual: tuple[FloatArray, FloatArray] | None = None

    @classmethod
    def of(cls, rows: Sequence[int], programs: SparseRows, mean: FloatArray) -> Self:
        """From each example's landmark (−1: none), its columns, and the share of all programs with each column."""
        parts = [programs.columns[start:end] for start, end in pairwise(programs.starts.tolist())]
        columns = [part[mean[part] <= _ALL].tolist() for part in parts]
        return cls([[row, of[0]] for row, of in zip(rows, columns, strict=True) if row >= 0 and len(of) == 1])

    def told(self, vectors: FloatArray, landmarks: FloatArray, mean: FloatArray) -> FloatArray:
        """(N, columns) what descriptions add to the likelihoods, from the vectors (N, d) of questions and landmarks.

        Similarity is standardised over the landmarks, since some descriptions resemble every question.
        """
        out = np.zeros((len(vectors), len(mean)), dtype=np.float32)
        if self.pairs and vectors.shape[1]:
            rows, columns = np.array(self.pairs).T
            if self._usual is None:
                others = np.delete(landmarks, rows, axis=0) @ landmarks[rows].T
                alone = mean[columns] * len(landmarks) < 1.5
                weight = np.where(alone, TOLD_ALONE, TOLD) / np.maximum(others.std(axis=0), LEAST)
                self._usual = others.mean(axis=0), weight.astype(np.float32)
            usual, weight = self._usual
            out[:, columns] = (vectors @ landmarks[rows].T - usual) * weight
        return out


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
