"""The stages of a run: data → SFT → GRPO (if enabled, after a race) → evaluation.

Each stage reads what the previous one left in the run folder. A training stage keeps its state there until it is done,
so a killed run resumes from its last round.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial

import torch

from langchain_rcr.basics.files import atomic_directory
from langchain_rcr.basics.items import readable
from langchain_rcr.databases.many import Databases, are_many
from langchain_rcr.errors import InputError, RCRError
from langchain_rcr.families.model_files import model_folder
from langchain_rcr.policy.hub import WHERE_FROM, requirement
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import get_parser
from rcr_trainer import grpo, race, sft
from rcr_trainer.data.examples import PARTS, Split, write_split
from rcr_trainer.data.files import read_split
from rcr_trainer.errors import ConfigError, DataError
from rcr_trainer.evaluation.plain import learners, try_scoring
from rcr_trainer.evaluation.report import EvaluationReport
from rcr_trainer.evaluation.stage import check_candidates, evaluation_stage
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.rewards.reward import check_reward
from rcr_trainer.runs import tasks
from rcr_trainer.runs.folder import INCIDENTAL, Run, check_free, hold, in_short, names_in
from rcr_trainer.runs.layers import differences, load_config
from rcr_trainer.runs.policies import build_model, check_files, device_of, load_model, load_start, save_checkpoint
from rcr_trainer.settings import Settings
from rcr_trainer.training.environment import Environment
from rcr_trainer.training.processes import Processes, join
from rcr_trainer.training.runner import Job

logger = logging.getLogger(__name__)

STAGES = ("data", "sft", "grpo", "evaluation")


def run(config: Settings, *, until: str = "evaluation", resume: bool = False, overwrite: bool = False) -> Run:
    """Take a run through its stages, starting from the first unfinished one.

    Processes launched together (`torchrun`) train together. Only the first writes and reports; the others return after
    the last training stage.
    """
    config.limit_threads()
    wanted = _wanted(config, until)
    with ExitStack() as holding:
        with join(config.device) as processes:
            if processes.first:
                # Check the data before creating the folder or clearing it.
                fresh = overwrite or not (config.folder / "run.json").is_file()
                split = load_checked(config)[0] if fresh else None
                names_in(config.folder)  # refuses a foreign folder before a lock is left in it
                holding.enter_context(hold(config.folder))
                current = Run.create(config.folder, config, resume=resume, overwrite=overwrite)
                _check_kept(current, resume=resume)
                _take(current, "data", lambda: write_split(current.data, split or load_checked(config)[0]))
                if "evaluation" in wanted and not current.done("evaluation"):
                    try_scoring(config, tasks.divide(config, read_split(current.data)))
            processes.wait()
            if not processes.first:
                current = Run.open(config.folder, trust=True)
                current.config, current.writes = config, False
            task = tasks.divide(config, read_split(current.data))
            for name, stage in (("sft", sft_stage), ("grpo", grpo_stage)):
                if name in wanted:
                    _take(current, name, partial(stage, current, task, processes), processes.size)
        if processes.first:
            if "evaluation" in wanted:
                _take(current, "evaluation", lambda: evaluation_stage(current))
            current.finish()
            if "sft" in wanted:
                what = requirement(config.model.pretrained, task.spec)
                logger.info("checkpoint: %s; to serve it, install %s, %s", current.checkpoint, what, WHERE_FROM)
    return current


def preview(config: Settings, until: str, *, resume: bool, overwrite: bool) -> tuple[tasks.Task, list[str]]:
    """What `run` would work on, and a line on what it would resume, clear or refuse (none if fresh); writes nothing."""
    wanted = _wanted(config, until)
    try:
        check_free(config.folder)
        there = Run.found(config.folder, config, resume=resume, overwrite=overwrite)
        if there is not None:
            _check_kept(there, resume=resume)
        done = [name for name in wanted if there is not None and _is_done(there, name)]
    except RCRError as error:
        return load_checked(config)[1], [f"the run would be refused: {error}"]
    if there is None:
        cleared = [f"{config.folder}: the run there would be cleared"]
        return load_checked(config)[1], cleared if (config.folder / "run.json").exists() else []
    left = [
        f"{name} from its last saved round" if (there.state / name).is_dir() else name
        for name in wanted
        if name not in done
    ]
    task = tasks.divide(config, read_split(there.data)) if "data" in done else load_checked(config)[1]
    said = f"done before: {', '.join(done) or 'nothing'}; to do: {', '.join(left) or 'nothing'}"
    return task, [f"{config.folder}: {said}"]


def _wanted(config: Settings, until: str) -> list[str]:
    return [name for name in STAGES[: STAGES.index(until) + 1] if name != "grpo" or config.grpo.enabled]


def _is_done(run: Run, name: str) -> bool:
    """Whether a stage is done; not if the run's own evaluation lacks answers or selectors for a spent budget."""
    if name != "evaluation" or not run.done(name):
        return run.done(name)
    report = EvaluationReport.read(run.path)
    unpaid = report.unpaid or (report.answers is not None and report.answers.unpaid)
    return bool(report.changed) or not unpaid


