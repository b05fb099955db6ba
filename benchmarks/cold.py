"""What serving costs with each text encoder: the first question, later ones, memory, installation.

    python benchmarks/cold.py --size 3000 --out cold.json

The checkpoint is of the default family over the default model (extra `offline`), fitted to COVR questions. Each side
runs in its own processes, without packages its installation wouldn't have: "torch" reads the questions without ONNX
Runtime installed, "ONNX Runtime" reads the same folder without torch, transformers and SciPy; "int8" is what
`save(…, runtime="onnx-int8")` wrote, "static" a policy fitted over the same model's input embeddings. The peer is
LangChain's `MaxMarginalRelevanceExampleSelector` over its in-memory store, with the same model's vectors, computed by
ONNX Runtime. Figures are medians of CPU time over processes (first question) and questions (whole calls), one thread;
memory is what the process holds after its questions. The size of an installation sums the files of all distributions
that the requirement brings, without compiled bytecode.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from statistics import median
from typing import Any

from common import limit_threads, sweep, table

K, ASKED, PROCESSES = 4, 200, 3
SIDES = ("torch", "ONNX Runtime", "int8", "static", "LangChain MMR")
NEEDS = {"langchain-rcr": (), "langchain-rcr[onnx,sql]": ("onnx", "sql"), "langchain-rcr[train]": ("train",)}


def prepare(size: int, folder: Path) -> None:
    """The checkpoints, the peer's store, and questions."""
    from langchain_core.vectorstores import InMemoryVectorStore
    from rcr_trainer.data.covr import covr_split

    from langchain_rcr import Item, SequentialCompositionalRetriever, TriEncoder
    from langchain_rcr.families.base import DEFAULT_BASE
    from langchain_rcr.programs import ProgramSpec

    split = covr_split("110", 0, size, 50)
    rows = [{"source": e.source, "target": e.target} for e in split.train]
    fitted = SequentialCompositionalRetriever.from_examples(rows, language="functional", k=K, input_keys=["source"])
    fitted.save(folder / "whole")
    fitted.save(folder / "int8", runtime="onnx-int8")
    items, base = [Item(row["source"], row["target"]) for row in rows], f"static:{DEFAULT_BASE}"
    static = TriEncoder.fitted(items, spec=ProgramSpec("functional"), base=base)
    SequentialCompositionalRetriever.from_encoder(static, rows, k=K, input_keys=["source"]).save(folder / "static")
    store = InMemoryVectorStore(model())
    store.add_texts([row["source"] for row in rows], metadatas=rows)
    store.dump(str(folder / "store.json"))
    (folder / "questions.json").write_text(json.dumps([e.source for e in split.test]))


