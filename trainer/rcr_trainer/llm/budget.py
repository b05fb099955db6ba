"""What calls cost, how much may be spent, and how much was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rcr_trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars for a million tokens, read and written."""

    prompt: float = 0.0
    completion: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt < 0 or self.completion < 0:
            raise ConfigError(f"prices can't be negative: {self.prompt}, {self.completion}")


@dataclass(frozen=True, slots=True)
class Use:
    """Calls, and the tokens they read and wrote."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Read and written."""
        return self.prompt_tokens + self.completion_tokens

    def money(self, prices: Prices) -> float:
        """Dollars."""
        return (self.prompt_tokens * prices.prompt + self.completion_tokens * prices.completion) / 1e6

    def __add__(self, other: Use) -> Use:
        return Use(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )

    def __sub__(self, other: Use) -> Use:
        return self + Use(-other.calls, -other.prompt_tokens, -other.completion_tokens)


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be spent at most; None: no limit.

    Attributes:
        calls: answered calls, and failed ones that the provider may have charged.
        tokens: read and written.
        money: dollars.
    """

    calls: int | None = None
    tokens: int | None = None
    money: float | None = None

    def __post_init__(self) -> None:
        for name in ("calls", "tokens", "money"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"the budget of {name} can't be negative, got {value}")


class Ledger:
    """Sets aside the worst case of a call before it is made, and books what it cost after.

    Attributes:
        spent: booked, for good.
        pending: used, but not yet on disk.
        reserved: the worst case of the calls that are running.
    """

    def __init__(self, budget: Budget, prices: Prices, spent: Use) -> None:
        self.budget, self.prices = budget, prices
        self.spent = spent
        self.pending = self.reserved = Use()

    @property
    def total(self) -> Use:
        """All that was used, on disk or not."""
        return self.spent + self.pending

    def book(self, used: Use, total: Use | None) -> None:
        """What was pending is on disk; `total` is what the account has spent by now, other processes' calls too."""
        self.pending -= used
        self.spent = self.spent + used if total is None else total

    def fits(self, worst: Use) -> bool:
        """Whether a call of at most so much can't break the budget, whatever the running calls come to."""
        total = self.total + self.reserved + worst
        budget = self.budget
        return not (
            (budget.calls is not None and total.calls > budget.calls)
            or (budget.tokens is not None and total.tokens > budget.tokens)
            # A hair of slack, so that sums of cents that come out even are even.
            or (budget.money is not None and total.money(self.prices) > budget.money * (1 + 1e-9) + 1e-12)
        )

    def limits(self) -> str:
        """The budget in words."""
        budget = self.budget
        parts = [
            f"{budget.calls:,} calls" if budget.calls is not None else "",
            f"{budget.tokens:,} tokens" if budget.tokens is not None else "",
            f"${budget.money:,.2f}" if budget.money is not None else "",
        ]
        return ", ".join(part for part in parts if part) or "no limit"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What some prompts cost at most.

    Attributes:
        nominal: prompts.
        calls: those that would be asked: identical ones once, and none that the cache has.
        prompt_tokens: read.
        completion_tokens: written, every answer at its longest.
        money: dollars; None without prices.
        exact: prompt tokens come from the model's own tokenizer; else every byte counts as a token, which is an
            upper bound, some three times what English text and programs come to.
    """

    nominal: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    money: float | None
    exact: bool

    def __str__(self) -> str:
        money = "" if self.money is None else f", ${self.money:,.2f}"
        note = "" if self.exact else " (a token for each byte of a prompt; real use is about a third)"
        tokens = f"{self.prompt_tokens:,} prompt and {self.completion_tokens:,} completion tokens"
        return f"at most {self.calls:,} calls for {self.nominal:,} prompts, {tokens}{money}{note}"


@dataclass(slots=True)
class Stats:
    """Counts since a model was opened.

    Attributes:
        nominal: prompts handed in.
        distinct: different ones among them.
        cached: prompts answered from disk.
        paid: prompts that the model answered (one each, however often they were handed in at once).
        used: what the paid ones read and wrote, and what failed attempts may have cost.
        counted: answers without a token count of the server's, counted here.
        retries: attempts that failed and were repeated, by reason.
        failures: prompts without a usable answer, by reason (see `Answer.reason`); repeated prompts count each time.
        peak: most calls that ran at the same time.
        prices: for `money`.
    """

    nominal: int = 0
    distinct: int = 0
    cached: int = 0
    paid: int = 0
    used: Use = field(default_factory=Use)
    counted: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    prices: Prices | None = None

    @property
    def money(self) -> float | None:
        """Dollars spent; None without prices."""
        return None if self.prices is None else self.used.money(self.prices)

    @property
    def distinct_share(self) -> float:
        """Distinct calls ÷ nominal calls; 1 before any."""
        return self.distinct / self.nominal if self.nominal else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values, for a metrics file."""
        return {
            "nominal_calls": self.nominal,
            "distinct_calls": self.distinct,
            "distinct_share": round(self.distinct_share, 4),
            "cached": self.cached,
            "paid_calls": self.paid,
            "prompt_tokens": self.used.prompt_tokens,
            "completion_tokens": self.used.completion_tokens,
            "counted": self.counted,
            "money": self.money,
            "retries": dict(self.retries),
            "no_program": dict(self.failures),
            "peak_concurrency": self.peak,
        }

    def figures(self) -> dict[str, float]:
        """All of it as numbers, those by reason one by one (`no_program_truncated`, `retries_429`); no money: none."""
        found: dict[str, float] = {}
        for name, value in self.as_dict().items():
            each = {f"{name}_{reason}": count for reason, count in value.items()} if isinstance(value, dict) else None
            found |= {name: value} if each is None else each
        return {name: float(value) for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        parts = [
            f"{self.nominal:,} nominal calls, {self.distinct:,} distinct ({self.distinct_share:.2f})",
            f"{self.cached:,} from the cache, {self.paid:,} paid",
            f"{self.used.prompt_tokens:,} + {self.used.completion_tokens:,} tokens",
        ]
        parts += [f"{self.counted:,} of the answers counted here"] if self.counted else []
        parts += [f"${self.money:,.4f}"] if self.money is not None else []
        parts += [f"no program: {_listed(self.failures)}"] if self.failures else []
        parts += [f"retries: {_listed(self.retries)}"] if self.retries else []
        return "; ".join(parts)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
