"""The stages of a run: data → SFT → GRPO (where it is enabled) → evaluation.

Each reads what the one before left in the run folder.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from langchain_rcr.errors import CheckpointError
from rcr_trainer.config import Config, EvaluationConfig
from rcr_trainer.errors import ConfigError
from rcr_trainer.models import (
    build_model,
    build_reward,
    device_of,
    embeddings_of,
    load_beside,
    load_model,
    open_language_model,
    policy_picks,
    save_checkpoint,
)
from rcr_trainer.runs import Run
from rcr_trainer.tasks import Task, check_task, divide, load_split, program_spec

if TYPE_CHECKING:
    from langchain_rcr.tri_encoder import TriEncoder
    from rcr_trainer.baselines import Embed
    from rcr_trainer.data import Example, Split
    from rcr_trainer.evaluation import EvaluationReport, PlainSelectors
    from rcr_trainer.models import Known
    from rcr_trainer.programs import ProgramSpec

logger = logging.getLogger(__name__)

STAGES = ("data", "sft", "grpo", "evaluation")
Progress = Callable[[int, int], None]
"""Called with the optimiser steps done and planned."""


def run(
    config: Config,
    *,
    until: str = "evaluation",
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Take a run through its stages, from the first that is not done.

    Args:
        config: the settings; `config.folder` is the run folder.
        until: the last stage.
        resume: continue a run that was interrupted.
        overwrite: begin anew in the folder of an earlier run.
        progress: receives the optimiser steps done and planned.

    Returns:
        The finished run.

    Raises:
        RCRError: data, settings or run folder don't allow it; see `Run.create` and the stages.
    """
    set_threads(config.threads)
    # Bad data is found before there is a folder.
    split = None if (config.folder / "run.json").is_file() else load_checked(config)
    known: Known = {}
    current = Run.create(config.folder, config, resume=resume, overwrite=overwrite)
    stages: dict[str, Callable[[], object]] = {
        "data": lambda: data_stage(current, split),
        "sft": lambda: sft_stage(current, progress, known),
        "grpo": lambda: grpo_stage(current, progress, known),
        "evaluation": lambda: evaluation_stage(current, config.evaluation, known),
    }
    for name in STAGES[: STAGES.index(until) + 1]:
        if name == "grpo" and not config.grpo.enabled:
            continue
        if current.done(name):
            logger.info("%s: done before", name)
            continue
        logger.info("%s …", name)
        with current.stage(name):
            stages[name]()
    current.finish()
    return current


