"""`make fuzz`, `make kills` and `make soak` on a few inputs."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
from places import TESTS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def in_their_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(TESTS / "harness"), *sys.path])


@pytest.mark.parametrize("target", ["parsers", "answers", "filters", "results", "groups", "keys"])
def test_fuzz(target: str) -> None:
    fuzz = importlib.import_module("fuzz")
    for seed in range(20):
        assert fuzz.run(target, seed)[2] is None


def test_what_the_fuzzed_checkpoints_patch_is_there(tmp_path: Path) -> None:
    """Their own inputs take too long here."""
    (tmp_path / "tri_encoder.json").write_text("{}")
    with importlib.import_module("fuzz").forged(tmp_path):
        pass


def test_soak() -> None:
    soak = importlib.import_module("soak")
    assert soak.at_once("memory", soak.MemoryIndex(), 5)
    assert soak.tenants("memory", soak.MemoryIndex(), 50)
    assert soak.changes("memory", soak.MemoryIndex(), 0.2)
    assert soak.changes("vector store", soak.VectorStoreIndex(soak.InMemoryVectorStore), 0.2, during=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_run_killed_20_times_ends_like_an_undisturbed_one_and_asks_nothing_that_was_answered(tmp_path: Path) -> None:
    """Weights, training states, losses, picks and figures: see `kills.left`."""
    stages = importlib.import_module("kills").killed(tmp_path, 20)
    assert stages["sft"] > 0
    assert stages["grpo"] > 5
