"""Several processes that train one model: torch.distributed behind a few array operations.

Every process does the same steps, on its share of the rows; what all must know is exchanged by one operation, a sum
over processes. A process alone exchanges nothing and loads nothing distributed.

An error in one process must end all of them: what may fail is in a `together` block, and every exchange follows
one. No process then waits for what another will never send.

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

_FAILED, _INTERRUPTED, _BUG = 1, 2, 3
"""How a block ended in a process: with an error that its user can fix, by the user, or with any other error."""
_MEETINGS = itertools.count()
_MEETING, _WORK, _FAREWELL = timedelta(minutes=5), timedelta(days=7), timedelta(minutes=1)
"""How long to wait for each other. At work another's language model may take long; a process that is gone is noticed
at once, by its connection."""


class ProcessError(RCRError):
    """Another process failed, for the reason given, or is gone."""


@contextmanager
def connected() -> Iterator[None]:
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
        """This process's share of `count` rows: consecutive ones, as many as any other's or one more or less."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that all processes leave together: an error in one of them is raised in all.

        Raises:
            ProcessError: another process failed with an error that the user can fix, or is gone.
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

    def collect(self, count: int, compute: Callable[[slice], NDArray[Any]]) -> NDArray[Any]:
        """All `count` rows, of which each process computes its `part`; an error in one of them is raised in all."""
        with self.together():
            rows = compute(self.part(count))
        return self.gather(rows, count)

    def gather(self, rows: NDArray[Any], count: int) -> NDArray[Any]:
        """All `count` rows, where each process has those of its `part`."""
        whole = np.zeros((count, *rows.shape[1:]), dtype=rows.dtype)
        whole[self.part(count)] = rows
        return self.sum(whole)

    def texts(self, text: str) -> list[str]:
        """The texts of all processes, of which this is one."""
        own = np.frombuffer(text.encode(), dtype=np.uint8)
        lengths = self.gather(np.array([len(own)]), self.size)
        ends = np.cumsum(lengths)
        whole = np.zeros(ends[-1], dtype=np.uint8)
        whole[ends[self.rank] - len(own) : ends[self.rank]] = own
        whole = self.sum(whole)
        return [whole[end - length : end].tobytes().decode() for end, length in zip(ends, lengths, strict=True)]

    def from_first(self, values: NDArray[Any]) -> NDArray[Any]:
        """The first process's array; all have one of that shape and type."""
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
        if len(set(self.texts(json.dumps(shapes)))) > 1:
            raise ConfigError("the processes have different models: give all of them the same data and settings")
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
    def shared_vectors(self, encode: Callable[[slice], Tensor], count: int) -> Iterator[Tensor]:
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
            reasons = self.texts("" if error is None else _text(error))
        except ProcessError:
            if error is None:
                raise
            return  # what happened here is the better reason
        self._stopped = True
        if error is None:
            who = int(np.flatnonzero(kinds)[0])
            if kinds[who] == _INTERRUPTED:
                raise KeyboardInterrupt
            if kinds[who] == _FAILED:
                raise ProcessError(f"process {who}: {reasons[who]}")
            raise RuntimeError(f"process {who} failed:\n{reasons[who]}")


def _kind(error: BaseException) -> int:
    if isinstance(error, RCRError):
        return _FAILED
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _BUG


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, RCRError) else "".join(traceback.format_exception(error))


@contextmanager
def join(device: str = "cpu") -> Iterator[Processes]:
    """Meet the processes that were launched with this one; all part when the block ends.

    After an error the first process leaves first, so that what it writes and says isn't cut off by a launcher that
    ends all as soon as one has ended.

    Args:
        device: what the processes train on: gloo connects CPUs, NCCL GPUs, of which each process gets its own. A GPU
            with a number is shared by all processes of a machine.

    Yields:
        The processes; a single one where none were launched together.

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
    with connected():
        store = dist.PrefixStore(f"rcr-{next(_MEETINGS)}", _store(rank, size))  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_MEETING)
        group = dist.new_group(timeout=_WORK)
    processes = Processes(rank, size, group)
    try:
        with processes.together():
            yield processes
    except BaseException:
        if processes.first:
            atexit.register(dist.destroy_process_group)
            raise
        with suppress(Exception):
            # The first takes no part; when it is gone, so is its connection.
            dist.all_reduce(torch.zeros(1), group=group, async_op=True).wait(_FAREWELL)
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@cache
def _store(rank: int, size: int) -> Any:
    """Where processes find each other; one for all meetings, of which each has its own part."""
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://", rank, size, timeout=_MEETING))[0]


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
