"""GRPO end to end without a network: it learns, resumes to the bit, and stops where a reward breaks."""

import math

import numpy as np
import pytest
import torch
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import Example
from rcr_trainer.errors import ConfigError, DataError
from rcr_trainer.grpo import calls_at_most
from rcr_trainer.llm.cache import Answer
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.rewards.reward import Reward, RewardError
from rcr_trainer.settings import GRPOSettings, SFTSettings
from rcr_trainer.training import actor as actor_module
from small_grpo import COVERAGE, FAST, SPEC, SPLIT, items, lexical, run
from training import Parrot, same_weights, train_sft
from training import train_grpo as train

from langchain_rcr.policy.prompt import APPENDIX_D
from langchain_rcr.policy.selection import greedy
from langchain_rcr.policy.triencoder import TriEncoder

torch.set_num_threads(1)

SFT = SFTSettings(epochs=1, lr=1e-2, keep="last", temperature=0.5)

# ---------------------------------------------------------------- end to end


@pytest.mark.slow
def test_training_raises_the_reward():
    model, rows = lexical(), []
    config = FAST.model_copy(update={"epochs": 6, "group_size": 16, "batch_size": 20, "lr": 3e-3})
    # The reward counts what the pool doesn't have, too; these questions need nothing of the kind.
    there = frozenset().union(*(SPEC.structures(e.target) for e in SPLIT.train))
    known = [e for e in covr_split("110", 0, 40, 0, dev=200).dev if SPEC.structures(e.target) <= there]
    assert len(known) >= 5
    result = run(model, config, dev=known, log=lambda step, row: rows.append((step, row)))
    assert [step for step, _ in rows] == list(range(13)) == [*range(result.steps + 1)]
    rewards = [row["reward"] for _, row in rows[1:]]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.03
    assert [row["epoch"] for row in result.history] == list(range(7))
    dev = [row["dev_reward"] for row in result.history]
    assert dev[result.best_round // 2] == max(dev) == result.best_score
    assert [100 * d for d in dev] == pytest.approx([row["dev_coverage"] for row in result.history])
    first = rows[1][1]
    assert (first["unscored"], first["clipped"]) == (0, 0)
    assert first["kl"] == pytest.approx(0, abs=1e-5)  # π_θ is π_ref before the first step
    assert first["loss"] == pytest.approx(0, abs=1e-4)  # ratio 1: the mean of the advantages
    assert rows[-1][1]["kl"] > 1e-3
    assert not model.training
    assert all(p.requires_grad for p in model.parameters())


def test_without_dev_the_last_weights_are_kept():
    model, before = lexical(), lexical()
    result = run(model, dev=[])
    assert (result.best_round, result.steps) == (6, 6)
    assert math.isnan(result.best_score)
    assert not same_weights(model, before)
    assert same_weights(model.candidate, before.candidate)


def test_the_best_weights_may_be_those_of_sft():
    model, before = lexical(), lexical()
    config = FAST.model_copy(update={"lr": 0.1, "max_grad_norm": None, "patience": 1})  # breaks everything
    result = run(model, config)
    assert (result.best_round, result.steps) == (0, 3)
    assert same_weights(model, before)


def test_a_development_figure_that_is_no_number_never_replaces_the_best_weights():
    class FirstOnly:
        """Scores development queries in the first evaluation alone."""

        name, needs_llm, maximum = "first_only", False, 1.0
        evaluations = 0

        def __call__(self, predictions, references, *, queries, contexts):
            if list(queries) == [e.source for e in SPLIT.dev]:
                self.evaluations += 1
                if self.evaluations > 1:
                    return [None] * len(queries)
            return COVERAGE(predictions, references, queries=queries, contexts=contexts)

    model, before = lexical(), lexical()
    result = run(model, FAST, FirstOnly())
    assert [math.isfinite(row["dev_reward"]) for row in result.history] == [True, False, False]
    assert (result.best_round, result.best_score) == (0, result.history[0]["dev_reward"])
    assert same_weights(model, before)


def test_candidates_move_only_where_they_are_trained():
    model, before = lexical(), lexical()
    run(model, FAST.model_copy(update={"epochs": 1, "train_candidates": True}), dev=[])
    for part in ("query", "context", "candidate"):
        assert not same_weights(getattr(model, part), getattr(before, part))


@pytest.mark.slow
def test_the_seed_decides():
    models = [lexical() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        run(model, seed=seed, dev=[])
    assert same_weights(models[0], models[1])
    assert not same_weights(models[0], models[2])


@pytest.mark.slow
def test_the_size_of_blocks_changes_nothing_that_counts(monkeypatch):
    histories = []
    for block in (1 << 25, 1):
        monkeypatch.setattr(actor_module, "_BLOCK", block)
        histories.append(run(lexical(), FAST.model_copy(update={"epochs": 1})).history[-1])
    assert histories[0] == pytest.approx(histories[1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "rloo", "remax", "nb"])
def test_a_heavy_penalty_keeps_the_policy_near_the_reference(advantage):
    kl = []
    for beta in (0.0, 5.0):
        rows = {}
        config = FAST.model_copy(update={"advantage": advantage, "beta": beta, "epochs": 6, "lr": 3e-4})
        run(lexical(), config, dev=[], log=rows.__setitem__)
        kl.append(np.mean([row["kl"] for row in list(rows.values())[-5:]]))
    assert kl[1] < 0.5 * kl[0]


def test_from_the_second_update_on_the_clip_takes_effect():
    rows = []
    config = FAST.model_copy(update={"updates": 4, "lr": 0.05, "epochs": 1})
    run(lexical(), config, log=lambda step, row: rows.append(row))
    assert max(row["clipped"] for row in rows[1:]) > 0


def test_training_that_diverges_says_so(monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.nan))
    model, before = lexical(), lexical()
    with pytest.raises(ConfigError, match=r"training has diverged at grpo.lr = 0.001; lower it"):
        run(model)
    assert same_weights(model, before)


def test_k_of_one():
    result = run(lexical(), FAST.model_copy(update={"k": 1, "epochs": 1}))
    assert result.steps == 3


def test_max_steps_and_seldom_evaluation():
    result = run(lexical(), FAST.model_copy(update={"max_steps": 4, "evaluate_every": 5}))
    assert (result.steps, [row["epoch"] for row in result.history]) == (4, [0, 4 / 3])


def test_no_question_draws_itself_or_its_own_program():
    pool = [Example(str(n), f"question {n}", f"f{n % 3}(x)") for n in range(9)]
    seen = []

    class Spy:
        name, needs_llm, maximum = "spy", False, 1.0

        def __call__(self, predictions, references, *, queries, contexts):
            seen.extend(zip(queries, contexts, strict=True))
            return [float(len(c) == 1) for c in contexts]

    for own_program in (True, False):
        seen.clear()
        config = GRPOSettings(k=2, epochs=1, group_size=16, exclude_own_program=own_program)
        train(TriEncoder.build("lexical", items(pool), dim=4), pool, pool, [], SPEC, config, Spy())
        drawn = [(question, e) for question, context in seen if len(context) == 2 for e in context]
        program = {e.source: e.target for e in pool}
        assert len(drawn) == 9 * 16 * 2
        assert not any(question == e.source for question, e in drawn)
        assert any(program[question] == e.target for question, e in drawn) is not own_program


# ---------------------------------------------------------------- with a language model


GOLD = {e.source: e.target for e in [*SPLIT.train, *SPLIT.dev]}


def question_of(prompt):
    return prompt.rsplit("Source: ", 1)[1].removesuffix("\nTarget:")


def test_answers_become_rewards():
    llm = Parrot(lambda prompt: Answer(f" {GOLD[question_of(prompt)]}\n\nSource: more"))
    rows = []
    result = run(
        lexical(), FAST, make_reward("structure_coverage", SPEC), llm=llm, log=lambda step, row: rows.append(row)
    )
    assert [row["reward"] for row in rows[1:]] == [1.0] * 6
    assert [row["no_signal"] for row in rows[1:]] == [1.0] * 6  # all alike: nothing to learn
    assert result.best_score == 1.0
    assert len(llm.prompts) == 2 * 40 * 8 + 3 * len(SPLIT.dev) == sum(calls_at_most(FAST, 40, len(SPLIT.dev)).values())
    first = llm.prompts[len(SPLIT.dev)]
    assert first.endswith("\nTarget:")
    assert first.count("Source: ") == first.count("Target:") == 5
    sources = [line.removeprefix("Source: ") for line in first.splitlines() if line.startswith("Source: ")]
    by_source = {e.source: e for e in SPLIT.train}
    assert first == APPENDIX_D.text(items([by_source[source] for source in sources[:4]]), sources[4])


@pytest.mark.parametrize("order", ["reversed", "picked"])
def test_prompts_show_the_picks_in_the_order_of_the_policy(order):
    llm, dev = Parrot(lambda prompt: Answer(GOLD[question_of(prompt)])), SPLIT.dev[:5]
    model = TriEncoder.build("lexical", items(SPLIT.train), dim=16, scale=20.0, order=order)
    queries, pool = model.encode_queries([e.source for e in dev]), model.encode_pool(items(SPLIT.train))
    picks = greedy(queries, pool, model.state(), model.config.k).positions.tolist()
    run(model, FAST, make_reward("structure_coverage", SPEC), dev, llm=llm)
    for prompt, query, picked in zip(llm.prompts, dev, picks, strict=False):
        shown = items(SPLIT.train[at] for at in (picked[::-1] if order == "reversed" else picked))
        assert prompt == APPENDIX_D.text(shown, query.source)


@pytest.mark.parametrize(("telling", "share"), [(frozenset(), 1.0), (frozenset(GOLD), 0.0)])
def test_questions_whose_sequences_all_earn_the_same_are_counted(telling, share):
    seen = []

    def answer(prompt):
        seen.append(question_of(prompt))
        return Answer(GOLD[seen[-1]] if seen[-1] in telling and seen.count(seen[-1]) % 2 else "none")

    rows = []
    config = FAST.model_copy(update={"best_by": "coverage", "epochs": 1})
    llm = Parrot(answer)
    run(lexical(), config, make_reward("correctness", SPEC), llm=llm, log=lambda step, row: rows.append(row))
    assert [row["no_signal"] for row in rows[1:]] == [share] * 3
    assert len(llm.prompts) == 40 * 8


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "remax"])
@pytest.mark.parametrize("family", ["lexical", "transformer"])
def test_equal_rewards_are_counted_and_move_nothing(advantage, family, bert):
    def function(predictions, references, *, queries, contexts):
        return [0.5 if len(context) > 1 else float(len(context)) for context in contexts]

    model = lexical() if family == "lexical" else TriEncoder.build("transformer", [], base=bert, lam=1.0)
    rows = []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = FAST.model_copy(update={"advantage": advantage, "epochs": 1, "group_size": 4, "lr": 1e-2})
    equal = Reward("equal", function, needs_llm=False)
    run(model, config, equal, dev=[], log=lambda step, row: rows.append(row))
    assert [row["no_signal"] for row in rows[1:]] == [1.0] * 3
    # The texts of a batch are encoded together, those of the reference all at once, which rounds otherwise.
    assert max((tensor - before[name]).abs().max() for name, tensor in model.state_dict().items()) < 1e-5


