"""From what each structure's likelihood is by itself to what it is among the others: small nets, the same for all.

A structure is there only where its parts are, and is likelier where larger ones with it are. Because the nets are
shared, they say something about rare structures too, and they learn from predictions for programs that were left out
together with all programs like them, so that what they give are probabilities for questions unlike those of training.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.families.structure.inventory import Inventory

INPUTS = 25
"""Numbers that the nets see of a structure; see `Composition.inputs`."""
NETS = 4
"""Nets whose likelihoods are averaged, to even out how each starts: they differ by their start weights and batches."""
_HIDDEN = 24
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
    parts: Tensor
    labels: Tensor
    pairs: Tensor
    small: Tensor

    def __init__(self, inventory: Inventory) -> None:
        super().__init__()
        self.columns = len(inventory)
        derived = {
            "owner": torch.from_numpy(inventory.owner),
            "lengths": torch.from_numpy(inventory.lengths),
            "pairs": torch.from_numpy(inventory.parts),
            "parts": torch.from_numpy(_padded(inventory.parts, len(inventory.names))),
            "labels": torch.from_numpy(_padded(inventory.words[1], len(inventory.names))),
            "small": torch.from_numpy(inventory.small),
        }
        for name, tensor in derived.items():
            self.register_buffer(name, tensor, persistent=False)
        self.nets = nn.ModuleList(_net() for _ in range(NETS))

    def start(self, generator: torch.Generator) -> None:
        """Draw the nets' weights, before they learn."""
        with torch.no_grad():
            for layer in self.nets.modules():
                if isinstance(layer, nn.Linear):
                    drawn = torch.randn(layer.weight.shape, generator=generator)
                    layer.weight.copy_(drawn / layer.in_features**0.5)
                    layer.bias.zero_()

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
        q = by_column[:, self.owner]
        for length in range(3, int(self.lengths.max()) + 1 if len(self.lengths) else 0):
            q = torch.where(self.lengths == length, self.over_parts(q)[0] * together, q)
        return q

    def inputs(self, raw: Tensor, q: Tensor, together: Tensor, frequency: Tensor, evidence: Tensor) -> Tensor:
        """What the nets see, each scaled by hand to the order of 1; no published trial compares other scales.

        Args:
            raw: (B, D) likelihoods, each predicted by itself.
            q: (B, S) of `local`.
            together: (S,) or (B, S) how often each structure is there where its parts are.
            frequency: (D,) or (B, D) share of the training programs that have each column.
            evidence: (B, 2, L) what the question says of each label: likeness in meaning, words in common.

        Returns:
            (B, S, INPUTS).
        """
        p = raw.clamp(0, 1)[:, self.owner]
        least, mean = self.over_parts(p)
        most, total = self._wholes(p)
        q_least, q_mean = self.over_parts(q)
        q_most, q_total = self._wholes(q)
        by_label: list[Tensor] = []
        for kind in range(2):
            by_label += self._over(evidence[:, kind], self.labels)
        columns = [
            p,
            (p + _ROOT_FLOOR).sqrt(),  # tells small likelihoods apart
            least,
            (least + _ROOT_FLOOR).sqrt(),
            mean,
            most,
            total.clamp(max=3),  # a structure may have any number of wholes
            (frequency + 1e-4).log()[..., self.owner].expand_as(p) / 5,  # −1.8 (never) to 0 (in every program)
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
        return torch.stack(columns, dim=-1)

    def telling(self, inputs: NDArray[np.float32]) -> NDArray[np.bool_]:
        """(…) which structures are not plainly absent: likely by themselves, by their parts, or by phrases."""
        by_itself, by_parts, by_phrases = inputs[..., 0], inputs[..., 2], inputs[..., 11]
        telling: NDArray[np.bool_] = (by_itself > 0.005) | (by_parts > 0.05) | (by_phrases > 0.05)
        return telling

    def forward(self, inputs: Tensor) -> Tensor:
        """Likelihoods (…) of inputs (…, INPUTS)."""
        return torch.stack([net(inputs).squeeze(-1).sigmoid() for net in self.nets]).mean(0)

    def by_column(self, likelihoods: Tensor) -> Tensor:
        """(B, S) summed over the structures of each column, (B, D): how many of them there should be."""
        return likelihoods.new_zeros(len(likelihoods), self.columns).index_add(1, self.owner, likelihoods)

    def _over(self, values: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the mean (B, S) of the values (B, V) of each structure's parts (S, most), −1: none."""
        there = parts >= 0
        taken = values[:, parts.clamp(min=0)]
        least = taken.masked_fill(~there, float("inf")).amin(-1)
        mean = taken.masked_fill(~there, 0).sum(-1) / there.sum(-1).clamp(min=1)
        return least, mean

    def over_parts(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the mean of the values (B, S) of each structure's parts; its own where it has none."""
        least, mean = self._over(values, self.parts)
        alone = (self.parts < 0).all(-1)
        return torch.where(alone, values, least), torch.where(alone, values, mean)

    def _wholes(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """The largest and the sum of the likelihoods (B, S) of the wholes that each is a part of; 0 without any."""
        whole, part = self.pairs
        taken = p[:, whole]
        most = torch.zeros_like(p).scatter_reduce(1, part.expand(len(p), -1), taken, "amax")
        total = torch.zeros_like(p).index_add(1, part, taken)
        return most, total


def _padded(pairs: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """(size, most) what each number is paired with, from pairs (2, P) sorted by the first; −1: nothing further."""
    owner, value = pairs
    counts = np.bincount(owner, minlength=size)
    out = np.full((size, max(1, counts.max(initial=1))), -1, dtype=np.int64)
    out[owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)] = value
    return out


def _net() -> nn.Sequential:
    """A net that takes nothing for likely."""
    layers = [nn.Linear(INPUTS, _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN), nn.Linear(_HIDDEN, 1)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.zero_()
            layer.bias.zero_()
        layers[-1].bias.fill_(_NEVER)
    return nn.Sequential(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2])
