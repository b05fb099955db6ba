"""The harnesses of `make fuzz`, `make kills` and `make soak` still run, on a few inputs."""

from __future__ import annotations

import importlib
import sys

import pytest
from places import TESTS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def in_their_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(TESTS / "harness"), *sys.path])


@pytest.mark.parametrize("target", ["parsers", "answers", "filters", "groups", "keys"])
def test_fuzz(target: str) -> None:
    fuzz = importlib.import_module("fuzz")
    for seed in range(20):
        assert fuzz.run(target, seed)[2] is None


def test_soak() -> None:
    soak = importlib.import_module("soak")
    assert soak.at_once("memory", soak.MemoryIndex(), 5)
    assert soak.tenants("memory", soak.MemoryIndex(), 50)
    assert soak.changes("memory", soak.MemoryIndex(), 0.2)
    assert soak.changes("vector store", soak.VectorStoreIndex(soak.InMemoryVectorStore), 0.2, during=False)


def test_kills_can_be_started() -> None:
    assert importlib.import_module("kills").CONFIG
