"""The `structure` family: represents an example by its program's structures, a question by those it will need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from langchain_rcr.basics.items import Item
from langchain_rcr.errors import InputError
from langchain_rcr.families.base import AUTO, DEFAULT_BASE, Encoders, Family, ModelSettings
from langchain_rcr.families.state import AdditiveState

if TYPE_CHECKING:
    from langchain_rcr.basics.rows import IntArray
    from langchain_rcr.families.encoding import Backbone
    from langchain_rcr.families.folds import Folds
    from langchain_rcr.families.structure.needs import Needs, NumpyNeedEncoder
    from langchain_rcr.programs import ProgramSpec

FADE, FADE_OF_MANY = 4.0, 2.0
"""p (`State`); the second is for examples with homes."""
LENGTH_PENALTY, WORDING, HOME = 1.0, 0.05, 0.3
"""α, ω and the weight of a shared home; chosen, as p was, by results on held-out questions (docs/results.md)."""
COST, COST_OF_MANY = 0.01, 0.05
"""ε (`NeedEncoder`); the second is for examples with homes. The first was the best or nearly so on folds of twelve
tasks (COVR, GeoQuery, SQL of one database). Choosing ε per task on its own folds gave no better test picks on sixteen
tasks. Nor did γ of 0.7 and 0.5 with an ε that suits them. The second was chosen by how many of a language model's rows
were right on folds of Spider (docs/results.md)."""
COLUMNS, COLUMNS_OF_MANY = 1680, 6000
"""The most structures. With the spare columns, 1,680 make the longest vectors that pgvector indexes; no database or
grammar that we know fills them. For many databases they left out a sixth of the labels that Spider's questions need."""
LANDMARKS = 4000
LEAST = 1e-6
"""Smaller numbers are raised to this: a power of 0 has no slope, and 0 no logarithm."""
_GAP = 3
"""Two words of a question count as a pair with at most this many words between them."""


class StructureSettings(ModelSettings):
    """The tri-encoder over local structures (docs/structure.md)."""

    base: str | None = ModelSettings.field("base", DEFAULT_BASE)
    state: str = ModelSettings.field("state", "saturating")
    fade: Annotated[float, Field(ge=1)] | Literal["auto"] | None = ModelSettings.field("fade", AUTO)
    ngrams: int = Field(2, ge=1, le=5, description="Longest n-gram used to compare questions.")
    dim: int | None = Field(
        None,
        ge=1,
        description="Maximum number of structures to tell apart; those that always occur together count as one. null: "
        f"{COLUMNS:,}, or {COLUMNS_OF_MANY:,} if the examples come from several databases.",
    )
    scale: float = Field(1.0, gt=0, description="Factor on the predicted needs.")
    length_penalty: float = Field(
        LENGTH_PENALTY,
        ge=0,
        le=2,
        description="Family structure: α. What an example covers is divided by the norm of its structures to this "
        "power; at 1, the program that is just what the question needs weighs most.",
    )
    words: float = Field(
        WORDING,
        ge=0,
        description="Family structure: ω, the weight of all the words that an example's question shares with the one "
        "asked, relative to a program that is just what is needed.",
    )
    home: float = Field(
        HOME,
        ge=0,
        description="Family structure: the weight of an example from the question's own database (data.prefer), on the "
        "same scale; 0: none.",
    )
    landmarks: int = Field(
        LANDMARKS,
        ge=1,
        description="Family structure: maximum number of training questions that a question is compared with; more are "
        "sampled. The fit's time grows with its cube, its memory with its square.",
    )
    implied: bool = Field(
        True, description="Family structure: tell apart values that most questions imply without naming them."
    )


