"""Frozen text encoders that several families read through: text → unit vector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from langchain_rcr.basics.extras import installed
from langchain_rcr.basics.files import read_json, write_json
from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import FloatArray
from langchain_rcr.basics.section import show
from langchain_rcr.errors import CheckpointError, InputError, refusing
from langchain_rcr.families.encoding import Backbone
from langchain_rcr.families.model_files import INSIDE, PretrainedBackbone, Read, model_folder, unit
from langchain_rcr.families.onnx_backbone import OnnxBackbone
from langchain_rcr.families.static import PREFIX as STATIC
from langchain_rcr.families.static import StaticBackbone

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from langchain_rcr.families.base import ModelSettings
    from langchain_rcr.families.model_files import Pooling

_PROBE = "what is the number of states that border the largest one ?"
"""Embedded on saving and loading: if the name meant another model by then, all vectors would be silently wrong."""
_IN_USE: MutableMapping[Any, Any] = WeakValueDictionary()
"""Models from installed packages, as long as anything reads with them."""
_LARGEST = 1e15
"""Smaller numbers can be squared and summed in single precision."""

_Model = TypeVar("_Model")
Known = dict[tuple[bool, str], FloatArray]
"""(is a query, text) → its frozen vector (d,)."""


class TransformerBackbone(PretrainedBackbone):
    """A frozen transformer; for the arguments see `PooledTransformer`."""

    kind = "transformer"

    def __init__(self, base: str, *, pooling: Pooling = "mean", max_length: int = 256, saved: bool = False) -> None:
        from langchain_rcr.families.pooled import TransformerEncoder

        encoder = TransformerEncoder(base, pooling=pooling, max_length=max_length, normalize=True, saved=saved)
        self.base = INSIDE if Path(base).is_dir() else base
        if self.base == INSIDE and not saved:
            encoder.text.check_storable()
        self._encoder = encoder.eval().requires_grad_(False)
        self.dim, self.pooling, self.max_length = encoder.dim, encoder.pooling, encoder.max_length

    def embed(self, texts: Sequence[str], *, queries: bool = False) -> FloatArray:
        """See `Backbone.embed`."""
        return self._encoder.encode([Item(text) for text in texts])

    def read(self, texts: Sequence[str]) -> Read:
        """See `LocalBackbone.read`: tokens in context."""
        vectors, tokens = self._encoder.text.read(texts)
        return unit(vectors), tokens

    def save(self, folder: Path) -> None:
        """See `PretrainedBackbone.save`."""
        self._encoder.text.save(folder)

    def for_onnx(self, *, int8: bool = False) -> OnnxBackbone:
        """The model for ONNX Runtime, to be stored in a checkpoint; an `InputError` if it isn't a BERT."""
        with TemporaryDirectory() as folder:
            self.save(Path(folder) / "model")
            read = OnnxBackbone(str(Path(folder) / "model"), pooling=self.pooling, max_length=self.max_length)
            return read.for_onnx(int8=int8)


class LangChainBackbone:
    """Any LangChain `Embeddings`, frozen. A text that repeats within a call is embedded once."""

    def __init__(self, embeddings: Embeddings) -> None:
        if isinstance(embeddings, type) or not hasattr(embeddings, "embed_query"):
            what = f"the class {embeddings.__name__}" if isinstance(embeddings, type) else type(embeddings).__name__
            raise InputError(f"embeddings must be LangChain Embeddings, not {what}")
        self._embeddings = embeddings
        query, entry = _vectors([embeddings.embed_query(_PROBE)], 1), _vectors(embeddings.embed_documents([_PROBE]), 1)
        self.dim = query.shape[1]
        if not query.any() or not entry.any():
            raise InputError(f"embeddings returned a vector of zeros for '{_PROBE}', which can't tell texts apart")
        # Most embeddings treat both alike; then questions can be batched too.
        self.symmetric = entry.shape == query.shape and bool(np.allclose(query, entry, atol=1e-3))

    def embed(self, texts: Sequence[str], *, queries: bool = False) -> FloatArray:
        """See `Backbone.embed`; queries go through `embed_query`, pool entries through `embed_documents`."""
        if not texts:
            return np.empty((0, self.dim), dtype=np.float32)
        distinct = list(dict.fromkeys(texts))
        rows = (
            [self._embeddings.embed_query(text) for text in distinct]
            if queries and (len(distinct) == 1 or not self.symmetric)
            else self._embeddings.embed_documents(distinct)
        )
        vectors = _vectors(rows, len(distinct), self.dim)
        number = {text: row for row, text in enumerate(distinct)}
        return unit(vectors[[number[text] for text in texts]])

    def describe(self, folder: Path) -> dict[str, Any]:
        """See `Backbone.describe`; the class is only named in the error message if `embeddings` is missing later."""
        return {"kind": "langchain", "class": type(self._embeddings).__name__}


