"""Ratio, clip and KL by hand; the objective's gradient against finite differences."""

import math

import pytest
import torch
from rcr_trainer.training.losses import gap, grpo_loss, kl_estimate, ratio

LOG2 = math.log(2)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_ratio_by_hand():
    assert ratio(vector(-1.0, -3.0), vector(-1.0, -3.0 - LOG2)).tolist() == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        (0.0, 2.0, 2.0),
        (math.log(1.1), 2.0, 2.2),  # within the clip
        (LOG2, 2.0, 2.4),  # 2 is clipped to 1.2
        (LOG2, -2.0, -4.0),  # and not where that would make it better
        (-LOG2, 2.0, 1.0),
        (-LOG2, -2.0, -1.6),  # 0.5 is clipped to 0.8
        (LOG2, 0.0, 0.0),
    ],
)
def test_clip_by_hand(log_ratio, advantage, expected):
    loss = grpo_loss(vector(log_ratio), vector(0.0), vector(0.0), vector(advantage), torch.tensor([True]), 0.2, 0.0)
    assert loss.item() == pytest.approx(-expected)


def test_kl_by_hand():
    # ρ = 1, 2, ½: ρ − log ρ − 1
    got = kl_estimate(vector(-4.0, -4.0, -4.0), vector(-4.0, -4.0 + LOG2, -4.0 - LOG2))
    assert got.tolist() == pytest.approx([0.0, 1 - LOG2, LOG2 - 0.5])


def test_what_differs_by_rounding_is_equal_and_has_no_gradient():
    new = vector(-4.0 + 2e-5, -4.0 - 2e-5, -4.1).requires_grad_()
    assert gap(new, vector(-4.0, -4.0, -4.0)).tolist() == pytest.approx([0, 0, -0.1])
    kl_estimate(new, vector(-4.0, -4.0, -4.0)).sum().backward()
    assert new.grad.tolist() == pytest.approx([0, 0, 1 - math.exp(0.1)])


def test_the_estimate_is_the_divergence_on_average():
    new, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    exact = (new * (new / reference).log()).sum()
    assert (new * kl_estimate(new.log(), reference.log())).sum().item() == pytest.approx(exact.item())


def test_objective_by_hand():
    new, old, reference = vector(LOG2, 0.0), vector(0.0, 0.0), vector(0.0, LOG2)
    loss = grpo_loss(new, old, reference, vector(1.0, -3.0), torch.tensor([True, True]), 0.2, 0.1)
    # −min(2, 1.2) + 0.1 (½ − log ½ − 1) and 3 + 0.1 (2 − log 2 − 1)
    assert loss.tolist() == pytest.approx([-1.2 + 0.1 * (LOG2 - 0.5), 3 + 0.1 * (1 - LOG2)])


def test_what_is_not_scored_has_neither_loss_nor_gradient():
    new = vector(0.3, 0.7).requires_grad_()
    loss = grpo_loss(new, vector(0.0, 0.0), vector(0.1, 0.1), vector(1.0, 0.0), torch.tensor([True, False]), 0.2, 0.04)
    loss.sum().backward()
    assert loss[1].item() == 0
    assert new.grad[1].item() == 0
    assert new.grad[0].item() != 0


def test_without_beta_there_is_no_kl():
    new = vector(0.1)
    loss = grpo_loss(new, vector(0.0), vector(5.0), vector(1.0), torch.tensor([True]), 0.2, 0.0)
    assert loss.item() == pytest.approx(-math.exp(0.1))


def test_the_gradient_at_a_ratio_of_one_is_that_of_reinforce():
    new = vector(-1.0, -2.0).requires_grad_()
    advantages = vector(0.5, -2.0)
    grpo_loss(new, new.detach(), new.detach(), advantages, torch.tensor([True, True]), 0.2, 0.04).sum().backward()
    assert new.grad.tolist() == pytest.approx((-advantages).tolist())


def test_gradient_against_finite_differences():
    generator = torch.Generator().manual_seed(0)
    old, reference, advantages = (torch.randn(40, generator=generator).double() for _ in range(3))
    new = (old + 0.3 * torch.randn(40, generator=generator)).requires_grad_()
    moved = ratio(new, old)
    assert ((moved < 0.79) | (moved > 1.21)).any()
    assert ((moved > 0.81) & (moved < 1.19)).any()
    scored = torch.rand(40, generator=generator) > 0.2
    assert torch.autograd.gradcheck(lambda x: grpo_loss(x, old, reference, advantages, scored, 0.2, 0.04), (new,))


def test_exponents_out_of_all_proportion_stay_finite():
    # As float32 they would overflow at 88, and infinity times an advantage of 0 is no number.
    new = torch.tensor([100.0, -100.0, 100.0], requires_grad=True)
    zeros = torch.zeros(3)
    loss = grpo_loss(new, zeros, zeros, torch.tensor([-1.0, 1.0, 0.0]), torch.ones(3, dtype=torch.bool), 0.2, 0.04)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(new.grad).all()
    assert new.grad[0] > 0  # still pushed down
    assert new.grad[1] < 0  # still pulled back to the reference
    assert ratio(vector(19.0), vector(0.0)).item() == pytest.approx(math.exp(19))
