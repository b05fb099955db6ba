"""The `structure` family: an example by the structures of its own program, a question by those that it will need.

E_c and E_z are read off the program, which is known. E_x is predicted: how likely each structure is, by a kernel
machine over training questions (frozen vectors of texts and tokens, n-grams) or, where these are sure, by the
question's phrases. With the saturating state a candidate's logit is about the number of needed structures that it can
be expected to newly cover, and a share of those covered before, for its length; and the words that its question shares
with the one that is asked count beside.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import SparseRows
from langchain_rcr.errors import CheckpointError
from langchain_rcr.families.encoder import Backbone, Encoder
from langchain_rcr.families.folds import text_hash
from langchain_rcr.families.ngrams import NgramVocabulary
from langchain_rcr.families.structure import LANDMARKS, cues
from langchain_rcr.families.structure.additions import MOST, Additions, Joined, NewLabels
from langchain_rcr.families.structure.inventory import MARKS, PHRASED, SPARE, Inventory
from langchain_rcr.families.structure.kernel import Landmarks, Views
from langchain_rcr.families.structure.tokens import TokenBags
from langchain_rcr.families.structure.words import WORDS, rarity, word_rows

_UNFITTED = 1e-6
"""ε before fitting: a draft outweighs it."""
IN_DRAFT = (0.6, 0.02)
"""How often a draft has a structure that is needed, and one that isn't. Set in trials with gold programs whose labels
were replaced: SQL gained 3 to 4 points of coverage with two labels in five wrong."""
SURE = 0.65
"""The least likelihood by phrases that counts; a word of the one question that needs a label says 2/3. With 0, 0.5,
0.7, 0.8, 0.9 and 1 (no phrases) a model answered 91, 90, 89, 91, 76 and 59 % of 100 test questions of COVR's split 100
right, and 85, 88, 92, 92, 92 and 88 % of a held-out cluster. On held-out GeoQuery questions 0.5 to 0.8 gained half a
point of the gold program's probability."""
NEW_LABEL = 3.0
"""Times that a new label counts, also for the larger structures with it, which have no columns."""
_FULL_LENGTH = 5.0
"""Norm of the structures of a program that counts fully, whatever the length penalty: the scale of the logits alone."""
NEIGHBOURS = 0.01
"""The share of training questions, the nearest, that are held out with one where `relevance` is calibrated. With none
but those with its program, 5 % of thresholds refused 37 % of the test questions of COVR's split 110, whose structures
are combined anew; with 0.01, 1 % there and none or 1 % on GeoQuery and scholar, and 95 to 100 % of other questions."""
STALE = 0.1
"""The share of added questions, of those that were fitted to, from which on a fit is worth its time. Set by hand."""
_GROWING = RLock()
logger = logging.getLogger(__name__)
LEAST = 1e-6
"""Numbers below count as this: a power of 0 has no slope, and 0 no logarithm."""


class ProgramEncoder(Encoder):
    """E_c or E_z: which structures an example's program has, each times a trained weight that starts at 1.

    E_c also has the words of its question. Picks don't cover them: E_z has none.

    Args:
        inventory: the structures.
        scale: a constant factor: 1, or below 0 for E_z of the additive state.
        context: whether it is E_z, whose weights stay between 0 and 1: nothing is covered by more than all.
        length_penalty: α ≥ 0: structures are divided by (their norm / 5)^α.
    """

    arguments = ("scale", "context", "length_penalty")
    vocabularies: ClassVar = {"inventory": Inventory}

    def __init__(
        self, inventory: Inventory, *, scale: float = 1.0, context: bool = False, length_penalty: float = 0.0
    ) -> None:
        super().__init__()
        self.inventory, self.scale, self.context, self.length_penalty = inventory, scale, context, length_penalty
        self.dim = len(inventory) + SPARE + WORDS
        self.weight = nn.Parameter(torch.ones(len(inventory)))

    def featurize(self, items: Sequence[Item]) -> SparseRows:
        """(N, D) the share of each column's structures that a program has, of unseen ones labels alone; the words.

        The same for E_c and E_z.
        """
        return self.inventory.rows([item.target for item in items], spare=True).beside(
            word_rows([item.source for item in items])
        )

    def forward(self, features: SparseRows) -> Tensor:
        """(N, D)."""
        features = self._shown(features)
        columns, values = self._values(features)
        rows = torch.from_numpy(features.owner).to(values.device)
        return values.new_zeros(features.shape).index_put((rows, columns), values)

    def rows(self, features: SparseRows) -> SparseRows:
        """See `Encoder.rows`."""
        features = self._shown(features)
        with torch.inference_mode():
            return replace(features, values=self._values(features)[1].float().cpu().numpy())

    def _shown(self, features: SparseRows) -> SparseRows:
        return features.first(self.dim - WORDS) if self.context else features

    def _values(self, features: SparseRows) -> tuple[Tensor, Tensor]:
        """The column and the value of each structure that the items have."""
        shares = features.values
        if self.length_penalty:
            structures, owner = features.columns < self.dim - WORDS, features.owner
            norms = np.sqrt(np.bincount(owner, structures * shares**2, minlength=len(features)))
            by_length = (np.maximum(norms, LEAST) / _FULL_LENGTH) ** -self.length_penalty
            shares = shares * np.where(structures, by_length.astype(np.float32)[owner], 1)
        device = self.weight.device
        columns, values = (torch.from_numpy(a).to(device) for a in (features.columns.astype(np.int64), shares))
        weight = self.weight.clamp(0, 1) if self.context else self.weight
        weight = torch.cat([weight, weight.new_ones(SPARE + WORDS)])
        return columns, self.scale * values * weight[columns]

    def reads(self) -> tuple[Any, ...]:
        """The inventory."""
        return (self.inventory.digest,)


