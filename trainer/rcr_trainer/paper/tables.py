"""Defines each table and figure of the paper: the variants of a run, and which selector goes in which row.

A variant changes the command's settings. Tables share variants: a run left by one table is read by the next.

Departures from the paper: the pool of `train-size` grows as fewer questions are held out for GRPO (the paper may always
have held out 110); times are for picking alone; `shots` also shows ours with many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from langchain_rcr.families import DEFAULT_FAMILY
from rcr_trainer.evaluation.report import OURS, WITHOUT_RL
from rcr_trainer.paper.splits import COVR, GEOQUERY
from rcr_trainer.runs.layers import merged
from rcr_trainer.training.registry import ADVANTAGES

Settings: TypeAlias = Mapping[str, Mapping[str, Any]]  # by section

REST = "*"  # in a variant's rows: all selectors not named there


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table; if it is a point of a figure, also its series and place on the x axis."""

    label: str
    series: str = ""
    x: float | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """A run for every split and seed."""

    name: str  # part of its folder's name
    settings: Settings  # what it changes; these override all others
    # By selector, the row for its figures; REST for all others. Selectors without a row aren't shown.
    rows: Mapping[str, Row]
    # "fresh" trains SFT itself; "sft" shares SFT's policy with other variants of the same data and SFT; "trained" only
    # evaluates the policy of the variant `grpo`.
    start: Literal["fresh", "sft", "trained"] = "sft"
    # Of encoders, with its own settings of model, SFT and GRPO; empty: the command's family, or the paper's.
    family: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the paper, or the table behind a figure."""

    title: str
    variants: Sequence[Variant]  # the runs
    splits: Sequence[str]  # used if the command names none
    reference: str  # the row that intervals compare the others with
    # Metrics that a figure shows against x, with their titles; empty: there is no figure.
    panels: Mapping[str, str] = field(default_factory=dict)
    x: str = ""  # the title of the figure's x axis
    selectors: Sequence[str] = ()  # those compared with ours


@cache
def published() -> dict[str, Any]:
    """The paper's own figures (figures.json): names of splits and selectors, its settings, and its tables."""
    value: dict[str, Any] = json.loads((Path(__file__).parent / "figures.json").read_text(encoding="utf-8"))
    return value


def paper_figure(table: str, row: str, column: str) -> float | None:
    """The paper's figure in a table; None if it has none."""
    own = published()["tables"].get(table, {"columns": [], "rows": {}})
    figures: dict[str, float] = dict(zip(own["columns"], own["rows"].get(row, ()), strict=False))
    return figures.get(column)


def name_of(selector: str) -> str:
    """The paper's name for a selector; our name if the paper doesn't have it."""
    return str(published()["selectors"].get(selector, selector))


PAPER: Settings = published()["settings"]
"""What examples/configs/paper_geoquery.yaml sets besides the defaults of the paper's family."""

_RCR, _WITHOUT_RL, _WITHOUT_SFT = (name_of(name) for name in (OURS, WITHOUT_RL, "rcr_without_sft"))
IN_PLACE = f"{_RCR} ({DEFAULT_FAMILY})"
"""The row of our default family, the reference for comparisons if RCR can't be run."""
_IN_PLACE = {OURS: Row(IN_PLACE), WITHOUT_RL: Row(f"{IN_PLACE} w/o RL")}
_MANY: str = published()["many_shots"]
_EXACT, _PICKING = {"exact_match": "exact match (%)"}, {"pick_seconds": "seconds to pick for all test questions"}
ALONE: dict[str, Any] = {"evaluation": {"selectors": []}}  # settings that compare ours with no other selector
_STEPS, _SHOTS, _SIZES = (1, 2, 3, 4, 6, 8), (10, 20, 100, 150), (10, 20, 40, 60, 80, 100, 110)
_GROUPS = (2, 4, 8, 16, 32, 64)
GRPO = "grpo"  # the variant that most tables have: both stages, and every selector beside them
RIVALS: tuple[str, ...] = tuple(published()["rivals"])  # the selectors of the main table, the paper's first


