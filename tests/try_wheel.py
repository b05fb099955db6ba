"""Installs the wheel into an empty environment and serves checkpoints of the structure family over SQL with it.

    python tests/try_wheel.py dist/langchain_rcr-….whl dist/langchain_rcr-….tar.gz

What is missing there is installed as the error says, and nothing else; torch, transformers and SciPy must not be. Picks
are those of the environment that this runs in, which has them. Then the source distribution takes the wheel's place,
and serves them too. Prints the sizes and times.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUESTIONS = ["how many rivers are longer than 500", "list the cities older than 5", "what is the mean size of states"]
SERVE = """
import json, sys, time
from importlib.util import find_spec
began = time.perf_counter()
from langchain_rcr import RCRError, SequentialCompositionalRetriever
folder, questions, expected = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
try:
    retriever = SequentialCompositionalRetriever.from_pretrained(folder, k=4)
    picks = [[row["source"] for row in retriever.select_examples({"source": each})] for each in questions]
    print(f"imported, loaded and answered in {time.perf_counter() - began:.1f} s:", picks[0][0])
    retriever.add_example({"source": "how many lakes are there", "target": "SELECT COUNT(*) FROM lake"})
    assert "how many lakes are there" in [row["source"] for row in retriever.select_examples({"source": "count lakes"})]
except RCRError as error:
    sys.exit(str(error))
assert picks == expected or not expected, (picks, expected)
assert not any(map(find_spec, ("torch", "transformers", "scipy"))), "torch, transformers or SciPy got installed"
"""


def make_checkpoints(folder: Path) -> list[list[str]]:
    """A retriever fitted to a few pairs, saved for ONNX Runtime, also in int8; its picks for `QUESTIONS`."""
    from langchain_rcr import SequentialCompositionalRetriever

    examples = [
        {"source": f"{words} {table}s {cond}", "target": f"SELECT {what} FROM {table} WHERE {table}.{column} > 5"}
        for table in ("river", "city", "state")
        for words, what in (("how many", "COUNT(*)"), ("list the", "name"), ("what is the mean size of", "AVG(size)"))
        for column, cond in (("length", "longer than 5"), ("age", "older than 5"), ("area", "larger than 5"))
    ]
    retriever = SequentialCompositionalRetriever.from_examples(examples, input_keys=["source"])
    retriever.save(folder / "whole", runtime="onnx")
    retriever.save(folder / "int8", runtime="onnx-int8")
    return [[row["source"] for row in retriever.select_examples({"source": each})] for each in QUESTIONS]


def megabytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1_000_000


def main() -> None:
    wheel, source = (Path(argument).resolve() for argument in sys.argv[1:])
    work = wheel.parent / "empty"
    shutil.rmtree(work, ignore_errors=True)
    picks = {"whole": make_checkpoints(work), "int8": []}  # in int8 some may differ
    venv.create(work / "venv", with_pip=True)
    python = work / "venv" / "bin" / "python"

    def pip(*what: str) -> None:
        began, before = time.monotonic(), megabytes(work / "venv")
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
        subprocess.run([*command, "-c", ROOT / "constraints.txt"], check=True)
        grown = megabytes(work / "venv") - before
        print(f"pip install {' '.join(what)}: {time.monotonic() - began:.0f} s, {grown} MB", flush=True)

    def serves() -> str:
        """What it prints, or, where it doesn't serve, what to install, as its error says."""
        for name, expected in picks.items():
            given = [(work / name).resolve(), json.dumps(QUESTIONS), json.dumps(expected)]
            command = [python, "-I", "-c", SERVE, *given]
            done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
            if done.returncode:
                break
            print(f"{name}: {done.stdout.strip()}", flush=True)
        else:
            return ""
        named = re.search(r"pip install '?(langchain-rcr)?([\w\[\],-]+)", done.stderr)
        if named is None:
            sys.exit(f"it doesn't serve, and names nothing to install:\n{done.stderr}")
        print(f"it says: {done.stderr.strip()}")
        return f"{wheel}{named[2]}" if named[1] else named[2]

    with zipfile.ZipFile(wheel) as packed:
        names = {*packed.namelist()}
    rooms = (ROOT, "langchain_rcr"), (ROOT / "trainer", "rcr_trainer")
    modules = {path.relative_to(base).as_posix() for base, package in rooms for path in (base / package).rglob("*.py")}
    if lacking := sorted(modules - names):
        sys.exit(f"the wheel lacks {', '.join(lacking)}")
    for file in (wheel, source):
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")
    pip(str(wheel))
    for _ in range(4):
        if not (missing := serves()):
            break
        pip(missing)
    else:
        sys.exit("it asked for packages without end")
    pip("--force-reinstall", "--no-deps", "--no-cache-dir", str(source))  # pip keeps what it made of the last one
    if missing := serves():
        sys.exit(f"the source distribution lacks {missing}, which the wheel has")


if __name__ == "__main__":
    main()
