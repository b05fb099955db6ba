"""Results of functions of texts, remembered for so many characters: what is read of one answer may take 100 MB."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
_EACH = 100
"""Characters that a call counts for beside those of its texts."""


def remembered(most: int) -> Callable[[F], F]:
    """Return a decorator that remembers a function's results, of the latest calls that were new.

    Threads may call the function at the same time; two that ask for the same new result may both compute it.

    Args:
        most: characters of the strings among the arguments of all calls that are remembered; what is read of a text
            takes memory in proportion. A call with more by itself isn't remembered.
    """

    def decorate(function: F) -> F:
        kept: dict[tuple[Any, ...], tuple[Any]] = {}
        lock, held = Lock(), 0

        @wraps(function)
        def call(*arguments: Any) -> Any:
            nonlocal held
            found = kept.get(arguments)  # nothing is moved, so nothing is locked
            if found is not None:
                return found[0]
            value = function(*arguments)
            if _size(arguments) <= most:
                with lock:
                    held += 0 if arguments in kept else _size(arguments)
                    kept[arguments] = (value,)
                    while held > most:
                        oldest = next(iter(kept))
                        del kept[oldest]
                        held -= _size(oldest)
            return value

        return cast("F", call)

    return decorate


def _size(arguments: tuple[Any, ...]) -> int:
    return _EACH + sum(len(each) for each in arguments if isinstance(each, str))
