"""The two losses: by hand, masks, ties, states without gain, gradients against finite differences."""

import math

import pytest
import torch
from rcr_trainer.training import losses
from rcr_trainer.training.losses import Targets

torch.set_num_threads(1)


def listwise_loss(logits, gains, allowed, temperature):
    return losses.listwise(logits, Targets(gains, allowed, temperature))


def info_nce(logits, positive, gains, allowed, **options):
    return losses.info_nce(logits, Targets(gains, allowed, positive=torch.as_tensor(positive), **options))


ALL = torch.ones(1, 3, dtype=torch.bool)


def softmax(values):
    total = sum(math.exp(v) for v in values)
    return [math.exp(v) / total for v in values]


def test_listwise_by_hand():
    logits, gains = [1.0, 0.5, -2.0], [2.0, 1.0, 0.0]
    target, policy = softmax([g / 0.5 for g in gains]), softmax(logits)
    expected = -sum(t * math.log(p) for t, p in zip(target, policy, strict=True))
    loss = listwise_loss(torch.tensor([logits]), torch.tensor([gains]), ALL, 0.5)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_listwise_gradient_by_hand():
    # d/d logits of a cross-entropy: policy − target.
    logits = torch.tensor([[1.0, 0.5, -2.0]], requires_grad=True)
    listwise_loss(logits, torch.tensor([[2.0, 1.0, 0.0]]), ALL, 0.5).backward()
    expected = [p - t for p, t in zip(softmax([1.0, 0.5, -2.0]), softmax([4.0, 2.0, 0.0]), strict=True)]
    assert logits.grad[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_listwise_is_the_mean_over_states_that_have_something_to_gain():
    logits, gains = torch.randn(3, 5), torch.tensor([[1.0, 0, 2, 0, 0], [0, 0, 0, 0, 0], [3.0, 1, 0, 0, 1]])
    allowed = torch.ones(3, 5, dtype=torch.bool)
    rows = [listwise_loss(logits[n : n + 1], gains[n : n + 1], allowed[:1], 0.5).item() for n in range(3)]
    assert rows[1] == 0
    assert listwise_loss(logits, gains, allowed, 0.5).item() == pytest.approx((rows[0] + rows[2]) / 2, rel=1e-5)


def test_listwise_ignores_what_is_not_allowed():
    logits = torch.tensor([[1.0, 9.0, -2.0, 0.5]], requires_grad=True)
    gains, allowed = torch.tensor([[2.0, 50.0, 0.0, 1.0]]), torch.tensor([[True, False, True, True]])
    loss = listwise_loss(logits, gains, allowed, 0.5)
    kept = [0, 2, 3]
    without = listwise_loss(logits[:, kept], gains[:, kept], allowed[:, kept], 0.5)
    torch.testing.assert_close(loss, without)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[0, 1] == 0
    assert (gradient[0, kept] != 0).all()


@pytest.mark.parametrize(
    ("gains", "allowed"),
    [([0.0, 0.0, 0.0], [True] * 3), ([9.0, 0.0, 0.0], [False, True, True]), ([1.0, 1.0, 1.0], [False] * 3)],
)
def test_listwise_learns_nothing_where_nothing_can_be_gained(gains, allowed):
    logits = torch.tensor([[3.0, 1.0, 0.0]], requires_grad=True)
    loss = listwise_loss(logits, torch.tensor([gains]), torch.tensor([allowed]), 0.5)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.tolist() == [[0.0] * 3]


def test_listwise_ties_share_the_target():
    # The loss is least where the policy gives the two best the same share, and it doesn't tell them apart.
    gains = torch.tensor([[2.0, 2.0, 0.0]])
    one, other, both = (
        listwise_loss(torch.tensor([logits]), gains, ALL, 0.05).item()
        for logits in ([4.0, 2.0, -9.0], [2.0, 4.0, -9.0], [3.0, 3.0, -9.0])
    )
    assert one == pytest.approx(other)
    assert both == pytest.approx(math.log(2), abs=1e-4)
    assert both < one


def test_listwise_at_a_low_temperature_is_the_cross_entropy_of_the_best():
    logits = torch.randn(1, 3)
    loss = listwise_loss(logits, torch.tensor([[0.0, 1.0, 2.0]]), ALL, 0.01)
    torch.testing.assert_close(loss, -logits.log_softmax(-1)[0, 2])


@pytest.mark.parametrize("loss", ["listwise", "infonce"])
def test_extreme_logits_stay_finite(loss):
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    gains = torch.tensor([[0.0, 40.0, 0.0]])
    value = listwise_loss(logits, gains, ALL, 0.5) if loss == "listwise" else info_nce(logits, [1], gains, ALL)
    value.backward()
    assert value.item() == pytest.approx(2e4)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("loss", ["listwise", "infonce"])
def test_gradients_equal_finite_differences(loss):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    gains = torch.randint(0, 4, (4, 6), generator=generator).double()
    allowed = torch.rand(4, 6, generator=generator) < 0.8
    positive = gains.masked_fill(~allowed, -1).argmax(1)

    def value(x):
        if loss == "listwise":
            return listwise_loss(x, gains, allowed, 0.5)
        return info_nce(x, positive, gains, allowed)

    assert value(logits).item() > 0
    assert torch.autograd.gradcheck(value, logits)


# ---------------------------------------------------------------- InfoNCE


def test_info_nce_by_hand():
    logits, gains = torch.tensor([[1.0, 0.5, -2.0], [0.0, 2.0, 1.0]]), torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    expected = -(math.log(softmax([1.0, 0.5, -2.0])[0]) + math.log(softmax([0.0, 2.0, 1.0])[1])) / 2
    loss = info_nce(logits, [0, 1], gains, ALL.expand(2, 3))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_info_nce_masks_false_negatives():
    logits = torch.tensor([[1.0, 5.0, -2.0, 3.0]], requires_grad=True)
    gains = torch.tensor([[2.0, 2.0, 1.0, 3.0]])  # the second adds as much as the positive, the last more
    every = torch.ones(1, 4, dtype=torch.bool)
    loss = info_nce(logits, [0], gains, every)
    assert loss.item() == pytest.approx(-math.log(softmax([1.0, -2.0])[0]), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[0, [1, 3]].tolist() == [0, 0]
    assert gradient[0, 0] < 0 < gradient[0, 2]
    kept = info_nce(logits, [0], gains, every, mask_equals=False)  # as the paper does
    assert kept.item() == pytest.approx(-math.log(softmax([1.0, 5.0, -2.0, 3.0])[0]), rel=1e-5)


def test_info_nce_masks_what_is_not_allowed():
    logits = torch.tensor([[1.0, 5.0, -2.0]], requires_grad=True)
    loss = info_nce(logits, [0], torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[True, False, True]]))
    assert loss.item() == pytest.approx(-math.log(softmax([1.0, -2.0])[0]), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[0, 1] == 0


def test_info_nce_keeps_the_positive_whatever_else_holds():
    logits = torch.tensor([[1.0, 5.0]], requires_grad=True)
    loss = info_nce(logits, [0], torch.tensor([[0.0, 4.0]]), torch.tensor([[False, False]]))
    assert loss.item() == pytest.approx(0)
    with pytest.raises(ValueError, match="InfoNCE compares with a positive"):
        losses.info_nce(logits, Targets(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)))
