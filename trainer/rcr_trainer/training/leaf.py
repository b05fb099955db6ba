"""Encoding with gradients in bounded memory (gradient caching; Gao et al., 2021)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from langchain_rcr.families.encoder import Encoder


class Leaf:
    """Vectors that a loss sees as given; what it says of them goes through the encoder afterwards, part by part.

    The activations of only `chunk` texts are held at a time, however many are encoded, at the price of encoding all
    twice. Exact as long as the encoder is deterministic (no dropout).

    Args:
        encoder: E_x, E_z or E_c.
        features: N featurised items.
        chunk: items encoded at once.
    """

    def __init__(self, encoder: Encoder, features: Any, chunk: int) -> None:
        self._encoder, self._features = encoder, features
        order = encoder.order(features)  # like lengths together
        self._parts = [order[start : start + chunk] for start in range(0, len(order), chunk)]
        device = next(encoder.parameters()).device
        self.vectors: Tensor = torch.empty(len(features), encoder.dim, device=device)
        with torch.no_grad():
            for rows in self._parts:
                self.vectors[torch.from_numpy(rows).to(device)] = encoder(features.select(rows)).float()
        self.vectors.requires_grad_()

    def backward(self) -> None:
        """Send the gradient that has gathered at `vectors` on to the encoder's parameters."""
        if self.vectors.grad is None:
            return
        for rows in self._parts:
            gradient = self.vectors.grad[torch.from_numpy(np.asarray(rows)).to(self.vectors.device)]
            torch.autograd.backward(self._encoder(self._features.select(rows)), gradient)
