"""The encoder of the `embeddings` and `lexical` families: frozen vectors through a trained head, and n-gram vectors."""

from __future__ import annotations

import torch

from langchain_rcr.families.encoder import Encoder
from langchain_rcr.families.heads import Normal, NumpyLinearEncoder


class LinearEncoder(NumpyLinearEncoder, Encoder):
    """`NumpyLinearEncoder`, trainable."""

    def _normal(self, seed: int) -> Normal:
        generator = torch.Generator().manual_seed(seed)
        return lambda *shape: torch.randn(*shape, generator=generator).numpy()
