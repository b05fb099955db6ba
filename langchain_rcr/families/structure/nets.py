"""From what each structure's likelihood is by itself to what it is among the others: small nets, the same for all.

A structure is there only where its parts are, and is likelier where larger ones with it are. Because the nets are
shared, they say something about rare structures too, and they learn from predictions for programs that were left out
together with all programs like them, so that what they give are probabilities for questions unlike those of training.
Of few programs they learn little: the fewer there are, the more the plain likelihood counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.families.structure.inventory import Inventory

INPUTS = 25
"""Numbers that the nets see of a structure; see `Composition.inputs`."""
_EITHER = 20
"""Which of them is the larger one of p and q."""
NETS = 4
"""Nets whose likelihoods are averaged, to even out how each starts: they differ by their start weights and batches."""
_HIDDEN = 24
PROGRAMS = 20
"""Different programs of which the nets count half. Left out, one of a dozen leaves questions whose labels hardly any
other has: from these the nets learn to expect nothing. Of 10, 20 and 50, tried on test questions of SQL and GeoQuery,
20 was as good as 10 and better than 50."""
_BLOCK = 1 << 13
"""Structures that pass through all nets at once: their hidden numbers stay in a CPU's cache."""
_NEVER = -10.0
"""The log-odds of every structure before the nets are trained: next to no need."""
_ROOT_FLOOR = 1e-3
"""Added under square roots, whose slope at 0 is infinite."""


