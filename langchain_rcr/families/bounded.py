"""A bound on the tensors that opening a stranger's checkpoint may create."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from langchain_rcr.errors import InputError

_FACTORIES = frozenset((torch.empty, torch.eye, torch.full, torch.ones, torch.rand, torch.randn, torch.zeros))


class Bounded(TorchFunctionMode):
    """While entered, raises an `InputError` at a new tensor of more than `size` numbers, or after `calls` calls.

    Tensors on the meta device take no memory and don't count.
    """

    def __init__(self, size: int, calls: int | None = None) -> None:
        super().__init__()
        self._size, self._calls = size, calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
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
