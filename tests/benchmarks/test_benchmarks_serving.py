"""benchmarks/serving.py: its sides do the same work, its ratios are of what they name."""

import importlib

import numpy as np
import pytest


def picks(retriever, query="0"):
    return [int(one["source"]) for one in retriever.select_examples({"source": query})]


@pytest.mark.slow
def test_both_sides_pick_the_same(script):
    vectors, queries = script.dense(70)
    plain = script.plain(np.asarray(vectors.candidate), np.asarray(vectors.context), queries[0])
    assert picks(script.retriever(vectors, queries)) == plain
    has, needs = script.structures(90)
    dense = np.asarray(has.candidate)
    ours = script.retriever(has, needs)
    for question in (0, 5):
        plain = script.plain(dense, np.asarray(has.context), needs[question], saturating=True)
        assert picks(ours, str(question)) == plain


def test_drawn_pools_look_as_real_ones(script):
    """By the figures of Spider's that they imitate."""
    pool, questions = script.dense(3_000)
    assert pool.context is pool.candidate
    rows = pool.candidate
    energy = np.cumsum(np.linalg.eigvalsh(rows.T @ rows)[::-1])
    np.testing.assert_allclose(energy[[7, 31, 127]] / energy[-1], [0.357, 0.602, 0.874], atol=0.06)
    logits = np.sort(questions @ rows.T)[:, ::-1].mean(axis=0)
    np.testing.assert_allclose(logits[[10, 100]] / logits[0], [0.62, 0.43], atol=0.1)

    pool, needs = script.structures(3_000)
    has = pool.candidate
    np.testing.assert_array_equal(has.columns, pool.context.columns)
    others = [has, *(script.structures(3_000, seed)[0].candidate for seed in (1, 2))]  # each has but 15 subjects
    often = np.mean([np.sort(np.bincount(one.columns, minlength=one.dim))[::-1] / len(one) for one in others], axis=0)
    np.testing.assert_allclose(often[[1, 7, 31, 127]], [0.927, 0.4, 0.208, 0.094], atol=0.13)
    assert 25 < np.diff(has.starts).mean() < 45
    assert script.structures(3_000)[1].tolist() == needs.tolist()


@pytest.mark.slow
def test_loading_reads_a_real_checkpoint(script, monkeypatch):
    monkeypatch.setattr(script, "_PROCESSES", 1)
    figures = script.loading(40)
    assert figures["loading: ours"]["ms"] > 0
    assert figures["loading: ours"]["mb"] > 10


@pytest.mark.slow
def test_every_side_runs_and_its_time_is_cpu_time(script, monkeypatch):
    monkeypatch.setattr(script, "_MOST", 2)
    monkeypatch.setattr(script, "_LEAST", 2)
    figures = script.selecting(120)
    large = importlib.import_module("large")
    by_lists = large.searching(120)
    monkeypatch.setattr(large, "_WHOLE", 100)
    mapped = large.searching(120)
    assert mapped.keys() == {"ours, structures", "ours, structures, in inverted lists"}
    for found, kinds in ((by_lists, ("dense", "structures")), (mapped, ("structures",))):
        for kind in kinds:  # so few are searched in full, whatever the kind
            assert found[f"ours, {kind}, in inverted lists"]["lost"] == pytest.approx(0, abs=1e-6)
    asked = {"ours, dense", "ours, structures", "one exact FAISS scan", "ours, structures, 64 together"}
    assert asked <= figures.keys()
    assert all(0 < row["low"] <= row["ms"] <= row["high"] for row in figures.values())


def test_ratios_by_hand(script):
    def row(ms):
        return {"ms": ms, "low": ms, "high": ms}

    few = {"ours, dense": row(1.0), "LangChain MMR": row(4.0), "ours, dense, 64 together": row(64.0)}
    table = script.markdown({"440": few, "3000": {"ours, dense": row(2.0)}})
    assert "| ours, dense : LangChain MMR | 0.25 | – |" in table
    assert "| ours, dense, 64 together : 64 × LangChain MMR | 0.25 | – |" in table
    assert "| ours, dense | 1 (1–1) | 2 (2–2) |" in table


@pytest.mark.slow
def test_how_cost_grows_is_drawn_from_what_was_measured(script):
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
    (only,) = scaling.alone(results).axes
    assert {line.get_label(): line.get_xydata().tolist() for line in only.lines} == lines[0]
