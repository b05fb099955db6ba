"""GRPO that was killed, or stopped by what broke, resumes to the bit."""

import numpy as np
import pytest
import torch
from rcr_trainer.llm.cache import Answer
from rcr_trainer.llm.faults import BudgetExceeded
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.rewards.reward import RewardError
from rcr_trainer.settings import GRPOSettings
from rcr_trainer.training import runner as training_runner
from small_grpo import COVERAGE, FAST, SPEC, SPLIT, lexical, run
from training import Parrot, StopError, same_weights, stop_at, train_sft

from langchain_rcr.errors import CheckpointError
from langchain_rcr.policy.triencoder import TriEncoder

torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "remax"])
@pytest.mark.parametrize("step", [1, 2, 3, 5, 6])
def test_a_killed_run_resumed_ends_with_the_same_weights(tmp_path, monkeypatch, advantage, step):
    monkeypatch.setattr(training_runner, "SAVE_EVERY_S", 0)
    config = FAST.model_copy(update={"advantage": advantage, "updates": 2})
    whole, killed, resumed = lexical(), lexical(), lexical()
    rows, again = {}, {}
    expected = run(whole, config, log=lambda at, row: rows.update({at: row}))
    with pytest.raises(StopError):
        run(killed, config, state_folder=tmp_path / "s", log=stop_at(step))
    result = run(resumed, config, state_folder=tmp_path / "s", log=lambda at, row: again.update({at: row}))
    assert same_weights(whole, resumed)
    assert repr(result) == repr(expected)
    assert again == {at: row for at, row in rows.items() if at >= step or step == 1}


@pytest.mark.slow
def test_a_run_killed_at_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(training_runner, "SAVE_EVERY_S", 0)
    config = FAST.model_copy(update={"train_candidates": True, "epochs": 3})
    whole = lexical()
    expected = run(whole, config)
    for step in range(2, 10):
        with pytest.raises(StopError):
            run(lexical(), config, state_folder=tmp_path / "s", log=stop_at(step))
    resumed = lexical()
    assert repr(run(resumed, config, state_folder=tmp_path / "s")) == repr(expected)
    assert same_weights(whole, resumed)


@pytest.mark.slow
def test_a_killed_transformer_run_resumed_ends_with_the_same_weights(tmp_path, monkeypatch, bert):
    monkeypatch.setattr(training_runner, "SAVE_EVERY_S", 0)
    config = GRPOSettings(epochs=1, max_steps=3, batch_size=4, group_size=2, k=2, lr=1e-4, train_candidates=True)
    models = [TriEncoder.build("transformer", [], base=bert, lam=0.1) for _ in range(3)]
    run(models[0], config, dev=[])
    with pytest.raises(StopError):
        run(models[1], config, dev=[], state_folder=tmp_path / "s", log=stop_at(2))
    torch.manual_seed(123)
    run(models[2], config, dev=[], state_folder=tmp_path / "s")
    assert same_weights(models[0], models[2])


def test_a_state_of_another_stage_is_refused(tmp_path):
    from rcr_trainer.settings import SFTSettings

    train_sft(lexical(), SPLIT.train, SPLIT.train, [], SPEC, SFTSettings(epochs=1), state_folder=tmp_path / "s")
    with pytest.raises(CheckpointError, match="can't be resumed from"):
        run(lexical(), state_folder=tmp_path / "s")


class Fragile:
    """Breaks on its n-th call of the language-model-free kind, until it is fixed."""

    name, needs_llm, maximum = "fragile", False, 1.0

    def __init__(self, breaks_on):
        self.breaks_on = breaks_on

    def __call__(self, predictions, references, *, queries, contexts):
        if self.breaks_on in queries and len(contexts[0]) == 4:
            raise ZeroDivisionError("no structures")
        return COVERAGE(predictions, references, queries=queries, contexts=contexts)


