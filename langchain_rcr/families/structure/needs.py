"""E_x of the `structure` family: which structures a question will need.

An example's program is known, so E_c and E_z are read from it. E_x is predicted: how likely each structure is, by a
kernel machine over training questions (frozen vectors of texts and tokens, n-grams) or, where they are sure, by the
question's phrases. With the saturating state, a candidate's logit is about the number of needed structures that it is
expected to newly cover, plus a share of those already covered, adjusted for its length. Words that its question shares
with the one asked count as well.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.items import Item, text_hash
from langchain_rcr.basics.rows import BoolArray, DoubleArray, FloatArray, IntArray, SparseRows
from langchain_rcr.families.encoding import Backbone, BaseEncoder, norms, shifted, sums, times
from langchain_rcr.families.ngrams import NgramVocabulary
from langchain_rcr.families.structure import LANDMARKS, LEAST
from langchain_rcr.families.structure.additions import MOST, Additions, Grown
from langchain_rcr.families.structure.checks import check
from langchain_rcr.families.structure.homes import HOMES, home_hashes, home_rows, useful
from langchain_rcr.families.structure.inventory import MARKS, PHRASED, SPARE, Inventory
from langchain_rcr.families.structure.kernel import RARITY_OF_DESCRIBED, Descriptions, TokenBags, Views
from langchain_rcr.families.structure.shown import FULL_LENGTH, WORDS, rarity, word_rows

_UNFITTED = 1e-6
"""ε before fitting, small enough for a draft to outweigh it."""
IN_DRAFT = (0.6, 0.02)
"""How often a draft has a needed structure, and how often one that isn't needed. Set in trials with gold programs whose
labels were replaced: SQL gained 3 to 4 points of coverage with two labels in five wrong."""
SURE = 0.65
"""Likelihoods by phrases count from here on; a word of the only question that needs a label gives 2/3. With 0, 0.5,
0.7, 0.8, 0.9 and 1 (no phrases), a model answered 91, 90, 89, 91, 76 and 59 % of 100 test questions of COVR's split 100
correctly, and 85, 88, 92, 92, 92 and 88 % of a held-out cluster. On held-out GeoQuery questions, 0.5 to 0.8 gained half
a point of the gold program's probability."""
NEW_LABEL = 3.0
"""Weight of a new label; it also makes up for the larger structures that contain it, which have no columns."""
STALE = 0.1
"""A new fit is worth its time from this ratio of added to fitted questions. Set by hand."""
_OF_HOMES = ("sole", "elsewhere")
_SEEN, _SEEN_QUESTIONS = ("learnt", "phrases", "speaks", *_OF_HOMES), ("landmarks", "added", "token_bags")
"""Attributes that hold what a fit has seen: arrays, and objects of several arrays."""
_GROWING = RLock()
logger = logging.getLogger(__name__)

if hasattr(os, "register_at_fork"):  # a fork waits, since in its process nobody would release it
    os.register_at_fork(before=_GROWING.acquire, after_in_parent=_GROWING.release, after_in_child=_GROWING.release)


