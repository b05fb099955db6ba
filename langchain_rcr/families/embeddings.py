"""The `embeddings` family: frozen vectors of a pretrained encoder, small trainable heads, optional n-gram residual.

Trains in seconds on a CPU, because the frozen part runs once a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.errors import CheckpointError, InputError
from langchain_rcr.families._io import check_digest, read_json, read_tensors, write_tensors
from langchain_rcr.families.base import Encoder
from langchain_rcr.families.ngrams import Bags, NgramEmbedding, NgramVocabulary
from langchain_rcr.families.transformer import Pooling, TransformerEncoder
from langchain_rcr.files import write_json
from langchain_rcr.items import Item, View, render

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

_PROBE = "what is the number of states that border the largest one ?"
"""Embedded at saving and at loading: another model behind the same name would make every vector wrong, silently."""


Known = dict[tuple[bool, str], NDArray[np.float32]]
"""(is a question asked, text) → its frozen vector (d,)."""
Read = tuple[NDArray[np.float32], list[NDArray[np.float32]]]
"""Unit vectors (N, d) of texts, and the vectors (T, d) of each one's tokens."""


class Backbone(Protocol):
    """A frozen text encoder: text → unit vector."""

    dim: int
    symmetric: bool
    """Whether it embeds a question asked and a pool entry of the same wording alike."""

    def embed(self, texts: Sequence[str], *, queries: bool = False) -> NDArray[np.float32]:
        """(N, d) float32, each of length 1. `queries`: the texts are questions asked, not pool entries."""
        ...

    def describe(self, folder: Path) -> dict[str, Any]:
        """JSON values from which `load_backbone` makes it again; may write files into `folder`."""
        ...


class TransformerBackbone:
    """A local or hub transformer, frozen.

    Args:
        base: hub name, local folder or `package:NAME`.
        pooling: mean or CLS.
        max_length: tokens read of a text.
    """

    symmetric = True

    def __init__(self, base: str, *, pooling: Pooling = "mean", max_length: int = 256) -> None:
        encoder = TransformerEncoder(base, pooling=pooling, max_length=max_length, view="source", normalize=True)
        self._encoder = encoder.eval().requires_grad_(False)
        self.dim = encoder.dim

    def embed(self, texts: Sequence[str], *, queries: bool = False) -> NDArray[np.float32]:
        """(N, d) unit vectors."""
        return self._encoder.encode([Item(text) for text in texts])

    def read(self, texts: Sequence[str]) -> Read:
        """What `embed` gives, and for each text the vectors (T, d) of its tokens in their context, in one pass."""
        vectors, tokens = self._encoder.text.read(texts)
        return _unit(vectors), tokens

    def describe(self, folder: Path) -> dict[str, Any]:
        """Its settings; a model from a local folder is copied into the checkpoint, others are named."""
        base = self._encoder.text.base
        if Path(base).is_dir():
            self._encoder.text.save(folder / "backbone")
            base = "checkpoint:backbone"
        return {
            "kind": "transformer",
            "base": base,
            "pooling": self._encoder.text.pooling,
            "max_length": self._encoder.text.max_length,
        }


class LangChainBackbone:
    """Any LangChain `Embeddings`, frozen. Texts that repeat within a call are embedded once.

    Args:
        embeddings: the LangChain object.
    """

    symmetric = False

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        self.dim = len(embeddings.embed_query(_PROBE))

    def embed(self, texts: Sequence[str], *, queries: bool = False) -> NDArray[np.float32]:
        """(N, d) unit vectors; questions go through `embed_query`, pool entries through `embed_documents`."""
        if not texts:
            return np.empty((0, self.dim), dtype=np.float32)
        distinct = list(dict.fromkeys(texts))
        rows = (
            [self._embeddings.embed_query(text) for text in distinct]
            if queries
            else self._embeddings.embed_documents(distinct)
        )
        vectors = np.asarray(rows, dtype=np.float32)
        if vectors.shape != (len(distinct), self.dim):
            msg = f"embeddings returned shape {vectors.shape}, expected {(len(distinct), self.dim)}"
            raise InputError(msg)
        if not np.isfinite(vectors).all():
            msg = "embeddings returned values that are not finite numbers"
            raise InputError(msg)
        number = {text: row for row, text in enumerate(distinct)}
        return _unit(vectors[[number[text] for text in texts]])

    def describe(self, folder: Path) -> dict[str, Any]:
        """Its class, for the error message where a loader gives no `embeddings`."""
        return {"kind": "langchain", "class": type(self._embeddings).__name__}


