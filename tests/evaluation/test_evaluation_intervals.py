"""The cluster bootstrap: against a slow plain loop, by what it must do, and in what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from rcr_trainer.evaluation.metrics import DRAWS, FEW_PROGRAMS, cluster_bootstrap, paired_intervals


def drawn(n=90, clusters=35, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 2)), [f"program {i}" for i in rng.integers(clusters, size=n)]


def test_it_equals_a_slow_plain_loop():
    values, programs = drawn()
    names = list(dict.fromkeys(programs))
    # As many programs as there are, with replacement: how often each is drawn.
    times = np.random.default_rng(3).multinomial(len(names), [1 / len(names)] * len(names), size=20)
    expected = []
    for row in times:
        assert row.sum() == len(names)
        resampled = []
        for name, count in zip(names, row, strict=True):
            for _ in range(count):
                resampled += [value for value, program in zip(values, programs, strict=True) if program == name]
        expected.append(np.mean(resampled, axis=0))
    np.testing.assert_allclose(cluster_bootstrap(values, programs, draws=20, seed=3), expected)


@pytest.mark.slow
def test_draws_in_several_blocks_go_on_where_the_last_ended():
    values = np.random.default_rng(0).normal(size=(4500, 1))
    whole = cluster_bootstrap(values, range(4500))  # 9 million: more than a block
    assert whole.shape == (DRAWS, 1)
    np.testing.assert_allclose(cluster_bootstrap(values, range(4500), draws=1000), whole[:1000])


def test_one_question_a_program_gives_the_usual_standard_error():
    values = np.random.default_rng(0).normal(size=(400, 1))
    means = cluster_bootstrap(values, range(400))
    assert means.mean() == pytest.approx(values.mean(), abs=0.005)
    assert means.std() == pytest.approx(values.std() / 20, rel=0.05)


def test_paraphrases_are_no_independent_draws():
    """Nine paraphrases of each program, answered together: the interval is that of the programs, not a third of it."""
    ours = np.random.default_rng(0).integers(2, size=60).astype(float)
    rates = {"rcr": np.repeat(ours, 9), "other": np.zeros(540)}
    programs = np.repeat(np.arange(60), 9).tolist()
    low, high = paired_intervals(rates, programs)["other"]
    once = paired_intervals({"rcr": ours, "other": np.zeros(60)}, list(range(60)))["other"]
    assert (low, high) == pytest.approx(once)
    independent = paired_intervals(rates, list(range(540)))["other"]
    assert (high - low) / (independent[1] - independent[0]) == pytest.approx(3, rel=0.15)


def test_the_questions_of_a_database_are_no_independent_draws_either():
    ours = np.random.default_rng(0).integers(2, size=60).astype(float)
    rates = {"rcr": np.repeat(ours, 9), "other": np.zeros(540)}
    programs, homes = list(range(540)), np.repeat(np.arange(60), 9).tolist()
    once = paired_intervals({"rcr": ours, "other": np.zeros(60)}, list(range(60)))["other"]
    assert paired_intervals(rates, programs, homes)["other"] == pytest.approx(once)
    few = [home % (FEW_PROGRAMS - 1) for home in homes]  # too few to resample
    assert paired_intervals(rates, programs, few) == paired_intervals(rates, programs)


def test_paired_by_hand():
    rates = {"other": np.full(30, 0.25), "rcr": np.full(30, 0.75), "same": np.full(30, 0.75)}
    assert paired_intervals(rates, list(range(30))) == {"other": (50.0, 50.0), "same": (0.0, 0.0)}


def test_no_interval_of_few_programs_or_without_ours():
    rates = {"rcr": np.ones(500), "other": np.zeros(500)}
    few = [i % (FEW_PROGRAMS - 1) for i in range(500)]
    assert paired_intervals(rates, few) == {}
    assert paired_intervals(rates, [*few[1:], "one more"]) == {"other": (100.0, 100.0)}
    assert paired_intervals({"other": np.zeros(500)}, list(range(500))) == {}
    assert paired_intervals({"rcr": np.zeros(500)}, list(range(500))) == {}
