"""Builds what the stages work with from the settings: pool and queries, the reward, the language model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from langchain_rcr.errors import PoolError
from langchain_rcr.programs import TOKENS, ProgramSpec
from langchain_rcr.programs.languages import guess_language
from rcr_trainer.baselines import NO_EXAMPLES, OF_SCHEMAS, USUAL
from rcr_trainer.data.check import Keys, check_files, check_split, in_one_line
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import PARTS, Example, Split
from rcr_trainer.data.files import read_examples, read_split, unparsed
from rcr_trainer.data.geoquery import download_geoquery, geoquery_split, printed
from rcr_trainer.errors import ConfigError, DataError
from rcr_trainer.llm.cache import check_cache
from rcr_trainer.llm.model import LanguageModel, open_llm
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.rewards.reward import Reward
from rcr_trainer.runs.layers import check_hidden
from rcr_trainer.settings import DataSettings, Settings

logger = logging.getLogger(__name__)

LANGUAGE = "program_language"
"""The key in split.json for the language that programs are read in, which may differ from the settings'."""

CORPUS = Path("data/geoquery/corpus.xml")
"""Where a downloaded GeoQuery corpus is kept."""


@dataclass(frozen=True, slots=True)
class Task:
    """A split as the stages use it."""

    pool: list[Example]  # the candidates
    queries: list[Example]  # for training; candidates, too
    dev: list[Example]  # of the split, or candidates taken out of `queries`
    test: list[Example]
    reinforced: list[Example]  # training queries of GRPO: `queries`, or others taken out of the pool
    spec: ProgramSpec

    def held_out(self, split: str) -> list[Example]:
        """The queries of "dev" or "test"."""
        return self.dev if split == "dev" else self.test


def load_split(data: DataSettings, seed: int) -> Split:
    """Load the examples that the settings ask for; `seed` is for what is drawn. Errors name line and field."""
    if data.anonymize_values:
        return printed(load_split(data.model_copy(update={"anonymize_values": False}), seed))
    if data.directory is not None:
        return read_split(data.directory)
    if data.task == "covr":
        return covr_split(data.split, seed, data.train_size, data.test_size)
    if data.task == "geoquery":
        return geoquery_split(data.corpus or download_geoquery(CORPUS), data.split, data.ids)
    files: dict[str, list[Example]] = {part: [] for part in PARTS}
    for part in PARTS:
        if (path := getattr(data, part)) is not None:
            source, target = data.source_key, data.target_key
            found, _ = read_examples(path, source_key=source, target_key=target, id_key=data.id_key)
            prefix = "" if data.id_key else f"{part}-"  # row numbers restart in every file
            files[part] = [replace(each, id=f"{prefix}{each.id}") for each in found]
    return Split("files", **files, meta={"task": "files"})


