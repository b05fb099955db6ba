"""A causal language model from transformers, run on this machine, as a LangChain model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, LLMResult
from pydantic import Field, PrivateAttr
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteriaList

from langchain_rcr.chains.answers import cut
from langchain_rcr.errors import refusing
from langchain_rcr.families.pooled import undisturbed
from rcr_trainer.errors import ConfigError


class LocalLM(BaseLLM):
    """Greedy, batched decoding with a model folder that `AutoModelForCausalLM` opens.

    Answers end at the first stop sequence after a model's thoughts, at the model's end of sequence, or after
    `max_new_tokens`. A prompt that leaves no room for its answer gets the finish reason "too_long" and no text.

    The fields are as in `LLMSettings`. A `ConfigError` says why a model can't be loaded.
    """

    model: str
    max_new_tokens: int = Field(256, ge=1)
    batch_size: int = Field(16, ge=1)
    device: str = "auto"
    dtype: str = "auto"

    _model: Any = PrivateAttr()
    _tokenizer: Any = PrivateAttr()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Not in a validator: pydantic would treat a ConfigError, which is a ValueError, as its own.
        device = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        with refusing(f"the language model '{self.model}' can't be loaded (a local folder or a hub name)", ConfigError):
            with undisturbed():
                self._tokenizer = AutoTokenizer.from_pretrained(
                    self.model, padding_side="left", trust_remote_code=False, clean_up_tokenization_spaces=False
                )
                self._model = AutoModelForCausalLM.from_pretrained(
                    self.model, dtype=self.dtype, trust_remote_code=False
                )
            self._model.eval().requires_grad_(False).to(device)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, as the model reads it."""
        return len(self._tokenizer(text, verbose=False)["input_ids"])

    @property
    def _llm_type(self) -> str:
        return "rcr-local"

    @cached_property
    def identity(self) -> dict[str, str]:
        """What identifies the model: a digest of its folder (or its hub name and commit), and its dtype."""
        folder = Path(self.model)
        if not folder.is_dir():
            weights = f"{self.model}@{getattr(self._model.config, '_commit_hash', None)}"
            return {"weights": weights, "dtype": str(self._model.dtype)}
        found = hashlib.sha256()
        for path in sorted(path for path in folder.iterdir() if path.is_file() and path.suffix not in (".md", ".txt")):
            status = path.stat()
            found.update(f"{path.name} {status.st_size} ".encode())
            # Of larger files, size and time have to do.
            found.update(path.read_bytes() if status.st_size <= 256 << 20 else str(status.st_mtime_ns).encode())
        return {"weights": found.hexdigest(), "dtype": str(self._model.dtype)}

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        tokens = self._tokenizer(list(prompts), return_token_type_ids=False, verbose=False)["input_ids"]
        found = [_generation("", "too_long", len(ids), 0) for ids in tokens]
        for rows in self._batches(tokens, self._longest - self.max_new_tokens):
            written, ended = self._write([tokens[row] for row in rows], stop or [])
            for row, answer, end in zip(rows, written, ended, strict=True):
                text = cut(self._tokenizer.decode(answer[:end], skip_special_tokens=True), stop or [])[0]
                reason = "length" if end is None else "stop"
                found[row] = _generation(text, reason, len(tokens[row]), len(answer[:end]))
        return LLMResult(generations=[[generation] for generation in found])

    def log_likelihoods(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """See `Scorer.log_likelihoods`; −∞ for what doesn't fit the model's context."""
        texts = [prompt + continuation for prompt, continuation in zip(prompts, continuations, strict=True)]
        read = self._tokenizer(texts, return_token_type_ids=False, return_offsets_mapping=True, verbose=False)
        tokens: list[list[int]] = read["input_ids"]
        # Nothing precedes the first token to predict it from.
        starts = [
            max(1, next((at for at, (_, end) in enumerate(spans) if end > len(prompt)), len(spans)))
            for prompt, spans in zip(prompts, read["offset_mapping"], strict=True)
        ]
        found = [-math.inf] * len(tokens)
        for rows in self._batches(tokens, self._longest):
            whole, first = [tokens[row] for row in rows], min(starts[row] for row in rows)
            # Padding on the right leaves a causal model's positions and states as they are for the text alone.
            kept = max(map(len, whole)) - first + 1
            with torch.inference_mode():
                logits = self._model(**self._padded(whole, left=False), logits_to_keep=kept).logits
            for row, each in zip(rows, logits, strict=True):
                written = torch.tensor(tokens[row][starts[row] :], dtype=torch.long, device=each.device)
                told = each[starts[row] - first :][: len(written)].float().log_softmax(-1)
                found[row] = float(told.gather(1, written[:, None]).double().sum())
        return found

    @property
    def _longest(self) -> float:
        return getattr(self._model.config, "max_position_embeddings", None) or math.inf

    def _batches(self, tokens: Sequence[Sequence[int]], longest: float) -> Iterator[list[int]]:
        """Batches of the rows whose texts aren't too long, sorted by length."""
        fitting = [row for row, ids in enumerate(tokens) if len(ids) <= longest]
        fitting.sort(key=lambda row: len(tokens[row]))
        for start in range(0, len(fitting), self.batch_size):
            yield fitting[start : start + self.batch_size]

    def _write(self, prompts: Sequence[list[int]], stop: Sequence[str]) -> tuple[list[list[int]], list[int | None]]:
        """What the model writes greedily after prompts, and how many tokens that is up to the answer's end.

        An answer ends at an end of sequence, or at a stop sequence that follows more than blanks and thoughts.
        """
        ends, tokenizer = self._model.generation_config.eos_token_id, self._tokenizer
        ends = ends if ends is not None else tokenizer.eos_token_id
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        read = self._padded(prompts, left=True)
        begin = read["input_ids"].shape[1]
        last = {sequence[-1] for sequence in stop if sequence}
        ended: list[int | None] = [None] * len(prompts)  # tokens up to each answer's end; None while it goes on

        def is_whole(answer: list[int]) -> bool:
            # Decoding whole answers at every step would cost more than a small model.
            return answer[-1] in ends or (
                not last.isdisjoint(tokenizer.decode(answer[-1:]))
                and cut(tokenizer.decode(answer, skip_special_tokens=True), stop)[1]
            )

        def stopping(input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            for row, answer in enumerate(input_ids[:, begin:].tolist()):
                if ended[row] is None and is_whole(answer):
                    ended[row] = len(answer)
            return torch.tensor([end is not None for end in ended], device=input_ids.device)

        # The pad token doesn't matter: what follows a row's end is cut off.
        config = GenerationConfig(do_sample=False, max_new_tokens=self.max_new_tokens, pad_token_id=0)
        with torch.inference_mode():
            whole = self._model.generate(
                **read, generation_config=config, stopping_criteria=StoppingCriteriaList([stopping])
            )
        return whole[:, begin:].tolist(), ended

    def _padded(self, texts: Sequence[list[int]], *, left: bool) -> dict[str, torch.Tensor]:
        """Tokens and mask (B, longest), padded on one side."""
        rows = [torch.tensor(own, dtype=torch.long) for own in texts]
        pad = partial(pad_sequence, batch_first=True, padding_side="left" if left else "right")
        ids, mask = pad(rows), pad([torch.ones_like(row) for row in rows])
        return {"input_ids": ids.to(self._model.device), "attention_mask": mask.to(self._model.device)}


def _generation(text: str, reason: str, read: int, written: int) -> Generation:
    info = {"finish_reason": reason, "prompt_tokens": read, "completion_tokens": written}
    return Generation(text=text, generation_info=info)