class RememberingBackbone:
    """Embeds a text once and remembers: for training, where the same texts come back stage after stage.

    Args:
        backbone: what does the work.
        known: vectors that another wrapper of the same model has remembered; both add to it. None: a fresh memory.
    """

    def __init__(self, backbone: Backbone, known: Known | None = None) -> None:
        self._backbone = backbone
        self._known = known if known is not None else {}
        self._tokens: dict[str, NDArray[np.float32]] = {}
        self.dim, self.symmetric = backbone.dim, backbone.symmetric

    def embed(self, texts: Sequence[str], *, queries: bool = False) -> NDArray[np.float32]:
        """(N, d) unit vectors, from memory where possible."""
        role = queries and not self.symmetric
        fresh = [text for text in dict.fromkeys(texts) if (role, text) not in self._known]
        for text, vector in zip(fresh, self._backbone.embed(fresh, queries=queries), strict=True):
            self._known[role, text] = vector
        if not texts:
            return np.empty((0, self.dim), dtype=np.float32)
        return np.stack([self._known[role, text] for text in texts])

    @property
    def read(self) -> Callable[[Sequence[str]], Read] | None:
        """`TransformerBackbone.read` from memory; None where the inner backbone shows no tokens."""
        inner = getattr(self._backbone, "read", None)
        if inner is None:
            return None

        def remembered(texts: Sequence[str]) -> Read:
            fresh = [text for text in dict.fromkeys(texts) if text not in self._tokens]
            for text, vector, tokens in zip(fresh, *inner(fresh), strict=True):
                self._known[False, text], self._tokens[text] = vector, tokens
            return self.embed(texts), [self._tokens[text] for text in texts]

        return remembered

    def describe(self, folder: Path) -> dict[str, Any]:
        """What the inner backbone says."""
        return self._backbone.describe(folder)


def save_backbone(backbone: Backbone, folder: Path) -> None:
    """Write backbone.json: how to make it again, and what it makes of a probe text."""
    value = backbone.describe(folder) | {
        "dim": backbone.dim,
        "probe": [round(float(x), 6) for x in _probe(backbone)],
    }
    write_json(folder / "backbone.json", value)


def load_backbone(folder: Path, embeddings: Embeddings | None = None) -> Backbone:
    """The backbone of a checkpoint.

    Args:
        folder: the checkpoint.
        embeddings: the LangChain object, where the checkpoint was trained over one.

    Raises:
        CheckpointError: it can't be made, or it is another model than at training.
    """
    file = folder / "backbone.json"
    value = read_json(file, ("kind", "dim", "probe"))
    if embeddings is not None:
        backbone: Backbone = LangChainBackbone(embeddings)
    elif value["kind"] == "langchain":
        msg = f"{folder} was trained over LangChain's {value.get('class')}: pass it as embeddings=…"
        raise CheckpointError(msg)
    elif value["kind"] != "transformer":
        msg = f"{file}: unknown kind of embeddings '{value['kind']}'"
        raise CheckpointError(msg)
    else:
        value = read_json(file, ("dim", "probe", "base", "pooling", "max_length"))
        base = str(value["base"])
        if base.startswith("checkpoint:"):
            base = str(folder / base.removeprefix("checkpoint:"))
        try:
            backbone = TransformerBackbone(base, pooling=value["pooling"], max_length=int(value["max_length"]))
        except (InputError, TypeError) as error:
            msg = f"{folder}: {error}"
            raise CheckpointError(msg) from None
    if backbone.dim != value["dim"] or not _alike(_probe(backbone), value["probe"]):
        msg = f"{folder} was trained over another embedding model than the one given: its vectors differ"
        raise CheckpointError(msg)
    return backbone


def _probe(backbone: Backbone) -> NDArray[np.float32]:
    """The beginning of the probe's vectors as a pool entry and as a question."""
    entry = backbone.embed([_PROBE])[0]
    question = entry if backbone.symmetric else backbone.embed([_PROBE], queries=True)[0]
    return np.concatenate([entry[:32], question[:32]])


def _alike(probe: NDArray[np.float32], saved: Any) -> bool:
    """Equal up to what another machine's arithmetic may change."""
    try:
        return bool(np.allclose(probe, np.asarray(saved, dtype=np.float64).reshape(probe.shape), atol=5e-3))
    except (TypeError, ValueError):
        return False


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[np.float32] = (vectors / np.maximum(norms, 1e-12)).astype(np.float32)
    return unit


