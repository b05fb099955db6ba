"""The runs behind a table: which are missing, the most they cost, and their results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, reduce
from itertools import groupby, product
from operator import add
from pathlib import Path
from typing import Any

from langchain_rcr.errors import InputError
from langchain_rcr.families import get_family
from langchain_rcr.families.base import PAPER_FAMILY
from langchain_rcr.families.model_files import model_folder
from langchain_rcr.policy.prompt import arranged
from rcr_trainer import baselines, pipeline
from rcr_trainer.errors import ConfigError
from rcr_trainer.evaluation.budget import estimate
from rcr_trainer.evaluation.harness import spread
from rcr_trainer.evaluation.report import EvaluationReport, read_picks
from rcr_trainer.llm.cache import Estimate
from rcr_trainer.llm.faults import BudgetExceeded, TooLongError, UnscoredError
from rcr_trainer.llm.settings import LLMSettings
from rcr_trainer.paper.splits import split_settings
from rcr_trainer.paper.tables import ALONE, GRPO, PAPER, REST, Row, Table, Variant, name_of, published
from rcr_trainer.runs.folder import Run
from rcr_trainer.runs.layers import checked, load_config, merged
from rcr_trainer.runs.tasks import compared, divide, load_split, open_language_model
from rcr_trainer.settings import Settings
from rcr_trainer.training.registry import SFTSettings

# Appendix A: 110 questions are held out for GRPO; COVR and the standard split have no development questions.
_DEFAULTS: dict[str, Any] = {"data": {"dev_size": 0}, "grpo": {"queries": 110}}
_OF_THE_SPLIT = ("split", "directory", "train", "dev", "test", "corpus", "ids")
"""Settings of the data that the split determines itself."""
_OF_A_FAMILY = ("model", "sft", "grpo")
_COSTS = ("queries", "batch_size", "group_size", "epochs", "max_steps")
"""GRPO's settings that hold for every family."""
_OF_SFT = ("threads", "data", "program", "model", "sft")
_TRAINED = Variant(GRPO, ALONE, {})  # the policy that some variants only evaluate
_FEW, _MOST = 3, 64  # prompts that measure the language model's speed: at least _FEW at a time, _MOST in all


