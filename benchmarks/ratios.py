"""What serving.py and large.py claim: the ratios of a side's time to its peer's, and the tables of both."""

from __future__ import annotations

from collections.abc import Mapping

from common import table

BATCH = 64
"""Questions of a call that has many."""
RATIOS = (
    ("ours, dense", "LangChain MMR"),
    ("ours, structures", "LangChain MMR"),
    ("ours, dense", "one exact FAISS scan"),
    ("ours, structures", "one exact FAISS scan"),
    ("ours, dense, in inverted lists", "one exact FAISS scan"),
    ("ours, structures, in inverted lists", "one exact FAISS scan"),
    ("ours, dense", "plain loop, dense"),
    ("ours, structures", "plain loop, structures as a dense matrix"),
    ("ours, dense, 64 together", "LangChain MMR"),
    ("ours, structures, 64 together", "LangChain MMR"),
    ("ours, dense, abatch of 64", "ours, dense, 64 together"),
    ("ours, structures, abatch of 64", "ours, structures, 64 together"),
    ("ours, dense, 64 awaited at once", "ours, dense, 64 together"),
    ("ours, structures, 64 awaited at once", "ours, structures, 64 together"),
    ("ours, dense, 32 threads", "LangChain MMR, 32 threads"),
    ("ours, structures, 32 threads", "LangChain MMR, 32 threads"),
    ("ours, dense, 64 awaited at once", "LangChain MMR, 64 awaited at once"),
    ("ours, structures, 64 awaited at once", "LangChain MMR, 64 awaited at once"),
    ("ours, adding 1,000", "FAISS with the same checks, adding 1,000"),
    ("loading: ours", "loading: FAISS.load_local"),
    ("embeddings", "the model's forward pass"),
    ("structure", "the model's forward pass"),
    ("embeddings", "embeddings, k = 1"),
    ("structure", "structure, k = 1"),
)
"""The claims: a side, and the peer that its time is divided by (64 together: by 64 calls of one question)."""


def ratios(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """The figures of each of `RATIOS` by pool size, where both sides were measured."""
    out = []
    for side, peer in RATIOS:
        times = BATCH if "64 together" in side and "64" not in peer else 1
        each = {
            size: of[side]["ms"] / (times * of[peer]["ms"]) for size, of in results.items() if side in of and peer in of
        }
        if each:
            out.append((f"{side} : {f'{times} × ' if times > 1 else ''}{peer}", each))
    return out


def markdown(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Milliseconds, with quartiles, and ratios; one column per pool size."""
    sizes = list(results)
    rows = []
    for name in dict.fromkeys(name for of in results.values() for name in of):
        cells = []
        for size in sizes:
            row = results[size].get(name)
            if row is None:
                cells.append("–")
            else:
                spread = f" ({row['low']:.3g}–{row['high']:.3g})" if "low" in row else f", {row['mb']:.0f} MB at most"
                lost = f", {100 * row['lost']:.2f} % lost" if "lost" in row else ""
                cells.append(f"{row['ms']:.3g}{spread}{lost}")
        rows.append([name, *cells])
    claims = ([name, *(f"{each[s]:.2f}" if s in each else "–" for s in sizes)] for name, each in ratios(results))
    return "\n\n".join([table(["CPU ms (quartiles)", *sizes], rows), table(["ratio", *sizes], claims)])
