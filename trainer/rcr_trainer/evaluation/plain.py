"""The baselines of a run's comparison: what they need, what that costs, and how they are built and tuned for a pool."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.progress import track
from langchain_rcr.errors import InputError
from langchain_rcr.families import get_family
from langchain_rcr.families.backbone import RememberingBackbone, open_backbone
from langchain_rcr.families.base import FALLBACK_FAMILY, FALLBACK_SETTINGS
from langchain_rcr.families.pooled import TransformerEncoder
from langchain_rcr.policy.triencoder import TriEncoder
from rcr_trainer.baselines import BASELINES, get_baseline
from rcr_trainer.baselines.base import Baseline, Embed, EmbedTokens, Exclude, Resources, TradeOff
from rcr_trainer.data.arrays import row_blocks
from rcr_trainer.data.coverage import recall, structure_matrices
from rcr_trainer.data.examples import Example
from rcr_trainer.errors import ConfigError
from rcr_trainer.evaluation.report import Choice
from rcr_trainer.llm.faults import BudgetExceeded, TooLongError, UnscoredError
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.runs.folder import Run
from rcr_trainer.runs.policies import build_model, device_of
from rcr_trainer.runs.tasks import Task, compared, open_language_model
from rcr_trainer.settings import Settings

logger = logging.getLogger(__name__)

_POOL_QUERIES = 200  # about this many of the pool's examples stand in for missing development queries


@dataclass(slots=True)
class PlainSelectors:
    """Baselines by name; the other fields are as in the report."""

    selectors: dict[str, Baseline] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    trade_offs: dict[str, Choice] = field(default_factory=dict)
    unpaid: bool = False


def plain_selectors(
    pool: Sequence[Example],
    resources: Resources,
    *,
    dev: Sequence[Example] = (),
    k: int = 4,
    exclude_dev: Exclude = None,
    names: Collection[str] | None = None,
) -> PlainSelectors:
    """Build the baselines for one pool.

    A baseline is left out if it lacks a resource, can't load its model or can't learn (the language model scores no
    texts, or its budget is spent). Trade-offs are chosen for k picks on the dev queries, given the positions that each
    may not pick. Nothing is spent on baselines that aren't in `names` (None: all). Each embeds pool and dev again, so
    `resources.embed` should cache their vectors.
    """
    examples = [{"source": example.source, "target": example.target, **example.fields} for example in pool]
    plain = PlainSelectors()
    wanted = [name for name in BASELINES if names is None or name in names]
    for name in track(wanted, "preparing plain selectors"):
        baseline = get_baseline(name)
        if reason := resources.missing(baseline):
            plain.left_out[name] = reason
            continue
        try:
            selector = baseline(examples, k=k, **vars(resources))
            if "score" in baseline.needs:
                selector.pick([], k)  # makes it learn
        except (InputError, UnscoredError, BudgetExceeded, TooLongError) as error:
            plain.left_out[name] = str(error)
            plain.unpaid |= isinstance(error, BudgetExceeded)
            continue
        plain.selectors[name] = selector
        if baseline.trade_off is not None:
            plain.trade_offs[name] = choose(selector, pool, dev, exclude_dev)
    return plain


def choose(selector: Baseline, pool: Sequence[Example], dev: Sequence[Example], exclude: Exclude = None) -> Choice:
    """Set a selector's trade-off to the value with the highest coverage on dev, the first of equals.

    Without usable dev queries, the pool's own examples are the queries, each barred from its own question; if the pool
    is too small for that, the selector keeps its value. The arguments are those of `plain_selectors`.
    """
    parameter, grid = cast("TradeOff", selector.trade_off)
    k, spec = selector.k, selector.resources.spec
    queries, chosen_on, barred = dev, "dev", cast("Any", [()] * len(dev) if exclude is None else exclude)
    kept = [at for at, each in enumerate(dev) if spec.structures(each.target)]
    if not kept:
        usable = [at for at, each in enumerate(pool) if spec.structures(each.target)]
        queries, chosen_on, kept = pool, "pool", usable[:: max(1, len(usable) // _POOL_QUERIES)]
        sources = np.array([example.source for example in pool], dtype=object)
        barred = {at: np.flatnonzero(sources == sources[at]) for at in kept}
        if k > len(pool) - max(map(len, barred.values()), default=len(pool)):
            return Choice(parameter, getattr(selector, parameter), chosen_on="nothing")
    needed, there = structure_matrices(spec, [queries[at].target for at in kept], [e.target for e in pool])
    coverage, blocks = {}, [kept[block] for block in row_blocks(len(kept), len(pool))]
    for value in grid:
        setattr(selector, parameter, value)
        picks = [selector.pick([queries[at].source for at in own], k, [barred[at] for at in own]) for own in blocks]
        coverage[value] = 100 * float(recall(needed, there, np.concatenate(picks)).mean())
    best = max(coverage, key=lambda value: coverage[value])
    setattr(selector, parameter, best)
    return Choice(parameter, best, coverage, len(kept), chosen_on)


def learners(config: Settings) -> list[str]:
    """The comparison's selectors that learn from a scoring model; a `ConfigError` if there is no such model."""
    names = [name for name in compared(config) if "score" in get_baseline(name).needs]
    if names and not (config.llm.given and config.llm.scores):
        raise ConfigError(
            f"evaluation.selectors: {', '.join(names)} learn from a scoring language model: name one by llm.model, "
            "with llm.kind: local or completion"
        )
    return names


