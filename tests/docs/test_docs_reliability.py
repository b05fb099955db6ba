"""Every promise of docs/reliability.md and SECURITY.md names a test that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from places import TESTS

PAGES = [
    (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8").partition("## Harnesses")[0],
    (TESTS.parent / "SECURITY.md").read_text(encoding="utf-8"),
]


def names_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            named |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named.add(node.name)
    return named


@pytest.mark.parametrize("page", PAGES, ids=["reliability", "security"])
@pytest.mark.slow
def test_every_promise_names_tests_that_exist(page: str) -> None:
    promises = re.findall(r"^\| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert len(promises) > 15
    assert [promise for promise, test in promises if promise != "promise" and "::test_" not in test] == []
    named = re.findall(r"`(test_\w+\.py)::([\w:]+)`", page)
    assert [f"{file}::{test}" for file, test in named if test not in names_in(next(TESTS.rglob(file)))] == []
