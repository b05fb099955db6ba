"""The policy (section 2.2, Eq. 4): three encoders, a state, λ and τ; saved and loaded as one folder."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from langchain_rcr.basics.extras import installed
from langchain_rcr.basics.files import digest
from langchain_rcr.basics.items import Item, readable
from langchain_rcr.basics.progress import track
from langchain_rcr.basics.rows import DoubleArray, FloatArray
from langchain_rcr.errors import InputError, printable
from langchain_rcr.families import Family, ModelSettings, get_family
from langchain_rcr.families import backbone as backbones
from langchain_rcr.families.base import DEFAULT_FAMILY, FALLBACK_FAMILY, FALLBACK_SETTINGS, PARTS
from langchain_rcr.families.encoding import Backbone, Features
from langchain_rcr.families.state import State, make_state
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.policy.checkpoint import Runtime, load, save
from langchain_rcr.policy.hub import fetched
from langchain_rcr.policy.manifest import reread
from langchain_rcr.policy.prompt import Prompt
from langchain_rcr.programs import TOKENS, ProgramSpec
from langchain_rcr.programs.languages import guess_language

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings
    from torch.nn import Module

    from langchain_rcr.families.encoder import Encoder
else:
    Module = object

logger = logging.getLogger(__name__)

FEWEST = 20
"""`TriEncoder.fitted` learns structures from no fewer programs than this."""


class TriEncoder(Module):
    """E_x, E_z and E_c with the state that composes them.

    With torch encoders it is a torch module and can be trained (`TrainableTriEncoder`); NumPy encoders only serve.

    Args:
        query: E_x, of the question.
        context: E_z, of an example already picked.
        candidate: E_c, of an example that may be picked.
        config: the settings they were built with: λ, τ, the state, the family's name and its own settings.
        spec: how programs are read; None: the default.

    Attributes:
        card: the text of the checkpoint's README.md; empty: `save_pretrained` generates one.
        prompt: the prompt of the language model that taught or judged it, if any.
        runtime: what it was saved for; None: nothing in particular.
        group: the field, such as `db_id`, in which examples had to match their question, if any.
        prefer: the field that `Item.home` is read from, if any.
    """

    def __new__(cls, query: Encoder | None = None, *_: Any, **__: Any) -> Self:
        """A torch module if the encoders are torch modules."""
        if cls is not TriEncoder or query is None or not query.trainable:
            return super().__new__(cls)
        from langchain_rcr.policy.trainable import TrainableTriEncoder

        return cast(Self, TrainableTriEncoder.__new__(TrainableTriEncoder))

    def __init__(
        self,
        query: Encoder,
        context: Encoder,
        candidate: Encoder,
        config: ModelSettings,
        spec: ProgramSpec | None = None,
    ) -> None:
        if not query.dim == context.dim == candidate.dim:
            raise InputError(f"the three encoders must agree on D: {query.dim}, {context.dim}, {candidate.dim}")
        self.query, self.context, self.candidate = query, context, candidate
        self.config = get_family(config.family).settled(self.encoders, config)
        self.spec = spec or ProgramSpec()
        self.card = ""
        self.prompt: Prompt | None = None
        self.group: str | None = None
        self.prefer: str | None = None
        self.runtime: Runtime | None = None

    def eval(self) -> Self:
        """See `torch.nn.Module.eval`; there is nothing to do without torch."""
        return self

    @property
    def family(self) -> Family:
        """The family of its encoders."""
        return get_family(self.config.family)

    @property
    def dim(self) -> int:
        """D."""
        return self.query.dim

    @property
    def encoders(self) -> tuple[Encoder, Encoder, Encoder]:
        """E_x, E_z and E_c."""
        return self.query, self.context, self.candidate

    @property
    def backbone(self) -> Backbone | None:
        """The frozen text encoder that the three share; None if there is none."""
        return self.query.backbone

    @backbone.setter
    def backbone(self, backbone: Backbone) -> None:
        for encoder in self.encoders:
            if encoder.backbone is not None:
                encoder.backbone = backbone

    def state(self) -> State[Any]:
        """A fresh state; its `start` takes E_x of the queries."""
        return make_state(self.config.state, self.config.lam, cast("float | None", self.config.fade))  # settled

    def vary(self, changes: Mapping[str, Any]) -> None:
        """Change settings that need no new fit, such as λ; existing vectors may become invalid."""
        self.config = self.family.settled(self.encoders, self.family.vary(self.encoders, self.config, changes))

    @contextmanager
    def varied(self, changes: Mapping[str, Any]) -> Iterator[None]:
        """`vary` within the block; afterwards all is as before."""
        config = self.config
        before = [{name: array.copy() for name, array in encoder.tensors().items()} for encoder in self.encoders]
        self.vary(changes)
        try:
            yield
        finally:
            for encoder, arrays in zip(self.encoders, before, strict=True):
                now = encoder.tensors()
                encoder.put({name: array for name, array in arrays.items() if not np.array_equal(now[name], array)})
            self.config = config
            self.vary({})  # resets what encoders derive from the settings

    def encode_queries(
        self, queries: Sequence[str], drafts: Sequence[str | None] | None = None, homes: Sequence[str] | None = None
    ) -> FloatArray:
        """E_x of questions, (B, D); for each, `drafts` has a guess at its program or None, `homes` its `Item.home`."""
        return self.judge_queries(queries, drafts, homes)[0]

    def judge_queries(
        self,
        queries: Sequence[str],
        drafts: Sequence[str | None] | None = None,
        homes: Sequence[str] | None = None,
        *,
        judge: bool = False,
    ) -> tuple[FloatArray, DoubleArray]:
        """E_x of questions, (B, D), and with `judge` how relevant each is, (B,); see `Encoder.relevance`."""
        items = [Item(query, home=home) for query, home in zip(queries, homes or [""] * len(queries), strict=True)]
        features = self.query.featurize(readable(items))
        relevance = self.query.relevance(features) if judge else np.ones(len(queries))
        if drafts is not None and any(draft is not None for draft in drafts):
            self.check_drafts(drafts)
            features = self.query.drafted(features, drafts)
        return self.query.vectors(features), relevance

    def check_drafts(self, drafts: Sequence[str | None] = ("",)) -> None:
        """Raise an `InputError` unless the drafts, except those that are None, are strings that the family can use."""
        given = [draft for draft in drafts if draft is not None]
        if wrong := [draft for draft in given if not isinstance(draft, str)]:
            raise InputError(f"a draft must be a program as a string, not {type(wrong[0]).__name__}")
        if given and not self.family.takes_drafts:
            raise InputError(
                f"the {self.family.name} family can't use a draft: it doesn't predict which structures are needed"
            )

    def encode_pool(self, items: Sequence[Item]) -> PoolVectors:
        """E_c and E_z of examples, (N, D) each."""
        return self.pool_vectors(*self.featurize_pool(items))

    def pool_vectors(self, candidate: Features, context: Features) -> PoolVectors:
        """E_c and E_z of featurised examples, (N, D) each."""
        return PoolVectors(self.candidate.rows(candidate), self.context.rows(context))

    def grow(self, items: Sequence[Item], *, labels_only: bool = False) -> None:
        """Tell E_x about examples that were added to a pool (`Encoder.grow`); existing vectors stay valid."""
        self.query.grow(readable(items), labels_only=labels_only)

    def featurize_pool(self, items: Sequence[Item]) -> tuple[Features, Features]:
        """The features of examples for E_c and for E_z; made only once if both read the same."""
        items = readable(items)
        candidate = self.candidate.featurize(items)
        same = type(self.candidate) is type(self.context) and self.candidate.reads() == self.context.reads()
        return candidate, candidate if same else self.context.featurize(items)

    def fingerprint(self) -> str:
        """SHA-256 of λ, p, state, spec, settings and weights: a policy can use vectors made under the same one.

        Added examples don't count, as they leave vectors valid. Nor does a frozen backbone: a checkpoint recognises it
        by its vectors of a probe text.
        """
        settings = [
            {name: value for name, value in encoder.settings().items() if name not in encoder.grown}
            for encoder in self.encoders
        ]
        config = self.config
        policy = [self.family.name, self.dim, config.state, config.lam, config.fade, self.spec.to_json(), settings]
        total = hashlib.sha256(digest(policy).encode())
        arrays = {
            f"{part}.{name}": array
            for part, encoder in zip(PARTS, self.encoders, strict=True)
            for name, array in encoder.tensors().items()
            if name.partition(".")[0] not in encoder.grown
        }
        for name, array in sorted(arrays.items()):
            total.update(f"{name} {list(array.shape)}".encode())
            total.update(np.asarray(array, dtype=np.float32, order="C").data)
        return total.hexdigest()

    @classmethod
    def build(
        cls,
        family: str,
        items: Sequence[Item],
        *,
        backbone: Backbone | None = None,
        spec: ProgramSpec | None = None,
        seed: int = 0,
        base: str | None = None,
        numpy: bool | None = None,
        **settings: Any,
    ) -> TriEncoder:
        """A fresh policy before training.

        Args:
            family: the name of an installed family.
            items: the training pool; vocabularies and structures are read from it.
            backbone: a frozen encoder to use in place of `base`.
            spec: how programs are read; None: the default.
            seed: of the random parts.
            base: the pretrained model; None: none, whatever the family's default in `rcr-train`.
            numpy: whether to use NumPy encoders, which only serve, where the family has them; None: if torch is not
                installed.
            **settings: the family's other settings, described in `get_family(name).Settings`.

        Raises:
            InputError: unknown or contradictory settings, a model that is missing or can't be loaded, or items that
                lack what the family reads.
        """
        items, kind = readable(items), get_family(family)
        config = kind.settings(base=base, **settings)
        spec, numpy = spec or ProgramSpec(), not installed("torch") if numpy is None else numpy
        if kind.frozen and backbone is None and config.pretrained is not None:
            backbone = backbones.open_backbone(config, torch=not numpy)
        runtime = {} if kind.numpy_encoders is None else {"numpy": numpy}
        return cls(*kind.build(items, config, backbone=backbone, spec=spec, seed=seed, **runtime), config, spec)

    @classmethod
    def fitted(
        cls,
        items: Sequence[Item],
        *,
        embeddings: Embeddings | None = None,
        backbone: Backbone | None = None,
        spec: ProgramSpec,
        seed: int = 0,
        numpy: bool = True,
        family: str = DEFAULT_FAMILY,
        **settings: Any,
    ) -> TriEncoder:
        """A policy of a family that is fitted to examples in closed form, within seconds.

        With fewer than `FEWEST` programs that parse, picks go by question similarity (`FALLBACK_FAMILY`, untrained).

        Args:
            items: the examples. If no program of `FEWEST` or more parses, all are read as `tokens`.
            embeddings: LangChain embeddings; None: the default model of the extra `offline`.
            backbone: a loaded text encoder to use instead of either.
            spec: how programs are read.
            seed: of the questions that are sampled from a large pool.
            numpy: see `build`.
            family: which one.
            **settings: of the family, if they differ from its defaults.

        Raises:
            InputError: there is no such setting, the default model is not installed, or the embeddings' vectors can't
                be used.
        """
        items = readable(items)
        parsed = sum(bool(spec.structures(item.target)) for item in track(items, "reading programs"))
        too_few = len(items) < FEWEST or 0 < parsed < FEWEST
        hint = ""
        if 2 * parsed < len(items) and parsed < FEWEST:
            best, counts = guess_language([item.target for item in items])
            hint = "" if best == TOKENS else f"; {counts}: pass language='{best}'"
        if items and too_few:
            logger.warning(
                "too few examples to learn structures from (%d, of which %d have a program that parses as '%s'; it "
                "takes %d): falling back to question similarity%s",
                *(len(items), parsed, spec.language, FEWEST, hint),
            )
        elif items and not parsed:
            logger.warning(
                "none of the %d programs parses as '%s' (the first is '%.80s'): token n-grams stand for structures%s",
                *(len(items), spec.language, printable(" ".join(items[0].target.split())), hint),
            )
            spec = replace(spec, language=TOKENS)
        name, settings = (FALLBACK_FAMILY, dict(FALLBACK_SETTINGS)) if too_few else (family, settings)
        kind, config = get_family(name), get_family(name).settings(**settings)
        if kind.frozen and backbone is None and (embeddings is not None or config.pretrained):
            backbone = backbones.open_backbone(config, embeddings)
        remembering = None if backbone is None else backbones.RememberingBackbone(backbone)
        model = cls.build(name, items, backbone=remembering, spec=spec, seed=seed, numpy=numpy, **settings)
        if model.family.fits:
            logger.info("fitting to %d examples …", parsed or len(items))
            model.family.fit(model.query, items, seed=seed)
        if backbone is not None:
            model.backbone = backbone
        return model.eval()

    def refitted(self, items: Sequence[Item], *, seed: int = 0) -> TriEncoder:
        """A policy with the settings of this one, fitted anew to examples in closed form.

        It keeps the weights by size, γ, ε and ω as the race or GRPO left them, but not GRPO's weights of single
        structures. A policy that had too few examples to be fitted is fitted now.

        Raises:
            InputError: the family isn't fitted to examples.
        """
        if not (self.family.fits or self.is_fallback):
            raise InputError(f"a policy of the {self.family.name} family isn't fitted: train it again with rcr-train")
        settings = self.config.model_dump() if self.family.fits else {}
        numpy = not self.query.trainable
        model = TriEncoder.fitted(items, backbone=self.backbone, spec=self.spec, seed=seed, numpy=numpy, **settings)
        for name in ("card", "prompt", "group", "prefer", "runtime"):
            setattr(model, name, getattr(self, name))
        if isinstance(model.query, type(self.query)):
            model.query.keep_preferences(self.query)
        return model

    @property
    def is_fallback(self) -> bool:
        """Whether there were too few examples to fit to."""
        return self.config == get_family(FALLBACK_FAMILY).settings(base=None, **FALLBACK_SETTINGS)

    def save_pretrained(self, folder: str | os.PathLike[str], *, runtime: Runtime | None = None) -> None:
        """Write the checkpoint folder atomically, replacing an earlier checkpoint there.

        It holds tri_encoder.json, query_encoder/, context_encoder/, candidate_encoder/, README.md (the model card),
        manifest.json (sizes and digests) and, of a frozen encoder, backbone.json. Tensors are safetensors, not pickles.

        Args:
            folder: where.
            runtime: what will serve it. "onnx": ONNX Runtime and NumPy, whether or not torch is installed there; the
                text encoder, which must have BERT's architecture, is stored too. "onnx-int8": the same with a text
                encoder a quarter as large and twice as fast, whose vectors are less exact. None: as it was loaded.

        Raises:
            InputError: the folder can't be written, or holds files that aren't a checkpoint's.
        """
        save(self, Path(folder), runtime)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        embeddings: Embeddings | None = None,
        trust: bool | Collection[str] = False,
        runtime: Runtime | None = None,
    ) -> TriEncoder:
        """Read a checkpoint folder.

        Args:
            folder: what `save_pretrained` wrote, or `hub:ORG/NAME[@REVISION]`.
            embeddings: the LangChain object, if the checkpoint was trained over one.
            trust: whether a model that the checkpoint names but doesn't contain may be fetched from the Hugging Face
                hub or opened in another folder; or the names of those that may.
            runtime: what computes: torch, which can also train, or ONNX Runtime and NumPy. None: the latter, but torch
                if the family needs it, if ONNX Runtime can't read the text encoder, or if it is not installed.

        Raises:
            CheckpointError: it is not a checkpoint, is damaged or incomplete, has another format or a family that is
                not installed, or needs `trust`.
        """
        path = fetched(folder)
        return reread(path, lambda: load(cls, path, embeddings, trust, runtime))
