"""benchmarks/serving.py: its sides do the same work, its ratios are of what they name."""

import importlib

import numpy as np
import pytest
from places import ROOT


@pytest.fixture(scope="module")
def serving():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("serving")


def picks(retriever, query="0"):
    return [int(one["source"]) for one in retriever.select_examples({"source": query})]


@pytest.mark.slow
def test_both_sides_pick_the_same(serving):
    vectors, queries = serving.drawn(70, 0)
    plain = serving.plain(np.asarray(vectors.candidate), np.asarray(vectors.context), queries[0])
    assert picks(serving.retriever(vectors, queries)) == plain
    has, needs = serving.structures(90)
    dense = np.asarray(has.candidate)
    assert np.diff(has.candidate.starts).tolist() == [serving.COLUMNS // serving.FULL] * 90
    ours = serving.retriever(has, needs)
    for question in (0, 5):
        plain = serving.plain(dense, np.asarray(has.context), needs[question], saturating=True)
        assert picks(ours, str(question)) == plain


@pytest.mark.slow
def test_loading_reads_a_real_checkpoint(serving):
    figures = serving.loading(40)
    assert figures["loading: ours"]["ms"] > 0
    assert figures["loading: ours"]["mb"] > 10


@pytest.mark.slow
def test_every_side_runs_and_its_time_is_cpu_time(serving, monkeypatch):
    monkeypatch.setattr(serving, "_MOST", 2)
    monkeypatch.setattr(serving, "_LEAST", 2)
    figures = serving.selecting(120)
    asked = {"ours, dense", "ours, structures", "one exact FAISS scan", "ours, structures, 64 together"}
    assert asked <= figures.keys()
    assert all(0 < row["low"] <= row["ms"] <= row["high"] for row in figures.values())


def test_ratios_by_hand(serving):
    def row(ms):
        return {"ms": ms, "low": ms, "high": ms}

    few = {"ours, dense": row(1.0), "LangChain MMR": row(4.0), "ours, dense, 64 together": row(64.0)}
    table = serving.markdown({"440": few, "3000": {"ours, dense": row(2.0)}})
    assert "| ours, dense : LangChain MMR | 0.25 | – |" in table
    assert "| ours, dense, 64 together : 64 × LangChain MMR | 0.25 | – |" in table
    assert "| ours, dense | 1 (1–1) | 2 (2–2) |" in table


def test_how_cost_grows_is_drawn_from_what_was_measured(serving):
    scaling = importlib.import_module("scaling")
    sides = {f"ours, {name}, k = {k}": {"ms": 1.0 + k} for name in scaling.OURS for k in (16, 1)}
    sides |= {f"ours, {name}, 8 together": {"ms": 4.0} for name in scaling.OURS}
    sides |= {f"ours, {name}": {"ms": 2.0} for name in scaling.OURS} | {"LangChain MMR": {"ms": 3.0}}
    results = {"100": sides, "1000000": {"LangChain MMR": {"ms": 70.0}}, "600, whole calls": {"structure": {"ms": 9.0}}}
    assert scaling.by_size(results, "LangChain MMR") == ([100, 1_000_000], [3.0, 70.0])
    assert scaling.by_number(sides, "ours, dense, k = #") == ([1, 16], [2.0, 17.0])

    panels = scaling.figure(results, [{"examples": 600, "encoding_s": 4.0, "else_s": 5.0, "peak_gb": 0.9}]).axes
    lines = [{line.get_label(): line.get_xydata().tolist() for line in axes.lines} for axes in panels]
    assert lines[0]["LangChain MMR"] == [[100, 3], [1_000_000, 70]]
    assert panels[1].get_title(loc="left") == "by k, 100 examples"
    assert lines[2]["dense"] == [[1, 2], [8, 0.5]]
    assert lines[5]["all else, s"] == [[600, 5]]
