"""One event loop on its own thread, where async clients live.

A client's connections belong to the loop that opened them, but callers come from threads and short-lived loops.
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
        self.loop = asyncio.SelectorEventLoop()  # psycopg doesn't work on Windows' default kind
        # Models without async methods block one thread each.
        self.loop.set_default_executor(ThreadPoolExecutor(_THREADS, "langchain-rcr"))
        self.at_end: set[Callable[[], Coroutine[Any, Any, None]]] = set()
        """Awaited before the loop ends, to close connections."""
        self._thread = threading.Thread(target=self.loop.run_forever, name="langchain-rcr", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on this loop."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # closed, as the process is ending
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Block until a coroutine on this loop is done; cancels it if the caller is interrupted."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """`run` for a caller on another event loop."""
        return await asyncio.wrap_future(self.submit(work))

    def stop(self) -> None:
        """End the loop and its thread, after `at_end`."""
        with contextlib.suppress(Exception):
            self.submit(self._end()).result(_LONGEST_END_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_LONGEST_END_S)
        if not self.loop.is_running():
            self.loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1)
        for close in tuple(self.at_end):
            await close()


_lock = threading.Lock()
_current: BackgroundLoop | None = None
_of_parents: list[BackgroundLoop] = []
"""Kept after a fork: closing the parent's loop would take the parent's sockets out of its selector."""


def background() -> BackgroundLoop:
    """The loop of this process; starts at the first call."""
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
