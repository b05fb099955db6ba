"""The policy's parameters (section 2.2, Eq. 4): three encoders, a state, λ, τ; saved and loaded as one folder."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from langchain_rcr.errors import CheckpointError, InputError
from langchain_rcr.families._io import digest, read_json
from langchain_rcr.families.base import Encoder, Features
from langchain_rcr.families.embeddings import (
    Backbone,
    EmbeddingsEncoder,
    TransformerBackbone,
    load_backbone,
    save_backbone,
)
from langchain_rcr.families.joined import JoinedEncoder
from langchain_rcr.families.lexical import LexicalEncoder
from langchain_rcr.families.ngrams import NgramVocabulary
from langchain_rcr.families.structure.encoders import NeedEncoder, ProgramEncoder, StructureEncoder
from langchain_rcr.families.structure.inventory import Inventory
from langchain_rcr.families.transformer import Pooling, TransformerEncoder
from langchain_rcr.files import atomic_directory, write_json
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.items import Item
from langchain_rcr.programs import ProgramSpec
from langchain_rcr.state import AdditiveState, SaturatingState, State, make_state

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

FORMAT_VERSION = 2
"""Raised when a checkpoint of this version can't be read by an older one."""
_FORMATS = {"structure": 2, "both": 2}
"""The first version that knows a family, where that isn't 1; what is written is no newer than it needs to be."""

Family = Literal["embeddings", "transformer", "lexical", "structure", "both"]

