"""The closing paragraph: every verdict, by constructed reports; its numbers are the report's; it contradicts none."""

from __future__ import annotations

import re

import numpy as np
import pytest
from rcr_trainer.baselines.base import Baseline
from rcr_trainer.data import Example
from rcr_trainer.evaluation import AnswersAsked, EvaluationReport, SelectorScores, advise, evaluate
from rcr_trainer.evaluation.metrics import paired_error

from langchain_rcr.programs import ProgramSpec

REAL, SIMULATED = AnswersAsked("gpt-x", False, 200), AnswersAsked("StructureBoundLLM", True, 200)
DEPLOY = "rcr is worth deploying"


def scores(coverage, error=None, exact=None, exact_error=None, later=None):
    later = coverage if later is None else later
    curve = [coverage, later]
    figures = ("plain", coverage, 10.0, 0.0, 1.0, 0.1, curve, [10.0] * 2, [0.0] * 2, exact, exact, 0.0)
    return SelectorScores(*figures, error, exact_error)


def with_kinds(selectors):
    """Give each its kind by its name."""
    for name, figures in selectors.items():
        figures.kind = "oracle" if name == "oracle" else "trained" if name.startswith("rcr") else "plain"
    return selectors


def make(rcr=80.0, best=70.0, error=1.0, oracle=90.0, *, n=200, more=None, **about):
    """A report in which `set_bsr` is the best plain selector, `bm25` the runner-up."""
    selectors = {
        "rcr": scores(rcr) if isinstance(rcr, float) else rcr,
        "bm25": scores(min(60.0, best - 5.0) if isinstance(best, float) else 60.0, error),
        "set_bsr": scores(best, error) if isinstance(best, float) else best,
    }
    if oracle is not None:
        selectors["oracle"] = scores(oracle, error) if isinstance(oracle, float) else oracle
    return EvaluationReport(4, n, "toy", 0, with_kinds({**selectors, **(more or {})}), 2, 300, **about)


# ---------------------------------------------------------------- verdicts on coverage


def test_clearly_better():
    assert advise(make()) == (
        "With 4 picks the data allows covering 90.0 % of the gold programs (the oracle, which sees them). The best "
        "plain selector, set_bsr, covers 70.0 %, rcr 80.0 %: +10.0 points, 95 % interval +8.0 to +12.0, 50 % of the "
        "room up to the oracle. rcr is worth deploying."
    )


def test_better_and_nothing_left_to_gain():
    text = advise(make(rcr=89.5))
    assert "98 % of the room" in text
    assert text.endswith("rcr is worth deploying, and leaves less than a point to the oracle.")
    assert ", all of the room up to the oracle." in advise(make(rcr=91.0))


def test_better_by_too_little():
    text = advise(make(rcr=70.9, error=0.2))
    assert "+0.9 points, 95 % interval +0.5 to +1.3, 4 % of the room" in text
    assert text.endswith("The gain is less than a point: set_bsr, which needs no training, will do.")


def test_worse():
    text = advise(make(rcr=66.0))
    assert "-4.0 points, 95 % interval -6.0 to -2.0." in text
    assert text.endswith("rcr is not worth deploying here: use set_bsr.")
    assert "of the room" not in text


def test_no_clear_difference():
    text = advise(make(rcr=72.0, error=2.0))
    assert "+2.0 points, 95 % interval -1.9 to +5.9." in text
    # (2.8 · 2 / 2)² = 7.84 times as many.
    assert text.endswith(
        "That is no clear difference: use set_bsr, which needs no training, unless more queries decide otherwise "
        "(about 1,400 more would tell a difference as large as this one)."
    )
    assert "(about 6,100 more would tell a difference of a point)" in advise(make(rcr=70.3, error=2.0))
    assert "(about 21 more would tell" in advise(make(rcr=70.5, error=0.375))


def test_a_tie():
    text = advise(make(rcr=70.3, error=0.3))
    assert text.endswith("A difference of a point would have shown: set_bsr, which needs no training, will do.")
    same = advise(make(rcr=70.0, error=0.0))
    assert "+0.0 points, 95 % interval +0.0 to +0.0." in same
    assert same.endswith("will do.")


@pytest.mark.parametrize("oracle", [70.9, 69.0])
@pytest.mark.parametrize("rcr", [70.0, 70.8])
def test_no_room(rcr, oracle):
    text = advise(make(rcr=rcr, error=0.3, oracle=oracle))
    assert text.endswith("set_bsr leaves less than a point to the oracle and needs no training: use it.")


