"""GRPO's race of changes, its temperatures by step, its rates, and what it says has moved."""

import logging
import math
from itertools import groupby

import numpy as np
import pytest
import torch
from answering import Composing
from openai_server import OpenAIServer
from rcr_trainer.data.covr import covr_split
from rcr_trainer.grpo import calls_at_most
from rcr_trainer.llm.cache import Answer
from rcr_trainer.llm.model import LanguageModel, open_llm
from rcr_trainer.llm.settings import LLMSettings
from rcr_trainer.race import FEWER, Guard, is_clear, race
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.rewards.reward import Reward, RewardError
from rcr_trainer.settings import GRPOSettings
from rcr_trainer.training.actor import Actor
from rcr_trainer.training.environment import Environment
from rcr_trainer.training.runner import Job
from training import Parrot, train_grpo

from langchain_rcr import SequentialCompositionalRetriever
from langchain_rcr.basics.items import Item
from langchain_rcr.errors import InputError
from langchain_rcr.families import get_family
from langchain_rcr.policy.selection import greedy
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

pytestmark = pytest.mark.slow
torch.set_num_threads(1)

SPEC, FAMILY = ProgramSpec(), get_family("structure")
SPLIT = covr_split("110", 0, 60, 0, dev=40)
ITEMS = [example.item for example in SPLIT.train]
GOLD = {example.source: example.target for example in SPLIT.train}
RACE = GRPOSettings(race=400, epochs=0, best_by="coverage")


@pytest.fixture(scope="module")
def start():
    """The weights of a policy that has been fitted, but takes a label for next to nothing."""
    model = TriEncoder.build("structure", ITEMS, spec=SPEC)
    FAMILY.fit(model.query, ITEMS, seed=0)
    with torch.no_grad():
        model.query.by_size[0] = math.log(0.01)
    return model


@pytest.fixture
def policy(start, tmp_path):
    start.save_pretrained(tmp_path / "start")
    return TriEncoder.from_pretrained(tmp_path / "start", runtime="torch")


def reinforce(model, config, llm, **options):
    reward = make_reward("correctness", SPEC)
    return train_grpo(model, SPLIT.train, SPLIT.train, [], SPEC, config, reward, llm, **options)


def wants_labels(programs=GOLD, **options):
    """Answers right where every label of the gold program is shown, and only there."""
    return LanguageModel(
        Composing(programs=programs, spec=ProgramSpec(max_size=1)), identity={"named": "labels"}, **options
    )


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- race


@pytest.mark.parametrize("wanted", [{"order": "picked"}, {"label": 20.0}, {"length_penalty": 0.5, "fade": 6.0}])
def test_changes_that_earn_more_are_taken_and_stay_in_the_checkpoint(policy, caplog, monkeypatch, tmp_path, wanted):
    def numbers(model):
        learnt = {"label": model.query.logged()["labels ×"]}
        return {name: learnt.get(name, getattr(model.config, name, None)) for name in wanted}

    def score(environment, queries, picks, reward=None):
        """Half a point for each number that is as wanted, and for the encoders that go by it."""
        right = sum(numbers(policy)[name] == pytest.approx(value) for name, value in wanted.items() if name != "order")
        right += wanted.get("order") == policy.config.order
        right -= policy.candidate.length_penalty != policy.config.length_penalty
        return np.full(len(queries), right / 2), {}

    monkeypatch.setattr(Environment, "score", score)
    before, settings = weights(policy), policy.config
    with wants_labels() as llm, caplog.at_level(logging.INFO):
        reinforce(policy, RACE, llm)
    policy.save_pretrained(tmp_path / "after")
    again = TriEncoder.from_pretrained(tmp_path / "after", runtime="torch")
    for model in (policy, again):
        assert numbers(model) == {
            name: value if name == "order" else pytest.approx(value) for name, value in wanted.items()
        }
    others = {name for name in type(settings).model_fields if name not in wanted}
    assert all(getattr(again.config, name) == getattr(settings, name) for name in others)
    moved = {name for name, tensor in weights(again).items() if not torch.equal(tensor, before[name])}
    assert moved == ({"query.by_size"} if "label" in wanted else set())
    assert f"correctness 0.000 → {len(wanted) / 2:.3f}" in caplog.text


