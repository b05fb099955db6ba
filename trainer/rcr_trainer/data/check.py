"""Looks at example files as a run reads them, and says which rows need fixing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rcr_trainer.data.examples import Example, Split
from rcr_trainer.data.files import ReadReport, read_examples, text_fields, unparsed
from rcr_trainer.errors import DataError

if TYPE_CHECKING:
    from langchain_rcr.programs import ProgramSpec

_SOURCES = ("source", "question", "utterance", "sentence", "nl", "text", "input", "instruction", "prompt", "query")
_TARGETS = ("target", "sql", "program", "code", "logical_form", "query", "lf", "mrl", "output", "completion", "answer")
"""What data sets call the two fields, the plainest names first."""
_SAMPLE = 200
"""Rows from which keys and language are guessed."""
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Keys:
    """The fields that hold question, program and id."""

    source: str = "source"
    target: str = "target"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a file.

    Args:
        text: in a line.
        places: where, each a line of its own.
        fix: whether it should be fixed.
        overlap: whether it says what the file shares with the training data.
    """

    text: str
    places: Sequence[str] = ()
    fix: bool = False
    overlap: bool = False


@dataclass(slots=True)
class FileCheck:
    """What was found in a file.

    Args:
        name: of the file.
        examples: those that a run would use.
        report: what reading it found.
        findings: what needs fixing first.
    """

    name: str
    examples: Sequence[Example]
    report: ReadReport
    findings: list[Finding] = field(default_factory=list)

    def note(
        self, count: int, text: str, places: Iterable[str] = (), *, fix: bool = False, overlap: bool = False
    ) -> None:
        """Add a finding, unless there is nothing to say: `text` is formatted with {count} and {total}."""
        if count:
            said = text.format(count=count, total=len(self.examples))
            self.findings.append(Finding(said, list(places), fix, overlap))

    def at(self, numbers: Iterable[int]) -> list[str]:
        """Examples by their positions, each with its place and its question."""
        return [f"{self.place(number)}: {_short(self.examples[number].source)}" for number in numbers]

    def place(self, number: int) -> str:
        """Where an example stands."""
        return f"{self.report.unit} {self.report.places[number]}"


def guess_keys(path: str | Path, source: str | None = None, target: str | None = None) -> Keys:
    """The fields that hold question and program, by their names or as the only two that hold text.

    Args:
        path: the file.
        source: the field of the question, if it is known.
        target: the field of the program, if it is known.

    Raises:
        DataError: the file can't be read, it isn't clear which fields are meant, or both are the same.
    """
    if source is not None and source == target:
        raise DataError(f"{path}: question and program can't both be field {source!r}")
    if source is not None and target is not None:
        return Keys(source, target)
    fields = text_fields(path, _SAMPLE)
    by_name = {name.casefold(): name for name in reversed(fields)}
    free = [name for name in fields if name not in (source, target)]
    source = source or next((by_name[n] for n in _SOURCES if n in by_name and by_name[n] != target), None)
    target = target or next((by_name[n] for n in _TARGETS if n in by_name and by_name[n] != source), None)
    left = [name for name in free if name not in (source, target)]
    if (source is None) != (target is None) and len(left) == 1:
        source, target = source or left[0], target or left[0]
    if source is None or target is None:
        missing = "question (--source-key)" if source is None else "program (--target-key)"
        shown = ", ".join(fields[:10]) or "none"
        raise DataError(f"{path}: it isn't clear which field holds the {missing}; fields with text: {shown}")
    return Keys(source, target)


def guess_language(programs: Sequence[str]) -> tuple[str, str]:
    """The language that most of the programs parse as.

    Args:
        programs: texts; of many, an even sample is looked at.

    Returns:
        The language, `tokens` where fewer than half parse as any, and in words how many parse as each.
    """
    from langchain_rcr.programs.languages import LANGUAGES, TOKENS, parse

    sample = programs[:: max(1, len(programs) // _SAMPLE)]
    languages = [name for name in LANGUAGES if name != TOKENS]
    counts = {name: sum(parse(text, name) is not None for text in sample) for name in languages}
    best = max(counts, key=lambda name: counts[name])
    names = sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])
    told = ", ".join(f"{counts[name]} as {name}" for name in names[1:])
    said = f"{counts[best]} of {len(sample)} programs parse as {best}{told and ', '}{told}"
    return best if 2 * counts[best] >= len(sample) else TOKENS, said


def check_files(
    paths: Sequence[Path], keys: Keys, spec: ProgramSpec, *, collect: bool = True, near: bool = True
) -> list[FileCheck]:
    """Look at files, and compare each with the first.

    Args:
        paths: the pool and training questions, then held-out questions.
        keys: their fields.
        spec: how programs are read.
        collect: go on after a row that can't be read.
        near: also look for questions that nearly repeat others, which takes some 0.2 ms each.

    Raises:
        DataError: a file can't be read, or, without `collect`, a row.
    """
    checks: list[FileCheck] = []
    for path in paths:
        read = read_examples(path, source_key=keys.source, target_key=keys.target, id_key=keys.id, collect=collect)
        checks.append(check := FileCheck(path.name, *read))
        _check_rows(check, spec)
        if len(checks) > 1:
            _compare(check, checks[0], spec)
        _check_repeats(check, spec)
    if near:
        _check_near(checks)
    for check in checks:
        check.findings.sort(key=lambda finding: not finding.fix)
    return checks


