"""The benchmark of what users meet first, on toy data."""

from itertools import product
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_figures_of_one_data_set(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "ADDED", 10)
    words = ("how many", "name the"), ("red", "round", "big", "old"), ("cats", "dogs", "mice", "owls", "bats")
    rows = [{"source": " ".join(each), "target": f"{each[0][:3]}({each[1]}({each[2]}))"} for each in product(*words)]
    every = {
        "animals": (rows, ["name the old bats", "how many big red owls"], "functional"),
        "covr-1": ([], ["what is the interest rate", "when was the bank founded"], "functional"),
    }
    found = script.measured("animals", every, 0.05)
    assert (found["fitted to"], found["own"], found["kept"]) == (30, 10, 100)
    assert (found["others"], found["everyday"]) == ({"covr-1": 100.0}, 100.0)
    assert found["pickle_mb"] < found["folder_mb"] + 0.01
