"""Writes a page of the documentation as a notebook: `python docs/notebook.py` makes examples/tutorial.ipynb.

The commands of a page are typed at the root of a clone, in an environment that has been made; so the section on the
installation stays text, and the notebook begins in the folder above its own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_PARTS = re.compile(r'^```(bash|python|yaml)(?: title="([^"]+)")?\n(.*?)^```$\n?', re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)]+)\)")


def notebook_of(page: str) -> str:
    """A page of docs/ as the text of an .ipynb file."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = _LINK.sub(r"](../docs/\1)", text)
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str) -> None:
        if source.strip():
            lines = source.strip("\n").splitlines(keepends=True)
            cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines}
            cells.append(cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []})

    end = 0
    for match in _PARTS.finditer(text):
        language, title, body = match.groups()
        if "pip install" in body:
            continue
        add("markdown", text[end : match.start()])
        end = match.end()
        if title is not None:
            add("code", f"%%writefile {title}\n{body}")
        else:
            add("code", body if language == "python" else re.sub(r"^", "!", body.strip(), flags=re.MULTILINE))
        if len(cells) == 2:
            cells[1]["source"] = ["%cd ..\n", *cells[1]["source"]]
    add("markdown", text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (ROOT / "examples" / "tutorial.ipynb").write_text(notebook_of("tutorial.md"), encoding="utf-8")
