"""From the settings to a run's task: the split, divided into pool and queries, and checked before any training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_rcr.errors import PoolError
from rcr_trainer.errors import ConfigError, DataError
from rcr_trainer.settings import DataSettings, Settings

if TYPE_CHECKING:
    from langchain_rcr.programs import ProgramSpec
    from rcr_trainer.data import Example, Split

logger = logging.getLogger(__name__)

_MOST_DEV = 200
"""Development queries taken out of training by default, at most: coverage on 200 is known to a point or two."""

LANGUAGE = "program_language"
"""The key of a run's split.json for the language that its programs are read by, which may not be the settings'."""

CORPUS = Path("data/geoquery/corpus.xml")
"""Where a downloaded GeoQuery corpus is kept, in the working directory."""


@dataclass(frozen=True, slots=True)
class Task:
    """A split as the stages use it.

    Args:
        pool: the candidates.
        queries: training queries, candidates themselves.
        dev: development queries; where the split brings none, candidates that were taken out of `queries`.
        test: held-out queries.
        reinforced: training queries of GRPO: `queries`, or such as were taken out of the pool for it.
        spec: how programs are read.
    """

    pool: list[Example]
    queries: list[Example]
    dev: list[Example]
    test: list[Example]
    reinforced: list[Example]
    spec: ProgramSpec

    def held_out(self, split: str) -> list[Example]:
        """The queries of "dev" or "test"."""
        return self.dev if split == "dev" else self.test


def load_split(data: DataSettings, seed: int) -> Split:
    """The examples that the settings ask for.

    Args:
        data: task and where its files are.
        seed: of what is sampled or drawn.

    Raises:
        DataError: a file can't be read; named with line and field.
        ConfigError: no such split.
    """
    from rcr_trainer.data import covr_split, geoquery_split, read_split

    if data.directory is not None:
        return read_split(data.directory)
    if data.task == "covr":
        return covr_split(data.split, seed, data.train_size, data.test_size)
    if data.task == "geoquery":
        return geoquery_split(data.corpus or download_corpus(), data.split, data.ids, seed)
    return _split_of_files(data)


def download_corpus(destination: Path = CORPUS) -> Path:
    """The GeoQuery corpus, downloaded unless it is there already.

    Raises:
        DataError: it can't be downloaded, or is not the expected file.
    """
    from rcr_trainer.data import download_geoquery

    if not destination.is_file():
        logger.info("downloading the GeoQuery corpus (1.2 MB, checksum tested) to %s", destination)
        destination.parent.mkdir(parents=True, exist_ok=True)
        download_geoquery(destination)
    return destination


def _split_of_files(data: DataSettings) -> Split:
    from rcr_trainer.data import Example, Split, read_examples

    parts: dict[str, list[Example]] = {"train": [], "dev": [], "test": []}
    for part, path in (("train", data.train), ("dev", data.dev), ("test", data.test)):
        if path is None:
            continue
        examples, report = read_examples(
            path, source_key=data.source_key, target_key=data.target_key, id_key=data.id_key
        )
        logger.info("%s", report.summary())
        # Row numbers start anew in every file.
        prefix = "" if data.id_key else f"{part}-"
        parts[part] = [Example(f"{prefix}{e.id}", e.source, e.target) for e in examples]
    return Split("files", parts["train"], parts["dev"], parts["test"], {"task": "files"})


def divide(config: Settings, split: Split) -> Task:
    """Pool, training, development and test queries of a split.

    Where a split has no dev part, `data.dev_size` training queries, drawn by the seed, become development queries.
    They stay in the pool. With `grpo.queries`, that many of the others are drawn for GRPO alone and leave the pool
    (appendix A).

    Raises:
        ConfigError: that would leave no training queries, or there is no such program language.
    """
    spec = program_spec(config)
    if LANGUAGE in split.meta:
        spec = replace(spec, language=split.meta[LANGUAGE])
    size = config.data.dev_size
    if size is None:
        size = min(_MOST_DEV, len(split.train) // 5)
    dev, queries = split.dev, split.train
    if not split.dev and size:
        dev, queries = _drawn(split.train, size, config.seed, "data.dev_size")
    if not config.grpo.enabled or config.grpo.queries is None:
        return Task(split.train, queries, dev, split.test, queries, spec)
    reinforced, queries = _drawn(queries, config.grpo.queries, [config.seed, 1], "grpo.queries")
    gone = {id(example) for example in reinforced}
    pool = [example for example in split.train if id(example) not in gone]
    return Task(pool, queries, dev, split.test, reinforced, spec)


def _drawn(
    examples: Sequence[Example], size: int, seed: int | list[int], field: str
) -> tuple[list[Example], list[Example]]:
    """`size` examples, drawn by the seed, and the others; both in their original order."""
    import numpy as np

    if size >= len(examples):
        msg = f"{field} = {size} leaves no training queries of {len(examples)}: lower it"
        raise ConfigError(msg)
    is_drawn = np.zeros(len(examples), dtype=bool)
    is_drawn[np.random.default_rng(seed).permutation(len(examples))[:size]] = True
    drawn = [example for example, chosen in zip(examples, is_drawn, strict=True) if chosen]
    return drawn, [example for example, chosen in zip(examples, is_drawn, strict=True) if not chosen]


def check_task(config: Settings, task: Task) -> Task:
    """Find now what would stop the run later, and how its programs are read.

    Returns:
        The task; its programs are read as `tokens` where none of the user's own files is of the settings' language.

    Raises:
        PoolError: fewer candidates than picks.
        DataError: no program of the pool parses though its language is known, or none of the queries to evaluate on.
        ConfigError: there are no queries to evaluate on.
    """
    # A training query never retrieves itself, hence one more than k.
    needs = [("sft.k", config.sft.k, 1), ("evaluation.k", config.evaluation.k, 0)]
    if config.grpo.enabled:
        needs.append(("grpo.k", config.grpo.k, 1))
    for field, k, more in needs:
        if len(task.pool) < k + more:
            msg = f"the pool has {len(task.pool)} examples, too few for {field} = {k}"
            raise PoolError(msg)
    spec = replace(task.spec, language=_language_of(task.pool, task.spec, own=config.data.task == "files"))
    split = config.evaluation.split
    queries = task.held_out(split)
    if not queries:
        how = "set data.dev or data.dev_size" if split == "dev" else "set data.test, or evaluation.split: dev"
        msg = f"there are no {split} queries to evaluate on: {how}"
        raise ConfigError(msg)
    if all(spec.tree(query.target) is None for query in queries):
        msg = (
            f"none of the {len(queries)} {split} queries has a program that parses as '{spec.language}', so nothing "
            "can be compared on them: set program.language (tokens reads any text), or check the programs"
        )
        raise DataError(msg)
    return replace(task, spec=spec)


def _language_of(pool: Sequence[Example], spec: ProgramSpec, *, own: bool) -> str:
    """The language by which the pool's programs are read; see `check_task`."""
    from langchain_rcr.programs import TOKENS
    from rcr_trainer.data import unparsed

    language, broken = spec.language, unparsed(pool, spec)
    if not broken:
        return language
    if len(broken) < len(pool):
        hint = "; set program.language if they are of another" if 2 * len(broken) > len(pool) else ""
        logger.warning(
            "%d of %d programs don't parse as '%s' (id %s first): they stay in the pool, cover nothing and train "
            "nothing%s",
            len(broken),
            len(pool),
            language,
            broken[0],
            hint,
        )
        return language
    first = " ".join(pool[0].target.split())[:80]
    if not own:
        msg = f"no program of the pool parses with program.language = '{language}' (the first: {first})"
        raise DataError(msg)
    logger.warning(
        "none of the %d programs parses as '%s' (the first is '%s'): token n-grams stand for structures; "
        "set program.language if they are of another language",
        len(pool),
        language,
        first,
    )
    return TOKENS


def program_spec(config: Settings) -> ProgramSpec:
    """How programs are read, by the settings alone.

    Raises:
        ConfigError: no such language.
    """
    from langchain_rcr.programs import ProgramSpec, get_parser

    get_parser(config.program.language)
    return ProgramSpec(**config.program.model_dump())
