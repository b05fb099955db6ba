"""The benchmark of what users meet first, on toy data."""

import sys
from itertools import product
from typing import Any

import pytest
from places import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def first_use(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import first_use

    yield first_use
    for name in ("first_use", "common"):
        sys.modules.pop(name, None)


def test_figures_of_one_data_set(first_use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "ADDED", 10)
    words = ("how many", "name the"), ("red", "round", "big", "old"), ("cats", "dogs", "mice", "owls", "bats")
    rows = [{"source": " ".join(each), "target": f"{each[0][:3]}({each[1]}({each[2]}))"} for each in product(*words)]
    every = {
        "animals": (rows, ["name the old bats", "how many big red owls"], "functional"),
        "covr-1": ([], ["what is the interest rate", "when was the bank founded"], "functional"),
    }
    found = first_use.measured("animals", every, 0.05)
    assert (found["fitted to"], found["own"], found["kept"]) == (30, 10, 100)
    assert (found["others"], found["everyday"]) == ({"covr-1": 100.0}, 100.0)
    assert found["pickle_mb"] < found["folder_mb"] + 0.01
