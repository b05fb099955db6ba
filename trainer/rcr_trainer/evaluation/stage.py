"""The last stage of a run: compares its policies with plain selectors, also by a language model's answers."""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from typing import Any, get_args

from langchain_rcr.basics.files import write_text
from langchain_rcr.errors import CheckpointError
from langchain_rcr.families.backbone import RememberingBackbone
from langchain_rcr.index.memory import MatrixTable
from langchain_rcr.index.ranking import checked_exclude
from langchain_rcr.policy.hub import model_card
from langchain_rcr.policy.manifest import CARD, verify
from langchain_rcr.policy.selection import greedy
from langchain_rcr.policy.triencoder import TriEncoder
from rcr_trainer.data.files import read_split
from rcr_trainer.data.held_out import HeldOut, share_held_out
from rcr_trainer.errors import ConfigError, DataError
from rcr_trainer.evaluation.harness import PickFunction, answer, evaluate
from rcr_trainer.evaluation.plain import learners, plain_selectors, resources_of
from rcr_trainer.evaluation.report import MARKDOWN, OURS, WITHOUT_RL, EvaluationReport, Metric, Picks, write_picks
from rcr_trainer.evaluation.table import report_text
from rcr_trainer.llm.faults import BudgetExceeded
from rcr_trainer.runs.folder import Run
from rcr_trainer.runs.layers import differences, load_config
from rcr_trainer.runs.policies import load_model
from rcr_trainer.runs.tasks import Task, build_execution, compared, divide, open_language_model
from rcr_trainer.runs.trust import check_foreign
from rcr_trainer.settings import Settings

logger = logging.getLogger(__name__)


def evaluation_stage(run: Run) -> EvaluationReport:
    """Compare the trained retriever, and after GRPO the one SFT left (`rcr_without_rl`), with plain selectors.

    Writes picks.jsonl, evaluation.json and report.md. A first comparison writes them without answers before it asks a
    language model; a later one leaves the earlier files in place until the model has answered for as many selectors.

    Raises:
        CheckpointError: the run has no checkpoint yet.
        ConfigError: there are no queries of this split, or the run's folder names what the caller hasn't consented to.
        InputError: k is more than the pool offers.
        LLMError: the language model can't be asked. A model that scores no texts, or a spent budget, is no error (see
            the report's `missing` and `left_out`), unless an earlier comparison has more answers: that stays.
    """
    config, evaluation = run.config, run.config.evaluation
    if not run.checkpoint.is_dir() or not run.done("grpo" if config.grpo.enabled else "sft"):
        raise CheckpointError(
            f"{run.path} has no checkpoint yet: finish it with `rcr-train run {run.path / 'config.yaml'} --resume`"
        )
    check_foreign(run)
    verify(run.data)
    split = read_split(run.data)
    task = divide(config, split)
    queries = task.held_out(evaluation.split)
    if not queries:
        raise ConfigError(f"{run.path} has no {evaluation.split} queries")

    held_out = _held_out(config, task)
    policies, asks = _policies(run), evaluation.asks(config.llm)
    k = evaluation.k or policies[OURS].config.k
    ours = {name: policy_picks(policy, task, evaluation.split, held_out) for name, policy in policies.items()}
    written = load_config(run.path / "config.yaml", environ={})
    changed = [change for change in differences(written, config) if change.startswith("evaluation.")]
    # Keep the run's account and file of answers, whatever path its folder is opened by.
    here = config.model_copy(update={"output": run.path})
    with open_language_model(here, task) if asks or learners(config) else nullcontext() as llm:
        plain = plain_selectors(
            task.pool,
            resources_of(run, task, policies[OURS], llm),
            dev=task.dev,
            k=k,
            exclude_dev=held_out.judging(task.dev),
            names=compared(config, task),
        )
        report, picks = evaluate(
            {**ours, **plain.selectors},
            task.pool,
            queries,
            task.spec,
            k=k,
            split=split.name.removeprefix(f"{split.meta.get('task')}-"),
            part=evaluation.split,
            seed=config.seed,
            exclude=held_out.judging(queries),
            left_out=plain.left_out,
            unpaid=plain.unpaid,
            trade_offs=plain.trade_offs,
            changed=changed,
        )
        # So that nothing is lost if the model fails; but it leaves an earlier comparison until it has answered.
        again = asks and run.done("evaluation")
        if not again:
            _keep(run, policies[OURS], report, picks)
        if llm is not None and asks:
            answer(
                report,
                picks,
                task.spec,
                llm,
                orders={name: policy.config.order for name, policy in policies.items()},
                queries=evaluation.answer_queries,
                execution=build_execution(config, task.spec),
            )
            if again:
                _check_answers(run, report)
            _keep(run, policies[OURS], report, picks)
        elif config.llm.given and evaluation.answers is None:
            logger.info("%s is not asked, as it may charge for it: evaluation.answers: true", config.llm.model)
    return report


