"""What calls cost, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from rcr_trainer.llm.cache import Budget, Estimate, Stats, Use
from rcr_trainer.llm.settings import LLMSettings

PRICES = LLMSettings(price_prompt=2.0, price_completion=10.0)


def test_money() -> None:
    assert PRICES.money(1_000_000, 200_000) == pytest.approx(2.0 + 2.0)
    assert PRICES.money(0, 0) == 0
    assert LLMSettings().money(1, 1) is None


@pytest.mark.parametrize(
    ("budget", "fits"),
    [
        ({}, True),
        ({"budget_calls": 4}, True),
        ({"budget_calls": 3}, False),
        ({"budget_tokens": 66}, True),
        ({"budget_tokens": 65}, False),
        ({"budget_money": 0.000228}, True),
        ({"budget_money": 0.000227}, False),
        ({"budget_calls": 4, "budget_tokens": 65}, False),
    ],
)
def test_spent_reserved_and_the_next_call_count(budget: dict[str, Any], fits: bool) -> None:
    found = Budget(LLMSettings(price_prompt=2.0, price_completion=10.0, **budget), spent=Use(2, 25, 3))
    found.reserved = Use(1, 14, 4)
    # 4 calls; 54 + 12 = 66 tokens; (54·2 + 12·10) / 10⁶ = 0.000228 dollars.
    assert found.fits(Use(1, 15, 5)) is fits


def test_an_estimate_says_whether_it_is_exact() -> None:
    assert str(Estimate(Use(4, 1200, 400), 0.5, exact=True)) == (
        "at most 4 calls, 1,200 prompt and 400 completion tokens, $0.50"
    )
    assert str(Estimate(Use(1, 9, 9), 0.0033, exact=True)).endswith("$0.01")  # at most
    assert "a token for each byte" in str(Estimate(Use(4, 1200, 400), None, exact=False))
    assert "$" not in str(Estimate(Use(4, 1200, 400), None, exact=False))


def test_the_sum_of_estimates_is_as_exact_and_priced_as_both() -> None:
    one, other = Estimate(Use(1, 20, 3), 0.5, exact=True), Estimate(Use(2, 10, 4), 0.25, exact=False)
    assert one + other == Estimate(Use(3, 30, 7), 0.75, exact=False)
    assert one + Estimate(Use(), None, exact=True) == Estimate(Use(1, 20, 3), None, exact=True)


def test_stats_in_words_and_figures() -> None:
    stats = Stats(PRICES, nominal=10, distinct=4, cached=1, paid=3, used=Use(3, 1000, 500))
    stats.failures["refused"] += 2
    assert stats.figures()["distinct_share"] == 0.4
    assert stats.money == pytest.approx(0.007)
    assert str(stats) == (
        "10 prompts (4 distinct), 3 calls, 1,000 prompt and 500 completion tokens, $0.007, "
        "2 without a program (refused)"
    )
    assert stats.figures()["no_program_refused"] == 2
    assert stats.figures()["money"] == stats.money
    assert Stats(LLMSettings()).money is None
    assert "money" not in Stats(LLMSettings()).figures()
    assert Stats(LLMSettings()).figures()["distinct_share"] == 1.0
