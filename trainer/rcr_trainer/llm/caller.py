"""Gets an answer out of a model: attempts, pauses, and a budget that no call can break."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.answers import Answer
from rcr_trainer.llm.budget import Ledger, Stats, Use
from rcr_trainer.llm.errors import BudgetExceeded, LLMError
from rcr_trainer.llm.faults import Diagnosis, Fault, MalformedResponseError

logger = logging.getLogger(__name__)

_MALFORMED_ATTEMPTS = 3
"""A response that is no answer is asked for again so often, then the prompt has no program."""

_ALL_MALFORMED = 10
"""So many prompts and never a proper response: the server speaks another protocol, and training would learn noise."""

_NAP = 0.5
"""Seconds between looks at whether waiting still makes sense."""

_LONGEST_BACKOFF = 30.0
_LONGEST_WAIT = 600.0
"""Seconds that a server may ask to wait; a run that waits longer looks like one that hangs."""


class Backend(Protocol):
    """What answers: one call is one attempt, without retries."""

    name: str
    identity: str
    diagnose: Diagnosis
    batch_size: int
    exact_tokens: bool

    async def ask(self, prompts: Sequence[str]) -> list[Answer]:
        """Answer some prompts, `batch_size` at most; token counts are −1 where the server gives none."""
        ...

    def count_tokens(self, text: str) -> int:
        """Tokens of a prompt with all that is sent along; an upper bound if they can't be counted."""
        ...

    def max_completion_tokens(self) -> int | None:
        """Tokens of an answer, at most; None if that isn't known."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to try.

    Attributes:
        concurrency: calls that run at the same time.
        attempts: calls for a prompt before the run stops.
        timeout: seconds for an attempt; None: no limit (a computation on this machine).
        backoff: seconds before the second attempt, doubled for each further one, with jitter.
    """

    concurrency: int = 16
    attempts: int = 6
    timeout: float | None = 60.0
    backoff: float = 1.0


@dataclass(slots=True)
class Batch:
    """Prompts that were handed in together; the first error stops those that aren't running yet."""

    error: BaseException | None = None