def set_threads(threads: int | None) -> None:
    """Limit the CPU threads of torch and, if numpy is not loaded yet, of its linear algebra; None: no limit.

    In any case threads wait asleep: on a busy machine, waiting busily slows training several-fold.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is None:
        return
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    import torch

    torch.set_num_threads(threads)


# ---------------------------------------------------------------- data


def data_stage(run: Run, split: Split | None = None) -> None:
    """Keep the run's split in its folder.

    Args:
        run: the run.
        split: what `load_checked` gave; None: it is called.
    """
    from rcr_trainer.data import write_split

    write_split(run.path / "data", split or load_checked(run.config))


def load_checked(config: Config) -> Split:
    """The split that the settings ask for, once it is certain that a run can work with it.

    Raises:
        DataError: a file can't be read, or no program parses.
        ConfigError: no such split or language, or no queries to evaluate on.
        PoolError: fewer candidates than picks.
    """
    spec = program_spec(config)
    split = load_split(config.data, config.seed)
    task = divide(config, split)
    check_task(config, task, spec)
    if config.grpo.enabled:
        from rcr_trainer.rewards import check_reward

        reward = build_reward(config, spec)
        check_reward(reward, task.reinforced)
        if reward.needs_llm and config.llm.kind in ("completion", "chat"):
            open_language_model(config, task, spec, keep=False).close()
    return split


def plan(config: Config) -> list[str]:
    """What a run would work on, and what its language model would cost at most, a line each. Nothing is asked.

    Raises:
        RCRError: as `load_checked`.
    """
    spec = program_spec(config)
    task = divide(config, load_checked(config))
    lines = [f"pool {len(task.pool)}, training {len(task.queries)}, dev {len(task.dev)}, test {len(task.test)}"]
    if not config.grpo.enabled:
        return lines
    from langchain_rcr.items import Item, compose
    from rcr_trainer.grpo import calls_at_most

    calls = calls_at_most(config.grpo, len(task.reinforced), len(task.dev))
    lines.append(f"GRPO: {len(task.reinforced)} queries, reward {'+'.join(config.reward.names)}")
    if not build_reward(config, spec).needs_llm:
        return [*lines, "no language model is asked"]
    longest = sorted(task.pool, key=lambda e: len((e.source + e.target).encode()))[-config.grpo.k :]
    query = max((e.source for e in [*task.reinforced, *task.dev]), key=lambda text: len(text.encode()))
    with open_language_model(config, task, spec, keep=False) as llm:
        estimate = llm.estimate_calls(calls, compose([Item(e.source, e.target) for e in longest], query))
    return [*lines, f"language model: {estimate}"]


def _task_of(run: Run) -> Task:
    from rcr_trainer.data import read_split

    return divide(run.config, read_split(run.path / "data"))


# ---------------------------------------------------------------- SFT


def sft_stage(run: Run, progress: Progress | None = None, known: Known | None = None) -> None:
    """Train a fresh policy and save it, with its pool, as the run's checkpoint.

    The training state is kept in the run folder until then, so that a killed run goes on from its last epochs.

    Args:
        run: a run whose data stage is done.
        progress: receives the optimiser steps done and planned.
        known: frozen vectors computed before; this stage adds to them.
    """
    from langchain_rcr.items import Item
    from rcr_trainer import sft

    config, task = run.config, _task_of(run)
    model = build_model(config, [Item(example.source, example.target) for example in task.pool], known)
    model.to(device_of(config))
    if not run.state.is_dir():
        run.drop_metrics("sft")

    def log(epoch: int, figures: dict[str, float]) -> None:
        run.log("sft", epoch, figures)
        _show(figures)

    sft.train(
        model,
        task.pool,
        task.queries,
        task.dev,
        program_spec(config),
        config.sft,
        seed=config.seed,
        state_folder=run.state,
        log=log,
        progress=progress,
    )
    save_checkpoint(run.checkpoint, model, task.pool)


def _show(figures: Mapping[str, float]) -> None:
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if math.isfinite(value))
    logger.info("%s", shown)


# ---------------------------------------------------------------- GRPO


def grpo_stage(run: Run, progress: Progress | None = None, known: Known | None = None) -> None:
    """Reinforce the policy that SFT left; the run's checkpoint then holds the result, `checkpoint-sft` its start.

    The training state is kept in the run folder until then, so that a killed run goes on from its last steps.

    Args:
        run: a run whose SFT stage is done.
        progress: receives the batches done and planned.
        known: frozen vectors computed before; this stage adds to them.

    Raises:
        ConfigError: the reward fails its test, or a setting of it or of the language model can't be.
        RewardError: the reward failed on an example, which is named.
        LLMError: the language model can't be asked, or its budget is spent.
    """
    from langchain_rcr.files import atomic_directory
    from rcr_trainer import grpo

    config, task, spec = run.config, _task_of(run), program_spec(run.config)
    reward = build_reward(config, spec)
    if not run.sft_checkpoint.is_dir():
        # Before anything replaces it: after a crash this stage begins from SFT's policy again.
        with atomic_directory(run.sft_checkpoint) as path:
            shutil.copytree(run.checkpoint, path, dirs_exist_ok=True)
    model = load_model(config, run.sft_checkpoint, known)
    state = run.state / "grpo"
    if not state.is_dir():
        run.drop_metrics("grpo")
    with open_language_model(config, task, spec) if reward.needs_llm else nullcontext() as llm:

        def log(step: int, figures: dict[str, float]) -> None:
            use = llm.stats.as_dict() if llm is not None else {}
            counts = {f"llm_{name}": float(n) for name, n in use.items() if isinstance(n, int | float)}
            run.log("grpo", step, {**figures, **counts})
            if "epoch" in figures:
                _show(figures)

        grpo.train(
            model,
            task.pool,
            task.reinforced,
            task.dev,
            spec,
            config.grpo,
            reward,
            llm,
            seed=config.seed,
            state_folder=state,
            log=log,
            progress=progress,
        )
    save_checkpoint(run.checkpoint, model, task.pool)


# ---------------------------------------------------------------- evaluation


def evaluation_stage(run: Run, evaluation: EvaluationConfig, known: Known | None = None) -> EvaluationReport:
    """Compare the trained retriever, after GRPO also as SFT left it (`rcr_without_rl`), with plain selectors.

    Writes evaluation.json and coverage.png.

    Args:
        run: a run with a checkpoint.
        evaluation: the settings, not necessarily the run's own.
        known: frozen vectors of the run's base model, computed before.

    Raises:
        CheckpointError: the run has no checkpoint yet.
        ConfigError: there are no queries of this split.
        InputError: k is more than the pool offers.
    """
    from langchain_rcr.tri_encoder import TriEncoder
    from rcr_trainer.data import read_split
    from rcr_trainer.evaluation import evaluate, plot_coverage

    last = "grpo" if run.config.grpo.enabled else "sft"
    if not run.checkpoint.is_dir() or not run.done(last):
        msg = f"{run.path} has no checkpoint yet: finish it with `rcr-train run {run.path / 'config.yaml'} --resume`"
        raise CheckpointError(msg)
    split, spec = read_split(run.path / "data"), program_spec(run.config)
    task = divide(run.config, split)
    queries = task.held_out(evaluation.split)
    if not queries:
        msg = f"{run.path} has no {evaluation.split} queries"
        raise ConfigError(msg)

    model = TriEncoder.from_pretrained(run.checkpoint, embeddings=embeddings_of(run.config))
    model.to(device_of(run.config))
    embed = _embedder(run.config, evaluation, model, task.pool, known)
    plain = _plain(run.config, evaluation, task, spec, embed)
    policies = {"rcr": model}
    if run.config.grpo.enabled:
        policies["rcr_without_rl"] = load_beside(run.config, model, run.sft_checkpoint)
    ours = {
        name: policy_picks(policy, task.pool, spec, mask_duplicates=evaluation.mask_duplicates)
        for name, policy in policies.items()
    }
    report = evaluate(
        {**ours, **plain},
        task.pool,
        queries,
        spec,
        k=evaluation.k,
        steps=evaluation.steps,
        split=split.name.removeprefix(f"{split.meta.get('task')}-"),
        part=evaluation.split,
        seed=run.config.seed,
        exclude=_barred(run.config, evaluation, task, evaluation.split),
        left_out=plain.left_out,
        mmr=plain.mmr,
    )
    report.write(run.path)
    plot_coverage(report, run.path / "coverage.png")
    return report


def _barred(config: Config, evaluation: EvaluationConfig, task: Task, split: str) -> list[Any]:
    """For each query of a split the pool positions that nobody may pick: itself, as an option its own program.

    Development queries stand in for held-out ones, whose programs the pool doesn't have: they are barred from their
    own programs wherever the training queries are.
    """
    from rcr_trainer.training import own_positions

    same_program = evaluation.exclude_own_program or (split == "dev" and config.sft.exclude_own_program)
    return [*own_positions(task.held_out(split), task.pool, program_spec(config), same_program=same_program)]


def _embedder(
    config: Config, evaluation: EvaluationConfig, model: TriEncoder, pool: Sequence[Example], known: Known | None
) -> Embed | None:
    """The embeddings of dense and mmr: those named in the settings, else the model's own; None for a lexical model.

    The pool's vectors are computed once, for the retriever too; queries are embedded anew each time, because their
    encoding is a part of the latencies that are measured.
    """
    from langchain_rcr.encoders.embeddings import Backbone, EmbeddingsEncoder, RememberingBackbone, TransformerBackbone

    name = evaluation.embeddings or config.model.base
    if not {"dense", "mmr"} & set(evaluation.selectors) or name is None:
        return None
    shared: list[Any] = []
    if name != config.model.base:
        known = None  # another model's vectors
    if isinstance(model.query, EmbeddingsEncoder) and name == config.model.base:
        raw: Backbone = model.query.backbone
        shared = [model.candidate, model.context]
    else:
        raw = TransformerBackbone(name, pooling=config.model.pooling, max_length=config.model.max_length)
    memory, in_pool = RememberingBackbone(raw, known), {example.source for example in pool}
    for encoder in shared:
        encoder.backbone = memory

    def embed(texts: Sequence[str]) -> Any:
        return (memory if in_pool.issuperset(texts) else raw).embed(texts)

    return embed


def _plain(
    config: Config, evaluation: EvaluationConfig, task: Task, spec: ProgramSpec, embed: Embed | None
) -> PlainSelectors:
    """The selectors that were asked for, with the reasons for those left out; mmr's trade-off is chosen on dev."""
    from rcr_trainer.baselines import MMRSelector
    from rcr_trainer.evaluation import PlainSelectors, choose_mmr, plain_selectors

    every = plain_selectors(task.pool, spec, embed, config.seed, k=evaluation.k)
    mmr = every.get("mmr")
    if embed is not None and isinstance(mmr, MMRSelector) and "mmr" in evaluation.selectors:
        barred = _barred(config, evaluation, task, "dev")
        grid = evaluation.mmr_grid
        every.mmr = choose_mmr(embed, task.pool, task.dev, spec, evaluation.k, grid=grid, exclude=barred)
        mmr.lambda_mult = every.mmr.lambda_mult
    wanted = set(evaluation.selectors)
    return PlainSelectors(
        {name: selector for name, selector in every.items() if name in wanted},
        left_out={name: reason for name, reason in every.left_out.items() if name in wanted},
        mmr=every.mmr if "mmr" in wanted else None,
    )
