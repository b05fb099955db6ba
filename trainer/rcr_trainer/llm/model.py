"""The one place that calls a model: every prompt once, on disk before it is used, within a budget.

Everything here happens on the project's background event loop, so that no state needs a lock: a call of `generate`
from whatever thread becomes a coroutine there.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from langchain_rcr.basics.background import background
from langchain_rcr.basics.progress import bar
from langchain_rcr.chains.answers import program_of
from langchain_rcr.policy.prompt import APPENDIX_D, Conversation, Prompt
from langchain_rcr.programs import get_parser
from langchain_rcr.programs.remembering import remembered
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.backend import Backend, Request
from rcr_trainer.llm.caller import Batch, Caller
from rcr_trainer.llm.faults import LLMError, RequestError, TooLongError, UnscoredError
from rcr_trainer.llm.ledger import Answer, AnswerCache, Estimate, Ledger, Stats, Use
from rcr_trainer.llm.scoring import WAYS, Scored
from rcr_trainer.llm.settings import LLMSettings

logger = logging.getLogger(__name__)

_FIRST = 50
"""Different prompts after which a model is given up if over half of the answers hold no program that parses."""
_QUOTED = 400
"""Characters of a prompt's end, and of an answer's beginning, that the error shows."""
_SCORED_TOGETHER = 32
"""Batches of texts that a local model scores before they are kept: it puts those side by side that begin alike."""


class _MalformedScoreError(UnscoredError):
    """The server scores, and what it says can't be used."""


