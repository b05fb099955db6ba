"""Exact match of the parser by split and selector: `python examples/models/covr-parser/evaluate.py --out FILE`.

Each test query gets a prompt with the selector's picks from the split's training examples. A query counts as exact
if every token of its gold program, including the line's end, is the model's first choice given the tokens before
it: then, and only then, greedy decoding writes it. That takes one pass per prompt; `--decode N` also decodes N
prompts per split and selector, and counts where the two disagree (rounding may break ties differently).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from episodes import ROLES, VARIANTS, name_tokens
from rcr_trainer.baselines.base import Baseline
from rcr_trainer.baselines.greedy import OracleSelector
from rcr_trainer.baselines.simple import BM25Selector, RandomSelector
from rcr_trainer.data.covr import HELD_OUT, covr_split
from rcr_trainer.data.examples import Split
from transformers import AutoModelForCausalLM, AutoTokenizer

from langchain_rcr.basics.items import Item
from langchain_rcr.policy.prompt import APPENDIX_D
from langchain_rcr.programs import ProgramSpec

SELECTORS = ("oracle", "random", "bm25")


@dataclass(frozen=True, slots=True)
class Marked:
    """One query's outcome.

    Args:
        exact: whether the whole program is right.
        covered: whether the picks show every construct of the gold program.
        shown: for each occurrence of a construct that the picks show, its number and whether it is right.
        not_shown: the same for the first occurrence of each that they don't show.
        kind_right: for each entry of `not_shown`, whether the choice is at least one of the construct's five names.
    """

    exact: bool
    covered: bool
    shown: list[tuple[int, bool]]
    not_shown: list[tuple[int, bool]]
    kind_right: list[bool]


class Parser:
    """The model with its tokenizer.

    Args:
        folder: as `train.py` writes it.
        tokens: approximate size of a batch.
    """

    def __init__(self, folder: Path, tokens: int = 8000) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokens = tokens
        self.first = self.tokenizer.get_vocab()[name_tokens(0)[0]]

    @torch.inference_mode()
    def mark(self, prompts: Sequence[str], programs: Sequence[str]) -> list[Marked]:
        """Mark each prompt's gold program, in one pass over prompts sorted by length."""
        starts = [len(self.tokenizer(prompt)["input_ids"]) for prompt in prompts]
        texts = [f"{prompt} {program}\n" for prompt, program in zip(prompts, programs, strict=True)]
        ids = [np.array(row) for row in self.tokenizer(texts)["input_ids"]]
        marked: dict[int, Marked] = {}
        for rows in self._batches([len(row) for row in ids]):
            longest = max(len(ids[row]) for row in rows)
            padded = np.stack([np.pad(ids[row], (0, longest - len(ids[row]))) for row in rows])
            choices = self.model(torch.from_numpy(padded), use_cache=False).logits.argmax(-1).numpy()
            for row, chosen in zip(rows, choices, strict=True):
                marked[row] = self._mark(ids[row], chosen[: len(ids[row]) - 1], starts[row])
        return [marked[row] for row in range(len(ids))]

    def _mark(self, ids: np.ndarray, choices: np.ndarray, start: int) -> Marked:
        answers, choices = ids[start:], choices[start - 1 :]
        hits = answers == choices
        before = set(((ids[:start][ids[:start] >= self.first] - self.first) // VARIANTS).tolist())
        shown, not_shown, kind_right, met = [], [], [], set()
        for place in np.flatnonzero(answers >= self.first):
            role = int(answers[place] - self.first) // VARIANTS
            if role in before:
                shown.append((role, bool(hits[place])))
            elif role not in met:
                met.add(role)
                not_shown.append((role, bool(hits[place])))
                kind_right.append(int(choices[place] - self.first) // VARIANTS == role)
        return Marked(bool(hits.all()), not met, shown, not_shown, kind_right)

    @torch.inference_mode()
    def decode(self, prompts: Sequence[str], longest: int = 120) -> list[str]:
        """Greedy answers, each up to the end of its line."""
        answers: dict[int, str] = {}
        for rows in self._batches([len(prompt.split()) for prompt in prompts]):
            batch = self.tokenizer([prompts[row] for row in rows], return_tensors="pt", padding=True)
            written = self.model.generate(**batch, max_new_tokens=longest, do_sample=False)
            texts = self.tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            answers |= {row: text.strip() for row, text in zip(rows, texts, strict=True)}
        return [answers[row] for row in range(len(prompts))]

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        made: list[list[int]] = [[]]
        for row in np.argsort(lengths, kind="stable").tolist():
            if made[-1] and (len(made[-1]) + 1) * lengths[row] > self.tokens:
                made.append([])
            made[-1].append(row)
        return made if made[0] else []


def build_selector(name: str, split: Split, seed: int) -> Baseline:
    """A selector over the split's training examples."""
    pool = [{"source": example.source, "target": example.target} for example in split.train]
    if name == "oracle":
        return OracleSelector(pool, spec=ProgramSpec())
    return RandomSelector(pool, seed=seed) if name == "random" else BM25Selector(pool)


def prompts_of(selector: Baseline, split: Split, queries: int, k: int) -> tuple[list[str], list[str]]:
    """The prompts of the first test queries, and their gold programs."""
    tests = split.test[:queries]
    sources, targets = [test.source for test in tests], [test.target for test in tests]
    picks = selector.pick(sources, k, references=targets)
    items = [Item(example.source, example.target) for example in split.train]
    return [
        APPENDIX_D.text([items[place] for place in row], source) for row, source in zip(picks, sources, strict=True)
    ], targets


def summary(marked: Sequence[Marked]) -> dict[str, Any]:
    """Percentages over queries, and accuracies by construct with their counts."""
    tallies: dict[str, dict[int, list[bool]]] = {"shown": defaultdict(list), "not_shown": defaultdict(list)}
    for mark in marked:
        for kind, tally in tallies.items():
            for role, hit in getattr(mark, kind):
                tally[role].append(hit)
    covered = [mark.exact for mark in marked if mark.covered]
    kinds = [right for mark in marked for right in mark.kind_right]
    return {
        "queries": len(marked),
        "exact": percent([mark.exact for mark in marked]),
        "covered": percent([mark.covered for mark in marked]),
        "exact_where_covered": percent(covered),
        **{kind: percent([hit for hits in tally.values() for hit in hits]) for kind, tally in tallies.items()},
        "not_shown_right_kind": percent(kinds),
        **{
            f"{kind}_by_construct": {ROLES[role]: [percent(tally[role]), len(tally[role])] for role in sorted(tally)}
            for kind, tally in tallies.items()
        },
    }


def percent(hits: Sequence[bool]) -> float | None:
    """The share that is true, in percent; None if empty."""
    return round(100 * float(np.mean(hits)), 1) if len(hits) else None


def main() -> None:
    """Evaluate, print a table, write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent)
    parser.add_argument("--splits", nargs="+", default=list(HELD_OUT))
    parser.add_argument("--selectors", nargs="+", default=list(SELECTORS), choices=SELECTORS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--decode", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = Parser(arguments.model)
    began = time.perf_counter()
    collected: dict[str, list[Marked]] = {name: [] for name in arguments.selectors}
    report: dict[str, Any] = {"seed": arguments.seed, "k": arguments.k, "splits": {}}
    disagree = decoded = 0
    for name in arguments.splits:
        split = covr_split(name, arguments.seed)
        row = {}
        for chosen in arguments.selectors:
            selector = build_selector(chosen, split, arguments.seed)
            prompts, programs = prompts_of(selector, split, arguments.queries, arguments.k)
            marked = model.mark(prompts, programs)
            collected[chosen] += marked
            row[chosen] = summary(marked)
            answers = model.decode(prompts[: arguments.decode])
            decoded += len(answers)
            disagree += sum(
                (answer == program) != mark.exact
                for answer, program, mark in zip(answers, programs, marked, strict=False)
            )
        report["splits"][name] = row
        print(name, {chosen: (row[chosen]["exact"], row[chosen]["covered"]) for chosen in row}, flush=True)
    report["mean"] = {chosen: summary(marked) for chosen, marked in collected.items()}
    report["decoded"], report["disagree"] = decoded, disagree
    report["seconds"] = round(time.perf_counter() - began)
    print(json.dumps(report["mean"], indent=1), decoded, disagree, report["seconds"])
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
