"""Results of functions of texts, remembered within a number of bytes: what is read of one answer may take 100 MB."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def remembered(max_bytes: int) -> Callable[[F], F]:
    """Return a decorator that remembers a function's results, of the latest calls that were new.

    Threads may call the function at the same time; two that ask for the same new result may both compute it.

    Args:
        max_bytes: of the results, of all that they refer to and of the strings among the arguments together, as if no
            two results shared anything. A result that takes more by itself isn't kept.
    """

    def decorate(function: F) -> F:
        kept: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        lock, held = Lock(), 0

        @wraps(function)
        def call(*arguments: Any) -> Any:
            nonlocal held
            found = kept.get(arguments)  # nothing is moved, so nothing is locked
            if found is not None:
                return found[0]
            value = function(*arguments)
            size = _size([value, *(each for each in arguments if isinstance(each, str))], max_bytes)
            if size <= max_bytes:
                with lock:
                    held += size - kept.pop(arguments, (None, 0))[1]
                    kept[arguments] = value, size
                    while held > max_bytes:
                        held -= kept.popitem(last=False)[1][1]
            return value

        return cast("F", call)

    return decorate


def _size(value: object, most: int) -> int:
    """Bytes of a value and of all that it refers to, save for classes; above `most`, the counting stops."""
    level, total = [value], 0
    while level and total <= most:
        total += sum(map(sys.getsizeof, level))
        level = [each for each in gc.get_referents(*level) if not isinstance(each, type)]
    return total
