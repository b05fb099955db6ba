"""The policy over a pool: its gradient against one plain graph, frozen against trained candidates, bounded memory."""

from functools import partial

import numpy as np
import pytest
import torch
from rcr_trainer import grpo
from rcr_trainer.data.held_out import Barred
from rcr_trainer.settings import GRPOSettings
from rcr_trainer.training import actor as actor_module
from rcr_trainer.training.actor import Actor, Leaf, Sequences
from rcr_trainer.training.environment import Environment
from rcr_trainer.training.losses import grpo_loss
from rcr_trainer.training.runner import Job
from small_grpo import COVERAGE, FAST, SPEC, SPLIT, items, lexical

from langchain_rcr.basics.items import Item
from langchain_rcr.policy.triencoder import TriEncoder

torch.set_num_threads(1)

settings = partial(GRPOSettings, perplexity=None)


def questions(examples):
    return [Item(e.source) for e in examples]


def plain_loss(model, rows, drawn, reference, advantages, config, barred):
    """−J of a batch with all encoders in one graph, a sequence at a time."""
    pool = items(SPLIT.train)
    candidate_features, context_features = model.featurize_pool(pool)
    candidates, contexts = model.candidate(candidate_features), model.context(context_features)
    queries = model.query(model.query.featurize(questions([SPLIT.train[row] for row in rows])))
    total = 0.0
    group = len(drawn.picks) // len(rows)
    for n, picks in enumerate(drawn.picks.tolist()):
        state, closed, log_prob = queries[n // group], set(barred[rows[n // group]].tolist()), 0.0
        for pick in picks:
            logits = (candidates @ state) / model.config.tau
            left = [c for c in range(len(pool)) if c not in closed]
            log_prob = log_prob + logits[pick] - torch.logsumexp(logits[left], 0)
            closed.add(pick)
            state = state + model.config.lam * contexts[pick]
        parts = (drawn.log_probs[n], reference[n], advantages[n], torch.tensor(True))
        loss = grpo_loss(log_prob[None], *(part[None] for part in parts), config.epsilon, config.beta)
        total = total + loss.sum() / len(drawn.picks)
    return total


def build(family, bert):
    if family == "lexical":
        return lexical()
    return TriEncoder.build("transformer", [], base=bert, lam=0.1).eval()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lexical", "transformer"])
@pytest.mark.parametrize("train_candidates", [False, True])
@pytest.mark.parametrize("block", [1, 1 << 25])
def test_the_gradient_is_that_of_one_plain_graph(monkeypatch, bert, family, train_candidates, block):
    monkeypatch.setattr(actor_module, "_BLOCK", block)
    model, config = build(family, bert), GRPOSettings(k=3, group_size=3)
    barred = Barred(SPLIT.train, SPLIT.train, SPEC, with_program=True)
    queries = model.query.featurize(questions(SPLIT.train))
    actor = Actor(model, queries, SPLIT.train, barred, settings(k=3, train_candidates=train_candidates, chunk=5))
    rows = np.array([3, 17])
    drawn = actor.draw(rows, np.random.default_rng(0).random((2, 3, 3)))
    assert not any(set(picks) & set(barred[rows[n // 3]]) for n, picks in enumerate(drawn.picks.tolist()))
    reference = actor.reference_log_probs(rows, drawn)
    torch.testing.assert_close(reference, drawn.log_probs, rtol=1e-4, atol=1e-4)  # nothing has moved yet
    reference = reference - 0.3
    drawn = Sequences(drawn.picks, drawn.log_probs + 0.1, drawn.entropies)
    advantages = torch.randn(6, generator=torch.Generator().manual_seed(0))

    def loss(new, of):
        scored = torch.ones(len(new), dtype=torch.bool)
        each = grpo_loss(new, drawn.log_probs[of], reference[of], advantages[of], scored, config.epsilon, config.beta)
        return each.sum() / 6

    if not train_candidates:
        model.candidate.requires_grad_(False)
    actor.backward(rows, drawn, loss)
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plain_loss(model, rows, drawn, reference, advantages, config, barred).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys()
    assert any(name.startswith("candidate") for name in got) is train_candidates
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=2e-3, atol=2e-5)


def test_a_step_of_grpo_takes_the_mean_of_its_sequences_losses():
    """AdamW doesn't tell a gradient from its double, but what it is clipped to and the log do."""
    model, before = lexical(), lexical()
    config = FAST.model_copy(update={"perplexity": None, "batch_size": 3, "group_size": 4, "advantage": "nb"})
    job = Job(model, SPLIT.train, SPLIT.train, [], SPEC)
    environment = Environment(job, COVERAGE, None, config)
    stage = grpo._GRPO(job, environment, config)
    rollout = stage.collect(0)
    figures = rollout.figures | stage._update(rollout)
    before.candidate.requires_grad_(False)
    of_batch = rollout.rows, rollout.drawn, rollout.reference, rollout.advantages
    loss = plain_loss(before, *of_batch, config, environment.barred)
    loss.backward()
    squares = sum(p.grad.square().sum() for p in before.parameters() if p.grad is not None)
    assert figures["grad_norm"] == pytest.approx(squares.sqrt().item(), rel=1e-3)
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-3)
    assert figures["loss"] == pytest.approx(-figures["reward"], rel=1e-3)


def test_the_batchs_gradient_against_finite_differences():
    model = lexical(dim=4)
    barred = [np.empty(0, dtype=np.int64)] * 2
    pool = SPLIT.train[:6]
    queries = model.query.featurize(questions(pool[:2]))
    actor = Actor(model, queries, pool, barred, settings(k=2, train_candidates=True, chunk=4))
    rows = np.array([0, 1])
    drawn = actor.draw(rows, np.random.default_rng(1).random((2, 4, 2)))
    weights = torch.randn(8, generator=torch.Generator().manual_seed(0))
    values = []

    def loss(new, of):
        value = (new * weights[of]).sum()
        values.append(value.item())
        return value

    actor.backward(rows, drawn, loss)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
        slope = float((gradients[name] * direction).sum())
        ends = []
        start = parameter.detach().clone()
        for sign in (1, -1):
            parameter.data = start + sign * 1e-3 * direction
            actor.backward(rows, drawn, loss)
            ends.append(values[-1])
        parameter.data = start
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=0.05, abs=0.02), name


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_leaf_is_the_encoder_with_less_memory(bert, chunk):
    encoder = TriEncoder.build("transformer", [], base=bert).eval().candidate
    features = encoder.featurize(items(SPLIT.train[:7]))
    weight = torch.randn(7, encoder.dim, generator=torch.Generator().manual_seed(0))
    (encoder(features) * weight).sum().backward()
    expected = [None if p.grad is None else p.grad.clone() for p in encoder.parameters()]
    encoder.zero_grad()
    leaf = Leaf(encoder, features, chunk)
    (leaf.vectors * weight).sum().backward()
    leaf.backward()
    for parameter, gradient in zip(encoder.parameters(), expected, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)


def test_an_unused_leaf():
    encoder = lexical().query
    leaf = Leaf(encoder, encoder.featurize([]), 4)
    assert leaf.vectors.shape == (0, 16)
    leaf.backward()
    assert all(p.grad is None for p in encoder.parameters())


def test_frozen_and_trained_candidates_agree_when_nothing_moves():
    barred = Barred(SPLIT.train, SPLIT.train, SPEC, with_program=True)
    rows, uniforms = np.arange(5), np.random.default_rng(0).random((5, 4, 3))
    seen = []
    for train_candidates in (False, True):
        model = lexical()
        model.candidate.requires_grad_(train_candidates)
        queries = model.query.featurize(questions(SPLIT.train))
        actor = Actor(model, queries, SPLIT.train, barred, settings(k=3, train_candidates=train_candidates, chunk=16))
        drawn = actor.draw(rows, uniforms)
        new = []
        actor.backward(rows, drawn, lambda log_probs, of, new=new: new.append(log_probs) or log_probs.sum())
        seen.append(
            (drawn, actor.reference_log_probs(rows, drawn), new[0].detach(), next(model.query.parameters()).grad)
        )
    (one, *ours), (other, *theirs) = seen
    assert torch.equal(one.picks, other.picks)
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[0], one.log_probs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours[0], ours[1], rtol=1e-3, atol=1e-3)
