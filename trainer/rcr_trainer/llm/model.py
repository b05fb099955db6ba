"""A language model that is asked each prompt only once, however often a run comes back to it."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from langchain_rcr.basics.background import background
from langchain_rcr.basics.progress import bar
from langchain_rcr.chains.answers import program_of
from langchain_rcr.policy.prompt import Conversation
from langchain_rcr.programs import get_parser
from langchain_rcr.programs.remembering import remembered
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.cache import Answer, AnswerCache, Estimate, Stats, Use
from rcr_trainer.llm.client import Calls, Client, Request
from rcr_trainer.llm.faults import LLMError, RequestError, TooLongError, UnscoredError
from rcr_trainer.llm.server import WAYS, Scored, identity_of, make_model
from rcr_trainer.llm.settings import LLMSettings

logger = logging.getLogger(__name__)

_FIRST = 50
"""Different prompts after which a run stops if over half of the answers hold no program that parses."""
_QUOTED = 400
"""Characters of a prompt's end, and of an answer's beginning, that the error shows."""


class LanguageModel(AbstractContextManager["LanguageModel"]):
    """Answers prompts with a LangChain completion or chat model; a context manager that closes itself.

    `open_llm` makes one from settings. Only one thread at a time may use it.

    Args:
        model: a `BaseLLM` or `BaseChatModel`, with the temperature and longest answer that the settings name.
        settings: with kind "local", a call has `batch_size` prompts.
        cache_path: the file with the answers, kept across runs; None: in memory.
        language: of the programs in the answers.
        account: a name (the run's) under which the cache file keeps what is spent, so that the budget holds across
            restarts (and, except for calls running elsewhere, across processes).
        **options: of `Client`, such as the prompt.
    """

    def __init__(
        self,
        model: Any,
        settings: LLMSettings | None = None,
        *,
        cache_path: str | os.PathLike[str] | None = None,
        language: str = "functional",
        account: str = "",
        **options: Any,
    ) -> None:
        settings = settings or LLMSettings()
        self._client = client = Client(model, settings, **options)
        self.name, self.prompt, self.stats = client.name, client.prompt, Stats(settings)
        self.count_tokens, self.money = client.count_tokens, settings.money
        self._cache = AnswerCache(cache_path)
        self._calls = Calls(client, settings, self._cache, self.stats, account)
        # A group's prompts often get the same answer.
        self._program_of = remembered(1 << 24)(partial(program_of, language=language, labels=self.prompt.labels))
        self._language, self._looked_at, self._useless = language, 0, 0
        self._scores: bool | UnscoredError = settings.kind == "local"  # False: not known yet
        self._closed = False
        self._seen: set[bytes] = set()

    def generate(self, prompts: Sequence[str | Conversation]) -> list[Answer]:
        """Answer prompts, in their order.

        A prompt is sent once, as long as the cache file is kept. Its answer is on disk before it is returned. When an
        error is raised, running calls finish first, and their answers are kept.

        Raises:
            BudgetExceeded: the next call could exceed the budget.
            AccessError: wrong key, quota or model name: calling again can't help.
            TooLongError: all prompts are too long for the server, or over half of the first ones for a local model.
                Otherwise one that is too long has no answer.
            LLMError: no attempt gave an answer, or over half of the first answers hold no program that parses.
            DataError: the cache can't be written.
        """
        answers: list[Answer] = []
        # Ask some first, so that a useless model costs no more than these.
        while self._looked_at < _FIRST < len(prompts) - len(answers):
            answers += self._generate(prompts[len(answers) : len(answers) + _FIRST])
        return answers + self._generate(prompts[len(answers) :])

    def log_likelihoods(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """See `Scorer.log_likelihoods`; scores are kept, counted and paid for as answers are. Raises as `generate`.

        The first text for a server goes alone: if the server can't score, that costs only a call for each of `WAYS`.
        Then, or if a response has no usable probabilities, an `UnscoredError` is raised. Too long a text has −∞.
        """
        requests = [Scored(*pair) for pair in zip(prompts, continuations, strict=True)]
        if self._scores is not True:
            new = next((each for each in requests if not self._cache.get([self._client.key(each)])), None)
            if new is not None:
                self._scores = self._scores or self._try_ways(new)
                if isinstance(self._scores, UnscoredError):
                    raise self._scores
        texts = [answer.text for answer in self._answers(requests)]
        scores = [float(text) for text in texts if text is not None]
        if len(scores) < len(texts):
            raise self._malformed_scores()
        return scores

    def _try_ways(self, request: Scored) -> bool | UnscoredError:
        """Find out whether the server scores, and in which way, on a text that isn't in the cache."""
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

    def about_tokens(self, prompt: str | Conversation) -> float:
        """Tokens of a prompt; four bytes per token if the model's tokenizer isn't at hand."""
        return self.count_tokens(prompt) / (1 if self._client.exact_tokens else 4)

    def estimate_calls(self, calls: int, longest_prompt: str | Conversation) -> Estimate:
        """The most that this many calls cost, before the prompts are known. The model is not called."""
        use = Use(calls, calls * self.count_tokens(longest_prompt), calls * self._client.longest)
        return Estimate(use, self.money(use.prompt_tokens, use.completion_tokens), self._client.exact_tokens)

    def close(self) -> None:
        """Wait for running calls, so that what is paid for is kept; then close the model."""
        if not self._closed:
            self._closed = True
            background().run(self._calls.close())
            self._cache.close()
            if self.stats.nominal:
                logger.info("%s: %s", self.name, self.stats)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(self, prompts: Sequence[str | Conversation]) -> list[Answer]:
        answers = [self._read(answer) for answer in self._answers(prompts)]
        failures = Counter(answer.reason for answer in answers if answer.program is None)
        if failures["tool_call"] and not self.stats.failures["tool_call"]:
            logger.warning("%s called a tool in place of answering: such an answer holds no program", self.name)
        self.stats.failures += failures
        self._stop_if_useless(prompts, answers)
        logger.debug("%s: %s", self.name, self.stats)
        return answers

    def _read(self, answer: Answer) -> Answer:
        """The answer with its program, or a reason why there is none."""
        if answer.text is None:
            return answer
        program = self._program_of(answer.text)
        # Cut off within its program, unless more text would change nothing.
        if answer.reason == "truncated" and program != self._program_of(f"{answer.text}x"):
            return answer
        return replace(answer, program=program, reason=answer.reason if program else answer.reason or "empty")

    def _stop_if_useless(self, prompts: Sequence[str | Conversation], answers: Sequence[Answer]) -> None:
        """Raise an error if over half of the first answers hold no program: the run would learn nothing."""
        if self._looked_at >= _FIRST:
            return
        parse, distinct = get_parser(self._language).parse, dict(zip(prompts, answers, strict=True))
        useless = [pair for pair in distinct.items() if pair[1].program is None or parse(pair[1].program) is None]
        self._looked_at, self._useless = self._looked_at + len(distinct), self._useless + len(useless)
        if self._looked_at < _FIRST or 2 * self._useless <= self._looked_at or not useless:
            return
        prompt, answer = str(useless[-1][0]), useless[-1][1]
        if all(each.reason == "too_long" for _, each in useless):
            self._looked_at = self._useless = 0  # later ones may fit
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
        """Answers to some requests, in order; each distinct one is asked once."""
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
                found |= background().run(self._calls.answers(missing, shown.update))
        if self._calls.too_long is not None and all(answer.reason == "too_long" for answer in found.values()):
            raise self._calls.too_long
        self.stats.cached += sum(found[key].cached for key in keys)
        return [found[key] for key in keys]


def open_llm(settings: LLMSettings, cache_path: str | os.PathLike[str] | None, **options: Any) -> LanguageModel:
    """Open the model that the settings name. Nothing is sent yet.

    The options (language, prompt, account) are those of `LanguageModel`. A `ConfigError` says what is missing: a model
    name, an API key for OpenAI's own server, a folder.
    """
    if not settings.given:
        raise ConfigError(
            "llm.model is required: the name of a model that the server has, or of a local folder (there is no "
            "default, since models come and go: OpenAI has shut down those that older programs name)"
        )
    identity: dict[str, Any] = {"kind": settings.kind, "max_tokens": settings.max_tokens}
    options["name"] = settings.model
    model: Any
    if settings.kind == "local":
        from rcr_trainer.llm.local import LocalLM

        shared = settings.model_dump(include={"model", "batch_size", "device", "dtype"})
        model = LocalLM(max_new_tokens=settings.max_tokens, cache=False, **shared)
        identity |= model.identity
        options["count_tokens"] = model.count_tokens
    else:
        model, options["http"] = make_model(settings)
        identity |= identity_of(settings)
        options["place"] = identity["place"]
    return LanguageModel(model, settings, cache_path=cache_path, identity=identity, **options)