def _check_answers(run: Run, report: EvaluationReport) -> None:
    """Refuse a comparison that a spent budget left with answers for fewer selectors than the one in the folder."""
    if report.answers is None or not report.answers.unpaid:
        return
    with suppress(DataError):  # what is there is damaged
        if EvaluationReport.read(run.path).answered > report.answered:
            raise BudgetExceeded(f"{report.answers.missing}; the comparison in {run.path} has more answers, and stays")


def _keep(run: Run, policy: TriEncoder, report: EvaluationReport, picks: Picks) -> None:
    """Write a comparison, also into the model card."""
    write_picks(run.path, picks)
    report.write(run.path)
    report = EvaluationReport.read(run.path)  # rounded, so that no file shows another figure
    write_text(run.path / MARKDOWN, report_text(run.config.name, report, picks))
    # `evaluation.answer…` only changes which questions are answered, so the card stays valid.
    if all(change.startswith("evaluation.answer") for change in report.changed):
        figures = {name: getattr(report.selectors[OURS], name) for name in get_args(Metric)}
        card = model_card(
            policy.config,
            policy.spec,
            name=run.config.name,
            datasets=run.config.data.public,
            k=report.k,
            metrics={name: value for name, value in figures.items() if value is not None},
            measured_on=f"{report.n} {report.part} questions, split {report.split}",
        )
        write_text(run.checkpoint / CARD, card)


def policy_picks(model: TriEncoder, task: Task, split: str, held_out: HeldOut) -> PickFunction:
    """The policy as a function of questions, which encodes the pool once.

    E_x may have been fitted to development queries; on split dev it picks for them as if it had not.
    """
    fitted = task.dev if split == "dev" else []
    vectors = model.query.vectors(held_out.features(model, fitted)) if fitted else ()
    known = dict(zip((query.id for query in fitted), vectors, strict=True))
    index = MatrixTable(model.encode_pool([example.item for example in task.pool]))

    def pick(asked: Picks, k: int, exclude: Any) -> Any:
        vectors = model.encode_queries([each.question for each in asked], homes=[each.home for each in asked])
        for row, each in enumerate(asked):
            vectors[row] = known.get(each.id, vectors[row])
        return greedy(vectors, index, model.state(), k, exclude=exclude).positions

    return pick


def _policies(run: Run) -> dict[str, TriEncoder]:
    """The run's policy and, after GRPO, the one SFT left; the pool's texts are embedded once for both."""
    policies = {OURS: load_model(run.config, run.checkpoint, trust=not run.foreign)}
    shared = policies[OURS].backbone
    if run.config.grpo.enabled:
        policies[WITHOUT_RL] = before = load_model(run.config, run.sft_checkpoint, trust=not run.foreign)
        if shared is not None:
            before.backbone = shared  # one in memory is enough
    for policy in policies.values():
        for encoder in (policy.candidate, policy.context):
            if encoder.backbone is not None:
                encoder.backbone = RememberingBackbone(encoder.backbone, run.vectors)
    return policies


def check_candidates(config: Settings, task: Task) -> None:
    """Refuse a k that leaves some question of the comparison too few candidates, before training pays for answers."""
    if 2 * config.k > len(task.pool):  # a fold bars half of the pool at most
        barred = _held_out(config, task).judging(task.held_out(config.evaluation.split))
        checked_exclude(barred, len(barred), len(task.pool), config.k)


def _held_out(config: Settings, task: Task) -> HeldOut:
    new = share_held_out(config.grpo.exclude_own_program, task.queries, task.dev, task.pool, task.spec)
    return HeldOut(task.pool, task.queries, task.spec, new=new, seed=config.seed)
