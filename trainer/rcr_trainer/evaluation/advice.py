"""An evaluation in one paragraph: what the data allows, where the selectors stand, whether ours is worth deploying.

Differences come with 95 % intervals over the queries, paired; they take queries for independent draws and know one
training run only. The best plain selector is the best of several on these same queries, which is in its favour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rcr_trainer.baselines import STRONGEST
from rcr_trainer.evaluation.report import OURS, WITHOUT_RL, EvaluationReport, Metric, SelectorScores

FEW_QUERIES = 30
LITTLE_ROOM = 1.0
"""Points that are not worth a trained retriever."""
LOW_CEILING = 60.0
"""Oracle coverage, %, below which examples are wanted more than selectors."""
MORE_PICKS = 5.0
"""Points of oracle coverage that make more picks worth naming."""
_Z = 1.96
_TELLING = _Z + 0.84
"""Standard errors of a true difference that an interval misses 0 by four times in five."""


@dataclass(frozen=True, slots=True)
class Gap:
    """What ours has more than another selector, points; all rounded as they are shown, so that text and verdict agree.

    Args:
        name: the other's.
        metric: what is compared.
        n: queries.
        ours: our figure, %.
        other: the other's, %.
        points: the difference.
        error: its standard error; None: not known.
    """

    name: str
    metric: Metric
    n: int
    ours: float
    other: float
    points: float
    error: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %; None where the error is not known, or there are too few queries for one."""
        if self.error is None or self.n < FEW_QUERIES:
            return None
        return _shown(self.points - _Z * self.error), _shown(self.points + _Z * self.error)

    @property
    def clear(self) -> int:
        """1: ours is better; −1: worse; 0: the queries don't tell."""
        low, high = self.interval or (0.0, 0.0)
        return (low > 0) - (high < 0)

    def __str__(self) -> str:
        ends = f", 95 % interval {self.interval[0]:+.1f} to {self.interval[1]:+.1f}" if self.interval else ""
        return f"{self.points:+.1f} points{ends}"


def advise(report: EvaluationReport) -> str:
    """The paragraph, in plain English; nothing that the report's figures don't bear out.

    Args:
        report: of ours (`rcr`) beside plain selectors and, for what the data allows, the oracle.

    Returns:
        Sentences on one line.
    """
    ours = report.selectors.get(OURS)
    if ours is None:
        return "The trained retriever was not evaluated."
    sentences = [_on_data(report)]
    best = report.best_plain()
    if best is None:
        sentences.append(
            f"rcr covers {_shown(ours.coverage):.1f} %. No plain selector was run beside it, so nothing is said of "
            "whether it is worth deploying."
        )
        return " ".join([*sentences, *_on_reinforcement(report), *_on_part(report)])
    gap, answers = _gap(report, best[0], "coverage"), _answers_gap(report)
    sentences.append(_standing(gap, _room(report, gap)))
    sentences += [*_on_answers(report, answers, gap.name), _verdict(report, gap, answers)]
    if gap.clear > 0 and STRONGEST not in report.selectors:
        sentences.append(f"{STRONGEST}, as a rule the strongest plain selector, was not run: it may come closer.")
    return " ".join([*sentences, *_on_reinforcement(report), *_on_part(report)])


# ---------------------------------------------------------------- figures


def _shown(value: float) -> float:
    """Rounded to one decimal, never −0."""
    return round(value, 1) + 0.0


def _gap(report: EvaluationReport, name: str, metric: Metric) -> Gap:
    ours, other = report.selectors[OURS], report.selectors[name]
    error = other.coverage_error if metric == "coverage" else other.exact_match_error
    n = report.n if metric == "coverage" or report.answers is None else report.answers.n
    mine, its = (_figure(scores, metric) for scores in (ours, other))
    return Gap(name, metric, n, _shown(mine), _shown(its), _shown(mine - its), error)


def _figure(scores: SelectorScores, metric: Metric) -> float:
    value: float = getattr(scores, metric)
    return value


def _answers_gap(report: EvaluationReport) -> Gap | None:
    """Exact match, beside the plain selector that is best in it; None where ours or all of those were not answered."""
    if report.answers is None or report.selectors[OURS].exact_match is None:
        return None
    best = report.best_plain("exact_match")
    return None if best is None else _gap(report, best[0], "exact_match")


def _room(report: EvaluationReport, gap: Gap) -> float | None:
    """Points between the best plain selector and the oracle; None without an oracle."""
    oracle = report.oracle
    return None if oracle is None else _shown(oracle.coverage - report.selectors[gap.name].coverage)


# ---------------------------------------------------------------- sentences


def _on_data(report: EvaluationReport) -> str:
    oracle, k = report.oracle, report.k
    if oracle is None:
        return "What the data allows is not known: no oracle was run."
    ceiling, most = _shown(oracle.coverage), _shown(oracle.coverage_by_step[-1])
    low = ceiling < LOW_CEILING
    only = "only " if low else ""
    what = "what the pool has of the gold programs" if report.gold == "pool" else "the gold programs"
    said = f"With {k} picks the data allows covering {only}{ceiling:.1f} % of {what} (the oracle, which sees them)"
    if not low:
        return f"{said}."
    more = f"more picks ({report.steps} allow {most:.1f} %) or " if most - ceiling >= MORE_PICKS else ""
    return f"{said}: the rest is out of any selector's reach and takes {more}more examples."


