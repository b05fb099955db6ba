"""The policy as a torch module: what training by gradients changes."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from langchain_rcr.policy.triencoder import TriEncoder


class TrainableTriEncoder(TriEncoder, nn.Module):
    """A `TriEncoder` whose encoders are torch modules; their parameters are its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        nn.Module.__init__(self)
        TriEncoder.__init__(self, *arguments, **options)

    def eval(self) -> Self:
        """See `torch.nn.Module.eval`."""
        return nn.Module.eval(self)
