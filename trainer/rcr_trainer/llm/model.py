"""The one place that calls a model: every prompt once, on disk before it is used, within a budget.

Calls run on the project's background event loop, where connections outlive a call of `generate`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

from langchain_rcr.basics.background import background
from langchain_rcr.basics.progress import bar
from langchain_rcr.chains.answers import program_of
from langchain_rcr.policy.prompt import APPENDIX_D, Conversation, Prompt
from langchain_rcr.programs import get_parser
from langchain_rcr.programs.remembering import remembered
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.cache import Answer, AnswerCache, Budget, Estimate, Stats, Use
from rcr_trainer.llm.client import Client, Request, address_of, identity_of, make_model, public
from rcr_trainer.llm.faults import Fault, LLMError, RequestError, TooLongError, UnscoredError
from rcr_trainer.llm.scoring import WAYS, Scored
from rcr_trainer.llm.settings import LLMSettings

logger = logging.getLogger(__name__)
T = TypeVar("T")

_FIRST = 50
"""Different prompts after which a model is given up if over half of the answers hold no program that parses."""
_QUOTED = 400
"""Characters of a prompt's end, and of an answer's beginning, that the error shows."""
_SCORED_TOGETHER = 32
"""Batches of texts that a local model scores in one call: it puts those of similar length side by side."""
_MALFORMED_ATTEMPTS = 3
"""Attempts at a prompt whose responses are malformed; after that it has no program."""
_ALL_MALFORMED = 10
"""Prompts in a row with malformed responses alone after which a run stops: the server speaks another protocol."""
_LONGEST_BACKOFF_S = 30.0
_LONGEST_WAIT_S = 600.0
"""Seconds that a server may ask to wait; a run that waits longer looks like one that hangs."""


class LanguageModel:
    """Answers prompts by a LangChain completion or chat model; a context manager that closes itself.

    `open_llm` makes one by settings. One thread at a time may use it.

    Args:
        model: a `BaseLLM` or `BaseChatModel`, with the temperature and the longest answer that the settings name.
        settings: stop sequences, retries, concurrency, budget and prices. With kind "local", a call has `batch_size`
            prompts.
        identity: a JSON object that changes whenever the model or its parameters do, for answers in a file.
        cache_path: the file with the answers, kept over runs; None: in memory.
        language: of the programs in the answers, see `langchain_rcr.programs.get_parser`.
        prompt: how it is asked.
        account: a name (of the run) under which the cache file keeps what is spent, so that the budget holds over
            restarts (and, up to the calls that are running elsewhere, over several processes); None: for this object.
        **options: of `Client`: the model's name, place, tokenizer and HTTP client.

    Raises:
        DataError: the cache file can't be used.
    """

    def __init__(
        self,
        model: Any,
        settings: LLMSettings | None = None,
        *,
        identity: Mapping[str, Any] | None = None,
        cache_path: str | os.PathLike[str] | None = None,
        language: str = "functional",
        prompt: Prompt = APPENDIX_D,
        account: str | None = None,
        **options: Any,
    ) -> None:
        self._settings = settings = settings or LLMSettings()
        self._client = client = Client(model, settings, identity=identity or {}, prompt=prompt, **options)
        self.name, self.prompt, self.stats = client.name, prompt, Stats(settings)
        self._cache, self._account = AnswerCache(cache_path), account
        self._budget = Budget(settings, self._cache.spent(account) if account is not None else Use())
        # Answers to a group's prompts are often the same.
        self._program_of = remembered(1 << 24)(partial(program_of, language=language, labels=prompt.labels))
        self._language, self._looked_at, self._useless = language, 0, 0
        self._scores: bool | UnscoredError | None = True if settings.kind == "local" else None

        self._closed = False
        self._seen: set[bytes] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._settled = asyncio.Condition()
        is_local = settings.kind == "local"
        self._slots = asyncio.Semaphore(1 if is_local else settings.concurrency)
        self._timeout = None if is_local else settings.timeout
        self._not_before = 0.0
        self._malformed, self._well_formed = 0, False
        # Not the global generator, whose state a training run owns.
        self._jitter = random.Random()  # noqa: S311

    @property
    def spent(self) -> Use:
        """What counts against the budget so far."""
        return self._budget.spent

    def generate(self, prompts: Sequence[str | Conversation]) -> list[Answer]:
        """Answer prompts, in their order.

        A prompt is sent once, as long as the cache file is kept. Its answer is on disk before it is returned. Calls
        that are running when an error is raised are finished first, and their answers kept.

        Returns:
            An answer for each, with its program. Empty, refused, truncated and malformed ones have a reason.

        Raises:
            BudgetExceeded: the next call could exceed the budget.
            AccessError: key, quota or model name: calling again can't help.
            TooLongError: a prompt is too long for the server, or over half of the first ones for a local model.
            LLMError: no answer in all attempts, or over half of the first answers hold no program that parses.
            DataError: the cache can't be written.
        """
        answers: list[Answer] = []
        # Some first, so that a useless model costs no more.
        while self._looked_at < _FIRST < len(prompts) - len(answers):
            some = prompts[len(answers) : len(answers) + _FIRST]
            answers += self._generate(some)
        return answers + self._generate(prompts[len(answers) :])

    def log_likelihoods(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """See `Scorer.log_likelihoods`; kept, counted and paid for as answers are.

        The first text that a server scores goes alone: if the server can't, that costs a call for each of `WAYS`.

        Raises:
            UnscoredError: the server ignores or refuses each way, or a response has no usable probabilities.
            ConfigError: the model tells no probabilities (a chat model).
            LLMError: as `generate`.
        """
        requests = [Scored(*pair) for pair in zip(prompts, continuations, strict=True)]
        if self._scores is not True:
            keys = [self._client.key(request) for request in requests]
            kept = self._cache.get(keys)
            new = [request for key, request in zip(keys, requests, strict=True) if key not in kept]
            if new and self._scores is None:
                self._scores = self._try_ways(new[0])
            if new and isinstance(self._scores, UnscoredError):
                raise self._scores
        texts = [answer.text for answer in self._answers(requests)]
        scores = [float(text) for text in texts if text is not None]
        if len(scores) < len(texts):
            raise self._malformed_scores()
        return scores

    def _try_ways(self, request: Scored) -> bool | UnscoredError:
        """Find out whether the server scores, and by which way, with a text of which nothing is kept."""
        failed: bool | UnscoredError = False
        for self._client.scoring in WAYS:
            try:
                (answer,) = self._answers([request])
                return answer.text is not None or self._malformed_scores()
            except TooLongError:
                raise
            except RequestError as error:
                failed = UnscoredError(f"{self.name!r} can't score: {error}")
            except UnscoredError as error:
                failed = error
        return failed

    def _malformed_scores(self) -> UnscoredError:
        return UnscoredError(f"the model {self.name!r} gave no probabilities of a text: the response is malformed")

    def count_tokens(self, prompt: str | Conversation) -> int:
        """Tokens of a prompt with all that is sent along, or somewhat more."""
        return self._client.count_tokens(prompt)

    def estimate_calls(self, calls: int, longest_prompt: str | Conversation) -> Estimate:
        """What a number of calls costs at most, before the prompts are known. The model is not called.

        Args:
            calls: all of which may turn out to be distinct.
            longest_prompt: no prompt will have more tokens than this one.
        """
        use = Use(calls, calls * self.count_tokens(longest_prompt), calls * self._client.longest)
        money = self._settings.money(use.prompt_tokens, use.completion_tokens)
        return Estimate(use, money, self._client.exact_tokens)

    def close(self) -> None:
        """Wait for calls that are still running, so that what is paid for is kept; then close the model."""
        if not self._closed:
            self._closed = True
            background().run(self._close())
            self._cache.close()
            if self.stats.nominal:
                logger.info("%s: %s", self.name, self.stats)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _close(self) -> None:
        if self._running:
            await asyncio.wait(self._running)
        await self._client.close()

    def _generate(self, prompts: Sequence[str | Conversation]) -> list[Answer]:
        answers = [self._read(answer) for answer in self._answers(prompts)]
        self.stats.failures.update([answer.reason for answer in answers if answer.program is None])
        self._stop_if_useless(prompts, answers)
        logger.debug("%s: %s", self.name, self.stats)
        return answers

    def _read(self, answer: Answer) -> Answer:
        """The answer with its program, or a reason why there is none."""
        if answer.text is None:
            return answer
        program = self._program_of(answer.text)
        # Cut off in its program, unless what might follow would change nothing.
        if answer.reason == "truncated" and program != self._program_of(f"{answer.text}x"):
            return answer
        return replace(answer, program=program, reason=answer.reason if program else answer.reason or "empty")

    def _stop_if_useless(self, prompts: Sequence[str | Conversation], answers: Sequence[Answer]) -> None:
        """Raise an error if over half of the first answers hold no program: a run would learn and compare nothing."""
        if self._looked_at >= _FIRST:
            return
        parse, distinct = get_parser(self._language).parse, dict(zip(prompts, answers, strict=True))
        useless = [pair for pair in distinct.items() if pair[1].program is None or parse(pair[1].program) is None]
        self._looked_at, self._useless = self._looked_at + len(distinct), self._useless + len(useless)
        if self._looked_at < _FIRST or 2 * self._useless <= self._looked_at or not useless:
            return
        prompt, answer = str(useless[-1][0]), useless[-1][1]
        if all(each.reason == "too_long" for _, each in useless):
            self._looked_at = self._useless = 0  # others may fit
            raise TooLongError(
                f"most prompts, with an answer of llm.max_tokens, are longer than {self.name!r} reads: fewer or "
                f"shorter examples, or another model (one prompt has {answer.prompt_tokens} tokens)"
            )
        raise LLMError(
            f"{self._useless} of the first {self._looked_at} answers of {self.name!r} hold no program that parses "
            f"as '{self._language}': change the section prompt, llm.max_tokens, program.language or the model. The "
            f"end of a prompt: {prompt[-_QUOTED:]!r}; its answer{f' ({answer.reason})' if answer.reason else ''}: "
            f"{(answer.text or '')[:_QUOTED]!r}"
        )

    def _answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers to some requests, in their order; each distinct one is asked once."""
        if self._closed:
            raise LLMError(f"the model {self.name!r} is closed")
        keys = [self._client.key(request) for request in requests]
        distinct = dict(zip(keys, requests, strict=True))
        self._seen.update(keys)
        self.stats.nominal += len(keys)
        self.stats.distinct = len(self._seen)
        found = self._cache.get(distinct)
        with bar(f"{self.name} answers", len(distinct)) as shown:
            shown.update(len(found))
            if missing := {key: request for key, request in distinct.items() if key not in found}:
                found |= background().run(self._ask_all(missing, shown))
        self.stats.cached += sum(found[key].cached for key in keys)
        return [found[key] for key in keys]

    async def _ask_all(self, requests: Mapping[bytes, Request], shown: Any) -> dict[bytes, Answer]:
        """The model's answers. At the first error, or once the caller is gone, calls that haven't begun are dropped."""
        found: dict[bytes, Answer] = {}

        async def ask(part: Mapping[bytes, Request]) -> None:
            found.update(await self._ask(part))
            shown.update(len(part))

        try:
            async with asyncio.TaskGroup() as group:
                for part in self._parts(requests):
                    group.create_task(ask(part))
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            raise error from error.__cause__
        finally:
            if self._running:
                await asyncio.wait(self._running)
        return found

    def _parts(self, requests: Mapping[bytes, Request]) -> Iterator[dict[bytes, Request]]:
        """The requests of each call."""
        left, size = list(requests.items()), self._client.batch_size
        if size > 1 and any(isinstance(request, Scored) for _, request in left):
            size *= _SCORED_TOGETHER
        elif size > 1:
            # Prompts of similar length need little padding.
            left.sort(key=lambda pair: len(str(pair[1])))
        for start in range(0, len(left), size):
            yield dict(left[start : start + size])

    async def _ask(self, requests: Mapping[bytes, Request]) -> dict[bytes, Answer]:
        """Answers to requests that go into one call, in as many attempts as it takes."""
        async with self._slots:  # until they are on disk: a kill loses no more answers than there are slots
            worst = self._client.worst(list(requests.values()))
            attempt = malformed = 0
            while True:
                attempt += 1
                await self._wait_for_server()
                await self._reserve(worst)
                outcome = await self._to_the_end(self._attempt(requests, worst))
                if not isinstance(outcome, Fault):
                    return outcome
                malformed += outcome.reason == "malformed"
                if outcome.kind == "unusable" or malformed == _MALFORMED_ATTEMPTS:
                    return await self._give_up(requests, outcome)
                if outcome.kind == "stop":
                    raise outcome.error
                if attempt == self._settings.attempts:
                    raise LLMError(f"{outcome.error}, in {attempt} attempts; answers so far are kept, so resume later")
                await self._back_off(outcome, attempt)

    async def _attempt(self, requests: Mapping[bytes, Request], worst: Use) -> dict[bytes, Answer] | Fault:
        """Call the model once; when this returns, its answers are on disk, and what it cost is booked."""
        self.stats.peak = max(self.stats.peak, len(self._running))
        try:
            async with asyncio.timeout(self._timeout):
                given = await self._client.call(list(requests.values()))
        except Exception as error:  # of whatever kind: diagnosed, and raised unless it passes
            fault = self._client.diagnose(error)
            await self._book({}, worst, worst if fault.charged else Use())
            return fault
        pairs = zip(requests.items(), given, strict=True)
        answers = {key: self._counted(answer, request) for (key, request), answer in pairs}
        read = sum(answer.prompt_tokens for answer in answers.values())
        written = sum(answer.completion_tokens for answer in answers.values())
        self.stats.paid += len(answers)
        self._malformed, self._well_formed = 0, True
        return await self._book(answers, worst, Use(len(answers), read, written))

    async def _give_up(self, requests: Mapping[bytes, Request], fault: Fault) -> dict[bytes, Answer]:
        """Empty answers, which are kept, so that no resumed run pays for them again.

        Not those that are malformed where the server hasn't answered anything properly, which may be one of another
        kind, nor probabilities, without which a run can't go on.
        """
        answers = dict.fromkeys(requests, Answer(None, fault.reason))
        if fault.reason == "malformed":
            self._malformed += 1
            if self._malformed >= _ALL_MALFORMED:
                last = f"nor was any of the last {_ALL_MALFORMED} prompts answered"
                raise LLMError(f"{fault.error}; {last}: check llm.base_url and llm.kind")
            if not self._well_formed or any(isinstance(request, Scored) for request in requests.values()):
                return answers
        return await self._book(answers, Use(), Use())

    def _counted(self, answer: Answer, request: Request) -> Answer:
        read, written = answer.prompt_tokens, answer.completion_tokens
        if read >= 0 and (written > 0 or (written == 0 and not answer.text)):
            return answer
        self.stats.counted += 1
        if read < 0:
            read = self._client.count_tokens(str(request))
        if written <= 0:
            written = 1 if isinstance(request, Scored) else self._client.count_tokens(answer.text or "")
        return replace(answer, prompt_tokens=read, completion_tokens=written)

    async def _reserve(self, worst: Use) -> None:
        async with self._settled:
            while not self._budget.fits(worst):
                if not self._budget.reserved.calls:
                    raise self._budget.exceeded(self.name)
                # Running calls may turn out cheaper than their worst case.
                await self._settled.wait()
            self._budget.reserved += worst

    async def _book(self, answers: Mapping[bytes, Answer], worst: Use, used: Use) -> dict[bytes, Answer]:
        """Put answers on disk with what they cost, and end their reservation; returns them as they are there."""
        stored = dict(answers)
        async with self._settled:  # one after the other: what the account has spent must not be an older sum
            self._budget.reserved -= worst
            self._budget.spent += used
            self.stats.used += used
            self._settled.notify_all()
            if answers or used.calls:
                stored, spent = await asyncio.to_thread(self._cache.put, self.name, answers, self._account, used)
                self._budget.spent = spent or self._budget.spent
        return stored

    async def _wait_for_server(self) -> None:
        """Call nothing while the server asks for a pause."""
        now = asyncio.get_running_loop().time
        while (left := self._not_before - now()) > 0:
            await asyncio.sleep(left + self._jitter.uniform(0, min(1.0, 0.1 * left)))

    async def _back_off(self, fault: Fault, attempt: int) -> None:
        wait = min(_LONGEST_BACKOFF_S, self._settings.backoff * 2 ** (attempt - 1)) * self._jitter.uniform(0.5, 1)
        if fault.wait is not None:
            if fault.wait > _LONGEST_WAIT_S:
                raise LLMError(f"{fault.error}; it asks to wait {fault.wait:,.0f} s: resume the run after that")
            # The limit is the account's: it holds for all calls.
            self._not_before = max(self._not_before, asyncio.get_running_loop().time() + fault.wait)
            wait = 0.0
        self.stats.retries[fault.reason] += 1
        which = f"attempt {attempt} of {self._settings.attempts}"
        logger.info("%s: %s, %s, next in %.1f s", self.name, fault.reason, which, wait or fault.wait or 0.0)
        await asyncio.sleep(wait)

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Await what must end once it has begun, since it is paid for, even if nobody awaits it any more."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)


