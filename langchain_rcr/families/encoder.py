"""Encoders whose arrays are torch tensors, so that they can be trained by gradients."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from langchain_rcr.errors import InputError
from langchain_rcr.families.encoding import BaseEncoder
from langchain_rcr.families.heads import Normal, NumpyLinearEncoder

_ALWAYS_ALLOWED = 1 << 20
"""A new encoder's tensor may have this many numbers whatever the checkpoint holds."""
_FACTORIES = frozenset((torch.empty, torch.eye, torch.full, torch.ones, torch.rand, torch.randn, torch.zeros))


class Bounded(TorchFunctionMode):
    """While entered, raises an `InputError` at a new tensor of more than `size` numbers, or after `calls` calls.

    Tensors on the meta device take no memory and don't count.
    """

    def __init__(self, size: int, calls: int | None = None) -> None:
        super().__init__()
        self._size, self._calls = size, calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._calls is not None:
            self._calls -= 1
            if self._calls < 0:
                raise InputError("it has more parts than the weights beside it")
        if func in _FACTORIES and kwargs.get("device") is None:
            shape = args[0] if args and not isinstance(args[0], int) else kwargs.get("size", args)
            size = math.prod(shape if func is not torch.eye or len(shape) > 1 else (*shape, *shape))
            if size > self._size:
                raise InputError(f"it has a tensor of {size:,} numbers, which doesn't fit the weights beside it")
        return func(*args, **kwargs)


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
        tensor = torch.from_numpy(np.array(array, order="C")).to(self.device)
        if trained:
            owner.register_parameter(last, nn.Parameter(tensor))
        else:
            owner.register_buffer(last, tensor, persistent=saved)

    def given(self, array: NDArray[Any]) -> Tensor:
        """See `BaseEncoder.given`."""
        return torch.from_numpy(array).to(self.device)

    def taken(self, values: Tensor) -> NDArray[np.float32]:
        """See `BaseEncoder.taken`."""
        return values.detach().float().cpu().numpy()

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        first = next(chain(self.parameters(), self.buffers()), None)
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