class RememberingBackbone:
    """Embeds each text once: the stages of a training run embed the same texts.

    `known` may be shared with other wrappers of the same model.
    """

    def __init__(self, backbone: Backbone, known: Known | None = None) -> None:
        self._backbone = backbone
        self._known = known if known is not None else {}
        self._tokens: dict[str, FloatArray] = {}
        self.dim, self.symmetric = backbone.dim, backbone.symmetric
        self.describe = backbone.describe
        self.for_onnx = getattr(backbone, "for_onnx", None)
        self.read = None if getattr(backbone, "read", None) is None else self._read
        """`LocalBackbone.read` with the cache; None if the inner backbone has no token vectors."""

    def embed(self, texts: Sequence[str], *, queries: bool = False) -> FloatArray:
        """See `Backbone.embed`."""
        role = queries and not self.symmetric
        fresh = [text for text in dict.fromkeys(texts) if (role, text) not in self._known]
        for text, vector in zip(fresh, self._backbone.embed(fresh, queries=queries), strict=True):
            self._known[role, text] = vector
        return np.array([self._known[role, text] for text in texts], dtype=np.float32).reshape(-1, self.dim)

    def _read(self, texts: Sequence[str]) -> Read:
        fresh = [text for text in dict.fromkeys(texts) if text not in self._tokens]
        inner: Any = self._backbone
        for text, vector, tokens in zip(fresh, *inner.read(fresh), strict=True):
            self._known[False, text], self._tokens[text] = vector, tokens
        return self.embed(texts), [self._tokens[text] for text in texts]


def open_backbone(
    settings: ModelSettings, embeddings: Embeddings | None = None, *, torch: bool | None = None
) -> Backbone:
    """The LangChain embeddings, if given, else the model that the settings name, or just its token vectors."""
    if embeddings is not None:
        return LangChainBackbone(embeddings)
    base = str(settings.pretrained)
    if base.startswith(STATIC):
        return StaticBackbone.of(base.removeprefix(STATIC), max_length=settings.max_length)
    return _opened(base, torch, pooling=settings.pooling, max_length=settings.max_length, saved=False)


def _opened(base: str, torch: bool | None, **options: Any) -> TransformerBackbone | OnnxBackbone:
    """A pretrained model, frozen; for the options see `PooledTransformer`.

    It is read by torch, if installed (`torch` True); by ONNX Runtime (False); or by ONNX Runtime, which starts in a
    tenth of the time, if that is installed and the model has BERT's architecture (None).
    """
    there = installed("torch") and installed("transformers")
    if not there or (not torch and (torch is False or installed("onnxruntime"))):
        try:
            return _shared(OnnxBackbone, base, options)
        except InputError:
            if torch is False or not there:
                raise
    return _shared(TransformerBackbone, base, options)


def _shared(kind: Callable[..., _Model], base: str, options: dict[str, Any]) -> _Model:
    """A model from an installed package, which doesn't change, is in memory once, however many read with it."""
    key = None
    if base.startswith("package:"):
        with suppress(InputError):  # which the model raises as well, unless something else is missing
            key = (kind, model_folder(base), *sorted(options.items()))
    found: _Model | None = _IN_USE.get(key)
    if found is None:
        found = kind(base, **options)
        if key is not None:
            _IN_USE[key] = found
    return found


