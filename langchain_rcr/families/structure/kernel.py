"""Training questions that new questions are compared with: the kernel of the `structure` family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.rows import FloatArray, SparseRows

_WIDTH = 1.5
"""γ of the radial kernel exp(−γ · |u − v|²) of unit vectors; set by hand, no published trial compares values."""
RIDGE = 0.01
"""ρ of the ridge regression, beside a kernel whose diagonal is 1; set by hand, no published trial compares values."""
TOKENS = 0.75
"""The share of the words in context; of what is left, vectors and n-grams have half each. On folds of GeoQuery and SQL
0.75 covered 0.4 and 0.2 points more than 0.5 did, and 0.9 as much."""
_BLOCK = 1 << 24
"""Numbers in one block of the n-gram comparison, to bound memory."""


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

    def followed_by(self, others: Views) -> Views:
        """These questions and then the others."""
        mine, theirs = self.bags, others.bags
        return Views(
            np.concatenate([self.vectors, others.vectors]),
            np.concatenate([self.tokens, others.tokens]),
            SparseRows(
                np.concatenate([mine.starts, mine.starts[-1] + theirs.starts[1:]]),
                np.concatenate([mine.columns, theirs.columns]),
                np.concatenate([mine.values, theirs.values]),
                mine.dim,
            ),
        )


class Landmarks:
    """M training questions: frozen vectors, token bags and n-gram bags.

    Args:
        views: the questions.
    """

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

        Three quarters of it are the cosine of the token bags, an eighth the radial kernel of the frozen vectors, an
        eighth the cosine of the n-gram bags.

        Args:
            views: the questions; what they lack doesn't count.
        """
        out = self._overlap(views.bags)
        if views.vectors.shape[1]:
            radial = np.exp(2 * _WIDTH * (views.vectors @ self.views.vectors.T - 1))
            out = (out + radial) / 2
        if views.tokens.shape[1]:
            out = (1 - TOKENS) * out + TOKENS * (views.tokens @ self.views.tokens.T)
        likeness: NDArray[np.float32] = out.astype(np.float32)
        return likeness

    def inverse(self) -> NDArray[np.float64]:
        """(M, M): (K + ρI)⁻¹, with K how like the landmarks are to each other."""
        from scipy.linalg.lapack import dpotrf, dpotri

        kernel = self.likeness(self.views).astype(np.float64)
        kernel[np.diag_indices(len(kernel))] += RIDGE
        if not len(kernel):
            return kernel
        factor, failed = dpotrf(kernel, lower=True)
        if failed:
            raise np.linalg.LinAlgError(f"the kernel of {len(kernel)} questions is not positive definite")
        inverse: NDArray[np.float64] = np.tril(dpotri(factor, lower=True)[0])
        return inverse + np.tril(inverse, -1).T

    def _overlap(self, bags: SparseRows) -> FloatArray:
        """(N, M) inner products of bags, a block of questions at a time."""
        landmarks = self.views.bags.csr()
        out = np.zeros((len(bags), landmarks.shape[0]), dtype=np.float32)
        size = max(1, _BLOCK // max(1, bags.dim))
        for start in range(0, len(bags), size):
            block = bags.select(np.arange(start, min(start + size, len(bags))))
            spread = np.zeros((bags.dim, len(block)), dtype=np.float32)
            spread[block.columns, block.owner] = block.values
            out[start : start + len(block)] = (landmarks @ spread).T
        return out
