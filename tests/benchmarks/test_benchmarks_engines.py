"""benchmarks/engines.py: exact engines pick what memory picks, engines that are missing are left out, the table."""

import pytest

from langchain_rcr.errors import MissingExtraError


@pytest.mark.slow
def test_figures_and_table(script, monkeypatch, capsys):
    def missing():
        raise MissingExtraError("nothing", "none")

    monkeypatch.setattr(script, "DIM", 16)
    monkeypatch.setitem(script.ENGINES, "missing", missing)
    results = script.run(120, ["faiss-flat", "missing"], seed=0)
    assert list(results) == ["memory", "faiss-flat"]
    assert all(row["recall"] == row["same"] == 1 for row in results.values())
    assert all(row["ms_alone"] > 0 and row["ms_of_64"] > 0 and row["add_s"] > 0 for row in results.values())
    assert "missing is left out: nothing is not installed" in capsys.readouterr().err
    row = {"add_s": 1.25, "ms_alone": 0.5, "ms_of_64": 0.0625, "recall": 0.955, "same": 0.9}
    table = script.markdown({"440": {"memory": row}, "100000": {"memory": row, "other": row}})
    assert table.splitlines() == [
        "| engine | 440: CPU ms alone | of 64 | recall | add, s | 100,000: CPU ms alone | of 64 | recall | add, s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| memory | 0.50 | 0.062 | 95.5 % | 1.2 | 0.50 | 0.062 | 95.5 % | 1.2 |",
        "| other | – | – | – | – | 0.50 | 0.062 | 95.5 % | 1.2 |",
    ]