class StructureFamily(Family):
    """See the module."""

    name = "structure"
    summary = "represents examples by their programs' structures, questions by those they will need"
    Settings = StructureSettings
    encoders = (f"{__name__}.encoders:NeedEncoder", *(f"{__name__}.encoders:ProgramEncoder",) * 2)
    numpy_encoders = (f"{__name__}.needs:NumpyNeedEncoder", *(f"{__name__}.shown:NumpyProgramEncoder",) * 2)
    training: ClassVar = {
        "sft": {"epochs": 0, "lr": 1e-3, "temperature": 5.0},
        "grpo": {"lr": 1e-5, "train_candidates": False, "chunk": 128},
    }
    fits = frozen = structured = takes_drafts = True
    changes: ClassVar = (
        {"fade": 2.0},
        {"fade": 4.0},
        {"fade": 6.0},
        {"words": 0.02},
        {"words": 0.5},
        {"home": 0.1},
        {"home": 1.0},
        {"cost": 0.05},
        {"cost": 0.01},
        {"cost": 0.2},
        {"length_penalty": 2.0},
        {"fade": 1.0},
        {"label": 3.0},
        {"label": 20.0},
        {"fade": None},
        {"order": "picked"},
        {"length_penalty": 0.5},
    )

    def build(
        self,
        items: Sequence[Item],
        settings: StructureSettings,
        *,
        backbone: Backbone | None = None,
        spec: ProgramSpec,
        seed: int,
        numpy: bool = False,
    ) -> Encoders:
        """See `Family.build`; nothing is random before `fit`."""
        from langchain_rcr.families.ngrams import NgramVocabulary
        from langchain_rcr.families.structure.homes import HOMES
        from langchain_rcr.families.structure.inventory import Inventory
        from langchain_rcr.programs import implied_values

        questions = NgramVocabulary.fit([Item(item.source) for item in items], settings.ngrams, gap=_GAP)
        if settings.implied:
            spec = replace(spec, implied=implied_values([(item.source, item.target) for item in items], spec))
        homes = HOMES if any(item.home for item in items) else 0
        most = settings.dim or (COLUMNS_OF_MANY if homes else COLUMNS)
        inventory = Inventory.fit(spec, [item.target for item in items], max(1, most - homes))
        if not any(spec.structures(item.target) for item in items):
            raise InputError(
                f"none of {len(items)} programs parses as '{spec.language}': the structure family reads programs"
            )
        need, _, program = self.kinds(numpy=numpy)
        covering = -settings.scale if settings.state == AdditiveState.name else 1.0
        return (
            need(
                inventory,
                questions,
                backbone,
                scale=settings.scale,
                words=settings.words,
                home=settings.home,
                homes=homes,
                most=settings.landmarks,
            ),
            program(inventory, scale=covering, context=True, homes=homes),
            program(inventory, length_penalty=settings.length_penalty, homes=homes),
        )

    def fit(self, encoder: NumpyNeedEncoder, questions: Sequence[Item], *, seed: int) -> None:
        """See `Family.fit`."""
        from langchain_rcr.families.structure.fit import fit

        fit(encoder, questions, seed=seed)

    def begin(self, encoder: NumpyNeedEncoder, questions: Sequence[Item], *, seed: int) -> None:
        """See `Family.begin`."""
        from langchain_rcr.families.structure.fit import begin

        begin(encoder, questions, seed=seed)

    def vary(self, encoders: Any, settings: StructureSettings, changes: Mapping[str, Any]) -> StructureSettings:
        """See `Family.vary`; also the weight of a single `label`, and ε, the `cost` of what isn't needed."""
        query, _, candidate = encoders
        named = {name: value for name, value in changes.items() if name not in ("label", "cost")}
        changed: StructureSettings = super().vary(encoders, settings, named)
        candidate.length_penalty = changed.length_penalty
        for name, array in _logarithms(query).items():
            if name in changes:
                new = query.tensors()[array].copy()
                new.reshape(-1)[:1] = math.log(max(changes[name], LEAST))
                query.put({array: new})
        return changed

    def fade(self, encoders: Any) -> float:
        """See `Family.fade`."""
        return FADE_OF_MANY if encoders[0].homes else FADE

    def changes_to(self, encoders: Any, settings: StructureSettings) -> Sequence[Mapping[str, Any]]:
        """See `Family.changes_to`; omits numbers that are set already, and the weight of homes where there are none."""
        now = {name: round(number, 6) for name, number in self.numbers(encoders, settings).items()}
        changes = [change for change in self.changes if not change.items() <= now.items()]
        return [change for change in changes if encoders[0].homes or "home" not in change]

    def numbers(self, encoders: Any, settings: StructureSettings) -> dict[str, float]:
        """See `Family.numbers`: λ, p, α and ω, and those of `vary`."""
        query, kept = encoders[0], encoders[0].tensors()
        learnt = {name: math.exp(kept[array].flat[0]) for name, array in _logarithms(query).items()}
        named = {"fade": float(settings.fade or 0), "length_penalty": settings.length_penalty}
        numbers = {**super().numbers(encoders, settings), **named, **learnt}
        return {name: number for name, number in numbers.items() if number > 2 * LEAST}

    def held_out(self, encoder: NumpyNeedEncoder, questions: Sequence[Item], folds: Folds, ways: IntArray) -> Needs:
        """See `Family.held_out`."""
        from langchain_rcr.families.structure.fit import held_out

        return held_out(encoder, questions, folds, ways)


def _logarithms(query: Any) -> dict[str, str]:
    """The names that `vary` uses → the arrays of E_x whose first number is the logarithm."""
    return {"label": "by_size", "cost": "cost", "words": "wording"} | ({"home": "homing"} if query.homes else {})
