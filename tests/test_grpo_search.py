"""GRPO's search among a family's variants, its temperatures by step, its rates, and what it says has moved."""

import logging
import math

import numpy as np
import pytest
import torch
from rcr_trainer.data import covr_split
from rcr_trainer.grpo import calls_at_most, mildest
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.llm.simulator import StructureBoundLLM
from rcr_trainer.rewards import make_reward
from rcr_trainer.settings import GRPOSettings
from rcr_trainer.training.actor import Actor
from training import train_grpo

from langchain_rcr.families import get_family
from langchain_rcr.families.structure import fit as fitting
from langchain_rcr.folds import Folds
from langchain_rcr.items import Item
from langchain_rcr.policy import TriEncoder
from langchain_rcr.programs import ProgramSpec

pytestmark = pytest.mark.slow
torch.set_num_threads(1)

SPEC, FAMILY = ProgramSpec(), get_family("structure")
SPLIT = covr_split("110", 0, 60, 0, dev=40)
ITEMS = [example.item for example in SPLIT.train]
GOLD = {example.source: example.target for example in SPLIT.train}
SEARCH = GRPOSettings(search=40, epochs=0, best_by="coverage")


@pytest.fixture(scope="module")
def start():
    """The weights of a policy that has been fitted, but takes a label for next to nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "STEPS", fitting.STEPS // 10)
        model = TriEncoder.build("structure", ITEMS, spec=SPEC)
        FAMILY.fit(model.query, ITEMS, Folds.of(ITEMS, SPEC), seed=0)
    with torch.no_grad():
        model.query.by_size[0] = math.log(0.01)
    return model


@pytest.fixture
def policy(start, tmp_path):
    start.save_pretrained(tmp_path / "start")
    return TriEncoder.from_pretrained(tmp_path / "start")


def reinforce(model, config, llm, **options):
    reward = make_reward("correctness", SPEC)
    return train_grpo(model, SPLIT.train, SPLIT.train, [], SPEC, config, reward, llm, **options)


def wants_labels(programs=GOLD, **options):
    """Answers right where every label of the gold program is shown, and only there."""
    return LanguageModel(StructureBoundLLM(programs=programs, spec=SPEC, size=1), identity="labels", **options)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- search


def test_a_variant_whose_picks_earn_as_much_as_any_is_taken(policy, caplog):
    before, told = weights(policy), policy.query.logged()
    with wants_labels() as llm, caplog.at_level(logging.INFO):
        reinforce(policy, SEARCH, llm)
        assert llm.stats.nominal == calls_at_most(SEARCH, len(SPLIT.train), 0, len(FAMILY.variants)) == 40 * 5
    now = policy.query.logged()
    assert told["labels ×"] == pytest.approx(0.01)
    assert {"label": round(now["labels ×"]), "cost": round(now["ε"], 2)} in list(FAMILY.variants)
    assert f"moved: ε {told['ε']:.3g} → {now['ε']:.3g}, labels × 0.01 → {now['labels ×']:.3g}" in caplog.text
    moved = {name for name, tensor in weights(policy).items() if not torch.equal(tensor, before[name])}
    assert moved == {"query.by_size", "query.cost"}


def test_where_no_variant_is_better_the_policy_stays_as_it_was(policy, caplog):
    before = weights(policy)
    with wants_labels(dict.fromkeys(GOLD, "none")) as llm, caplog.at_level(logging.INFO):
        reinforce(policy, SEARCH, llm)
    assert same(before, weights(policy))
    assert "4 variants of the policy on 40 held-out questions: as it was, reward 0.000 → 0.000" in caplog.text
    assert "moved: nothing" in caplog.text


@pytest.mark.parametrize(
    ("gains", "taken"),
    [
        ([[1, 1, 1, 0], [1, 1, 1, 1]], 1),  # the best has no doubt: what earns less by any amount is worse
        ([[1, 1, 0, 1], [2, 0, 2, 0]], 0),  # means 0.75 and 1; standard error of the second √(4/3) / √4 = 0.577
        ([[0, 1, 0, 0], [2, 0, 2, 0]], 1),  # 0.25 is further from 1 than that
        ([[0, 0, -1, 0], [0, 0, 0, 1]], 1),  # near the best, but no gain
        ([[0.5, 0.5], [0.5, 0.5]], 0),
        ([[0, 0], [-1, 1]], None),
        ([[np.nan, 1], [np.nan, np.nan]], 0),
        ([[np.nan, np.nan]], None),
    ],
)
def test_the_mildest_variant_within_a_standard_error_of_the_best_by_hand(gains, taken):
    assert mildest(np.float64(gains)) == taken


@pytest.mark.parametrize(("search", "reward"), [(0, "correctness"), (40, "context_coverage")])
def test_without_search_or_answers_no_variant_is_tried(policy, search, reward):
    before = weights(policy)
    config = SEARCH.model_copy(update={"search": search})
    with wants_labels() as llm:
        train_grpo(policy, SPLIT.train, SPLIT.train, [], SPEC, config, make_reward(reward, SPEC), llm)
        assert llm.stats.nominal == 0
    assert same(before, weights(policy))


def test_the_search_of_a_resumed_run_pays_for_nothing(start, tmp_path):
    ends = []
    for attempt in range(2):
        start.save_pretrained(tmp_path / str(attempt))
        model = TriEncoder.from_pretrained(tmp_path / str(attempt))
        with wants_labels(cache_path=tmp_path / "answers.sqlite") as llm:
            reinforce(model, SEARCH, llm)
            assert (llm.stats.paid > 0) is (attempt == 0)
        ends.append(weights(model))
    assert same(*ends)


# ---------------------------------------------------------------- gradient steps


def test_each_parameter_has_its_rate_and_the_steps_have_their_perplexity(policy):
    before, rows = weights(policy), []
    config = GRPOSettings(search=0, epochs=1, batch_size=20, group_size=8, lr=1e-6, best_by="coverage")
    with wants_labels() as llm:
        reinforce(policy, config, llm, log=lambda step, row: rows.append(row))
    change = {name: float((p - before[name]).detach().abs().max()) for name, p in policy.named_parameters()}
    # Adam's first step is as long as the rate, later ones at most a little longer: 3 steps that decay from 1 to 1/3.
    for name, rate in policy.query.rates.items():
        assert 0 < change[f"query.{name}"] <= 2.2 * rate
    others = [c for name, c in change.items() if name.removeprefix("query.") not in policy.query.rates]
    assert 0 < max(others) < 1e-5 < 100 * max(others) < change["query.cost"]
    for step in range(1, config.k + 1):
        assert 2 < rows[1][f"perplexity_{step}"] < 12


@pytest.mark.parametrize("perplexity", [2.0, 6.0])
def test_temperatures_give_each_step_the_perplexity(policy, perplexity):
    pool, queries = SPLIT.train, policy.query.featurize([Item(e.source) for e in SPLIT.train])
    barred = [np.array([row]) for row in range(len(pool))]
    options = {"k": 3, "train_candidates": False, "chunk": 16}
    actor = Actor(policy, queries, pool, barred, perplexity=perplexity, **options)
    assert len(set(actor.tau)) == 3
    drawn = actor.draw(np.arange(len(pool)), None)  # the greedy paths, by which τ is set
    np.testing.assert_allclose(drawn.entropies.mean(0).exp(), perplexity, rtol=1e-3)
    # The same from the definition, for the first step.
    logits = (policy.query.vectors(queries) @ np.asarray(policy.encode_pool(ITEMS).candidate).T).astype(
        np.float64
    ) / actor.tau[0]
    np.fill_diagonal(logits, -np.inf)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    entropy = -np.where(shares > 0, shares * np.log(np.maximum(shares, 1e-300)), 0).sum(1)
    assert math.exp(entropy.mean()) == pytest.approx(perplexity, rel=1e-3)
    plain = Actor(policy, queries, pool, barred, **options)
    assert plain.tau == [policy.config.tau] * 3