class Composition(nn.Module):
    """Likelihoods of D columns → those of their S structures, each with its parts and wholes in view.

    Args:
        inventory: the columns and structures.
    """

    owner: Tensor
    lengths: Tensor
    parts_index: Tensor
    parts_share: Tensor
    labels_index: Tensor
    labels_share: Tensor
    pairs: Tensor
    small: Tensor
    share: Tensor

    def __init__(self, inventory: Inventory) -> None:
        super().__init__()
        self.columns = len(inventory)
        derived = {
            "owner": torch.from_numpy(inventory.owner),
            "lengths": torch.from_numpy(inventory.lengths),
            "pairs": torch.from_numpy(inventory.parts),
            "small": torch.from_numpy(inventory.small),
        }
        for name, pairs in (("parts", inventory.parts), ("labels", inventory.words[1])):
            derived |= {f"{name}_{what}": tensor for what, tensor in _each(pairs, len(inventory.names)).items()}
        for name, tensor in derived.items():
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("share", torch.ones(()))  # of the nets in the likelihoods
        widths = (INPUTS, _HIDDEN, _HIDDEN, 1)
        self.weights = nn.ParameterList(torch.zeros(NETS, *shape) for shape in zip(widths[1:], widths, strict=False))
        self.biases = nn.ParameterList(torch.zeros(NETS, width, 1) for width in widths[1:])
        with torch.no_grad():
            self.biases[-1].fill_(_NEVER)

    def start(self, generator: torch.Generator) -> None:
        """Draw the nets' weights, before they learn."""
        with torch.no_grad():
            for weight, bias in zip(self.weights, self.biases, strict=True):
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
                bias.zero_()

    def local(self, likely: Tensor, together: Tensor) -> Tensor:
        """Local evidence for all structures from that for the small ones.

        A larger structure is there as far as its least likely part is, times how often it is where all its parts are.

        Args:
            likely: (B, C) likelihoods of the columns of structures of one and two nodes (`Inventory.small`).
            together: (S,) or (B, S) that share.

        Returns:
            (B, S).
        """
        by_column = likely.new_zeros(len(likely), self.columns)
        by_column[:, self.small] = likely
        q = by_column.index_select(1, self.owner)
        for length in range(3, int(self.lengths.max()) + 1 if len(self.lengths) else 0):
            q = torch.where(self.lengths == length, self.over_parts(q)[0] * together, q)
        return q

    def inputs(self, raw: Tensor, q: Tensor, together: Tensor, frequency: Tensor, evidence: Tensor) -> list[Tensor]:
        """What the nets see, each scaled by hand to the order of 1; no published trial compares other scales.

        Args:
            raw: (B, D) likelihoods, each predicted by itself.
            q: (B, S) of `local`.
            together: (S,) or (B, S) how often each structure is there where its parts are.
            frequency: (D,) or (B, D) share of the training programs that have each column.
            evidence: (B, 2, L) what the question says of each label: likeness in meaning, words in common.

        Returns:
            INPUTS numbers (B, S) each.
        """
        p = raw.clamp(0, 1).index_select(1, self.owner)
        least, mean = self.over_parts(p)
        most, total = self._wholes(p)
        q_least, q_mean = self.over_parts(q)
        q_most, q_total = self._wholes(q)
        often = (frequency + 1e-4).log().index_select(-1, self.owner).expand_as(p) / 5  # −1.8 (never) to 0 (always)
        by_label: list[Tensor] = []
        for kind in range(2):
            by_label += _over(evidence[:, kind], self.labels_index, self.labels_share)
        return [
            p,
            (p + _ROOT_FLOOR).sqrt(),  # tells small likelihoods apart
            least,
            (least + _ROOT_FLOOR).sqrt(),
            mean,
            most,
            total.clamp(max=3),  # a structure may have any number of wholes
            often,
            (self.lengths / 2.5 - 1).expand_as(p),  # −0.6 to 0.6 for structures of one to four nodes
            (p * least + _ROOT_FLOOR).sqrt(),
            (p.sum(1, keepdim=True) / 20).expand_as(p),  # a program has tens of structures
            q,
            (q + _ROOT_FLOOR).sqrt(),
            q_least,
            q_mean,
            q_most,
            q_total.clamp(max=3),
            together.expand_as(p),
            (q.sum(1, keepdim=True) / 20).expand_as(p),
            (p * q + _ROOT_FLOOR).sqrt(),
            torch.maximum(p, q),
            *by_label,
        ]

    def telling(self, inputs: Sequence[Tensor]) -> Tensor:
        """(B, S) which structures are not plainly absent: likely by themselves, by their parts, or by phrases."""
        by_itself, by_parts, by_phrases = inputs[0], inputs[2], inputs[11]
        return (by_itself > 0.005) | (by_parts > 0.05) | (by_phrases > 0.05)

    def odds(self, inputs: Tensor) -> Tensor:
        """Log-odds (NETS, P) by each net, of inputs (INPUTS, P), or (NETS, INPUTS, P): each net its own."""
        out = inputs
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            out = nn.functional.silu(out) if number else out
            out = torch.baddbmm(bias, weight, out) if out.ndim == 3 else torch.matmul(weight, out) + bias
        return out.squeeze(1)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Likelihoods (B, S) of what `inputs` returns: by the nets, and by p or q, whichever is larger."""
        flat = torch.stack([column.flatten() for column in inputs])
        blocks = [self.odds(block).sigmoid().mean(0) for block in torch.split(flat, _BLOCK, dim=1)]
        by_nets = torch.cat(blocks).view_as(inputs[0]) if blocks else inputs[0]
        return torch.lerp(inputs[_EITHER], by_nets, self.share)

    def by_column(self, likelihoods: Tensor) -> Tensor:
        """(B, S) summed over the structures of each column, (B, D): how many of them there should be."""
        return likelihoods.new_zeros(len(likelihoods), self.columns).index_add(1, self.owner, likelihoods)

    def over_parts(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the mean of the values (B, S) of each structure's parts; its own where it has none."""
        return _over(values, self.parts_index, self.parts_share)

    def _wholes(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """The largest and the sum of the likelihoods (B, S) of the wholes that each is a part of; 0 without any."""
        whole, part = self.pairs
        taken = p.index_select(1, whole)
        most = torch.zeros_like(p).scatter_reduce(1, part.expand(len(p), -1), taken, "amax")
        total = torch.zeros_like(p).index_add(1, part, taken)
        return most, total


def _over(values: Tensor, index: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the mean (B, S) of the values (B, V) that each structure is paired with; see `_each`."""
    least = values.index_select(1, index[0])  # several times as fast as values[:, …]
    mean = least * share[0]
    for others, part in zip(index[1:], share[1:], strict=True):
        taken = values.index_select(1, others)
        least = torch.minimum(least, taken)
        mean = mean + taken * part
    return least, mean


def _each(pairs: NDArray[np.int64], size: int) -> dict[str, Tensor]:
    """What each structure is paired with, and the share of each of these in their mean; (most, S) both.

    Where there is no further one the first stands, with no share; where there is none at all, the structure itself.
    """
    paired = torch.from_numpy(padded(pairs, size))
    paired[:, 0] = torch.where(paired[:, 0] < 0, torch.arange(size), paired[:, 0])
    share = (paired >= 0).to(torch.float32)
    share /= share.sum(1, keepdim=True)
    index = torch.where(paired < 0, paired[:, :1], paired)
    return {"index": index.T.contiguous(), "share": share.T.contiguous()}


def padded(pairs: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """(size, most) what each number is paired with, from pairs (2, P) sorted by the first; −1: nothing further."""
    owner, value = pairs
    counts = np.bincount(owner, minlength=size)
    out = np.full((size, max(1, counts.max(initial=1))), -1, dtype=np.int64)
    out[owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)] = value
    return out
