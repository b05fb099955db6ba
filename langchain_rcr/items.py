"""What an encoder reads: a question alone (a query) or a question with its program (an example)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

View = Literal["source", "target", "both"]


@dataclass(frozen=True, slots=True)
class Item:
    """One text to encode.

    Args:
        source: the question.
        target: the program; empty for a query, whose program is unknown.
    """

    source: str
    target: str = ""


def render(item: Item, view: View) -> str:
    """The text of an item that a text encoder reads.

    Args:
        item: a query or an example.
        view: the question, the program, or both on a line each.

    Returns:
        One string. A query looks the same under "source" and "both".
    """
    if view == "source" or not item.target:
        return item.source
    return item.target if view == "target" else f"{item.source}\n{item.target}"
