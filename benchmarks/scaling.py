"""How costs grow: plots what serving.py, large.py and fit.py measured.

    python benchmarks/serving.py --sizes 100,1000,10000,100000 --out serving.json
    python benchmarks/large.py --sizes 100000,1000000 --out large.json
    python benchmarks/fit.py --out fit.json
    python benchmarks/scaling.py --serving large.json serving.json --fit fit.json --out scaling.png
    python benchmarks/scaling.py --serving large.json --out growth.png

Every panel has logarithmic axes. The dotted line is the time to read all dense vectors once on the measuring machine,
about the least that an exact scan of them can take.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import files_of

Results = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Pool size → side → its figures, as serving.py writes them."""

OURS = {"structures": ("#D55E00", "o"), "dense": ("#0072B2", "s")}
PEERS = {
    "one exact FAISS scan": ("#009E73", "^"),
    "LangChain MMR": ("#CC79A7", "v"),
    "reading all vectors once": ("#777777", ""),
}
MEMORY = {"ours": "dense", "FAISS.load_local": "one exact FAISS scan", "nothing": "reading all vectors once"}
MANY = 100_000
"""k and batches are plotted for the largest measured pool of at most this many examples."""


def by_size(results: Results, side: str, figure: str = "ms") -> tuple[list[int], list[float]]:
    """Pool sizes and a side's figure at each of them, where it was measured."""
    found = {int(size): sides[side][figure] for size, sides in results.items() if size.isdigit() and side in sides}
    return list(found), list(found.values())


def by_number(sides: Mapping[str, Mapping[str, float]], pattern: str) -> tuple[list[int], list[float]]:
    """For sides whose name matches `pattern`: the numbers in place of `#`, and the milliseconds."""
    names = {int(match[1]): name for name in sides if (match := re.fullmatch(pattern.replace("#", r"(\d+)"), name))}
    return sorted(names), [sides[names[number]]["ms"] for number in sorted(names)]


def panel(axes: Any, title: str, x: str, y: str) -> Callable[..., None]:
    """Prepare a panel; returns what draws a line into it."""
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(axis="y", color="black", alpha=0.15, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)

    def line(points: tuple[Sequence[float], Sequence[float]], name: str, of: str, **style: Any) -> None:
        colour, marker = (OURS | PEERS)[of]
        style = {"linestyle": "-" if marker else ":"} | style
        if points[0]:
            axes.plot(*points, label=name, color=colour, marker=marker, markersize=4, linewidth=1.5, **style)
            axes.legend(fontsize=7, frameon=False)

    return line


def growth(axes: Any, results: Results) -> None:
    """One question by pool size."""
    line = panel(axes, "one question, k = 4, without the encoder", "examples in the pool", "CPU ms")
    for name in OURS:
        line(by_size(results, f"ours, {name}"), name, name)
        line(by_size(results, f"ours, {name}, in inverted lists"), f"{name}, in lists", name, linestyle="--")
    for name in PEERS:
        line(by_size(results, name), name, name)


def alone(results: Results) -> Any:
    """`growth` as a figure of its own."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5.5, 3.8), dpi=200, layout="constrained")
    growth(drawn.subplots(), results)
    return drawn


def figure(results: Results, fits: Sequence[Mapping[str, float]]) -> Any:
    """Six panels: a question by pool size, by k, in batches; memory, adding, fitting."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 6.2), dpi=200, layout="constrained")
    first, *panels = drawn.subplots(2, 3).flat
    growth(first, results)
    new = (partial(panel, axes) for axes in panels)

    at = max((size for size in results if size.isdigit() and int(size) <= MANY), key=int)
    line = next(new)(f"by k, {int(at):,} examples", "k", "CPU ms")
    for name in OURS:
        line(by_number(results[at], f"ours, {name}, k = #"), name, name)

    line = next(new)(f"many together, {int(at):,} examples", "questions in the batch", "CPU ms a question")
    for name in OURS:
        sizes, times = by_number(results[at], f"ours, {name}, # together")
        single = results[at][f"ours, {name}"]["ms"]
        line(([1, *sizes], [single, *(ms / size for size, ms in zip(sizes, times, strict=True))]), name, name)

    line = next(new)("a saved pool of dense vectors, loaded", "examples in the pool", "MB at most, with the process")
    for name, of in MEMORY.items():
        line(by_size(results, f"loading: {name}", "mb"), name, of)

    line = next(new)("adding 1,000 examples", "examples in the pool before", "CPU ms")
    line(by_size(results, "ours, adding 1,000"), "ours", "dense")
    line(by_size(results, "FAISS with the same checks, adding 1,000"), "FAISS", "one exact FAISS scan")

    line = next(new)("from_examples", "training pairs", "seconds, GB")
    pairs = [row["examples"] for row in fits]
    line((pairs, [row["encoding_s"] for row in fits]), "encoding, s", "reading all vectors once", linestyle="--")
    line((pairs, [row["else_s"] for row in fits]), "all else, s", "structures")
    line((pairs, [row["peak_gb"] for row in fits]), "peak memory, GB", "dense")
    return drawn


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--serving", type=Path, nargs="+", required=True, help="what serving.py and large.py wrote")
    parser.add_argument("--fit", type=Path, help="what fit.py wrote; without it only the first panel is drawn")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    with files_of(parser):
        for file in options.serving:
            for size, of in json.loads(file.read_text())["results"].items():
                results[size] = results.get(size, {}) | of  # if several files have a side, the last counts
        fits = None if options.fit is None else [*json.loads(options.fit.read_text())["results"].values()]
    (alone(results) if fits is None else figure(results, fits)).savefig(options.out)


if __name__ == "__main__":
    main()
