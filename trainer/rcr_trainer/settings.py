"""The settings of a run as a pydantic model; the docstrings of its fields are the help texts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from langchain_rcr.basics.items import MARKS, home_field
from langchain_rcr.basics.section import OneOf, Section, contradiction, matching, show
from langchain_rcr.families import DEFAULT_FAMILY, ModelSettings, families, family_names, get_family
from langchain_rcr.policy.prompt import Prompt
from langchain_rcr.programs import get_parser
from rcr_trainer import baselines
from rcr_trainer.baselines import LearnedSettings
from rcr_trainer.llm.settings import Device, LLMSettings
from rcr_trainer.training.registry import GRPOSettings, SFTSettings


class DataSettings(Section, use_attribute_docstrings=True):
    """Where the examples come from."""

    task: Literal["covr", "geoquery", "files"] = "covr"
    """covr: sampled from its grammar; geoquery: read from its corpus; files: your own examples."""
    split: str = "110"
    """covr: the number of one of the ten splits; geoquery: standard, template_1 to 3, tmcd_1 to 3 or length (template
    and tmcd mean the first of theirs)."""
    directory: Path | None = None
    """A split folder, such as the data/ of an earlier run, to use instead of a task's examples."""
    train: Path | None = None
    """task files: the pool and the training queries (JSONL, JSON, CSV, TSV or Parquet)."""
    dev: Path | None = None
    """task files: development queries; null: taken from train, see dev_size."""
    test: Path | None = None
    """task files: held-out queries."""
    corpus: Path | None = None
    """task geoquery: corpus.xml; null: downloaded."""
    ids: Path | None = None
    """task geoquery: JSON file with the train and test ids; null: the published ones, downloaded beside the corpus."""
    anonymize_values: bool = False
    """task geoquery: write programs and questions as the paper prints them, with stateid('value') for stateid('texas')
    (paper: yes, appendix D); false: as in the corpus."""
    source_key: str = Field("source", min_length=1)
    """task files: key or column of the question."""
    target_key: str = Field("target", min_length=1)
    """task files: key or column of the program."""
    id_key: str | None = None
    """task files: key or column of the id; null: the row number."""
    group: str | None = None
    """Key or column, such as db_id, that restricts the picks: a question gets only examples with its own value, in
    training, in the comparison and when serving. null: any example."""
    prefer: str | None = None
    """Key or column, such as db_id: examples that share the question's value are preferred. model.home says how much;
    the race may change it. null: db_id, if the examples have it, it varies, and group is not set; "": none."""
    dev_size: int | None = Field(None, ge=0)
    """Without dev examples, this many training queries serve for development. They stay in the pool, but none
    retrieves itself. null: a fifth, at most 200."""
    train_size: int = Field(3000, ge=1)
    """task covr: number of training pairs to sample (paper 3000, appendix A)."""
    test_size: int = Field(500, ge=1)
    """task covr: number of test pairs to sample (paper 500, appendix A)."""

    @property
    def public(self) -> list[str]:
        """The public data sets that a model card may name."""
        return [] if self.task == "files" else [self.task]

    def home_field(self, fields: Iterable[Mapping[str, Any]]) -> str | None:
        """The field that `prefer` means for these examples; null means none beside a group, which allows no others."""
        return home_field("" if self.group and self.prefer is None else self.prefer, fields)

    @model_validator(mode="after")
    def _agree(self) -> DataSettings:
        owners = dict.fromkeys(("train", "dev", "test"), "files")
        owners |= dict.fromkeys(("corpus", "ids", "anonymize_values"), "geoquery")
        for field, task in owners.items():
            value = getattr(self, field)
            if value and self.task != task:
                raise contradiction(f"data.{field}", value, "data.task", self.task, f"set data.task: {task}")
            if isinstance(value, Path) and self.directory is not None:
                raise contradiction(f"data.{field}", value, "data.directory", self.directory, "keep one")
        if self.source_key == self.target_key:
            advice = "question and program are two fields"
            raise contradiction("data.source_key", self.source_key, "data.target_key", self.target_key, advice)
        if self.task == "files" and self.train is None and self.directory is None:
            raise ValueError("data.task = 'files' needs data.train (a file of your own) or data.directory")
        wanted = {"covr": r"\d+", "geoquery": "standard|(template|tmcd)(_[123])?|length"}.get(self.task)
        if wanted is not None and self.directory is None and re.fullmatch(wanted, self.split) is None:
            names = "a number" if self.task == "covr" else "standard, template, tmcd, length"
            raise contradiction("data.split", self.split, "data.task", self.task, f"its splits are named by {names}")
        return self