def _standing(gap: Gap, room: float | None) -> str:
    said = f"The best plain selector, {gap.name}, covers {gap.other:.1f} %, rcr {gap.ours:.1f} %: {gap}"
    if gap.clear > 0 and room is not None and room >= LITTLE_ROOM:
        closed = round(100 * gap.points / room)
        share = f"{closed} %" if closed < 100 else "all"
        said += f", {share} of the room up to the oracle"
    return f"{said}."


def _on_answers(report: EvaluationReport, gap: Gap | None, best: str) -> list[str]:
    """`best` is the plain selector that is best in coverage."""
    if gap is None or report.answers is None:
        return []
    who = "the simulator, which is no language model," if report.answers.simulated else report.answers.model
    if gap.ours == gap.other == 0:
        return [f"Whoever picks, {who} answers none of {gap.n} queries exactly."]
    rival = gap.name if gap.name == best else f"{gap.name}, the best plain selector in that,"
    said = (
        f"With rcr's picks {who} answers {gap.ours:.1f} % of {gap.n} queries exactly, with those of {rival} "
        f"{gap.other:.1f} %: {gap}"
    )
    return [f"{said}, too few to tell." if gap.n < FEW_QUERIES else f"{said}."]


def _verdict(report: EvaluationReport, gap: Gap, answers: Gap | None) -> str:
    """Whether to deploy; a language model's answers count for more than coverage, a simulator's for nothing."""
    if gap.n < FEW_QUERIES:
        return f"{gap.n} queries are too few to tell whether rcr is worth deploying: a hundred or more would be."
    if gap.error is None:
        return "How sure that is was not measured: evaluate again to learn whether rcr is worth deploying."
    real = None if report.answers is None or report.answers.simulated else answers
    if real is not None and real.clear < 0:
        return f"Answers are what counts: use {real.name}, not rcr."
    if real is not None and real.clear > 0:
        return "rcr is worth deploying: answers are what counts." if gap.clear <= 0 else "rcr is worth deploying."
    return _by_coverage(gap, gap.error, _room(report, gap), asked=real is not None)


def _by_coverage(gap: Gap, error: float, room: float | None, *, asked: bool) -> str:
    """The verdict where answers tell nothing; `asked` says that there are some."""
    if gap.clear < 0:
        unless = ", unless more answers decide otherwise" if asked else ""
        return f"rcr is not worth deploying here: use {gap.name}{unless}."
    if room is not None and room < LITTLE_ROOM and gap.points < LITTLE_ROOM:
        return f"{gap.name} leaves less than a point to the oracle and needs no training: use it."
    if gap.clear > 0 and gap.points < LITTLE_ROOM:
        return f"The gain is less than a point: {gap.name}, which needs no training, will do."
    if gap.clear > 0:
        asked_too = "; the answers don't tell yet" if asked else ""
        best = ", and leaves less than a point to the oracle" if room is not None and room - gap.points < 1 else ""
        return f"rcr is worth deploying{best}{asked_too}."
    return _undecided(gap, error)


def _undecided(gap: Gap, error: float) -> str:
    """How many more queries would tell a difference as large as this one, or of a point where this one is smaller."""
    difference = max(abs(gap.points), LITTLE_ROOM)
    more = math.ceil(gap.n * ((_TELLING * error / difference) ** 2 - 1))
    if more <= 0:
        return f"A difference of a point would have shown: {gap.name}, which needs no training, will do."
    size = "of a point" if difference == LITTLE_ROOM else "as large as this one"
    return (
        f"That is no clear difference: use {gap.name}, which needs no training, unless more queries decide otherwise "
        f"(about {_rough(more)} more would tell a difference {size})."
    )


def _rough(count: int) -> str:
    """To two figures."""
    return f"{round(count, 1 - math.floor(math.log10(count))) if count >= 100 else count:,}"


def _on_reinforcement(report: EvaluationReport) -> list[str]:
    """Whether reinforcement helped, by a language model's exact match where it answered, else by coverage."""
    before = report.selectors.get(WITHOUT_RL)
    if before is None:
        return []
    both = before.exact_match is not None and report.selectors[OURS].exact_match is not None
    metric: Metric = "exact_match" if both and report.answers and not report.answers.simulated else "coverage"
    gap = _gap(report, WITHOUT_RL, metric)
    what = f"{metric.replace('_', ' ')}: {gap}"
    if gap.interval is None:
        return [f"Whether reinforcement helped can't be told ({what})."]
    if gap.clear > 0:
        return [f"Reinforcement helped ({what})."]
    if gap.clear < 0:
        return [f"Reinforcement did harm ({what}): the policy before it is in checkpoint-sft."]
    return [f"Reinforcement made no clear difference ({what})."]


def _on_part(report: EvaluationReport) -> list[str]:
    if report.part != "dev":
        return []
    return [
        "These are development queries, on which training was stopped and settings were chosen: all this is "
        "optimistic; look at test queries before you deploy."
    ]
