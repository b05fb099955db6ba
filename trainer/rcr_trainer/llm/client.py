"""The one place that calls a model: what is sent, what the response says, retries within a budget.

Answers are on disk before they are used. Calls run on the project's background event loop, so connections outlive a
call of `generate`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from types import MappingProxyType
from typing import Any, TypeAlias

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue

from langchain_rcr.chains.answers import cut
from langchain_rcr.policy.prompt import APPENDIX_D, Conversation, Prompt
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.cache import Answer, AnswerCache, Budget, Stats, Use
from rcr_trainer.llm.faults import Fault, LLMError, diagnose
from rcr_trainer.llm.server import COUNTS, WAYS, Scored, canonical, token_count
from rcr_trainer.llm.settings import LLMSettings

logger = logging.getLogger(__name__)

Request: TypeAlias = str | Conversation | Scored
"""A prompt to answer, or a text to score."""

_FORMAT = 2
"""Part of every cache key; raise it if the text of an answer is ever stored in another form."""
_TRUNCATED = {"length", "max_tokens", "max_output_tokens", "model_length"}
_REFUSED = {"content_filter", "refusal", "safety", "recitation", "blocklist", "prohibited_content", "spii"}
_REFUSED |= {"guardrail_intervened"}
_LONGEST_TEXT = 1 << 20
"""Characters of an answer that are read; the rest is cut off."""
_MESSAGE_TOKENS = 16
"""The most tokens that a chat's roles and separators add to a text."""
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