def check_split(split: Split, spec: ProgramSpec) -> list[FileCheck]:
    """What development and test examples of a split share with its training examples, for all that have any."""
    training, *held_out = (
        FileCheck(part, examples, ReadReport(part, places=[*range(1, len(examples) + 1)]))
        for part, examples in (("train", split.train), ("dev", split.dev), ("test", split.test))
    )
    for check in held_out:
        _compare(check, training, spec)
    return held_out


def in_one_line(checks: Sequence[FileCheck]) -> str:
    """What the files hold, what they share, and what needs fixing."""
    sizes = ", ".join(f"{check.name} {len(check.examples):,} examples" for check in checks)
    named = [(f"{check.name}: {finding.text}", finding) for check in checks for finding in check.findings]
    overlaps = [f"; {text}" for text, finding in named if finding.overlap]
    to_fix = [text for text, finding in named if finding.fix]
    said = "".join([sizes, *overlaps])
    return f"{said}; to fix: {'; '.join(to_fix)} (`rcr-train data check` names the rows)" if to_fix else said


def _check_rows(check: FileCheck, spec: ProgramSpec) -> None:
    """Rows that can't be used, and programs that don't parse."""
    report, examples = check.report, check.examples
    check.note(len(report.faults), "rows that can't be read: {count}", report.faults, fix=True)
    blank = [f"{report.unit} {place}" for place in report.empty]
    check.note(len(blank), "rows without question or program, which are left out: {count}", blank, fix=True)
    broken = set(unparsed(examples, spec))
    numbers = [number for number, example in enumerate(examples) if example.id in broken]
    text = f"programs that don't parse as {spec.language}, which count by their tokens alone: {{count}} of {{total}}"
    if 2 * len(numbers) > len(examples):
        text += f" ({guess_language([example.target for example in examples])[1]})"
    places = [f"{check.place(number)}: {_short(examples[number].target)}" for number in numbers]
    check.note(len(numbers), text, places, fix=True)


def _compare(check: FileCheck, training: FileCheck, spec: ProgramSpec) -> None:
    """What held-out examples share with the training data."""
    pairs, questions = shared(check.examples, training.examples)
    flatters = "figures on them say nothing about new questions"
    check.note(
        len(pairs),
        f"pairs that are also in {training.name}: {{count}} of {{total}}; {flatters}",
        check.at(pairs),
        fix=True,
    )
    text = f"questions that {training.name} has with another program: {{count}} of {{total}}; {flatters}"
    check.note(len(questions), text, check.at(questions), fix=True)
    known = {spec.key(target) for target in {example.target for example in training.examples}}
    count = sum(spec.key(example.target) in known for example in check.examples)
    check.note(
        count,
        f"programs (values aside) that also occur in {training.name}: {{count}} of {{total}}; normal where both come "
        "from one source, but they test no new combinations",
        overlap=True,
    )


def _check_repeats(check: FileCheck, spec: ProgramSpec) -> None:
    """Pairs, questions and programs that a file has more than once."""
    examples = check.examples
    repeated = check.report.duplicates
    check.note(len(repeated), "rows that repeat an earlier one: {count} of {total}", [check.report.at(repeated)])
    programs: dict[str, dict[str, int]] = defaultdict(dict)
    for number, example in enumerate(examples):
        programs[plain(example.source)].setdefault(plain(example.target), number)
    several = [numbers for numbers in programs.values() if len(numbers) > 1]
    places = [f"{check.at(numbers.values())[0]} ({len(numbers)} programs)" for numbers in several]
    check.note(len(several), "questions with several programs: {count}", places)
    keys = [spec.key(example.target) for example in examples]
    if keys:
        ((common, count),) = Counter(keys).most_common(1)
        first = keys.index(common)
        places = [f"{check.place(first)}: {_short(examples[first].target)}"] if count > 1 else []
        text = f"different programs, values aside: {{count}}; the commonest is behind {count} questions"
        check.note(len(set(keys)), text, places)


def _check_near(checks: Sequence[FileCheck]) -> None:
    """Questions that nearly repeat another, in their own file or the first."""
    from rcr_trainer.data.similar import near_repeats

    training = checks[0]
    for check in checks:
        before = [] if check is training else [example.source for example in training.examples]
        texts = [*before, *(example.source for example in check.examples)]
        within, across = [], []
        for earlier, later in near_repeats(texts):
            if later < len(before) or plain(texts[earlier]) == plain(texts[later]):
                continue
            own = later - len(before)
            if earlier < len(before):
                across.append(f"{check.at([own])[0]} ~ {training.name}, {training.at([earlier])[0]}")
            else:
                within.append(f"{check.at([own])[0]} ~ {check.at([earlier - len(before)])[0]}")
        check.note(len(across), f"questions that nearly repeat one of {training.name}: {{count}} of {{total}}", across)
        check.note(len(within), "questions that nearly repeat an earlier one: {count} of {total}", within)


def shared(held_out: Sequence[Example], training: Sequence[Example]) -> tuple[list[int], list[int]]:
    """Which held-out examples are in the training data, too, up to case and spaces.

    Returns:
        Positions of those with question and program, and of those with their question but another program.
    """
    pairs = {(plain(example.source), plain(example.target)) for example in training}
    questions = {source for source, _ in pairs}
    both: list[int] = []
    question: list[int] = []
    for number, example in enumerate(held_out):
        source = plain(example.source)
        if (source, plain(example.target)) in pairs:
            both.append(number)
        elif source in questions:
            question.append(number)
    return both, question


def plain(text: str) -> str:
    """A text without its case and with one space wherever it has some."""
    return " ".join(text.split()).casefold()


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
