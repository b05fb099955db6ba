"""Losses and advantages are one pure function and one line of a registry: settings, help and training follow."""

import ast

import numpy as np
import pytest
import torch
from places import ROOT
from rcr_trainer.data.covr import covr_split
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.settings import GRPOSettings, SFTSettings
from rcr_trainer.training.registry import ADVANTAGES, LOSSES, Advantage, Loss
from training import train_grpo, train_sft

from langchain_rcr.basics.items import Item
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

torch.set_num_threads(1)

SPEC, SPLIT = ProgramSpec(), covr_split("110", 0, 40, 0, dev=10)


def policy():
    return TriEncoder.build("lexical", [Item(e.source, e.target) for e in SPLIT.train], dim=16)


def hinge(logits, targets):
    """The best candidate is to be ahead of each other one by what it adds more."""
    gains = targets.gains.masked_fill(~targets.allowed, -1)
    best = gains.argmax(1, keepdim=True)
    behind = (gains.gather(1, best) - gains) - (logits.gather(1, best) - logits)
    return behind.masked_fill(~targets.allowed, 0).clamp(min=0).mean()


def ranks(rewards):
    """From −0.5 to 0.5 by a reward's place in its group."""
    return np.nan_to_num(rewards).argsort(1).argsort(1) / max(1, rewards.shape[1] - 1) - 0.5


def test_a_loss_is_a_function_and_a_line(monkeypatch):
    with pytest.raises(ValueError, match="loss must be 'listwise' or 'infonce', not 'hinge'"):
        SFTSettings(loss="hinge")
    monkeypatch.setitem(LOSSES, "hinge", Loss(f"{__name__}:hinge", "a margin of what is gained"))
    config = SFTSettings(loss="hinge", epochs=5, lr=1e-2, patience=None)
    result = train_sft(policy(), SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, config)
    assert result.history[-1]["loss"] < 0.8 * result.history[1]["loss"]


def test_an_advantage_is_a_function_and_a_line(monkeypatch):
    with pytest.raises(ValueError, match="advantage must be 'grpo', 'rloo', 'remax' or 'nb', not 'ranks'"):
        GRPOSettings(advantage="ranks")
    monkeypatch.setitem(ADVANTAGES, "ranks", Advantage(f"{__name__}:ranks", "its place in the group"))
    config, rewards = GRPOSettings(advantage="ranks", epochs=8, lr=5e-3, batch_size=20, group_size=16), []
    reward = make_reward("context_coverage", SPEC)
    log = lambda step, row: rewards.append(row.get("reward"))  # noqa: E731
    train_grpo(policy(), SPLIT.train, SPLIT.train, [], SPEC, config, reward, log=log)
    assert np.mean(rewards[-4:]) > np.mean(rewards[1:5]) + 0.02


@pytest.mark.slow
def test_nothing_but_the_registry_knows_a_loss_or_an_advantage_by_name():
    known = {name: [] for name in ("infonce", "rloo", "remax", "nb")}
    for path in [*(ROOT / "langchain_rcr").rglob("*.py"), *(ROOT / "trainer").rglob("*.py")]:
        constants = (n.value for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Constant))
        for name in known.keys() & {value for value in constants if isinstance(value, str)}:
            known[name].append(path.name)
    assert known == {name: ["registry.py"] for name in known}


def test_every_registered_function_is_there():
    assert all(callable(entry.function) and entry.summary for entry in [*LOSSES.values(), *ADVANTAGES.values()])