def test_a_broken_reward_stops_at_a_checkpoint_and_names_the_example(tmp_path):
    whole = lexical()
    expected = run(whole, dev=[])
    order = np.random.default_rng([0, 1]).permutation(40)
    example = SPLIT.train[order[20]]  # in the second batch of the second epoch, and somewhere in the first
    first = int(np.flatnonzero(np.random.default_rng([0, 0]).permutation(40) == order[20])[0]) // 16
    with pytest.raises(RewardError, match=f"ZeroDivisionError on example {example.id} .*: no structures"):
        run(lexical(), FAST, Fragile(example.source), dev=[], state_folder=tmp_path / "s")
    resumed, rows = lexical(), []
    result = run(resumed, FAST, COVERAGE, dev=[], state_folder=tmp_path / "s", log=lambda at, row: rows.append(at))
    assert rows == list(range(first + 1, 7))
    assert repr(result) == repr(expected)
    assert same_weights(whole, resumed)


@pytest.mark.slow
def test_a_spent_budget_stops_at_a_checkpoint(tmp_path):
    reward = make_reward("structure_coverage", SPEC)

    def answer(prompt):
        shown = [line.removeprefix("Target: ") for line in prompt.splitlines() if line.startswith("Target: ")]
        return Answer(max(shown, key=len))

    class Poor(Parrot):
        def generate(self, prompts):
            if len(self.prompts) + len(prompts) > 500:
                raise BudgetExceeded("the budget of 500 calls is spent")
            return super().generate(prompts)

    whole, resumed = lexical(), lexical()
    expected = run(whole, FAST, reward, llm=Parrot(answer), dev=[])
    with pytest.raises(BudgetExceeded):
        run(lexical(), FAST, reward, llm=Poor(answer), dev=[], state_folder=tmp_path / "s")
    rows = []
    run(resumed, FAST, reward, llm=Parrot(answer), dev=[], state_folder=tmp_path / "s", log=lambda n, r: rows.append(n))
    assert rows == [5, 6]  # 128, 128, 64, 128 prompts fit
    assert (same_weights(whole, resumed), expected.steps) == (True, 6)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [2, 3])
def test_an_evaluation_that_fails_keeps_the_step_before_it(tmp_path, fails):
    """Evaluations come first, after the first epoch, and after the last: the steps are not repeated."""
    reward = make_reward("structure_coverage", SPEC)

    class Dying(Parrot):
        evaluations = 0

        def generate(self, prompts):
            self.evaluations += len(prompts) == len(SPLIT.dev)
            if self.evaluations == fails:
                raise KeyboardInterrupt
            return super().generate(prompts)

    def answer(prompt):
        shown = [line.removeprefix("Target: ") for line in prompt.splitlines() if line.startswith("Target: ")]
        return Answer(max(shown, key=len))

    whole, resumed = lexical(), lexical()
    rows, again = {}, {}
    expected = run(whole, FAST, reward, llm=Parrot(answer), log=rows.__setitem__)
    with pytest.raises(KeyboardInterrupt):
        run(lexical(), FAST, reward, llm=Dying(answer), state_folder=tmp_path / "s", log=again.__setitem__)
    cut_at = 3 * (fails - 1)
    assert list(again) == [*range(cut_at)]
    result = run(resumed, FAST, reward, llm=Parrot(answer), state_folder=tmp_path / "s", log=again.__setitem__)
    assert list(again) == list(range(7))
    assert again == rows
    assert repr(result) == repr(expected)
    assert same_weights(whole, resumed)
    # Nothing of the steps before is asked again.
    more = Parrot(answer)
    with pytest.raises(KeyboardInterrupt):
        run(lexical(), FAST, reward, llm=Dying(answer), state_folder=tmp_path / "t")
    run(lexical(), FAST, reward, llm=more, state_folder=tmp_path / "t")
    assert len(more.prompts) == (6 - cut_at) // 3 * 40 * 8 + (4 - fails) * len(SPLIT.dev)
