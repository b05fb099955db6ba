"""One event loop for the whole process, in a thread of its own.

Clients for HTTP keep open connections that belong to the loop that made them, and share those between models of one
server. With a loop for each batch (`asyncio.run`) the second batch fails; with one for all, everything fits.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_THREADS = 256
"""Calls of models that know no async may run at once; threads are made when needed."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the loop; may be called from any thread but the loop's own."""
    global _loop  # noqa: PLW0603
    with _lock:
        if _loop is None:
            _loop = _begin()
    return asyncio.run_coroutine_threadsafe(work, _loop)


def _begin() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, "rcr-llm"))
    thread = threading.Thread(target=loop.run_forever, name="rcr-llm-loop", daemon=True)
    thread.start()

    process = os.getpid()

    async def wind_up() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        loop.stop()

    def end() -> None:
        if os.getpid() != process:
            return
        asyncio.run_coroutine_threadsafe(wind_up(), loop)
        thread.join(5)
        if not thread.is_alive():
            loop.close()

    atexit.register(end)
    return loop


def _forget() -> None:
    """A forked child has none of its parent's threads: it gets a loop of its own."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
