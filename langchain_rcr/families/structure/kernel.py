"""Training questions that new questions are compared with: the kernel of the `structure` family."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.rows import FloatArray, SparseRows, product

_WIDTH = 1.5
"""γ of the radial kernel exp(−γ · |u − v|²) of unit vectors; set by hand, no published trial compares values."""
RIDGE = 0.01
"""ρ of the ridge regression, beside a kernel whose diagonal is 1; set by hand, no published trial compares values."""
TOKENS = 0.75
"""The share of the words in context; of what is left, vectors and n-grams have half each. On folds of GeoQuery and SQL
0.75 covered 0.4 and 0.2 points more than 0.5 did, and 0.9 as much."""
NEIGHBOURS = 0.01
"""The share of training questions, the nearest, that are held out with one. With none but those with its program, 5 %
of thresholds refused 37 % of the test questions of COVR's split 110, whose structures are combined anew; with 0.01, 1 %
there and none or 1 % on GeoQuery and scholar, and 95 to 100 % of other questions."""


@dataclass(frozen=True, slots=True)
class Views:
    """N questions as the kernel sees them.

    Args:
        vectors: (N, d) unit vectors of the whole; d = 0: there are none.
        tokens: (N, r) unit vectors of the bags of words in context; r = 0: there are none.
        bags: (N, V) n-grams.
    """

    vectors: NDArray[np.float32]
    tokens: NDArray[np.float32]
    bags: SparseRows

    def by_column(self) -> Views:
        """The same, laid out so that `product` reads them faster."""
        if self.vectors.flags.f_contiguous and self.tokens.flags.f_contiguous:
            return self
        return replace(self, vectors=np.asfortranarray(self.vectors), tokens=np.asfortranarray(self.tokens))

    def followed_by(self, others: Views) -> Views:
        """These questions and then the others."""
        return Views(
            np.concatenate([self.vectors, others.vectors]),
            np.concatenate([self.tokens, others.tokens]),
            self.bags.above(others.bags),
        )


class Landmarks:
    """M training questions: frozen vectors, token bags and n-gram bags."""

    def __init__(self, views: Views) -> None:
        self.views = views

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All of it, by name."""
        bags = self.views.bags
        own = {"vectors": self.views.vectors, "tokens": self.views.tokens}
        return own | {"starts": bags.starts, "columns": bags.columns, "values": bags.values}

    def of(self, arrays: Mapping[str, NDArray[Any]]) -> Landmarks:
        """Others, over the same n-grams: the inverse of `arrays`."""
        bags = SparseRows(arrays["starts"], arrays["columns"], arrays["values"], self.views.bags.dim)
        return Landmarks(Views(arrays["vectors"], arrays["tokens"], bags))

    def likeness(self, views: Views) -> FloatArray:
        """How like each question is to each landmark, (N, M).

        What the questions lack doesn't count.

        Three quarters of it are the cosine of the token bags, an eighth the radial kernel of the frozen vectors, an
        eighth the cosine of the n-gram bags.
        """
        self.views = mine = self.views.by_column()
        out = self._overlap(views.bags)
        if views.vectors.shape[1]:
            radial = np.exp(2 * _WIDTH * (product(views.vectors, mine.vectors) - 1))
            out = (out + radial) / 2
        if views.tokens.shape[1]:
            out = (1 - TOKENS) * out + TOKENS * product(views.tokens, mine.tokens)
        return out

    def ridged(self) -> NDArray[np.float64]:
        """(M, M): K + ρI, with K how like the landmarks are to each other."""
        kernel = self.likeness(self.views).astype(np.float64)
        kernel[np.diag_indices(len(kernel))] += RIDGE
        return kernel

    def inverse(self) -> NDArray[np.float64]:
        """(M, M): (K + ρI)⁻¹."""
        return np.asarray(np.linalg.inv(self.ridged()), dtype=np.float64)

    def _overlap(self, bags: SparseRows) -> FloatArray:
        """(N, M) inner products of bags."""
        mine, parts = self.views.bags, itertools.pairwise(bags.starts.tolist())
        rows = [mine.mixed(bags.columns[start:end], bags.values[start:end]) for start, end in parts]
        return np.stack(rows) if rows else np.zeros((0, len(mine)), dtype=np.float32)


def nearest_held_out(likeness: FloatArray, programs: NDArray[np.int64]) -> FloatArray:
    """(M,): how like each training question is to the nearest one left when it is held out, from (M, M) likenesses.

    Held out with it are the questions that have its program (M,), and the nearest `NEIGHBOURS` of the others: questions
    to come may combine what none of them does.
    """
    among = np.sort(np.where(programs[:, None] == programs, -1, likeness), axis=1)
    return among[:, -1 - int(NEIGHBOURS * len(among))] if len(among) else among.ravel()
