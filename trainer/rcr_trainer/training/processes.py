"""Several processes that train one model, over torch.distributed.

Every process takes the same steps on its share of the rows; sums over all processes supply the rest. If one fails, it
reports the error itself and the others fail at their next exchange. A single process loads nothing distributed.

`join` reads the environment that `torchrun` and `accelerate launch` set: WORLD_SIZE, RANK, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.errors import RCRError
from rcr_trainer.errors import ConfigError

logger = logging.getLogger(__name__)

_JOINED = itertools.count()
_JOIN_TIMEOUT, _WORK_TIMEOUT = timedelta(minutes=5), timedelta(days=7)
"""Another process's language model may take long; a process that dies is noticed at once by its connection."""


class ProcessError(RCRError):
    """Another process is gone."""


@contextmanager
def _connected() -> Iterator[None]:
    """Raise errors of torch.distributed as ours."""
    try:
        yield
    except RuntimeError as error:
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]
        raise ProcessError(f"another process is gone ({reason:.200}); --resume continues the run") from error


class Processes:
    """This process among those that train together; alone by default."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and logs."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """This process's share of `count` rows: consecutive; shares differ in size by at most one row."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """The element-wise sum of all processes' arrays, which have one shape and type."""
        if self.size > 1 and values.size:
            values = np.array(values)
            self.add_up(torch.from_numpy(values))  # the tensor shares the array's memory
        return values

    def gather(self, rows: NDArray[Any], count: int) -> NDArray[Any]:
        """All `count` rows, from each process's `part`."""
        whole = np.zeros((count, *rows.shape[1:]), dtype=rows.dtype)
        whole[self.part(count)] = rows
        return self.sum(whole)

    def texts(self, text: str) -> list[str]:
        """The texts of all processes, given this one's."""
        own = np.frombuffer(text.encode(), dtype=np.uint8)
        ends = np.cumsum(self.gather(np.array([len(own)]), self.size))
        whole = np.zeros(ends[-1], dtype=np.uint8)
        whole[ends[self.rank] - len(own) : ends[self.rank]] = own
        return [each.tobytes().decode() for each in np.split(self.sum(whole), ends[:-1])]

    def wait(self) -> None:
        """Wait until all processes have reached this point."""
        self.sum(np.zeros(1))

    def broadcast(self, module: nn.Module) -> None:
        """Overwrite a module's parameters and buffers with the first process's; `ConfigError` if the modules differ."""
        if self.size == 1:
            return
        import torch.distributed as dist

        tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
        shapes = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
        if len(set(self.texts(json.dumps(shapes)))) > 1:
            raise ConfigError("the processes have different models: give all of them the same data and settings")
        for tensor in tensors.values():
            with _connected():
                dist.broadcast(tensor.detach(), 0, group=self._group)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its sum over processes, in one exchange; it stays None where all have None."""
        if self.size == 1:
            return
        every = list(parameters)
        device = every[0].device
        there = torch.tensor([float(p.grad is not None) for p in every], device=device)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in every] + [there])
        self.add_up(flat)
        *gradients, there = torch.split(flat, [*(p.numel() for p in every), len(every)])
        for parameter, gradient, known in zip(every, gradients, there.tolist(), strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype) if known else None

    def share(self, encode: Callable[[slice], Tensor], count: int) -> Tensor:
        """Vectors (count, D), of which each process encodes its part (n, D), for in-batch negatives.

        All processes' losses send gradients back through the encoding, so all must call backward.
        """
        part = self.part(count)
        own = encode(part)
        if self.size == 1:
            return own
        vectors = torch.zeros(count, own.shape[1], dtype=own.dtype, device=own.device)
        vectors[part] = own
        vectors.requires_grad_()  # even if this process has nothing to encode
        vectors.register_hook(self._total)  # type: ignore[no-untyped-call]
        return vectors + (self._total(vectors.detach()) - vectors).detach()

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum of all processes' tensors, which have one shape and type."""
        import torch.distributed as dist

        if tensor.is_cuda:
            self.wait()  # a GPU doesn't notice when a process dies
        with _connected():
            dist.all_reduce(tensor, group=self._group)

    def _total(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        self.add_up(total)
        return total


@contextmanager
def join(device: str = "cpu") -> Iterator[Processes]:
    """Connect to the processes launched with this one, until the block ends: CPUs by gloo, GPUs by NCCL.

    Each process gets its own GPU; a GPU with a number is shared by all processes of a machine.

    Raises:
        ConfigError: the environment is incomplete, or there are fewer GPUs than processes.
        ProcessError: the others can't be reached.
    """
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        yield Processes()
        return
    # Import before there is a group: these functions would keep it, and its threads must end before the interpreter.
    import torch.distributed.nn  # noqa: F401
    from torch import distributed as dist

    rank, backend = _number("RANK"), _backend(device)
    with _connected():
        store = dist.PrefixStore(f"rcr-{next(_JOINED)}", _store(rank, size))  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_JOIN_TIMEOUT)
        group = dist.new_group(timeout=_WORK_TIMEOUT)
    processes = Processes(rank, size, group)
    try:
        yield processes
        processes.wait()
    except Exception as error:
        if rank and not isinstance(error, ProcessError):  # the first process's error reaches the command line
            logger.error("process %d: %s", rank, error, exc_info=not isinstance(error, RCRError))
        raise
    finally:
        dist.destroy_process_group()


@cache
def _store(rank: int, size: int) -> Any:
    """The store through which processes find each other, shared by every `join` of a script."""
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://", rank, size, timeout=_JOIN_TIMEOUT))[0]


def _backend(device: str) -> str:
    if device.startswith("mps"):
        raise ConfigError("several processes train on CPUs or on CUDA devices: set device: cpu")
    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return "gloo"
    here, there = _number("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    if here > there:
        raise ConfigError(
            f"{here} processes for {there} GPUs: start as many as there are, or set device: cuda:0 for all"
        )
    torch.cuda.set_device(_number("LOCAL_RANK"))
    # CPUs exchange the small arrays, so that GPUs never wait for another process's language model.
    return "cpu:gloo,cuda:nccl"


def _number(variable: str, default: int | None = None) -> int:
    value = os.environ.get(variable, default)
    try:
        return int(value)  # type: ignore[arg-type]  # None raises, too
    except (TypeError, ValueError):
        raise ConfigError(f"the environment has {variable} = {value}: start several processes with torchrun") from None