@dataclass(frozen=True, slots=True)
class Cell:
    """One run; without a variant, only SFT's policy, which variants share."""

    split: str
    seed: int
    variant: Variant | None
    config: Settings

    @property
    def until(self) -> str:
        """The last stage."""
        return "sft" if self.variant is None else "evaluation"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table in one run."""

    row: Row
    split: str  # of the run
    seed: int  # of the run
    metrics: Mapping[str, float | None]  # the figures of `SelectorScores` by name
    # By the id of each answered question, the key of its program and whether the answer is exact.
    answered: Mapping[str, tuple[str, bool]]


@dataclass(frozen=True)
class Sweep:
    """All runs of a table, each in its own folder under one folder, with one file of answers."""

    table: Table  # of TABLES
    splits: Sequence[str]  # their names (`split_settings`)
    seeds: Sequence[int]  # of the runs
    folder: Path  # for the runs
    data: Path  # folder of the corpora
    settings: Mapping[str, Any] = field(default_factory=dict)  # the command's, by section; variants override them
    selectors: Sequence[str] | None = None  # the rows to show beside the reference, by name; None: all
    limit: int | None = None  # in a trial, about how many answers each part of a run asks for (`trial`)
    _unscored: dict[str, str] = field(default_factory=dict, init=False)

    @cached_property
    def cells(self) -> list[Cell]:
        """Every run, each after those that it starts from."""
        cells: dict[Path, Cell] = {}
        for split, seed in product(self.splits, self.seeds):
            for cell in self._of(split, seed):
                cells.setdefault(cell.config.folder, cell)
        if not cells:
            raise ConfigError(next(iter(self._omitted.values()), "no run is left"))
        return list(cells.values())

    def missing(self) -> list[Cell]:
        """The runs that don't exist, or lack answers."""
        return [cell for cell in self.cells if not pipeline.is_done(cell.config, cell.until)]

    def run(self) -> Iterator[Cell]:
        """Do every missing run; yields each before it begins.

        A variant is left out if its own reward needs scores that the language model doesn't give. If a run fails, what
        is done stays done.
        """
        for cell in self.missing():
            yield cell
            try:
                pipeline.resumed(cell.config, cell.until)
            except UnscoredError as error:
                if cell.variant is None or "reward" not in cell.variant.settings:
                    raise
                self._unscored.update({row.label: str(error) for row in cell.variant.rows.values()})

    def outcomes(self) -> list[Outcome]:
        """The results of the finished runs, row by row."""
        hidden = set() if self.selectors is None else set(baselines.BASELINES) - set(self.selectors)
        outcomes = []
        for cell, variant, report in self._reports():
            picks = read_picks(cell.config.folder)
            for selector, scores in report.selectors.items():
                if (row := _row(variant, selector)) is None or selector in hidden:
                    continue
                metrics = {key: each for key, each in asdict(scores).items() if not isinstance(each, str | list | dict)}
                metrics["pick_seconds"] = scores.latency_batch_ms * report.n / 1000
                own = ((each, each.selectors[selector].exact) for each in picks)
                answered = {each.id: (each.program, exact) for each, exact in own if exact is not None}
                outcomes.append(Outcome(row, cell.split, cell.seed, metrics, answered))
        return outcomes

    def _reports(self) -> Iterator[tuple[Cell, Variant, EvaluationReport]]:
        """The runs whose comparison exists, even if a budget left it without some answers."""
        for cell in self.cells:
            if cell.variant is not None and pipeline.is_done(cell.config, cell.until, unpaid=True):
                yield cell, cell.variant, EvaluationReport.read(cell.config.folder)

    def left_out(self) -> dict[str, str]:
        """The rows that the table lacks, or has without answers, with the reason."""
        found = self._omitted | self._unscored
        for _, variant, report in self._reports():
            found |= {name_of(name): reason for name, reason in report.left_out.items()}
            if report.answers is not None and report.answers.missing:
                rows = [_row(variant, name) for name, own in report.selectors.items() if own.exact_match is None]
                found |= {row.label: report.answers.missing for row in rows if row is not None}
        return found

    # ------------------------------------------------------------------ what the settings rule out

    @cached_property
    def _omitted(self) -> dict[str, str]:
        """The rows of variants that can't be run, and of selectors that can't be compared, with the reason."""
        found = {name_of(name): reason for name in self._compared if (reason := self._unlearned(name))}
        for variant in self._variants:
            if reason := self._undone(variant):
                found |= {row.label: reason for name, row in variant.rows.items() if name != REST}
        return found

    @cached_property
    def _variants(self) -> list[Variant]:
        """The variants of the table that have a row to show."""
        own = self._given(self.table.variants[0])["model"]["family"]
        variants = [variant for variant in self.table.variants if variant.family != own]
        if all(REST not in variant.rows or self._undone(variant) for variant in variants):
            # Then the other selectors are compared in the run of the other family.
            others = {REST: Row("{}")}
            variants = [replace(v, settings={}, rows={**v.rows, **others}) if v.family else v for v in variants]
        if self.selectors is None:
            return variants
        labels = {self.table.reference, *map(name_of, self.selectors)}
        rows = [{row.label for row in variant.rows.values()} for variant in variants]
        every = set().union(*rows)
        for name in self.selectors:
            if not self.table.selectors or (name not in baselines.BASELINES and name_of(name) not in every):
                own = [name for name in published()["selectors"] if name_of(name) in every]
                known = ", ".join([*own, *baselines.BASELINES]) if self.table.selectors else "none in this table"
                raise ConfigError(f"--selectors: there is no row '{name}' (known: {known})")
        return [each for each, has in zip(variants, rows, strict=True) if REST in each.rows or has & labels]

    @cached_property
    def _compared(self) -> list[str]:
        """The selectors that the table compares with ours, unless the settings name others."""
        if self.selectors is not None:
            return [name for name in baselines.BASELINES if name in self.selectors]
        return [] if "selectors" in self.settings.get("evaluation", {}) else list(self.table.selectors)

    def _undone(self, variant: Variant) -> str:
        """Why a variant can't be run; empty if it can."""
        if variant.settings.get("reward", {}).get("names") == ["likelihood"] and self._no_scores:
            return self._no_scores
        model = dict(self._given(variant)["model"])
        reason = _unopened(get_family(model.pop("family")).settings(**model).pretrained)
        return reason and f"--model.base names another model, such as a folder: {reason}"

    def _unlearned(self, selector: str) -> str:
        """Why a selector can't be compared; empty if, going by the settings, it can."""
        baseline: Any = baselines.get_baseline(selector)
        if "encode" in baseline.needs:
            return _unopened(self.settings.get("evaluation", {}).get(selector) or baseline.base)
        return self._no_scores if "score" in baseline.needs else ""

    @cached_property
    def _no_scores(self) -> str:
        """Why nothing can learn from the language model's scores; empty if it may give any."""
        llm = LLMSettings.model_validate(self.settings.get("llm", {}))
        if llm.given and llm.scores:
            return ""
        who = "a chat model doesn't give" if llm.kind == "chat" else "only a language model gives"
        return f"needs log-likelihoods, which {who}"

    # ------------------------------------------------------------------ the settings of a cell

    def _given(self, variant: Variant) -> dict[str, Any]:
        """The command's settings that apply to a variant, over the paper's settings if its family is the paper's."""
        few = {} if self.limit is None else trial(self.limit)
        given = {name: own for name, own in self.settings.items() if not (variant.family and name in _OF_A_FAMILY)}
        if variant.family:
            costs = {name: value for name, value in self.settings.get("grpo", {}).items() if name in _COSTS}
            return merged(few, given, {"model": {"family": variant.family}, "grpo": costs})
        family = self.settings.get("model", {}).get("family") or PAPER_FAMILY
        return merged(PAPER if family == PAPER_FAMILY else {}, few, given, {"model": {"family": family}})

    def _of(self, split: str, seed: int) -> Iterator[Cell]:
        """The runs of one split and seed."""
        where = split_settings(split, self.data, self.folder / "splits", seed)
        geoquery = where["data"]["task"] == "geoquery"
        names = [name for name in self._compared if not self._unlearned(name)]
        # Programs as the paper prints them (appendix D).
        printed: dict[str, Any] = {"data": {"anonymize_values": True}} if geoquery else {}
        usual = merged(_DEFAULTS, printed, {"evaluation": {"selectors": names}})
        for variant in self._variants:
            if self._undone(variant):
                continue
            given = self._given(variant)
            for name in (*_OF_THE_SPLIT, *(() if geoquery else ("anonymize_values",))):
                given.get("data", {}).pop(name, None)
            if self.selectors is not None:
                given.get("evaluation", {}).pop("selectors", None)
            # The command may override what a split sets besides its data.
            common = merged(where, usual, given, {"data": where["data"], "grpo": {"enabled": True}})
            yield from self._begun_and(variant, split, seed, common)

    def _begun_and(self, variant: Variant, split: str, seed: int, common: Mapping[str, Any]) -> Iterator[Cell]:
        """The run of a variant, after those that it starts from."""
        settings = merged(common, variant.settings)
        if variant.start == "sft":
            # Its settings hold only what the shared policy depends on.
            kept = {name: settings[name] for name in _OF_SFT if name in settings}
            before = self._checked(split, seed, "sft", merged(kept, _untouched(settings)))
            yield Cell(split, seed, None, before)
            settings = merged(settings, _from(before.folder))
        elif variant.start == "trained":
            trained = list(self._begun_and(_TRAINED, split, seed, common))
            yield from trained
            settings = merged(settings, _untouched(settings), _from(trained[-1].config.folder / "checkpoint"))
        yield Cell(split, seed, variant, _compared_before(self._checked(split, seed, variant.name, settings)))

    def _checked(self, split: str, seed: int, variant: str, settings: Mapping[str, Any]) -> Settings:
        name = f"{split}-{seed}-{variant}"
        return checked({**settings, "name": name, "output": str(self.folder / name), "seed": seed})


