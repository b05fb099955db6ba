"""From what each structure's likelihood is by itself to what it is among the others: small nets, the same for all.

A structure is there only where its parts are, and is likelier where larger ones with it are. Because the nets are
shared, they say something about rare structures too, and they learn from predictions for programs that were left out
together with all programs like them, so that what they give are probabilities for questions unlike those of training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from langchain_rcr.families.structure.inventory import Inventory

INPUTS = 15
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

    def __init__(self, inventory: Inventory) -> None:
        super().__init__()
        self.columns = len(inventory)
        derived = {
            "owner": torch.from_numpy(inventory.owner),
            "lengths": torch.from_numpy(inventory.lengths),
            "parts": torch.from_numpy(inventory.parts),
            "labels": torch.from_numpy(inventory.words[1]),
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

    def inputs(self, raw: Tensor, frequency: Tensor, evidence: Tensor) -> Tensor:
        """What the nets see, each scaled by hand to the order of 1; no published trial compares other scales.

        Args:
            raw: (B, D) likelihoods, each predicted by itself.
            frequency: (D,) or (B, D) share of the training programs that have each column.
            evidence: (B, 2, L) what the question says of each label: likeness in meaning, words in common.

        Returns:
            (B, S, INPUTS).
        """
        p = raw.clamp(0, 1)[:, self.owner]
        least, mean = self._over(p, *self.parts)
        most, total = self._wholes(p)
        by_label: list[Tensor] = []
        for kind in range(2):
            by_label += self._over(evidence[:, kind], *self.labels)
        expected = p.sum(1, keepdim=True) / 20  # a program has tens of structures
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
            expected.expand_as(p),
            *by_label,
        ]
        return torch.stack(columns, dim=-1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Likelihoods (…) of inputs (…, INPUTS)."""
        return torch.stack([net(inputs).squeeze(-1).sigmoid() for net in self.nets]).mean(0)

    def by_column(self, likelihoods: Tensor) -> Tensor:
        """(B, S) summed over the structures of each column, (B, D): how many of them there should be."""
        return likelihoods.new_zeros(len(likelihoods), self.columns).index_add(1, self.owner, likelihoods)

    def _over(self, values: Tensor, owner: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the mean (B, S) of the values (B, V) of each structure's parts; its own where it has none."""
        size = len(self.lengths)
        index = owner.expand(len(values), -1)
        taken = values[:, part]
        least = values.new_full((len(values), size), float("inf")).scatter_reduce(1, index, taken, "amin")
        count = torch.bincount(owner, minlength=size)
        mean = values.new_zeros(len(values), size).index_add(1, owner, taken) / count.clamp(min=1)
        alone = count == 0
        own = values if values.shape[1] == size else torch.zeros_like(mean)
        return torch.where(alone, own, least), torch.where(alone, own, mean)

    def _wholes(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """The largest and the sum of the likelihoods (B, S) of the wholes that each is a part of; 0 without any."""
        whole, part = self.parts
        taken = p[:, whole]
        most = torch.zeros_like(p).scatter_reduce(1, part.expand(len(p), -1), taken, "amax")
        total = torch.zeros_like(p).index_add(1, part, taken)
        return most, total


def _net() -> nn.Sequential:
    """A net that takes nothing for likely."""
    layers = [nn.Linear(INPUTS, _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN), nn.Linear(_HIDDEN, 1)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.zero_()
            layer.bias.zero_()
        layers[-1].bias.fill_(_NEVER)
    return nn.Sequential(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2])
