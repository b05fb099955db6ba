"""What an encoder reads: a question alone (a query) or a question with its program (an example)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EXAMPLE_TEMPLATE = "Source: {source}\nTarget: {target}"
"""How a prompt shows an example (paper, appendix D)."""

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


def compose(picks: Sequence[Item], query: str) -> str:
    """The prompt of the paper's appendix D: the picks in order, then the question without its program.

    Args:
        picks: the examples, first to last.
        query: the question.

    Returns:
        "Source: …" and "Target: …" lines; ends with "Target:". The same text as `few_shot_prompt` makes.
    """
    shown = [f"Source: {item.source}\nTarget: {item.target}\n" for item in picks]
    return "".join([*shown, f"Source: {query}\nTarget:"])
