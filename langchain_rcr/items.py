"""What an encoder reads: a question alone (a query) or a question with its program (an example)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One text to encode.

    Args:
        source: the question.
        target: the program; empty for a query, whose program is unknown.
    """

    source: str
    target: str = ""

    @property
    def text(self) -> str:
        """What a text encoder reads: the question and, on a line of its own, the program if there is one."""
        return f"{self.source}\n{self.target}" if self.target else self.source
