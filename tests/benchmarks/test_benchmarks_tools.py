"""benchmarks/tools.py: its splits, and its figures by hand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def test_the_figures_by_hand(script: Any) -> None:
    found = script.figures([["a", "x", "b", "c", "y"], ["x", "y", "z", "a", "b"]], [["a", "b", "c"], ["a"]])
    ideal = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    assert found["Recall@3"] == pytest.approx(100 * (2 / 3 + 0) / 2)
    assert found["Recall@5"] == pytest.approx(100)
    assert found["NDCG@3"] == pytest.approx(100 * (1 + 1 / math.log2(4)) / ideal / 2)
    assert found["NDCG@5"] == pytest.approx(50 * ((1.5 + 1 / math.log2(5)) / ideal + 1 / math.log2(5)))
    assert (found["COMP@3"], found["COMP@5"]) == (0, 100)


def test_each_tool_of_a_set_that_is_held_out_stays_in_another(script: Any) -> None:
    pairs = [("q", tuple(sorted(names))) for names in ("ab", "bc", "ca", "d", "ad", "e") for _ in range(2)]
    for seed in range(3):
        train, asked = script.splits("held-out sets", pairs, [], [*"abcde"], seed)
        out, kept = {names for _, names in asked}, {names for _, names in train}
        assert out
        assert not out & kept
        assert {name for names in out for name in names} <= {name for names in kept for name in names}
        assert len(train) + len(asked) == len(pairs)


def test_requests_of_tools_that_are_held_out_train_nothing(script: Any) -> None:
    pairs = [("q", (str(n), str(n + 1))) for n in range(60)]
    train, asked = script.splits("held-out tools", pairs, [], [str(n) for n in range(61)], 0)
    seen = {name for _, names in train for name in names}
    assert all(set(names) - seen for _, names in asked)
    assert len(train) + len(asked) == 60


def test_figures_of_several_seeds(script: Any) -> None:
    assert script.spread([50.0, 50.0]) == "50.0"
    assert script.spread([40.0, 50.0, 60.0]) == "50.0 (40.0 to 60.0)"


def test_stored_vectors_are_those_of_the_text_encoder(script: Any, tmp_path: Path) -> None:
    asked: list[str] = []

    class Reader:
        dim, symmetric = 2, True

        def read(self, texts: list[str]) -> tuple[Any, list[Any]]:
            asked.extend(texts)
            vectors = np.array([[len(text), 1] for text in texts], dtype=np.float32)
            return vectors, [np.full((len(text), 2), len(text), dtype=np.float32) for text in texts]

    for _ in range(2):
        stored = script.StoredVectors(Reader(), ["a", "bcd"], tmp_path / "vectors")
        vectors, tokens = stored.read(["bcd", "ef", "a", "ef"])
        assert vectors.tolist() == [[3, 1], [2, 1], [1, 1], [2, 1]]
        assert [(each.shape, each.max()) for each in tokens] == [((n, 2), n) for n in (3, 2, 1, 2)]
        assert stored.embed([]).shape == (0, 2)
    assert asked == ["a", "bcd", "ef", "ef"]
