"""Stage 1: supervised fine-tuning on structure coverage (paper section 3.1)."""

from rcr_trainer.sft.loop import SFTResult, train

__all__ = ["SFTResult", "train"]
