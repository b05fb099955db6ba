"""The one thing selection asks of an engine: maximum inner-product search minus some positions (MIPS)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolVectors:
    """The pool as the policy sees it.

    Args:
        candidate: E_c of every example, (N, D) float32.
        context: E_z of every example, (N, D) float32.
    """

    candidate: FloatArray
    context: FloatArray

    def __post_init__(self) -> None:
        if self.candidate.shape != self.context.shape or self.candidate.ndim != 2:
            msg = f"candidate {self.candidate.shape} and context {self.context.shape} must both be (N, D)"
            raise ValueError(msg)


class CandidateIndex(Protocol):
    """An engine that holds the pool. Positions are 0 … N−1 in the order of adding."""

    @property
    def size(self) -> int:
        """N, the number of candidates."""
        ...

    def search(self, states: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]:
        """The t candidates with the largest inner product for each state.

        Args:
            states: state vectors, (B, D) float32.
            t: how many candidates a row, at least 1.
            exclude: for each of the B rows the positions that may not come back (duplicates allowed).

        Returns:
            positions (B, t) int64 and logits (B, t) float32, best first; equal logits by lowest position;
            position −1 with logit −inf where a row has fewer than t candidates left.
        """
        ...

    def vectors(self, positions: IntArray) -> FloatArray:
        """E_z (B, D) of the examples at `positions` (B,), as `State.update` takes it."""
        ...

    def add(self, vectors: PoolVectors) -> None:
        """Append candidates; they can be found from the next search on."""
        ...