def _take(run: Run, name: str, stage: Callable[[], object], processes: int = 1) -> None:
    done = _is_done(run, name)
    logger.info("%s: done before" if done else "%s …", name)
    if done:
        return
    with run.stage(name, **({"processes": processes} if processes > 1 else {})):
        stage()


def load_checked(config: Settings) -> tuple[Split, tasks.Task]:
    """Load the split and its task, raising early any `RCRError` that would otherwise stop the run later."""
    # Fail before anything is read or downloaded.
    get_parser(config.program.language)
    if device_of(config) == "mps" and config.grpo.enabled:
        raise ConfigError("device = 'mps' has no numbers of 64 bits, with which GRPO draws: set device: cpu")
    split = tasks.load_split(config.data, config.seed)
    split.meta.pop(tasks.LANGUAGE, None)  # left by another run if data.directory is that run's data
    task = tasks.check_task(config, tasks.divide(config, split))
    check_candidates(config, task)
    split.meta[tasks.LANGUAGE] = task.spec.language
    tasks.say_data(config.data, split, task.spec)
    if config.sft.checkpoint is not None:
        load_start(config, task.pool)
    elif config.model.pretrained is not None:
        model_folder(config.model.pretrained)
    if config.evaluation.embeddings not in (None, config.model.pretrained):
        if config.evaluation.embeddings.startswith("langchain:"):
            advice = "LangChain embeddings go into model.base, whose model the selectors then use"
            raise ConfigError(f"evaluation.embeddings = '{config.evaluation.embeddings}': {advice}")
        model_folder(config.evaluation.embeddings)
    asks = bool(learners(config)) or config.evaluation.asks(config.llm)
    if config.grpo.enabled:
        reward = tasks.build_reward(config, task.spec)
        if reward.needs_llm and not config.llm.given:
            raise ConfigError(
                f"llm.model = null contradicts reward.names = {config.reward.names}: name a model, or use rewards "
                "that need none, such as context_coverage (one of your own has needs_llm = False)"
            )
        if reward.likelihood and not config.llm.scores:
            raise ConfigError(
                f"reward.names: [likelihood] needs llm.kind: local or completion, which score, not {config.llm.kind}"
            )
        check_reward(reward, task.reinforced, quick=True)
        asks = asks or reward.needs_llm
    if asks:
        place = config.reward.database
        rewarded = [*task.reinforced, *task.dev] if config.grpo.enabled and "execution" in config.reward.names else []
        answered = task.held_out(config.evaluation.split) if config.evaluation.asks(config.llm) else []
        try:
            for query in (*task.queries, *task.reinforced, *task.dev, *task.test):
                config.prompt.request([], query.source, query.fields)
            if place is not None and are_many(place):
                databases = Databases(place)
                for query in (*rewarded, *answered):
                    databases.path(query.fields)
        except InputError as error:
            raise DataError(f"question {query.id!r}: {error}") from None
        tasks.open_language_model(config, task, keep=False).close()
    return split, task


def _check_kept(run: Run, *, resume: bool) -> None:
    """Refuse a run whose files are damaged or, unless resumed, whose data files (missing ones aside) changed."""
    check_files(run)
    if resume or not run.done("data"):
        return
    data = run.config.data
    files = {part: getattr(data, part) for part in PARTS if getattr(data, part) is not None}
    paths = files or dict.fromkeys(PARTS, data.directory or data.ids)
    needed = [*paths.values(), *([data.corpus or tasks.CORPUS] if data.ids is not None else [])]
    if not all(path is not None and path.exists() for path in needed):
        return
    now, then = tasks.load_split(data, run.config.seed), read_split(run.data)
    # Compare as text, since NaN isn't equal to itself.
    differ = (path for part, path in paths.items() if str(getattr(now, part)) != str(getattr(then, part)))
    if changed := dict.fromkeys(map(str, differ)):
        raise ConfigError(
            f"{run.path} holds a run on what {' and '.join(changed)} held before; give this one another name, or "
            "--overwrite (--resume keeps the run's own copy)"
        )


def resumed(config: Settings, until: str = "evaluation") -> Run:
    """A run under exactly these settings: read if it is done, else resumed, else started afresh.

    If the run in the folder differs only in evaluation settings, only the evaluation is repeated.
    """
    changed, others = _changed(config)
    if changed and not others:
        with hold(config.folder):
            Run.open(config.folder, trust=True).repeat("evaluation", config)
    return run(config, until=until, resume=True, overwrite=bool(others))


