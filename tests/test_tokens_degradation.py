"""benchmarks/degradation.py: what is broken, what is kept, what a row says; a run whose programs are all broken."""

import importlib
from pathlib import Path

import pytest
from rcr_trainer.data import covr_split, read_split, write_split

from langchain_rcr.programs import ProgramSpec

pytestmark = pytest.mark.slow

SPEC = ProgramSpec()
SPLIT = covr_split("110", 0, 40, 8, dev=5)


@pytest.fixture
def degradation(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    return importlib.import_module("degradation")


def test_a_program_is_cut_off_where_it_does_not_parse(degradation):
    cuts = [degradation.cut_off("f(x, g(y))", where / 10, SPEC) for where in range(10)]
    assert cuts == ["f(", "f(", "f(x", "f(x,", "f(x,", "f(x, g", "f(x, g(", "f(x, g(", "f(x, g(y", "f(x, g(y)"]
    assert degradation.cut_off("f", 0.5, SPEC) == "f ("


def test_smaller_pools_and_shares_are_parts_of_larger_ones(degradation):
    def made(size, share, seed=0):
        return degradation.degraded(SPLIT, size, share, seed, SPEC)

    few, more, everything = (made(size, 0).train for size in (10, 20, None))
    assert (len(few), len(more), everything) == (10, 20, SPLIT.train)
    assert set(few) < set(more)
    broken = [{e.id for e in made(None, share).train if SPEC.tree(e.target) is None} for share in (0.1, 0.5, 1.0)]
    assert [len(ids) for ids in broken] == [4, 20, 40]
    assert broken[0] < broken[1] < broken[2]
    half, other = made(None, 0.5), made(None, 0.5, seed=1)
    assert half.train == made(None, 0.5).train != other.train
    assert (half.dev, half.test) == ([], SPLIT.test)
    assert half.meta["how"] == "40 of 40 training examples, 20 broken"
    assert SPLIT.dev


def test_the_table_by_hand(degradation):
    def figures(best, ours, oracle, gap, name="mmr"):
        return {"best_plain": best, "best_plain_name": name, "ours": ours, "oracle": oracle, "gap_closed": gap}

    results = {
        "standard": {
            "pool of 50": {"as read": {"0": figures(50, 60, 70, 0.5), "1": figures(52, 62, 72, 0.5, "dpp")}},
            "100% broken": {"as read": {"0": figures(80, 80, 80, None)}, "as meant": {"0": figures(1, 2, 3, 0.5)}},
        }
    }
    assert degradation.markdown(results).splitlines() == [
        "| split | condition | counted | best plain | ours | oracle | gap |",
        "|---|---|---|---|---|---|---|",
        "| standard | pool of 50 | – | 51.0 ± 1.4 (mmr, dpp) | 61.0 ± 1.4 | 71.0 ± 1.4 | 0.50 ± 0.00 |",
        "| standard | 100% broken | as read | 80.0 (mmr) | 80.0 | 80.0 | – |",
        "| standard | 100% broken | as meant | 1.0 (mmr) | 2.0 | 3.0 | 0.50 |",
    ]


def test_a_run_whose_programs_are_all_broken(degradation, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_split(tmp_path / "whole", SPLIT)
    monkeypatch.setattr(degradation, "settings_of", lambda *_: {"data": {"directory": str(tmp_path / "whole")}})
    found = degradation.run_one("standard", "100% broken", 0, tmp_path, 1, "lexical")
    assert set(found) == {"as read", "as meant"}
    # The same picks, counted by token n-grams and by the unbroken programs.
    assert found["as read"]["ours"] != found["as meant"]["ours"]
    for figures in found.values():
        assert 0 < figures["best_plain"] <= figures["oracle"] <= 100
        assert 0 < figures["ours"] <= figures["oracle"]
    assert read_split("runs/degradation/standard-100-broken-0-lexical/data").meta["program_language"] == "tokens"
    assert degradation.run_one("standard", "100% broken", 0, tmp_path, 1, "lexical") == found