def test_a_greedy_oracle_may_be_beaten():
    assert advise(make(rcr=75.0, oracle=70.5)).endswith(f"{DEPLOY}, and leaves less than a point to the oracle.")


def test_the_data_allow_little():
    text = advise(make(rcr=45.0, best=40.0, oracle=50.0))
    assert text.startswith(
        "With 4 picks the data allows covering only 50.0 % of the gold programs (the oracle, which sees them): the "
        "rest is out of any selector's reach and takes more examples."
    )
    assert "takes more picks (2 allow 58.0 %) or more examples." in advise(
        make(rcr=45.0, best=40.0, oracle=scores(50.0, later=58.0))
    )
    assert "more examples" not in advise(make(oracle=scores(80.0, later=90.0)))
    assert "80.0 % of what the pool has of the gold programs" in advise(make(oracle=80.0, gold="pool"))


@pytest.mark.parametrize(("rcr", "n"), [(99.0, 29), (20.0, 29), (80.0, 1)])
def test_too_few_queries(rcr, n):
    text = advise(make(rcr=rcr, n=n, error=None if n == 1 else 0.1, more={"rcr_without_rl": scores(50.0, 0.1)}))
    assert f"{n} queries are too few to tell whether rcr is worth deploying" in text
    assert "Whether reinforcement helped can't be told (coverage: " in text
    assert not re.search(r"interval|use set_bsr|of the room|was not run", text)


def test_no_verdict_on_nothing():
    assert "evaluate again to learn whether rcr is worth deploying" in advise(make(error=None))
    alone = EvaluationReport(4, 200, "toy", 0, with_kinds({"rcr": scores(80.0), "oracle": scores(90.0, 1.0)}), 2, 300)
    assert advise(alone).endswith(
        "rcr covers 80.0 %. No plain selector was run beside it, so nothing is said of whether it is worth deploying."
    )
    without = EvaluationReport(4, 200, "toy", 0, {"bm25": scores(80.0)}, 2, 300)
    assert advise(without) == "The trained retriever was not evaluated."
    text = advise(make(oracle=None))
    assert text.startswith("What the data allows is not known: no oracle was run.")
    assert "room" not in text
    assert text.endswith("rcr is worth deploying.")


def test_what_was_not_run_and_what_is_odd_is_said():
    weak = make()
    del weak.selectors["set_bsr"]
    assert advise(weak).endswith(
        "rcr is worth deploying. set_bsr, as a rule the strongest plain selector, was not run: it may come closer."
    )
    assert "was not run" not in advise(make())


def test_development_queries_are_called_so():
    assert advise(make(part="dev")).endswith("optimistic; look at test queries before you deploy.")
    assert "development" not in advise(make())


# ---------------------------------------------------------------- answers and reinforcement


def answered(ours, best, error=2.0, *, by=REAL, rcr=80.0, coverage_error=1.0, **more):
    best = scores(70.0, coverage_error, best, error)
    return make(scores(rcr, None, ours), best, coverage_error, answers=by, **more)


def test_answers_are_told():
    other = {"fixed": scores(20.0, 1.0, 45.0, 1.5)}
    text = advise(answered(60.0, 40.0, more=other))
    assert (
        "With rcr's picks gpt-x answers 60.0 % of 200 queries exactly, with those of fixed, the best plain selector in "
        "that, 45.0 %: +15.0 points, 95 % interval +12.1 to +17.9. rcr is worth deploying."
    ) in text
    assert "The best plain selector, set_bsr, covers 70.0 %" in text
    assert "with those of set_bsr 40.0 %: +20.0 points" in advise(answered(60.0, 40.0))


def test_answers_count_for_more_than_coverage():
    assert "Answers are what counts: use set_bsr, not rcr." in advise(answered(30.0, 40.0))
    assert "rcr is worth deploying: answers are what counts." in advise(answered(50.0, 40.0, rcr=60.0))
    assert advise(answered(41.0, 40.0)).endswith("rcr is worth deploying; the answers don't tell yet.")
    assert "rcr is not worth deploying here" in advise(answered(41.0, 40.0, rcr=60.0))


