"""π over sequences: probabilities against enumeration, draws against probabilities, gradients against differences."""

import itertools
import math

import numpy as np
import pytest
import torch
from rcr_trainer.training.actor import draw, sequence_log_probs, states

from langchain_rcr.families.state import AdditiveState

N, D, K, TAU = 6, 4, 3, (0.7, 0.4, 1.1)
BARRED = torch.zeros(1, N, dtype=torch.bool)
BARRED[0, 2] = True


def vectors(seed=0, size=N, dim=D):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, dim, generator=generator).double() for rows in (1, size, size)]


def slow_log_prob(query, candidates, contexts, sequence, barred, tau=TAU, lam=0.8):
    """log π of one sequence, from the definition."""
    total, left = 0.0, [c for c in range(len(candidates)) if c not in barred]
    state = query.clone()
    for step, pick in enumerate(sequence):
        weights = {c: math.exp(float(candidates[c] @ state) / tau[step]) for c in left}
        total += math.log(weights[pick] / sum(weights.values()))
        left.remove(pick)
        state = state + lam * contexts[pick]
    return total


def fast_log_probs(query, candidates, contexts, sequences, barred=BARRED, tau=TAU):
    picks = torch.tensor(sequences)
    start = AdditiveState(0.8).start(query.expand(len(picks), -1))
    return sequence_log_probs(start, candidates, contexts[picks[:, :-1]], barred.expand(len(picks), -1), picks, tau)


def test_every_ordered_subset_once_and_the_probabilities_sum_to_one():
    query, candidates, contexts = vectors()
    every = list(itertools.permutations([0, 1, 3, 4, 5], K))
    got = fast_log_probs(query, candidates, contexts, every)
    expected = [slow_log_prob(query[0], candidates, contexts, sequence, {2}) for sequence in every]
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    assert got.exp().sum().item() == pytest.approx(1.0)


def test_what_cannot_be_picked_has_no_probability():
    query, candidates, contexts = vectors()
    got = fast_log_probs(query, candidates, contexts, [(2, 0, 1), (0, 0, 1), (0, 1, 0)])
    assert got.tolist() == [-math.inf] * 3


def test_states_are_those_of_the_state_step_by_step():
    query, _, contexts = vectors()
    got = states(AdditiveState(0.8).start(query), contexts[None, :2])
    assert got.shape == (1, 3, D)
    np.testing.assert_allclose(got[0, 2], query[0] + 0.8 * (contexts[0] + contexts[1]), rtol=1e-12)


def drawn(rows, seed=0, uniforms=None, k=K, tau=TAU, data=None, barred=BARRED):
    query, candidates, contexts = data or vectors()
    if uniforms is None:
        uniforms = torch.from_numpy(np.random.default_rng(seed).random((rows, k)))
    start = AdditiveState(0.8).start(query.expand(rows, -1))
    return draw(
        start,
        candidates,
        lambda picks: contexts[picks],
        barred.expand(rows, -1),
        k,
        tau=tau,
        uniforms=uniforms,
    )


@pytest.mark.slow
def test_draws_have_the_frequencies_of_their_probabilities():
    got = drawn(20_000)
    every = list(itertools.permutations([0, 1, 3, 4, 5], K))
    number = {sequence: n for n, sequence in enumerate(every)}
    counts = np.bincount([number[tuple(row)] for row in got.picks.tolist()], minlength=len(every))
    expected = 20_000 * fast_log_probs(*vectors(), every).exp().numpy()
    # Rare ones together: the test wants some 5 of each.
    rare = expected < 5
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    assert len(counts) > 20
    from scipy import stats

    assert stats.chisquare(counts, expected).pvalue > 0.01


def test_draws_bring_their_log_probabilities():
    got = drawn(200)
    again = fast_log_probs(*vectors(), got.picks.tolist())
    np.testing.assert_allclose(got.log_probs, again, rtol=1e-5)
    query, candidates, _ = vectors()
    policy = torch.softmax((candidates @ query[0] / TAU[0])[~BARRED[0]], 0)
    assert got.entropies.shape == (200, K)
    np.testing.assert_allclose(got.entropies[:, 0], -(policy * policy.log()).sum(), rtol=1e-5)


def test_a_draw_inverts_the_cumulative_distribution():
    query, candidates, _ = vectors()
    policy = torch.softmax((candidates @ query[0] / TAU[0]).masked_fill(BARRED[0], -math.inf), 0)
    edges = policy.cumsum(0)
    below = torch.nextafter(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)).item()
    numbers = torch.tensor([0.0, edges[0] - 1e-9, edges[0] + 1e-9, edges[1] - 1e-9, edges[1] + 1e-9, below])
    got = drawn(6, uniforms=numbers.double()[:, None], k=1)
    assert got.picks[:, 0].tolist() == [0, 0, 1, 1, 3, 5]  # 2 is barred


def test_extreme_numbers_never_draw_what_is_barred():
    query, candidates, contexts = vectors(size=400)
    barred = torch.ones(1, 400, dtype=torch.bool)
    barred[0, [7, 8, 9]] = False
    largest = np.nextafter(1.0, 0.0)
    for number in (0.0, largest):
        got = drawn(
            1,
            uniforms=torch.full((1, 3), number).double(),
            data=(query, candidates, contexts),
            barred=barred,
            tau=[0.01] * 3,
        )
        assert sorted(got.picks[0].tolist()) == [7, 8, 9]


def test_greedy_takes_the_most_probable_at_every_step():
    query, candidates, contexts = vectors()
    got = draw(
        AdditiveState(0.8).start(query), candidates, lambda p: contexts[p], BARRED, K, tau=TAU, uniforms=None
    ).picks[0]
    left, state = [0, 1, 3, 4, 5], query[0]
    for pick in got.tolist():
        assert pick == max(left, key=lambda c: float(candidates[c] @ state))
        left.remove(pick)
        state = state + 0.8 * contexts[pick]


# ---------------------------------------------------------------- masks and gradients


def test_probabilities_by_hand():
    barred = torch.tensor([[True, False, False, False, False]])
    nothing = [torch.zeros(rows, D).double() for rows in (1, 5, 5)]  # so what is left is equally probable
    pairs = fast_log_probs(*nothing, [(3, 1), (1, 3), (3, 3), (0, 1), (3, 0)], barred, TAU[:2])
    np.testing.assert_allclose(pairs.exp(), [1 / 12, 1 / 12, 0, 0, 0], rtol=1e-12)
    np.testing.assert_allclose(fast_log_probs(*nothing, [(3,), (0,)], barred, TAU[:1]).exp(), [1 / 4, 0], rtol=1e-12)


def test_gradients_against_finite_differences():
    query, candidates, contexts = vectors()
    picks = torch.tensor([[0, 3, 1], [5, 4, 0]])

    def log_probs(query, candidates, contexts):
        start = AdditiveState(0.8).start(query.expand(2, -1))
        return sequence_log_probs(start, candidates, contexts[picks[:, :-1]], BARRED.expand(2, -1), picks, TAU)

    arguments = [tensor.requires_grad_() for tensor in (query, candidates, contexts)]
    assert torch.autograd.gradcheck(log_probs, arguments)
