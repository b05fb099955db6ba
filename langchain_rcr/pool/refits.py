"""Work on stores in the background: fits while so much was added that one is worth its time."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from langchain_rcr.basics.progress import Stopped, stoppable

if TYPE_CHECKING:
    from langchain_rcr.pool.store import ExampleStore

logger = logging.getLogger(__name__)

_BURST_S = 1.0
"""After the addition that asks for a fit: what comes in a burst is fitted to at once."""
_REST = 9.0
"""Times as long as the last fit took that the next one waits: however much is added, fits take a tenth of the time."""
_LONGEST_END_S = 10.0
"""That the end of the process waits for a fit to notice it."""
_ending = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Refits:
    """Keeps a store fitted, one fit at a time, until one fails."""

    def __init__(self, store: ExampleStore) -> None:
        self._store = weakref.ref(store)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pause = _BURST_S
        self.failed = False

    def begin(self) -> None:
        """See to a fit soon, unless one is on its way."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # not alive: it was left behind by a fork
                self._thread = started(self._run, "a refit in the background failed; refit() tries again")

    def _run(self) -> None:
        while not _ending.wait(self._pause):
            store = self._store()
            with self._lock:
                if store is None or self.failed or not store.needs_refit:
                    self._thread, self._pause = None, _BURST_S
                    return
            began = time.monotonic()
            try:
                store.refit()
            except Exception:
                self.failed = True
                raise
            self._pause = max(_BURST_S, _REST * (time.monotonic() - began))
            del store


def started(work: Callable[[], None], failure: str) -> threading.Thread:
    """A thread that does some work, and is told to stop when the process ends; a failure is logged with this line."""

    def run() -> None:
        try:
            with suppress(Stopped), stoppable(_ending):
                work()
        except Exception:
            if not _ending.is_set():  # then all sorts of things fail
                logger.warning("%s", failure, exc_info=True)

    thread = threading.Thread(target=run, name="langchain-rcr-store", daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@atexit.register
def _stop() -> None:
    _ending.set()
    until = time.monotonic() + _LONGEST_END_S
    for thread in tuple(_threads):
        thread.join(max(0.0, until - time.monotonic()))
