"""The command rcr-train: results on stdout, progress and errors on stderr.

Exit codes: 0 done, 2 for what the user can fix (one line), 130 for Ctrl-C, SIGTERM and SIGHUP, 141 if nobody reads the
output any more, 1 with a traceback for a bug.
Of several processes, the first reports; an error is printed once per machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import langchain_rcr
from langchain_rcr.errors import MissingExtraError, RCRError
from rcr_trainer.cli.console import PROG, USUAL, Parser, add_settings, command, flags, logged, number, say, show
from rcr_trainer.errors import ConfigError

EXTRA = ("langchain_openai", "matplotlib", "openai", "rank_bm25", "scipy", "torch", "transformers", "yaml")
"""The packages of the extra `train`, by import name."""
TABLES = ("main", "rl", "reward", "shots", "steps", "train-size", "group-size")
"""The names in `rcr_trainer.paper.tables.TABLES`, which is slow to import."""

_FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
_FOLDER: dict[str, Any] = {"type": Path, "metavar": "FOLDER"}
_WIDTH = 100
_LONGEST = 900
"""Most characters of an error: a setting may be as long as its file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default this process's, and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None:
            # SIGTERM (`timeout`, SLURM, `docker stop`) and SIGHUP (a lost terminal; `nohup` ignores it) are as Ctrl-C.
            for name in ("SIGTERM", "SIGHUP"):
                if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_DFL:
                    signal.signal(getattr(signal, name), signal.default_int_handler)
            for name in ("stdout", "stderr"):
                if getattr(sys, name) is None:  # closed, as by `>&-`
                    setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
                # A terminal or pipe that isn't UTF-8 shows \u6cb3 in place of 河.
                getattr(sys, name).reconfigure(errors="backslashreplace")
        return _obey(arguments)
    except BrokenPipeError:  # `| head` has read enough
        return 141
    except KeyboardInterrupt:
        say(f"{PROG}: interrupted" + (" (--resume continues the run)" if {"run", "sft"} & set(arguments[:1]) else ""))
        return 130
    except Exception as error:
        line = _line_of(error)
        if line is None:
            say(traceback.format_exc().rstrip())
            return 1
        line = " ".join(line.split())
        half = _LONGEST // 2
        say(f"{PROG}: error: {line if len(line) <= _LONGEST else f'{line[:half]} … {line[-half:]}'}")
        return 2


def _obey(arguments: Sequence[str]) -> int:
    """Parse the arguments, run the command and write out what it shows; return the exit code."""
    try:
        parser = build_parser(arguments)
        if not arguments:
            parser.print_help()
            return 0
        given = parser.parse_args(arguments)
        function = given.command
        return (resolve_name(function) if isinstance(function, str) else function)(given) or 0
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails again as it exits
            raise