def test_no_answer_is_no_program():
    llm = Parrot(lambda prompt: Answer(None, "refused") if len(prompt) % 2 else Answer("```"))
    rows = []
    run(lexical(), FAST, make_reward("correctness", SPEC), llm=llm, log=lambda step, row: rows.append(row))
    assert all(row["reward"] == 0 for row in rows[1:])
    assert all(row["no_program"] > 0 for row in rows[1:])
    assert all(0 < row["distinct_prompts"] <= 1 for row in rows[1:])


def test_best_by_coverage_asks_nothing_of_development_queries():
    llm = Parrot(lambda prompt: Answer("f(x)"))
    config = FAST.model_copy(update={"best_by": "coverage", "advantage": "remax"})
    result = run(lexical(), config, make_reward("structure_coverage", SPEC), llm=llm)
    assert "dev_reward" not in result.history[-1]
    assert len(llm.prompts) == 2 * 40 * 9 == sum(calls_at_most(config, 40, 20).values())


def test_a_reward_that_reads_answers_needs_a_model():
    with pytest.raises(ConfigError, match=r"'structure_coverage' reads what a language model answers.*llm.model"):
        run(lexical(), FAST, make_reward("structure_coverage", SPEC))


# ---------------------------------------------------------------- what can't be scored, and data