class Client:
    """A LangChain completion or chat model, called without the retries and caches of LangChain or the model itself.

    Args:
        model, settings: as for `LanguageModel`.
        identity: a JSON object that changes whenever the model or its parameters do, for answers in a file.
        prompt: how it is asked.
        count_tokens: the model's tokenizer, text → number; None: an upper bound, the number of bytes.
        name: for messages; None: the model's class.
        place: where it is served, for messages; "" if unknown.
        http: the HTTP client of a langchain-openai model, to be closed at the end.
    """

    def __init__(
        self,
        model: Any,
        settings: LLMSettings,
        *,
        identity: Mapping[str, Any] = MappingProxyType({}),
        prompt: Prompt = APPENDIX_D,
        count_tokens: Callable[[str], int] | None = None,
        name: str | None = None,
        place: str = "",
        http: Any = None,
    ) -> None:
        self._model, self._http, self._is_chat = model, http, isinstance(model, BaseChatModel)
        self.prompt = prompt
        # A chat model ends by itself; reasoning models refuse stop sequences, or stop inside their thoughts.
        usual = () if self._is_chat else prompt.stop
        self.stop = list(usual if settings.stop is None else settings.stop)
        self.instruction = prompt.instruction if self._is_chat else ""
        # Earlier versions could send `bound` along, so it is in the keys of answers in files.
        self._sent: dict[str, Any] = {"format": _FORMAT, **identity, "stop": self.stop, "bound": {}}
        self.batch_size = settings.batch_size if settings.kind == "local" else 1
        self.longest = settings.max_tokens
        self.exact_tokens = count_tokens is not None
        self.count = count_tokens or (lambda text: len(text.encode("utf-8", "surrogatepass")))
        self.name = name or type(model).__name__
        self.who = f"the model {self.name!r}" + (f" at {place}" if place else "")
        self.diagnose = partial(diagnose, who=self.who, openai=http is not None)
        self.scoring = WAYS[0]  # how a server is asked for a text's probability

    async def call(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer prompts, or score texts; token counts are −1 where the model reports no plausible ones."""
        if isinstance(requests[0], Scored):
            return await self._score([each for each in requests if isinstance(each, Scored)])
        values = [self._prompt(each) for each in requests if not isinstance(each, Scored)]
        result = await self._model.agenerate_prompt(values, stop=self.stop or None)
        whole = result.llm_output if len(values) == 1 else None
        return [answer_of(row[0], self.stop, whole) for row in result.generations]

    async def _score(self, requests: Sequence[Scored]) -> list[Answer]:
        requests = [Scored(self._prompt(each.prompt).to_string(), plain(each.continuation)) for each in requests]
        model = self._model
        if hasattr(model, "log_likelihoods"):
            texts = [each.prompt for each in requests], [each.continuation for each in requests]
            found = await asyncio.to_thread(model.log_likelihoods, *texts)
            return [Answer(repr(value), "", -1, -1) for value in found]
        if self._is_chat or self._http is None:
            raise ConfigError(f"{self.name!r} gives no probabilities: scoring needs llm.kind: local, or completion")
        asked = self.scoring.asked(requests[0])
        asked["extra_body"] |= model.extra_body or {}
        body = await model.async_client.create(model=model.model_name, logprobs=1, temperature=0, **asked)
        return [Answer(repr(self.scoring.read(body, requests[0])), "", *_counts(body["usage"]))]

    def key(self, request: Request) -> bytes:
        """A request's key in the cache."""
        system, turns = self._parts(request)
        identity = canonical({**self._sent, "instruction": system})
        marked = f"{len(identity)}:{identity}"
        if isinstance(request, Scored):
            marked = f"score:{marked}{len(request.prompt)}:{request}"
        elif len(turns) == 1 and not turns[0].startswith("chat:"):
            marked += turns[0]
        else:
            marked += f"chat:{json.dumps(turns)}"
        return hashlib.sha256(marked.encode("utf-8", "surrogatepass")).digest()

    def worst(self, requests: Sequence[Request]) -> Use:
        """The most that a call uses; to score a text, a server may also have to write."""
        read = sum(map(self.count_tokens, requests))
        written = sum(
            self.scoring.asked(each)["max_tokens"] if isinstance(each, Scored) else self.longest for each in requests
        )
        return Use(len(requests), read, written)

    def count_tokens(self, request: Request) -> int:
        """Tokens of a request with all that is sent along; may be somewhat too high."""
        system, turns = self._parts(request)
        messages = len(turns) if self._is_chat else 0
        if system:
            messages, turns = messages + 1, (system, *turns)
        return sum(map(self.count, turns)) + _MESSAGE_TOKENS * messages

    async def close(self) -> None:
        """Close the connections that were opened for this object."""
        if self._http is not None:
            await self._http.aclose()

    def _parts(self, request: Request) -> tuple[str, tuple[str, ...]]:
        """The system message ("" for none) and the turns, in sendable form."""
        asked = request if isinstance(request, Conversation) else Conversation(self.instruction, (str(request),))
        return plain(asked.system), tuple(map(plain, asked.turns))

    def _prompt(self, request: str | Conversation) -> PromptValue:
        system, turns = self._parts(request)
        if not self._is_chat:
            return StringPromptValue(text=str(Conversation(system, turns)))
        messages = [kind(turn) for kind, turn in zip(cycle((HumanMessage, AIMessage)), turns, strict=False)]
        return ChatPromptValue(messages=[*([SystemMessage(system)] if system else []), *messages])


def plain(text: str) -> str:
    """The text made encodable in UTF-8: surrogate pairs are joined, and half a pair becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def answer_of(generation: Generation, stop: Sequence[str], whole: Mapping[str, Any] | None = None) -> Answer:
    """A model's output up to the first of `stop`; `whole` is the `llm_output` of a call with only this prompt."""
    counts = _usage(generation, whole or {})
    info: dict[str, Any] = dict(generation.generation_info or {})
    called = False
    if isinstance(generation, ChatGeneration):
        info = {**generation.message.response_metadata, **info}
        message = generation.message
        if message.additional_kwargs.get("refusal"):
            return Answer(None, "refused", *counts)
        if isinstance(message, AIMessage):
            calls = message.tool_calls, message.invalid_tool_calls, message.additional_kwargs.get("function_call")
            called = any(calls)
    ending = str(info.get("finish_reason") or info.get("stop_reason") or info.get("done_reason") or "").lower()
    if ending in _REFUSED or ending == "too_long":
        return Answer(None, "too_long" if ending == "too_long" else "refused", *counts)
    text, stopped = cut(plain(generation.text[:_LONGEST_TEXT]), stop)
    if (ending in _TRUNCATED or len(generation.text) > _LONGEST_TEXT) and not stopped:
        return Answer(text or None, "truncated", *counts)
    return Answer(text or None, "" if text else "tool_call" if called else "empty", *counts)


def _usage(generation: Generation, whole: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt and completion tokens as reported with a generation; −1 if missing or implausible."""
    message = getattr(generation, "message", None)
    if reported := getattr(message, "usage_metadata", None):
        return _counts(reported, ("input_tokens", "output_tokens"))
    for reported in (generation.generation_info, whole.get("token_usage"), whole.get("usage")):
        if isinstance(reported, Mapping) and "prompt_tokens" in reported:
            return _counts(reported)
    return -1, -1


def _counts(reported: Mapping[str, Any], names: tuple[str, str] = COUNTS) -> tuple[int, int]:
    read, written = (token_count(reported.get(name)) for name in names)
    # No prompt has 0 tokens: LangChain writes 0 if the server reports nothing.
    return read or -1, written
