"""What the baselines of a comparison need that learn from a language model: encoders to train, and a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from langchain_rcr.families import get_family
from langchain_rcr.families.backbone import Backbone, LangChainBackbone, RememberingBackbone, open_backbone
from langchain_rcr.families.base import FALLBACK_FAMILY, FALLBACK_SETTINGS
from langchain_rcr.items import Item
from langchain_rcr.policy import TriEncoder
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.baselines import get_baseline
from rcr_trainer.errors import ConfigError
from rcr_trainer.settings import Settings
from rcr_trainer.tasks import Task, device_of, embeddings_of


def learned(config: Settings) -> list[str]:
    """The selectors of the comparison that learn from a scoring language model.

    Raises:
        ConfigError: there are some, and the settings name no language model that scores.
    """
    names = [name for name in config.evaluation.selectors if "score" in get_baseline(name).needs]
    if names and not (config.llm.given and config.llm.scores):
        msg = (
            f"evaluation.selectors: {', '.join(names)} learn from a scoring language model: name one by llm.model, "
            "with llm.kind: local or completion"
        )
        raise ConfigError(msg)
    return names


def texts_at_most(config: Settings, task: Task) -> int:
    """How many texts the language model scores at most for the baselines to learn from."""
    from rcr_trainer.baselines.learned import LearnedSelector, training_rows

    rows, k = training_rows(len(task.pool), config.baselines.queries), config.evaluation.k
    kinds = [get_baseline(name) for name in learned(config)]
    return sum(kind.texts(config.baselines, len(rows), k) for kind in kinds if issubclass(kind, LearnedSelector))


def text_encoders(config: Settings, spec: ProgramSpec) -> Callable[[Sequence[Item]], TriEncoder] | None:
    """Makes fresh encoders of texts, from the pool's items: those of the run's family, if it reads texts.

    None where the run's family reads structures and the settings name no model for its questions.
    """
    family, settings = get_family(config.model.family), config.model.model_dump(exclude={"family"})
    if family.structured:
        name, base = FALLBACK_FAMILY, config.evaluation.embeddings or config.model.pretrained
        if base is None:
            return None
        shared = {key: settings[key] for key in ("pooling", "max_length")}
        family, settings = get_family(name), {**FALLBACK_SETTINGS, **shared, "base": base}

    @cache
    def backbone() -> Backbone | None:
        model = family.settings(**settings)
        if not family.frozen or model.pretrained is None:
            return None
        embeddings = embeddings_of(config) if settings["base"] == config.model.base else None
        return RememberingBackbone(open_backbone(model) if embeddings is None else LangChainBackbone(embeddings))

    def build(items: Sequence[Item]) -> TriEncoder:
        model = TriEncoder.build(family.name, items, backbone=backbone(), spec=spec, seed=config.seed, **settings)
        return model.to(device_of(config))

    return build
