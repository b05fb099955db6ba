"""Sets of names, such as the tools that a request needs: a JSON list of strings, as in `["search_flights", "book"]`.

The tree is a node `set` with the names below it, sorted, each once. Neither order nor repetition means anything, so
that local structures are cut to single labels (`max_size` 1).
"""

from __future__ import annotations

import json

from langchain_rcr.programs.languages import About
from langchain_rcr.programs.tree import Tree


class SetParser:
    """Parses one JSON list of strings (see the module's rules)."""

    about = About(on_one_line=True, is_json=True, fences=("json",))

    def parse(self, text: str) -> Tree | None:
        """Return the set's tree, or None for what is not a JSON list of strings."""
        try:
            names = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
            return None
        return Tree("set", tuple(Tree(name) for name in sorted({*names})))
