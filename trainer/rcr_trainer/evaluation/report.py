"""What an evaluation leaves on disk: its figures in evaluation.json, and who picked what in picks.jsonl.

Rates are in percent, latencies in milliseconds. picks.jsonl has a line for each example that any selector picked, then
a line for each question, which refers to examples by their line numbers, from 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter, ValidationError

from langchain_rcr.basics.extras import library_versions
from langchain_rcr.basics.files import write_text
from rcr_trainer.baselines import NO_EXAMPLES
from rcr_trainer.data.examples import Example, read_text
from rcr_trainer.errors import DataError

REPORT, PICKS, MARKDOWN = "evaluation.json", "picks.jsonl", "report.md"
FORMAT_VERSION = 3
OURS = "rcr"
WITHOUT_RL = "rcr_without_rl"

Metric: TypeAlias = Literal["coverage", "full_coverage", "exact_match", "execution"]
Interval: TypeAlias = tuple[float, float]
Kind: TypeAlias = Literal["trained", "plain", "oracle"]
"""Ours are trained; an oracle sees the gold program; all others are plain, including those that learn from scores."""


@dataclass(slots=True)
class SelectorScores:
    """One selector's figures, for the report's k; None from `exact_match` on where no language model was asked."""

    kind: Kind  # what it needs to pick
    coverage: float  # share of the gold program's structures that the picks cover together, mean over queries, %
    full_coverage: float  # queries with no structure missing, %
    prompt_length: float  # characters of the picks' questions and programs, mean over queries
    latency_ms: float  # one query alone with its encoding, ms: median of 25, each the shortest of three calls
    latency_batch_ms: float  # a query among 64 picked together, likewise
    exact_match: float | None = None  # answers that are the gold program, %
    jaccard: float | None = None  # similarity of the local structures of answer and gold program (Eq. 6), mean, %
    no_program: float | None = None  # answers that hold no program, %
    # Answers with the gold program's result, of those that can be compared, %; None without a database.
    execution: float | None = None
    prompt_tokens: float | None = None  # as the language model counts them, mean over the queries asked
    completion_tokens: float | None = None  # likewise
    cost: float | None = None  # dollars per thousand queries, if every prompt were asked anew; None without prices
    # By metric, the 95 % interval of rcr's figure minus this one, points (`metrics.paired_intervals`).
    intervals: dict[Metric, Interval] = field(default_factory=dict)


FIGURES = {
    "exact_match": ("exact match %", 1),
    "execution": ("same rows %", 1),
    "coverage": ("coverage %", 1),
    "full_coverage": ("full cov. %", 1),
    "prompt_length": ("chars", 0),
    "latency_ms": ("ms/query", 2),
    "jaccard": ("structure Jaccard %", 1),
    "prompt_tokens": ("prompt tokens", 0),
    "cost": ("$ for 1,000 questions", 3),
}
"""Figures of `SelectorScores`: title and decimals."""


@dataclass(slots=True)
class Choice:
    """How a selector's trade-off was chosen."""

    parameter: str
    value: float
    coverage: dict[float, float] = field(default_factory=dict)  # by value, %, on the queries used to choose
    n: int = 0  # how many queries those were
    chosen_on: str = "dev"  # "dev"; "pool" for want of dev; "nothing" where the default was kept


@dataclass(slots=True)
class AnswersAsked:
    """The language model that answered, given the selectors' picks."""

    model: str  # its name
    n: int  # queries asked; the figures of answers are for these alone
    programs: int  # different gold programs among them
    missing: str = ""  # why some selectors have no answers; empty if all have
    unpaid: bool = False  # whether that is because the budget was spent
    order: str = "reversed"  # of our picks in a prompt
    told: int = 0  # questions whose gold program's result is known, the basis of `execution`; 0 without a database


