"""The one place that calls a model: within a budget, with retries, and with answers on disk before they are used.

Calls run on the project's background event loop, so connections outlive a call of `generate`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rcr_trainer.llm.cache import Answer, AnswerCache, Budget, Stats, Use
from rcr_trainer.llm.client import Client, Request
from rcr_trainer.llm.faults import Fault, LLMError
from rcr_trainer.llm.scoring import Scored
from rcr_trainer.llm.settings import LLMSettings

logger = logging.getLogger(__name__)

_SCORED_TOGETHER = 32
"""Batches of texts that a local model scores in one call: it groups those of similar length."""
_MALFORMED_ATTEMPTS = 3
"""Malformed responses to a prompt after which it has no program."""
_ALL_MALFORMED = 10
"""Prompts in a row with only malformed responses after which a run stops: the server speaks another protocol."""
_LONGEST_BACKOFF_S = 30.0
_LONGEST_WAIT_S = 600.0
"""Seconds that a server may ask to wait; a run that waits longer looks as if it hangs."""


class Calls:
    """Calls of one model. All coroutines here run on the background loop, so they need no locks."""

    def __init__(self, client: Client, settings: LLMSettings, cache: AnswerCache, stats: Stats, account: str) -> None:
        self._client, self._settings, self._cache, self._stats = client, settings, cache, stats
        self._account = account
        self.budget = Budget(settings, cache.spent(account))
        self._asking: asyncio.Task[Any] | None = None
        self._settled = asyncio.Condition()
        is_local = settings.kind == "local"
        self._most, self._active, self._halved = 1 if is_local else settings.concurrency, 0, -math.inf
        self._timeout = None if is_local else settings.timeout
        self._not_before = 0.0
        self._malformed = 0
        self._said_waiting = False
        self._doubtful: dict[bytes, Answer] = {}  # malformed; kept once the server is seen to answer other prompts
        self.too_long: Exception | None = None  # how the server last refused a prompt that is longer than it reads
        # Not the global generator: its state belongs to the training run.
        self._jitter = random.Random()  # noqa: S311

    async def close(self) -> None:
        """Wait for running calls, so that what is paid for is kept; then close the client."""
        if self._asking is not None:
            await asyncio.wait([self._asking])
        if self._stats.paid:
            await self._book(self._doubtful, None, Use())
        await self._client.close()

    async def answers(self, requests: Mapping[bytes, Request], advance: Callable[[int], object]) -> dict[bytes, Answer]:
        """The model's answers; at the first error, or once the caller is gone, calls that haven't begun are dropped."""
        found, parts = dict[bytes, Answer](), self._parts(requests)
        self._asking = asyncio.current_task()

        async def work() -> None:
            for part in parts:  # the iterator is shared by all workers
                found.update(await self._ask_once(part))
                advance(len(part))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._most, len(requests))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            raise error from error.__cause__
        return found

    def _parts(self, requests: Mapping[bytes, Request]) -> Iterator[dict[bytes, Request]]:
        left, size = list(requests.items()), self._client.batch_size
        if size > 1 and any(isinstance(request, Scored) for _, request in left):
            size *= _SCORED_TOGETHER
        elif size > 1:
            # Prompts of similar length need less padding.
            left.sort(key=lambda pair: len(str(pair[1])))
        for start in range(0, len(left), size):
            yield dict(left[start : start + size])

    async def _ask_once(self, requests: Mapping[bytes, Request]) -> dict[bytes, Answer]:
        """Answers to the requests of one call; what another process is asking for now is waited for instead."""
        while not self._cache.claim(requests):
            if not self._said_waiting:
                logger.info("%s: another run is asking for some of these answers; waiting for them", self._client.name)
                self._said_waiting = True
            await asyncio.sleep(0.2)
        try:
            found = await asyncio.to_thread(self._cache.get, requests)
            missing = {key: request for key, request in requests.items() if key not in found}
            return found | (await self._ask(missing) if missing else {})
        finally:
            self._cache.release(requests)

    async def _ask(self, requests: Mapping[bytes, Request]) -> dict[bytes, Answer]:
        """Answers to the requests of one call, in as many attempts as it takes."""
        worst = self._client.worst(list(requests.values()))
        attempt = malformed = limited = 0
        paid = self._stats.paid
        while True:
            attempt += 1
            began, answered = await self._reserve(worst), self._stats.paid
            task = asyncio.ensure_future(self._attempt(requests, worst))
            try:
                outcome = await asyncio.shield(task)
            except asyncio.CancelledError:
                # Once begun it is paid for: as long as it runs, no other process may ask for the same.
                await asyncio.wait([task])
                task.exception()  # read here, or asyncio logs a traceback beside the error that is raised
                raise
            if not isinstance(outcome, Fault):
                return outcome
            if outcome.reason == "timeout" and self._stats.paid - answered < self._most:
                self._halve(began)
            malformed += outcome.reason == "malformed"
            if outcome.kind == "unusable" or malformed == _MALFORMED_ATTEMPTS:
                return await self._give_up(requests, outcome)
            if outcome.reason == "too_long":
                # Not kept: the server may be started again with a larger context.
                if self.too_long is None:
                    logger.warning("%s: prompts like that have no answer", outcome.error)
                self.too_long = outcome.error
                return {
                    key: Answer("-inf" if isinstance(each, Scored) else None, "too_long")
                    for key, each in requests.items()
                }
            if outcome.kind == "stop":
                raise outcome.error
            # A rate limit is no fault of this prompt as long as others are answered.
            limited += outcome.reason == "429" and self._stats.paid > paid
            paid = self._stats.paid
            if attempt - limited == self._settings.attempts:
                times = "attempt" if attempt == 1 else "attempts"
                raise LLMError(f"{outcome.error}, in {attempt} {times}; answers so far are kept, so resume later")
            await self._back_off(outcome, attempt)

    async def _attempt(self, requests: Mapping[bytes, Request], worst: Use) -> dict[bytes, Answer] | Fault:
        """Call the model once; when this returns, its answers are on disk and the cost is booked."""
        self._stats.peak = max(self._stats.peak, self._active)
        try:
            async with asyncio.timeout(self._timeout):
                given = await self._client.call(list(requests.values()))
            pairs = zip(requests.items(), given, strict=True)
            answers = {key: self._counted(answer, request) for (key, request), answer in pairs}
        except Exception as error:  # of any kind: it is diagnosed, and raised unless temporary
            fault = self._client.diagnose(error)
            await self._book({}, worst, worst if fault.charged else Use())
            return fault
        used = sum((Use(1, answer.prompt_tokens, answer.completion_tokens) for answer in answers.values()), Use())
        self._stats.paid += len(answers)
        answers = self._doubtful | answers
        self._malformed, self._doubtful = 0, {}
        return await self._book(answers, worst, used)

    async def _give_up(self, requests: Mapping[bytes, Request], fault: Fault) -> dict[bytes, Answer]:
        """Empty answers, kept so that no resumed run pays for them again.

        Not kept are probabilities, which a run can't do without, and malformed answers unless the server answers
        others properly: it may be of another kind, or a proxy whose server is down.
        """
        answers = dict.fromkeys(requests, Answer(None, fault.reason))
        if fault.reason != "malformed":
            return await self._book(answers, None, Use())
        self._malformed += 1
        if self._malformed >= _ALL_MALFORMED:
            self._doubtful = {}
            last = f"nor was any of the last {_ALL_MALFORMED} prompts answered"
            raise LLMError(f"{fault.error}; {last}: check llm.base_url and llm.kind")
        if not any(isinstance(request, Scored) for request in requests.values()):
            self._doubtful |= answers
        return answers

    def _counted(self, answer: Answer, request: Request) -> Answer:
        read, written = answer.prompt_tokens, answer.completion_tokens
        if read >= 0 and (written > 0 or (written == 0 and not answer.text)):
            return answer
        self._stats.counted += 1
        if read < 0:
            read = self._client.count_tokens(request)
        if written <= 0:
            written = 1 if isinstance(request, Scored) else self._client.count(answer.text or "")
        return replace(answer, prompt_tokens=read, completion_tokens=written)

    async def _reserve(self, worst: Use) -> float:
        """Wait until the server, the budget and the concurrency limit allow another call; returns the time.

        A call's slot is freed once its answers are on disk, so a kill loses at most as many calls as there are slots.
        """
        now = asyncio.get_running_loop().time
        async with self._settled:
            while (left := self._not_before - now()) > 0 or self._active >= self._most or not self.budget.fits(worst):
                if not self._active and not self.budget.fits(worst):
                    raise self.budget.exceeded(self._client.name)
                # Running calls may turn out cheaper than their worst case.
                pause = left + self._jitter.uniform(0, min(1.0, 0.1 * left)) if left > 0 else None
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._settled.wait()
            self._active += 1
            self.budget.reserved += worst
        return now()

    def _halve(self, began: float) -> None:
        """Make fewer calls at a time, as one that `began` then has timed out.

        A server that answers one prompt at a time keeps the others waiting; it isn't one if it has answered that many
        meanwhile. Calls that began before the last halving say nothing new.
        """
        if began >= self._halved and self._most > 1:
            self._most, self._halved = self._most // 2, asyncio.get_running_loop().time()
            fewer = "%s: too slow for so many calls at a time (llm.concurrency), now %d"
            logger.warning(fewer, self._client.name, self._most)

    async def _book(self, answers: Mapping[bytes, Answer], worst: Use | None, used: Use) -> dict[bytes, Answer]:
        """Put answers on disk with their cost, and end their reservation; returns the answers as stored."""
        stored = dict(answers)
        async with self._settled:  # one at a time, or an older sum could overwrite what the account has spent
            if worst is not None:
                self._active -= 1
                self.budget.reserved -= worst
            self.budget.spent += used
            self._stats.used += used
            self._settled.notify_all()
            if answers or used.calls:
                put = asyncio.to_thread(self._cache.put, self._client.name, answers, self._account, used)
                stored, self.budget.spent = await put
        return stored

    async def _back_off(self, fault: Fault, attempt: int) -> None:
        doubled = self._settings.backoff * 2.0 ** min(attempt - 1, 99)
        # Most limits on rates are for a minute, which the default attempts must outlast.
        times, least = (4, 0.75) if fault.reason == "429" else (1, 0.5)
        wait = min(_LONGEST_BACKOFF_S, times * doubled) * self._jitter.uniform(least, 1)
        if fault.wait:  # 0, or a time that has passed by this clock, says nothing
            if fault.wait > _LONGEST_WAIT_S:
                raise LLMError(f"{fault.error}; it asks to wait {fault.wait:,.0f} s: resume the run after that")
            # The limit is the account's, so it holds for all calls.
            self._not_before = max(self._not_before, asyncio.get_running_loop().time() + fault.wait)
            wait = 0.0
        self._stats.retries[fault.reason] += 1
        told = "%s: %s in attempt %d, next in %.1f s"
        logger.info(told, self._client.name, fault.reason, attempt, wait or fault.wait or 0.0)
        await asyncio.sleep(wait)
