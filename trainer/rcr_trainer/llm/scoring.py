"""How probable a language model finds a text after a prompt, and how to ask a server for that.

Local models compute it (`LocalLM.log_likelihoods`). A server with OpenAI's completions protocol can tell if it repeats
the prompt (`echo`) with each token's log-probability, as vLLM does, or if it can be constrained to a text (`grammar`)
and reports each token's probability, as llama.cpp does. Ollama does neither, nor do OpenAI's newer models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rcr_trainer.llm.faults import MalformedResponseError, UnscoredError

_NO_ASCII = re.compile(r"[^!-~]*")
"""Blanks and other scripts, of which tokens may show too little."""


class Scorer(Protocol):
    """Computes how probable continuations are."""

    def log_likelihoods(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """Log-probabilities (natural, −∞ … 0) of continuations after prompts, summed over tokens.

        A continuation includes the space before it. A token that spans the boundary belongs to the continuation.
        """
        ...


@dataclass(frozen=True, slots=True)
class Scored:
    """A text to score; a plain string asks for an answer instead."""

    prompt: str
    continuation: str

    def __str__(self) -> str:
        return self.prompt + self.continuation


class Way(NamedTuple):
    """A way to have a server score: the parameters of a request, and the log-likelihood in its response.

    Reading raises `UnscoredError` if the server ignored these parameters, `MalformedResponseError` if it didn't but its
    figures are unusable.
    """

    asked: Callable[[Scored], dict[str, Any]]
    read: Callable[[Mapping[str, Any], Scored], float]


def _ask_for_echo(request: Scored) -> dict[str, Any]:
    # `max_tokens: 0` would be enough, but vLLM refuses it.
    return {"prompt": str(request), "max_tokens": 1, "extra_body": {"echo": True}}


def _read_echo(response: Mapping[str, Any], request: Scored) -> float:
    choice = response["choices"][0]
    text, given = choice.get("text") or "", choice.get("logprobs") or {}
    tokens, values = (given.get(name) or [] for name in ("tokens", "token_logprobs"))
    if not text.startswith(str(request)) or len(tokens) < 2:
        raise UnscoredError(f"{response.get('model')!r} can't score: its server ignores echo")
    first, last = len(request.prompt), len(str(request))
    spans = list(zip(values, _spans(str(request), tokens), strict=True))
    if spans[-1][1][1] < last:
        raise MalformedResponseError(f"its tokens {tokens[-8:]!r:.200} don't end with the text that was sent")
    return _sum(value for value, (start, end) in spans if start < last and (start >= first or end > first))


def _spans(text: str, tokens: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Where the tokens of a text, and what a server adds before and after it, begin and end.

    Servers' own offsets drift: a token shown alone may be part of a character ("\ufffd"), or lack its first blank.
    """
    at = 0
    for token in tokens:
        start = at
        if text.startswith(token, at):
            at += len(token)
        elif known := token.strip("\ufffd \t\r\n"):
            unsure = _NO_ASCII.match(text, at)
            found = text.find(known, at, (unsure.end() if unsure else at) + len(known))
            at = at if found < 0 else found + len(known)
        yield start, at


def _ask_for_grammar(request: Scored) -> dict[str, Any]:
    only = f"root ::= {json.dumps(request.continuation, ensure_ascii=False)}"
    # A token has at least one byte, and one more token ends the answer.
    longest = len(request.continuation.encode()) + 1
    return {"prompt": request.prompt, "max_tokens": longest, "extra_body": {"grammar": only}}


def _read_grammar(response: Mapping[str, Any], request: Scored) -> float:
    """The probability of the text in the tokens that the model itself writes it with."""
    text, given = request.continuation.encode(), (response["choices"][0].get("logprobs") or {}).get("content") or []
    written, values = b"", []
    for token in given:
        if len(written) >= len(text):
            break  # the end of the answer
        written += bytes(token.get("bytes") or [])
        values.append(token.get("logprob"))
    if written != text:
        raise UnscoredError(
            f"{response.get('model')!r} can't score: its server heeds neither echo, as vLLM does, nor grammar, as "
            "llama.cpp does, and so gives no log-probabilities of a text; use such a server, or llm.kind: local"
        )
    return _sum(values)


def _sum(values: Iterable[Any]) -> float:
    given = list(values)
    if not all(isinstance(value, int | float) and value < math.inf for value in given):
        raise MalformedResponseError("a token without log-probability")
    return math.fsum(given)


WAYS = (Way(_ask_for_echo, _read_echo), Way(_ask_for_grammar, _read_grammar))
"""In the order they are tried."""