def model() -> Any:
    """The default model as LangChain embeddings, run by ONNX Runtime."""
    from langchain_core.embeddings import Embeddings

    from langchain_rcr.families.base import DEFAULT_BASE
    from langchain_rcr.families.onnx_backbone import OnnxBackbone

    backbone = OnnxBackbone(DEFAULT_BASE)

    class Read(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            vectors: list[list[float]] = backbone.embed(texts).tolist()
            return vectors

        def embed_query(self, text: str) -> list[float]:
            return self.embed_documents([text])[0]

    return Read()


def opened(side: str, folder: Path) -> Any:
    """A side's selector."""
    if side != "LangChain MMR":
        from langchain_rcr import SequentialCompositionalRetriever

        name = side if side in ("int8", "static") else "whole"
        return SequentialCompositionalRetriever.from_pretrained(folder / name, k=K)
    from langchain_core.example_selectors import MaxMarginalRelevanceExampleSelector
    from langchain_core.vectorstores import InMemoryVectorStore

    store = InMemoryVectorStore.load(str(folder / "store.json"), model())
    return MaxMarginalRelevanceExampleSelector(vectorstore=store, k=K, fetch_k=20, input_keys=["source"])


def ask(side: str, folder: Path) -> dict[str, Any]:
    """In its own process: the first question with all that precedes it, the later ones, memory, picks."""
    start, questions = time.process_time(), json.loads((folder / "questions.json").read_text())
    selector = opened(side, folder)
    picks = [[row["source"] for row in selector.select_examples({"source": questions[0]})]]
    first, spent = time.process_time() - start, list[float]()
    for question in itertools.islice(itertools.cycle(questions), ASKED):
        began = time.process_time()
        selector.select_examples({"source": question})
        spent.append(1e3 * (time.process_time() - began))
    picks += [[row["source"] for row in selector.select_examples({"source": each})] for each in questions[1:]]
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    return {"first": first, "ms": median(spent), "mb": held, "picks": picks, "torch": "torch" in sys.modules}


def measured(size: int) -> dict[str, dict[str, float]]:
    """Each side's figures, and the share of questions with the same picks as "torch"."""
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(size, Path(folder))
        for side in SIDES * PROCESSES:
            command = [sys.executable, __file__, "--side", side, "--folder", folder, "--out", "-"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.setdefault(side, []).append(json.loads(done.stdout))
    expected, out = runs["torch"][0]["picks"], {}
    for side, of in runs.items():
        figures = {name: median(run[name] for run in of) for name in ("first", "ms", "mb")}
        same = [ours == theirs for ours, theirs in zip(of[0]["picks"], expected, strict=True)]
        out[side] = figures | {"same": 100 * sum(same) / len(same)}
    return out


def installation(extras: Sequence[str]) -> float:
    """MB of langchain-rcr with some extras, and of everything they bring."""
    files = {str(file) for name in closure("langchain-rcr", extras) for file in _files(name)}
    return sum(Path(file).stat().st_size for file in files) / 1e6


def _files(name: str) -> Iterator[Path]:
    for file in distribution(name).files or ():
        place = Path(str(file.locate()))
        if file.suffix != ".pyc" and place.is_file():
            yield place.resolve()


def closure(name: str, extras: Sequence[str]) -> set[str]:
    """The distributions that a requirement brings on this machine."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    todo, seen, names = [(name, tuple(extras))], set[tuple[str, tuple[str, ...]]](), set[str]()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        try:
            needs = distribution(one[0]).requires or ()
        except PackageNotFoundError:  # CUDA packages, if torch is for the CPU
            continue
        names.add(one[0])
        todo += [
            (canonicalize_name(need.name), tuple(sorted(need.extras)))
            for need in map(Requirement, needs)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *one[1]))
        ]
    return names


def markdown(results: dict[str, Any]) -> str:
    """The figures and their ratios to the peer."""
    sides, peer = results["sides"], results["sides"]["LangChain MMR"]
    rows = [
        [
            name,
            f"{of['first']:.2f}",
            f"{of['ms']:.1f} ({of['ms'] / peer['ms']:.2f})",
            f"{of['mb']:.0f}",
            "–" if of is peer else f"{of['same']:.0f}",
        ]
        for name, of in sides.items()
    ]
    head = ["", "first question, s", "a call, ms (: MMR)", "memory, MB", "same picks, %"]
    sizes = ([name, f"{mb:.0f}"] for name, mb in results["installation"].items())
    return "\n\n".join([table(head, rows), table(["installation", "MB"], sizes)])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=3000, help="examples (default 3000)")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    limit_threads(1)
    logging.disable(logging.WARNING)
    if options.side:
        hidden = ("onnxruntime",) if options.side == "torch" else ("torch", "transformers", "scipy")
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # as where they are not installed
        print(json.dumps(ask(options.side, options.folder)))
        return 0
    sizes = {name: installation(extras) for name, extras in NEEDS.items()}
    cells = [("sides", lambda: measured(options.size)), ("installation", lambda: sizes)]
    print(markdown(sweep(cells, options.out, size=options.size)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
