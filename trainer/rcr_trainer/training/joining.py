"""Processes that were launched together meet, and go on together from where a run was left.

`torchrun` and `accelerate launch` set the environment that is read here: WORLD_SIZE, RANK, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from langchain_rcr.errors import CheckpointError
from rcr_trainer.errors import ConfigError
from rcr_trainer.training.processes import Processes, connected
from rcr_trainer.training.state import TrainingState

_MEETINGS = count()
_MEETING, _WORK, _FAREWELL = timedelta(minutes=5), timedelta(days=7), timedelta(minutes=1)
"""How long to wait for each other. At work another's language model may take long; a process that is gone is noticed
at once, by its connection."""


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
            # The first never joins in; when it is gone, so is its connection.
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
        msg = "several processes train on CPUs or on CUDA devices: set device: cpu"
        raise ConfigError(msg)
    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return "gloo"
    here, there = _number("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    if here > there:
        msg = f"{here} processes for {there} GPUs: start as many as there are, or set device: cuda:0 for all"
        raise ConfigError(msg)
    torch.cuda.set_device(_number("LOCAL_RANK"))
    # What is small goes by way of the CPUs, so that GPUs never wait for another's language model.
    return "cpu:gloo,cuda:nccl"


def _number(variable: str, default: int | None = None) -> int:
    value = os.environ.get(variable, default)
    try:
        return int(value)  # type: ignore[arg-type]  # None is refused, too
    except (TypeError, ValueError):
        msg = f"the environment has {variable} = {value}: start several processes with torchrun"
        raise ConfigError(msg) from None


def resume(state: TrainingState[Any], folder: Path | None, processes: Processes) -> bool:
    """Continue from a saved state, in all processes or in none.

    Args:
        state: what was just made; its result counts its `processes`.
        folder: where a state may be.
        processes: those that train.

    Returns:
        Whether there was one.

    Raises:
        CheckpointError: it can't be read, not everywhere, or was written by another number of processes.
    """
    with processes.together():
        found = folder is not None and state.load(folder)
        if state.result.processes != processes.size:
            msg = (
                f"{folder} was written by {state.result.processes} processes that trained together, and now there are "
                f"{processes.size}: start as many, or delete it to start afresh"
            )
            raise CheckpointError(msg)
    everywhere = processes.gather(np.array([[found, state.result.steps]], dtype=np.int64), processes.size)
    if (everywhere != everywhere[0]).any():
        msg = f"{folder} has not the same content for every process: they must see one file system"
        raise CheckpointError(msg)
    return found
