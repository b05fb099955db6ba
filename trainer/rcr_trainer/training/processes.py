"""Several processes that train one model: torch.distributed behind a few array operations.

Every process does the same steps, on its share of the rows; what all must know is exchanged by one operation, a sum
over processes. A process alone exchanges nothing and loads nothing distributed.

An error in one process must end all of them: what may fail stands in a `together` block, and every exchange follows
one. No process then waits for what another will never send.
"""

from __future__ import annotations

import itertools
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.errors import RCRError
from rcr_trainer.errors import ConfigError

_MENDABLE, _INTERRUPTED, _BUG = 1, 2, 3


class ProcessError(RCRError):
    """Another process failed, for the reason given, or is gone."""


@contextmanager
def connected() -> Iterator[None]:
    """Errors of torch.distributed as ours."""
    try:
        yield
    except RuntimeError as error:
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]
        msg = f"another process is gone ({reason:.200}); --resume continues the run"
        raise ProcessError(msg) from error


class Processes:
    """This process among those that train together; by default it is alone.

    Args:
        rank: which one this is.
        size: how many there are.
        group: what connects them, for torch.distributed.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size = rank, size
        self._group, self._stopped = group, False

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """This process's share of `count` rows: consecutive ones, as many as any other's or one more or less."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that all processes leave together: an error in one of them is raised in all.

        Raises:
            ProcessError: another process failed with an error that the user can mend, or is gone.
            RuntimeError: another process failed with a bug; the message has its traceback.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
        if self.size > 1 and not self._stopped and not isinstance(error, ProcessError):
            self._exchange(error)
        if error is not None:
            raise error

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """The element-wise sum of all processes' arrays, which have one shape and type."""
        if self.size == 1 or not values.size:
            return values
        tensor = torch.from_numpy(np.array(values))
        self._add_up(tensor)
        out: NDArray[Any] = tensor.numpy()
        return out

    def gather(self, rows: NDArray[Any], count: int) -> NDArray[Any]:
        """All `count` rows, where each process has those of its `part`."""
        whole = np.zeros((count, *rows.shape[1:]), dtype=rows.dtype)
        whole[self.part(count)] = rows
        return self.sum(whole)

    def say(self, text: str) -> list[str]:
        """What each process says."""
        own = np.frombuffer(text.encode(), dtype=np.uint8)
        lengths = self.gather(np.array([len(own)]), self.size)
        ends = np.cumsum(lengths)
        whole = np.zeros(ends[-1], dtype=np.uint8)
        whole[ends[self.rank] - len(own) : ends[self.rank]] = own
        whole = self.sum(whole)
        return [whole[end - length : end].tobytes().decode() for end, length in zip(ends, lengths, strict=True)]

    def of_first(self, values: NDArray[Any]) -> NDArray[Any]:
        """The first process's array, where all have one of that shape and type."""
        return self.sum(values if self.first else np.zeros_like(values))

    def broadcast(self, module: nn.Module) -> None:
        """Overwrite a module's parameters and buffers, so also what was fitted in closed form, by the first process's.

        Raises:
            ConfigError: the modules differ in more than values: in the names, shapes or types of their tensors.
        """
        if self.size == 1:
            return
        import torch.distributed as dist

        tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
        with self.together():
            shapes = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
        if len(set(self.say(json.dumps(shapes)))) > 1:
            msg = "the processes have different models: give all of them the same data and settings"
            raise ConfigError(msg)
        for tensor in tensors.values():
            with connected():
                dist.broadcast(tensor.detach(), 0, group=self._group)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its sum over the processes, in one exchange; None stays where all have None."""
        if self.size == 1:
            return
        every = list(parameters)
        device = every[0].device
        there = torch.tensor([float(p.grad is not None) for p in every], device=device)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in every] + [there])
        self._add_up(flat)
        *gradients, there = torch.split(flat, [*(p.numel() for p in every), len(every)])
        for parameter, gradient, known in zip(every, gradients, there.tolist(), strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype) if known else None

    @contextmanager
    def whole(self, encode: Callable[[slice], Tensor], count: int) -> Iterator[Tensor]:
        """Vectors of `count` items of which each process encodes its share, with gradients: in-batch negatives.

        Args:
            encode: gives the vectors (n, D) of a part of the items.
            count: how many items there are.

        Yields:
            (count, D). When the block ends, the gradients that all processes' losses left there have gone on through
            the encoding.
        """
        if self.size == 1:
            yield encode(slice(0, count))
            return
        part = self.part(count)
        with self.together():
            own = encode(part)
        vectors = torch.zeros(count, own.shape[1], dtype=own.dtype, device=own.device)
        vectors[part] = own.detach()
        self._add_up(vectors)
        vectors.requires_grad_()
        with self.together():
            yield vectors
        gradient = torch.zeros_like(vectors) if vectors.grad is None else vectors.grad
        self._add_up(gradient)
        if own.requires_grad:
            torch.autograd.backward(own, gradient[part])

    def _add_up(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        with connected():
            dist.all_reduce(tensor, group=self._group)

    def _exchange(self, error: BaseException | None) -> None:
        """Tell each other how a block ended; raises where it ended well here and not elsewhere."""
        kinds = np.zeros(self.size, dtype=np.int64)
        kinds[self.rank] = 0 if error is None else _kind(error)
        try:
            kinds = self.sum(kinds)
            if not kinds.any():
                return
            reasons = self.say("" if error is None else _text(error))
        except ProcessError:
            if error is None:
                raise
            return  # what happened here is the better reason
        self._stopped = True
        if error is None:
            who = int(np.flatnonzero(kinds)[0])
            if kinds[who] == _INTERRUPTED:
                raise KeyboardInterrupt
            if kinds[who] == _MENDABLE:
                raise ProcessError(f"process {who}: {reasons[who]}")
            raise RuntimeError(f"process {who} failed:\n{reasons[who]}")


def _kind(error: BaseException) -> int:
    if isinstance(error, RCRError):
        return _MENDABLE
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _BUG


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, RCRError) else "".join(traceback.format_exception(error))