def test_answers_that_do_not_tell_leave_a_worse_coverage_open():
    assert advise(answered(41.0, 40.0, rcr=60.0)).endswith("use set_bsr, unless more answers decide otherwise.")


def test_few_answers_count_for_nothing():
    text = advise(answered(30.0, 60.0, by=AnswersAsked("gpt-x", False, 29)))
    assert "-30.0 points, too few to tell. rcr is worth deploying; the answers don't tell yet." in text


def test_a_simulator_is_called_one_and_decides_nothing():
    text = advise(answered(30.0, 40.0, by=SIMULATED))
    assert "With rcr's picks the simulator, which is no language model, answers 30.0 %" in text
    assert text.endswith("95 % interval -13.9 to -6.1. rcr is worth deploying.")


def test_nothing_answered_whoever_picks():
    text = advise(answered(0.0, 0.0))
    assert "Whoever picks, gpt-x answers none of 200 queries exactly." in text


def test_selectors_without_answers():
    nobody = make(answers=AnswersAsked("gpt-x", False, 200, "the budget …"))
    assert "gpt-x" not in advise(nobody)
    ours_alone = make(scores(80.0, None, 50.0), answers=REAL)
    assert "gpt-x" not in advise(ours_alone)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (77.0, "Reinforcement helped (coverage: +3.0 points, 95 % interval +1.0 to +5.0)."),
        (79.0, "Reinforcement made no clear difference (coverage: +1.0 points, 95 % interval -1.0 to +3.0)."),
        (
            83.0,
            "Reinforcement did harm (coverage: -3.0 points, 95 % interval -5.0 to -1.0): the policy before it is in "
            "checkpoint-sft.",
        ),
    ],
)
def test_reinforcement(before, said):
    assert advise(make(more={"rcr_without_rl": scores(before, 1.0)})).endswith(said)


def test_reinforcement_by_answers_where_a_language_model_gave_some():
    before = {"rcr_without_rl": scores(83.0, 1.0, 50.0, 1.0)}
    assert "Reinforcement helped (exact match: +10.0 points" in advise(answered(60.0, 40.0, more=before))
    assert "Reinforcement did harm (coverage: -3.0" in advise(answered(60.0, 40.0, by=SIMULATED, more=before))


# ---------------------------------------------------------------- whatever the figures


def drawn(rng):
    def some(low, high):
        return float(rng.uniform(low, high))

    def maybe(value):
        return value if rng.random() < 0.8 else None

    exact = rng.random() < 0.5
    center, width = some(10, 90), float(rng.choice([0.3, 3, 30]))
    names = ["rcr", "rcr_without_rl", "random", "fixed", "set_bsr", "oracle"]
    selectors = {}
    for name in names:
        if name != "rcr" and rng.random() < 0.2:
            continue
        coverage = float(np.clip(rng.normal(center, width), 0, 100))
        errors = [None, None] if name == "rcr" else [some(0, 3), maybe(some(0, 5))]
        figures = (coverage, errors[0], some(0, 100) if exact else None, errors[1])
        selectors[name] = scores(*figures, later=min(100.0, coverage + some(0, 10)))
    answers = AnswersAsked("gpt-x", bool(rng.random() < 0.5), int(rng.integers(1, 200))) if exact else None
    n = int(rng.choice([5, 29, 30, 200, 5000]))
    part, gold = str(rng.choice(["test", "dev"])), str(rng.choice(["all", "pool"]))
    return EvaluationReport(4, n, "toy", 0, with_kinds(selectors), 2, 300, part, 0, gold, answers=answers)


