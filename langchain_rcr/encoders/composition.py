"""From what each structure's likelihood is by itself to what it is among the others: one small net for all structures.

A structure is there only where its parts are, and is likelier where larger ones with it are. Because the net is shared,
it says something about rare structures too, and it is trained on predictions for programs that were left out, so that
what it gives are probabilities for such.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from langchain_rcr.encoders.inventory import Inventory

INPUTS = 15
"""What the net sees of a structure."""
_HIDDEN = 24


class Composition(nn.Module):
    """Likelihoods of D columns → their log-odds, each with its parts and wholes in view.

    Args:
        inventory: the columns.
    """

    sizes: Tensor
    lengths: Tensor
    parts: Tensor
    labels: Tensor

    def __init__(self, inventory: Inventory, generator: torch.Generator) -> None:
        super().__init__()
        derived = {
            "sizes": torch.from_numpy(inventory.sizes),
            "lengths": torch.from_numpy(inventory.lengths),
            "parts": torch.from_numpy(inventory.parts),
            "labels": torch.from_numpy(inventory.words[1]),
        }
        for name, tensor in derived.items():
            self.register_buffer(name, tensor, persistent=False)
        self.net = nn.Sequential(
            nn.Linear(INPUTS, _HIDDEN), nn.SiLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.SiLU(), nn.Linear(_HIDDEN, 1)
        )
        with torch.no_grad():
            for layer in self.net:
                if isinstance(layer, nn.Linear):
                    start = torch.randn(layer.weight.shape, generator=generator)
                    layer.weight.copy_(start / layer.in_features**0.5)
                    layer.bias.zero_()

    def inputs(self, raw: Tensor, frequency: Tensor, evidence: Tensor) -> Tensor:
        """What the net sees.

        Args:
            raw: (B, D) likelihoods, each predicted by itself.
            frequency: (D,) or (B, D) share of the training programs that have each column.
            evidence: (B, 2, L) what the question says of each label: likeness in meaning, words in common.

        Returns:
            (B, D, INPUTS).
        """
        p = raw.clamp(0, 1)
        least, mean = self._over(p, *self.parts)
        most, total = self._wholes(p)
        by_label: list[Tensor] = []
        for kind in range(2):
            by_label += self._over(evidence[:, kind], *self.labels)
        expected = (p * self.sizes).sum(1, keepdim=True) / 20
        columns = [
            p,
            (p + 1e-3).sqrt(),
            least,
            (least + 1e-3).sqrt(),
            mean,
            most,
            total.clamp(max=3),
            (frequency + 1e-4).log().expand_as(p) / 5,
            (self.lengths / 2.5 - 1).expand_as(p),
            (p * least + 1e-3).sqrt(),
            expected.expand_as(p),
            *by_label,
        ]
        return torch.stack(columns, dim=-1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Log-odds (…) of inputs (…, INPUTS)."""
        out: Tensor = self.net(inputs).squeeze(-1)
        return out

    def _over(self, values: Tensor, owner: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the mean (B, D) of the values (B, V) of each column's parts; its own where it has none."""
        size = len(self.sizes)
        index = owner.expand(len(values), -1)
        taken = values[:, part]
        least = values.new_full((len(values), size), float("inf")).scatter_reduce(1, index, taken, "amin")
        count = torch.bincount(owner, minlength=size)
        mean = values.new_zeros(len(values), size).index_add(1, owner, taken) / count.clamp(min=1)
        alone = count == 0
        own = values if values.shape[1] == size else torch.zeros_like(mean)
        return torch.where(alone, own, least), torch.where(alone, own, mean)

    def _wholes(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """The largest and the sum of the likelihoods (B, D) of the columns that each is a part of; 0 where none is."""
        whole, part = self.parts
        taken = p[:, whole]
        most = torch.zeros_like(p).scatter_reduce(1, part.expand(len(p), -1), taken, "amax")
        total = torch.zeros_like(p).index_add(1, part, taken)
        return most, total
