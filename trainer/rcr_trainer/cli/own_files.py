"""The commands `data check`, `init`, `data text2sql` and `data spider`."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from langchain_rcr.basics.files import write_text
from langchain_rcr.programs import ProgramSpec, get_parser
from langchain_rcr.programs.languages import guess_language
from rcr_trainer.cli.console import PROG, show
from rcr_trainer.data.check import Keys, check_files, guess_keys
from rcr_trainer.data.examples import Split, write_split
from rcr_trainer.data.files import SHOWN, read_examples
from rcr_trainer.data.spider import spider_split
from rcr_trainer.data.text2sql import text2sql_split
from rcr_trainer.errors import ConfigError
from rcr_trainer.runs.layers import check_name, fresh_yaml, run_name


def check(given: argparse.Namespace) -> int:
    """Say what is in files and which rows need fixing; the exit code is 1 if any do."""
    keys = replace(guess_keys(given.files[0], given.source_key, given.target_key), id=given.id_key)
    guessed, counts = guess_language(_programs(given.files[0], keys))
    language = given.language or guessed
    checks = check_files(given.files, keys, ProgramSpec(language=language))
    show(f"question: field {keys.source!r}; program: field {keys.target!r}; language: {language} ({counts})")
    for each in checks:
        delimiter = each.report.delimiter
        between = f", fields between {delimiter!r}" if delimiter not in (None, ",") else ""
        show(f"{each.report.path}: {each.report.rows:,} rows, {len(each.examples):,} examples{between}")
        for finding in each.findings:
            show(f"{'!' if finding.fix else ' '} {finding.text}")
            show(*(f"      {place}" for place in finding.places[:SHOWN]))
            if len(finding.places) > SHOWN:
                show(f"      … and {len(finding.places) - SHOWN:,} more")
    faults = sum(finding.fix for each in checks for finding in each.findings)
    show("Nothing needs fixing." if not faults else f"To fix: {faults}, marked with !")
    return min(1, faults)


def _programs(path: Path, keys: Keys) -> list[str]:
    examples, _ = read_examples(path, source_key=keys.source, target_key=keys.target, collect=True)
    return [example.target for example in examples]


def init(given: argparse.Namespace) -> None:
    """Write a settings file, for the user's own files if any are given."""
    path: Path = given.path
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the name of a file, {path / 'config.yaml'} say")
    check_name(path)
    if path.exists() and not given.force:
        raise ConfigError(f"{path} exists: give another name, or --force to overwrite it")
    about = {given.dev, given.test, given.source_key, given.target_key, given.language}
    if given.train is None and about != {None}:
        raise ConfigError("--dev, --test, --language and keys need --train, the pool and the training questions")

    values: dict[str, Any] = {} if given.train is None else _settings_of(given)
    write_text(path, fresh_yaml(run_name(path), values))
    word = _words(path)
    if given.train is None:
        show(f"{path} written, with all settings, for COVR-10, sampled from its grammar. Next: {PROG} run {word}")
        show(f"For your own questions and programs: {PROG} init --train my.jsonl --test test.jsonl {word} --force")
        return
    found = [f"{name.rpartition('.')[2]}: {value}" for name, value in values.items() if name != "data.task"]
    show(f"{path} written ({', '.join(found)})")
    named = {"--source-key": given.source_key, "--target-key": given.target_key, "--language": given.language}
    flags = "".join(f" {flag}={shlex.quote(value)}" for flag, value in named.items() if value is not None)
    show(f"Next: {PROG} data check {_words(given.train, given.dev, given.test)}{flags}")
    show(f"then: {PROG} run {word}")


def _words(*paths: Path | None) -> str:
    """Paths quoted for a shell, none of which looks like an option."""
    return shlex.join(f"./{path}" if str(path).startswith("-") else str(path) for path in paths if path is not None)


def _settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """What differs from the defaults for these files: dotted path → value."""
    if given.language is not None:
        get_parser(given.language)
    keys = guess_keys(given.train, given.source_key, given.target_key)
    values: dict[str, Any] = {"data.task": "files"}
    programs = _programs(given.train, keys)
    for part in ("train", "dev", "test"):
        if (file := getattr(given, part)) is not None:
            values[f"data.{part}"] = str(file)
            if not (programs if part == "train" else _programs(file, keys)):
                read_examples(file, source_key=keys.source, target_key=keys.target)  # raises what is wrong
    values |= {"data.source_key": keys.source, "data.target_key": keys.target}
    values["program.language"] = given.language or guess_language(programs)[0]
    if given.test is None:
        values["evaluation.split"] = "dev"
    return values


def text2sql(given: argparse.Namespace) -> None:
    """Turn a file of the text2sql-data collection into a split folder."""
    _write(given.out, text2sql_split(given.file, given.split, given.fold), "--program.language=sql")


def spider(given: argparse.Namespace) -> None:
    """Turn Spider's questions into a split folder, and say what is missing."""
    databases = given.databases or given.folder / "database"
    split = spider_split(given.folder, given.split, databases, given.samples)
    show(*(f"{count} questions left out: {reason}." for reason, count in split.meta["left_out"].items()))
    for what in ("missing_databases", "empty_tables"):
        if split.meta[what]:
            show(f"{what.replace('_', ' ')}: {', '.join(split.meta[what])}")
    rest = shlex.quote(f"--reward.database={databases}")
    _write(given.out, split, f"--program.language=sql:sqlite --prompt.name=sql_chat {rest}")


def _write(out: Path, split: Split, flags: str) -> None:
    write_split(out, split)
    show(f"{out} written: {', '.join(f'{count} {part}' for part, count in split.counts().items())}.")
    show(f"Next: {PROG} run CONFIG --data.task=files {shlex.quote(f'--data.directory={out}')} {flags}")
