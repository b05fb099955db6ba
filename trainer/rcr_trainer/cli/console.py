"""What all subcommands share: parser, flags for settings, output. Imports nothing heavy."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NoReturn

from rcr_trainer.llm.redaction import shown

PROG = "rcr-train"
USUAL = {
    *("name", "data.task", "data.train", "data.test", "data.source_key", "data.target_key", "data.group"),
    *("program.language", "model.family", "grpo.enabled", "grpo.epochs", "reward.names"),
    *("llm.kind", "llm.model", "llm.base_url", "llm.budget_money", "prompt.name"),
    *("evaluation.k", "evaluation.selectors", "evaluation.answers"),
}
"""Settings that people usually set: `--help` shows only these, `--help-all` all."""


class Parser(argparse.ArgumentParser):
    """Errors take one line, and for an unknown setting they name the nearest known one."""

    def error(self, message: str) -> NoReturn:
        """Exit with one line."""
        hint = f"see {self.prog} --help"
        if message.endswith("required: CONFIG"):
            hint = f"`{PROG} init --train my.jsonl` writes one for your files"
        self.exit(2, shown(f"{PROG}: error: {message} ({hint})\n"))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; unknown arguments get our own message."""
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            hint = f"unknown argument '{flag}'"
            if flag.startswith("--") and given.settings:
                from rcr_trainer.runs.layers import settings, unknown_key

                path = flag.removeprefix("--")
                known = path in settings()
                hint = f"{given.prog} can't change '{path}'" if known else unknown_key(path, given.settings)
            self.exit(2, shown(f"{PROG}: error: {hint} (see {given.prog} --help)\n"))
        return given


def command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int | None] | str, text: str, example: str
) -> argparse.ArgumentParser:
    """Add a subcommand to the result of `add_subparsers`; `function` (or MODULE:NAME) returns the exit code."""
    about, example = f"{text[0].upper()}{text[1:]}.", f"example: {PROG} {example}"
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=about, epilog=example, allow_abbrev=False
    )
    parser.set_defaults(command=function, prog=parser.prog, settings={})
    return parser


def add_settings(
    parser: argparse.ArgumentParser, wanted: Callable[[str], bool], shown: Collection[str] | None = None
) -> None:
    """Add a flag for each setting, by section, with its description as help if it is in `shown` (None: all)."""
    from rcr_trainer.runs.layers import plain, section_title, settings

    chosen = {path: setting for path, setting in settings().items() if wanted(path)}
    short = {"evaluation.split": ["--split"], "evaluation.k": ["--k"]} if parser.prog.endswith("evaluate") else {}
    for section, found in groupby(chosen.values(), key=lambda setting: setting.section):
        each = list(found)
        seen = [setting.path for setting in each if shown is None or setting.path in shown]
        group = parser.add_argument_group(section or "run", section_title(section) if seen and section else None)
        for setting in each:
            default = "" if setting.families else f" (default: {plain(setting.default)})"
            told = f"{setting.description}{default}".replace("%", "%%")
            group.add_argument(
                f"--{setting.path}",
                *short.get(setting.path, []),
                default=argparse.SUPPRESS,
                metavar=setting.kind,
                help=told if setting.path in seen else argparse.SUPPRESS,
            )
    parser.set_defaults(settings=chosen)


def flags(given: argparse.Namespace) -> dict[str, str]:
    """The settings given as flags: dotted path → text."""
    return {path: text for path, text in vars(given).items() if path in given.settings}


def show(*lines: str) -> None:
    """Write lines of results to stdout."""
    for line in lines:
        sys.stdout.write(f"{shown(line)}\n")


def say(line: str) -> None:
    """Write a line to stderr; of several processes on a machine, only the first does."""
    if number("LOCAL_RANK") == 0:
        sys.stderr.write(f"{shown(line)}\n")


def number(variable: str) -> int:
    """This process's number among those started together (RANK) or on this machine (LOCAL_RANK)."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() and os.environ.get("WORLD_SIZE", "1") != "1" else 0


class _AboveBars(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(shown(self.format(record)), file=sys.stderr)


@contextmanager
def logged() -> Iterator[None]:
    """Show what is logged; of several processes, only the first does."""
    log, library, handler = logging.getLogger("rcr_trainer"), logging.getLogger("langchain_rcr"), _AboveBars()
    level = log.level
    log.addHandler(handler)
    library.addHandler(handler)
    log.setLevel(logging.ERROR if number("RANK") else logging.INFO)
    try:
        yield
    finally:
        library.removeHandler(handler)
        log.removeHandler(handler)
        log.setLevel(level)
