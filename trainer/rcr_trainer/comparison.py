"""The last stage of a run: the trained retriever beside plain selectors, and what a language model makes of each."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from langchain_rcr.errors import CheckpointError
from rcr_trainer.baselines import get_baseline
from rcr_trainer.errors import ConfigError
from rcr_trainer.models import device_of, embeddings_of, load_beside, open_language_model, policy_picks
from rcr_trainer.runs import Run
from rcr_trainer.settings import EvaluationSettings, Settings
from rcr_trainer.tasks import Task, divide

if TYPE_CHECKING:
    from langchain_rcr.policy import TriEncoder
    from rcr_trainer.baselines.base import Embed, EmbedTokens
    from rcr_trainer.evaluation import Answerer, EvaluationReport, PlainSelectors
    from rcr_trainer.models import Known

logger = logging.getLogger(__name__)


def evaluation_stage(run: Run, evaluation: EvaluationSettings, known: Known | None = None) -> EvaluationReport:
    """Compare the trained retriever, after GRPO also as SFT left it (`rcr_without_rl`), with plain selectors.

    Writes evaluation.json and coverage.png; both are there, without answers, before a language model is asked.

    Args:
        run: a run with a checkpoint.
        evaluation: the settings, not necessarily the run's own.
        known: frozen vectors of the run's base model, computed before.

    Raises:
        CheckpointError: the run has no checkpoint yet.
        ConfigError: there are no queries of this split.
        InputError: k is more than the pool offers.
        LLMError: the language model can't be asked. That its budget is spent is no error: see the report's `missing`.
    """
    from langchain_rcr.policy import TriEncoder
    from rcr_trainer.data import read_split
    from rcr_trainer.evaluation import evaluate, plot_coverage

    last = "grpo" if run.config.grpo.enabled else "sft"
    if not run.checkpoint.is_dir() or not run.done(last):
        msg = f"{run.path} has no checkpoint yet: finish it with `rcr-train run {run.path / 'config.yaml'} --resume`"
        raise CheckpointError(msg)
    split = read_split(run.path / "data")
    task = divide(run.config, split)
    queries = task.held_out(evaluation.split)
    if not queries:
        msg = f"{run.path} has no {evaluation.split} queries"
        raise ConfigError(msg)

    model = TriEncoder.from_pretrained(run.checkpoint, embeddings=embeddings_of(run.config))
    model.to(device_of(run.config))
    embed = _embedder(run.config, evaluation, model, task, known)
    plain = _plain(run.config, evaluation, task, embed)
    policies = {"rcr": model}
    if run.config.grpo.enabled:
        policies["rcr_without_rl"] = load_beside(run.config, model, run.sft_checkpoint)
    ours = {
        name: policy_picks(
            policy,
            task.pool,
            task.spec,
            mask_duplicates=evaluation.mask_duplicates,
            fitted=task.dev if evaluation.split == "dev" else (),
            own_program=not run.config.sft.exclude_own_program,
        )
        for name, policy in policies.items()
    }

    def keep(report: EvaluationReport) -> None:
        report.write(run.path)
        plot_coverage(report, run.path / "coverage.png")

    with _answerer(run, evaluation, task) as answerer:
        report = evaluate(
            {**ours, **plain.selectors},
            task.pool,
            queries,
            task.spec,
            k=evaluation.k,
            steps=evaluation.steps,
            split=split.name.removeprefix(f"{split.meta.get('task')}-"),
            part=evaluation.split,
            seed=run.config.seed,
            exclude=_barred(run.config, evaluation, task, evaluation.split),
            gold=evaluation.gold,
            left_out=plain.left_out,
            trade_offs=plain.trade_offs,
            answerer=answerer,
            keep=keep,
        )
    report.write(run.path)
    return report


@contextmanager
def _answerer(run: Run, evaluation: EvaluationSettings, task: Task) -> Iterator[Answerer | None]:
    """The run's language model for the comparison; None where it isn't asked."""
    from rcr_trainer.evaluation import Answerer

    settings = run.config.llm
    if not evaluation.asks(settings):
        if settings.given and evaluation.answers is None:
            logger.info("%s is not asked, as it may charge for it: evaluation.answers: true", settings.model)
        yield None
        return
    # The run's account and file of answers, wherever its folder is seen from.
    config = run.config.model_copy(update={"output": run.path})
    with open_language_model(config, task) as llm:

        def answer(prompts: Sequence[str]) -> list[str | None]:
            return [answer.program for answer in llm.generate(prompts)]

        yield Answerer(answer, llm.name, simulated=settings.kind == "simulator", queries=evaluation.answer_queries)


def count_selectors(config: Settings, evaluation: EvaluationSettings) -> int:
    """How many selectors the comparison has, ours included."""
    without = {"embed"} if evaluation.embeddings is None and config.model.pretrained is None else set()
    if _token_embedder(config, evaluation) is None:
        without.add("embed_tokens")
    plain = [name for name in evaluation.selectors if without.isdisjoint(get_baseline(name).needs)]
    return 1 + config.grpo.enabled + len(plain)


def _barred(config: Settings, evaluation: EvaluationSettings, task: Task, split: str) -> list[Any]:
    """For each query of a split the pool positions that nobody may pick: itself, as an option its own program.

    Development queries stand in for held-out ones, whose programs the pool doesn't have: they are barred from their
    own programs wherever the training queries are.
    """
    from rcr_trainer.folds import own_positions

    same_program = evaluation.exclude_own_program or (split == "dev" and config.sft.exclude_own_program)
    return [*own_positions(task.held_out(split), task.pool, task.spec, same_program=same_program)]


def _embedder(
    config: Settings, evaluation: EvaluationSettings, model: TriEncoder, task: Task, known: Known | None
) -> Embed | None:
    """The baselines' embeddings: those named in the settings, or the model's own; None for a lexical one.

    The vectors of the pool, for the retriever too, and of the queries that trade-offs are chosen on are computed once.
    The queries that are measured are embedded anew each time, because their encoding is a part of the latencies.
    """
    from langchain_rcr.families.backbone import Backbone, RememberingBackbone, TransformerBackbone

    name = evaluation.embeddings or config.model.pretrained
    if name is None or not any("embed" in get_baseline(selector).needs for selector in evaluation.selectors):
        return None
    shared: list[Any] = []
    if name != config.model.pretrained:
        known = None  # another model's vectors
    if model.backbone is not None and name == config.model.pretrained:
        raw: Backbone = model.backbone
        shared = [encoder for encoder in (model.candidate, model.context) if encoder.backbone is not None]
    else:
        raw = TransformerBackbone(name, pooling=config.model.pooling, max_length=config.model.max_length)
    memory = RememberingBackbone(raw, known)
    remembered = {example.source for example in (*task.pool, *(task.dev if evaluation.split != "dev" else ()))}
    for encoder in shared:
        encoder.backbone = memory

    def embed(texts: Sequence[str]) -> Any:
        return (memory if remembered.issuperset(texts) else raw).embed(texts)

    return embed


def _token_embedder(config: Settings, evaluation: EvaluationSettings) -> EmbedTokens | None:
    """The same model's embeddings of tokens, loaded at the first call; None where it gives none."""
    from rcr_trainer.baselines.set_bsr import TransformerTokens

    name = evaluation.embeddings or config.model.pretrained
    if name is None or name.startswith("langchain:"):
        return None
    return TransformerTokens(name, max_length=config.model.max_length)


def _plain(config: Settings, evaluation: EvaluationSettings, task: Task, embed: Embed | None) -> PlainSelectors:
    """The selectors that were asked for, with the reasons for those left out; trade-offs are chosen on dev."""
    from rcr_trainer.baselines.base import Resources
    from rcr_trainer.evaluation import plain_selectors

    return plain_selectors(
        task.pool,
        Resources(task.spec, config.seed, embed, _token_embedder(config, evaluation)),
        dev=task.dev,
        k=evaluation.k,
        exclude_dev=_barred(config, evaluation, task, "dev"),
        gold=evaluation.gold,
        names=evaluation.selectors,
    )
