"""A causal language model of transformers, on this machine, as a LangChain model."""

from __future__ import annotations

import hashlib
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

from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.answers import cut
from rcr_trainer.llm.speculative import Draft, verify

_HASHED = 256 * 2**20
"""Bytes of weights up to which they are read to tell one model from another; of more, size and time are."""

_ROUNDS = 6
"""Passes in which a guess is tried again behind the model's own tokens, before the answer goes on without it."""


class LocalLM(BaseLLM):
    """Greedy, batched decoding with a model folder that `AutoModelForCausalLM` opens.

    Answers end at the first stop sequence, at the model's end of sequence, or after `max_new_tokens`. A prompt that
    doesn't fit into the model's positions with its answer gets the finish reason "too_long" and no text.

    Args:
        model: a local folder, or a hub name.
        max_new_tokens: longest answer.
        stop: stop sequences where a call names none.
        batch_size: prompts that are decoded together.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps".
        dtype: numbers to compute with: "auto" (as the folder says), "float32", "bfloat16", "float16".
        draft: prompt → a guess at the answer, or None. It makes decoding faster where it is right, and changes no
            answer: the model verifies it (see `speculative`).

    Raises:
        ConfigError: the model can't be loaded.
    """

    model: str
    max_new_tokens: int = Field(256, ge=1)
    stop: list[str] = Field(default_factory=lambda: ["\n"])
    batch_size: int = Field(16, ge=1)
    device: str = "auto"
    dtype: str = "auto"
    draft: Callable[[str], str | None] | None = Field(None, exclude=True)

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
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                self.model, padding_side="left", trust_remote_code=False, clean_up_tokenization_spaces=False
            )
            self._model = AutoModelForCausalLM.from_pretrained(self.model, dtype=self.dtype, trust_remote_code=False)
            self._model.eval().requires_grad_(False).to(self._place())
        except Exception as error:  # of any kind: hub, network, file format, a library that the tokenizer needs
            reason = " ".join(str(error).split())[:300]
            msg = f"the language model '{self.model}' can't be loaded (a local folder or a hub name): {reason}"
            raise ConfigError(msg) from error
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
        return {
            "weights": self._fingerprint,
            "max_new_tokens": self.max_new_tokens,
            "stop": self.stop,
            "dtype": str(self._model.dtype),
        }

    @cached_property
    def _fingerprint(self) -> str:
        folder = Path(self.model)
        if not folder.is_dir():
            return f"{self.model}@{getattr(self._model.config, '_commit_hash', None)}"
        found = hashlib.sha256()
        for path in sorted(path for path in folder.iterdir() if path.is_file() and path.suffix not in (".md", ".txt")):
            status = path.stat()
            found.update(f"{path.name} {status.st_size} ".encode())
            found.update(path.read_bytes() if status.st_size <= _HASHED else str(status.st_mtime_ns).encode())
        return found.hexdigest()

    def _place(self) -> str:
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        stop = stop or self.stop
        tokens = self._tokenizer(list(prompts), return_token_type_ids=False)["input_ids"]
        found: dict[int, Generation] = {}
        limit = getattr(self._model.config, "max_position_embeddings", None)
        for row, ids in enumerate(tokens):
            if limit is not None and len(ids) + self.max_new_tokens > limit:
                found[row] = Generation(text="", generation_info=_info("too_long", len(ids), 0))
        rows = sorted((row for row in range(len(prompts)) if row not in found), key=lambda row: len(tokens[row]))
        drafts = [Draft(tokens[row], self._guess(prompts[row], stop)) for row in rows]
        # One batch at a time: threads would only share the same cores.
        with self._lock:
            self._write(drafts, stop)
        found |= {row: self._generation(draft, stop) for row, draft in zip(rows, drafts, strict=True)}
        return LLMResult(generations=[[found[row]] for row in range(len(prompts))])

    def _guess(self, prompt: str, stop: Sequence[str]) -> list[int]:
        guess = self.draft(prompt) if self.draft is not None else None
        if not guess:
            return []
        ids: list[int] = self._tokenizer(f" {guess}{stop[0] if stop else ''}", add_special_tokens=False)["input_ids"]
        return ids

    def _write(self, drafts: Sequence[Draft], stop: Sequence[str]) -> None:
        """Complete the answers: as far as guesses go in a few passes, what they leave open token by token."""
        ending = _Ending(self._tokenizer, stop, self._ends())
        pad = self._tokenizer.pad_token_id
        if pad is None:
            pad = ending.ends[0] if ending.ends else 0
        for _ in range(_ROUNDS):
            for batch in self._batches([draft for draft in drafts if draft.guess and not draft.done]):
                verify(self._model, batch, pad=pad, end=ending.length, longest=self.max_new_tokens)
        for batch in self._batches([draft for draft in drafts if not draft.done]):
            self._decode(batch, pad, ending)

    def _batches(self, drafts: Sequence[Draft]) -> list[Sequence[Draft]]:
        return [drafts[start : start + self.batch_size] for start in range(0, len(drafts), self.batch_size)]

    @torch.inference_mode()
    def _decode(self, drafts: Sequence[Draft], pad: int, ending: _Ending) -> None:
        """Write the answers to their ends, greedily."""
        known = [draft.prompt + draft.written for draft in drafts]
        longest = max(map(len, known))
        ids = torch.full((len(drafts), longest), pad)
        mask = torch.zeros(len(drafts), longest, dtype=torch.long)
        for row, own in enumerate(known):
            ids[row, longest - len(own) :] = torch.tensor(own)
            mask[row, longest - len(own) :] = 1
        limits = [self.max_new_tokens - len(draft.written) for draft in drafts]
        stopping = _Stop(ending, [draft.written for draft in drafts], limits, longest)
        place = self._model.device
        written = self._model.generate(
            input_ids=ids.to(place),
            attention_mask=mask.to(place),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max(limits),
                pad_token_id=pad,
                eos_token_id=ending.ends or None,
                bos_token_id=self._tokenizer.bos_token_id,
            ),
            stopping_criteria=StoppingCriteriaList([stopping]),
        )[:, longest:].tolist()
        for draft, new, length in zip(drafts, written, stopping.lengths, strict=True):
            draft.written = draft.written + new[: length or None]

    def _generation(self, draft: Draft, stop: Sequence[str]) -> Generation:
        new, ends = draft.written, self._ends()
        end = next((place for place, token in enumerate(new) if token in ends), None)
        if end is not None:
            new = new[: end + 1]
        text, stopped = cut(self._tokenizer.decode(new, skip_special_tokens=True), stop)
        finished = "stop" if stopped or end is not None else "length"
        return Generation(text=text, generation_info=_info(finished, len(draft.prompt), len(new)))

    def _ends(self) -> list[int]:
        ends = self._model.generation_config.eos_token_id
        ends = ends if ends is not None else self._tokenizer.eos_token_id
        return [] if ends is None else list(ends) if isinstance(ends, list) else [ends]