class LanguageModel:
    """Answers prompts by any LangChain completion or chat model; a context manager that closes itself.

    `open_llm` makes one by settings.

    Args:
        model: a `BaseLLM` or `BaseChatModel`, also `model.bind(…)`. What the settings say of temperature and longest
            answer is not sent: the model is as it is.
        settings: stop sequences, retries, concurrency, budget and prices; kind "local" for a model that computes on
            this machine: one call at a time with `batch_size` prompts. A budget of tokens or money needs `max_tokens`
            if the model doesn't have it.
        cache_path: the file with the answers, kept over runs; None: in memory. It needs `identity`.
        identity: a name, or a JSON object, that changes whenever the model or its parameters do.
        language: of the programs in the answers, see `langchain_rcr.programs.get_parser`.
        prompt: how it is asked.
        account: a name (of the run) under which the cache file keeps what is spent, so that the budget holds over
            restarts (and, up to the calls that are running elsewhere, over several processes); None: for this object.
        **options: of `Backend`: the model's name, place and tokenizer.

    Attributes:
        name: the model's.
        prompt: how it is asked.
        stats: counts since the model was opened.

    Raises:
        ConfigError: no LangChain model; a cache file without an identity; a budget without what it needs.
        DataError: the cache file can't be used.
    """

    def __init__(
        self,
        model: Any,
        settings: LLMSettings | None = None,
        *,
        cache_path: str | os.PathLike[str] | None = None,
        identity: str | Mapping[str, Any] | None = None,
        language: str = "functional",
        prompt: Prompt = APPENDIX_D,
        account: str | None = None,
        **options: Any,
    ) -> None:
        if cache_path is not None and identity is None:
            raise ConfigError(
                f"the answers of {type(model).__name__} can't be kept in a file without a name to tell it from other "
                "models: pass identity='…', which changes whenever the model or its parameters do"
            )
        settings = settings or LLMSettings()
        known = identity if isinstance(identity, Mapping) else {"named": identity}
        self._backend = backend = Backend(model, settings, identity=known, prompt=prompt, **options)
        if backend.longest is None and (settings.budget_tokens is not None or settings.budget_money is not None):
            raise ConfigError(f"a budget needs to know how long an answer of {backend.name!r} may get: give max_tokens")
        self.name, self.prompt = backend.name, prompt
        self.stats = Stats(settings)
        self._cache, self._account = AnswerCache(cache_path), account
        # Answers to a group's prompts are often the same.
        self._program_of = remembered(1 << 26)(partial(program_of, language=language, labels=prompt.labels))
        self._ledger = Ledger(settings, self._cache.spent(account) if account is not None else Use())
        self._caller = Caller(backend, settings, self._ledger, self.stats, lambda used: self._write({}, used))
        self._slots = asyncio.Semaphore(1 if settings.kind == "local" else settings.concurrency)
        self._writing = asyncio.Lock()
        self._language, self._looked_at, self._useless = language, 0, 0
        self._in_flight: dict[bytes, asyncio.Future[Answer]] = {}
        self._seen: set[bytes] = set()
        self._scores: bool | UnscoredError = settings.kind == "local"
        self._workers: set[asyncio.Task[None]] = set()

    @property
    def spent(self) -> Use:
        """What counts against the budget so far."""
        return self._ledger.total

    def generate(self, prompts: Sequence[str | Conversation]) -> list[Answer]:
        """Answer prompts, in their order.

        Identical prompts are sent once: within the call, while another thread waits for the same, and ever, as long
        as the cache file is kept. An answer is on disk before it is returned. May be called from several threads.

        Args:
            prompts: as `self.prompt` writes them, or any others.

        Returns:
            An answer for each, with its program. Empty, refused, truncated and malformed ones have a reason.

        Raises:
            BudgetExceeded: the next call could exceed the budget.
            AccessError: key, quota or model name: calling again can't help.
            TooLongError: the server says that a prompt is, or over half of the first prompts are too long for a model
                in this process.
            LLMError: no answer in all attempts, or over half of the first answers hold no program that parses, of
                which the message shows an example. In all cases the calls that were running have been finished,
                and their answers are in the cache.
            DataError: the cache can't be written.
        """
        answers: list[Answer] = []
        # Some first, so that a useless model costs no more.
        while self._looked_at < _FIRST < len(prompts) - len(answers):
            some = prompts[len(answers) : len(answers) + _FIRST]
            answers += background().run(self._generate(some))
        return answers + background().run(self._generate(prompts[len(answers) :]))

    def log_likelihoods(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """See `Scorer.log_likelihoods`; kept, counted and paid for as answers are.

        The first text that a server scores for this object goes alone: if the server can't score, that costs a call
        for each way (`scoring.WAYS`).

        Raises:
            UnscoredError: the server ignores or refuses each way, or a response has no usable probabilities.
            ConfigError: the model tells no probabilities (a chat model).
            LLMError: as `generate`.
        """
        requests = [Scored(*pair) for pair in zip(prompts, continuations, strict=True)]
        if self._scores is not True:
            keys = [self._backend.key(request) for request in requests]
            kept = self._cache.get(keys)
            asked = next((one for key, one in zip(keys, requests, strict=True) if key not in kept), None)
            if asked is not None:
                self._try(asked)
        return self._score(requests)

    def _try(self, request: Scored) -> None:
        """Score a text of which nothing is kept; by which way, and that a server can't, is known from then on."""
        if isinstance(self._scores, UnscoredError):
            raise self._scores
        for self._backend.scoring in WAYS:
            try:
                self._score([request])
            except TooLongError:
                raise
            except RequestError as error:
                failed = UnscoredError(f"{self.name!r} can't score: {error}")
            except UnscoredError as error:
                failed = error
                if isinstance(error, _MalformedScoreError):
                    break
            else:
                self._scores = True
                return
        self._scores = failed
        raise failed

    def _score(self, requests: Sequence[Scored]) -> list[float]:
        texts = [answer.text for answer in background().run(self._generate(requests))]
        if None in texts:
            raise _MalformedScoreError(
                f"the model {self.name!r} gave no probabilities of a text: the response is malformed"
            )
        return [float(text or "nan") for text in texts]

    def count_tokens(self, prompt: str | Conversation) -> int:
        """Tokens of a prompt with all that is sent along, at least as many as there are."""
        return self._backend.count_tokens(prompt)

    def estimate_calls(self, calls: int, longest_prompt: str | Conversation) -> Estimate:
        """What a number of calls costs at most, before the prompts are known. The model is not called.

        Args:
            calls: nominal ones; all of them may turn out to be distinct.
            longest_prompt: no prompt will have more tokens than this one.

        Raises:
            ConfigError: how long an answer may get isn't known.
        """
        longest = self._backend.longest
        if longest is None:
            raise ConfigError(f"how long an answer of {self.name!r} may get isn't known: give max_tokens")
        use = Use(calls, calls * self.count_tokens(longest_prompt), calls * longest)
        money = self.stats.settings.money(use.prompt_tokens, use.completion_tokens)
        return Estimate(use, money, self._backend.exact_tokens)

    def close(self) -> None:
        """Wait for calls that are still running, so that what is paid for is kept; then close the model."""
        if self._caller.closed is None:
            self._caller.closed = LLMError(f"the model {self.name!r} is closed")
            background().run(self._close())
            self._cache.close()
            if self.stats.nominal:
                logger.info("%s: %s", self.name, self.stats)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _generate(self, prompts: Sequence[Request]) -> list[Answer]:
        if self._caller.closed:
            raise self._caller.closed
        keys = [self._backend.key(prompt) for prompt in prompts]
        self.stats.nominal += len(prompts)
        self._seen.update(keys)
        self.stats.distinct = len(self._seen)
        batch = Batch()
        mine = {each: prompt for each, prompt in zip(keys, prompts, strict=True) if each not in self._in_flight}
        for each in mine:
            self._in_flight[each] = asyncio.get_running_loop().create_future()
        futures = {each: self._in_flight[each] for each in keys}
        worker = asyncio.create_task(self._answer(mine, batch))
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)
        try:
            with bar(f"{self.name} answers", len(futures)) as shown:
                for future in futures.values():
                    future.add_done_callback(lambda _: shown.update())
                if futures:
                    await asyncio.wait(futures.values())
        except asyncio.CancelledError:
            # The caller is gone (Ctrl-C). Calls that wait are dropped; those that run are paid for: let them end.
            batch.error = batch.error or LLMError("interrupted")
            raise
        errors = [error for future in futures.values() if (error := future.exception()) is not None]
        if errors:
            raise batch.error or errors[0]
        read = {each: future.result() for each, future in futures.items()}
        self.stats.cached += sum(read[each].cached for each in keys)
        if prompts and isinstance(prompts[0], Scored):
            return [read[each] for each in keys]
        programs = {each: self._read(answer) for each, answer in read.items()}
        answers = [programs[each] for each in keys]
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

    def _stop_if_useless(self, prompts: Sequence[Request], answers: Sequence[Answer]) -> None:
        """Raise an error if over half of the first answers hold no program: a run would learn and compare nothing."""
        if self._looked_at >= _FIRST:
            return
        parse, distinct = get_parser(self._language).parse, dict(zip(prompts, answers, strict=True))
        useless = [pair for pair in distinct.items() if pair[1].program is None or parse(pair[1].program) is None]
        self._looked_at, self._useless = self._looked_at + len(distinct), self._useless + len(useless)
        if self._looked_at >= _FIRST and 2 * self._useless > self._looked_at and useless:
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

    async def _answer(self, prompts: Mapping[bytes, Request], batch: Batch) -> None:
        """Settle the futures of these prompts, from the cache or from the model."""
        with self._outcome(prompts, batch):
            known = await asyncio.to_thread(self._cache.get, list(prompts))
            self._settle(known)
            missing = [(each, prompt) for each, prompt in prompts.items() if each not in known]
            size = self._backend.batch_size
            if size > 1 and any(isinstance(prompt, Scored) for _, prompt in missing):
                size *= _SCORED_TOGETHER
            elif size > 1:
                # Prompts of similar length need little padding.
                missing.sort(key=lambda pair: len(str(pair[1])))
            parts = [dict(missing[start : start + size]) for start in range(0, len(missing), size)]
            await asyncio.gather(*[self._answer_part(part, batch) for part in parts])

    async def _answer_part(self, prompts: Mapping[bytes, Request], batch: Batch) -> None:
        with self._outcome(prompts, batch):
            async with self._slots:  # until they are on disk: a kill loses no more answers than there are slots
                answers, used = await self._caller.call(list(prompts.values()), batch)
                found = dict(zip(prompts, answers, strict=True))
                kept = {each: answer for each, answer in found.items() if self._is_final(answer, prompts[each])}
                written = await self._write(kept, used)
            self._settle({**found, **written})

    def _is_final(self, answer: Answer, prompt: Request) -> bool:
        """Whether to keep an answer, so that no resume pays for it again.

        Malformed ones are kept where the server has answered others properly, so that it isn't a server of another
        kind, and where a run can go on without them, as it can't without the probabilities of a text.
        """
        return answer.reason != "malformed" or (self._caller.well_formed and not isinstance(prompt, Scored))

    @contextmanager
    def _outcome(self, prompts: Mapping[bytes, Request], batch: Batch) -> Iterator[None]:
        """Pass an error on to those who wait for these prompts."""
        try:
            yield
        except BaseException as error:  # of whatever kind: goes to those who wait
            batch.error = batch.error or error
            for each in prompts:
                future = self._in_flight.pop(each, None)
                if future is not None and not future.done():
                    future.set_exception(error if isinstance(error, Exception) else LLMError("interrupted"))
                    future.exception()  # retrieved here: there may be no caller left that waits

    def _settle(self, answers: Mapping[bytes, Answer]) -> None:
        for each, answer in answers.items():
            future = self._in_flight.pop(each, None)
            if future is not None and not future.done():
                future.set_result(answer)

    async def _write(self, answers: Mapping[bytes, Answer], used: Use) -> dict[bytes, Answer]:
        """Put answers and what they cost on disk; returns them as they are there."""
        async with self._writing:  # one after the other: what the account has spent must not be an older sum
            stored, spent = await asyncio.to_thread(self._cache.put, self.name, answers, self._account, used)
            self._ledger.book(used, spent)
        return stored

    async def _close(self) -> None:
        if self._workers:
            await asyncio.wait(set(self._workers))
        await self._backend.close()