_Grown: TypeAlias = tuple[Joined, NewLabels | None, NDArray[np.float32]]
"""The regression with the A added questions, who needs a new label, and what the added programs have (A, columns)."""


@dataclass(frozen=True, slots=True)
class Needs:
    """N featurised questions. What is None is as for questions that E_x was not fitted to.

    Args:
        likeness: (N, M) how like each is to each of M training questions.
        local: (N, C) what its phrases say of each column of `Inventory.small`.
        raw: (N, D) likelihoods that take the place of those predicted by the landmarks alone: for training questions
            without their folds, as those of a held-out question are; for others with added questions as landmarks.
        shift: (N, S) what a draft adds to the log-odds of each structure.
        new: (N, SPARE) likelihoods of new labels; see `NewLabels`.
        words: (N, WORDS) 1 in the columns of the question's words.
        vectors: (N, d) frozen vectors; d = 0: there are none.
    """

    likeness: NDArray[np.float32]
    local: NDArray[np.float32]
    raw: NDArray[np.float32] | None = None
    shift: NDArray[np.float32] | None = None
    new: NDArray[np.float32] | None = None
    words: NDArray[np.float32] | None = None
    vectors: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.likeness)

    def select(self, rows: NDArray[np.int64]) -> Needs:
        """The features of some rows, in that order."""
        others = (self.raw, self.shift, self.new, self.words, self.vectors)
        first = self.likeness[rows], self.local[rows]
        return Needs(*first, *(None if array is None else array[rows] for array in others))


def _within(numbers: Tensor, least: int, end: int) -> bool:
    return not numbers.numel() or bool(least <= numbers.min() and numbers.max() < end)


def _rises(numbers: Tensor) -> bool:
    return bool((numbers.diff() >= 0).all())