class Caller:
    """Asks a backend; lives on the event loop.

    Args:
        backend: the model.
        patience: attempts and pauses.
        ledger: the budget.
        stats: counted up here.
        on_loss: told of what a failed attempt may have cost.
    """

    def __init__(
        self,
        backend: Backend,
        patience: Patience,
        ledger: Ledger,
        stats: Stats,
        on_loss: Callable[[Use], Awaitable[object]],
    ) -> None:
        limit = ledger.budget
        if backend.max_completion_tokens() is None and (limit.tokens is not None or limit.money is not None):
            raise ConfigError(f"a budget needs to know how long an answer of {backend.name!r} may get: give max_tokens")
        if limit.money is not None and stats.prices is None:
            raise ConfigError("a budget in dollars needs prices for a million prompt and completion tokens")
        self.closed: LLMError | None = None
        self._backend, self._patience, self._ledger, self._stats = backend, patience, ledger, stats
        self._on_loss = on_loss
        self._settled = asyncio.Condition()
        self._running = 0
        self._not_before = 0.0
        self._malformed, self._well_formed = 0, 0
        # Not the global generator, whose state a training run owns.
        self._jitter = random.Random()  # noqa: S311

    async def ask(self, prompts: Sequence[str], batch: Batch) -> tuple[list[Answer], Use]:
        """The answers, and what they used; retries within.

        Raises:
            LLMError: no answer in all attempts, or none to be had; the budget; or the batch's error.
        """
        counts = [self._backend.count_tokens(prompt) for prompt in prompts]
        worst = Use(len(prompts), sum(counts), len(prompts) * (self._backend.max_completion_tokens() or 0))
        malformed = 0
        for attempt in range(1, self._patience.attempts + 1):
            await self._wait_turn(batch)
            await self._reserve(worst, batch)
            outcome = await self._attempt(prompts)
            if not isinstance(outcome, Fault):
                answers = [self._counted(answer, count) for answer, count in zip(outcome, counts, strict=True)]
                read, written = sum(a.prompt_tokens for a in answers), sum(a.completion_tokens for a in answers)
                used = Use(len(answers), read, written)
                await self._release(worst, used)
                self._stats.paid += len(answers)
                self._well_formed += 1
                return answers, used
            lost = worst if outcome.charged else Use()
            await self._release(worst, lost)
            if outcome.charged:
                await self._on_loss(lost)
            malformed += outcome.reason == "malformed"
            if outcome.kind == "unusable" or malformed == _MALFORMED_ATTEMPTS:
                self._check_protocol(outcome)
                return [Answer(None, outcome.reason) for _ in prompts], Use()
            if outcome.kind == "stop":
                raise outcome.error
            if attempt == self._patience.attempts:
                raise LLMError(f"{outcome.error}, in {attempt} attempts; answers so far are kept, so resume later")
            await self._back_off(outcome, attempt, batch)
        raise AssertionError

    def _check_protocol(self, fault: Fault) -> None:
        self._malformed += fault.reason == "malformed"
        if not self._well_formed and self._malformed >= _ALL_MALFORMED:
            raise LLMError(f"{fault.error}; nor was any other so far: check llm.base_url and llm.kind")

    async def _attempt(self, prompts: Sequence[str]) -> list[Answer] | Fault:
        self._running += 1
        self._stats.peak = max(self._stats.peak, self._running)
        try:
            async with asyncio.timeout(self._patience.timeout):
                answers = await self._backend.ask(prompts)
            if len(answers) != len(prompts):
                raise MalformedResponseError(f"{len(answers)} answers to {len(prompts)} prompts")
            return answers
        except Exception as error:  # of whatever kind: diagnosed, and raised unless it passes
            return self._backend.diagnose(error)
        finally:
            self._running -= 1

    def _counted(self, answer: Answer, prompt_tokens: int) -> Answer:
        if answer.prompt_tokens >= 0:
            return answer
        self._stats.counted += 1
        return Answer(answer.text, answer.reason, prompt_tokens, self._backend.count_tokens(answer.text or ""))

    async def _wait_turn(self, batch: Batch) -> None:
        """Stop if the batch has failed, and ask nothing while the server wants a pause."""
        now = asyncio.get_running_loop().time
        while (left := self._not_before - now()) > 0:
            await self._sleep(left + self._jitter.uniform(0, min(1.0, 0.1 * left)), batch)
        if error := batch.error or self.closed:
            raise error

    async def _sleep(self, seconds: float, batch: Batch) -> None:
        now = asyncio.get_running_loop().time
        end = now() + seconds
        while (left := end - now()) > 0:
            if error := batch.error or self.closed:
                raise error
            await asyncio.sleep(min(left, _NAP))

    async def _back_off(self, fault: Fault, attempt: int, batch: Batch) -> None:
        wait = min(_LONGEST_BACKOFF, self._patience.backoff * 2 ** (attempt - 1)) * self._jitter.uniform(0.5, 1)
        if fault.wait is not None:
            if fault.wait > _LONGEST_WAIT:
                raise LLMError(f"{fault.error}; it asks to wait {fault.wait:,.0f} s: resume the run after that")
            # A limit is on all calls of the account: nobody asks before it is over.
            self._not_before = max(self._not_before, asyncio.get_running_loop().time() + fault.wait)
            wait = 0.0
        self._stats.retries[fault.reason] += 1
        which = f"attempt {attempt} of {self._patience.attempts}"
        logger.info("%s: %s, %s, next in %.1f s", self._backend.name, fault.reason, which, wait or fault.wait)
        await self._sleep(wait, batch)

    async def _reserve(self, worst: Use, batch: Batch) -> None:
        async with self._settled:
            while not self._ledger.fits(worst):
                if not self._ledger.reserved.calls:
                    raise self._exceeded()
                # Running calls may turn out cheaper than their worst case.
                await self._settled.wait()
                if batch.error:
                    raise batch.error
            self._ledger.reserved += worst

    def _exceeded(self) -> BudgetExceeded:
        spent = self._ledger.total
        money = "" if self._stats.prices is None else f", ${spent.money(self._stats.prices):,.4f}"
        return BudgetExceeded(
            f"the budget of {self._ledger.limits()} could be exceeded by the next call of {self._backend.name!r} "
            f"(spent: {spent.calls:,} calls, {spent.tokens:,} tokens{money}); all answers are kept: raise it and resume"
        )

    async def _release(self, worst: Use, used: Use) -> None:
        async with self._settled:
            self._ledger.reserved -= worst
            self._ledger.pending += used
            self._stats.used += used
            self._settled.notify_all()
