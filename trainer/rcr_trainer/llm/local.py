"""A causal language model of transformers, on this machine, as a LangChain model."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, LLMResult
from pydantic import Field, PrivateAttr
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from langchain_rcr.chains.answers import cut
from langchain_rcr.families.pooled import undisturbed
from langchain_rcr.policy.prompt import APPENDIX_D
from rcr_trainer.errors import ConfigError

_HASHED = 256 * 2**20
"""Bytes of weights up to which they are read to tell one model from another; of more, size and time are."""


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

    Raises:
        ConfigError: the model can't be loaded.
    """

    model: str
    max_new_tokens: int = Field(256, ge=1)
    stop: list[str] = Field(default_factory=lambda: list(APPENDIX_D.stop))
    batch_size: int = Field(16, ge=1)
    device: str = "auto"
    dtype: str = "auto"

    _model: Any = PrivateAttr()
    _tokenizer: Any = PrivateAttr()
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Not in a validator: pydantic would take its ConfigError, a ValueError, for its own.
        self._load()

    def _load(self) -> None:
        device = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        try:
            with undisturbed():
                self._tokenizer = AutoTokenizer.from_pretrained(
                    self.model, padding_side="left", trust_remote_code=False, clean_up_tokenization_spaces=False
                )
                self._model = AutoModelForCausalLM.from_pretrained(
                    self.model, dtype=self.dtype, trust_remote_code=False
                )
            self._model.eval().requires_grad_(False).to(device)
        except Exception as error:  # of any kind: hub, network, file format, a library that the tokenizer needs
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"the language model '{self.model}' can't be loaded (a local folder or a hub name): {reason}"
            ) from error

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, as the model reads it."""
        return len(self._tokenizer(text, verbose=False)["input_ids"])

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
        tokens = self._tokenizer(list(prompts), return_token_type_ids=False, verbose=False)["input_ids"]
        found = [Generation(text="", generation_info=_info("too_long", len(ids), 0)) for ids in tokens]
        for rows in self._batches(tokens, self._longest - self.max_new_tokens):
            answers = self._write([tokens[row] for row in rows], stop)
            for row, answer in zip(rows, answers, strict=True):
                text = cut(self._tokenizer.decode(answer.tokens, skip_special_tokens=True), stop)[0]
                info = _info("stop" if answer.stopped else "length", len(tokens[row]), len(answer.tokens))
                found[row] = Generation(text=text, generation_info=info)
        return LLMResult(generations=[[generation] for generation in found])

    def log_likelihoods(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """See `Scorer.log_likelihoods`; −∞ for what doesn't fit the model's context."""
        texts = [prompt + continuation for prompt, continuation in zip(prompts, continuations, strict=True)]
        read = self._tokenizer(texts, return_token_type_ids=False, return_offsets_mapping=True, verbose=False)
        tokens: list[list[int]] = read["input_ids"]
        # The first token has nothing before it that could predict it.
        starts = [
            max(1, next((at for at, (_, end) in enumerate(spans) if end > len(prompt)), len(spans)))
            for prompt, spans in zip(prompts, read["offset_mapping"], strict=True)
        ]
        found = [-math.inf] * len(tokens)
        for rows in self._batches(tokens, self._longest):
            whole, first = [tokens[row] for row in rows], min(starts[row] for row in rows)
            # Padded at the right, where a causal model's positions and states are those of the text alone.
            kept = max(map(len, whole)) - first + 1
            with self._lock, torch.inference_mode():
                logits = self._model(**self._padded(whole, left=False), logits_to_keep=kept).logits
            for row, each in zip(rows, logits, strict=True):
                written = torch.tensor(tokens[row][starts[row] :], dtype=torch.long, device=each.device)
                told = each[starts[row] - first :][: len(written)].float().log_softmax(-1)
                found[row] = float(told.gather(1, written[:, None]).double().sum())
        return found

    @property
    def _longest(self) -> float:
        """Tokens that the model reads and writes at most."""
        return getattr(self._model.config, "max_position_embeddings", None) or math.inf

    def _batches(self, tokens: Sequence[Sequence[int]], longest: float) -> Iterator[list[int]]:
        """Those texts that aren't too long, by their length, as rows of batches."""
        fitting = [row for row, ids in enumerate(tokens) if len(ids) <= longest]
        fitting.sort(key=lambda row: len(tokens[row]))
        for start in range(0, len(fitting), self.batch_size):
            yield fitting[start : start + self.batch_size]

    def _write(self, prompts: Sequence[list[int]], stop: Sequence[str]) -> list[_Answer]:
        """What the model writes after prompts, greedily."""
        ends, tokenizer = self._model.generation_config.eos_token_id, self._tokenizer
        ends = ends if ends is not None else tokenizer.eos_token_id
        tokens = [] if ends is None else list(ends) if isinstance(ends, list) else [ends]
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokens or [0])[0]
        answers = [_Answer(tokenizer, stop, tokens) for _ in prompts]
        # One batch at a time: threads would only share the same cores.
        with self._lock, torch.inference_mode():
            self._model.generate(
                **self._padded(prompts, left=True),
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=self.max_new_tokens,
                    pad_token_id=pad,
                    eos_token_id=tokens or None,
                    bos_token_id=tokenizer.bos_token_id,
                ),
                stopping_criteria=StoppingCriteriaList([_Stop(answers)]),
            )
        return answers

    def _padded(self, texts: Sequence[list[int]], *, left: bool) -> dict[str, torch.Tensor]:
        """Tokens and mask (B, longest), padded on one side."""
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, own in enumerate(texts):
            place = slice(longest - len(own), longest) if left else slice(len(own))
            ids[row, place] = torch.tensor(own, dtype=torch.long)
            mask[row, place] = 1
        return {"input_ids": ids.to(self._model.device), "attention_mask": mask.to(self._model.device)}


class _Answer:
    """An answer that is being written.

    It ends at a stop sequence behind something else than blanks and thoughts, or at an end of sequence.

    Args:
        tokenizer: reads its tokens.
        stop: stop sequences.
        ends: tokens that end a sequence.

    Attributes:
        tokens: of the answer so far.
        stopped: whether it has come to its end.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], ends: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.stopped = False
        self._tokenizer, self._stop, self._ends = tokenizer, stop, ends
        self._last = {sequence[-1] for sequence in stop if sequence}

    def add(self, token: int) -> None:
        """Write a token, unless the answer has ended."""
        if self.stopped:
            return
        self.tokens.append(token)
        # Decoding whole answers at every step would cost more than a small model does.
        self.stopped = token in self._ends or (
            not self._last.isdisjoint(self._tokenizer.decode([token]))
            and cut(self._tokenizer.decode(self.tokens, skip_special_tokens=True), self._stop)[1]
        )


class _Stop(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Writes what transformers generates into answers, and ends each row by itself."""

    def __init__(self, answers: Sequence[_Answer]) -> None:
        self._answers = answers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Which rows have ended (B,), once their last tokens (B, T)[:, −1] are written."""
        for answer, token in zip(self._answers, input_ids[:, -1].tolist(), strict=True):
            answer.add(token)
        return torch.tensor([answer.stopped for answer in self._answers], device=input_ids.device)


def _info(finish_reason: str, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "finish_reason": finish_reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
    }