def _line_of(error: Exception) -> str | None:
    """The message of an error that the user can fix; None for a bug."""
    if isinstance(error, RCRError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        return str(MissingExtraError(package, "train")) if package in EXTRA else None
    if isinstance(error, OSError):  # such as a full disk, a name too long, a folder not ours
        return f"{str(error.filename)[:200]}: {error.strerror}" if error.filename else str(error.strerror or error)
    if isinstance(error, UnicodeEncodeError):
        name = ascii(error.object[error.start : error.end])
        return f"{name:.200} can't be encoded as {error.encoding}: rename what is called so, or set PYTHONUTF8=1"
    return None


def _run(given: argparse.Namespace) -> None:
    from rcr_trainer.runs.layers import load_config

    config = load_config(given.config, flags(given))
    config.limit_threads()
    from rcr_trainer import pipeline
    from rcr_trainer.evaluation.budget import plan

    if "data" not in config.model_fields_set:
        raise ConfigError(
            f"{given.config} names no data: set data.task, or `{PROG} init --train my.jsonl` for your own files"
        )
    if given.dry_run:
        if not number("RANK"):
            with logged():
                how = {"resume": given.resume, "overwrite": given.overwrite}
                task, lines = pipeline.preview(config, given.until, **how)
                lines = [*plan(config, task), *lines]
            show(*lines)
        return
    with logged():
        run = pipeline.run(config, until=given.until, resume=given.resume, overwrite=given.overwrite)
    if not run.writes:
        return
    if run.done("evaluation"):
        _show_report(run.path)
    show(f"run folder: {run.path}")


def _show_report(folder: Path) -> None:
    from rcr_trainer.evaluation.report import EvaluationReport
    from rcr_trainer.evaluation.table import table

    report = EvaluationReport.read(folder)
    show(*table(report), f"\n{textwrap.fill(report.advice, _WIDTH, break_on_hyphens=False)}\n")


def _evaluate(given: argparse.Namespace) -> None:
    from rcr_trainer.runs.folder import Run, hold

    run = Run.open(given.run, flags=flags(given), trust=given.trust)
    run.config.limit_threads()
    from rcr_trainer.evaluation.stage import evaluation_stage

    with logged(), hold(run.path), run.stage("evaluation"):
        evaluation_stage(run)
    _show_report(run.path)
    show(f"written: {', '.join(str(run.path / name) for name in ('evaluation.json', 'report.md', 'picks.jsonl'))}")


def _learn(given: argparse.Namespace) -> None:
    from langchain_rcr.basics.files import digest
    from rcr_trainer.data.files import read_examples
    from rcr_trainer.evaluation.learn import learn, told

    # Questions that were asked have no programs.
    asked = read_examples(given.questions, target_key="source")[0] if given.questions else []
    questions = {digest(each.source): each.source for each in asked}
    with logged():
        change = learn(given.log, given.served, given.out, questions=questions, seed=given.seed, trust=given.trust)
    show(told(change), f"written: {given.out}")


def build_parser(arguments: Sequence[str]) -> Parser:
    """The parser; only the subcommand in `arguments` gets flags for its settings, as these cost an import."""
    parser = Parser(
        prog=PROG,
        description="Train, evaluate and improve step-by-step retrievers of few-shot examples.",
        epilog=f"example: {PROG} init demo.yaml && {PROG} run demo.yaml",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {langchain_rcr.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    called = next((word for word in arguments if not word.startswith("-")), "")
    _add_init(commands)
    _add_run(commands, called, shown=None if "--help-all" in arguments else USUAL)
    _add_evaluate(commands, called)
    _add_learn(commands)
    _add_paper(commands, called)
    _add_data(commands)
    flag = next(iter(arguments), "").partition("=")[0]
    if flag.startswith("--") and flag not in ("--help", "--version"):
        parser.error(f"'{flag}' belongs after the command")
    return parser


def _add_init(commands: Any) -> None:
    text = "write a YAML file with all settings, commented"
    add = command(commands, "init", "rcr_trainer.cli.own_files:init", text, "init --train my.jsonl").add_argument
    add("path", nargs="?", type=Path, default=Path("config.yaml"), help="the file to write (default: config.yaml)")
    add("--force", action="store_true", help="overwrite the file")
    add("--train", **_FILE, help="your own questions and programs, for which the settings are written")
    add("--dev", **_FILE, help="development questions (default: some of --train)")
    add("--test", **_FILE, help="held-out questions (default: development questions)")
    _add_keys(add)


def _add_run(commands: Any, called: str, shown: Collection[str] | None) -> None:
    for name, until, text in (
        ("run", "evaluation", "prepare data, train and evaluate, as a YAML file says"),
        ("sft", "sft", "like run, but stop after supervised fine-tuning"),
    ):
        run = command(commands, name, _run, text, f"{name} demo.yaml --sft.epochs=10 --name=short")
        run.set_defaults(until=until)
        run.usage = f"{PROG} {name} [-h] [--resume | --overwrite] [--dry-run] [--SECTION.FIELD VALUE ...] CONFIG"
        run.add_argument("config", metavar="CONFIG", type=Path, help="YAML file with the settings")
        again = run.add_mutually_exclusive_group()
        again.add_argument("--resume", action="store_true", help="continue the run where it was interrupted")
        again.add_argument("--overwrite", action="store_true", help="start over in the folder of an earlier run")
        cost = "only check data, settings and run folder, and show the most that the language model may cost"
        run.add_argument("--dry-run", action="store_true", help=cost)
        run.add_argument("--help-all", action="help", help="show all settings, not only the usual ones, and exit")
        if called == name:
            add_settings(run, lambda path: True, shown)


def _add_evaluate(commands: Any, called: str) -> None:
    text = "compare a trained retriever with plain selectors, also by a language model's answers"
    evaluate = command(commands, "evaluate", _evaluate, text, "evaluate runs/demo --split dev --k 6")
    options = "[--trust] [--split {test,dev}] [--k INT] [--SECTION.FIELD VALUE ...]"
    evaluate.usage = f"{PROG} evaluate [-h] {options} RUN"
    evaluate.add_argument("run", metavar="RUN", type=Path, help="a run folder, or its checkpoint folder")
    text = "the run is yours: import, open and ask what its settings name; without this flag, they are only data"
    evaluate.add_argument("--trust", action="store_true", help=text)
    if called == "evaluate":
        add_settings(evaluate, lambda path: path.startswith(("evaluation.", "llm.")) or path in ("threads", "device"))


def _add_learn(commands: Any) -> None:
    text = "change a served policy by the logged outcomes of its picks, if that is sure to earn more"
    add = command(commands, "learn", _learn, text, "learn outcomes.jsonl runs/demo --out better").add_argument
    add("log", type=Path, metavar="LOG", help="the file of an OutcomeLog")
    add("served", type=Path, metavar="SERVED", help="the folder that the retriever was loaded from")
    add("--out", required=True, **_FOLDER, help="the folder to write")
    text = "file with the questions as `source`, if the log has no texts (the pool's questions are known)"
    add("--questions", **_FILE, help=text)
    add("--seed", type=int, default=0, help="seed for splitting the log in half (default 0)")
    add("--trust", action="store_true", help="allow fetching or opening a model that the folder names")


def _add_paper(commands: Any, called: str) -> None:
    text = "do the missing runs behind a table or figure of the paper, and write the result"
    example = "paper --table main --llm completion:NAME --splits template_1 --seeds 0"
    paper = command(commands, "paper", "rcr_trainer.cli.paper:paper", text, example)
    rows = "[--llm KIND[:MODEL]] [--splits LIST] [--seeds LIST] [--selectors LIST] [--limit N]"
    paper.usage = f"{PROG} paper [-h] --table TABLE {rows} [--yes | --dry-run] [--SECTION.FIELD VALUE ...]"
    add = paper.add_argument
    add("--table", required=True, choices=TABLES, help="name of the table or figure")
    text = "local:FOLDER, completion:NAME or chat:NAME (default: what the settings say)"
    add("--llm", metavar="KIND[:MODEL]", help=text)
    text = "comma-separated: standard, template_1, …, covr-110, …; geoquery, covr: all of theirs (default: the paper's)"
    add("--splits", metavar="LIST", help=text)
    add("--seeds", metavar="LIST", help="comma-separated (default: 0,1,2; with --limit: 0)")
    text = "only these rows beside RCR: bm25, epr, … (names as in evaluation.selectors) or rcr_without_sft"
    add("--selectors", metavar="LIST", help=text)
    text = "small trial of the whole: N test questions per row, N prompts per stage, in a folder of its own"
    add("--limit", type=int, metavar="N", help=text)
    agreed = paper.add_mutually_exclusive_group()
    agreed.add_argument("--yes", action="store_true", help="agree to the budget that is shown first")
    agreed.add_argument("--dry-run", action="store_true", help="only show the budget")
    add("--config", **_FILE, help="YAML file with settings for all runs")
    add("--data", default=Path("data"), **_FOLDER, help="folder with geoquery/ and text2sql/ (default: data)")
    text = "folder for the runs and the table (default: runs/paper)"
    add("--out", default=Path("runs/paper"), **_FOLDER, help=text)
    if called == "paper":
        add_settings(paper, lambda path: path not in ("name", "output", "seed"))


def _add_keys(add: Callable[..., object]) -> None:
    add("--source-key", help="field of the question (default: guessed)")
    add("--target-key", help="field of the program (default: guessed)")
    add("--language", help="functional, sexpr, sql, sql:DIALECT, json, python, set or tokens (default: guessed)")


def _add_data(commands: Any) -> None:
    text = "check your files; turn public data into a folder for data.directory"
    kinds = commands.add_parser("data", help=text).add_subparsers(metavar="COMMAND", title="commands", required=True)
    text = "read files as a run would, and name the rows that need fixing; exit code 1 if there are any"
    example = "data check train.jsonl test.jsonl"
    add = command(kinds, "check", "rcr_trainer.cli.own_files:check", text, example).add_argument
    add("files", nargs="+", **_FILE, help="JSONL, JSON, CSV, TSV or Parquet; each is compared with the first")
    add("--id-key", help="field of the id (default: the row number)")
    _add_keys(add)

    text = "convert SQL questions of the text2sql-data collection (ATIS, Scholar, Geography, Academic, IMDB, Yelp, ...)"
    example = "data text2sql scholar.json --split query --out scholar"
    add = command(kinds, "text2sql", "rcr_trainer.cli.own_files:text2sql", text, example).add_argument
    add("file", **_FILE, help="one JSON file of the collection")
    text = "query: no test query occurs in training (default); question: questions are split at random"
    add("--split", choices=("query", "question"), default="query", help=text)
    add("--fold", type=int, metavar="N", help="test fold of a file with numbered folds (default 0)")
    add("--out", required=True, **_FOLDER, help="the folder to write")

    text = "convert Spider's questions about many databases, with their schemas, to a split folder"
    example = "data spider spider --out ssp-template"
    add = command(kinds, "spider", "rcr_trainer.cli.own_files:spider", text, example).add_argument
    text = "folder with train_spider.json, tables.json, database/DB/DB.sqlite, and ssp/*.json or dev.json"
    add("folder", **_FOLDER, help=text)
    splits = ("random_1", "template_1", "tmcd_1", "length_1", "dev")
    text = "of Spider-SSP, or dev: Spider's own, tested on other databases (default: template_1)"
    add("--split", choices=splits, default="template_1", help=text)
    add("--databases", **_FOLDER, help="the databases, if they are elsewhere (default: FOLDER/database)")
    text = "values of each column to show in the schema (default: none)"
    add("--samples", type=int, default=0, metavar="N", help=text)
    add("--out", required=True, **_FOLDER, help="the folder to write")