@pytest.mark.parametrize(("budget", "k"), [(None, 4), (200, 4), (500, 8), (1000, 16)])
def test_more_picks_race_as_far_as_prompts_may_grow(policy, monkeypatch, tmp_path, budget, k):
    asked = set()

    def score(environment, queries, picks, reward=None):
        asked.add(picks.shape[1])
        return np.full(len(queries), picks.shape[1] / 16), {}

    monkeypatch.setattr(Environment, "score", score)
    config = RACE.model_copy(update={"prompt_tokens": budget})
    with wants_labels() as llm:
        reinforce(policy, config, llm)
        assert sum(calls_at_most(config, len(SPLIT.train), 0, races=True).values()) == 402
    assert asked == {each for each in (4, 8, 16) if each <= k}
    policy.save_pretrained(tmp_path / "after")
    retriever = SequentialCompositionalRetriever.from_encoder(
        TriEncoder.from_pretrained(tmp_path / "after"), [{"source": s, "target": t} for s, t in GOLD.items()]
    )
    question = SPLIT.dev[0].source
    assert len(retriever.select_examples({"source": question})) == policy.config.k == k
    assert len(retriever.invoke(question, k=3)) == 3


def test_prompts_are_weighed_by_the_models_tokens_or_four_bytes_for_one(policy):
    job = Job(policy, SPLIT.train, SPLIT.train, [], SPEC)
    picks, queries = np.array([[0, 1], [2, 3]]), SPLIT.dev[:2]
    with wants_labels() as llm:
        environment = Environment(job, make_reward("correctness", SPEC), llm, GRPOSettings())
        texts = [
            llm.prompt.text([SPLIT.train[at].item for at in row[::-1]], query.source)
            for row, query in zip(picks, queries, strict=True)
        ]
        assert environment.prompt_tokens(queries, picks) == sum(len(text.encode()) for text in texts) / 8
    with wants_labels(count_tokens=lambda text: len(text.split())) as llm:
        environment = Environment(job, make_reward("correctness", SPEC), llm, GRPOSettings())
        assert environment.prompt_tokens(queries, picks) == sum(len(text.split()) for text in texts) / 2


def test_a_reward_that_scores_nothing_any_more_ends_the_paying(policy):
    """64 answers in a row without a score; a score in between starts the count again."""

    def moody(predictions, references, *, queries, contexts):
        both = zip(queries, predictions, strict=True)
        return [float(bool(answer)) if query in happy else None for query, answer in both]

    queries = [SPLIT.train[at % 40] for at in range(40)]
    happy, picks = {query.source for query in queries}, np.tile([0, 1], (40, 1))
    job = Job(policy, SPLIT.train, SPLIT.train, [], SPEC)
    environment = Environment(job, Reward.of(moody), Parrot(lambda prompt: Answer("f(x)")), GRPOSettings())
    happy = {queries[0].source}
    rewards = [environment.score(queries, picks)[0] for _ in range(2)]  # 39 without, then a score, then 39 again
    assert [np.isfinite(each).sum() for each in rewards] == [1, 1]
    happy = set()
    with pytest.raises(RewardError, match="'moody' gave None for the last 79 answers: there is nothing to learn"):
        environment.score(queries, picks)


def test_a_race_stays_within_its_answers(policy):
    with wants_labels() as llm:
        reinforce(policy, RACE, llm)
        assert 150 < llm.stats.distinct <= sum(calls_at_most(RACE, len(SPLIT.train), 0, races=True).values()) == 402
        assert llm.stats.nominal > 400


def test_where_no_change_is_better_the_policy_stays_as_it_was(policy, caplog):
    before, settings = weights(policy), policy.config
    with wants_labels(dict.fromkeys(GOLD, "none")) as llm, caplog.at_level(logging.INFO):
        reinforce(policy, RACE, llm)
    assert same(before, weights(policy))
    assert policy.config == settings
    assert "race: no change won (correctness 0.000 → 0.000 on " in caplog.text
    assert "moved: nothing" in caplog.text


