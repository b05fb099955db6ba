"""The encoder of the `embeddings` and `lexical` families: frozen vectors through a trained head, and n-gram vectors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_rcr.families.encoder import Encoder
from langchain_rcr.families.heads import Normal, NumpyLinearEncoder


class LinearEncoder(NumpyLinearEncoder, Encoder):
    """`NumpyLinearEncoder`, trainable."""

    def _normal(self, seed: int) -> Normal:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> NDArray[np.float32]:
            drawn: NDArray[np.float32] = torch.randn(*shape, generator=generator).numpy()
            return drawn

        return normal
