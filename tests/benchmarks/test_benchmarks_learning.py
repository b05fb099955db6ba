"""benchmarks/learning.py: its table and what picks show, by hand."""

from typing import Any

import numpy as np
import pytest
from scipy import sparse


def test_the_table_counts_intervals_that_hold_the_truth(script: Any) -> None:
    results = {
        "true": {"lam 0.5": {"gain": 0.01, "reached": 0.98}, "lam 2": {"gain": -0.02, "reached": 1.0}},
        "judged": [
            {"lam 0.5": [0.02, 0.0, 0.04], "lam 2": [0.0, -0.03, 0.01]},
            {"lam 0.5": [0.03, 0.02, 0.04], "lam 2": [0.02, 0.01, 0.03]},
        ],
        "learnt": [{"variant": {}, "true": 0.0}, {"variant": {"lam": 0.5}, "true": 0.01}],
    }
    text = script.markdown(results)
    assert "| lam 0.5 | +0.0100 | 0.980 | 1 of 2 | 0.0300 | 0 |" in text
    assert "| lam 2 | -0.0200 | 1.000 | 1 of 2 | 0.0300 | 1 |" in text
    assert text.endswith("1 of 2 logs led to a change, which earns +0.0100 to +0.0100 more.")


def test_a_missing_file_is_one_line(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["learning.py", "--calibrated", "gone.json", "--out", "out.json"])
    with pytest.raises(SystemExit, match="2"):
        script.arguments()
    assert capsys.readouterr().err.endswith("error: gone.json: No such file or directory\n")


def test_picks_show_structures_of_the_gold_program(script: Any) -> None:
    traffic = object.__new__(script.Traffic)
    gold, pool = ([[1, 1, 0], [0, 0, 0]], [[1, 0, 0], [1, 0, 1], [0, 1, 0]])
    traffic.sides = [(sparse.csr_array(np.array(gold, dtype=float)), sparse.csr_array(np.array(pool, dtype=float)))]
    shown = traffic.shown(np.array([0, 0, 1]), np.array([[0, 1], [1, 2], [0, 1]]))
    np.testing.assert_allclose(shown, [[1, 0.5, 0], [1, 1, 1], [1, 0, 0]])
