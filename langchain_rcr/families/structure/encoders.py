"""The encoders of the `structure` family as torch modules, which GRPO trains by gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from langchain_rcr.basics.rows import SparseRows
from langchain_rcr.families.encoder import Encoder
from langchain_rcr.families.structure.needs import NumpyNeedEncoder
from langchain_rcr.families.structure.shown import NumpyProgramEncoder


class NeedEncoder(NumpyNeedEncoder, Encoder):
    """`NumpyNeedEncoder`, trainable."""


class ProgramEncoder(NumpyProgramEncoder, Encoder):
    """`NumpyProgramEncoder`, trainable."""

    def forward(self, features: SparseRows) -> Tensor:
        """See `BaseEncoder.forward`."""
        features = self._shown(features)
        columns, values = self._values(features)
        out: Tensor = values.new_zeros(features.shape).index_put((self.given(features.owner), columns), values)
        return out

    def rows(self, features: SparseRows) -> SparseRows:
        """See `BaseEncoder.rows`."""
        features = self._shown(features)
        with torch.inference_mode():
            return replace(features, values=self._values(features)[1].float().cpu().numpy())
