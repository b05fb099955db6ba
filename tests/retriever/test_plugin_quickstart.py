"""examples/quickstart.py, as a user runs it."""

from pathlib import Path

import pytest
import warm
from places import ROOT
from toys import reseal

from langchain_rcr import ExamplePool, TriEncoder
from langchain_rcr.pool.saved import write_jsonl

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "examples" / "quickstart.py"


def test_it_shows_the_prompt_and_finds_what_it_adds(tmp_path: Path) -> None:
    animals = ("cat", "dog", "mouse", "animal", "square cat")
    pool = ExamplePool([{"source": f"there is a {name}", "target": f"exists ( find ( {name} ) )"} for name in animals])
    encoder = TriEncoder.build("lexical", pool.items(), dim=64)
    encoder.save_pretrained(tmp_path / "runs" / "demo" / "checkpoint")
    write_jsonl(tmp_path / "runs" / "demo" / "checkpoint" / "pool.jsonl", pool)
    reseal(tmp_path / "runs" / "demo" / "checkpoint")
    done = warm.run(SCRIPT, "there is a square mouse", cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    prompt, picks = done.stdout.split("One example added.")
    assert prompt.count("Source: ") == 5
    assert "Target: exists ( find ( mouse ) )\n" in prompt
    assert prompt.rstrip().endswith("Source: there is a square mouse\nTarget:")
    assert picks.count("← just added") == 1


def test_without_a_run_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = warm.run(SCRIPT, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "quickstart: there is no run in runs/demo: `make demo` makes one, --run names another"
    ]


def test_a_folder_that_is_no_checkpoint_is_named_in_one_line(tmp_path: Path) -> None:
    done = warm.run(SCRIPT, "--run", tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"quickstart: {tmp_path} is not a complete checkpoint")
