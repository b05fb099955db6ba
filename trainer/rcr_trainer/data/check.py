"""Checks example files as a run reads them, and says which rows need fixing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from langchain_rcr.basics.items import DATABASE
from langchain_rcr.programs import ProgramSpec
from langchain_rcr.programs.languages import SAMPLE, guess_language
from rcr_trainer.data.examples import Example, Split
from rcr_trainer.data.files import ReadReport, read_examples, text_fields, unparsed
from rcr_trainer.errors import DataError

_SOURCES = ("source", "question", "utterance", "sentence", "nl", "text", "input", "instruction", "prompt", "query")
_TARGETS = ("target", "sql", "program", "code", "logical_form", "query", "lf", "mrl", "output", "completion", "answer")
"""Names of the two fields in data sets, the plainest first."""
_EXPORTED = ("inputs.", "messages.user"), ("outputs.", "messages.assistant")
"""Prefixes of the two fields' names in exports of LangSmith or OpenAI."""
_WIDTH = 100
_FLATTERS = "figures on them say nothing about new questions"


@dataclass(frozen=True, slots=True)
class Keys:
    """The fields that hold question, program and id."""

    source: str = "source"
    target: str = "target"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One line about a file."""

    text: str
    places: Sequence[str] = ()  # where, a line each
    fix: bool = False  # needs fixing
    overlap: bool = False  # about what the file shares with the training data


@dataclass(slots=True)
class FileCheck:
    """The result of checking a file: the examples that a run would use, how they were read, and the findings."""

    name: str
    examples: Sequence[Example]
    report: ReadReport
    findings: list[Finding] = field(default_factory=list)

    def at(self, number: int, text: str | None = None) -> str:
        """The place of an example, and its question or another text."""
        line = " ".join((self.examples[number].source if text is None else text).split())
        line = line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
        return f"{self.report.unit} {self.report.places[number]}: {line}"


def guess_keys(path: Path, source: str | None = None, target: str | None = None) -> Keys:
    """The fields of question and program, by name or as the only two with text; a `DataError` if it isn't clear."""
    if source is not None and source == target:
        raise DataError(f"{path}: question and program can't both be field {source!r}")
    if source is not None and target is not None:
        return Keys(source, target)
    fields = text_fields(path, SAMPLE)
    source = source or _named(fields, _SOURCES, _EXPORTED[0], target)
    target = target or _named(fields, _TARGETS, _EXPORTED[1], source)
    left = [name for name in fields if name not in (source, target)]
    if (source is None) != (target is None) and len(left) == 1:
        source, target = source or left[0], target or left[0]
    if source is None or target is None:
        missing = "question (--source-key)" if source is None else "program (--target-key)"
        shown = ", ".join(fields[:10]) or "none"
        raise DataError(f"{path}: it isn't clear which field holds the {missing}; fields with text: {shown}")
    return Keys(source, target)


def _named(fields: Sequence[str], names: Sequence[str], exported: Sequence[str], other: str | None) -> str | None:
    """The field with the plainest of these names, alone or inside an export; else the export's only field."""
    possible = [name for name in fields if name != other]
    inside = [name for name in possible if name.startswith(tuple(exported))]
    for name in names:
        for own in possible:
            if name in (own.casefold(), own.casefold().rpartition(".")[2] if own in inside else ""):
                return own
    chats = [name for name in inside if name.endswith(exported[-1])]
    return next((found[0] for found in (chats, inside) if len(found) == 1), None)


def check_files(paths: Sequence[Path], keys: Keys, spec: ProgramSpec) -> list[FileCheck]:
    """Check files, and compare each with the first; a row that can't be read doesn't stop the check."""
    checks: list[FileCheck] = []
    for path in paths:
        read = read_examples(path, source_key=keys.source, target_key=keys.target, id_key=keys.id, collect=True)
        checks.append(check := FileCheck(path.name, *read))
        found = [*_in_rows(check, spec), *(_in_both(check, checks[0], spec) if len(checks) > 1 else ())]
        check.findings = sorted(found, key=lambda finding: not finding.fix)
    return checks