FAMILIES: dict[str, type[Encoder]] = {
    encoder.family: encoder
    for encoder in (EmbeddingsEncoder, TransformerEncoder, LexicalEncoder, StructureEncoder, JoinedEncoder)
}
_EncoderT = TypeVar("_EncoderT", bound=Encoder)
_PARTS = ("query", "context", "candidate")
MOST_COLUMNS = 2000
"""Columns of the structure family where nothing else is said: the longest vectors that pgvector indexes."""
_TEXT = 4
"""The text part of the `both` family takes at most a so-manieth of its coordinates."""
_GAP = 3
"""Words between two words of a question that still count as a pair (`structure`)."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """What the policy is beside its encoders.

    Args:
        lam: λ of Eq. 4, the weight of the picks so far.
        tau: τ, the temperature of π = softmax(logits / τ).
        state: how picks compose ("additive", "saturating").
    """

    lam: float = 1.0
    tau: float = 0.2
    state: str = "additive"


class TriEncoder(nn.Module):
    """E_x, E_z and E_c with the state that composes them.

    Args:
        query: E_x, of the question asked.
        context: E_z, of an example already picked.
        candidate: E_c, of an example that may be picked.
        config: λ, τ, state.

    Raises:
        InputError: the three encoders differ in family or in the length of their vectors.
    """

    def __init__(
        self, query: Encoder, context: Encoder, candidate: Encoder, config: PolicyConfig | None = None
    ) -> None:
        super().__init__()
        if not query.dim == context.dim == candidate.dim:
            msg = f"the three encoders must agree on D: {query.dim}, {context.dim}, {candidate.dim}"
            raise InputError(msg)
        if not query.family == context.family == candidate.family:
            msg = f"the three encoders must be of one family: {query.family}, {context.family}, {candidate.family}"
            raise InputError(msg)
        self.query, self.context, self.candidate = query, context, candidate
        self.config = config or PolicyConfig()

    @property
    def dim(self) -> int:
        """D."""
        return self.query.dim

    @property
    def family(self) -> str:
        """The encoders' family."""
        return self.query.family

    @property
    def backbone(self) -> Backbone | None:
        """The frozen text encoder that the three share; None where each has its own, or there is none."""
        return getattr(self.query, "backbone", None)

    @backbone.setter
    def backbone(self, backbone: Backbone) -> None:
        for part in _PARTS:
            if getattr(getattr(self, part), "backbone", None) is not None:
                getattr(self, part).backbone = backbone

    def state(self) -> State[Any]:
        """A fresh state; its `start` takes E_x of the queries."""
        return make_state(self.config.state, self.config.lam, self.query.structures)

    def encode_queries(self, queries: Sequence[str]) -> NDArray[np.float32]:
        """E_x of questions, (B, D)."""
        return self.query.encode([Item(query) for query in queries])

    def encode_pool(self, items: Sequence[Item]) -> PoolVectors:
        """E_c and E_z of examples, (N, D) each."""
        candidate, context = self.featurize_pool(items)
        return PoolVectors(self.candidate.vectors(candidate), self.context.vectors(context))

    def featurize_pool(self, items: Sequence[Item]) -> tuple[Features, Features]:
        """The features of examples for E_c and for E_z: the same ones, made once, where both read alike."""
        candidate = self.candidate.featurize(items)
        alike = self.candidate.family == self.context.family and self.candidate.reads() == self.context.reads()
        return candidate, candidate if alike else self.context.featurize(items)

    def fingerprint(self) -> str:
        """SHA-256 over λ, state, settings and weights: vectors made by another fingerprint don't fit this policy.

        A frozen backbone takes no part; a checkpoint tells it by what it makes of a probe text.
        """
        settings = [getattr(self, part).settings() for part in _PARTS]
        about = digest([self.family, self.dim, self.config.state, float(self.config.lam), settings])
        total = hashlib.sha256(about.encode())
        for name, tensor in sorted(self.state_dict().items()):
            total.update(name.encode())
            total.update(tensor.detach().float().cpu().numpy().tobytes())
        return total.hexdigest()

    @classmethod
    def build(
        cls,
        family: Family,
        items: Sequence[Item],
        *,
        base: str | None = None,
        backbone: Backbone | None = None,
        pooling: Pooling = "mean",
        max_length: int = 256,
        dim: int | None = None,
        ngrams: int = 2,
        ngram_init: float = 0.2,
        context_init: float = -0.3,
        scale: float = 20.0,
        text_scale: float | None = None,
        lam: float = 1.0,
        tau: float = 0.2,
        state: str = "additive",
        spec: ProgramSpec | None = None,
        seed: int = 0,
    ) -> TriEncoder:
        """A fresh policy before training.

        Args:
            family: of all three encoders.
            items: the training pool, from which the n-gram vocabulary is read.
            base: the pretrained model (`embeddings`, `transformer`, `both`; `structure` can do without).
            backbone: a frozen encoder to use in place of `base` (`embeddings`, `structure`, `both`).
            pooling: of the pretrained model.
            max_length: tokens read of a text.
            dim: D (`embeddings`: default the backbone's; `lexical`: default 384; `structure`, `both`: at most, default
                2,000, which every engine can index).
            ngrams: the longest n-gram of the bags; 0 for none (`embeddings`).
            ngram_init: how loud the n-gram residual starts (`embeddings`, `both`).
            context_init: E_z of text starts as E_c times this: negative, so that a policy that has learned nothing
                yet already turns away from what was picked.
            scale: of E_x and E_z: logits of unit vectors (`embeddings`, `lexical`) or numbers of structures
                (`structure`, `both`) times this.
            text_scale: the same of the text part (`both`); default: `scale`.
            lam: λ.
            tau: τ.
            state: how picks compose; "saturating" for `structure` and `both` alone.
            spec: how programs are read (`structure`, `both`).
            seed: of the random parts.

        Raises:
            InputError: no such family, a model is needed and none is named, or it can't be loaded; a saturating state
                for vectors of texts; no program of the items has structures (`structure`, `both`); D has no room
                for text (`both`).
        """
        if family not in FAMILIES:
            msg = f"unknown encoder family '{family}' (known: {', '.join(FAMILIES)})"
            raise InputError(msg)
        config = PolicyConfig(lam=lam, tau=tau, state=state)
        by_structure = family in ("structure", "both")
        if state == SaturatingState.name and not by_structure:
            msg = (
                f"state '{state}' is for the structure family, not {family}: vectors of texts don't say what is covered"
            )
            raise InputError(msg)
        if family == "transformer":
            if base is None:
                msg = "the transformer family needs a model: set base to a hub name, a local folder or package:NAME"
                raise InputError(msg)
            return cls(*_three(lambda _: TransformerEncoder(base, pooling=pooling, max_length=max_length)), config)
        if family == "lexical":
            if not ngrams:
                msg = "the lexical family needs n-grams: set ngrams to 1 or more"
                raise InputError(msg)
            vocabulary = NgramVocabulary.fit(items, ngrams)
            signs = {"query": scale, "context": context_init * scale, "candidate": 1.0}
            return cls(
                *_three(lambda part: LexicalEncoder(vocabulary, dim=dim or 384, scale=signs[part], seed=seed)), config
            )
        if backbone is None and base is not None:
            backbone = TransformerBackbone(base, pooling=pooling, max_length=max_length)
        most = dim or MOST_COLUMNS
        if family == "structure":
            return cls(*_structures(items, backbone, spec, most, ngrams, scale, state), config)
        if backbone is None:
            msg = f"the {family} family needs a model (base) or LangChain Embeddings (backbone)"
            raise InputError(msg)
        if family == "embeddings":
            return cls(*_texts(items, backbone, dim, ngrams, ngram_init, context_init, scale, seed), config)
        width = min(backbone.dim, most // _TEXT)
        if not width:
            msg = f"dim = {dim} is too short for structures and text side by side: at least {_TEXT}"
            raise InputError(msg)
        structures = _structures(items, backbone, spec, most - width, ngrams, scale, state)
        loud = scale if text_scale is None else text_scale
        texts = _texts(items, backbone, width, ngrams, ngram_init, context_init, loud, seed)
        joined = [JoinedEncoder(*parts) for parts in zip(structures, texts, strict=True)]
        return cls(joined[0], joined[1], joined[2], config)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the checkpoint folder, whole or not at all; a checkpoint that is there is replaced as a whole.

        Layout: tri_encoder.json, query_encoder/, context_encoder/, candidate_encoder/ and, where there is a frozen
        encoder, backbone.json. Tensors are safetensors; nothing is pickled.

        Raises:
            InputError: the folder can't be written, or holds other files than a checkpoint's.
        """
        there = Path(folder)
        if there.is_dir() and any(there.iterdir()) and not (there / "tri_encoder.json").is_file():
            msg = f"{folder} holds other files and no checkpoint: give a new or an empty folder"
            raise InputError(msg)
        with atomic_directory(folder) as path:
            self._write(path)

    def _write(self, path: Path) -> None:
        for part in _PARTS:
            subfolder = path / f"{part}_encoder"
            subfolder.mkdir()
            getattr(self, part).save(subfolder)
        if self.backbone is not None:
            save_backbone(self.backbone, path)
        meta = {
            "format": "langchain-rcr tri-encoder",
            "format_version": _FORMATS.get(self.family, 1),
            "family": self.family,
            "dim": self.dim,
            "lam": float(self.config.lam),
            "tau": float(self.config.tau),
            "state": self.config.state,
            "fingerprint": self.fingerprint(),
            "files": sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()),
            "versions": library_versions(),
        }
        write_json(path / "tri_encoder.json", meta)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, embeddings: Embeddings | None = None) -> TriEncoder:
        """Read a checkpoint folder.

        Args:
            folder: what `save_pretrained` wrote.
            embeddings: the LangChain object, where the checkpoint was trained over one.

        Raises:
            CheckpointError: the folder is not a checkpoint, is incomplete or foreign, was written by a newer
                format, or its weights are not the ones it was saved with.
        """
        path = Path(folder)
        meta = _read_meta(path)
        family = FAMILIES.get(str(meta["family"]))
        if family is None:
            msg = f"{path}: unknown encoder family '{meta['family']}' (known: {', '.join(FAMILIES)})"
            raise CheckpointError(msg)
        shared: dict[str, Any] = {}
        reads_text = family in (EmbeddingsEncoder, JoinedEncoder)
        if reads_text or (family is StructureEncoder and (path / "backbone.json").is_file()):
            shared["backbone"] = load_backbone(path, embeddings)
        try:
            encoders = _three(lambda part: family.load(path / f"{part}_encoder", shared))
            config = PolicyConfig(float(meta["lam"]), float(meta["tau"]), str(meta["state"]))
            model = cls(*encoders, config)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
            msg = f"{path} is damaged: {' '.join(str(error).split())[:300]}"
            raise CheckpointError(msg) from error
        try:
            model.state()
        except CheckpointError as error:
            msg = f"{path}: {error}"
            raise CheckpointError(msg) from None
        if model.fingerprint() != meta["fingerprint"]:
            msg = f"{path}: the weights are not those that tri_encoder.json was written for (files of two checkpoints?)"
            raise CheckpointError(msg)
        return model.eval()


def _read_meta(path: Path) -> dict[str, Any]:
    """tri_encoder.json, once it is clear that this version reads it and that no file is missing."""
    if not path.is_dir():
        msg = f"{path} is not a checkpoint: {'a file, not a folder' if path.exists() else 'no such folder'}"
        raise CheckpointError(msg)
    file = path / "tri_encoder.json"
    meta = read_json(file, ("format_version",))
    if not isinstance(meta["format_version"], int) or meta["format_version"] > FORMAT_VERSION:
        versions = meta.get("versions")
        written = versions.get("langchain-rcr", "unknown") if isinstance(versions, dict) else "unknown"
        msg = (
            f"{path} has format {meta['format_version']} (written by langchain-rcr {written}); this version reads "
            f"up to {FORMAT_VERSION}: pip install --upgrade langchain-rcr"
        )
        raise CheckpointError(msg)
    meta = read_json(file, ("family", "dim", "lam", "tau", "state", "fingerprint", "files"))
    if not isinstance(meta["files"], list):
        msg = f"{file} is damaged: 'files' is no list"
        raise CheckpointError(msg)
    missing = next((str(name) for name in meta["files"] if not (path / str(name)).is_file()), None)
    if missing is not None:
        msg = f"{path} is not a complete checkpoint: {missing} is missing"
        raise CheckpointError(msg)
    return meta


def _three(make: Callable[[str], _EncoderT]) -> tuple[_EncoderT, _EncoderT, _EncoderT]:
    """E_x, E_z and E_c, made in this order."""
    query, context, candidate = (make(part) for part in _PARTS)
    return query, context, candidate


def _structures(
    items: Sequence[Item],
    backbone: Backbone | None,
    spec: ProgramSpec | None,
    limit: int,
    ngrams: int,
    scale: float,
    state: str,
) -> tuple[NeedEncoder, ProgramEncoder, ProgramEncoder]:
    """E_x, E_z and E_c of structures, of at most `limit` columns; see `TriEncoder.build`."""
    questions = NgramVocabulary.fit([Item(item.source) for item in items], ngrams, gap=_GAP)
    inventory = Inventory.fit(spec or ProgramSpec(), [item.target for item in items], limit)
    if not len(inventory):
        language = inventory.spec.language
        msg = f"none of {len(items)} programs parses as '{language}': the structure family reads programs"
        raise InputError(msg)
    covering = -scale if state == AdditiveState.name else 1.0
    return (
        NeedEncoder(inventory, questions, backbone, scale=scale),
        ProgramEncoder(inventory, scale=covering, context=True),
        ProgramEncoder(inventory),
    )


def _texts(
    items: Sequence[Item],
    backbone: Backbone,
    dim: int | None,
    ngrams: int,
    ngram_init: float,
    context_init: float,
    scale: float,
    seed: int,
) -> tuple[EmbeddingsEncoder, EmbeddingsEncoder, EmbeddingsEncoder]:
    """E_x, E_z and E_c of text over frozen vectors; see `TriEncoder.build`."""
    vocabulary = NgramVocabulary.fit(items, ngrams) if ngrams else None
    return _three(
        lambda part: EmbeddingsEncoder(
            backbone,
            vocabulary,
            dim=dim,
            init=context_init if part == "context" else 1.0,
            ngram_init=ngram_init,
            scale=1.0 if part == "candidate" else scale,
            queries=part == "query",
            seed=seed,
        )
    )


def library_versions() -> dict[str, str]:
    """Versions of what a checkpoint depends on, for the reader of a bug report."""
    versions = {"python": platform.python_version()}
    for package in ("langchain-rcr", "torch", "transformers", "numpy", "langchain-core"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions
