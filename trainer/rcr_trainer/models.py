"""From the settings to objects: policies, rewards and language models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rcr_trainer.errors import ConfigError
from rcr_trainer.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from langchain_rcr.items import Item
    from langchain_rcr.policy import TriEncoder
    from langchain_rcr.programs import ProgramSpec
    from rcr_trainer.data import Example
    from rcr_trainer.evaluation import PickFunction
    from rcr_trainer.llm import LanguageModel
    from rcr_trainer.rewards import Reward
    from rcr_trainer.tasks import Task

    Known = dict[tuple[bool, str], NDArray[np.float32]]
    """Frozen vectors that the stages of one call share: the base model reads every text once."""


def build_model(config: Settings, items: Sequence[Item], spec: ProgramSpec, known: Known | None = None) -> TriEncoder:
    """A fresh policy.

    Args:
        config: family, base and start values.
        items: the pool, from which vocabularies are read.
        spec: how programs are read.
        known: frozen vectors computed before, to which training adds.

    Raises:
        InputError: the base model can't be loaded.
    """
    import torch

    from langchain_rcr.families import get_family
    from langchain_rcr.families.backbone import LangChainBackbone, RememberingBackbone, open_backbone
    from langchain_rcr.policy import TriEncoder

    torch.manual_seed(config.seed)
    settings = config.model.model_dump()
    family = get_family(settings.pop("family"))
    backbone = None
    if family.frozen and config.model.pretrained is not None:
        embeddings = embeddings_of(config)
        frozen = open_backbone(config.model) if embeddings is None else LangChainBackbone(embeddings)
        backbone = RememberingBackbone(frozen, known)
    return TriEncoder.build(family.name, items, backbone=backbone, spec=spec, seed=config.seed, **settings)


def embeddings_of(config: Settings) -> Any:
    """The LangChain embeddings that `model.base` names as langchain:MODULE:CALLABLE; None where it names a model.

    Raises:
        ConfigError: there is no such callable, or what it returns embeds nothing.
    """
    from langchain_rcr.families import get_family

    base = config.model.pretrained or ""
    if not get_family(config.model.family).frozen or not base.startswith("langchain:"):
        return None
    from rcr_trainer.rewards.make import load

    embeddings = load(base.removeprefix("langchain:"), "model.base")()
    if not (hasattr(embeddings, "embed_query") and hasattr(embeddings, "embed_documents")):
        msg = f"model.base = '{base}' returned {type(embeddings).__name__}, which is no LangChain embeddings"
        raise ConfigError(msg)
    return embeddings


def load_model(config: Settings, checkpoint: Path, known: Known | None = None) -> TriEncoder:
    """A policy from a checkpoint, on the run's device.

    Args:
        config: of the run.
        checkpoint: the folder.
        known: frozen vectors computed before, to which training adds.
    """
    from langchain_rcr.families.backbone import RememberingBackbone
    from langchain_rcr.policy import TriEncoder

    model = TriEncoder.from_pretrained(checkpoint, embeddings=embeddings_of(config))
    if model.backbone is not None:
        model.backbone = RememberingBackbone(model.backbone, known)
    return model.to(device_of(config))


def load_beside(config: Settings, model: TriEncoder, checkpoint: Path) -> TriEncoder:
    """Another policy over the same frozen vectors, which are not computed again.

    Args:
        config: of the run.
        model: the one whose vectors are shared.
        checkpoint: the other's folder.
    """
    from langchain_rcr.policy import TriEncoder

    other = TriEncoder.from_pretrained(checkpoint, embeddings=embeddings_of(config))
    if model.backbone is not None:
        other.backbone = model.backbone
    return other.to(next(model.parameters()).device)


def save_checkpoint(folder: Path, model: TriEncoder, pool: Sequence[Example]) -> None:
    """Write policy and pool.jsonl as one folder, whole or not at all."""
    from langchain_rcr.files import atomic_directory
    from rcr_trainer.data import write_examples

    with atomic_directory(folder) as path:
        model.save_pretrained(path)
        write_examples(path / "pool.jsonl", pool)


def device_of(config: Settings) -> str:
    """The torch device that `device` means here.

    Raises:
        ConfigError: there is no such device on this machine.
    """
    import torch

    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=config.device)
    except (RuntimeError, AssertionError) as error:
        msg = f"device = '{config.device}' can't be used: {str(error).splitlines()[0]}"
        raise ConfigError(msg) from None
    return config.device


def policy_picks(
    model: TriEncoder,
    pool: Sequence[Example],
    spec: ProgramSpec,
    *,
    mask_duplicates: bool,
    fitted: Sequence[Example] = (),
    own_program: bool = False,
) -> PickFunction:
    """The trained policy as a function (queries, k, exclude, references) → positions (B, k); encodes the pool once.

    Args:
        model: the policy.
        pool: the candidates.
        spec: how programs are read.
        mask_duplicates: whether it picks no program twice.
        fitted: queries that E_x may have been fitted to; their picks are those that it would make without.
        own_program: as for `Family.fit`.
    """
    import numpy as np

    from langchain_rcr.index.memory import MatrixTable
    from langchain_rcr.items import Item
    from langchain_rcr.selection import greedy

    items = [Item(example.source, example.target) for example in fitted]
    features = model.family.held_out(model.query, items, own_program=own_program)
    held_out = dict(zip((query.source for query in fitted), model.query.vectors(features), strict=True))
    index = MatrixTable(model.encode_pool([Item(example.source, example.target) for example in pool]))
    groups = None
    if mask_duplicates:
        groups = np.unique([spec.key(example.target) for example in pool], return_inverse=True)[1]

    def pick(queries: Sequence[str], k: int, exclude: Any, references: Sequence[str] | None) -> Any:
        vectors = model.encode_queries(queries)
        for row, query in enumerate(queries):
            vectors[row] = held_out.get(query, vectors[row])
        return greedy(vectors, index, model.state(), k, exclude=exclude, groups=groups).positions

    return pick


def build_reward(config: Settings, spec: ProgramSpec) -> Reward:
    """What GRPO rewards.

    Raises:
        ConfigError: no such reward, or a database that can't be opened.
    """
    from rcr_trainer.rewards import make_reward

    settings = config.reward
    weights = settings.weights or [1.0] * len(settings.names)
    parts = dict(zip(settings.names, weights, strict=True))
    return make_reward(
        parts if len(parts) > 1 or settings.weights else settings.names[0],
        spec,
        database=settings.database,
        execute=settings.executor,
        timeout_s=settings.timeout,
        max_rows=settings.max_rows,
    )


def open_language_model(config: Settings, task: Task, *, keep: bool = True) -> LanguageModel:
    """The model that answers prompts; close it when done.

    Answers are kept in a file beside the run folder, for all runs; what is spent is booked under the run's folder.

    Args:
        config: of the run.
        task: whose gold programs a simulator knows, and how they are read.
        keep: whether there is such a file; without it answers and bookings are gone with the model.

    Raises:
        ConfigError: settings that can't be.
        MissingExtraError: langchain-openai is not installed.
        DataError: the file of answers can't be used.
    """
    from rcr_trainer.llm import LLMSettings, StructureBoundLLM, open_llm, wrap

    settings, spec = config.llm, task.spec
    examples = [*task.pool, *task.queries, *task.reinforced, *task.dev, *task.test]
    programs = {example.source: example.target for example in examples}
    if settings.kind == "simulator":
        simulator = StructureBoundLLM(
            programs=programs,
            spec=spec,
            size=settings.simulator_size,
        )
        # Prices and budget are the real model's: this one costs nothing.
        return wrap(simulator, LLMSettings(kind="simulator", stop=settings.stop), language=spec.language)
    cache = settings.cache or config.folder.parent / "answers.sqlite"
    account = str(config.folder.resolve())
    file = cache if keep else None
    return open_llm(settings, file, language=spec.language, account=account, guesses=programs)
