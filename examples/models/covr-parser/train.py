"""Train the parser.

    python examples/models/covr-parser/train.py --out FOLDER

Started again with a FOLDER that has a checkpoint, it resumes from there (with the next chunk of episodes). The
defaults are the settings of the weights beside this file. Needs torch ≥ 2.9 for Muon.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from episodes import (
    ROLES,
    VARIANTS,
    Episode,
    EpisodeSampler,
    batches,
    build_tokenizer,
    build_vocabulary,
    draw_pool,
    encode,
    forbidden_utterances,
)
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_CHUNK = 320  # episodes sorted by length together
_EMPHASIS = 20.0
_ROPE_BASE = 500_000.0
_CPU = getattr(torch.cpu, "get_capabilities", dict)()
_BFLOAT16 = any(_CPU.get(name) for name in ("amx_bf16", "bf16"))
"""Whether the CPU multiplies matrices faster in bfloat16 than in float32; with only AVX-512 it takes twice as long."""


def plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention by matrix products: at these sizes, a third of the fused kernel's time on a CPU."""
    length, width = query.shape[2:]
    mask = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1)
    scores = torch.baddbmm(mask, query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=width**-0.5)
    mixed = scores.softmax(-1) @ value.flatten(0, 1)
    return mixed.unflatten(0, query.shape[:2]).transpose(1, 2).contiguous(), None


AttentionInterface.register("plain", plain_attention)