class _Ending:
    """Finds the end of an answer: a stop sequence after something else than blanks, or an end of sequence.

    Attributes:
        ends: tokens that end a sequence.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], ends: list[int]) -> None:
        self.ends = ends
        self._tokenizer, self._stop = tokenizer, stop
        self._last = {sequence[-1] for sequence in stop if sequence}
        self._texts: dict[int, str] = {}

    def length(self, tokens: list[int], before: int) -> int | None:
        """Tokens up to the end, it included; None if the answer goes on.

        Args:
            tokens: of an answer.
            before: how many of them were looked at already.
        """
        for at in range(before, len(tokens)):
            # Decoding whole answers at every step would cost more than a small model does.
            if tokens[at] in self.ends or (
                self._last.intersection(self._text(tokens[at]))
                and cut(self._tokenizer.decode(tokens[: at + 1], skip_special_tokens=True), self._stop)[1]
            ):
                return at + 1
        return None

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]


class _Stop(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Ends each row at its own end or limit.

    Attributes:
        lengths: tokens that each row had written here when it stopped; 0: it hasn't.
    """

    def __init__(self, ending: _Ending, before: Sequence[list[int]], limits: Sequence[int], start: int) -> None:
        self._ending, self._limits, self._start = ending, limits, start
        self._answers = [list(tokens) for tokens in before]
        self.lengths = [0] * len(before)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        new = input_ids.shape[1] - self._start
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if self.lengths[row]:
                continue
            answer = self._answers[row]
            answer.append(token)
            if new >= self._limits[row] or self._ending.length(answer, len(answer) - 1) is not None:
                self.lengths[row] = new
        return torch.tensor([length > 0 for length in self.lengths], device=input_ids.device)


def _info(finish_reason: str, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "finish_reason": finish_reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
    }