class Picky:
    """Scores only some queries."""

    name, needs_llm, maximum = "picky", False, 1.0

    def __init__(self, scorable, always=()):
        self.scorable, self.always = set(scorable), set(always)

    def __call__(self, predictions, references, *, queries, contexts):
        scores = COVERAGE(predictions, references, queries=queries, contexts=contexts)
        return [
            s if q in self.scorable or (q in self.always and len(c) < 4) else None
            for q, c, s in zip(queries, contexts, scores, strict=True)
        ]


def test_queries_whose_gold_program_cannot_be_scored_are_left_out():
    sources = [e.source for e in SPLIT.train]
    rows = []
    result = run(lexical(), FAST, Picky(sources[:20]), log=lambda step, row: rows.append(row))
    assert result.steps == 2 * 2
    assert all(row["unscored"] == 0 for row in rows[1:])


def test_what_cannot_be_scored_later_on_teaches_nothing_and_is_counted():
    rows = []
    model, before = lexical(), lexical()
    few = FAST.model_copy(
        update={"batch_size": 5, "group_size": 2, "max_steps": 6}
    )  # 60 sets of picks, not yet too many
    run(model, few, Picky([], [e.source for e in SPLIT.train]), dev=[], log=lambda step, row: rows.append(row))
    assert [row["unscored"] for row in rows[1:]] == [1.0] * 6
    assert [row["grad_norm"] for row in rows[1:]] == [0.0] * 6
    assert all("reward" not in row for row in rows[1:])
    assert same_weights(model, before)