def test_every_change_can_be_made_and_saved(tmp_path):
    plain = TriEncoder.build("structure", ITEMS, spec=SPEC)
    vectors = np.asarray(plain.encode_pool(ITEMS).candidate)
    for number, change in enumerate(change for change in FAMILY.changes if change != {"fade": plain.config.fade}):
        model = TriEncoder.build("structure", ITEMS, spec=SPEC)
        model.vary(change)
        ((name, value),) = change.items()
        assert getattr(model.config, name, value) == value
        assert model.config != plain.config or not same(weights(model), weights(plain))
        changed = np.asarray(model.encode_pool(ITEMS).candidate)
        assert (np.abs(changed - vectors).max() > 0.01) == (name == "length_penalty")
        model.save_pretrained(tmp_path / str(number))
        again = TriEncoder.from_pretrained(tmp_path / str(number))
        assert again.config == model.config
        np.testing.assert_array_equal(np.asarray(again.encode_pool(ITEMS).candidate), changed)
    for wrong in ({"lam": "much"}, {"fading": 2.0}, {"words": -1.0}):
        before = weights(plain)
        with pytest.raises(InputError, match=next(iter(wrong))):
            plain.vary(wrong)
        assert same(before, weights(plain))
    plain.vary({"words": 0})
    assert plain.query.logged()["ω"] == pytest.approx(1e-6)


def test_at_the_dearer_price_of_the_race_picks_show_fewer_labels_that_are_not_needed(policy):
    """At ε = 0.2 by a fifth; what they need they show as before."""
    with torch.no_grad():
        policy.query.by_size[0] = math.log(8.0)
    asked, spec = [example.item for example in SPLIT.dev], ProgramSpec(max_size=1)
    vectors, needed = policy.encode_pool(ITEMS), [spec.structures(item.target) for item in asked]

    def labels():
        picks = greedy(policy.encode_queries([item.source for item in asked]), vectors, policy.state(), 4).positions
        shown = [frozenset[str]().union(*(spec.structures(ITEMS[at].target) for at in row)) for row in picks]
        pairs = [*zip(shown, needed, strict=True)]
        return sum(len(one - other) for one, other in pairs), sum(len(one & other) for one, other in pairs)

    before = labels()
    policy.vary({"cost": max(change["cost"] for change in FAMILY.changes if "cost" in change)})
    after = labels()
    assert after[0] < 0.8 * before[0]
    assert after[1] >= 0.97 * before[1]


@pytest.mark.parametrize("seed", range(5))
def test_a_race_finds_changes_that_help_each_other_within_its_answers(seed):
    rng, asked = np.random.default_rng(seed), []
    hard = rng.random(200)
    worth = {"a": 0.1, "b": 0.3, "c": -0.3, "d": 0.3, "e": 0.0, "f": -0.1}

    def earned(variant, rows):
        asked.append(rows.stop - rows.start)
        return (hard[rows] < 0.3 + sum(worth[name] for name in variant)).astype(float)

    won = race([{name: 1} for name in worth], earned, 200, 600, lambda: sum(asked))
    assert won.variant.keys() >= {"b", "d"}
    assert not won.variant.keys() & {"c", "f"}
    assert sum(asked) <= 600
    assert won.before == pytest.approx((hard[: won.questions] < 0.3).mean())
    assert won.after == pytest.approx((hard[: won.questions] < 0.3 + sum(worth[name] for name in won.variant)).mean())
    assert won.after >= won.before + 0.3


def test_each_round_asks_about_the_better_half_of_the_variants():
    asked = []

    def earned(variant, rows):
        asked.append((rows, dict(variant)))
        return np.full(rows.stop - rows.start, 0.1 * sum(variant.values()))

    changes = [{name: at} for at, name in enumerate("abcdefgh", start=1)]
    won = race(changes, earned, 1000, 960, lambda: sum(rows.stop - rows.start for rows, _ in asked))
    assert won.variant == {"f": 6, "g": 7, "h": 8}
    rounds = [[variant for _, variant in some] for _, some in groupby(asked, key=lambda one: one[0].start)]
    # The unchanged policy and all changes, then half of them; all combinations of the best three, and so on.
    assert [len(some) - 1 for some in rounds] == [8, 4, 7, 4, 2]
    assert rounds[1] == [{}, *changes[4:]]


