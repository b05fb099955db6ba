"""GRPO of a small lexical policy on forty of COVR's questions."""

from rcr_trainer.data.covr import covr_split
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.settings import GRPOSettings
from training import train_grpo

from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
SPLIT = covr_split("110", 0, 40, 0, dev=20)
FAST = GRPOSettings(race=0, epochs=2, batch_size=16, group_size=8, lr=1e-3, beta=0.04)
COVERAGE = make_reward("context_coverage", SPEC)


def items(examples):
    return [example.item for example in examples]


def lexical(seed=0, dim=16):
    return TriEncoder.build("lexical", items(SPLIT.train), dim=dim, seed=seed, scale=20.0, lam=1.0)


def run(model, config=FAST, reward=COVERAGE, dev=SPLIT.dev, **options):
    return train_grpo(model, SPLIT.train, SPLIT.train, dev, SPEC, config, reward, **options)
