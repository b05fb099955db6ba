"""A bandit: of all pairs of picks one pays, and no policy without memory can name it."""

import numpy as np
import pytest
import torch
from rcr_trainer.data.examples import Example
from rcr_trainer.settings import GRPOSettings
from training import train_grpo as train

from langchain_rcr.families import get_family
from langchain_rcr.families.encoder import Encoder
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

torch.set_num_threads(1)


class Table(Encoder):
    """A vector of its own for each item, found by its name."""

    family = "table"

    def __init__(self, names, vectors):
        super().__init__()
        self.dim = vectors.shape[1]
        self.row_of = {name: row for row, name in enumerate(names)}
        self.vectors_ = torch.nn.Parameter(vectors.clone())

    def featurize(self, items):
        return Names(np.array([self.row_of[item.source] for item in items], dtype=np.int64))

    def forward(self, features):
        return self.vectors_[torch.from_numpy(features.rows)]


class Names:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def select(self, rows):
        return Names(self.rows[rows])


AXES = 4
ARMS = [Example(f"{sign}{axis}", f"{sign}{axis}", "f(x)") for axis in range(AXES) for sign in "+-"]


def bandit(lam):
    """Candidates ±e₁ … ±e₄, all logits 0 at the start: the policy is uniform."""
    names = [arm.source for arm in ARMS]
    axes = torch.eye(AXES).repeat_interleave(2, 0) * torch.tensor([1.0, -1.0]).repeat(AXES)[:, None]
    nothing = torch.zeros(len(ARMS), AXES)
    query = Table(["which pair?"], nothing[:1])
    config = get_family("lexical").settings(lam=lam, tau=0.2)
    return TriEncoder(query, Table(names, nothing), Table(names, axes), config)


class Opposites:
    """1 for +e₁ and −e₁ together, in either order."""

    name, needs_llm, maximum = "opposites", False, 1.0

    def __call__(self, predictions, references, *, queries, contexts):
        return [float({e.id for e in c} == {"+0", "-0"} or {e.id for e in c} == {"q"}) for c in contexts]


def probability_of_the_pair(model):
    """Exact, over all ordered pairs."""
    pool = model.encode_pool([arm.item for arm in ARMS])
    query = model.encode_queries(["which pair?"])[0]
    total = 0.0
    for first, second in ((0, 1), (1, 0)):
        start = np.exp(pool.candidate @ query / model.config.tau)
        after = np.exp(pool.candidate @ (query + model.config.lam * pool.context[first]) / model.config.tau)
        after[first] = 0
        total += start[first] / start.sum() * after[second] / after.sum()
    return total


def best_without_dependency():
    """The largest probability of the pair that any λ = 0 policy gives it, by a grid over its one free number.

    Only x₁ matters to the pair, and the other axes take least from it where their logits are 0.
    """
    a = np.linspace(-20, 20, 4001)
    plus, minus, rest = np.exp(a), np.exp(-a), 2 * (AXES - 1)
    total = plus + minus + rest
    return float((plus / total * minus / (minus + rest) + minus / total * plus / (plus + rest)).max())


def trained(lam, advantage):
    options = {"k": 2, "epochs": 100, "group_size": 64, "lr": 0.08, "beta": 0.0, "max_grad_norm": None}
    config = GRPOSettings(advantage=advantage, perplexity=None, **options)
    model = bandit(lam)
    assert probability_of_the_pair(model) == pytest.approx(2 / (8 * 7))
    train(model, ARMS, [Example("q", "which pair?", "g(y)")], [], ProgramSpec(), config, Opposites())
    return probability_of_the_pair(model)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "rloo", "remax", "nb"])
def test_the_pair_that_pays_is_found(advantage):
    assert trained(1.0, advantage) > 0.9


@pytest.mark.slow
def test_without_dependency_on_earlier_picks_it_cannot_be_said():
    # E_c is fixed, so that a state of which +e₁ is the best candidate has −e₁ as the worst.
    bound = best_without_dependency()
    assert bound < 0.04
    assert trained(0.0, "grpo") <= bound + 1e-6