def check_split(split: Split, spec: ProgramSpec) -> list[FileCheck]:
    """What the development and test examples of a split share with its training examples."""
    training, *held_out = (
        FileCheck(part, examples, ReadReport(part, places=[*range(1, len(examples) + 1)]))
        for part, examples in (("train", split.train), ("dev", split.dev), ("test", split.test))
    )
    for check in held_out:
        check.findings = [*_in_both(check, training, spec)]
    return held_out


def in_one_line(checks: Sequence[FileCheck]) -> str:
    """What the files hold, what they share, and what needs fixing."""
    sizes = ", ".join(f"{check.name} {len(check.examples):,} examples" for check in checks)
    named = [(f"{check.name}: {finding.text}", finding) for check in checks for finding in check.findings]
    said = "; ".join([sizes, *(text for text, finding in named if finding.overlap)])
    to_fix = "; ".join(text for text, finding in named if finding.fix)
    return f"{said}; to fix: {to_fix} (`rcr-train data check` names the rows)" if to_fix else said


def _in_rows(check: FileCheck, spec: ProgramSpec) -> Iterator[Finding]:
    """Rows that can't be used or repeat others, and programs that don't parse."""
    report, examples = check.report, check.examples
    if report.faults:
        yield Finding(f"rows that can't be read: {len(report.faults)}", report.faults, fix=True)
    if report.empty:
        text = f"rows without question or program, which are left out: {len(report.empty)}"
        yield Finding(text, [f"{report.unit} {place}" for place in report.empty], fix=True)
    if broken := set(unparsed(examples, spec)):
        places = [check.at(n, example.target) for n, example in enumerate(examples) if example.id in broken]
        text = f"programs that don't parse as {spec.language}, which count by their tokens alone"
        text += f": {len(places)} of {len(examples)}"
        if 2 * len(places) > len(examples):
            text += f" ({guess_language([example.target for example in examples])[1]})"
        yield Finding(text, places, fix=True)
    if repeated := report.duplicates:
        text = f"rows that repeat an earlier one, so that a prompt may show both: {len(repeated)} of {len(examples)}"
        yield Finding(text, [report.at(repeated)])


def _in_both(check: FileCheck, training: FileCheck, spec: ProgramSpec) -> Iterator[Finding]:
    """What a file shares with the training data."""
    pairs, questions = shared(check.examples, training.examples)
    total = len(check.examples)
    if pairs:
        text = f"pairs that are also in {training.name}: {len(pairs)} of {total}; {_FLATTERS}"
        yield Finding(text, [*map(check.at, pairs)], fix=True)
    if questions:
        text = f"questions that {training.name} has with another program: {len(questions)} of {total}; {_FLATTERS}"
        yield Finding(text, [*map(check.at, questions)], fix=True)
    known = {spec.key(target) for target in {example.target for example in training.examples}}
    if count := sum(spec.key(example.target) in known for example in check.examples):
        text = f"programs (values aside) that also occur in {training.name}: {count} of {total}; "
        text += "normal where both come from one source, but they test no new combinations"
        yield Finding(text, overlap=True)


def shared(held_out: Sequence[Example], training: Sequence[Example]) -> tuple[list[int], list[int]]:
    """Positions of held-out examples that training has too (`plain`), and of those that it has with another program.

    The same question about another database (`DATABASE`) is another one.
    """
    known = {each.plain for each in training}
    questions = {(each.plain[0], str(each.fields.get(DATABASE))) for each in training}
    pairs = [(each.plain, str(each.fields.get(DATABASE))) for each in held_out]
    both = [number for number, (pair, _) in enumerate(pairs) if pair in known]
    others = (n for n, (pair, home) in enumerate(pairs) if (pair[0], home) in questions and pair not in known)
    return both, [*others]