def is_done(config: Settings, until: str = "evaluation", *, unpaid: bool = False) -> bool:
    """Whether `resumed` would only read; `unpaid` also accepts answers or selectors missing for a spent budget.

    A policy in the folder that was trained under other settings is a `ConfigError`.
    """
    if not all((config.folder / name).is_file() for name in ("run.json", "config.yaml")):
        return False
    (changed, others), run = _changed(config), Run.open(config.folder, trust=True)
    if others and run.done("grpo" if until != "sft" and run.config.grpo.enabled else "sft"):
        raise ConfigError(f"{config.folder} holds a run with other settings: {in_short(others)}; give another --out")
    return not changed and (run.done(until) if unpaid else _is_done(run, until))


def _changed(config: Settings) -> tuple[list[str], list[str]]:
    """The settings in which the run in the folder differs, and those of them that affect more than its evaluation."""
    if not (config.folder / "config.yaml").is_file():
        return [], []
    changed = differences(load_config(config.folder / "config.yaml", environ={}), config, ignore=INCIDENTAL)
    if (config.folder / "evaluation.json").is_file():
        changed += EvaluationReport.read(config.folder).changed
    return changed, [change for change in changed if not change.startswith("evaluation.")]


def sft_stage(run: Run, task: tasks.Task, processes: Processes) -> None:
    """Train a fresh policy, leave it untrained, or load `sft.checkpoint`; save it as the run's checkpoint."""
    config = run.config
    if config.sft.checkpoint is not None:
        logger.info("policy taken from %s instead of trained", config.sft.checkpoint)
        model = load_start(config, task.pool)
    else:
        torch.manual_seed(config.seed)
        model = build_model(config, config.model, [example.item for example in task.pool], task.spec, run.vectors)
        if config.sft.enabled:
            sft.train(_job(run, "sft", model, task, processes), config.sft)
        else:
            logger.info("no SFT: the policy is as it was built")
            model.family.begin(model.query, readable(query.item for query in task.queries), seed=config.seed)
    if run.writes:
        save_checkpoint(run.checkpoint, model, task.pool, config)


def _job(
    run: Run, stage: str, model: TriEncoder, task: tasks.Task, processes: Processes, llm: LanguageModel | None = None
) -> Job:
    """A training stage's job, with the state it may resume from; the log also has the language model's use."""
    state = run.state / stage
    if not state.is_dir():
        run.drop_metrics(stage)

    queries = task.queries if stage == "sft" else task.reinforced
    judging = sum(bool(task.spec.structures(query.target)) for query in task.dev)

    def log(step: int, figures: dict[str, float]) -> None:
        run.log(stage, step, figures if llm is None else {**figures, **_use(llm, processes)})
        if "epoch" in figures:
            of = {name: f" (n = {judging})" for name in figures if name.startswith("dev_")}
            known = {name: value for name, value in figures.items() if math.isfinite(value)}
            logger.info("%s", ", ".join(f"{name} {value:.4g}{of.get(name, '')}" for name, value in known.items()))

    return Job(model, task.pool, queries, task.dev, task.spec, run.config.seed, state, log, processes)


def grpo_stage(run: Run, task: tasks.Task, processes: Processes) -> None:
    """Reinforce SFT's policy; the run's checkpoint then holds the result, `checkpoint-sft` the starting point."""
    config, settings, reward = run.config, run.config.grpo, tasks.build_reward(run.config, task.spec)
    if run.writes and not run.sft_checkpoint.is_dir():
        # Copy it before anything replaces it: after a crash this stage starts from SFT's policy again.
        with atomic_directory(run.sft_checkpoint) as path:
            shutil.copytree(run.checkpoint, path, dirs_exist_ok=True)
    processes.wait()
    model = load_model(config, run.sft_checkpoint, run.vectors, trust=True)
    with tasks.open_language_model(config, task) if reward.needs_llm else nullcontext() as llm:
        job = _job(run, "grpo", model, task, processes, llm)
        environment = Environment(job, reward, llm, settings)
        race.run(job, environment, settings)
        grpo.train(job, environment, settings)
    if run.writes:
        save_checkpoint(run.checkpoint, model, task.pool, config)


def _use(llm: LanguageModel, processes: Processes) -> dict[str, float]:
    """The language model's statistics, summed over processes; distinct prompts are counted within each process."""
    total: Counter[str] = Counter()
    for said in processes.texts(json.dumps(llm.stats.figures())):
        total.update(json.loads(said))
    share = total["distinct_calls"] / total["nominal_calls"] if total["nominal_calls"] else 1.0
    return {f"llm_{name}": value for name, value in {**total, "distinct_share": round(share, 4)}.items()}
