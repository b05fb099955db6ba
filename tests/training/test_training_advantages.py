"""Advantages by hand, and what they do without a score."""

import numpy as np
import pytest
from rcr_trainer.errors import ConfigError
from rcr_trainer.training.advantages import estimate, grpo, nb, remax, rloo
from rcr_trainer.training.registry import ADVANTAGES, Advantage

NAN = float("nan")


def test_grpo_by_hand():
    # mean 0.5, std sqrt((0.25 + 0.25 + 0 + 0) / 4) = sqrt(1/8)
    got = grpo(np.array([[1.0, 0.0, 0.5, 0.5]]))
    np.testing.assert_allclose(got, [[np.sqrt(2), -np.sqrt(2), 0.0, 0.0]], rtol=1e-12)
    # mean 2, std sqrt(2/3): the divisor is G, not G − 1
    np.testing.assert_allclose(grpo(np.array([[1.0, 2.0, 3.0]])), [[-np.sqrt(1.5), 0.0, np.sqrt(1.5)]], rtol=1e-12)


def test_grpo_normalises_each_group_by_itself():
    got = grpo(np.array([[0.0, 1.0], [10.0, 30.0]]))
    np.testing.assert_allclose(got, [[-1, 1], [-1, 1]], rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6])
def test_a_group_of_equal_rewards_has_no_advantage(value):
    # The mean of equal floats may be off by rounding, which a division by the spread would blow up to ±1.
    assert grpo(np.full((2, 7), value)).tolist() == [[0.0] * 7] * 2


def test_small_rewards_are_told_apart():
    """Such as the likelihoods of long programs."""
    np.testing.assert_allclose(grpo(1e-20 * np.array([[1.0, 2.0, 3.0]])), grpo(np.array([[1.0, 2.0, 3.0]])), rtol=1e-12)


def test_rloo_by_hand():
    # the others' means: (2 + 6) / 2 = 4, (1 + 6) / 2 = 3.5, (1 + 2) / 2 = 1.5
    np.testing.assert_allclose(rloo(np.array([[1.0, 2.0, 6.0]])), [[-3.0, -1.5, 4.5]], rtol=1e-12)


def test_rloo_divides_by_the_others():
    rewards = np.random.default_rng(0).random((3, 5))
    slow = [[r - (row.sum() - r) / 4 for r in row] for row in rewards]
    np.testing.assert_allclose(rloo(rewards), slow, rtol=1e-12)


def test_rloo_of_a_single_sequence():
    assert rloo(np.array([[0.7]])).tolist() == [[0.0]]


def test_remax_by_hand():
    got = remax(np.array([[1.0, 0.25], [0.5, 0.0]]), np.array([0.5, 0.75]))
    assert got.tolist() == [[0.5, -0.25], [-0.25, -0.75]]


def test_nb_is_the_reward():
    assert nb(np.array([[1.0, 0.25]])).tolist() == [[1.0, 0.25]]


def test_what_is_not_scored_has_no_advantage_and_moves_no_other():
    gap = np.array([[1.0, NAN, 0.0]])
    for name, expected in {"grpo": [1.0, 0.0, -1.0], "rloo": [1.0, 0.0, -1.0], "nb": [1.0, 0.0, 0.0]}.items():
        advantages, scored = estimate(name, gap)
        np.testing.assert_allclose(advantages, [expected], rtol=1e-12)
        assert scored.tolist() == [[True, False, True]]
    nothing = np.full((1, 3), NAN)
    for function in (grpo, rloo, nb):
        assert function(nothing).tolist() == [[0.0, 0.0, 0.0]]
    one = np.array([[NAN, 0.4, NAN]])
    assert (grpo(one).tolist(), rloo(one).tolist()) == ([[0.0] * 3], [[0.0] * 3])


def test_remax_without_a_baseline_learns_nothing():
    advantages, scored = estimate("remax", np.array([[1.0, NAN], [1.0, 0.0]]), np.array([0.5, NAN]))
    assert advantages.tolist() == [[0.5, 0.0], [0.0, 0.0]]
    assert scored.tolist() == [[True, False], [False, False]]
    with pytest.raises(ValueError, match="greedy"):
        estimate("remax", np.zeros((1, 2)))


def unguarded(rewards):
    return rewards / rewards.std(axis=1, keepdims=True)


def of_one_group(rewards):
    return rewards.T


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("function", [unguarded, of_one_group])
def test_an_advantage_of_ones_own_that_is_wrong_is_named(function, monkeypatch):
    """Else training would seem to diverge, or learn from other sequences' rewards."""
    monkeypatch.setitem(ADVANTAGES, "own", Advantage(f"{__name__}:{function.__name__}", "of one's own"))
    with pytest.raises(ConfigError, match=r"advantage 'own' must give finite numbers of shape \(2, 3\), not \[\["):
        estimate("own", np.array([[0.0, 0.0, 0.0], [0.0, 1.0, 0.5]]))
