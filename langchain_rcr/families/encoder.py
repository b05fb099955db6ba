"""Encoders whose arrays are torch tensors, so that they can be trained by gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.families.bounded import Bounded
from langchain_rcr.families.encoding import BaseEncoder
from langchain_rcr.families.heads import Normal, NumpyLinearEncoder

_ALWAYS_ALLOWED = 1 << 20
"""A new encoder's tensor may have this many numbers whatever the checkpoint holds."""


class Encoder(BaseEncoder, nn.Module):
    """A `BaseEncoder` that is a torch module: it keeps parameters and buffers, on any device."""

    trainable = True
    xp: ClassVar[Any] = torch

    @abstractmethod
    def forward(self, features: Any) -> Tensor:
        """Vectors (N, D) float32 of featurised items; gradients reach the trainable parameters."""

    def keep(self, name: str, array: NDArray[Any], *, trained: bool = False, saved: bool = True) -> None:
        """See `BaseEncoder.keep`."""
        *places, last = name.split(".")
        owner: nn.Module = self
        for place in places:
            if not hasattr(owner, place):
                owner.add_module(place, nn.Module())
            owner = owner.get_submodule(place)
        tensor = torch.from_numpy(np.array(array, order="C")).to(self._device())
        if trained:
            owner.register_parameter(last, nn.Parameter(tensor))
        else:
            owner.register_buffer(last, tensor, persistent=saved)

    def given(self, array: NDArray[Any]) -> Tensor:
        """See `BaseEncoder.given`."""
        return torch.from_numpy(array).to(self._device())

    def taken(self, values: Tensor) -> NDArray[np.float32]:
        """See `BaseEncoder.taken`."""
        return values.detach().float().cpu().numpy()

    def _device(self) -> torch.device:
        first = next(self.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def tensors(self) -> dict[str, NDArray[Any]]:
        """See `BaseEncoder.tensors`."""
        return {name: tensor.detach().cpu().numpy() for name, tensor in self.state_dict().items()}

    def put(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """See `BaseEncoder.put`."""
        own = self.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, array in tensors.items():
                if own[name].shape != array.shape:
                    own[name].data = own[name].new_empty(array.shape)
                own[name].copy_(torch.from_numpy(np.array(array, order="C")))

    @classmethod
    def _empty(cls, arguments: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Self:
        with Bounded(max([_ALWAYS_ALLOWED, *(tensor.size for tensor in tensors.values())])):
            return cls(**arguments)

    def vectors(self, features: Any) -> NDArray[np.float32]:
        """See `BaseEncoder.vectors`."""
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                return super().vectors(features)
        finally:
            self.train(was_training)


class LinearEncoder(NumpyLinearEncoder, Encoder):
    """`NumpyLinearEncoder`, trainable."""

    def _normal(self, seed: int) -> Normal:
        generator = torch.Generator().manual_seed(seed)
        return lambda *shape: torch.randn(*shape, generator=generator).numpy()
