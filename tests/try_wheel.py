"""Installs the wheel into an empty environment and serves a checkpoint of the structure family over SQL with it.

    python tests/try_wheel.py dist/langchain_rcr-….whl dist/langchain_rcr-….tar.gz

What is missing there is installed as the error says, and nothing else. Then the source distribution takes the wheel's
place, and serves it too. Prints the sizes and times.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
SERVE = """
import sys, time
began = time.perf_counter()
from langchain_rcr import RCRError, SequentialCompositionalRetriever
try:
    retriever = SequentialCompositionalRetriever.from_pretrained(sys.argv[1], k=4)
    retriever.add_example({"source": "how many lakes are there", "target": "SELECT COUNT(*) FROM lake"})
    picks = retriever.invoke("how many rivers are longer than 500")
except RCRError as error:
    sys.exit(str(error))
assert len(picks) == 4
print(f"imported, loaded and answered in {time.perf_counter() - began:.1f} s:", picks[0].page_content.splitlines()[0])
"""


def make_checkpoint(folder: Path) -> None:
    """A retriever fitted to a few pairs, in the environment that this runs in."""
    from langchain_rcr import SequentialCompositionalRetriever

    examples = [
        {"source": f"{words} {table}s {cond}", "target": f"SELECT {what} FROM {table} WHERE {table}.{column} > 5"}
        for table in ("river", "city", "state")
        for words, what in (("how many", "COUNT(*)"), ("list the", "name"), ("what is the mean size of", "AVG(size)"))
        for column, cond in (("length", "longer than 5"), ("age", "older than 5"), ("area", "larger than 5"))
    ]
    SequentialCompositionalRetriever.from_examples(examples, input_keys=["source"]).save(folder)


def megabytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1_000_000


def main() -> None:
    wheel, source = (Path(argument).resolve() for argument in sys.argv[1:])
    work = wheel.parent / "empty"
    shutil.rmtree(work, ignore_errors=True)
    make_checkpoint(work / "checkpoint")
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
        command = [python, "-I", "-c", SERVE, (work / "checkpoint").resolve()]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            print(done.stdout.strip())
            return ""
        named = re.search(r"pip install '?(langchain-rcr)?([\w\[\],-]+)", done.stderr)
        if named is None:
            sys.exit(f"it doesn't serve, and names nothing to install:\n{done.stderr}")
        print(f"it says: {done.stderr.strip()}")
        return f"{wheel}{named[2]}" if named[1] else named[2]

    for file in (wheel, source):
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")
    pip("torch")
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
