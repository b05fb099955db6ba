"""What the baselines of a comparison need, by the settings of a run, and what that costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from langchain_rcr.basics.items import Item
from langchain_rcr.families import get_family
from langchain_rcr.families.backbone import RememberingBackbone, TransformerBackbone, open_backbone
from langchain_rcr.families.base import FALLBACK_FAMILY, FALLBACK_SETTINGS
from langchain_rcr.families.encoder import Backbone
from langchain_rcr.families.pooled import TransformerEncoder
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.baselines import get_baseline
from rcr_trainer.baselines.base import Embed, EmbedTokens, Resources
from rcr_trainer.baselines.set_bsr import transformer_tokens
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.faults import BudgetExceeded, UnscoredError
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.runs.folder import Run
from rcr_trainer.runs.policies import device_of, embeddings_of
from rcr_trainer.runs.tasks import Task, open_language_model
from rcr_trainer.settings import Settings

logger = logging.getLogger(__name__)


def resources_of(run: Run, task: Task, model: TriEncoder, llm: LanguageModel | None) -> Resources:
    """What the baselines of a run's comparison may need.

    They share the policy's frozen encoder where they use the same model.
    """
    config = run.config
    queries = [*task.dev, *task.test]

    def encode(selector: str, base: str) -> Embed:
        name = getattr(config.evaluation, selector, base)  # the settings' model in place of the selector's own
        encoder = TransformerEncoder(name, max_length=config.model.max_length).to(device_of(config))
        return lambda texts: encoder.encode([Item(text) for text in texts])

    return Resources(
        task.spec,
        config.seed,
        _embedder(run, model, task),
        _token_embedder(config),
        score=llm,
        policy=_text_encoders(config, task.spec),
        learning=config.baselines,
        encode=encode,
        prompt=config.prompt,
        schemas={each.source: str(each.fields["schema"]) for each in queries if each.fields.get("schema")},
    )


# ---------------------------------------------------------------- before a run


def learners(config: Settings) -> list[str]:
    """The comparison's selectors that learn from a scoring model; a `ConfigError` if there is no such model."""
    names = [name for name in config.evaluation.selectors if "score" in get_baseline(name).needs]
    if names and not (config.llm.given and config.llm.scores):
        raise ConfigError(
            f"evaluation.selectors: {', '.join(names)} learn from a scoring language model: name one by llm.model, "
            "with llm.kind: local or completion"
        )
    return names


def try_scoring(config: Settings, task: Task) -> None:
    """Where selectors learn from a server's scores, have it score one text before training pays for answers.

    Logs who will be left out if it can't.
    """
    names = learners(config)
    if not names or config.llm.kind == "local":
        return
    example, prompt = task.pool[0], config.prompt
    with open_language_model(config, task) as llm:
        try:
            asked = prompt.request([], example.source, example.fields)
            llm.log_likelihoods([str(asked)], [prompt.continuation(example.target)])
        except (UnscoredError, BudgetExceeded) as error:
            logger.warning("%s will be left out of the comparison: %s", ", ".join(names), error)


def texts_at_most(config: Settings, task: Task) -> int:
    """How many texts the language model scores at most for the baselines to learn from."""
    options, k, pool = config.baselines, config.k, len(task.pool)
    queries = min(pool, options.queries or pool)
    return sum(get_baseline(name).texts(options, queries, k) for name in learners(config))


def count_selectors(config: Settings) -> int:
    """How many selectors the comparison has, ours included."""
    without = set() if _embeddings(config) else {"embed"}
    if _token_embedder(config) is None:
        without |= {"embed_tokens"}
    plain = [name for name in config.evaluation.selectors if without.isdisjoint(get_baseline(name).needs)]
    return 1 + config.grpo.enabled + len(plain)


# ---------------------------------------------------------------- the models


def _text_encoders(config: Settings, spec: ProgramSpec) -> Callable[[Sequence[Item]], TriEncoder] | None:
    """Builds untrained encoders of texts from the pool's items: those of the run's family, if it reads texts.

    None where it reads structures and the settings name no model for its questions.
    """
    family, settings = get_family(config.model.family), config.model.model_dump(exclude={"family"})
    if family.structured:
        base = config.evaluation.embeddings or config.model.pretrained
        if base is None:
            return None
        shared = {key: settings[key] for key in ("pooling", "max_length")}
        family, settings = get_family(FALLBACK_FAMILY), {**FALLBACK_SETTINGS, **shared, "base": base}

    @cache
    def backbone() -> Backbone | None:
        model = family.settings(**settings)
        if not family.frozen or model.pretrained is None:
            return None
        embeddings = embeddings_of(config) if settings["base"] == config.model.base else None
        return RememberingBackbone(open_backbone(model, embeddings, torch=True))

    def build(items: Sequence[Item]) -> TriEncoder:
        model = TriEncoder.build(family.name, items, backbone=backbone(), spec=spec, seed=config.seed, **settings)
        return model.to(device_of(config))

    return build


def _embeddings(config: Settings) -> str | None:
    """The model of the selectors that compare embeddings, if there is one."""
    return config.evaluation.embeddings or config.model.pretrained


def _embedder(run: Run, model: TriEncoder, task: Task) -> Embed | None:
    """The baselines' embeddings, by the model that the settings name or the retriever's own.

    The vectors of the pool and of the queries that trade-offs are chosen on are kept. The queries that are measured are
    embedded each time, because their encoding is a part of the latencies.
    """
    config, name = run.config, _embeddings(run.config)
    if name is None or not any("embed" in get_baseline(selector).needs for selector in config.evaluation.selectors):
        return None
    own = name == config.model.pretrained
    raw: Any = model.backbone if own else None
    if raw is None:
        raw = TransformerBackbone(name, pooling=config.model.pooling, max_length=config.model.max_length)
    memory = RememberingBackbone(raw, run.vectors if own else None)
    chosen_on = [] if config.evaluation.split == "dev" else task.dev
    remembered = {example.source for example in [*task.pool, *chosen_on]}

    def embed(texts: Sequence[str]) -> Any:
        return (memory if remembered.issuperset(texts) else raw).embed(texts)

    return embed


def _token_embedder(config: Settings) -> EmbedTokens | None:
    """The same model's embeddings of tokens, loaded at the first call; None where it gives none."""
    name = _embeddings(config)
    if name is None or name.startswith("langchain:"):
        return None
    return transformer_tokens(name, max_length=config.model.max_length)