def trial(limit: int) -> dict[str, Any]:
    """Settings with which each part of a run (a row, GRPO, the race, a learner) asks for about `limit` answers."""
    few = max(1, limit // 8)
    return {
        "sft": {"max_steps": 1},
        "grpo": {"batch_size": few, "group_size": 8, "max_steps": 1, "race": limit, "best_by": "coverage"},
        "baselines": {"queries": few, "candidates": 8, "sets": 8, "epochs": 1},
        "evaluation": {"answer_queries": limit},
    }


def _from(start: Path) -> dict[str, Any]:
    """Settings with which a run starts from an existing policy, whether or not that had SFT."""
    return {"sft": {"checkpoint": str(start), "enabled": True}}


def _untouched(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with which GRPO leaves the policy unchanged and asks no model; its questions stay held out."""
    queries = settings.get("grpo", {}).get("queries")
    # Without SFT only settings with GRPO are valid.
    if queries is None and SFTSettings(enabled=settings.get("sft", {}).get("enabled", True)).enabled:
        return {"grpo": {"enabled": False}}
    grpo = {"enabled": True, "queries": queries, "epochs": 0, "race": 0, "best_by": "coverage"}
    return {"grpo": grpo, "reward": {"names": ["context_coverage"], "weights": []}}


def _compared_before(config: Settings) -> Settings:
    """The settings with the selectors of the existing run, if it is done and those include all that are wanted."""
    files = [config.folder / name for name in ("run.json", "config.yaml")]
    if not all(file.is_file() for file in files) or not Run.open(config.folder, trust=True).done("evaluation"):
        return config
    there = load_config(files[1], environ={})
    if not set(compared(there)) >= set(compared(config)):
        return config
    selectors = {"selectors": there.evaluation.selectors}
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update=selectors)})


@cache
def _unopened(base: str | None) -> str:
    """Why a pretrained model can't be opened; empty if it can, or if there is none to open."""
    from langchain_rcr.families.pooled import PooledTransformer

    if base is None or base.startswith("langchain:"):
        return ""
    try:
        PooledTransformer(base, offline=not (Path(model_folder(base)).is_dir() or _hub_answers()))
    except InputError as error:
        return str(error)
    return ""


@cache
def _hub_answers() -> bool:
    """Whether the hub can be reached; without a network its client would try for over a minute to open each model."""
    from huggingface_hub import constants
    from huggingface_hub.utils import http_backoff  # type: ignore[attr-defined]  # imported there lazily

    try:
        http_backoff("HEAD", constants.ENDPOINT, max_retries=2, timeout=10)
    except Exception:  # requests' or httpx's, by the client's version
        return False
    return True


def _row(variant: Variant, selector: str) -> Row | None:
    row = variant.rows.get(selector) or variant.rows.get(REST)
    name = name_of(selector)
    return None if row is None else Row(row.label.format(name), row.series.format(name), row.x)


def budget(cells: Sequence[Cell]) -> Estimate | None:
    """The most that these runs' language model costs (kept and shared answers cost nothing); None: none is asked."""
    asking = (cell.config for cell in cells if cell.variant and cell.config.llm.given)
    costs: list[Estimate] = []
    with ExitStack() as open_models:
        llm = None
        for (data, seed), configs in groupby(asking, lambda config: (config.data, config.seed)):
            split = load_split(data, seed)
            for config in configs:
                task = divide(config, split)
                llm = llm or open_models.enter_context(open_language_model(config, task, keep=False))
                costs += estimate(config, task, llm).values()
    return reduce(add, costs) if costs else None


def pace(cells: Sequence[Cell]) -> float | None:
    """Seconds per answer, measured on a few of these runs' prompts, whose answers are kept; None if none is asked."""
    asking = (cell.config for cell in cells if cell.variant and cell.config.evaluation.asks(cell.config.llm))
    if (config := next(asking, None)) is None:
        return None
    task, k = divide(config, load_split(config.data, config.seed)), config.k
    plain = (baselines.get_baseline(name) for name in compared(config, task))
    selector = next((each for each in plain if each.shows and not each.needs), None)
    few = max(_FEW, config.llm.concurrency)
    asked = [task.test[at] for at in spread(len(task.test), config.evaluation.answer_queries or _MOST)]
    picks: Any = [range(k)] * len(asked)
    if selector is not None:
        pool = [{"source": each.source, "target": each.target} for each in task.pool]
        picks = selector(pool).pick([query.source for query in asked], k)
    shown = [arranged([task.pool[at] for at in own], "reversed") for own in picks]
    prompts = [config.prompt.request(e, each.source, each.fields) for e, each in zip(shown, asked, strict=True)]
    with open_language_model(config, task) as llm:
        for start in range(0, len(asked), few):
            begun = time.perf_counter()
            try:
                llm.generate(prompts[start : start + few])
            except (BudgetExceeded, TooLongError):
                return None
            if llm.stats.paid:
                return (time.perf_counter() - begun) / llm.stats.paid
    return None