@dataclass(slots=True)
class EvaluationReport:
    """Several selectors on the same queries and pool."""

    k: int  # picks that the figures are for
    n: int  # queries that counted
    programs: int  # different gold programs among them, up to anonymised values
    split: str  # name of the data split ("110", "template", …)
    seed: int  # of the run
    selectors: dict[str, SelectorScores]  # figures by selector; the trained retriever is `rcr`
    pool_size: int  # candidates
    part: str = "test"  # which of the split's queries, "test" or "dev"
    skipped_queries: int = 0  # left out because their gold program doesn't parse
    left_out: dict[str, str] = field(default_factory=dict)  # selectors that were not run, with the reason
    unpaid: bool = False  # whether some were left out because the language model's budget was spent
    trade_offs: dict[str, Choice] = field(default_factory=dict)  # how selectors' trade-offs were chosen
    repeated: int = 0  # test queries whose question and program are also an example of the pool
    answers: AnswersAsked | None = None  # the language model that was asked, if any
    # The settings that differ from the run's config.yaml, as in "evaluation.k (4, now 6)".
    changed: list[str] = field(default_factory=list)
    advice: str = ""  # the conclusion, in a paragraph
    versions: dict[str, str] = field(default_factory=dict)  # of the libraries
    format_version: int = FORMAT_VERSION  # of this file

    @classmethod
    def of(cls, picks: Picks, **about: Any) -> EvaluationReport:
        """The report on these picks, still without rates and times; `about` are the fields that they don't tell."""
        selectors = {}
        for name in picks[0].selectors:
            own = [each.selectors[name] for each in picks]
            length = fmean(sum(len(each.source) + len(each.target) for each in picked.picks) for picked in own)
            selectors[name] = SelectorScores(own[0].kind, 0.0, 0.0, length, 0.0, 0.0)
        programs = len({each.program for each in picks})
        return cls(n=len(picks), programs=programs, selectors=selectors, versions=library_versions(), **about)

    @property
    def oracle(self) -> SelectorScores | None:
        """The figures of the oracle, if it was run."""
        return next((scores for scores in self.selectors.values() if scores.kind == "oracle"), None)

    @property
    def answered(self) -> int:
        """With how many selectors' picks a language model has answered."""
        return sum(scores.exact_match is not None for scores in self.selectors.values())

    @property
    def right(self) -> Metric:
        """The metric that decides whether answers are right: their results, given a database, else exact match."""
        return "execution" if self.answers is not None and self.answers.told else "exact_match"

    def best_plain(self, metric: Metric = "coverage") -> str | None:
        """The best plain selector, the first of equals; for coverage, not `no_examples`."""
        none = () if metric in ("exact_match", "execution") else (NO_EXAMPLES,)
        plain = {name: each for name, each in self.selectors.items() if each.kind == "plain" and name not in none}
        figures = {name: own for name, each in plain.items() if (own := getattr(each, metric)) is not None}
        return max(figures, key=figures.__getitem__, default=None)

    def to_json(self) -> str:
        """The report as JSON: rates rounded to 2 decimals, latencies to 3, costs to 6."""
        values = json.loads(json.dumps(asdict(self)), parse_float=lambda text: round(float(text), 2))
        for name, scores in self.selectors.items():
            for figure, digits in (("latency_ms", 3), ("latency_batch_ms", 3), ("cost", 6)):
                value = getattr(scores, figure)
                values["selectors"][name][figure] = None if value is None else round(value, digits)
        return json.dumps(values, indent=2, allow_nan=False) + "\n"

    def write(self, directory: str | Path) -> None:
        """Write evaluation.json into the directory, whole or not at all."""
        write_text(Path(directory) / REPORT, self.to_json())

    @classmethod
    def read(cls, directory: str | Path) -> EvaluationReport:
        """Read evaluation.json in the directory, or raise a `DataError`."""
        path = Path(directory) / REPORT
        try:
            report = _ADAPTER.validate_json(read_text(path))
        except ValidationError as error:
            raise DataError(f"{path} is not an evaluation report: {_first_of(error)}") from error
        if report.format_version > FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {report.format_version}, this library reads up to {FORMAT_VERSION}"
            )
        return report


@dataclass(slots=True)
class Picked:
    """One selector's picks for one question; fields from `answer` on are None where no language model was asked."""

    kind: Kind  # what the selector needs to pick
    picks: list[Example]  # the k examples, in pick order
    # For each of the question's structures, the number of the first pick that has it, from 1; 0 if none.
    covered: list[int]
    answer: str | None = None  # the program that the language model answered with, if any
    exact: bool | None = None  # whether that is the gold program
    jaccard: float | None = None  # similarity of the local structures of answer and gold program (Eq. 6), 0 to 1
    execution: bool | None = None  # whether both give the same result; None also where that is unknown


@dataclass(slots=True)
class Question:
    """A question with the picks of all selectors."""

    id: str  # of the question
    question: str  # its text
    gold: str  # its gold program
    # The gold program in a canonical form, values anonymised; intervals draw questions with the same one together.
    program: str
    structures: list[str]  # the gold program's, sorted
    selectors: dict[str, Picked]  # what each selector picked, by name
    fields: Mapping[str, Any] = field(default_factory=dict)  # the question's further fields; not in the file
    home: str = ""  # its database, if any (`Item.home`); not in the file


Picks: TypeAlias = Sequence[Question]  # every question has the same selectors


def write_picks(directory: str | Path, picks: Picks) -> None:
    """Write picks.jsonl into the directory, whole or not at all."""
    numbers: dict[Example, int] = {}
    lines = []
    for question in picks:
        line = _QUESTION.dump_python(question, exclude={"fields", "home"}, exclude_defaults=True)
        for name, own in question.selectors.items():
            line["selectors"][name]["picks"] = [numbers.setdefault(each, len(numbers)) for each in own.picks]
        lines.append(line)
    shown = [{"example": {"id": each.id, "source": each.source, "target": each.target}} for each in numbers]
    texts = (json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in [*shown, *lines])
    write_text(Path(directory) / PICKS, "".join(texts))


def read_picks(directory: str | Path) -> list[Question]:
    """Read picks.jsonl in the directory, or raise a `DataError`."""
    path = Path(directory) / PICKS
    examples: list[Example] = []
    picks: list[Question] = []
    lines = StringIO(read_text(path))  # str.splitlines would split at more than line feeds
    try:
        for number, text in enumerate(lines, 1):  # noqa: B007
            line = json.loads(text)
            if "example" in line:
                examples.append(_EXAMPLE.validate_python(line["example"]))
                continue
            for own in line["selectors"].values():
                own["picks"] = [examples[each] for each in own["picks"]]
            picks.append(_QUESTION.validate_python(line))
    except ValidationError as error:
        raise DataError(f"{path}, line {number}: {_first_of(error)}") from error
    except IndexError:
        raise DataError(f"{path} is damaged: it lacks examples that were picked") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: not what an evaluation writes") from error
    if any(each.selectors.keys() != picks[0].selectors.keys() for each in picks):
        raise DataError(f"{path} is damaged: the selectors don't have the same questions")
    return picks


def _first_of(error: ValidationError) -> str:
    """The first fault and its place."""
    first = error.errors()[0]
    return ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")


_ADAPTER = TypeAdapter(EvaluationReport)
_QUESTION, _EXAMPLE = TypeAdapter(Question), TypeAdapter(Example)