@dataclass(frozen=True, slots=True)
class FrozenVectors:
    """N frozen vectors (N, d), and the n-gram bags of the same items where there is a residual."""

    vectors: NDArray[np.float32]
    bags: Bags | None

    def __len__(self) -> int:
        return len(self.vectors)

    def select(self, rows: NDArray[np.int64]) -> FrozenVectors:
        """The features of some rows, in that order."""
        return FrozenVectors(self.vectors[rows], None if self.bags is None else self.bags.select(rows))


class EmbeddingsEncoder(Encoder):
    """scale · (W · frozen(source) + Σ n-gram vectors).

    Args:
        backbone: the frozen text encoder; it reads the question, whose wording a query shares.
        vocabulary: the n-grams of the residual; None for none.
        dim: D; None for the backbone's own.
        view: which texts the n-gram residual reads.
        init: W starts as init · I (init · a fixed random projection where D ≠ d), the n-gram vectors as init · a
            shared random draw. E_z starts with a negative value: what is picked is needed less.
        ngram_init: how loud the n-gram residual starts beside the frozen vectors.
        scale: a constant factor on the vectors.
        queries: whether what it reads are questions asked (E_x): some embedding models treat those in their own way.
        seed: of the random parts; the three encoders of one retriever share it.
    """

    family = "embeddings"

    def __init__(
        self,
        backbone: Backbone,
        vocabulary: NgramVocabulary | None,
        *,
        dim: int | None = None,
        view: View = "both",
        init: float = 1.0,
        ngram_init: float = 0.0,
        scale: float = 1.0,
        queries: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.backbone, self.vocabulary, self.queries = backbone, vocabulary, queries
        self.dim = dim or backbone.dim
        self.view, self.scale = view, scale
        generator = torch.Generator().manual_seed(seed)
        self.head = nn.Linear(backbone.dim, self.dim, bias=False)
        with torch.no_grad():
            if self.dim == backbone.dim:
                self.head.weight.copy_(init * torch.eye(self.dim))
            else:
                projection = torch.randn(self.dim, backbone.dim, generator=generator) / self.dim**0.5
                self.head.weight.copy_(init * projection)
        self.ngrams = (
            NgramEmbedding(len(vocabulary), self.dim, init * ngram_init, generator) if vocabulary is not None else None
        )

    def featurize(self, items: Sequence[Item], vectors: NDArray[np.float32] | None = None) -> FrozenVectors:
        """Frozen vectors of the questions, and n-gram bags.

        Args:
            items: what is read.
            vectors: (N, d) the frozen vectors, where they are known already.
        """
        if vectors is None:
            vectors = self.backbone.embed([render(item, "source") for item in items], queries=self.queries)
        return FrozenVectors(vectors, None if self.vocabulary is None else self.vocabulary.bags(items, self.view))

    def forward(self, features: FrozenVectors) -> Tensor:
        """(N, D)."""
        vectors = torch.from_numpy(features.vectors).to(self.head.weight.device)
        out: Tensor = self.head(vectors)
        if self.ngrams is not None:
            out = out + self.ngrams(features.bags)
        return self.scale * out

    def reads(self) -> tuple[Any, ...]:
        """Backbone and role, vocabulary and view."""
        role = self.queries and not self.backbone.symmetric
        return (id(self.backbone), role, None if self.vocabulary is None else (self.vocabulary.digest, self.view))

    def settings(self) -> dict[str, Any]:
        """See `Encoder.settings`; the backbone has its own file and probe."""
        return {
            "dim": self.dim,
            "view": self.view,
            "scale": self.scale,
            "queries": self.queries,
            "vocabulary": None if self.vocabulary is None else self.vocabulary.digest,
        }

    def save(self, folder: Path) -> None:
        """encoder.json, model.safetensors, vocabulary.json; the backbone is saved once, by the TriEncoder."""
        write_json(folder / "encoder.json", self.settings())
        if self.vocabulary is not None:
            write_json(folder / "vocabulary.json", self.vocabulary.to_json())
        write_tensors(folder / "model.safetensors", self.state_dict())

    @classmethod
    def load(cls, folder: Path, context: dict[str, Any]) -> Self:
        """See `Encoder.load`; `context["backbone"]` is the shared frozen encoder."""
        config = read_json(folder / "encoder.json", ("dim", "view", "scale", "queries", "vocabulary"))
        vocabulary = None
        expected = config.pop("vocabulary")
        if expected is not None:
            vocabulary = NgramVocabulary.from_json(read_json(folder / "vocabulary.json", ("longest", "idf")))
            check_digest(folder / "vocabulary.json", vocabulary.digest, expected)
        encoder = cls(context["backbone"], vocabulary, **config)
        read_tensors(folder / "model.safetensors", encoder)
        return encoder
