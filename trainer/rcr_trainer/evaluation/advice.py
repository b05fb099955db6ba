"""An evaluation in one paragraph: what the data allows, where the selectors stand, whether ours is worth deploying.

A language model's answers decide, by their results given a database, else by exact match, with the interval. Without
answers, full coverage is reported but decides nothing. Mean coverage never counts: six to ten points of it gained no
answers on COVR. Intervals cover a single training run. The best plain selector is the best on these same queries, which
favours it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rcr_trainer.baselines import NO_EXAMPLES, STRONGEST
from rcr_trainer.evaluation.metrics import FEW_PROGRAMS
from rcr_trainer.evaluation.report import OURS, WITHOUT_RL, EvaluationReport, Interval, Metric

LOW_CEILING = 60.0  # Oracle coverage, %, below which more examples help more than a better selector


@dataclass(frozen=True, slots=True)
class Gap:
    """Ours against another selector, in %, rounded as it is shown, so that text and verdict agree."""

    name: str
    metric: Metric
    ours: float
    other: float
    points: float
    interval: Interval | None

    @property
    def clear(self) -> int:
        """1: ours is better; −1: worse; 0: the interval has both signs, or there is none."""
        low, high = self.interval or (0.0, 0.0)
        return (low > 0) - (high < 0)

    def __str__(self) -> str:
        ends = f", 95 % interval {self.interval[0]:+.1f} to {self.interval[1]:+.1f}" if self.interval else ""
        return f"{self.points:+.1f} points{ends}"


def advise(report: EvaluationReport) -> str:
    """The paragraph, in plain English: ours (`rcr`) against plain selectors and, for the ceiling, the oracle."""
    return " ".join(_sentences(report)) if OURS in report.selectors else "The trained retriever was not evaluated."


def _sentences(report: EvaluationReport) -> Iterator[str]:
    if report.oracle is not None:
        covered = f"{_shown(report.oracle.coverage):.1f} % of what they need in {report.k} picks"
        if _shown(report.oracle.coverage) < LOW_CEILING:
            covered = f"only {covered}: no selector can cover the rest without more examples or more picks"
        yield f"The oracle, which sees the gold programs, covers {covered}."
    if (gap := _deciding(report)) is None:
        yield "No plain selector was run, so there is no verdict on whether rcr is worth deploying."
    else:
        yield from _on_answers(report)
        if gap.metric == "full_coverage":  # answers decide nothing
            yield (
                f"rcr's picks show everything that the gold program needs for {gap.ours:.1f} % of {report.n} "
                f"questions, those of {gap.name}, the best plain selector by this measure, for {gap.other:.1f} %: "
                f"{gap}."
            )
        yield _verdict(report, gap)
    if WITHOUT_RL in report.selectors and (change := _deciding(report, WITHOUT_RL)) is not None:
        yield _on_reinforcement(report, change)
    # What makes these figures better than on new questions.
    if report.repeated:
        yield (
            f"{report.repeated} of {report.n} questions are in the pool with their programs: rcr has seen them, and no "
            "selector may pick them."
        )
    if report.part == "dev":
        yield (
            "Training was stopped and settings were chosen on these development queries, so all this is optimistic; "
            "look at test queries before you deploy."
        )


def _shown(value: float) -> float:
    """Rounded to two decimals, as in evaluation.json, then to one, as in the table; never −0."""
    return round(round(value, 2), 1) + 0.0


def gap_to(rival: str | None, report: EvaluationReport, metric: Metric) -> Gap | None:
    """Ours against the rival, or against the plain selector best in the metric; None if either lacks the figure."""
    name = rival or report.best_plain(metric)
    if name is None or name not in report.selectors:
        return None
    mine, its = (getattr(report.selectors[selector], metric) for selector in (OURS, name))
    if mine is None or its is None:
        return None
    ends = report.selectors[name].intervals.get(metric)
    interval = None if ends is None else (_shown(ends[0]), _shown(ends[1]))
    return Gap(name, metric, _shown(mine), _shown(its), _shown(round(mine, 2) - round(its, 2)), interval)


def _deciding(report: EvaluationReport, rival: str | None = None) -> Gap | None:
    """The gap in right answers if a language model's are informative, else in full coverage."""
    right = gap_to(rival, report, report.right)
    if right is not None and right.interval is not None and right.ours + right.other > 0:
        return right
    return gap_to(rival, report, "full_coverage")


def _on_answers(report: EvaluationReport) -> Iterator[str]:
    answers, gap = report.answers, gap_to(None, report, report.right)
    if answers is None or gap is None:
        return
    who, rows = answers.model, gap.metric == "execution"
    asked = f"{answers.told if rows else answers.n} questions"
    if gap.ours == gap.other == 0:
        does = f"{who} get the right rows" if rows else f"{who} give the gold program"
        yield f"With neither rcr's picks nor a plain selector's does {does} for any of {asked}."
        return
    does = f"{'gets the right rows' if rows else 'gives the gold program'} for {gap.ours:.1f} % of {asked}"
    beside = f"with those of {gap.name}, the best plain selector by this measure,"
    if gap.name == NO_EXAMPLES:
        beside = "without examples, the best of what needs no training,"
    shown = f"k = {report.k}, the first one {'last' if answers.order == 'reversed' else 'first'}"
    few = ", too few different programs to tell" if gap.interval is None else ""
    yield f"With rcr's picks ({shown}) {who} {does}, {beside} for {gap.other:.1f} %: {gap}{few}."


def _verdict(report: EvaluationReport, gap: Gap) -> str:
    if report.programs < FEW_PROGRAMS:
        return (
            f"{report.n} questions with {report.programs} different programs are too few to tell whether rcr is worth "
            f"deploying (it takes {FEW_PROGRAMS} programs)."
        )
    if gap.metric == "full_coverage":
        how = " (evaluation.answers: true)" if report.answers is None else ""
        return f"Coverage doesn't tell whether rcr is worth deploying: only your language model's answers can{how}."
    if gap.clear > 0:
        waiting = [name for name, each in report.selectors.items() if each.kind == "plain" and each.exact_match is None]
        if waiting and report.answers is not None and report.answers.unpaid:
            return (
                f"That is no verdict yet: the budget was spent before the picks of {', '.join(waiting)} were answered."
            )
        unseen = f" {STRONGEST}, usually the strongest plain selector, was not run: it may come closer."
        return f"rcr is worth deploying.{'' if STRONGEST in report.selectors else unseen}"
    none = gap.name == NO_EXAMPLES
    if gap.clear < 0:
        return f"rcr is not worth deploying here: {'ask without examples' if none else f'use {gap.name}'}."
    other = "asking without examples" if none else gap.name
    return f"That is no clear difference: {other}, which needs no training, will do unless more questions decide it."


def _on_reinforcement(report: EvaluationReport, gap: Gap) -> str:
    figure = f"{'right rows' if gap.metric == 'execution' else gap.metric.replace('_', ' ')}: {gap}"
    if gap.metric == "full_coverage":  # only answers tell
        return f"There is no telling whether reinforcement helped ({figure})."
    if gap.clear > 0:
        return f"Reinforcement helped ({figure})."
    if gap.clear < 0:
        return f"Reinforcement did harm ({figure}): the policy before it is in checkpoint-sft."
    return f"Reinforcement made no clear difference ({figure})."
