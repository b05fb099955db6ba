"""Progress bars with the time left, on stderr, only where that is a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

DELAY_S = 1.0
"""Seconds that work may take before a bar appears: what is quick shows none."""


def bar(text: str, total: int, done: int = 0, *, items: Iterable[Any] | None = None) -> Any:
    """Count steps on a bar.

        with bar("adding", len(items)) as shown:
            shown.update(n)  # n more are done

    It is removed when the block ends. Of several processes that torchrun started, the first alone shows bars.

    Args:
        text: what is being done.
        total: steps in all.
        done: steps that were done before, in an earlier process say.
        items: what the bar gives one by one, if it is iterated over.

    Returns:
        A `tqdm.tqdm`; one that shows nothing where stderr is not a terminal.
    """
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


def track(items: Sequence[T], text: str) -> Iterable[T]:
    """The items one by one, with a bar; costs nothing where there is nothing to show.

    Args:
        items: what a loop goes over.
        text: what is being done.
    """
    if len(items) < 2 or not _shown():
        return items
    shown: Iterable[T] = bar(text, len(items), items=items)
    return shown


def _shown() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