def test_changes_of_one_number_are_not_joined_and_few_answers_change_nothing():
    tried, asked = [], []

    def earned(variant, rows):
        tried.append(dict(variant))
        asked.append(rows.stop - rows.start)
        return np.full(rows.stop - rows.start, 0.1 * len(variant))

    def spent():
        return sum(asked)

    changes = [{"a": 1}, {"a": 2}, {"b": 1}]
    assert race(changes, earned, 50, 100, spent).variant in ({"a": 1, "b": 1}, {"a": 2, "b": 1})
    assert {"a": 1, "b": 1} in tried
    assert all(sum(name == "a" for name in each) <= 1 for each in tried)
    for questions, answers in ((50, 3), (0, 100)):
        assert race(changes, earned, questions, answers, spent).variant == {}
    assert race([], earned, 50, 100, spent).variant == {}
    worse = race(changes, lambda variant, rows: np.full(rows.stop - rows.start, -len(variant)), 50, 100, lambda: 0)
    assert worse == ({}, 0, 0, 50)
    silent = race(changes, lambda variant, rows: np.full(rows.stop - rows.start, np.nan), 50, 100, lambda: 0)
    assert silent.variant == {}


def test_where_nothing_races_nothing_is_asked(policy, monkeypatch):
    asked = []

    def earned(variant, rows):
        asked.append(rows.stop - rows.start)
        return np.full(rows.stop - rows.start, -len(variant))

    changes = [{"a": 1}, {"b": 1}, {"c": 1}]
    assert race(changes, earned, 1000, 100, lambda: sum(asked)) == ({}, 0, 0, 12)
    assert sum(asked) == 48  # half of the answers; none of these three goes on to the other half
    assert race(changes, earned, 1000, 100, lambda: sum(asked), lambda variant: False).questions == 0
    assert sum(asked) == 48
    # No more picks fit into the prompts, and there are no other changes.
    monkeypatch.setattr(FAMILY, "changes_to", lambda *_: ())
    config = RACE.model_copy(update={"prompt_tokens": 1})
    with wants_labels() as llm:
        reinforce(policy, config, llm)
        assert llm.stats.nominal <= 1  # whether it gives probabilities


def test_what_is_not_admitted_is_neither_asked_nor_joined():
    tried = []

    def earned(variant, rows):
        tried.append(dict(variant))
        return np.full(rows.stop - rows.start, 0.1 * len(variant))

    changes = [{"a": 1}, {"b": 1}, {"c": 1}]
    won = race(
        changes,
        earned,
        50,
        100,
        lambda: 10 * len(tried),
        lambda variant: variant.keys() <= {"a", "b"} and len(variant) < 2,
    )
    assert won.variant in ({"a": 1}, {"b": 1})
    assert [each for at, each in enumerate(tried) if each not in tried[:at]] == [{}, {"a": 1}, {"b": 1}]


def test_the_guard_sees_that_picks_of_the_likest_words_hide_labels(policy):
    with torch.no_grad():
        policy.query.by_size[0] = math.log(8.0)
    job = Job(policy, SPLIT.train, SPLIT.train, [], SPEC)
    environment = Environment(job, make_reward("context_coverage", SPEC), None, GRPOSettings(exclude_own_program=True))
    guard = Guard(job, environment, np.arange(len(environment.queries)))
    pool = policy.featurize_pool(ITEMS)
    before = guard.share(policy.pool_vectors(*pool), 4)
    policy.vary({"words": 50.0})
    assert guard.share(policy.pool_vectors(*pool), 4) < before - FEWER
    environment = Environment(job, make_reward("context_coverage", SPEC), None, GRPOSettings(exclude_own_program=False))
    assert Guard(job, environment, np.arange(len(environment.queries))).share(policy.pool_vectors(*pool), 4) == 1


@pytest.mark.parametrize(
    ("gains", "clear"),
    [
        ([1, 1, 0, 1], True),  # 0.75 with a standard error of 0.25
        ([0, 0, 0, 1], False),  # 0.25 ± 0.25: it may be nothing
        ([0.009, 0.009], False),  # sure, and not worth it
        ([0.011, 0.011], True),
        ([-1, 1], False),
        ([-1, -1], False),
        ([np.nan, 1, 1], True),
        ([np.nan, 1], False),  # one question has no standard error
        ([np.nan, np.nan], False),
    ],
)
def test_what_is_clear_by_hand(gains, clear):
    assert is_clear(np.float64(gains)) is clear