class NeedEncoder(Encoder):
    """E_x: scale · how many structures of each column the question's program can be expected to have.

    What a structure s of n nodes is worth to question x is w_s · w_n · (P(s|x)^γ − ε · (1 − P(s|x))): ε is what showing
    a structure costs that isn't needed, since it distracts a language model and makes prompts long.

    Before it has been fitted (`fit`) it takes every question to need next to nothing.

    Args:
        inventory: the structures.
        vocabulary: the n-grams of questions.
        backbone: a frozen text encoder; None: n-grams alone.
        scale: a constant factor on the vectors.
        words: ω, what all words of a question together count for, in units of a program that is just what it needs.
        additions: examples that were added after training; None: there are none.
        most: landmarks that a fit may take.
    """

    batch_size = 128
    grown = ("additions", "added")
    arguments = ("scale",)
    rates: ClassVar = {"by_size": 0.05, "cost": 0.05, "power": 0.02, "worth": 0.01, "wording": 0.05}
    vocabularies: ClassVar = {"inventory": Inventory, "vocabulary": NgramVocabulary, "additions": Additions}
    fitted = ("landmarks.", "added.", "token_bags.", "dual", "learnt", "speaks")
    learnt: Tensor
    mean: Tensor
    owner: Tensor
    lengths: Tensor
    phrases: Tensor
    speaks: Tensor
    rarity: Tensor
    _grown: _Grown | None
    _calibrated: NDArray[np.float32] | None

    def __init__(
        self,
        inventory: Inventory,
        vocabulary: NgramVocabulary,
        backbone: Backbone | None = None,
        *,
        scale: float = 1.0,
        words: float = 0.0,
        additions: Additions | None = None,
        most: int = LANDMARKS,
    ) -> None:
        super().__init__()
        self.inventory, self.vocabulary, self.backbone, self.scale = inventory, vocabulary, backbone, scale
        self.additions, self._grown, self._calibrated, self.most = additions, None, None, most
        columns, self.dim = len(inventory), len(inventory) + SPARE + WORDS
        width = 0 if backbone is None else backbone.dim
        unread = np.zeros((0, width), dtype=np.float32)
        self.token_bags = TokenBags()
        self.landmarks = Landmarks(Views(unread, unread[:, :0], vocabulary.bags([])))
        self.added = Landmarks(self.landmarks.views)
        self.dual = nn.Parameter(torch.zeros(0, columns))
        self.register_buffer("learnt", torch.zeros(0, 2, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(columns))
        structures = len(inventory.names)
        self.register_buffer("owner", torch.from_numpy(inventory.owner), persistent=False)
        self.register_buffer("lengths", torch.from_numpy(inventory.lengths), persistent=False)
        self.register_buffer("phrases", torch.full((len(vocabulary),), -1))  # see `cues.phrases`
        self.register_buffer("speaks", torch.zeros(1, len(inventory.small)))
        # Logarithms, so that steps are factors.
        self.worth = nn.Parameter(torch.zeros(structures))  # (S,) w_s
        self.by_size = nn.Parameter(torch.zeros(int(inventory.lengths.max(initial=1))))  # w_n
        self.power = nn.Parameter(torch.zeros(()))  # γ
        self.cost = nn.Parameter(torch.full((), math.log(_UNFITTED)))  # ε
        self.wording = nn.Parameter(torch.full((), math.log(max(words, LEAST))))  # ω
        self.register_buffer("rarity", torch.ones(WORDS))

    @classmethod
    def load(cls, folder: Path, backbone: Backbone | None = None) -> Self:
        """See `Encoder.load`; a fit to tokens in context needs a backbone that gives them, as LangChain's don't."""
        encoder = super().load(folder, backbone)
        if len(encoder.token_bags.anchors) and not hasattr(backbone, "read"):
            raise CheckpointError(
                f"{folder.parent} was trained over a transformer's tokens, which LangChain embeddings don't give: "
                "load it without embeddings"
            )
        own, given = encoder.landmarks.vectors.shape[1], 0 if encoder.backbone is None else encoder.backbone.dim
        if own != given:
            raise CheckpointError(
                f"{folder.parent} was trained over vectors of {own} numbers, its encoder gives {given}"
            )
        encoder._check(folder / "model.safetensors")
        encoder._with_additions()  # takes seconds with thousands of landmarks, which the first question shouldn't
        return encoder

    def _check(self, file: Path) -> None:
        """Refuse fitted tensors of shapes that don't belong together, or that point beyond each other.

        Raises:
            CheckpointError: naming one.
        """
        bags, count = self.token_bags, self.landmarks.starts.numel() - 1
        questions = {"landmarks": count, "added": len(self.additions.items) if self.additions else 0}
        anchors, rank = len(bags.mass), bags.root.shape[-1]
        phrases = int(self.phrases.max()) + 1 if len(self.phrases) else 0
        width = 0 if self.backbone is None else self.backbone.dim
        shapes = {
            "dual": (count, len(self.inventory)),
            "learnt": (max(count, len(self.learnt)), 2),
            "speaks": (phrases + 1, len(self.inventory.small)),
            "token_bags.anchors": (anchors, width) if anchors else (0, 0),
            "token_bags.centre": (width,) if anchors else (0, 0),
            "token_bags.mass": (anchors,) if anchors else (0, 0),
            "token_bags.root": (anchors, rank) if anchors else (0, 0),
        }
        for name, number in questions.items():
            near = getattr(self, name)
            shapes |= {f"{name}.{part}": (near.columns.numel(),) for part in ("columns", "values")}
            shapes[f"{name}.starts"] = (number + 1,)
            shapes |= {f"{name}.vectors": (number, width), f"{name}.tokens": (number, rank)}
        tensors = self.state_dict()
        wrong = [name for name, shape in shapes.items() if tuple(tensors[name].shape) != shape]
        for name in () if wrong else questions:
            near = getattr(self, name)
            inside = _within(near.columns, 0, len(self.vocabulary)) and _rises(near.starts)
            if not (inside and near.starts[0] == 0 and near.starts[-1] == near.columns.numel()):
                wrong = [name]
        if not wrong and not _within(self.phrases, -1, len(self.phrases)):
            wrong = ["phrases"]
        if wrong:
            raise CheckpointError(f"{file} is damaged: {wrong[0]} doesn't fit the tensors beside it")

    def learn(self, items: Sequence[Item], others: Sequence[Item] = ()) -> None:
        """Take these training questions as landmarks; their weights (`dual`) are still to be fitted.

        Args:
            items: the landmarks.
            others: training questions that are none, so that later `unseen` knows them.
        """
        read = getattr(self.backbone, "read", None)
        if read is not None and items:
            self.token_bags = TokenBags(read([item.source for item in items])[1]).to(self.mean.device)
        self.landmarks = Landmarks(self.views(items)).to(self.mean.device)
        self.dual = nn.Parameter(self.mean.new_zeros(len(items), len(self.inventory)))
        self.learnt = torch.from_numpy(self._names([*items, *others])).to(self.mean.device)
        self.rarity = torch.from_numpy(rarity([item.source for item in items])).to(self.mean.device)
        rest = self._unknown(self.additions.items) if self.additions else []
        self.additions, self._grown, self._calibrated = Additions(rest) if rest else None, None, None
        self.added = Landmarks(self.views(rest)).to(self.mean.device)

    def landmark_of(self, items: Sequence[Item]) -> NDArray[np.int64]:
        """(N,): which landmark each example is, by its question and its program; -1: none."""
        place = {tuple(names): row for row, names in enumerate(self.learnt[: len(self.dual)].tolist())}
        return np.array([place.get(tuple(names), -1) for names in self._names(items).tolist()], dtype=np.int64)

    @property
    def stale(self) -> bool:
        """See `Encoder.stale`."""
        added, enough = self.additions.items if self.additions else (), min(MOST, STALE * len(self.learnt))
        return 0 < enough <= len(added) and int(self.unseen(self._names(added)).sum()) >= enough

    def keep_preferences(self, other: NeedEncoder) -> None:
        """Take over what the race or GRPO made of γ, ε, ω and the weights by size, whatever the structures are."""
        with torch.no_grad():
            for name in ("power", "cost", "wording"):
                getattr(self, name).copy_(getattr(other, name))
            sizes = min(len(self.by_size), len(other.by_size))
            self.by_size[:sizes] = other.by_size[:sizes]

    def unseen(self, names: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `Encoder.unseen`."""
        seen = {*map(tuple, self.learnt.tolist())}
        return np.array([tuple(each) not in seen for each in names.tolist()], dtype=np.bool_)

    def _names(self, items: Sequence[Item]) -> NDArray[np.int64]:
        """(N, 2) hashes of each question and of each program."""
        key = self.inventory.spec.key
        hashes = [(text_hash(item.source), text_hash(key(item.target))) for item in items]
        return np.array(hashes, dtype=np.int64).reshape(-1, 2)

    def featurize(self, items: Sequence[Item]) -> Needs:
        """Likeness to the landmarks, what phrases say of the small structures, new labels, and the words."""
        views, questions = self.views(items), [item.source for item in items]
        local, words = self.local(views.bags), np.asarray(word_rows(questions))
        grown = self._with_additions()
        if grown is None:
            return Needs(self.landmarks.likeness(views), local, words=words, vectors=views.vectors)
        joined, labels, _ = grown
        likeness = joined.likeness(views)
        predicted = likeness @ joined.dual + joined.mean
        raw, spare = predicted[:, :-SPARE], predicted[:, -SPARE:]
        new = None if labels is None else labels.likelihoods(questions, spare)
        near = likeness[:, : len(self.dual)]
        return Needs(near, local, raw=raw, new=new, words=words, vectors=views.vectors)

    def relevance(self, features: Needs) -> NDArray[np.float64]:
        """See `Encoder.relevance`: the share of training questions that, held out, are less like the nearest one.

        Held out with each are the questions that have its program, and the nearest `NEIGHBOURS` of the others: those to
        come may combine what none of them does. Likeness is the cosine of frozen vectors, or without these the kernel.
        """
        if self._calibrated is None:
            known = self.landmarks.views
            among = known.vectors @ known.vectors.T if known.vectors.shape[1] else self.landmarks.likeness(known)
            programs = self.learnt[: len(among), 1].cpu().numpy()
            among = np.sort(np.where(programs[:, None] == programs, -1, among), axis=1)
            self._calibrated = np.sort(among[:, -1 - int(NEIGHBOURS * len(among))]) if len(among) else among.ravel()
        near = features.likeness
        if features.vectors is not None and features.vectors.shape[1]:
            every = np.concatenate([part.vectors.cpu().numpy() for part in (self.landmarks, self.added)])
            near = features.vectors @ every.T
        found: NDArray[np.float64] = np.searchsorted(self._calibrated, near.max(axis=1, initial=-1), side="right")
        return found / max(1, len(self._calibrated))

    def save(self, folder: Path) -> None:
        """See `Encoder.save`; examples that come in meanwhile wait."""
        with _GROWING:
            super().save(folder)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: without what is soon made again, and large."""
        return {**self.__dict__, "_grown": None, "_calibrated": None}

    def grow(self, items: Sequence[Item], *, labels_only: bool = False) -> None:
        """See `Encoder.grow`: what an added question needs is known from now on, and who needs a new label."""
        with _GROWING:
            known = dict.fromkeys(self.additions.items if self.additions else ())
            room = MOST - len(known)
            if room <= 0:
                return
            new = [item for item in items if self.inventory.spare(item.target)]
            new += [] if labels_only else self._unknown(items)
            new = [item for item in dict.fromkeys(new) if item not in known][:room]
            if new:
                views = self.views(new)
                self._grown = self._joined(self._with_additions(), views, new)
                self.added = Landmarks(self.added.views.followed_by(views)).to(self.mean.device)
                self.additions = Additions([*known, *new])
            if len(new) == room and not labels_only:
                logger.warning("%d examples were added since the fit: further ones teach nothing until refit()", MOST)

    def _unknown(self, items: Sequence[Item]) -> list[Item]:
        """Of these examples those that are no landmarks and have a structure or a label."""
        unknown = [item for item, row in zip(items, self.landmark_of(items), strict=True) if row < 0]
        read = self.inventory.rows([item.target for item in unknown], spare=True)
        return [item for item, count in zip(unknown, np.diff(read.starts), strict=True) if count]

    def _with_additions(self) -> _Grown | None:
        """The regression with the added questions; None: there are none."""
        if self.additions is not None and self._grown is None:  # after loading, or another fit
            with _GROWING:
                self._grown = self._joined(None, self.added.views, self.additions.items)
        return self._grown

    def _joined(self, grown: _Grown | None, views: Views, new: Sequence[Item]) -> _Grown:
        """With further added examples."""
        targets = np.asarray(self.inventory.rows([item.target for item in new], spare=True))
        questions = [item.source for item in new]
        if grown is None:
            dual, mean = (tensor.detach().cpu().numpy() for tensor in (self.dual, self.mean))
            inverse = self.landmarks.inverse().astype(np.float32)
            joined = Joined(self.landmarks, inverse, np.pad(dual, ((0, 0), (0, SPARE))), np.pad(mean, (0, SPARE)))
        else:
            joined, _, before = grown
            targets = np.concatenate([before, targets])
            known = self.additions.items if self.additions else ()
            questions = [*(item.source for item in known), *questions]
        joined = joined.joined(views, targets[-len(new) :])
        spare = targets[:, -SPARE:]
        return joined, NewLabels(joined, spare, questions, self.vocabulary) if spare.any() else None, targets

    def drafted(self, features: Needs, drafts: Sequence[str | None]) -> Needs:
        """See `Encoder.drafted`; a draft that doesn't parse, or has no known structure, changes nothing."""
        needed, other = IN_DRAFT
        shift = np.zeros((len(drafts), len(self.inventory.names)), dtype=np.float32)
        for row, draft in enumerate(drafts):
            has = self.inventory.has(draft or "")
            if has.any():
                shift[row] = np.where(has, math.log(needed / other), math.log((1 - needed) / (1 - other)))
        return replace(features, shift=shift)

    def local(self, bags: SparseRows) -> NDArray[np.float32]:
        """(N, C) what phrases say of the columns of small structures."""
        present = cues.incidence(bags, self.phrases.cpu().numpy(), len(self.speaks) - 1)
        return cues.likelihoods(present, self.speaks.cpu().numpy())

    def views(self, items: Sequence[Item]) -> Views:
        """The questions as the kernel sees them; the backbone reads each once."""
        bags = self.vocabulary.bags([Item(item.source) for item in items])
        if not len(self.token_bags.anchors):
            return Views(self._vectors(items), np.zeros((len(items), 0), dtype=np.float32), bags)
        read: Any = getattr(self.backbone, "read", None)
        vectors, tokens = read([item.source for item in items])
        return Views(vectors, self.token_bags.vectors(tokens), bags)

    def _vectors(self, items: Sequence[Item]) -> NDArray[np.float32]:
        if self.backbone is None:
            return np.zeros((len(items), 0), dtype=np.float32)
        return self.backbone.embed([item.source for item in items], queries=True)

    def raw(self, features: Needs) -> Tensor:
        """Likelihoods (N, D) of the columns, each by itself; not yet confined to 0 … 1."""
        device = self.mean.device
        if features.raw is not None:
            return torch.from_numpy(features.raw).to(device)
        return torch.from_numpy(features.likeness).to(device) @ self.dual + self.mean

    def likelihoods(self, features: Needs) -> Tensor:
        """(N, S) how likely each structure is, by all evidence and the draft, if there is one."""
        predicted = self.raw(features).clamp(0, 1)
        said = torch.zeros_like(predicted)
        said[:, self.inventory.small] = torch.from_numpy(features.local).to(said.device)
        by_phrases = said[:, self.owner]
        by_phrases = torch.where((by_phrases >= SURE) & (self.lengths <= PHRASED), by_phrases, 0)
        likely = torch.maximum(predicted[:, self.owner], by_phrases)
        if features.shift is None:
            return likely
        shift = torch.from_numpy(features.shift).to(likely.device)
        return torch.where(shift == 0, likely, torch.sigmoid(torch.logit(likely, LEAST) + shift))

    def logged(self) -> dict[str, float]:
        """γ, ε, and how many times single labels and larger structures count."""
        with torch.no_grad():
            sizes = self.by_size.exp().tolist()
            weights = {
                f"structures of {size} ×" if size > 1 else "labels ×": w for size, w in enumerate(sizes, start=1)
            }
            numbers = {"γ": self.power, "ε": self.cost, "ω": self.wording}
            return {**{name: float(number.exp()) for name, number in numbers.items()}, **weights}

    def valued(self, likely: Tensor) -> Tensor:
        """(N, columns) what the inventory's columns are worth, from (N, S) likelihoods."""
        worth = (self.worth + self.by_size[self.lengths.long() - 1]).exp() * self._each(likely)
        return self.scale * worth.new_zeros(len(worth), len(self.inventory)).index_add(1, self.owner, worth)

    def _each(self, likely: Tensor) -> Tensor:
        return likely.clamp(min=LEAST) ** self.power.exp() - self.cost.exp() * (1 - likely)

    def forward(self, features: Needs) -> Tensor:
        """(N, D): what the columns of the inventory are worth, the spare ones, and the words."""
        needs = torch.cat([self.valued(self.likelihoods(features)), self._of_new(features)], dim=1)
        if features.words is None:
            return torch.cat([needs, needs.new_zeros(len(needs), WORDS)], dim=1)
        rare = torch.from_numpy(features.words).to(needs.device) * self.rarity
        whole = _FULL_LENGTH * needs.clamp(min=0).norm(dim=1, keepdim=True)
        words = self.wording.exp() * whole * rare / rare.sum(dim=1, keepdim=True).clamp(min=LEAST)
        return torch.cat([needs, words], dim=1)

    def _of_new(self, features: Needs) -> Tensor:
        """(N, SPARE) what new labels are worth: each the most that any label is."""
        if features.new is None:
            return self.worth.new_zeros(len(features), SPARE)
        most = (self.worth.max() + self.by_size[0]).exp() * NEW_LABEL
        return self.scale * most / MARKS * self._each(torch.from_numpy(features.new).to(most.device))
