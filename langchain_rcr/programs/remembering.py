"""A cache for functions of texts, bounded in characters: the result for a single answer may take 100 MB."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
_EACH = 100
"""What a call counts for in characters, besides its texts."""


def remembered(most: int) -> Callable[[F], F]:
    """Return a decorator that remembers a function's results for the latest distinct calls.

    Threads may call the function at the same time; two that ask for the same new result may both compute it.

    Args:
        most: characters in the string arguments of all remembered calls, as results take memory in proportion. A call
            that exceeds it alone isn't remembered.
    """

    def decorate(function: F) -> F:
        # A dict takes time to find its first key where many are gone.
        kept = OrderedDict[tuple[Any, ...], tuple[Any, int]]()
        lock, held = Lock(), 0

        def forked() -> None:
            nonlocal lock
            lock = Lock()  # nobody in this process would release the old one

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=forked)

        @wraps(function)
        def call(*arguments: Any) -> Any:
            nonlocal held
            found = kept.get(arguments)  # nothing is moved, so no lock is needed
            if found is not None:
                return found[0]
            value = function(*arguments)
            size = _EACH + sum(len(each) for each in arguments if isinstance(each, str))
            if size <= most:
                with lock:
                    held += 0 if arguments in kept else size
                    kept[arguments] = value, size
                    while held > most:
                        held -= kept.popitem(last=False)[1][1]
            return value

        return cast("F", call)

    return decorate
