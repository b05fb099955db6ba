"""benchmarks/sandbox.py: seeded queries of every kind, nothing written, the table."""

import json
import sqlite3

import pytest


@pytest.mark.slow
def test_queries_figures_and_table(script, tmp_path, here, monkeypatch, capsys):
    names = ("one", "two", "three")
    for name in names:
        (tmp_path / "all" / name).mkdir(parents=True)
        connection = sqlite3.connect(tmp_path / "all" / name / f"{name}.sqlite")
        connection.executescript("CREATE TABLE t (a); INSERT INTO t VALUES (1), (2)")
        connection.close()
    rows = [{"db_id": name, "query": "SELECT count(*) FROM t"} for name in (*names, "gone")]
    (tmp_path / "train_spider.json").write_text(json.dumps(rows), encoding="utf-8")
    arguments = tmp_path, tmp_path / "all", 60, 2
    queries = script.drawn(*arguments, seed=0)
    assert queries == script.drawn(*arguments, seed=0) != script.drawn(*arguments, seed=1)
    assert {kind for _, kind, _ in queries} == {*script.MUTATORS}
    assert len({name for name, *_ in queries}) == 2
    monkeypatch.setattr(script, "SECONDS", 0.2)
    out = tmp_path / "out.json"
    flags = [f"--spider={tmp_path}", f"--databases={tmp_path / 'all'}", "--queries=60", "--number=2", f"--out={out}"]
    monkeypatch.setattr("sys.argv", ["sandbox.py", *flags])
    assert script.main() == 0
    results = json.loads(out.read_text())
    assert {each["outcome"] for each in results if each["kind"] == "gold"} == {"rows"}
    assert "rows" not in {each["outcome"] for each in results if each["kind"] == "write"}
    assert capsys.readouterr().out.splitlines()[-1].startswith("| all | 60 | ")


def test_the_table(script):
    row = {"kind": "gold", "outcome": "rows", "wall": 3.0, "own": 1.0, "cpu": 2.0, "own_cpu": 1.0}
    late = {"kind": "recursion", "outcome": "longer than 1 s", "wall": 1000.0, "own": None, "cpu": 1.0, "own_cpu": None}
    lines = script.markdown([row, {**row, "outcome": "no such table", "wall": 2.0}, late]).splitlines()
    assert lines[2] == "| gold | 2 | 1 | 0 | 1 | 1.50 | 1.95 | 1.00 | 1.00 |"
    assert lines[6] == "| recursion | 1 | 0 | 1 | 0 | – | – | – | – |"
    assert lines[-1] == "| all | 3 | 1 | 1 | 1 | 1.50 | 1.95 | 1.00 | 1.00 |"


def test_a_missing_folder_is_one_line(script, tmp_path, monkeypatch, capsys):
    flags = ["--spider=gone", f"--databases={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["sandbox.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    error = "sandbox.py: error: gone/train_spider.json: No such file or directory"
    assert capsys.readouterr().err.splitlines()[-1] == error
    (tmp_path / "train_spider.json").write_text("[]", encoding="utf-8")
    with pytest.raises(SystemExit, match=f"{tmp_path} has 0 of Spider's databases, and --number is 30"):
        script.drawn(tmp_path, tmp_path, 60, 30, 0)
