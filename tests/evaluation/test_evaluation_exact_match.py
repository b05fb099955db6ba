"""Exact match of a language model's answers: by hand with a fake one, subsets, budgets, and what the report says."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from rcr_trainer.baselines.simple import BM25Selector, NoneSelector
from rcr_trainer.data.examples import Example
from rcr_trainer.evaluation.harness import answer, evaluate, spread
from rcr_trainer.evaluation.report import AnswersAsked
from rcr_trainer.evaluation.table import table
from rcr_trainer.llm.cache import Answer
from rcr_trainer.llm.faults import AccessError, BudgetExceeded, LLMError, TooLongError
from rcr_trainer.llm.settings import LLMSettings
from rcr_trainer.rewards.ours import execution
from reports import report as report_on
from reports import scores as scores_of

from langchain_rcr.errors import ProgramError
from langchain_rcr.policy.prompt import APPENDIX_D
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
POOL = [Example(str(i), f"q{i}", target) for i, target in enumerate(["a ( b )", "c", "a ( d )", "e", "f", "g"])]
QUERIES = [Example(f"t{i}", f"x{i}", target) for i, target in enumerate(["a ( b )", "a", "c ( 3 )", "e"])]


def always(*positions):
    return lambda queries, k, exclude: np.array([positions[:k]] * len(queries))


class Fake:
    """Answers from a table question → program; keeps what it was asked."""

    def __init__(self, programs):
        self.programs, self.calls = programs, []

    def __call__(self, prompts):
        self.calls.append(list(prompts))
        return [self.programs[asked_of(prompt)] for prompt in prompts]


def asked_of(prompt):
    return prompt.rpartition("Source: ")[2].removesuffix("\nTarget:")


def run(selectors, program_of, queries=QUERIES, *, limit=None, given=MappingProxyType({})):
    return both(selectors, program_of, queries, limit, given)[0]


def both(selectors, program_of, queries=QUERIES, limit=None, given=MappingProxyType({}), prices=MappingProxyType({})):
    def answers(prompts):
        return [
            program if isinstance(program, Answer) else Answer(program, program=program, prompt_tokens=len(prompt))
            for prompt, program in zip(prompts, program_of(prompts), strict=False)  # one test answers too few
        ]

    report, picks = evaluate(selectors, POOL, queries, SPEC, k=2, split="toy", seed=0)
    assert report.answers is None
    llm = SimpleNamespace(generate=answers, name="fake-lm", prompt=APPENDIX_D, money=LLMSettings(**prices).money)
    answer(report, picks, SPEC, llm, queries=limit, **given)
    return report, picks


def test_a_row_without_examples_shows_and_covers_nothing():
    fake = Fake({"x0": "a(b)", "x1": "c", "x2": "c ( 4 )", "x3": None})
    report = run({"rcr": always(0, 1, 2), "none": NoneSelector([{"source": each.source} for each in POOL])}, fake)
    scores = report.selectors["none"]
    assert scores.exact_match == 25
    assert fake.calls[1] == [f"Source: x{i}\nTarget:" for i in range(4)]
    assert scores.coverage == scores.full_coverage == scores.prompt_length == 0


def test_figures_by_hand():
    # Right but for blanks; a wrong one; right but for the value (which exact match reads, structures don't); none.
    fake = Fake({"x0": "a(b)", "x1": "c", "x2": "c ( 4 )", "x3": None})
    report = run({"rcr": always(0, 1, 2)}, fake)
    scores = report.selectors["rcr"]
    assert scores.exact_match == 25
    assert scores.jaccard == pytest.approx(100 * (1 + 0 + 1 + 0) / 4)
    assert scores.no_program == 25
    assert report.answers == AnswersAsked("fake-lm", 4, 4)
    # Two picks of 20 and 14 characters, then the question.
    prompt = "Source: q1\nTarget: c\nSource: q0\nTarget: a ( b )\nSource: x0\nTarget:"
    assert (scores.prompt_tokens, scores.completion_tokens, scores.cost) == (len(prompt), 0, None)


def test_results_and_costs_by_hand():
    def run_it(program):
        if program == "c":
            raise ProgramError("no such table")
        return program.lower()

    # The same result; a wrong one; a gold program that can't be run isn't counted.
    queries = [Example(f"t{i}", f"x{i}", target) for i, target in enumerate(["a ( b )", "e", "c"])]
    given, prices = {"execution": execution(run_it, SPEC)}, {"price_prompt": 2, "price_completion": 3}
    fake = Fake({"x0": "A ( B )", "x1": None, "x2": "c"})
    report, picks = both({"rcr": always(0, 1, 2)}, fake, queries, given=given, prices=prices)
    assert (report.answers, report.right) == (AnswersAsked("fake-lm", 3, 3, told=2), "execution")
    assert "Same rows: the 2 of them whose gold program gives a result to compare." in table(report)
    scores = report.selectors["rcr"]
    assert (scores.exact_match, scores.execution) == (pytest.approx(100 / 3), 50)
    assert scores.cost == pytest.approx(1000 * 2e-6 * scores.prompt_tokens)
    assert [(row.answer, row.exact, row.execution) for row in (each.selectors["rcr"] for each in picks)] == [
        ("A ( B )", False, True), (None, False, False), ("c", True, None),
    ]  # fmt: skip


def test_partial_jaccard_by_hand():
    # a has a and <root> -> a; a ( b ) has these and b, a -> b, <root> -> a -> b: 2 of 5 are shared.
    scores = run({"rcr": always(0, 1, 2)}, Fake({"x0": "a"}), QUERIES[:1]).selectors["rcr"]
    assert (scores.exact_match, scores.jaccard, scores.no_program) == (0, pytest.approx(40), 0)


@pytest.mark.parametrize(("order", "first"), [(None, "q0"), ("reversed", "q0"), ("picked", "q2")])
def test_prompts_show_the_k_picks_in_order_and_come_once_for_all_selectors(order, first):
    fake = Fake({f"x{i}": "e" for i in range(4)})
    given = {"orders": dict.fromkeys(("rcr", "twin", "other"), order)} if order else {}
    run({"rcr": always(2, 0, 1), "twin": always(2, 0, 3), "other": always(0, 2, 1)}, fake, given=given)
    prompts = [prompt for call in fake.calls for prompt in call]
    shown = {"q0": "Source: q0\nTarget: a ( b )\n", "q2": "Source: q2\nTarget: a ( d )\n"}
    assert prompts[0] == f"{shown.pop(first)}{shown.popitem()[1]}Source: x0\nTarget:"
    assert len(prompts) == len(set(prompts)) == 8
    assert [asked_of(prompt) for prompt in prompts] == ["x0", "x1", "x2", "x3"] * 2


@pytest.mark.parametrize("order", ["reversed", "picked"])
def test_prompts_of_plain_selectors_show_the_first_pick_last_whatever_the_policy_does(order):
    plain = BM25Selector([{"source": example.source} for example in POOL])
    assert plain.pick(["x0"], 2).tolist() == [[0, 1]]
    fake = Fake({f"x{i}": "e" for i in range(4)})
    run({"rcr": always(0, 1, 2), "bm25": plain}, fake, given={"orders": {"rcr": order}})
    first = [prompt.index("q0") < prompt.index("q1") for call in fake.calls for prompt in call]
    assert first == ([True] * 4 + [False] * 4 if order == "picked" else [False] * 4)  # the same ones are asked once


def test_selectors_differ_by_their_prompts():
    def copies_the_last_program(prompts):
        return [prompt.split("Target: ")[-1].split("\n")[0] for prompt in prompts]

    report = run({"rcr": always(0, 1, 2), "random": always(3, 1, 2), "bm25": always(4, 1, 2)}, copies_the_last_program)
    assert [scores.exact_match for scores in report.selectors.values()] == [25, 25, 0]
    assert all("exact_match" not in scores.intervals for scores in report.selectors.values())  # of four programs


def test_intervals_are_by_program_of_the_queries_asked():
    queries = [Example(f"t{i}", f"x{i}", f"f{i // 2} ( a )") for i in range(80)]
    right = {query.source: query.target for query in queries}

    def answer(prompts):
        # With q0 in the prompt everything is right, else only f0 ( a ).
        return [right[asked_of(p)] if "q0" in p or right[asked_of(p)] == "f0 ( a )" else None for p in prompts]

    selectors = {"rcr": always(0, 1, 2), "random": always(1, 3, 2)}
    report = run(selectors, answer, queries)
    assert report.answers == AnswersAsked("fake-lm", 80, 40)
    # The one program of forty that random has, with both its questions, is drawn from none to three times.
    assert report.selectors["random"].intervals["exact_match"] == (pytest.approx(92.5), pytest.approx(100))
    assert report.selectors["rcr"].intervals == {}
    few = run(selectors, answer, queries, limit=29)
    assert (few.answers.programs, "exact_match" in few.selectors["random"].intervals) == (29, False)
    assert "coverage" in few.selectors["random"].intervals


@pytest.mark.parametrize(
    ("limit", "count", "expected"),
    [(None, 3, [0, 1, 2]), (5, 3, [0, 1, 2]), (1, 9, [0]), (3, 9, [0, 3, 6]), (4, 10, [0, 2, 5, 7])],
)
def test_the_queries_asked_are_spread_evenly(limit, count, expected):
    assert spread(count, limit) == expected


def test_a_subset_is_scored_alone_and_skips_what_does_not_parse():
    queries = [Example("b", "broken", "( ("), *QUERIES]
    fake = Fake({"x0": "a ( b )", "x2": "wrong"})
    report = run({"rcr": always(0, 1, 2)}, fake, queries, limit=2)
    assert [asked_of(prompt) for prompt in fake.calls[0]] == ["x0", "x2"]
    assert (report.n, report.answers.n, report.selectors["rcr"].exact_match) == (4, 2, 50)


class Budgeted(Fake):
    """Stops before more than so many distinct prompts are answered; keeps those, as `LanguageModel` does."""

    def __init__(self, programs, budget):
        super().__init__(programs)
        self.kept, self.budget = set(), budget

    def __call__(self, prompts):
        for prompt in prompts:
            if prompt not in self.kept:
                if len(self.kept) == self.budget:
                    raise BudgetExceeded("the budget of 9 calls could be exceeded")
                self.kept.add(prompt)
        return super().__call__(prompts)


THREE = {"rcr": always(0, 1, 2), "rcr_without_rl": always(1, 0, 2), "random": always(2, 1, 0)}


@pytest.mark.parametrize(("budget", "answered"), [(12, 3), (11, 2), (8, 2), (7, 1), (4, 1), (3, 0), (0, 0)])
def test_a_spent_budget_leaves_the_selectors_that_are_complete(budget, answered, caplog):
    fake = Budgeted({f"x{i}": "e" for i in range(4)}, budget)
    report = run(THREE, fake)
    assert len(fake.calls) == answered
    figures = [scores.exact_match for scores in report.selectors.values()]
    assert figures == [25] * answered + [None] * (3 - answered)
    assert all(scores.coverage > 0 for scores in report.selectors.values())
    missing = [*THREE][answered:]
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    said = f"no exact match for {', '.join(missing)}: the budget of 9 calls could be exceeded"
    assert warnings == ([said] if missing else [])
    assert report.answers.missing == ("the budget of 9 calls could be exceeded" if missing else "")


def test_a_selector_whose_prompts_are_too_long_has_no_answers_and_the_others_have(caplog):
    def answer(prompts):
        if any("q5" in prompt for prompt in prompts):
            raise TooLongError("too long")
        return ["e"] * len(prompts)

    selectors = {"rcr": always(0, 1, 2), "random": always(5, 1, 2), "bm25": always(2, 1, 0), "mmr": always(1, 5, 0)}
    report = run(selectors, answer)
    assert [scores.exact_match for scores in report.selectors.values()] == [25, None, 25, None]
    assert report.answers.missing == "too long"
    said = [f"no exact match for {name}: too long" for name in ("random", "mmr")]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == said


def test_a_selector_is_left_out_if_most_of_its_prompts_are_too_long():
    few = {"rcr": always(0, 1, 2), "random": always(5, 1, 2)}
    for long, figures in ((["x0", "x1"], [25, 25]), (["x0", "x1", "x2"], [25, None])):

        def answer(prompts, long=long):
            ask = [("q5" in prompt and any(each in prompt for each in long)) for prompt in prompts]
            return [Answer(None, "too_long") if each else "e" for each in ask]

        report = run(few, answer)
        assert [scores.exact_match for scores in report.selectors.values()] == figures
    assert report.answers.missing == "3 of 4 prompts are longer than the model reads"


def test_a_model_that_cannot_be_asked_is_an_error():
    def broken(prompts):
        raise AccessError("no key")

    with pytest.raises(LLMError, match="no key"):
        run(THREE, broken)


# ---------------------------------------------------------------- report and table


def scores(coverage, exact=None, no_program=None):
    return scores_of(coverage, exact_match=exact, jaccard=exact, no_program=no_program)


def make(answers, **selectors):
    return report_on(selectors, n=500, answers=answers)


def table_of(report):
    text = "\n".join(table(report))
    assert max(map(len, table(report)[2:-1])) <= 100
    return text


def rows_of(text):
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|")
    return {first: rest for first, *rest in rows}


FULL = {
    "rcr": scores(67.0, 60.25, 1.04),
    "rcr_without_rl": scores(66.0, 58.0, 0.0),
    "random": scores(30.0, 20.0, 0.0),
    "fixed": scores(61.0, 30.0, 0.0),
    "mmr": scores(60.0, 40.5, 0.0),
    "oracle": scores(80.0, 90.0, 0.0),
}


def test_table_with_answers():
    text = table_of(make(AnswersAsked("gpt-x", 100, 80), **FULL))
    rows = rows_of(text)
    assert rows["selector"] == ["exact match %", "coverage %", "full cov. %", "chars", "ms/query"]
    assert rows["mmr"] == ["40.5", "60.0", "12.3", "321", "1.23"]
    assert rows["oracle (of coverage)"][:2] == ["90.0", "80.0"]
    assert list(rows)[2:5] == ["rcr (ours)", "rcr_without_rl (SFT)", "random"]
    assert "Exact match: 100 queries of 80 programs, answered by gpt-x." in text
    assert "1.0 % of rcr's answers hold no program." in text


def test_table_without_answers_has_no_column_for_them():
    nobody = {name: scores(entry.coverage) for name, entry in FULL.items()}
    plain = table_of(make(None, **nobody))
    assert "exact" not in plain.lower()
    spent = table_of(make(AnswersAsked("gpt-x", 100, 80, "the budget …"), **nobody))
    assert "match %" not in spent
    assert "No exact match for rcr, rcr_without_rl, random" in spent


def test_table_of_some_answers():
    some = {**FULL, "mmr": scores(60.0), "oracle": scores(80.0)}
    text = table_of(make(AnswersAsked("gpt-x", 100, 80, "the budget of 9 calls …"), **some))
    assert rows_of(text)["mmr"][:2] == ["–", "60.0"]
    assert "No exact match for mmr, oracle: the budget of 9 calls …." in text


def test_best_plain_by_exact_match():
    report = make(AnswersAsked("m", 9, 7), **FULL)
    assert report.best_plain() == "fixed"
    assert report.best_plain(metric="exact_match") == "mmr"
    assert make(None, random=scores(30.0)).best_plain("exact_match") is None