def save_backbone(backbone: Backbone, folder: Path, *, onnx: bool = False, int8: bool = False) -> None:
    """Write backbone.json: how to restore it, and its vectors of a probe text.

    With `onnx`, a model that runs in this process is stored in the form that ONNX Runtime reads; with `int8`, in int8.
    """
    for_onnx = getattr(backbone, "for_onnx", None)
    if onnx and for_onnx is not None:
        backbone = for_onnx(int8=int8)
    probe = [round(float(x), 6) for x in _probe(backbone)]
    write_json(folder / "backbone.json", backbone.describe(folder) | {"dim": backbone.dim, "probe": probe})


def load_backbone(
    folder: Path,
    embeddings: Embeddings | None = None,
    trust: bool | Collection[str] = False,
    *,
    torch: bool | None = None,
) -> Backbone:
    """Load the backbone of a checkpoint, if it is the one trained over; see `TriEncoder.from_pretrained`, `_opened`."""
    value = read_json(folder / "backbone.json", ("kind", "dim", "probe"))
    if embeddings is not None:
        backbone: Backbone = LangChainBackbone(embeddings)
        probe = _probe(backbone)
    else:
        with refusing(f"{folder}", CheckpointError):
            backbone = _stored(folder, value, trust, torch)
            probe = _probe(backbone)
    if backbone.dim != value["dim"] or not _matches(probe, value["probe"], 4 if value["kind"] == "onnx" else 1):
        raise CheckpointError(
            f"{folder} was trained over another embedding model than the one given: its vectors differ"
        )
    return backbone


def _stored(folder: Path, value: Mapping[str, Any], trust: bool | Collection[str], torch: bool | None) -> Backbone:
    """The backbone that a checkpoint's backbone.json (`value`) names or that is stored beside it."""
    file, kind = folder / "backbone.json", value["kind"]
    if kind == "langchain":
        raise CheckpointError(f"{folder} was trained over LangChain's {value.get('class')}: pass it as embeddings=…")
    if kind == "static":
        return StaticBackbone.load(folder, max_length=int(read_json(file, ("max_length",))["max_length"]))
    if kind not in ("transformer", "onnx"):
        raise CheckpointError(f"{file}: unknown kind of embeddings '{kind}'")
    value = read_json(file, ("base", "pooling", "max_length"))
    base = str(value["base"])
    inside = base == INSIDE
    if not inside and not base.startswith("package:") and not (trust is True or (trust and base in trust)):
        raise CheckpointError(
            f"{folder} reads texts with the model {show(base)}, which it names but doesn't contain: trust=True "
            "loads it, from the Hugging Face hub or from that folder"
        )
    options = {"pooling": value["pooling"], "max_length": int(value["max_length"]), "saved": inside}
    return _opened(str(folder / "backbone") if inside else base, False if kind == "onnx" else torch, **options)


def _probe(backbone: Backbone) -> FloatArray:
    """The first numbers of the probe's vectors as a pool entry and as a question."""
    entry = backbone.embed([_PROBE])[0]
    question = entry if backbone.symmetric else backbone.embed([_PROBE], queries=True)[0]
    return np.concatenate([entry[:32], question[:32]])


def _matches(probe: FloatArray, saved: Any, times: int) -> bool:
    """Whether they are equal up to another machine's rounding, which is several times larger in int8."""
    try:
        return bool(np.allclose(probe, np.asarray(saved, dtype=np.float64).reshape(probe.shape), atol=times * 5e-3))
    except (TypeError, ValueError):
        return False


def _vectors(rows: Any, count: int, dim: int | None = None) -> FloatArray:
    """What LangChain embeddings returned for `count` texts, as an array (count, dim); an `InputError` if not."""
    try:
        found = np.asarray(rows)
    except (TypeError, ValueError):  # rows of different lengths
        found = np.empty(0)
    if found.ndim != 2 or found.dtype.kind not in "fiu":
        raise InputError("embeddings must return vectors of real numbers, all of one length")
    if found.shape != (count, dim or found.shape[1]) or not found.shape[1]:
        raise InputError(f"embeddings returned shape {found.shape}, expected {(count, dim or 'any number above 0')}")
    if not (np.abs(found) < _LARGEST).all():
        raise InputError("embeddings returned values that are not finite numbers, or too large to compute with")
    return found.astype(np.float32)