def divide(config: Settings, split: Split) -> Task:
    """Divide a split into pool, training, development and test queries.

    Without a dev part, `data.dev_size` training queries become development queries and stay in the pool.
    `grpo.queries` of the others are drawn for GRPO alone and leave the pool (appendix A).
    """
    split = _belonging(config.data, split)
    program = config.program.model_dump()
    spec = ProgramSpec(**program | {"language": split.meta.get(LANGUAGE, program["language"])})
    size = config.data.dev_size
    if size is None:
        size = min(200, len(split.train) // 5)  # 200 give coverage to within a point or two
    pool, dev, queries = split.train, split.dev, split.train
    if not split.dev and size:
        dev, queries = _drawn(split.train, size, config.seed, "data.dev_size")
    reinforced = queries
    if config.grpo.enabled and config.grpo.queries is not None:
        reinforced, queries = _drawn(queries, config.grpo.queries, [config.seed, 1], "grpo.queries")
        gone = {id(example) for example in reinforced}
        pool = [example for example in split.train if id(example) not in gone]
    return _in_groups(config, Task(pool, queries, dev, split.test, reinforced, spec))


def _belonging(data: DataSettings, split: Split) -> Split:
    """The split with each example's group and home set: its values of `data.group` and `data.prefer`."""
    group, home = data.group, data.home_field(each.fields for each in split.train)
    if home and not any(home in each.fields for each in split.train):
        has = ", ".join(map(repr, dict.fromkeys(name for each in split.train for name in each.fields))) or "none"
        raise DataError(f"data.prefer = '{home}': no example has such a field (fields: {has})")

    def placed(example: Example) -> Example:
        fields = example.fields
        if group is not None and group not in fields:
            has = ", ".join(map(repr, fields)) or "none"
            raise DataError(f"data.group = '{group}': example {example.id!r} has no such field (fields: {has})")
        own = None if group is None else str(fields[group])
        return replace(example, group=own, home=str(fields.get(home) or "") if home else "")

    return split.mapped(placed)


def _in_groups(config: Settings, task: Task) -> Task:
    """The task without queries whose group has too few candidates.

    A training query needs k candidates with other programs, and 2 k in all, since its fold may bar half of its group.
    """
    key, pool = config.data.group, task.pool
    if key is None:
        return task
    stages = (config.sft, config.grpo) if config.grpo.enabled else (config.sft,)
    k = max(config.k, *(stage.picks(config.model) for stage in stages))
    sizes = Counter(example.group for example in pool)
    programs = Counter((example.group, task.spec.key(example.target)) for example in pool)

    def needed(query: Example, part: str) -> int:
        return k + 1 if part == "test" else max(2 * k, k + programs[query.group, task.spec.key(query.target)])

    def kept(part: str, queries: Sequence[Example]) -> list[Example]:
        found = [query for query in queries if sizes[query.group] >= needed(query, part)]
        if queries and not found:
            raise DataError(
                f"no {part} query has enough candidates with its own {key} for k = {k}: data.group: null picks across"
            )
        if len(found) < len(queries):
            gone = len(queries) - len(found)
            logger.warning("%d of %d %s queries have too few candidates of their %s", gone, len(queries), part, key)
        return found

    queries = kept("training", task.queries)
    reinforced = queries if task.reinforced is task.queries else kept("training", task.reinforced)
    return Task(pool, queries, kept("dev", task.dev), kept("test", task.test), reinforced, task.spec)


def _drawn(
    examples: Sequence[Example], size: int, seed: int | list[int], field: str
) -> tuple[list[Example], list[Example]]:
    """`size` examples drawn at random, and the others, both in their original order."""
    if size >= len(examples):
        raise ConfigError(f"{field} = {size} leaves no training queries of {len(examples)}: lower it")
    order = np.random.default_rng(seed).permutation(len(examples)).tolist()
    drawn, others = ([examples[number] for number in sorted(part)] for part in (order[:size], order[size:]))
    return drawn, others


def check_task(config: Settings, task: Task) -> Task:
    """Find now what would stop the run later: too few candidates, no queries to evaluate on, programs that don't parse.

    Returns:
        The task, with language `tokens` if no program in the user's own files parses in the settings' language.
    """
    needs = [("sft.k", config.sft.k), ("evaluation.k", config.evaluation.k)]
    if config.grpo.enabled:
        needs.append(("grpo.k", config.grpo.k))
    for own, given in needs:
        field, k = (own, given) if given else ("model.k", config.model.k)
        if len(task.pool) < k + (own != "evaluation.k"):  # a training query never retrieves itself
            own_one = "" if own == "evaluation.k" else ": a training question can't pick its own example"
            raise PoolError(f"the pool has {len(task.pool)} examples, too few for {field} = {k}{own_one}")
    spec = replace(task.spec, language=_language_of(config.data, task.pool, task.spec))
    split = config.evaluation.split
    queries = task.held_out(split)
    if not queries:
        how = "set data.dev or data.dev_size" if split == "dev" else "set data.test, or evaluation.split: dev"
        raise ConfigError(f"there are no {split} queries to evaluate on: {how}")
    if all(spec.tree(query.target) is None for query in queries):
        raise DataError(
            f"none of the {len(queries)} {split} queries has a program that parses as '{spec.language}', so nothing "
            "can be compared on them: set program.language (tokens reads any text), or check the programs"
        )
    return replace(task, spec=spec)


def compared(config: Settings, task: Task | None = None) -> list[str]:
    """The names of the selectors that the trained retriever is compared with, on this task's questions.

    Without a task, questions count as having no schema: the one selector for schemas opens and asks nothing anyway.
    """
    evaluation = config.evaluation
    if evaluation.selectors is not None:
        return evaluation.selectors
    queries = [] if task is None else task.held_out(evaluation.split)
    wanted = {
        NO_EXAMPLES: evaluation.asks(config.llm),
        OF_SCHEMAS: any(query.fields.get("schema") for query in queries),
    }
    return [name for name in USUAL if wanted.get(name, True)]


def say_data(data: DataSettings, split: Split, spec: ProgramSpec) -> None:
    """Log what the data hold (one line for the user's own files), and what test and training data share."""
    files = [path for path in (data.train, data.dev, data.test) if path is not None]
    if files:
        checks = check_files(files, Keys(data.source_key, data.target_key, data.id_key), spec)
        level = logging.WARNING if any(finding.fix for check in checks for finding in check.findings) else logging.INFO
        logger.log(level, "%s", in_one_line(checks))
        return
    for check in check_split(split, spec):
        for finding in check.findings:
            logger.log(logging.WARNING if finding.fix else logging.INFO, "%s: %s", check.name, finding.text)


def _language_of(data: DataSettings, pool: Sequence[Example], spec: ProgramSpec) -> str:
    """The language that the pool's programs are read in; see `check_task`."""
    language, broken = spec.language, unparsed(pool, spec)
    if len(broken) < len(pool):
        if broken and data.train is None:  # else `say_data` reports this
            logger.warning(
                "%d of %d programs don't parse as '%s' (id %s first): they stay in the pool, cover nothing and train "
                "nothing",
                *(len(broken), len(pool), language, broken[0]),
            )
        return language
    first = " ".join(pool[0].target.split())[:80]
    if data.task != "files":
        raise DataError(f"no program of the pool parses with program.language = '{language}' (the first: {first})")
    best, counts = guess_language([example.target for example in pool])
    hint = "" if best == TOKENS else f"; {counts}: set program.language: {best}"
    logger.warning(
        "none of the %d programs parses as '%s' (the first is '%s'): token n-grams stand for structures%s",
        *(len(pool), language, first, hint),
    )
    return TOKENS


def build_reward(config: Settings, spec: ProgramSpec) -> Reward:
    """GRPO's reward; a `ConfigError` if there is no such reward, or its database can't be opened."""
    check_hidden(config, "reward")
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


def build_execution(config: Settings, spec: ProgramSpec) -> Reward | None:
    """The reward that compares programs by their results; None if the settings name neither database nor executor."""
    settings = config.reward
    if settings.database is None and settings.executor is None:
        return None
    alone = settings.model_copy(update={"names": ["execution"], "weights": []})
    return build_reward(config.model_copy(update={"reward": alone}), spec)


def answers_file(config: Settings) -> Path:
    """Where a run's answers are kept: beside its folder, for all runs there."""
    return config.llm.cache or config.folder.parent / "answers.sqlite"


def account(config: Settings) -> str:
    """The name under which a run's spending is booked."""
    return str(config.folder.resolve())


def open_language_model(config: Settings, task: Task, *, keep: bool = True) -> LanguageModel:
    """The model that answers prompts, to be closed by the caller; its cost is booked under the run's folder.

    With `keep`, answers go to a file beside the run folder, for all runs; else only check that they could.
    """
    check_hidden(config, "llm")
    cache = answers_file(config)
    if not keep:
        check_cache(cache)
    return open_llm(
        config.llm, cache if keep else None, language=task.spec.language, prompt=config.prompt, account=account(config)
    )
