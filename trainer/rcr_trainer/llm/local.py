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
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

from langchain_rcr.answers import cut
from langchain_rcr.families.pooled import undisturbed
from langchain_rcr.prompt import APPENDIX_D
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.decoding import Answer, Ends, Known, Stop, go_on

_HASHED = 256 * 2**20
"""Bytes of weights up to which they are read to tell one model from another; of more, size and time are."""
_WORTH = 16
"""Tokens that a batch must have in common before their keys and values are computed first. With 3 of 4 examples in
common, covr-parser scores COVR's programs 2.1 times as fast on a CPU, and with 0 or 1 no slower, from 1 to 32 alike."""
_PASS = 256
"""Tokens that a further pass is taken to cost."""
_TOGETHER = 512
"""Tokens that a CPU reads in one pass, where texts have nothing in common: more, and padding and cache misses cost more
than a larger product saves."""


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
    _plain: bool = PrivateAttr(default=True)

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
        limit = getattr(self._model.config, "max_position_embeddings", None) or float("inf")
        found = [Generation(text="", generation_info=_info("too_long", len(ids), 0)) for ids in tokens]
        fitting = [row for row, ids in enumerate(tokens) if len(ids) + self.max_new_tokens <= limit]
        fitting.sort(key=lambda row: len(tokens[row]))
        ends = Ends(self._tokenizer, stop, self._model.generation_config.eos_token_id)
        # One batch at a time: threads would only share the same cores.
        with self._lock:
            for start in range(0, len(fitting), self.batch_size):
                rows = fitting[start : start + self.batch_size]
                answers = self._write([(tokens[row], self._guess(prompts[row], stop)) for row in rows], ends)
                for row, answer in zip(rows, answers, strict=True):
                    found[row] = self._generation(len(tokens[row]), answer, stop)
        return LLMResult(generations=[[generation] for generation in found])

    def _guess(self, prompt: str, stop: Sequence[str]) -> list[int]:
        guess = self.guess(prompt) if self.guess is not None else None
        return self._continuation(guess, stop[0] if stop else "")[: self.max_new_tokens - 1] if guess else []

    def log_likelihoods(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """See `Scorer.log_likelihoods`; −∞ for what doesn't fit the model's context.

        What the texts of a batch have in common at their beginnings, such as examples chosen before, is computed once.
        """
        texts = [prompt + continuation for prompt, continuation in zip(prompts, continuations, strict=True)]
        read = self._tokenizer(texts, return_token_type_ids=False, return_offsets_mapping=True, verbose=False)
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
                for row, (_, written), read in zip(rows, pairs, self._read(pairs), strict=True):
                    logits = read.logits.float().log_softmax(-1)
                    found[row] = float(logits[range(len(written)), written].double().sum())
        return found

    def _continuation(self, answer: str, end: str) -> list[int]:
        ids: list[int] = self._tokenizer(f" {answer}{end}", add_special_tokens=False)["input_ids"]
        return ids

    @torch.inference_mode()
    def _read(self, pairs: Sequence[tuple[list[int], list[int]]], keep: bool = False) -> list[_Read]:
        """Read prompts, each with a continuation; keep: keys and values, too."""
        prompts, device = [prompt for prompt, _ in pairs], self._model.device
        shared, past = min(_common(prompts), *(len(prompt) - 1 for prompt in prompts)), None
        if shared < _WORTH:
            together = max(1, _TOGETHER // max(len(prompt) + len(more) for prompt, more in pairs))
            if device.type == "cpu" and together < len(pairs):
                starts = range(0, len(pairs), together)
                return [read for start in starts for read in self._read(pairs[start : start + together], keep)]
            shared = 0
        else:
            known = torch.tensor([prompts[0][:shared]], device=device)
            past = self._model(input_ids=known, use_cache=True, logits_to_keep=1).past_key_values
            past.batch_repeat_interleave(len(prompts))
        ids, mask, longest = self._padded([own[shared:] for own in prompts], max(len(more) for _, more in pairs))
        for row, (_, more) in enumerate(pairs):
            ids[row, longest : longest + len(more)] = torch.tensor(more, dtype=torch.long)
            mask[row, longest : longest + len(more)] = 1
        mask = torch.cat([mask.new_ones(len(pairs), shared), mask], dim=1)
        made = self._model(
            input_ids=ids.to(device),
            # Without padding none is needed, and attention goes without a mask.
            attention_mask=mask.to(device) if shared or not mask.all() else None,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, shared:].to(device),
            past_key_values=past,
            logits_to_keep=ids.shape[1] - longest + 1,
            use_cache=keep or past is not None,
        )
        kept = getattr(made, "past_key_values", None) if keep else None  # a state space model has none
        return [
            _Read(made.logits[row, : len(more) + 1], kept, row, seen)
            for row, ((_, more), seen) in enumerate(zip(pairs, mask.to(device), strict=True))
        ]

    @torch.inference_mode()
    def _write(self, drafts: Sequence[tuple[list[int], list[int]]], ends: Ends) -> list[Answer]:
        """What the model writes after prompts, greedily. Guesses are read with them; it goes on where they end."""
        answers = [Answer(ends, self.max_new_tokens) for _ in drafts]
        known: dict[int, Known] = {}
        if self._plain or any(guess for _, guess in drafts):
            for row, ((prompt, guess), read) in enumerate(zip(drafts, self._read(drafts, keep=True), strict=True)):
                chosen = read.logits.argmax(-1).tolist()
                agreed = next((n for n, token in enumerate(guess) if chosen[n] != token), len(guess))
                for token in chosen[: agreed + 1]:
                    answers[row].add(token)
                self._plain = read.plain
                if self._plain and not answers[row].ended:
                    known[row] = read.known(len(prompt) + agreed)
        left = [row for row, answer in enumerate(answers) if not answer.ended]
        if left and self._plain:
            go_on(self._model, [answers[row] for row in left], [known[row] for row in left])
        elif left:
            self._generate_on([answers[row] for row in left], [drafts[row][0] for row in left], ends)
        return answers

    def _generate_on(self, answers: Sequence[Answer], prompts: Sequence[list[int]], ends: Ends) -> None:
        """As `go_on`, for models with a cache of another kind (sliding windows, states): prompts are read anew."""
        ids, mask, _ = self._padded([prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)])
        self._model.generate(
            input_ids=ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=self.max_new_tokens,
                pad_token_id=ends.pad,
                eos_token_id=ends.tokens or None,
                bos_token_id=self._tokenizer.bos_token_id,
            ),
            stopping_criteria=StoppingCriteriaList([Stop(answers)]),
        )

    def _padded(self, prompts: Sequence[list[int]], more: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Tokens and mask, (B, longest + more), prompts at the right of the first `longest`; and `longest`."""
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest + more, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, own in enumerate(prompts):
            ids[row, longest - len(own) : longest] = torch.tensor(own)
            mask[row, longest - len(own) : longest] = 1
        return ids, mask, longest

    def _generation(self, read: int, answer: Answer, stop: Sequence[str]) -> Generation:
        text = cut(self._tokenizer.decode(answer.tokens, skip_special_tokens=True), stop)[0]
        return Generation(
            text=text, generation_info=_info("stop" if answer.stopped else "length", read, len(answer.tokens))
        )


class _Read:
    """What a model made of a text and its continuation.

    Attributes:
        logits: (tokens of the continuation + 1, V), of its tokens and one more.
    """

    def __init__(self, logits: torch.Tensor, past: Any, row: int, seen: torch.Tensor) -> None:
        self.logits = logits
        self._past, self._row, self._seen = past, row, seen

    @property
    def plain(self) -> bool:
        """Whether keys and values of all tokens are there in each layer."""
        layers = getattr(self._past, "layers", ())
        return bool(layers) and all(type(layer) is DynamicLayer and layer.get_seq_length() for layer in layers)

    def known(self, length: int) -> Known:
        """Keys and values of the first tokens in each layer."""
        at = self._seen.nonzero().flatten()[:length]
        return [(layer.keys[self._row][:, at], layer.values[self._row][:, at]) for layer in self._past.layers]


def _batches(rows: Sequence[int], tokens: Sequence[list[int]], size: int) -> list[list[int]]:
    """Rows in batches of up to `size`: by length, or side by side what begins alike, whichever computes less."""

    def cost(batch: Sequence[int]) -> int:
        shared = _common([tokens[row] for row in batch])
        return _PASS + shared + len(batch) * (max(len(tokens[row]) for row in batch) - shared)

    by_length = sorted(rows, key=lambda row: len(tokens[row]))
    even = [by_length[start : start + size] for start in range(0, len(rows), size)]
    alike: list[list[int]] = []
    for row in sorted(rows, key=lambda row: tokens[row]):
        if alike and len(alike[-1]) < size and cost([*alike[-1], row]) <= cost(alike[-1]) + cost([row]):
            alike[-1].append(row)
        else:
            alike.append([row])
    return min(even, alike, key=lambda batches: sum(map(cost, batches)))


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
