"""Every promise of docs/reliability.md names a test that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")


def names_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            named |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named.add(node.name)
    return named


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::([\w:]+)`", PAGE)
    assert len(named) > 30
    assert [f"{file}::{test}" for file, test in named if test not in names_in(TESTS / file)] == []


def test_every_promise_names_a_test() -> None:
    promises = re.findall(r"^\| (.*) \| (.*) \|$", PAGE.partition("## Harnesses")[0], re.MULTILINE)
    assert [promise for promise, test in promises if promise != "promise" and "::test_" not in test] == []
