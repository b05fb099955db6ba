"""A tiny run in the current folder, as tests of whole comparisons begin it, and what its report says."""

from rcr_trainer.evaluation.report import EvaluationReport

CONFIG = """
data: {split: 110, train_size: 60, test_size: 8, dev_size: 8}
model: {family: lexical, dim: 16}
sft: {epochs: 1}
evaluation: {selectors: [random, bm25]}
threads: 1
"""


def report(folder="runs/demo"):
    return EvaluationReport.read(folder)


def exact(folder="runs/demo"):
    return {name: scores.exact_match for name, scores in report(folder).selectors.items()}
