"""Builds a run's policy, loads it, takes it from another run, and saves it as a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from langchain_rcr.basics.files import atomic_directory
from langchain_rcr.basics.items import Item
from langchain_rcr.errors import CheckpointError, PoolError
from langchain_rcr.families import ModelSettings, get_family
from langchain_rcr.families.backbone import Known, RememberingBackbone, open_backbone
from langchain_rcr.policy.hub import model_card
from langchain_rcr.policy.manifest import seal, verify
from langchain_rcr.policy.prompt import APPENDIX_D
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.data.examples import Example, write_examples
from rcr_trainer.data.files import read_examples
from rcr_trainer.errors import ConfigError
from rcr_trainer.rewards.ours import load
from rcr_trainer.runs.folder import Run
from rcr_trainer.settings import Settings


def build_model(
    config: Settings, settings: ModelSettings, items: Sequence[Item], spec: ProgramSpec, known: Known
) -> TriEncoder:
    """A fresh policy of these settings for a pool, on the run's device; `known` caches frozen vectors."""
    family, backbone = get_family(settings.family), None
    if family.frozen and settings.pretrained is not None:
        embeddings = embeddings_of(config) if settings.base == config.model.base else None
        backbone = RememberingBackbone(open_backbone(settings, embeddings, torch=True), known)
    given = settings.model_dump(exclude={"family"})
    model = TriEncoder.build(family.name, items, backbone=backbone, spec=spec, seed=config.seed, **given)
    return _placed(model, config)


def load_model(
    config: Settings, checkpoint: Path, known: Known | None = None, *, trust: bool | Collection[str] = False
) -> TriEncoder:
    """A policy from a checkpoint, on the run's device; for `trust` see `TriEncoder.from_pretrained`."""
    model = TriEncoder.from_pretrained(checkpoint, embeddings=embeddings_of(config), trust=trust, runtime="torch")
    if model.backbone is not None and known is not None:
        model.backbone = RememberingBackbone(model.backbone, known)
    return _placed(model, config)


def _placed(model: TriEncoder, config: Settings) -> TriEncoder:
    """Move the model to the run's device. CUDA then multiplies in TF32, whose products keep three digits."""
    device = device_of(config)
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    return model.to(device)


def embeddings_of(config: Settings) -> Any:
    """The LangChain embeddings that `model.base` names, or a `ConfigError`; None if it names none."""
    base = config.model.pretrained or ""
    if not get_family(config.model.family).frozen or not base.startswith("langchain:"):
        return None
    made: Any = load(base.removeprefix("langchain:"), "model.base", lambda found: found())
    if not (hasattr(made, "embed_query") and hasattr(made, "embed_documents")):
        raise ConfigError(f"model.base = '{base}' returned {type(made).__name__}, not LangChain embeddings")
    return made


def device_of(config: Settings) -> str:
    """The torch device of a run, or a `ConfigError` if this machine has no such device."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=config.device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device = '{config.device}' can't be used: {str(error).splitlines()[0]}") from None
    return config.device


def check_files(run: Run) -> None:
    """Check that a run's data and checkpoints are as written; a `CheckpointError` names a file that isn't."""
    try:
        for folder in (run.data, run.checkpoint, run.sft_checkpoint):
            if folder.is_dir():
                verify(folder)
                verify(folder, pool=True)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; --overwrite starts over") from None


def load_start(config: Settings, pool: Sequence[Example]) -> TriEncoder:
    """The policy that `sft.checkpoint` names; an `RCRError` if it is damaged or has other settings or another pool."""
    start = folder = Path(str(config.sft.checkpoint))
    if start.resolve().is_relative_to(config.folder.resolve()):  # --overwrite would clear it
        raise ConfigError(f"sft.checkpoint = {start} is in this run's own folder: give this run another name")
    if (start / "run.json").is_file():
        other = Run.open(start)
        if not other.done("sft"):
            raise CheckpointError(f"sft.checkpoint = {start} is a run that has no policy yet: finish it first")
        folder = other.sft_checkpoint if other.sft_checkpoint.is_dir() else other.checkpoint
    model = load_model(config, folder, trust=[config.model.pretrained or ""])
    verify(folder, pool=True)
    for name, value in (("family", model.family.name), ("lam", model.config.lam), ("tau", model.config.tau)):
        if value != getattr(config.model, name):
            raise ConfigError(f"sft.checkpoint = {start} has {name} {value}: set model.{name}: {value}")
    own = read_examples(folder / "pool.jsonl")[0]
    found, wanted = (Counter((example.source, example.target) for example in examples) for examples in (own, pool))
    if found != wanted:
        raise PoolError(
            f"sft.checkpoint = {start} has another pool: {(wanted - found).total()} of this run's {len(pool)} examples "
            f"are not in it, {(found - wanted).total()} of its own are not in this run's; use the same data, seed "
            "and grpo.queries"
        )
    return model


def save_checkpoint(folder: Path, model: TriEncoder, pool: Sequence[Example], config: Settings) -> None:
    """Write policy, model card and pool.jsonl as one folder, atomically."""
    model.card = model_card(model.config, model.spec, name=config.name, datasets=config.data.public)
    taught = config.grpo.enabled and config.llm.given
    model.prompt = config.prompt if taught or config.prompt != APPENDIX_D else None
    model.group, model.prefer = config.data.group, config.data.home_field(example.fields for example in pool)
    with atomic_directory(folder) as path:
        model.save_pretrained(path)
        write_examples(path / "pool.jsonl", pool)
        seal(path)
