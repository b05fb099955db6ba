"""The pages of the documentation as what they have the reader do: commands, Python, files to write.

A block's language says what it is. ``bash``: commands, one a line, as typed. ``python``: goes on from the Python before
it on the page. With ``title="FILE"`` a block is a file; a second one of the same title is added to it. ``console``:
commands that need a server or a network, for the reader alone. ``json``, ``sql``, ``text``, ``diff``:
shown.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from places import ROOT

LANGUAGES = {"bash", "console", "diff", "json", "python", "sql", "text", "yaml"}
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        language: what it is.
        title: the file that it is, if it is one.
        text: what stands in it.
    """

    language: str
    title: str | None
    text: str

    @property
    def commands(self) -> list[str]:
        """Those of a block for the shell: continued lines joined, comments dropped."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if shlex.split(line, comments=True)]


def read_page(path: str) -> str:
    """A page, by its path in the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page, from top to bottom."""
    return [Block(language, title or None, body) for language, title, body in _FENCE.findall(text)]


def pages() -> list[str]:
    """All pages with blocks."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in paths if blocks_of(path.read_text(encoding="utf-8"))]
