"""A causal language model of transformers, on this machine, as a LangChain model."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, LLMResult
from pydantic import Field, PrivateAttr
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from langchain_rcr.answers import cut
from langchain_rcr.prompt import APPENDIX_D
from rcr_trainer.errors import ConfigError

_HASHED = 256 * 2**20
"""Bytes of weights up to which they are read to tell one model from another; of more, size and time are."""
_WORTH = 16
"""Tokens that a batch must have in common before their keys and values are computed first. With 3 of 4 examples in
common, covr-parser scores COVR's programs 2.1 times as fast on a CPU, and with 0 or 1 no slower, from 1 to 32 alike."""


class LocalLM(BaseLLM):
    """Greedy, batched decoding with a model folder that `AutoModelForCausalLM` opens.

    Answers end at the first stop sequence behind a model's thoughts, at the model's end of sequence, or after
    `max_new_tokens`. A prompt that doesn't fit into the model's positions with its answer gets the finish reason
    "too_long" and no text.

    Args:
        model: a local folder, or a hub name.
        max_new_tokens: longest answer.
        stop: stop sequences where a call names none.
        batch_size: prompts that are decoded together.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps".
        dtype: numbers to compute with: "auto" (as the folder says), "float32", "bfloat16", "float16".
        guess: prompt → what the answer may be, or None. Where greedy decoding would write just that, one pass over the
            guess takes the place of one for each token (speculative decoding); no answer changes.

    Raises:
        ConfigError: the model can't be loaded.
    """

    model: str
    max_new_tokens: int = Field(256, ge=1)
    stop: list[str] = Field(default_factory=lambda: list(APPENDIX_D.stop))
    batch_size: int = Field(16, ge=1)
    device: str = "auto"
    dtype: str = "auto"
    guess: Callable[[str], str | None] | None = Field(None, exclude=True)

    _model: Any = PrivateAttr()
    _tokenizer: Any = PrivateAttr()
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Not in a validator: pydantic would take its ConfigError, a ValueError, for its own.
        self._load()

    def _load(self) -> None:
        shown = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        device = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                self.model, padding_side="left", trust_remote_code=False, clean_up_tokenization_spaces=False
            )
            self._model = AutoModelForCausalLM.from_pretrained(self.model, dtype=self.dtype, trust_remote_code=False)
            self._model.eval().requires_grad_(False).to(device)
        except Exception as error:  # of any kind: hub, network, file format, a library that the tokenizer needs
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"the language model '{self.model}' can't be loaded (a local folder or a hub name): {reason}"
            ) from error
        finally:
            if shown:
                transformers_logging.enable_progress_bar()

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, as the model reads it."""
        return len(self._tokenizer(text)["input_ids"])

    @property
    def _llm_type(self) -> str:
        return "rcr-local"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {**self.identity, "max_new_tokens": self.max_new_tokens, "stop": self.stop}

    @cached_property
    def identity(self) -> dict[str, str]:
        """What tells the model from others: a digest of its folder (or its hub name and commit), and its numbers."""
        folder = Path(self.model)
        if not folder.is_dir():
            weights = f"{self.model}@{getattr(self._model.config, '_commit_hash', None)}"
            return {"weights": weights, "dtype": str(self._model.dtype)}
        found = hashlib.sha256()
        for path in sorted(path for path in folder.iterdir() if path.is_file() and path.suffix not in (".md", ".txt")):
            status = path.stat()
            found.update(f"{path.name} {status.st_size} ".encode())
            found.update(path.read_bytes() if status.st_size <= _HASHED else str(status.st_mtime_ns).encode())
        return {"weights": found.hexdigest(), "dtype": str(self._model.dtype)}

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        stop = stop or self.stop
        tokens = self._tokenizer(list(prompts), return_token_type_ids=False)["input_ids"]
        limit = getattr(self._model.config, "max_position_embeddings", None) or float("inf")
        found = [Generation(text="", generation_info=_info("too_long", len(ids), 0)) for ids in tokens]
        fitting = [row for row, ids in enumerate(tokens) if len(ids) + self.max_new_tokens <= limit]
        fitting.sort(key=lambda row: len(tokens[row]))
        ends = _Ends(self._tokenizer, stop, self._model.generation_config.eos_token_id)
        # One batch at a time: threads would only share the same cores.
        with self._lock:
            for start in range(0, len(fitting), self.batch_size):
                rows = fitting[start : start + self.batch_size]
                written = self._guessed([(tokens[row], self._guess(prompts[row], stop)) for row in rows], ends)
                left = [row for row, new in zip(rows, written, strict=True) if new is None]
                decoded = iter(self._decode([tokens[row] for row in left], ends) if left else ())
                for row, new in zip(rows, written, strict=True):
                    found[row] = self._generation(len(tokens[row]), next(decoded) if new is None else new, ends)
        return LLMResult(generations=[[generation] for generation in found])

    def _guess(self, prompt: str, stop: Sequence[str]) -> list[int]:
        guess = self.guess(prompt) if self.guess is not None else None
        return self._continuation(guess, stop[0] if stop else "")[: self.max_new_tokens - 1] if guess else []

    def log_likelihoods(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """See `Scorer.log_likelihoods`; −∞ for what doesn't fit the model's context.

        What the texts of a batch have in common at their beginnings, such as examples chosen before, is computed once.
        """
        texts = [prompt + continuation for prompt, continuation in zip(prompts, continuations, strict=True)]
        read = self._tokenizer(texts, return_token_type_ids=False, return_offsets_mapping=True)
        tokens: list[list[int]] = read["input_ids"]
        # The first token has nothing before it that could predict it.
        starts = [
            max(1, next((at for at, (_, end) in enumerate(spans) if end > len(prompt)), len(spans)))
            for prompt, spans in zip(prompts, read["offset_mapping"], strict=True)
        ]
        limit = getattr(self._model.config, "max_position_embeddings", None) or float("inf")
        found = [-math.inf] * len(tokens)
        fitting = [row for row, ids in enumerate(tokens) if len(ids) <= limit]
        with self._lock:
            for rows in _batches(fitting, tokens, self.batch_size):
                pairs = [(tokens[row][: starts[row]], tokens[row][starts[row] :]) for row in rows]
                logits = self._behind(pairs).float().log_softmax(-1)
                for at, (row, (_, written)) in enumerate(zip(rows, pairs, strict=True)):
                    found[row] = float(logits[at, range(len(written)), written].double().sum())
        return found

    def _continuation(self, answer: str, end: str) -> list[int]:
        ids: list[int] = self._tokenizer(f" {answer}{end}", add_special_tokens=False)["input_ids"]
        return ids

    @torch.inference_mode()
    def _behind(self, pairs: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
        """Logits (B, longest + 1, V) of the tokens behind prompts: of the given continuations, and one more."""
        prompts, device = [prompt for prompt, _ in pairs], self._model.device
        shared, past = min(_common(prompts), *(len(prompt) - 1 for prompt in prompts)), None
        if shared >= _WORTH:
            known = torch.tensor([prompts[0][:shared]], device=device)
            past = self._model(input_ids=known, use_cache=True, logits_to_keep=1).past_key_values
            past.batch_repeat_interleave(len(prompts))
        else:
            shared = 0
        ids, mask, longest = self._padded([own[shared:] for own in prompts], max(len(more) for _, more in pairs))
        for row, (_, more) in enumerate(pairs):
            ids[row, longest : longest + len(more)] = torch.tensor(more, dtype=torch.long)
            mask[row, longest : longest + len(more)] = 1
        mask = torch.cat([mask.new_ones(len(pairs), shared), mask], dim=1)
        logits: torch.Tensor = self._model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, shared:].to(device),
            past_key_values=past,
            logits_to_keep=ids.shape[1] - longest + 1,
            use_cache=past is not None,
        ).logits
        return logits

    @torch.inference_mode()
    def _guessed(self, drafts: Sequence[tuple[list[int], list[int]]], ends: _Ends) -> list[list[int] | None]:
        """What the model writes after prompts where that is what was guessed; None where it isn't."""
        if not any(guess for _, guess in drafts):
            return [None] * len(drafts)
        logits = self._behind(drafts)
        written: list[list[int] | None] = []
        for (_, guess), chosen in zip(drafts, logits.argmax(-1).tolist(), strict=True):
            agreed = next((n for n, token in enumerate(guess) if chosen[n] != token), len(guess))
            lengths = range(1, agreed + 2) if guess else ()
            written.append(next((chosen[:n] for n in lengths if ends.at_end(chosen[:n])), None))
        return written

    @torch.inference_mode()
    def _decode(self, prompts: Sequence[list[int]], ends: _Ends) -> list[list[int]]:
        """What the model writes after prompts of any length, greedily."""
        ids, mask, longest = self._padded(prompts)
        stopping = _Stop(ends, longest, len(prompts))
        written = self._model.generate(
            input_ids=ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=self.max_new_tokens,
                pad_token_id=ends.pad,
                eos_token_id=ends.tokens or None,
                bos_token_id=self._tokenizer.bos_token_id,
                cache_implementation="static" if self._fixed_cache else None,
            ),
            stopping_criteria=StoppingCriteriaList([stopping]),
        )[:, longest:].tolist()
        return [new[: length or None] for new, length in zip(written, stopping.lengths, strict=True)]

    @property
    def _fixed_cache(self) -> bool:
        """Whether keys and values have a cache of a fixed size, for models that can.

        A growing one is copied whole at each token: half as long again for a small model on a CPU. On a GPU
        transformers would compile the model again for every shape.
        """
        return self._model.device.type == "cpu" and getattr(self._model, "_can_compile_fullgraph", False)

    def _padded(self, prompts: Sequence[list[int]], more: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Tokens and mask, (B, longest + more), prompts at the right of the first `longest`; and `longest`."""
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest + more, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, own in enumerate(prompts):
            ids[row, longest - len(own) : longest] = torch.tensor(own)
            mask[row, longest - len(own) : longest] = 1
        return ids, mask, longest

    def _generation(self, read: int, new: list[int], ends: _Ends) -> Generation:
        text = cut(self._tokenizer.decode(new, skip_special_tokens=True), ends.stop)[0]
        return Generation(text=text, generation_info=_info("stop" if ends.at_end(new) else "length", read, len(new)))


class _Ends:
    """Where answers end: at a stop sequence behind something else than blanks and thoughts, or an end of sequence.

    Attributes:
        stop: stop sequences.
        tokens: that end a sequence.
        pad: a token for padding.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], ends: int | list[int] | None) -> None:
        ends = ends if ends is not None else tokenizer.eos_token_id
        self.stop = stop
        self.tokens = [] if ends is None else list(ends) if isinstance(ends, list) else [ends]
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (self.tokens or [0])[0]
        self._tokenizer = tokenizer
        self._last = {sequence[-1] for sequence in stop if sequence}
        self._texts: dict[int, str] = {}

    def at_end(self, tokens: list[int]) -> bool:
        """Whether the last of an answer's tokens ends it."""
        token = tokens[-1]
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        # Decoding whole answers at every step would cost more than a small model does.
        return token in self.tokens or (
            not self._last.isdisjoint(self._texts[token])
            and cut(self._tokenizer.decode(tokens, skip_special_tokens=True), self.stop)[1]
        )


