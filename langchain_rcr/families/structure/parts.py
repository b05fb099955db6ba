"""Structures and their parts: between the columns of vectors and the structures that share them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.families.structure.inventory import Inventory


class Parts(nn.Module):
    """Likelihoods of D columns → those of their S structures, and back.

    Args:
        inventory: the columns and structures.
    """

    owner: Tensor
    lengths: Tensor
    parts: Tensor
    small: Tensor

    def __init__(self, inventory: Inventory) -> None:
        super().__init__()
        self.columns, size = len(inventory), len(inventory.names)
        # Where there is no further part the first one stands; where there is none at all, the structure itself.
        parts = padded(inventory.parts, size)
        parts[:, 0] = np.where(parts[:, 0] < 0, np.arange(size), parts[:, 0])
        derived = {
            "owner": inventory.owner,
            "lengths": inventory.lengths,
            "parts": np.where(parts < 0, parts[:, :1], parts).T.copy(),
            "small": inventory.small,
        }
        for name, array in derived.items():
            self.register_buffer(name, torch.from_numpy(array), persistent=False)

    def local(self, likely: Tensor, together: Tensor) -> Tensor:
        """Likelihoods of all structures from those of the small ones.

        A larger structure is there as far as its least likely part is, times how often it is where all its parts are.

        Args:
            likely: (B, C) likelihoods of the columns of structures of one and two nodes (`Inventory.small`).
            together: (S,) or (B, S) that share.

        Returns:
            (B, S).
        """
        by_column = likely.new_zeros(len(likely), self.columns)
        by_column[:, self.small] = likely
        q = self.each(by_column)
        for length in range(3, int(self.lengths.max()) + 1 if len(self.lengths) else 0):
            q = torch.where(self.lengths == length, self._least(q) * together, q)
        return q

    def each(self, by_column: Tensor) -> Tensor:
        """(B, S) of every structure what its column has, (B, D)."""
        return by_column.index_select(1, self.owner)

    def by_column(self, likelihoods: Tensor) -> Tensor:
        """(B, S) summed over the structures of each column, (B, D): how many of them there should be."""
        return likelihoods.new_zeros(len(likelihoods), self.columns).index_add(1, self.owner, likelihoods)

    def _least(self, values: Tensor) -> Tensor:
        """The least of the values (B, S) of each structure's parts; its own where it has none."""
        least = values.index_select(1, self.parts[0])  # several times as fast as values[:, …]
        for others in self.parts[1:]:
            least = torch.minimum(least, values.index_select(1, others))
        return least


def padded(pairs: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """(size, most) what each number is paired with, from pairs (2, P) sorted by the first; −1: nothing further."""
    owner, value = pairs
    counts = np.bincount(owner, minlength=size)
    out = np.full((size, max(1, counts.max(initial=1))), -1, dtype=np.int64)
    out[owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)] = value
    return out