def build_model(vocabulary: dict[str, int], arguments: argparse.Namespace) -> LlamaForCausalLM:
    """A small Llama whose name embeddings start as the sum of a construct's and a variant's vector.

    Nothing else tells the model that five names belong together. With the sum, what one construct's look-up
    learns (attend to a name of the construct that comes next, copy which of the five it is) holds for all.
    """
    end = vocabulary["\n"]
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=arguments.width,
        intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.heads,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_BASE},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=vocabulary["<pad>"],
    )
    config._attn_implementation = "plain"
    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                scale = (2 * arguments.layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                parameter.normal_(0.0, scale * parameter.shape[1] ** -0.5)
        table = model.get_input_embeddings().weight
        table.normal_(0.0, 0.06)
        if arguments.factored:
            first = len(vocabulary) - len(ROLES) * VARIANTS
            kinds = torch.randn(len(ROLES), 1, arguments.width) * 0.05
            variants = torch.randn(1, VARIANTS, arguments.width) * 0.05
            table[first:] = 0.3 * table[first:] + (kinds + variants).flatten(0, 1)
    return model


def pad(episodes: list[Episode]) -> dict[str, torch.Tensor]:
    """A batch of (B, T) tensors; shorter episodes are padded on the right with weight 0."""
    # Use few different lengths, as kernels are built for each.
    longest = -(-max(len(episode.ids) for episode in episodes) // 16) * 16

    def stack(name: str, fill: float) -> torch.Tensor:
        rows = [getattr(episode, name) for episode in episodes]
        return torch.from_numpy(np.stack([np.pad(row, (0, longest - len(row)), constant_values=fill) for row in rows]))

    return {
        "ids": stack("ids", 1),
        "weights": stack("weights", 0),
        "roles": stack("roles", -1),
        "shown": stack("shown", 0),
    }


def loss_of(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], first: int) -> torch.Tensor:
    """Weighted mean cross-entropy, in nats above the minimum possible.

    The target of a name not shown yet is uniform over its construct's five: that teaches the syntax, and that one
    construct's name says nothing about another's.
    """
    weights, roles, shown = batch["weights"][:, 1:], batch["roles"][:, 1:], batch["shown"][:, 1:]
    opens = (roles >= 0) & ~shown
    counted = (weights > 0) | opens
    hidden = model.model(batch["ids"][:, :-1], use_cache=False).last_hidden_state[counted]
    logits = model.lm_head(hidden).float()
    targets, opens, roles = batch["ids"][:, 1:][counted], opens[counted], roles[counted]
    determined = functional.cross_entropy(logits, targets, reduction="none")
    names = logits[:, first:].unflatten(1, (len(ROLES), VARIANTS)).mean(2)
    kinds = logits.logsumexp(1) - names.gather(1, roles.clamp(min=0)[:, None])[:, 0] - math.log(VARIANTS)
    weights = torch.where(opens, 1.0, weights[counted])
    return (weights * torch.where(opens, kinds, determined)).sum() / weights.sum()


@torch.inference_mode()
def measure(model: LlamaForCausalLM, held_out: list[list[Episode]]) -> dict[str, Any]:
    """Accuracy by construct, shown and not shown before, of other tokens, and of whole programs (queries only).

    A program is right if every token is the model's first choice given the gold ones before it: then, and only
    then, greedy decoding writes it.
    """
    right = {True: np.zeros(len(ROLES)), False: np.zeros(len(ROLES))}
    seen = {True: np.zeros(len(ROLES)), False: np.zeros(len(ROLES))}
    others, exact, complete = [], [], []
    for episodes in held_out:
        batch = pad(episodes)
        with torch.autocast("cpu", torch.bfloat16, enabled=_BFLOAT16):
            choices = model(batch["ids"], use_cache=False).logits.argmax(-1).numpy()
        for row, episode in enumerate(episodes):
            part = slice(episode.query, len(episode.ids))
            hits = choices[row, episode.query - 1 : len(episode.ids) - 1] == episode.ids[part]
            roles, shown = episode.roles[part], episode.shown[part]
            for flag in (True, False):
                chosen = (roles >= 0) & (shown == flag)
                np.add.at(right[flag], roles[chosen], hits[chosen])
                np.add.at(seen[flag], roles[chosen], 1)
            others.extend(hits[roles < 0])
            complete.append(bool(shown[roles >= 0].all()))
            exact.append(bool(hits.all()))
    share = {flag: right[flag] / np.maximum(seen[flag], 1) for flag in right}
    by_role = {role: round(float(share[True][number]), 3) for number, role in enumerate(ROLES)}
    return {
        "exact": round(float(np.mean(exact)), 3),
        "exact_where_all_shown": round(float(np.mean(np.array(exact)[complete])), 3),
        "all_shown": round(float(np.mean(complete)), 3),
        "shown": round(float(right[True].sum() / seen[True].sum()), 3),
        "not_shown": round(float(right[False].sum() / max(seen[False].sum(), 1)), 3),
        "others": round(float(np.mean(others)), 4),
        "shown_by_construct": by_role,
    }


def learning_rate(step: int, arguments: argparse.Namespace) -> float:
    """The factor on the learning rate: warm-up, constant, then linear decay to zero."""
    decay = arguments.decay * arguments.steps
    return min(1.0, (step + 1) / arguments.warmup, max(0.0, (arguments.steps - step) / decay))


def build_optimizers(model: LlamaForCausalLM, arguments: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the layers' matrices and AdamW for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    if arguments.optimizer == "adamw":
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.98))]
    return [
        torch.optim.Muon(matrices, lr=arguments.muon_lr, momentum=0.95, weight_decay=0.02, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=arguments.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def write_model(folder: Path, model: LlamaForCausalLM, vocabulary: dict[str, int]) -> None:
    """Write the model folder: weights in float16, to be read as float32."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(vocabulary),
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="\n",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 5 writes a name that 4 doesn't know
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(folder)
    # transformers 4 reads rope_theta.
    extra = {"rope_theta": _ROPE_BASE, "dtype": "float32", "architectures": ["LlamaForCausalLM"]}
    config = json.dumps(model.config.to_diff_dict() | extra, indent=2, sort_keys=True)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    weights = {
        name: value.half().contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3100)
    parser.add_argument("--decay", type=float, default=0.3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=4500)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--inner", type=int, default=384)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--factored", type=int, default=1)
    parser.add_argument("--growth", type=int, default=1200, help="steps until the longest examples are drawn")
    parser.add_argument("--pool", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--every", type=float, default=180.0, help="seconds between checkpoints")
    return parser.parse_args()


class Training:
    """Model, optimisers and position, with their checkpoint.

    Args:
        arguments: the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.vocabulary = build_vocabulary()
        self.first = len(self.vocabulary) - len(ROLES) * VARIANTS
        self.model = build_model(self.vocabulary, arguments)
        self.optimizers = build_optimizers(self.model, arguments)
        self.rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self.step, self.chunk, self.earlier = 0, 0, 0.0
        self.asked = np.ones(len(ROLES))
        self.checkpoint = arguments.out / "checkpoint.pt"
        if self.checkpoint.exists():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.chunk, self.earlier = state["step"], state["chunk"], state["spent"]
        self.asked = np.array(state.get("asked", self.asked))

    @property
    def spent(self) -> float:
        """Seconds of processor time, including those before the checkpoint; a paused process spends none."""
        return self.earlier + time.process_time()

    def save(self, figures: dict[str, Any]) -> None:
        """Append to the log, write the checkpoint and the model folder."""
        with (self.arguments.out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(figures) + "\n")
        # Each construct's look-up emerges separately: ask more often for those that are still wrong.
        accuracies = figures["shown_by_construct"]
        self.asked = np.array([1 + _EMPHASIS * (1 - accuracies[role]) for role in ROLES])
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        state["asked"] = self.asked.tolist()
        fresh = self.checkpoint.with_suffix(".tmp")
        torch.save(state | {"step": self.step, "chunk": self.chunk, "spent": self.spent}, fresh)
        fresh.replace(self.checkpoint)
        write_model(self.arguments.out / "model", self.model, self.vocabulary)

    def update(self, batch: dict[str, torch.Tensor]) -> float:
        """Take one step; returns the loss before it."""
        factor = learning_rate(self.step, self.arguments)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate * factor
        with torch.autocast("cpu", torch.bfloat16, enabled=_BFLOAT16):
            loss = loss_of(self.model, batch, self.first)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()


def build_episodes(vocabulary: dict[str, int], size: int) -> tuple[EpisodeSampler, list[list[Episode]]]:
    """The sampler to train from, and batches of episodes over utterances it doesn't contain."""
    first = len(vocabulary) - len(ROLES) * VARIANTS
    forbidden = forbidden_utterances()
    held_out = draw_pool("held out", 4000, forbidden)
    known = draw_pool("train", size, forbidden | {utterance for utterance, _ in held_out})
    measured = EpisodeSampler([encode(*pair, vocabulary) for pair in held_out], first, covering=0.7)
    sampler = EpisodeSampler([encode(*pair, vocabulary) for pair in known], first)
    return sampler, batches(measured, np.random.default_rng(1), 8000, 320)


def main() -> None:
    """Train until the last step; checkpoint, measure and log on the way."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    training = Training(arguments)
    sampler, held_out = build_episodes(training.vocabulary, arguments.pool)
    losses: list[float] = []
    last = time.perf_counter()
    while training.step < arguments.steps:
        training.chunk += 1
        rng = np.random.default_rng([arguments.seed, training.chunk])
        shortest = min(1.0, 0.15 + 0.85 * training.step / max(arguments.growth, 1))
        sampler.asked = training.asked
        for episodes in batches(sampler, rng, arguments.tokens, _CHUNK, shortest):
            losses.append(training.update(pad(episodes)))
            done = training.step == arguments.steps
            if training.step % 25 == 0:
                print(f"{training.step} {np.mean(losses[-25:]):.4f} {training.spent / 60:.1f} CPU min", flush=True)
            if done or time.perf_counter() - last > arguments.every:
                position = {"step": training.step, "cpu_minutes": round(training.spent / 60, 2)}
                loss = {"loss": round(float(np.mean(losses[-100:])), 4)}
                training.save(position | loss | measure(training.model, held_out))
                last = time.perf_counter()
            if done:
                break


if __name__ == "__main__":
    main()