class _Stop(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Ends each row by itself.

    Attributes:
        lengths: tokens that each row had written when it ended; 0: it hasn't.
    """

    def __init__(self, ends: _Ends, start: int, rows: int) -> None:
        self.lengths = [0] * rows
        self._ends, self._start = ends, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for row, tokens in enumerate(input_ids[:, self._start :].tolist()):
            if not self.lengths[row] and self._ends.at_end(tokens):
                self.lengths[row] = len(tokens)
        return torch.tensor([length > 0 for length in self.lengths], device=input_ids.device)


def _batches(rows: Sequence[int], tokens: Sequence[list[int]], size: int) -> list[list[int]]:
    """Rows in batches of `size`: by length, or side by side what begins alike, whichever computes fewer tokens."""

    def cut(order: list[int]) -> list[list[int]]:
        return [order[start : start + size] for start in range(0, len(order), size)]

    def cost(batches: list[list[int]]) -> int:
        return sum(
            (shared := _common([tokens[row] for row in batch]))
            + len(batch) * (max(len(tokens[row]) for row in batch) - shared)
            for batch in batches
        )

    by_length = cut(sorted(rows, key=lambda row: len(tokens[row])))
    return min(by_length, cut(sorted(rows, key=lambda row: tokens[row])), key=cost)


def _common(sequences: Sequence[list[int]]) -> int:
    """How many tokens all sequences have in common at their beginnings; 0 for a single one, which shares nothing."""
    if len(sequences) == 1:
        return 0
    first, last = min(sequences), max(sequences)
    return next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def _info(finish_reason: str, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "finish_reason": finish_reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
    }
