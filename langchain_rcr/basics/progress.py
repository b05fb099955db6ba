"""Long loops: progress bars with the time left, on stderr if it is a terminal; and a way to stop them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

DELAY_S = 1.0
"""Quicker work shows no bar."""
_stop: ContextVar[threading.Event | None] = ContextVar("_stop", default=None)


class Stopped(BaseException):
    """The result of some work is no longer wanted. Not an `Exception`, which would be taken for a failure."""


@contextmanager
def stoppable(event: threading.Event) -> Iterator[None]:
    """Let `track` raise `Stopped` within the block once the event is set; no bars are shown there."""
    token = _stop.set(event)
    try:
        yield
    finally:
        _stop.reset(token)


def bar(text: str, total: int, done: int = 0, *, items: Iterable[Any] | None = None) -> Any:
    """A `tqdm.tqdm` that vanishes when its block ends; shown only by the first process, if stderr is a terminal."""
    from tqdm import tqdm

    return tqdm(
        items,
        desc=text,
        total=total,
        initial=done,
        leave=False,
        delay=DELAY_S,
        dynamic_ncols=True,
        disable=not _shown(),
        bar_format="{desc}: {n_fmt}/{total_fmt} {bar} {elapsed}, {remaining} left",
    )


def track(items: Sequence[T], text: str) -> Iterator[T]:
    """The items one by one, with a bar if one can be shown; raises `Stopped` once a `stoppable` block should end."""
    event = _stop.get()
    has_bar = event is None and len(items) > 1 and _shown()
    for item in bar(text, len(items), items=items) if has_bar else items:
        if event is not None and event.is_set():
            raise Stopped
        yield item


def spread(work: Callable[[T], R], items: Sequence[T], text: str) -> Iterator[R]:
    """What work that releases Python's lock makes of each item, in order, with a bar as `track` shows it.

    There are as many threads as `OMP_NUM_THREADS` says, or else cores; in a `stoppable` block only the caller's, since
    the end of the process waits for all work that other threads were given.
    """
    limit = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(limit) if limit.isdecimal() else os.cpu_count() or 1
    if min(cores, len(items)) < 2 or _stop.get() is not None:
        yield from map(work, track(items, text))
        return
    threads = ThreadPoolExecutor(min(cores, len(items)))
    try:
        for _, result in zip(track(items, text), threads.map(work, items), strict=True):
            yield result
    finally:
        threads.shutdown(cancel_futures=True)


def _shown() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
