"""Structures that examples describe, as a text describes a tool: similarity to a description is a sign of need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np

from langchain_rcr.basics.rows import FloatArray, SparseRows
from langchain_rcr.families.structure import LEAST

TOLD, TOLD_ALONE = 0.04, 0.1
"""Likelihood that a structure gains per standard deviation of a question's similarity to its description; the second is
for a structure that no other example has (docs/agents.md)."""
RARITY_OF_DESCRIBED = 0.5
"""Factor on the exponent of rarity where structures are described, as a request needs all its tools equally. With 1,
0.5 and 0, five tools covered the needs of 26.3, 27.6 and 27.7 % of ToolLens's requests on four folds without sets of
tools, and of 93.0, 92.8 and 92.0 % on one whose sets recur (1,500 or 4,000 pairs, 400 requests each)."""
_ALL = 0.999
"""A structure in more than this share of programs counts as common to all, such as their root."""


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