def try_scoring(config: Settings, task: Task) -> None:
    """Have a server that selectors learn from score a text before training pays; log who is left out if it can't."""
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
    """The most texts that the language model scores to teach the baselines."""
    options, k, pool = config.baselines, config.k, len(task.pool)
    queries = min(pool, options.queries or pool)
    return sum(get_baseline(name).texts(options, queries, k) for name in learners(config))


def count_selectors(config: Settings, task: Task) -> int:
    """How many selectors the comparison has, ours included."""
    name = _embeddings(config)
    lacking = {"embed", "embed_tokens"} if not name else {"embed_tokens"} if name.startswith("langchain:") else set()
    plain = [name for name in compared(config, task) if lacking.isdisjoint(get_baseline(name).needs)]
    return 1 + config.grpo.enabled + len(plain)


def resources_of(run: Run, task: Task, model: TriEncoder, llm: LanguageModel | None) -> Resources:
    """What the baselines of a comparison may need; those that use the policy's frozen model share its encoder."""
    config = run.config
    queries = [*task.dev, *task.test]
    embed, embed_tokens = _embedders(run, model, task)
    structured, base, known = get_family(config.model.family).structured, _embeddings(config), dict[Any, Any]()

    def build(items: Sequence[Item]) -> TriEncoder:
        """Untrained text encoders, of the run's family if that reads texts."""
        settings = config.model
        if structured:
            given = {**FALLBACK_SETTINGS, "pooling": settings.pooling, "max_length": settings.max_length, "base": base}
            settings = get_family(FALLBACK_FAMILY).settings(**given)
        return build_model(config, settings, items, task.spec, known)

    def encode(selector: str, base: str) -> Embed:
        name = getattr(config.evaluation, selector, base)  # the settings' model overrides the selector's own
        encoder = TransformerEncoder(name, max_length=config.model.max_length).to(device_of(config))
        return lambda texts: encoder.encode([Item(text) for text in texts])

    return Resources(
        task.spec,
        config.seed,
        embed,
        embed_tokens,
        score=llm,
        policy=None if structured and base is None else build,
        learning=config.baselines,
        encode=encode,
        prompt=config.prompt,
        schemas={each.source: str(each.fields["schema"]) for each in queries if each.fields.get("schema")},
    )


def _embeddings(config: Settings) -> str | None:
    """The embedding selectors' model, if there is one."""
    return config.evaluation.embeddings or config.model.pretrained


def _embedders(run: Run, model: TriEncoder, task: Task) -> tuple[Embed | None, EmbedTokens | None]:
    """The baselines' embeddings of texts and of tokens, by the model that the settings name or the retriever's own.

    Vectors of the pool and of the queries for choosing trade-offs are cached. Other queries, such as those that are
    timed, are embedded each time.
    """
    config, name = run.config, _embeddings(run.config)
    needs = {need for selector in compared(config) for need in get_baseline(selector).needs}
    if name is None or needs.isdisjoint({"embed", "embed_tokens"}):
        return None, None
    own = name == config.model.pretrained
    raw: Any = model.backbone if own else None
    if raw is None:
        raw = open_backbone(config.model.model_copy(update={"base": name}), torch=True)
    memory = RememberingBackbone(raw, run.vectors if own else None)
    remembered = {example.source for example in [*task.pool, *task.dev]}

    def embed(texts: Sequence[str]) -> Any:
        return (memory if remembered.issuperset(texts) else raw).embed(texts)

    return embed, (lambda texts: raw.read(texts)[1]) if hasattr(raw, "read") else None
