"""The closing paragraph: every verdict, by constructed reports; its numbers are the report's; it contradicts none."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from rcr_trainer.baselines.base import Baseline
from rcr_trainer.data.examples import Example
from rcr_trainer.evaluation.advice import advise
from rcr_trainer.evaluation.harness import evaluate
from rcr_trainer.evaluation.report import MARKDOWN, AnswersAsked, EvaluationReport
from rcr_trainer.evaluation.stage import _keep
from rcr_trainer.evaluation.table import table
from reports import report as report_on
from reports import scores

from langchain_rcr.programs import ProgramSpec

ANSWERS = AnswersAsked("gpt-x", 200, 150)
ROWS = AnswersAsked("gpt-x", 200, 150, told=190)
METRICS = ("full_coverage", "exact_match", "execution")


def make(full=(30.0, 20.0), exact=None, rows=None, *, width=2.0, oracle=90.0, more=(), **about):
    """A report in which `set_bsr` is the best plain selector and `bm25` the runner-up.

    `full`, `exact` and `rows` are ours and the best plain selector's; intervals end `width` points off.
    """
    pairs = full, exact or (None, None), rows or (None, None)
    ours, its = (dict(zip(METRICS, side, strict=True)) for side in zip(*pairs, strict=True))
    selectors = {
        "rcr": scores(80.0, **ours),
        "bm25": beside(ours, {name: None if figure is None else figure - 5 for name, figure in its.items()}, width),
        "set_bsr": beside(ours, its, width),
    }
    if oracle is not None:
        selectors["oracle"] = scores(oracle)
    for name, figures in dict(more).items():
        selectors[name] = beside(ours, {**its, **figures}, width)
    if about.get("programs", 150) < 30:
        for figures in selectors.values():
            figures.intervals.clear()
    return report_on(selectors, **about)


def beside(ours, its, width):
    intervals = {
        metric: (ours[metric] - its[metric] - width, ours[metric] - its[metric] + width)
        for metric in METRICS
        if width is not None and ours[metric] is not None and its[metric] is not None
    }
    return scores(70.0, intervals=intervals, **its)


ONLY_ANSWERS = (
    "Coverage doesn't tell whether rcr is worth deploying: only your language model's answers can "
    "(evaluation.answers: true)."
)


# ---------------------------------------------------------------- answers decide


def test_a_language_models_answers_decide():
    assert advise(make(exact=(60.0, 40.0), answers=ANSWERS)) == (
        "The oracle, which sees the gold programs, covers 90.0 % of what they need in 4 picks. With rcr's picks "
        "(k = 4, the first one last) gpt-x gives the gold program for 60.0 % of 200 questions, with those of set_bsr, "
        "the best plain selector by this measure, for 40.0 %: +20.0 points, 95 % interval +18.0 to +22.0. rcr is worth "
        "deploying."
    )
    text = advise(make(exact=(30.0, 40.0), answers=ANSWERS))
    assert text.endswith("-10.0 points, 95 % interval -12.0 to -8.0. rcr is not worth deploying here: use set_bsr.")
    assert "overage" not in text
    unclear = advise(make(exact=(41.0, 40.0), answers=ANSWERS))
    assert unclear.endswith(
        "That is no clear difference: set_bsr, which needs no training, will do unless more questions decide it."
    )


def test_rows_decide_where_a_database_tells_them_whatever_exact_match_says():
    text = advise(make(exact=(30.0, 40.0), rows=(60.0, 50.0), answers=ROWS))
    assert text.endswith(
        "With rcr's picks (k = 4, the first one last) gpt-x gets the right rows for 60.0 % of 190 questions, with "
        "those of set_bsr, the best plain selector by this measure, for 50.0 %: +10.0 points, 95 % interval +8.0 to "
        "+12.0. rcr is worth deploying."
    )
    worse = advise(make(exact=(60.0, 40.0), rows=(50.0, 60.0), more={"dpp": {"execution": 61.0}}, answers=ROWS))
    assert "with those of dpp, the best plain selector by this measure, for 61.0 %: -11.0 points" in worse
    assert worse.endswith("rcr is not worth deploying here: use dpp.")
    assert advise(make(exact=(60.0, 40.0), rows=(50.5, 50.0), answers=ROWS)).endswith(
        "That is no clear difference: set_bsr, which needs no training, will do unless more questions decide it."
    )


@pytest.mark.parametrize(("metric", "answers"), [("exact_match", ANSWERS), ("execution", ROWS)])
def test_answers_to_few_programs_and_those_that_are_all_wrong_leave_it_to_coverage(metric, answers):
    asks_again = ONLY_ANSWERS.replace(" (evaluation.answers: true)", "")
    rows = metric == "execution"
    report = make(exact=(60.0, 30.0), rows=(60.0, 30.0) if rows else None, answers=answers)
    for figures in report.selectors.values():
        figures.intervals.pop(metric, None)
    text = advise(report)
    what = "gets the right rows for 60.0 % of 190" if rows else "gives the gold program for 60.0 % of 200"
    assert f"{what} questions" in text
    assert "+30.0 points, too few different programs to tell." in text
    assert asks_again in text
    nothing = advise(make(exact=(0.0, 0.0), rows=(0.0, 0.0) if rows else None, answers=answers))
    what = "get the right rows for any of 190" if rows else "give the gold program for any of 200"
    assert f"With neither rcr's picks nor a plain selector's does gpt-x {what} questions." in nothing
    assert asks_again in nothing


@pytest.mark.parametrize("answers", [ANSWERS, ROWS])
def test_where_it_answers_best_without_examples_that_is_advised(answers):
    def advised(ours):
        best = {"no_examples": {"exact_match": 42.0, "execution": 42.0}}
        return advise(make(exact=(ours, 25.0), rows=answers.told and (ours, 25.0), more=best, answers=answers))

    beside = ", without examples, the best of what needs no training, for 42.0 %: "
    assert f"{beside}-10.0 points" in advised(32.0)
    assert advised(32.0).endswith("rcr is not worth deploying here: ask without examples.")
    assert advised(43.0).endswith(
        "That is no clear difference: asking without examples, which needs no training, will do unless more questions "
        "decide it."
    )
    assert advised(62.0).endswith(f"{beside}+20.0 points, 95 % interval +18.0 to +22.0. rcr is worth deploying.")


def test_no_examples_are_no_rival_in_coverage():
    nothing = {"full_coverage": 0.0}
    report = report_on({"rcr": scores(9.0, **nothing), "no_examples": scores(0.0, **nothing)})
    assert advise(report).endswith(
        "No plain selector was run, so there is no verdict on whether rcr is worth deploying."
    )
    report.selectors["bm25"] = scores(5.0, **nothing)
    assert "those of bm25, the best plain selector by this measure" in advise(report)


def test_selectors_without_answers():
    missing = AnswersAsked("gpt-x", 200, 150, "the budget …")
    assert "gpt-x" not in advise(make(answers=missing))
    ours_alone = make(answers=missing)
    ours_alone.selectors["rcr"].exact_match = 50.0
    assert "gpt-x" not in advise(ours_alone)


# ---------------------------------------------------------------- without answers


def test_without_answers_full_coverage_is_told():
    assert advise(make()) == (
        "The oracle, which sees the gold programs, covers 90.0 % of what they need in 4 picks. rcr's picks show "
        "everything that the gold program needs for 30.0 % of 200 questions, those of set_bsr, the best plain "
        "selector by this measure, for 20.0 %: +10.0 points, 95 % interval +8.0 to +12.0. " + ONLY_ANSWERS
    )


@pytest.mark.parametrize("full", [(30.0, 20.0), (10.0, 20.0), (20.0, 20.0)])
def test_coverage_decides_nothing(full):
    text = advise(make(full))
    assert ONLY_ANSWERS in text
    assert "rcr is worth" not in text.replace(ONLY_ANSWERS, "")


def test_the_data_allow_little():
    text = advise(make(oracle=50.0))
    assert text.startswith(
        "The oracle, which sees the gold programs, covers only 50.0 % of what they need in 4 picks: no selector can "
        "cover the rest without more examples or more picks."
    )
    assert "more examples" not in advise(make(oracle=80.0))
    assert advise(make(oracle=None)).startswith("rcr's picks show everything that the gold program needs")


@pytest.mark.parametrize("exact", [None, (99.0, 1.0)])
def test_too_few_programs(exact):
    answers = exact and AnswersAsked("gpt-x", 500, 29)
    text = advise(make(exact=exact, answers=answers, n=500, programs=29, more={"rcr_without_rl": {}}))
    assert (
        "500 questions with 29 different programs are too few to tell whether rcr is worth deploying (it takes 30 "
        "programs)."
    ) in text
    assert "There is no telling whether reinforcement helped (full coverage: +10.0 points)." in text
    assert not re.search(r"interval|use set_bsr|needs no training|was not run", text)


def test_no_verdict_on_nothing():
    alone = make()
    del alone.selectors["set_bsr"], alone.selectors["bm25"]
    assert advise(alone).endswith(
        "No plain selector was run, so there is no verdict on whether rcr is worth deploying."
    )
    assert advise(report_on({"bm25": scores(80.0)})) == "The trained retriever was not evaluated."


def test_what_was_not_run_and_what_is_odd_is_said():
    weak = make(exact=(60.0, 40.0), answers=ANSWERS)
    del weak.selectors["set_bsr"]
    said = "set_bsr, usually the strongest plain selector, was not run: it may come closer."
    assert advise(weak).endswith(said)
    assert said not in advise(make(exact=(60.0, 40.0), answers=ANSWERS))
    text = advise(make(repeated=12))
    said = "12 of 200 questions are in the pool with their programs: rcr has seen them, and no selector may pick them."
    assert text.endswith(said)


def test_a_budget_that_ends_before_the_rivals_are_answered_gives_no_verdict_for_ours():
    spent = AnswersAsked("gpt-x", 200, 150, "the budget …", unpaid=True)
    unpaid = make(exact=(60.0, 40.0), answers=spent)
    assert advise(unpaid).endswith("rcr is worth deploying.")  # only the oracle has no answers
    unpaid.selectors["set_bsr"].exact_match = None
    assert "with those of bm25, the best plain selector by this measure, for 35.0 %" in advise(unpaid)
    assert advise(unpaid).endswith(
        "That is no verdict yet: the budget was spent before the picks of set_bsr were answered."
    )
    worse = make(exact=(20.0, 40.0), answers=spent)
    worse.selectors["set_bsr"].exact_match = None
    assert advise(worse).endswith("rcr is not worth deploying here: use bm25.")  # whatever the others do
    unpaid.answers.unpaid = False  # its prompts are too long for the model
    assert advise(unpaid).endswith("rcr is worth deploying.")


def test_development_queries_are_called_so():
    assert advise(make(part="dev")).endswith("optimistic; look at test queries before you deploy.")
    assert "development" not in advise(make())


# ---------------------------------------------------------------- reinforcement


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (57.0, "Reinforcement helped (exact match: +3.0 points, 95 % interval +1.0 to +5.0)."),
        (59.0, "Reinforcement made no clear difference (exact match: +1.0 points, 95 % interval -1.0 to +3.0)."),
        (
            63.0,
            "Reinforcement did harm (exact match: -3.0 points, 95 % interval -5.0 to -1.0): the policy before it is "
            "in checkpoint-sft.",
        ),
    ],
)
def test_reinforcement(before, said):
    more = {"rcr_without_rl": {"exact_match": before, "full_coverage": 20.0}}
    assert said in advise(make(exact=(60.0, 40.0), more=more, answers=ANSWERS))
    # Coverage doesn't tell: it is what reinforcement trades for answers.
    assert advise(make(more=more)).endswith(
        "There is no telling whether reinforcement helped (full coverage: +10.0 points, 95 % interval +8.0 to +12.0)."
    )


def test_reinforcement_by_answers_where_a_language_model_gave_some():
    before = {"rcr_without_rl": {"full_coverage": 33.0, "exact_match": 50.0}}
    text = advise(make(exact=(60.0, 40.0), more=before, answers=ANSWERS))
    assert text.endswith("Reinforcement helped (exact match: +10.0 points, 95 % interval +8.0 to +12.0).")
    before["rcr_without_rl"]["execution"] = 64.0
    text = advise(make(exact=(60.0, 40.0), rows=(60.0, 50.0), more=before, answers=ROWS))
    assert "Reinforcement did harm (right rows: -4.0 points, 95 % interval -6.0 to -2.0)" in text


# ---------------------------------------------------------------- whatever the figures


def drawn(rng):
    """A report with figures and intervals at random; `programs` decides whether there are intervals, as in harness."""
    names = [
        "rcr",
        *(name for name in ("rcr_without_rl", "random", "set_bsr", "oracle") if rng.random() < 0.85),
    ]
    asked, n = rng.random() < 0.6, int(rng.choice([20, 400]))
    told = n if asked and rng.random() < 0.5 else 0
    programs = int(rng.choice([min(n, 29), min(n, 30), n]))
    answers = AnswersAsked("gpt-x", n, programs, told=told) if asked else None
    around, spread = rng.uniform(5, 95), rng.choice([0.3, 3, 30])
    selectors = {}
    for name in names:
        figures = {metric: float(np.clip(rng.normal(around, spread), 0.5, 100)) for metric in METRICS}
        figures["exact_match"] = figures["exact_match"] if asked else None
        figures["execution"] = figures["execution"] if told else None
        selectors[name] = scores(float(rng.uniform(0, 100)), **figures)
    ours = selectors["rcr"]
    for name, figures in selectors.items():
        for metric in METRICS[: 1 + asked + bool(told)]:
            if name != "rcr" and programs >= 30:
                gap, half = getattr(ours, metric) - getattr(figures, metric), float(rng.uniform(0, 6))
                figures.intervals[metric] = (gap - half, gap + half)
    return report_on(selectors, n=n, programs=programs, answers=answers, part=str(rng.choice(["test", "dev"])))


VERDICTS = {
    "few": "too few to tell whether rcr is worth deploying",
    "nothing": "so there is no verdict on whether rcr is worth deploying",
    "deploy": "rcr is worth deploying",
    "worse": "rcr is not worth deploying here",
    "unclear": "That is no clear difference",
    "coverage": "Coverage doesn't tell whether",
}


@pytest.mark.slow
def test_one_verdict_that_the_figures_bear_out():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(2000):
        report = drawn(rng)
        text = advise(report)
        # "too few to tell whether rcr is worth deploying" holds the words of another verdict.
        given = [key for key, words in VERDICTS.items() if re.search(rf"(?<!whether ){re.escape(words)}", text)]
        assert len(given) == 1, text
        seen.add(given[0])
        check(given[0], report, text)
    assert seen == VERDICTS.keys()


def check(verdict, report, text):
    """Against the report's own figures, not by the module's functions; 0.1 for rounding to what is shown."""
    plain = [name for name in ("random", "set_bsr") if name in report.selectors]
    assert (verdict == "nothing") == (not plain)
    assert ("development queries" in text) == (report.part == "dev")
    assert ("einforcement" in text) == ("rcr_without_rl" in report.selectors)
    if not plain:
        return
    assert (verdict == "few") == (report.programs < 30)
    if report.programs < 30:
        return
    if report.answers:
        metric = "execution" if report.answers.told else "exact_match"
        best = max(plain, key=lambda name: getattr(report.selectors[name], metric))
        low, high = report.selectors[best].intervals[metric]
        assert verdict in ("deploy", "worse", "unclear")
        assert verdict == "deploy" if low > 0.1 else verdict != "deploy" or low > -0.1
        assert verdict == "worse" if high < -0.1 else verdict != "worse" or high < 0.1
        return
    assert verdict == "coverage"


# ---------------------------------------------------------------- where the figures come from


class Always(Baseline):
    """A plain selector that gives every query the same positions."""

    name = "always"

    def __init__(self, pool, *positions):
        self.positions = positions
        super().__init__([{"source": example.source} for example in pool])

    def _pick(self, queries, k, excluded):
        return np.array([self.positions[:k]] * len(queries))


def test_the_harness_measures_what_the_paragraph_says(tmp_path):
    pool = [Example(str(i), f"q{i}", f"f{i % 40} ( g{i % 40} )") for i in range(41)]
    queries = [Example(str(i), f"x{i}", f"f{i % 40} ( g{i % 40} )") for i in range(80)]

    def perfect(questions, k, exclude):
        rows = [[int(each.question[1:]) % 40, 40, *range(3)] for each in questions]
        return np.array([list(dict.fromkeys(row))[:k] for row in rows])

    options = {"k": 1, "split": "toy", "seed": 0}
    report = evaluate({"rcr": perfect, "set_bsr": Always(pool, 0)}, pool, queries, ProgramSpec(), **options)[0]
    assert (report.n, report.programs, report.repeated) == (80, 40, 0)
    low, high = report.selectors["set_bsr"].intervals["full_coverage"]
    # It is right for two of eighty questions, which are one program of forty: it is drawn 0 to 3 times, say.
    assert (low, high) == (pytest.approx(92.5), pytest.approx(100))
    assert report.selectors["rcr"].intervals == {}
    assert f"+97.5 points, 95 % interval {low:+.1f} to {high:+.1f}" in report.advice
    assert report.advice == advise(report)
    report.write(tmp_path)
    assert EvaluationReport.read(tmp_path).advice == report.advice
    alone = evaluate({"set_bsr": Always(pool, 0)}, pool, queries, ProgramSpec(), **options)[0]
    assert alone.selectors["set_bsr"].intervals == {}
    few = evaluate({"rcr": perfect, "set_bsr": Always(pool, 0)}, pool, queries[:29], ProgramSpec(), **options)[0]
    assert (few.programs, few.selectors["set_bsr"].intervals) == (29, {})


def test_the_paragraph_and_the_table_round_alike(tmp_path):
    """Of 86.6496 evaluation.json keeps 86.65, of which the table makes 86.7; the paragraph said 86.6."""
    report = report_on({"rcr": scores(70.0), "bm25": scores(60.0), "oracle": scores(86.6496)})
    report.write(tmp_path)
    read = EvaluationReport.read(tmp_path)
    assert f"{read.oracle.coverage:.1f}" == "86.7"
    assert "covers 86.7 %" in advise(report)


@pytest.mark.parametrize(("ours", "its", "lead"), [(66.666, 50.014, "+16.7"), (66.646, 50.0, "+16.6")])
def test_the_report_in_markdown_shows_the_figures_of_evaluation_json(tmp_path, ours, its, lead):
    """Its table had 86.6 for 86.6496 and its leads +16.7 for 66.666 − 50.014, where the paragraph says +16.6."""
    bm25 = scores(86.6496, full_coverage=its, intervals={"full_coverage": (9.0, 20.0)})
    report = report_on({"rcr": scores(70.0, full_coverage=ours), "bm25": bm25}, changed=["evaluation.k (4, now 6)"])
    report.advice = advise(report)
    _keep(SimpleNamespace(path=tmp_path, config=SimpleNamespace(name="mine")), None, report, [])
    text, read = (tmp_path / MARKDOWN).read_text(encoding="utf-8"), EvaluationReport.read(tmp_path)
    assert "\n".join(table(read)) in text
    assert text.count(lead) == 2
    assert f": {lead} points" in read.advice == advise(read)
