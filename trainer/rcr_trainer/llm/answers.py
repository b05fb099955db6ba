"""What a language model answered, and which part of it is the program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.outputs import ChatGeneration, Generation

TRUNCATED = frozenset({"length", "max_tokens", "max_output_tokens", "model_length"})
REFUSED = frozenset(
    (
        "content_filter",
        "refusal",
        "safety",
        "recitation",
        "blocklist",
        "prohibited_content",
        "spii",
        "guardrail_intervened",
    )
)

_MULTILINE = frozenset({"sql", "python", "tokens"})

_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LABEL = re.compile(r"Target:[ \t]*")


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer.

    Attributes:
        text: what the model wrote, up to the first stop sequence; None: nothing that could be used.
        reason: why there is no text: "empty", "refused", "truncated" (cut off at the longest length allowed),
            "malformed" (the server's response is no answer) or "too_long" (the prompt, for a local model).
        prompt_tokens: tokens read, as the server reports them, else counted.
        completion_tokens: tokens written, likewise.
        cached: it was on disk before this call.
    """

    text: str | None
    reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False


def program_of(text: str, *, multiline: bool = False) -> str:
    """The program in a completion of the paper's prompt (appendix D); "" if there is none.

    What the model goes on with after it (a next "Source:") is dropped, and so are the wrappings that chat models
    like: a code fence, backticks, a repeated "Target:".

    Args:
        text: an answer.
        multiline: programs may have several lines (SQL, Python, tokens); else the first line that isn't blank is it.
    """
    text = re.split(r"^Source:", text, maxsplit=1, flags=re.MULTILINE)[0]
    fenced = _FENCE.search(text)
    text = _LABEL.sub("", (fenced[1] if fenced else text).strip(), count=1)
    if not multiline:
        text = next((line for line in text.splitlines() if line.strip()), "")
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] == "`":
        text = text.strip("`").strip()
    return text


def question_of(prompt: str) -> str:
    """The question that a prompt of the paper's form (appendix D) ends with; "" if it has another form."""
    asked = prompt.rpartition("Source: ")[2]
    return asked.removesuffix("\nTarget:") if asked.endswith("\nTarget:") else ""


def is_multiline(language: str) -> bool:
    """Whether programs of a language may have several lines, as those of SQL, in any dialect, Python and tokens may."""
    return language.partition(":")[0] in _MULTILINE


def default_stop(language: str, *, chat: bool = False) -> list[str]:
    r"""Where an answer ends unless the settings say otherwise: at the end of its line, or at the next "Source:".

    Args:
        language: of the programs.
        chat: a chat model may put its program into a fence, and so on lines of its own.
    """
    return ["\nSource:"] if chat or is_multiline(language) else ["\n"]


def programs_of(answers: Sequence[Answer], language: str) -> list[str | None]:
    """The programs in some answers; None where there is none.

    Args:
        answers: to the paper's prompts.
        language: of the programs, see `rcr_trainer.programs.get_parser`.
    """
    multiline = is_multiline(language)
    return [None if answer.text is None else program_of(answer.text, multiline=multiline) or None for answer in answers]


def read(generation: Generation, stop: Sequence[str]) -> tuple[str | None, str]:
    """Text and reason (see `Answer`) of what a LangChain model generated.

    Args:
        generation: a completion model's or a chat model's.
        stop: the text ends before the first of these, whether the server heeds them or not.
    """
    info: dict[str, Any] = dict(generation.generation_info or {})
    if isinstance(generation, ChatGeneration):
        message = generation.message
        info = {**message.response_metadata, **info}
        if message.additional_kwargs.get("refusal"):
            return None, "refused"
    ending = str(info.get("finish_reason") or info.get("stop_reason") or info.get("done_reason") or "").lower()
    if ending in REFUSED:
        return None, "refused"
    if ending == "too_long":
        return None, "too_long"
    text, stopped = cut(generation.text, stop)
    if ending in TRUNCATED and not stopped:
        return None, "truncated"
    return (text, "") if text else (None, "empty")


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text without outer blanks, up to the first stop sequence; and whether there was one."""
    text = text.lstrip()
    ends = [end for end in (text.find(sequence) for sequence in stop) if end >= 0]
    return (text[: min(ends)] if ends else text).strip(), bool(ends)


def usage(generation: Generation, output: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Prompt and completion tokens as reported with a generation; None if they aren't.

    Args:
        generation: of one prompt.
        output: what the model reports of the whole call, if the call had this prompt alone.
    """
    if isinstance(generation, ChatGeneration):
        reported = getattr(generation.message, "usage_metadata", None)
        if reported:
            return int(reported["input_tokens"]), int(reported["output_tokens"])
    whole = output or {}
    for counts in (generation.generation_info or {}, whole.get("token_usage") or {}, whole.get("usage") or {}):
        if isinstance(counts, Mapping) and isinstance(counts.get("prompt_tokens"), int):
            return int(counts["prompt_tokens"]), int(counts.get("completion_tokens") or 0)
    return None
