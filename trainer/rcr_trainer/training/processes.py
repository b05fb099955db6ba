"""Several processes that train one model, over torch.distributed.

Every process takes the same steps on its share of the rows, and gets the rest as a sum over all processes. Each
exchange first asks whether all are well: an error in one process stops the others at their next exchange, for that
reason. A process alone exchanges nothing and loads nothing distributed.

`join` reads the environment that `torchrun` and `accelerate launch` set: WORLD_SIZE, RANK, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.errors import RCRError
from rcr_trainer.errors import ConfigError

_JOINED = itertools.count()
_JOIN_TIMEOUT, _WORK_TIMEOUT, _LEAVE_TIMEOUT = timedelta(minutes=5), timedelta(days=7), timedelta(minutes=1)
"""Another's language model may work for long; a process that is gone is noticed at once, by its connection."""


class ProcessError(RCRError):
    """Another process failed, for the reason given, or is gone."""


@contextmanager
def _connected() -> Iterator[None]:
    """Errors of torch.distributed as ours."""
    try:
        yield
    except RuntimeError as error:
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]
        raise ProcessError(f"another process is gone ({reason:.200}); --resume continues the run") from error


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
        """Whether this is the process that writes and logs."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """This process's share of `count` rows: consecutive, and of equal size up to one row."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """The element-wise sum of all processes' arrays, which have one shape and type."""
        if self.size == 1 or not values.size:
            return values
        tensor = torch.from_numpy(np.array(values))
        self.add_up(tensor)
        out: NDArray[Any] = tensor.numpy()
        return out

    def gather(self, rows: NDArray[Any], count: int) -> NDArray[Any]:
        """All `count` rows, where each process has those of its `part`."""
        whole = np.zeros((count, *rows.shape[1:]), dtype=rows.dtype)
        whole[self.part(count)] = rows
        return self.sum(whole)

    def texts(self, text: str) -> list[str]:
        """The texts of all processes, of which this is one."""
        own = np.frombuffer(text.encode(), dtype=np.uint8)
        lengths = self.gather(np.array([len(own)]), self.size)
        whole = np.zeros((self.size, lengths.max()), dtype=np.uint8)
        whole[self.rank, : len(own)] = own
        rows = zip(self.sum(whole), lengths, strict=True)
        return [row[:length].tobytes().decode() for row, length in rows]

    def wait(self) -> None:
        """Go on once all processes have come here."""
        self.sum(np.zeros(1))

    def broadcast(self, module: nn.Module) -> None:
        """Overwrite a module's parameters and buffers by the first process's.

        Raises:
            ConfigError: the modules differ in the names, shapes or types of their tensors.
        """
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
        """Replace every gradient by its sum over the processes, in one exchange; None stays where all have None."""
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
        """Vectors (count, D) of which each process encodes its part (n, D): in-batch negatives.

        All processes' losses send gradients back through the encoding, so all must call backward.
        """
        part = self.part(count)
        own = encode(part)
        if self.size == 1:
            return own
        vectors = torch.zeros(count, own.shape[1], dtype=own.dtype, device=own.device)
        vectors[part] = own
        vectors.requires_grad_()  # where this process has nothing to encode, too
        total: Tensor = _Sum.apply(vectors, self)  # type: ignore[no-untyped-call]
        return total

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum of all processes' tensors, which have one shape and type."""
        self._ask()
        self._all_reduce(tensor)

    def _all_reduce(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        with _connected():
            dist.all_reduce(tensor, group=self._group)

    def _ask(self, error: BaseException | None = None) -> None:
        """Tell each other whether an error ends the work; if another's does, raise it here.

        Raises:
            ProcessError: another process failed with an error that the user can fix, or is gone.
            RuntimeError: another process failed with a bug; the message has its traceback.
        """
        if self._stopped:
            return
        self._stopped = True  # If this is interrupted, the others notice that this process is gone.
        failed = torch.zeros(self.size, dtype=torch.int64)
        failed[self.rank] = error is not None
        self._all_reduce(failed)
        if not failed.any():
            self._stopped = False
            return
        bug = error is not None and not isinstance(error, RCRError | KeyboardInterrupt)
        reason = "".join(traceback.format_exception(error)) if bug else str(error)
        reasons = self.texts(json.dumps([isinstance(error, KeyboardInterrupt), bug, reason]))
        if error is not None:
            return
        who = int(failed.argmax())
        interrupted, bug, reason = json.loads(reasons[who])
        if interrupted:
            raise KeyboardInterrupt
        if bug:
            raise RuntimeError(f"process {who} failed:\n{reason}")
        raise ProcessError(f"process {who}: {reason}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that all processes leave together: an error in one of them is raised in all."""
        try:
            yield
        except BaseException as error:
            if self.size > 1 and not isinstance(error, ProcessError):
                with suppress(ProcessError):  # What happened here is the better reason.
                    self._ask(error)
            raise
        self.wait()


class _Sum(torch.autograd.Function):
    """The sum over processes, as is the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        total = tensor.clone()
        processes.add_up(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        ctx.processes.add_up(total)
        return total, None


@contextmanager
def join(device: str = "cpu") -> Iterator[Processes]:
    """Meet the processes that were launched with this one; all part when the block ends.

    Args:
        device: gloo connects CPUs, NCCL GPUs, of which each process gets its own. A GPU with a number is shared by all
            processes of a machine.

    Raises:
        ConfigError: the environment is incomplete, or there are fewer GPUs than processes.
        ProcessError: the others can't be reached.
    """
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        yield Processes()
        return
    # While there is no group: these functions would keep it, and its threads must end before the interpreter does.
    import torch.distributed.nn
    from torch import distributed as dist

    rank, backend = _number("RANK"), _backend(device)
    with _connected():
        store = dist.PrefixStore(f"rcr-{next(_JOINED)}", _store(rank, size))  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_JOIN_TIMEOUT)
        group = dist.new_group(timeout=_WORK_TIMEOUT)
    processes = Processes(rank, size, group)
    try:
        with processes.together():
            yield processes
    except BaseException:
        # The first leaves first: a launcher ends all as soon as one has ended, and would cut off what the first says.
        if processes.first:
            atexit.register(dist.destroy_process_group)
            raise
        with suppress(Exception):
            # The first takes no part: this fails once it is gone.
            dist.all_reduce(torch.zeros(1), group=group, async_op=True).wait(_LEAVE_TIMEOUT)
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@cache
def _store(rank: int, size: int) -> Any:
    """Where processes find each other, for every `join` of a script."""
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
    # Small arrays are exchanged by the CPUs, so that GPUs never wait for another's language model.
    return "cpu:gloo,cuda:nccl"


def _number(variable: str, default: int | None = None) -> int:
    value = os.environ.get(variable, default)
    try:
        return int(value)  # type: ignore[arg-type]  # None is refused, too
    except (TypeError, ValueError):
        raise ConfigError(f"the environment has {variable} = {value}: start several processes with torchrun") from None
