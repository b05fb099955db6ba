"""How probable a language model finds a text behind a prompt: what a scoring LM is asked, and what a server says.

Local models compute it (`LocalLM.log_likelihoods`). A server with OpenAI's completions protocol tells it if it repeats
the prompt (`echo`) with the log-probability of each token, as vLLM does, or if it can be held to a text (`grammar`) and
then says how probable each token of it was before, as llama.cpp does. Ollama has neither, and OpenAI's newer models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rcr_trainer.llm.faults import MalformedResponseError, UnscoredError


class Scorer(Protocol):
    """Tells how probable continuations are."""

    def log_likelihoods(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """Natural logarithms, −∞ … 0: for each prompt that of the probability of its continuation, token by token.

        A token that spans the border between the two belongs to the continuation.

        Args:
            prompts: any number.
            continuations: one each, written as it follows the prompt, with the blank that separates the two.
        """
        ...


@dataclass(frozen=True, slots=True)
class Scored:
    """A prompt and a continuation whose probability is asked for, where a plain string asks for an answer."""

    prompt: str
    continuation: str

    def __str__(self) -> str:
        return self.prompt + self.continuation


def from_echo(response: Mapping[str, Any], request: Scored) -> float:
    """The log-likelihood in a completions server's response to a `Scored` request.

    Args:
        response: the body, decoded.
        request: what was sent.

    Raises:
        UnscoredError: the server didn't repeat the prompt, or gave no log-probabilities of it: asking again can't help.
        MalformedResponseError: the log-probabilities don't fit the text.
    """
    choice = response["choices"][0]
    text, given = choice.get("text") or "", choice.get("logprobs") or {}
    tokens, offsets, values = (given.get(name) or [] for name in ("tokens", "text_offset", "token_logprobs"))
    if not text.startswith(str(request)) or len(tokens) < 2:
        raise UnscoredError(f"{response.get('model')!r} can't score: its server ignores echo")
    # vLLM counts a token that begins every text as a part of the text, though the text doesn't show it.
    before = 0 if text.startswith(tokens[0]) else len(tokens[0])
    start, end = len(request.prompt) + before, len(str(request)) + before
    spans = zip(tokens, values, offsets, strict=True)
    inside = [(token, value) for token, value, at in spans if at < end and at + len(token) > start]
    shown = "".join("".join(token for token, _ in inside).split())
    if not shown.endswith("".join(request.continuation.split())):
        raise MalformedResponseError(f"its tokens end with {shown[-40:]!r}, not with the text that was sent")
    if not all(isinstance(value, int | float) and value < math.inf for _, value in inside):
        raise MalformedResponseError("a token without log-probability")
    return math.fsum(value for _, value in inside)


def from_grammar(response: Mapping[str, Any], request: Scored) -> float:
    """As `from_echo`, of a response that a grammar held to the continuation.

    It is the probability of the text in the tokens by which the model would write it.
    """
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
            "llama.cpp does, and so tells no log-probabilities of a text; take such a server, or llm.kind: local"
        )
    if not all(isinstance(value, int | float) and value < math.inf for value in values):
        raise MalformedResponseError("a token without log-probability")
    return math.fsum(values)


class Way(NamedTuple):
    """A way to have a server score.

    Args:
        asked: the parameters that a request is sent with.
        read: the log-likelihood in the response.
    """

    asked: Callable[[Scored], dict[str, Any]]
    read: Callable[[Mapping[str, Any], Scored], float]


def _echo(request: Scored) -> dict[str, Any]:
    # `max_tokens: 0` would do, but vLLM refuses it.
    return {"prompt": str(request), "max_tokens": 1, "extra_body": {"echo": True}}


def _grammar(request: Scored) -> dict[str, Any]:
    only = f"root ::= {json.dumps(request.continuation, ensure_ascii=False)}"
    # A token has a byte at least, and one ends the answer.
    longest = len(request.continuation.encode()) + 1
    return {"prompt": request.prompt, "max_tokens": longest, "extra_body": {"grammar": only}}


WAYS = (Way(_echo, from_echo), Way(_grammar, from_grammar))
"""In the order in which they are tried."""
