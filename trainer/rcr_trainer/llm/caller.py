"""Gets an answer out of a model: attempts, pauses, and a budget that no call can break."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from rcr_trainer.llm.backend import Backend, Request
from rcr_trainer.llm.faults import Fault, LLMError
from rcr_trainer.llm.ledger import Answer, Ledger, Stats, Use
from rcr_trainer.llm.scoring import Scored
from rcr_trainer.llm.settings import LLMSettings

logger = logging.getLogger(__name__)

_MALFORMED_ATTEMPTS = 3
"""Attempts at a prompt whose responses are malformed; then it has no program."""

_ALL_MALFORMED = 10
"""Prompts in a row with malformed responses alone after which a run stops: the server speaks another protocol."""

_NAP = 0.5
"""Seconds between looks at whether waiting still makes sense."""

_LONGEST_BACKOFF = 30.0
_LONGEST_WAIT = 600.0
"""Seconds that a server may ask to wait; a run that waits longer looks like one that hangs."""


@dataclass(slots=True)
class Batch:
    """Prompts that were handed in together; the first error stops those that aren't running yet."""

    error: BaseException | None = None


class Caller:
    """Calls a model until it answers; lives on the event loop.

    Args:
        backend: the model.
        settings: attempts and pauses.
        ledger: the budget.
        stats: counted up here.
        on_loss: told of what a failed attempt may have cost.

    Attributes:
        well_formed: the model has answered a prompt properly.
    """

    def __init__(
        self,
        backend: Backend,
        settings: LLMSettings,
        ledger: Ledger,
        stats: Stats,
        on_loss: Callable[[Use], Awaitable[object]],
    ) -> None:
        self.closed: LLMError | None = None
        self._backend, self._settings, self._ledger, self._stats = backend, settings, ledger, stats
        # A computation on this machine has no time limit.
        self._timeout = None if settings.kind == "local" else settings.timeout
        self._on_loss = on_loss
        self._settled = asyncio.Condition()
        self._running = 0
        self._not_before = 0.0
        self._malformed = 0
        self.well_formed = False
        # Not the global generator, whose state a training run owns.
        self._jitter = random.Random()  # noqa: S311

    async def call(self, requests: Sequence[Request], batch: Batch) -> tuple[list[Answer], Use]:
        """The answers, and what they used; retries within.

        Raises:
            LLMError: no answer in all attempts, an error that another attempt can't fix, or another prompt's error.
            BudgetExceeded: the call could exceed the budget.
        """
        worst = self._backend.worst(requests)
        malformed = 0
        for attempt in range(1, self._settings.attempts + 1):
            await self._wait_turn(batch)
            await self._reserve(worst, batch)
            outcome = await self._attempt(requests)
            if not isinstance(outcome, Fault):
                answers = [self._counted(answer, each) for answer, each in zip(outcome, requests, strict=True)]
                read, written = sum(a.prompt_tokens for a in answers), sum(a.completion_tokens for a in answers)
                used = Use(len(answers), read, written)
                await self._release(worst, used)
                self._stats.paid += len(answers)
                self._malformed, self.well_formed = 0, True
                return answers, used
            lost = worst if outcome.charged else Use()
            await self._release(worst, lost)
            if outcome.charged:
                await self._on_loss(lost)
            malformed += outcome.reason == "malformed"
            if outcome.kind == "unusable" or malformed == _MALFORMED_ATTEMPTS:
                self._check_protocol(outcome)
                return [Answer(None, outcome.reason) for _ in requests], Use()
            if outcome.kind == "stop":
                raise outcome.error
            if attempt == self._settings.attempts:
                raise LLMError(f"{outcome.error}, in {attempt} attempts; answers so far are kept, so resume later")
            await self._back_off(outcome, attempt, batch)
        raise AssertionError

    async def _attempt(self, requests: Sequence[Request]) -> list[Answer] | Fault:
        self._running += 1
        self._stats.peak = max(self._stats.peak, self._running)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._backend.call(requests)
        except Exception as error:  # of whatever kind: diagnosed, and raised unless it passes
            return self._backend.diagnose(error)
        finally:
            self._running -= 1

    def _check_protocol(self, fault: Fault) -> None:
        self._malformed += fault.reason == "malformed"
        if self._malformed >= _ALL_MALFORMED:
            last = f"nor was any of the last {_ALL_MALFORMED} prompts answered"
            raise LLMError(f"{fault.error}; {last}: check llm.base_url and llm.kind")

    def _counted(self, answer: Answer, request: Request) -> Answer:
        read, written = answer.prompt_tokens, answer.completion_tokens
        if read >= 0 and (written > 0 or (written == 0 and not answer.text)):
            return answer
        self._stats.counted += 1
        if read < 0:
            read = self._backend.count_tokens(str(request))
        if written <= 0:
            written = 1 if isinstance(request, Scored) else self._backend.count_tokens(answer.text or "")
        return replace(answer, prompt_tokens=read, completion_tokens=written)

    async def _wait_turn(self, batch: Batch) -> None:
        """Stop if the batch has failed, and call nothing while the server asks for a pause."""
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
        wait = min(_LONGEST_BACKOFF, self._settings.backoff * 2 ** (attempt - 1)) * self._jitter.uniform(0.5, 1)
        if fault.wait is not None:
            if fault.wait > _LONGEST_WAIT:
                raise LLMError(f"{fault.error}; it asks to wait {fault.wait:,.0f} s: resume the run after that")
            # The limit is the account's: it holds for all calls.
            self._not_before = max(self._not_before, asyncio.get_running_loop().time() + fault.wait)
            wait = 0.0
        self._stats.retries[fault.reason] += 1
        which = f"attempt {attempt} of {self._settings.attempts}"
        logger.info("%s: %s, %s, next in %.1f s", self._backend.name, fault.reason, which, wait or fault.wait)
        await self._sleep(wait, batch)

    async def _reserve(self, worst: Use, batch: Batch) -> None:
        async with self._settled:
            while not self._ledger.fits(worst):
                if not self._ledger.reserved.calls:
                    raise self._ledger.exceeded(self._backend.name)
                # Running calls may turn out cheaper than their worst case.
                await self._settled.wait()
                if batch.error:
                    raise batch.error
            self._ledger.reserved += worst

    async def _release(self, worst: Use, used: Use) -> None:
        async with self._settled:
            self._ledger.reserved -= worst
            self._ledger.pending += used
            self._stats.used += used
            self._settled.notify_all()