VERDICTS = {
    "few": "queries are too few to tell whether",
    "unmeasured": "evaluate again",
    "nothing": "so nothing is said of whether it is worth deploying",
    "deploy": DEPLOY,
    "worse": "is not worth deploying here",
    "answers": "Answers are what counts: use",
    "no room": "leaves less than a point to the oracle and needs no training",
    "little": "The gain is less than a point",
    "alike": "A difference of a point would have shown",
    "unclear": "That is no clear difference",
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
        (verdict,) = given
        seen.add(verdict)
        check(verdict, report, text)
    assert seen == VERDICTS.keys() - {"unmeasured"}


def check(verdict, report, text):
    """Against the report's own figures, not by the module's functions."""
    ours, oracle = report.selectors["rcr"], report.selectors.get("oracle")
    plain = [name for name in ("random", "fixed", "set_bsr") if name in report.selectors]
    assert (verdict == "nothing") == (not plain)
    if not plain:
        return
    best = max(plain, key=lambda name: report.selectors[name].coverage)
    other = report.selectors[best]
    gap, half = ours.coverage - other.coverage, 1.96 * other.coverage_error
    low, high = gap - half, gap + half
    assert (verdict == "few") == (report.n < 30)
    assert f"{best} " in text.replace(",", " ")
    assert f"covers {other.coverage:.1f} %, rcr {ours.coverage:.1f} %: {gap:+.1f} points".replace(
        "-0.0", "+0.0"
    ) in text.replace("-0.0", "+0.0")
    if oracle is not None:
        assert f"{oracle.coverage:.1f} % of" in text
        assert ("only" in text) == (round(oracle.coverage, 1) < 60)
    share = re.search(r"(\d+) % of the room", text)
    if share and oracle is not None:
        room = oracle.coverage - other.coverage
        assert int(share[1]) == pytest.approx(100 * gap / room, abs=1 + 10 / room)
        assert low > -0.2
    real = report.answers is not None and not report.answers.simulated and report.answers.n >= 30
    slack = 0.11  # everything is decided as it is shown, to one decimal
    if verdict in ("worse", "little", "no room", "alike", "unclear"):
        assert f"{best}" in text.rpartition("covers")[2]
    if verdict == "worse":
        assert high < slack
    if verdict == "deploy" and not real:
        assert low > -slack
        assert gap > 1 - slack
    if verdict in ("alike", "unclear"):
        assert low < slack
        assert high > -slack
    if verdict == "alike":
        assert abs(gap) < 1 + slack
    if verdict == "no room":
        assert oracle.coverage - other.coverage < 1 + slack
    if verdict == "answers":
        assert real
    assert ("development queries" in text) == (report.part == "dev")
    assert ("simulator" in text) == (report.answers is not None and report.answers.simulated)
    assert ("einforcement" in text) == ("rcr_without_rl" in report.selectors)


# ---------------------------------------------------------------- where the figures come from


def test_paired_error():
    ours, other = np.array([1.0, 0.5, 0.0, 0.25]), np.array([0.5, 0.5, 0.0, 0.75])
    differences = [0.5, 0.0, 0.0, -0.5]
    mean = sum(differences) / 4
    variance = sum((value - mean) ** 2 for value in differences) / 3
    assert paired_error(ours, other) == pytest.approx(100 * (variance / 4) ** 0.5)
    assert paired_error(ours, ours) == 0
    assert paired_error(ours[:1], other[:1]) is None


class Always(Baseline):
    """A plain selector that gives every query the same positions."""

    name = "always"

    def __init__(self, pool, *positions):
        self.positions = positions
        super().__init__([{"source": example.source} for example in pool])

    def _pick(self, queries, k, excluded):
        return np.array([self.positions[:k]] * len(queries))


def test_the_harness_measures_what_the_paragraph_says():
    pool = [Example(str(i), f"q{i}", target) for i, target in enumerate(["a ( b )", "c", "a ( d )", "e"])]
    queries = [Example(str(i), f"x{i}", ["a ( b )", "c", "e"][i % 3]) for i in range(60)]

    def always(*positions):
        return lambda questions, k, exclude, references: np.array([positions[:k]] * len(questions))

    selectors = {"rcr": always(0, 1, 2, 3), "set_bsr": Always(pool, 1, 2, 3, 0)}
    report = evaluate(selectors, pool, queries, ProgramSpec(), k=1, steps=4, split="toy", seed=0)
    # Of a ( b ), c and e rcr has the first, set_bsr the second; each query's difference is 1, −1 or 0.
    spread = np.std([1, -1, 0] * 20, ddof=1) / 60**0.5
    assert report.selectors["set_bsr"].coverage_error == pytest.approx(100 * spread)
    assert report.selectors["rcr"].coverage_error is None
    assert report.advice == advise(report)
    ends = 1.96 * 100 * spread
    assert f"+0.0 points, 95 % interval {-ends:+.1f} to {ends:+.1f}" in report.advice
    assert EvaluationReport.from_json(report.to_json()).advice == report.advice
    alone = evaluate({"set_bsr": always(1, 2, 3, 0)}, pool, queries, ProgramSpec(), k=1, steps=4, split="t", seed=0)
    assert alone.selectors["set_bsr"].coverage_error is None