@dataclass(frozen=True, slots=True)
class Needs:
    """N featurised questions. Fields that are None are as for questions that E_x was not fitted to."""

    likeness: FloatArray  # (N, M + A) the similarity of each to each of M training questions and A added ones
    local: FloatArray  # (N, C) what its phrases say about each column of `Inventory.small`
    words: FloatArray  # (N, WORDS) 1 in the columns of the question's words
    homes: FloatArray  # (N, HOMES) see `home_rows`; (N, 0) if there are no home columns
    vectors: FloatArray  # (N, d) frozen vectors; d = 0: there are none
    # (N, D) likelihoods that replace those predicted by the landmarks alone. For training questions they are made
    # without their folds, as for a held-out question; for others, with added questions as landmarks.
    raw: FloatArray | None = None
    shift: FloatArray | None = None  # (N, S) what a draft adds to the log-odds of each structure
    new: FloatArray | None = None  # (N, SPARE) likelihoods of new labels; see `NewLabels`
    # (N, columns) the weight of each column, less if only the programs of one other home have it
    useful: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.likeness)

    def select(self, rows: IntArray) -> Needs:
        """The features of some rows, in that order."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: array[rows] for name, array in arrays.items() if array is not None})


class NumpyNeedEncoder(BaseEncoder):
    """E_x: scale · how many structures of each column the question's program is expected to have.

    A structure s of n nodes is worth w_s · w_n · (P(s|x)^γ − ε · (1 − P(s|x))) to question x. ε is the cost of showing
    a structure that isn't needed, which distracts a language model and lengthens the prompt.

    Before it is fitted (`fit`), it takes every question to need next to nothing.

    Args:
        inventory: the structures.
        vocabulary: the n-grams of questions.
        backbone: a frozen text encoder; None: n-grams alone.
        scale: a constant factor on the vectors.
        words: ω, the weight of all words of a question together, in units of a program that is exactly what it needs.
        home: the weight of an example from the question's own home, in the same units.
        homes: whether there are home columns; the attribute holds their number.
        additions: examples that were added after training; None: there are none.
        most: the most landmarks that a fit may take.
        described: for each structure described by a landmark, the landmark's number and the structure's column; see
            `describe`.
    """

    batch_size = 128
    grown = ("additions", "added")
    arguments = ("scale",)
    optional = ("homes",)
    rates: ClassVar = {"by_size": 0.05, "cost": 0.05, "power": 0.02, "worth": 0.01, "wording": 0.05, "homing": 0.05}
    vocabularies: ClassVar = {"inventory": Inventory, "vocabulary": NgramVocabulary, "additions": Additions}
    fitted = ("landmarks.", "added.", "token_bags.", "dual", "learnt", "speaks")
    dual: Any
    mean: Any
    owner: Any
    lengths: Any
    worth: Any
    by_size: Any
    power: Any
    cost: Any
    wording: Any
    homing: Any
    rarity: Any
    _grown: Grown | None
    _calibrated: FloatArray | None

    def __init__(
        self,
        inventory: Inventory,
        vocabulary: NgramVocabulary,
        backbone: Backbone | None = None,
        *,
        scale: float = 1.0,
        words: float = 0.0,
        home: float = 0.0,
        homes: bool | int = False,
        additions: Additions | None = None,
        most: int = LANDMARKS,
        described: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__()
        self.inventory, self.vocabulary, self.backbone, self.scale = inventory, vocabulary, backbone, float(scale)
        self.additions, self._grown, self._calibrated, self.most = additions, None, None, most
        self._judged: tuple[Additions | None, int] = None, 0  # how many of these the fit hasn't seen
        self.descriptions = Descriptions(described)
        columns, self.homes = len(inventory), HOMES if homes else 0
        self.dim = columns + SPARE + self.homes + WORDS
        width = 0 if backbone is None else backbone.dim
        unread = np.zeros((0, width), dtype=np.float32)
        self.token_bags = TokenBags.fit([])
        self.landmarks = self.added = Views(unread, unread[:, :0], vocabulary.bags([]), home_hashes([]))
        self.learnt = np.zeros((0, 2), dtype=np.int64)
        self.phrases = np.full(len(vocabulary), -1, dtype=np.int64)  # see `cues.phrases`
        self.speaks = np.zeros((1, len(inventory.small)), dtype=np.float32)
        self.sole, self.elsewhere = np.zeros(columns, dtype=np.int64), np.ones((), dtype=np.float32)  # `learn_homes`
        self.keep("dual", np.zeros((0, columns), dtype=np.float32), trained=True)
        self.keep("mean", np.zeros(columns, dtype=np.float32))
        self.keep("owner", inventory.owner, saved=False)
        self.keep("lengths", inventory.lengths.astype(np.int64), saved=False)
        # Logarithms, so that steps are factors.
        first = {
            "worth": np.zeros(len(inventory.names)),  # (S,) w_s
            "by_size": np.zeros(int(inventory.lengths.max(initial=1))),  # w_n
            "power": np.zeros(()),  # γ
            "cost": np.log(_UNFITTED),  # ε
            "wording": np.log(max(words, LEAST)),  # ω
        }
        first |= {"homing": np.log(max(home, LEAST))} if homes else {}
        for name, value in first.items():
            self.keep(name, np.asarray(value, dtype=np.float32), trained=True)
        self.keep("rarity", np.ones(WORDS, dtype=np.float32))

    @classmethod
    def load(cls, folder: Path, backbone: Backbone | None = None) -> Self:
        """See `BaseEncoder.load`."""
        encoder = super().load(folder, backbone)
        check(encoder, folder / "model.safetensors")
        encoder._with_additions()  # takes seconds with thousands of landmarks: not at the first question
        return encoder

    def tensors(self) -> dict[str, NDArray[Any]]:
        """See `BaseEncoder.tensors`; also what a fit has seen, which isn't trained."""
        found = super().tensors() | {name: getattr(self, name) for name in _SEEN}
        for name in _SEEN_QUESTIONS:
            found |= {f"{name}.{part}": array for part, array in getattr(self, name).arrays().items()}
        hidden = () if self.homes else (".homes", *_OF_HOMES)
        return {name: array for name, array in found.items() if not name.endswith(hidden)}

    def put(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """See `BaseEncoder.put`."""
        left = dict(tensors)
        for name in _SEEN_QUESTIONS:
            parts = {key.removeprefix(f"{name}."): left.pop(key) for key in tensors if key.startswith(f"{name}.")}
            if parts:
                setattr(self, name, getattr(self, name).of(parts))
        for name in left.keys() & _SEEN:
            setattr(self, name, left.pop(name))
        super().put(left)

    def learn(self, items: Sequence[Item], others: Sequence[Item] = ()) -> None:
        """Take these training questions as landmarks; their weights (`dual`) are still to be fitted.

        `others` are the training questions that don't become landmarks; `unseen` must know them too.
        """
        read = getattr(self.backbone, "read", None)
        if read is not None and items:
            self.token_bags = TokenBags.fit(read([item.source for item in items])[1])
        self.landmarks = self.views(items)
        self.learnt = self._names([*items, *others])
        dual = np.zeros((len(items), len(self.inventory)), dtype=np.float32)
        self.put({"dual": dual, "rarity": rarity([item.source for item in items])})
        self.descriptions = Descriptions()
        rest = self._unknown(self._known)
        self.additions, self._grown, self._calibrated = Additions(rest) if rest else None, None, None
        self.added = self.views(rest)

    def settings(self) -> dict[str, Any]:
        """See `BaseEncoder.settings`."""
        return super().settings() | ({"described": pairs} if (pairs := self.descriptions.pairs) else {})

    def describe(self, items: Sequence[Item]) -> None:
        """See `BaseEncoder.describe`.

        The similarity of questions to descriptions adds to what the landmarks predict, and rarity counts less.
        """
        kept = self.tensors()
        if items and not self.descriptions.pairs:
            self.put({"worth": RARITY_OF_DESCRIBED * kept["worth"]})
        programs = self.inventory.rows([item.target for item in items])
        self.descriptions = Descriptions.of(self.landmark_of(items).tolist(), programs, kept["mean"])

    def landmark_of(self, items: Sequence[Item]) -> IntArray:
        """(N,): which landmark each example is, by its question and its program; -1: none."""
        place = {tuple(names): row for row, names in enumerate(self.learnt[: len(self.dual)].tolist())}
        return np.array([place.get(tuple(names), -1) for names in self._names(items).tolist()], dtype=np.int64)

    @property
    def stale(self) -> bool:
        """See `BaseEncoder.stale`."""
        enough = min(MOST, STALE * len(self.learnt))
        is_grown = 0 < enough <= len(self._known) and enough <= self._late
        return is_grown and not self.descriptions.pairs  # a refit knows a pool of tools, not the requests

    def keep_preferences(self, other: NumpyNeedEncoder) -> None:
        """Take over γ, ε, ω and the weights by size as the race or GRPO left them, whatever the structures are."""
        own, others = self.tensors(), other.tensors()
        sizes = min(len(self.by_size), len(other.by_size))
        by_size = np.concatenate([others["by_size"][:sizes], own["by_size"][sizes:]])
        numbers = {"power", "cost", "wording", "homing"} & own.keys() & others.keys()
        self.put({name: others[name] for name in numbers} | {"by_size": by_size})

    def unseen(self, names: IntArray) -> BoolArray:
        """See `BaseEncoder.unseen`."""
        seen = {*map(tuple, self.learnt.tolist())}
        return np.array([tuple(each) not in seen for each in names.tolist()], dtype=np.bool_)

    def _names(self, items: Sequence[Item]) -> IntArray:
        """(N, 2) hashes of each question and of each program."""
        key = self.inventory.spec.key
        hashes = [(text_hash(item.source), text_hash(key(item.target))) for item in items]
        return np.array(hashes, dtype=np.int64).reshape(-1, 2)

    def featurize(self, items: Sequence[Item]) -> Needs:
        """Similarity to landmarks, what phrases say about small structures, new labels, the home, and the words."""
        views, questions = self.views(items), [item.source for item in items]
        local, words = self.local(views.bags), np.asarray(word_rows(questions))
        grown, raw, new = self._with_additions(), None, None
        likeness = (grown or self.landmarks).likeness(views)
        if grown is not None:
            raw, spare = np.split(likeness @ grown.dual + grown.mean, [-SPARE], axis=1)
            new = None if grown.labels is None else grown.labels.likelihoods(questions, spare)
        if self.descriptions.pairs:
            kept = self.tensors()
            raw = likeness @ kept["dual"] + kept["mean"] if raw is None else raw
            raw = raw + self.descriptions.told(views.vectors, self.landmarks.vectors, kept["mean"])
        homes, share = np.zeros((len(items), 0), np.float32), None
        if self.homes:
            homes = np.asarray(home_rows([item.home for item in items]))
            share = useful(self.sole if grown is None else grown.sole, self.elsewhere, views.homes)
        return Needs(likeness, local, words, homes, views.vectors, raw=raw, new=new, useful=share)

    def relevance(self, features: Needs) -> DoubleArray:
        """See `BaseEncoder.relevance`: the share of training questions, held out, that are less similar to theirs.

        See `Views.nearest_held_out`; similarity is the cosine of frozen vectors or, without these, the kernel.
        """
        if self._calibrated is None:
            self._calibrated = np.sort(self.landmarks.nearest_held_out(self.learnt[: len(self.dual), 1]))
        near = features.likeness
        if features.vectors.shape[1]:
            every = np.concatenate([part.vectors for part in (self.landmarks, self.added)])
            near = features.vectors @ every.T
        found: DoubleArray = np.searchsorted(self._calibrated, near.max(axis=1, initial=-1), side="right")
        return found / max(1, len(self._calibrated))

    def save(self, folder: Path) -> None:
        """See `BaseEncoder.save`; examples added meanwhile wait."""
        with _GROWING:
            super().save(folder)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: without what is large and quickly rebuilt."""
        return {**self.__dict__, "_grown": None, "_calibrated": None}

    def grow(self, items: Sequence[Item], *, labels_only: bool = False) -> None:
        """See `BaseEncoder.grow`: it learns what added questions need, and which questions need a new label."""
        with _GROWING:
            known, room = set(self._known), MOST - len(self._known)
            if len(items) > room and not labels_only:
                # The fit's own examples, whose labels may have no column, leave room for others.
                room = min(MOST - self._late, 2 * MOST - len(known))
            if room <= 0:
                return
            unknown = items if labels_only else self._unknown(items)
            new = [item for item in unknown if self.inventory.spare(item.target)]
            new += [] if labels_only else unknown
            new = [item for item in dict.fromkeys(new) if item not in known][:room]
            if new:
                views = self.views(new)
                self._grown = self._joined(self._with_additions(), views, new)
                self.added = self.added.followed_by(views)
                self.additions = Additions([*self._known, *new])
            if len(new) == room and not labels_only:
                logger.warning("%d examples were added since the fit: further ones teach nothing until refit()", MOST)

    @property
    def _known(self) -> tuple[Item, ...]:
        """The examples that were added after training."""
        return self.additions.items if self.additions else ()

    @property
    def _late(self) -> int:
        """How many of the added examples the fit hasn't seen."""
        if self._judged[0] is not self.additions:  # else every addition would go through all that was learnt
            self._judged = self.additions, int(self.unseen(self._names(self._known)).sum())
        return self._judged[1]

    def _unknown(self, items: Sequence[Item]) -> list[Item]:
        """Those of the examples that aren't landmarks and have a structure or a label."""
        unknown = [item for item, row in zip(items, self.landmark_of(items), strict=True) if row < 0]
        read = self.inventory.rows([item.target for item in unknown], spare=True)
        return [item for item, count in zip(unknown, np.diff(read.starts), strict=True) if count]

    def _with_additions(self) -> Grown | None:
        """The regression with the added questions; None: there are none."""
        if self.additions is not None and self._grown is None:  # after loading, or another fit
            with _GROWING:
                self._grown = self._joined(None, self.added, self.additions.items)
        return self._grown

    def _joined(self, grown: Grown | None, views: Views, new: Sequence[Item]) -> Grown:
        """Take further added examples in."""
        targets = np.asarray(self.inventory.rows([item.target for item in new], spare=True))
        if grown is None:
            kept, inverse = self.tensors(), np.linalg.inv(self.landmarks.ridged()).astype(np.float32)
            padded = np.pad(kept["dual"], ((0, 0), (0, SPARE))), np.pad(kept["mean"], (0, SPARE))
            grown = Grown(self.landmarks, inverse, *padded, self.sole, self.views([]), (), targets[:0])
        return grown.joined(views, [item.source for item in new], targets, self.vocabulary)

    def drafted(self, features: Needs, drafts: Sequence[str | None]) -> Needs:
        """See `BaseEncoder.drafted`; a draft that doesn't parse, or has no known structure, changes nothing."""
        needed, other = IN_DRAFT
        shift = np.zeros((len(drafts), len(self.inventory.names)), dtype=np.float32)
        for row, draft in enumerate(drafts):
            has = self.inventory.has(draft or "")
            if has.any():
                shift[row] = np.where(has, math.log(needed / other), math.log((1 - needed) / (1 - other)))
        return replace(features, shift=shift)

    def local(self, bags: SparseRows) -> FloatArray:
        """(N, C) what phrases say about the columns of small structures."""
        said = np.split(self.phrases[bags.columns], bags.starts[1:-1])  # faster than `cues.likelihoods`
        sums = [self.speaks[phrases[phrases >= 0]].sum(axis=0) for phrases in said]
        return np.asarray(1 - np.exp(-(np.stack(sums) + self.speaks[-1])))

    def views(self, items: Sequence[Item]) -> Views:
        """The questions as the kernel sees them; the backbone reads each once."""
        questions = [item.source for item in items]
        vectors = tokens = np.zeros((len(items), 0), dtype=np.float32)
        if len(self.token_bags.anchors):
            read: Any = getattr(self.backbone, "read", None)
            vectors, words = read(questions)
            tokens = self.token_bags.vectors(words)
        elif self.backbone is not None:
            vectors = self.backbone.embed(questions, queries=True)
        homes = home_hashes([item.home if self.homes else "" for item in items])
        bags = self.vocabulary.bags([Item(question) for question in questions])
        return Views(vectors, tokens, bags, homes)

    def raw(self, features: Needs) -> Any:
        """Likelihoods (N, D) of the columns, each by itself; not yet clipped to 0 … 1."""
        if features.raw is not None:
            return self.given(features.raw)
        return times(self.given(features.likeness), self.dual) + self.mean

    def likelihoods(self, features: Needs) -> Any:
        """(N, S) how likely each structure is, given all evidence and the draft, if any."""
        xp = self.xp
        predicted = xp.clip(self.raw(features), 0, 1)
        said = xp.zeros_like(predicted)
        said[:, self.inventory.small] = self.given(features.local)
        by_phrases = said[:, self.owner]
        by_phrases = xp.where((by_phrases >= SURE) & (self.lengths <= PHRASED), by_phrases, 0)
        likely = xp.maximum(predicted[:, self.owner], by_phrases)
        if features.useful is not None:
            likely = likely * self.given(features.useful)[:, self.owner]
        if features.shift is None:
            return likely
        shift = self.given(features.shift)
        return xp.where(shift == 0, likely, shifted(likely, shift, LEAST))

    def logged(self) -> dict[str, float]:
        """γ, ε, ω, and the weights of single labels and larger structures."""
        kept = self.tensors()
        sizes = enumerate(np.exp(kept["by_size"]).tolist(), start=1)
        weights = {f"structures of {size} ×" if size > 1 else "labels ×": w for size, w in sizes}
        numbers = {"γ": "power", "ε": "cost", "ω": "wording"} | ({"home": "homing"} if self.homes else {})
        return {**{sign: float(np.exp(kept[name])) for sign, name in numbers.items()}, **weights}

    def valued(self, likely: Any) -> Any:
        """(N, columns) what the inventory's columns are worth, from (N, S) likelihoods."""
        worth = self.xp.exp(self.worth + self.by_size[self.lengths - 1]) * self._each(likely)
        return self.scale * sums(worth, self.owner, len(self.inventory))

    def _each(self, likely: Any) -> Any:
        xp = self.xp
        return xp.clip(likely, LEAST, None) ** xp.exp(self.power) - xp.exp(self.cost) * (1 - likely)

    def forward(self, features: Needs) -> Any:
        """(N, D): what the inventory's columns, the spare ones, the home and the words are worth."""
        xp = self.xp
        needs = xp.concatenate([self.valued(self.likelihoods(features)), self._of_new(features)], 1)
        whole = FULL_LENGTH * norms(xp.clip(needs, 0, None))
        homes = self.given(features.homes)
        if self.homes:
            homes = xp.exp(self.homing) * whole * homes
        rare = self.given(features.words) * self.rarity
        words = xp.exp(self.wording) * whole * rare / xp.clip(rare.sum(1), LEAST, None)[:, None]
        return xp.concatenate([needs, homes, words], 1)

    def _of_new(self, features: Needs) -> Any:
        """(N, SPARE) what new labels are worth: each as much as the most valuable label."""
        if features.new is None:
            return self.given(np.zeros((len(features), SPARE), dtype=np.float32))
        most = self.xp.exp(self.worth.max() + self.by_size[0]) * NEW_LABEL
        return self.scale * most / MARKS * self._each(self.given(features.new))