class ProgramSettings(Section, use_attribute_docstrings=True):
    """How programs are read, and which of their parts count (paper appendix B)."""

    language: str = "functional"
    """functional (FunQL, COVR), sexpr, sql, sql:DIALECT (a sqlglot dialect), json, python, set or tokens. tokens reads
    any text as words, numbers and symbols; it is used if no program in your own files parses."""
    anonymize: bool | Literal["names"] = True
    """Replace strings and numbers with placeholders (paper: yes). names: table and column names, too, so that questions
    about one database find examples from others (language sql)."""
    max_size: int = Field(4, ge=1, le=8)
    """Largest local structure, l (paper 4, section 4 "Model setup")."""

    @model_validator(mode="after")
    def _agree(self) -> ProgramSettings:
        if self.anonymize == "names" and not hasattr(get_parser(self.language), "shape"):
            advice = "its programs have no tables and columns"
            raise contradiction("program.anonymize", "names", "program.language", self.language, advice)
        return self


def _of_its_family(values: Any) -> Any:
    """Parse the section `model` as its family's settings; null stands for the family's default."""
    if not isinstance(values, Mapping):
        return values
    name = values.get("family") or DEFAULT_FAMILY
    given = {key: value for key, value in values.items() if value is not None}
    if name not in family_names():
        return given  # rejected by the field's own check
    model = get_family(name).Settings
    for key in given.keys() - model.model_fields.keys():
        owners = [family.name for family in families() if key in family.Settings.model_fields]
        if owners:
            raise contradiction(f"model.{key}", given[key], "model.family", name, f"a setting of {', '.join(owners)}")
    return model.model_validate({**given, "family": name})


class RewardSettings(Section, use_attribute_docstrings=True):
    """What GRPO rewards."""

    names: list[str] = Field(["structure_coverage"], min_length=1)
    """structure_coverage (Jaccard similarity of the structures of answer and gold program, Eq. 6), correctness (exact
    match, appendix F), execution (same result), likelihood (probability of the gold program; needs llm.kind local or a
    completion server with echo or grammar), context_coverage (recall of the picks; asks no language model), or your own
    as module:callable. Several are added up."""
    weights: list[Annotated[float, Field(gt=0)]] = Field([])
    """One weight per name; empty: 1 each."""
    database: str | None = None
    """execution: a SQLite file or postgresql://…, opened read-only whatever the program says. For many databases, a
    folder with {db_id}/{db_id}.sqlite, or a template such as data/{tenant}.sqlite, filled in with each question's
    fields."""
    executor: str | None = None
    """execution: module:callable that runs a program, instead of a database."""
    timeout: float = Field(5.0, gt=0)
    """execution on a database: time limit per program in seconds."""
    max_rows: int = Field(10_000, ge=1)
    """execution on a database: maximum rows a program may return."""

    @model_validator(mode="after")
    def _agree(self) -> RewardSettings:
        if self.weights and len(self.weights) != len(self.names):
            advice = "give as many weights as names, or none"
            raise contradiction("reward.weights", self.weights, "reward.names", self.names, advice)
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"reward.names = {show(self.names)}: each once")
        return self


class EvaluationSettings(Section, use_attribute_docstrings=True):
    """The comparison on held-out queries."""

    split: Literal["test", "dev"] = "test"
    """Which queries to compare on."""
    k: int | None = Field(None, ge=1)
    """Examples per query in the table; null: as many as the trained policy picks."""
    selectors: list[Annotated[str, OneOf(lambda: dict.fromkeys(baselines.BASELINES, ""))]] | None = Field(
        None,
        description=f"What the trained retriever is compared with: {', '.join(baselines.BASELINES)}; null: "
        f"{', '.join(baselines.USUAL)}, but {baselines.NO_EXAMPLES} only if a language model answers, and "
        f"{baselines.OF_SCHEMAS} only if questions have a field schema.",
    )
    embeddings: str | None = None
    """Model for the selectors that compare embeddings, named like model.base, but not langchain:…; null: model.base."""
    bert: str = "bert-base-uncased"
    """Model for the selector bert, named like model.base."""
    contriever: str = "facebook/contriever"
    """Model for the selector contriever, named likewise."""
    answers: bool | None = None
    """Whether section llm's language model answers with each selector's picks, to measure exact match. null: only if
    that is free (llm.kind local); true: also if it is on a server, which may charge for it."""
    answer_queries: int | None = Field(None, ge=1)
    """How many of the queries the language model answers, evenly spaced; null: all."""

    def asks(self, llm: LLMSettings) -> bool:
        """Whether the comparison asks this language model."""
        return llm.given and (llm.kind == "local" if self.answers is None else self.answers)

    @field_validator("selectors")
    @classmethod
    def _once_each(cls, names: list[str] | None) -> list[str] | None:
        return names and list(dict.fromkeys(names))


