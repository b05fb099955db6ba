"""Limits while something is loaded that a stranger may have written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from langchain_rcr.errors import CheckpointError, InputError

_MAKING = frozenset((torch.empty, torch.eye, torch.full, torch.ones, torch.rand, torch.randn, torch.zeros))


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn whatever a library raises for bad data, panics of one written in Rust included, into one line.

    Raises:
        InputError: `what`, and why.
        CheckpointError: as it is, since it says where it comes from.
    """
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic is no Exception
        # PyTorch puts its stack behind the first line.
        why = " ".join(str(error).partition("\nException raised from")[0].split()) or type(error).__name__
        raise InputError(f"{what}: {why[:300]}") from error


class Bounded(TorchFunctionMode):
    """While it is entered, this thread makes no tensor of more than `most` numbers, and calls PyTorch `calls` times.

    Args:
        most: numbers of a tensor, except on PyTorch's meta device, where it takes no memory.
        calls: None: any number.

    Raises:
        InputError: more would be needed.
    """

    def __init__(self, most: int, calls: int | None = None) -> None:
        super().__init__()
        self._most, self._left = most, calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        kwargs = kwargs or {}
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise InputError("it has more parts than the weights beside it")
        if func in _MAKING and kwargs.get("device") is None:
            shape = args[0] if args and not isinstance(args[0], int) else kwargs.get("size", args)
            size = math.prod(shape if func is not torch.eye or len(shape) > 1 else (*shape, *shape))
            if size > self._most:
                raise InputError(f"it has a tensor of {size:,} numbers, which doesn't fit the weights beside it")
        return func(*args, **kwargs)
