"""One event loop on a thread of its own, for engines whose clients are async.

A client's connections belong to the event loop they were opened on, but callers come from threads, from any number of
loops and, with `asyncio.run`, from loops that are gone a moment later. So the clients live here, and callers hand their
coroutines over.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_LONGEST_END_S = 5.0
_THREADS = 256


class BackgroundLoop:
    """An event loop that runs until the process ends; see `background`."""

    def __init__(self) -> None:
        # psycopg can't work with the other kind, which is Windows' default.
        self.loop = asyncio.SelectorEventLoop()
        # Models that know no async each block a thread; threads are made when needed.
        self.loop.set_default_executor(ThreadPoolExecutor(_THREADS, "langchain-rcr"))
        self.at_end: set[Callable[[], Coroutine[Any, Any, None]]] = set()
        """What to await before the loop ends: closing connections."""
        self._thread = threading.Thread(target=self._run, name="langchain-rcr", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on this loop, without waiting for it."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # closed: the process ends
            work.close()
            raise

    def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """`submit` for work without a result; dropped without an error if the process is ending."""
        with contextlib.suppress(RuntimeError):
            self.submit(work)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on this loop, from a thread that has none or may block its own.

        It is cancelled when the caller is interrupted.
        """
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """`run` for a caller on an event loop, which goes on with other work meanwhile."""
        return await asyncio.wrap_future(self.submit(work))

    def stop(self) -> None:
        """End the loop and its thread, once what is in `at_end` is done."""
        with contextlib.suppress(Exception):
            self.submit(self._end()).result(_LONGEST_END_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_LONGEST_END_S)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1)
        for close in tuple(self.at_end):
            await close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()


_lock = threading.Lock()
_current: BackgroundLoop | None = None
_of_parents: list[BackgroundLoop] = []
"""After a fork: closing one's parent's loop would take the parent's own sockets out of its selector."""


def background() -> BackgroundLoop:
    """The loop of this process, which starts at the first call."""
    global _current  # noqa: PLW0603
    with _lock:
        if _current is None:
            _current = BackgroundLoop()
        return _current


def _forked() -> None:
    global _lock, _current  # noqa: PLW0603
    _lock = threading.Lock()
    if _current is not None:
        _of_parents.append(_current)
        _current = None


@atexit.register
def _stop() -> None:
    if _current is not None:
        _current.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