_NAME = matching(rf"\w[\w{MARKS}.\-]{{,199}}", "at most 200 letters, digits, '.', '_' and '-'")


class Settings(Section, use_attribute_docstrings=True):
    """All settings of a run."""

    name: Annotated[str, _NAME] = "rcr"
    """Name of the run. If a YAML file sets none, the run is named after the file."""
    output: Path | None = None
    """Run folder; null: runs/NAME."""
    seed: int = Field(0, ge=0)
    """Seed for everything that is drawn at random."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads; null: torch's choice. Too many make a run several times slower."""
    device: Device = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:N, mps."""
    data: DataSettings = Field(default_factory=DataSettings)
    program: ProgramSettings = Field(default_factory=ProgramSettings)
    model: Annotated[SerializeAsAny[ModelSettings], BeforeValidator(_of_its_family)] = Field(
        default_factory=lambda: get_family(DEFAULT_FAMILY).settings()
    )
    sft: SFTSettings = Field(default_factory=SFTSettings)
    grpo: GRPOSettings = Field(default_factory=GRPOSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    llm: LLMSettings = Field(default_factory=LLMSettings)
    prompt: Prompt = Field(default_factory=Prompt)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    baselines: LearnedSettings = Field(default_factory=LearnedSettings)

    @property
    def k(self) -> int:
        """Examples per query in the comparison, unless a race changes the policy's k."""
        return self.evaluation.k or self.model.k

    @property
    def folder(self) -> Path:
        """The run folder: `output`, or runs/NAME."""
        return self.output if self.output is not None else Path("runs") / self.name

    def limit_threads(self) -> None:
        """Limit the CPU threads of torch and, if numpy is not loaded yet, of its linear algebra.

        Limit or not, if torch isn't loaded yet, waiting threads sleep: on a busy machine, spinning slows training
        several-fold.
        """
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if self.threads is None:
            return
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[variable] = str(self.threads)
        import torch

        torch.set_num_threads(self.threads)

    @model_validator(mode="before")
    @classmethod
    def _trained_as_its_family(cls, values: Any) -> Any:
        """Fill in the family's defaults where other sections omit a value or set it to null."""
        if not isinstance(values, Mapping):
            return values
        model = values.get("model")
        name = model.get("family") if isinstance(model, Mapping) else getattr(model, "family", None)
        tables = get_family(name or DEFAULT_FAMILY).training if name in (None, *family_names()) else {}
        filled = dict(values)
        for section, defaults in tables.items():
            given = values.get(section, {})
            if isinstance(given, Mapping):
                missing = {key: value for key, value in defaults.items() if given.get(key) is None}
                filled[section] = {**given, **missing}
        return filled

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        if not self.sft.enabled and not self.grpo.enabled:
            raise contradiction("sft.enabled", False, "grpo.enabled", False, "an untrained policy picks at random")
        if not self.sft.enabled and self.sft.checkpoint is not None:
            raise contradiction("sft.enabled", False, "sft.checkpoint", self.sft.checkpoint, "keep one")
        untaught = self.sft.epochs == 0 and not get_family(self.model.family).fits
        if self.sft.enabled and untaught and self.sft.checkpoint is None:
            advice = "without training it would pick at random"
            raise contradiction("sft.epochs", 0, "model.family", self.model.family, advice)
        if self.prompt.form == "chat" and self.llm.kind in ("completion", "local") and self.llm.given:
            raise contradiction("prompt.form", "chat", "llm.kind", self.llm.kind, "use one with form: text")
        if self.evaluation.answers and not self.llm.given:
            raise contradiction("evaluation.answers", True, "llm.model", None, "name a model")
        return self