def test_a_reward_that_needs_no_model_stops_training_too_if_it_scores_nothing():
    with pytest.raises(RewardError, match="gave None for the last 128 sets of picks: there is nothing to learn from"):
        run(lexical(), FAST, Picky([], [e.source for e in SPLIT.train]), dev=[])


@pytest.mark.parametrize(
    ("excluded", "advice"),
    [(True, "lower grpo.k, or set grpo.exclude_own_program: false"), (False, "or lower grpo.k$")],
)
def test_a_pool_smaller_than_k(excluded, advice):
    config = FAST.model_copy(update={"exclude_own_program": excluded})
    with pytest.raises(
        DataError, match=f"the pool of 4 examples leaves a training query only . to pick from.*{advice}"
    ):
        train(lexical(), SPLIT.train[:4], SPLIT.train[:4], [], SPEC, config, COVERAGE)


def test_no_program_parses():
    pool = [Example(str(n), f"question {n}", f"no ( program {n}") for n in range(9)]
    with pytest.raises(ConfigError, match="can score none of the 9 gold programs"):
        train(TriEncoder.build("lexical", items(pool), dim=4), pool, pool, [], SPEC, FAST, COVERAGE)


# ---------------------------------------------------------------- encoders without parameters


def fixed(encoder):
    """Make buffers of an encoder's parameters, as one has that is fitted in closed form."""
    for name, parameter in list(encoder.named_parameters()):
        place, _, last = name.rpartition(".")
        owner = encoder.get_submodule(place)
        delattr(owner, last)
        owner.register_buffer(last, parameter.detach())


def test_some_encoders_or_all_may_have_nothing_to_train():
    model = lexical()
    fixed(model.context)
    fixed(model.candidate)
    weights = [[encoder.tensors()["ngrams.bag.weight"].copy() for encoder in model.encoders]]
    for stage in (
        lambda: train_sft(model, SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, SFT),
        lambda: run(model, FAST.model_copy(update={"epochs": 1, "keep": "last"})),
    ):
        stage()
        weights.append([encoder.tensors()["ngrams.bag.weight"].copy() for encoder in model.encoders])
        changed = [not np.array_equal(now, before) for now, before in zip(weights[-1], weights[-2], strict=True)]
        assert changed == [True, False, False]
    fixed(model.query)
    with pytest.raises(ConfigError, match=r"sft.epochs = 1: the lexical family has nothing here that gradients train"):
        train_sft(model, SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, SFT)
    with pytest.raises(ConfigError, match=r"grpo.epochs = 2: .* set grpo.epochs: 0"):
        run(model)
    untouched = model.fingerprint()
    train_sft(model, SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, SFT.model_copy(update={"epochs": 0}))
    run(model, FAST.model_copy(update={"epochs": 0}))
    assert model.fingerprint() == untouched