def open_llm(
    settings: LLMSettings,
    cache_path: str | os.PathLike[str] | None,
    *,
    language: str = "functional",
    prompt: Prompt = APPENDIX_D,
    account: str | None = None,
) -> LanguageModel:
    """The model that the settings name. Nothing is sent yet.

    The other arguments are those of `LanguageModel`.

    Raises:
        ConfigError: no model name; no API key for OpenAI's own server; no such folder.
        DataError: the cache file can't be used.
    """
    if not settings.given:
        raise ConfigError(
            "llm.model is required: the name of a model that the server has, or of a local folder (there is no "
            "default, since models come and go: OpenAI has shut down those that older programs name)"
        )
    identity: dict[str, Any] = {"kind": settings.kind, "max_tokens": settings.max_tokens}
    options: dict[str, Any] = {"name": settings.model, "language": language, "prompt": prompt, "account": account}
    model: Any
    if settings.kind == "local":
        from rcr_trainer.llm.local import LocalLM

        model = LocalLM(
            model=settings.model,
            max_new_tokens=settings.max_tokens,
            batch_size=settings.batch_size,
            device=settings.device,
            dtype=settings.dtype,
            cache=False,
        )
        identity |= model.identity
        options["count_tokens"] = model.count_tokens
    else:
        model, options["http"] = make_model(settings)
        identity |= identity_of(settings)
        options["place"] = public(address_of(settings))
    return LanguageModel(model, settings, cache_path=cache_path, identity=identity, **options)