def _reward(name: str, shown: str = "") -> Variant:
    settings = {"reward": {"names": [name], "weights": []}, **ALONE}
    return Variant(f"grpo-{name}", settings, {OURS: Row(f"{shown or name} reward")})


def _at(series: str, point: str, x: float) -> Row:
    return Row(f"{series}, {point}", series, x)


def _point(name: str, settings: Settings, x: float, start: Literal["fresh", "sft"]) -> Variant:
    """A run of ours alone, as a point of a figure."""
    rows = {OURS: _at(_RCR, name, x), WITHOUT_RL: _at(_WITHOUT_RL, name, x)}
    folder = name.replace(" = ", "").replace(" ", "-")
    return Variant(folder, merged(settings, ALONE), rows, start)


def _shots(k: int) -> Variant:
    rows = {_MANY: _at(name_of(_MANY), f"{k} shots", k), OURS: _at(_RCR, f"{k} shots", k)}
    return Variant(f"shots-{k}", {"evaluation": {"k": k, "selectors": [_MANY]}}, rows, "trained")


TABLES = {
    "main": Table(
        "Exact match of every system",
        [
            Variant(GRPO, {}, {OURS: Row(_RCR), WITHOUT_RL: Row(_WITHOUT_RL), REST: Row("{}")}),
            Variant("without-sft", {"sft": {"enabled": False}, **ALONE}, {OURS: Row(_WITHOUT_SFT)}, "fresh"),
            Variant(DEFAULT_FAMILY, ALONE, _IN_PLACE, "fresh", DEFAULT_FAMILY),
        ],
        (*GEOQUERY, *COVR),
        _RCR,
        selectors=RIVALS,
    ),
    "rl": Table(
        "Advantages",
        [
            Variant(GRPO, {}, {OURS: Row("GRPO"), WITHOUT_RL: Row("w/o RL")}),
            *(
                Variant(f"grpo-{name}", {"grpo": {"advantage": name}, **ALONE}, {OURS: Row(label)})
                for label in published()["tables"]["rl"]["rows"]
                if (name := label.lower()) in ADVANTAGES and label != "GRPO"
            ),
        ],
        GEOQUERY,
        "GRPO",
    ),
    "reward": Table(
        "Rewards",
        [_reward("structure_coverage", "coverage"), _reward("correctness"), _reward("likelihood")],
        GEOQUERY,
        "coverage reward",
    ),
    "shots": Table(
        "Many shots, in testing only",
        [Variant(GRPO, {}, {OURS: _at(_RCR, "4 shots", 4)}), *map(_shots, _SHOTS)],
        ("standard",),
        f"{_RCR}, 4 shots",
        {**_EXACT, "prompt_tokens": "tokens of a prompt"},
        "examples in the prompt",
    ),
    "steps": Table(
        "Steps of retrieval, in training and in testing",
        [_point(f"k = {k}", {part: {"k": k} for part in ("sft", "grpo", "evaluation")}, k, "fresh") for k in _STEPS],
        ("standard",),
        f"{_RCR}, k = 4",
        panels={**_EXACT, **_PICKING},
        x="steps",
    ),
    "train-size": Table(
        "Questions that GRPO trains on",
        [_point(f"{n} questions", {"grpo": {"queries": n}}, n, "fresh") for n in _SIZES],
        ("csl_template_2", *COVR),
        f"{_RCR}, {_SIZES[-1]} questions",
        panels=_EXACT,
        x="questions that GRPO trains on",
    ),
    "group-size": Table(
        "Size of GRPO's groups",
        [_point(f"G = {size}", {"grpo": {"group_size": size}}, size, "sft") for size in _GROUPS],
        ("csl_template_2",),
        f"{_RCR}, G = 32",
        panels=_EXACT,
        x="group size",
    ),
}
"""By their names in `rcr-train paper --table`."""
