"""Stage 2: reinforcement learning from what a language model answers (paper section 3.2)."""

from rcr_trainer.grpo.loop import GRPOResult, calls_at_most, train

__all__ = ["GRPOResult", "calls_at_most", "train"]