@pytest.mark.parametrize(("answers", "reward"), [(0, "correctness"), (400, "context_coverage")])
def test_without_a_race_or_answers_no_change_is_tried(policy, answers, reward):
    before = weights(policy)
    config = RACE.model_copy(update={"race": answers})
    with wants_labels() as llm:
        train_grpo(policy, SPLIT.train, SPLIT.train, [], SPEC, config, make_reward(reward, SPEC), llm)
        assert llm.stats.nominal == 0
    assert same(before, weights(policy))


def test_the_race_of_a_resumed_run_pays_for_nothing(start, tmp_path):
    ends = []
    for attempt in range(2):
        start.save_pretrained(tmp_path / str(attempt))
        model = TriEncoder.from_pretrained(tmp_path / str(attempt), runtime="torch")
        with wants_labels(cache_path=tmp_path / "answers.sqlite") as llm:
            reinforce(model, RACE, llm)
            assert (llm.stats.paid > 0) is (attempt == 0)
        ends.append(weights(model))
    assert same(*ends)


def test_where_the_server_tells_probabilities_they_stand_for_exact_match(policy, caplog):
    def told(text):  # the shorter, the likelier: what is asked with doesn't matter
        return {"content": [{"bytes": [*text.encode()], "logprob": -1.0}]}

    with (
        OpenAIServer(grammar=told) as server,
        open_llm(LLMSettings(model="m", base_url=server.base_url), None) as llm,
        caplog.at_level(logging.INFO),
    ):
        reinforce(policy, RACE, llm)
        assert all(request.body.get("grammar") for request in server.requests[1:])  # the first asked for an echo
    assert "likelihood 0.368 → 0.368" in caplog.text


# ---------------------------------------------------------------- gradient steps


def test_each_parameter_has_its_rate_and_the_steps_have_their_perplexity(policy):
    before, rows = weights(policy), []
    config = GRPOSettings(race=0, epochs=1, batch_size=20, group_size=8, lr=1e-6, best_by="coverage")
    with wants_labels() as llm:
        reinforce(policy, config, llm, log=lambda step, row: rows.append(row))
    change = {name: float((p - before[name]).detach().abs().max()) for name, p in policy.named_parameters()}
    # Adam's first step is as long as the rate, later ones at most a little longer: 3 steps that decay from 1 to 1/3.
    for name in policy.query.rates.keys() - {"homing"}:  # the pool has no homes
        rate = policy.query.rates[name]
        assert 0 < change[f"query.{name}"] <= 2.2 * rate
    others = [c for name, c in change.items() if name.removeprefix("query.") not in policy.query.rates]
    assert 0 < max(others) < 1e-5 < 100 * max(others) < change["query.cost"]
    for step in range(1, policy.config.k + 1):
        assert 2 < rows[1][f"perplexity_{step}"] < 12


@pytest.mark.parametrize("perplexity", [2.0, 6.0])
def test_temperatures_give_each_step_the_perplexity(policy, perplexity):
    pool, queries = SPLIT.train, policy.query.featurize([Item(e.source) for e in SPLIT.train])
    barred = [np.array([row]) for row in range(len(pool))]
    actor = Actor(policy, queries, pool, barred, GRPOSettings(k=3, perplexity=perplexity))
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
    plain = Actor(policy, queries, pool, barred, GRPOSettings(k=3, perplexity=None))
    assert plain.tau == [policy.config.tau] * 3


def test_a_change_that_can_make_no_difference_does_not_race(policy):
    family, encoders = policy.family, policy.encoders
    assert not encoders[0].homes
    left_out = [change for change in family.changes if change not in family.changes_to(encoders, policy.config)]
    assert left_out == [{"fade": 4.0}, {"home": 0.1}, {"home": 1.0}, {"cost": 0.01}]
    at_home = TriEncoder.fitted([item._replace(home="geo") for item in ITEMS], spec=policy.spec, base=None)
    changes = family.changes_to(at_home.encoders, at_home.config)
    assert [change for change in family.changes if change not in changes] == [{"fade": 2.0}, {"cost": 0.05}]
    at_home.vary({"fade": 3.0, "home": 1.0})
    changes = family.changes_to(at_home.encoders, at_home.config)
    assert [change for change in family.changes if change not in changes] == [{"home": 1.0}, {"cost": 0.05}]
    assert family.numbers(at_home.encoders, at_home.config)["cost"] == pytest.approx(0.05)
