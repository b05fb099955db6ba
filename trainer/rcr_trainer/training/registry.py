"""Losses of SFT and advantages of GRPO by name, without loading torch: settings validate against these tables.

To add one, write a pure function beside those in `losses` or `advantages`, and name it here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered function.

    Args:
        path: `module:function`.
        summary: a line for help texts.
    """

    path: str
    summary: str

    @property
    def function(self) -> Callable[..., Any]:
        """The function itself."""
        found: Callable[..., Any] = pkgutil.resolve_name(self.path)
        return found


@dataclass(frozen=True, slots=True)
class Loss(Entry):
    """A loss of SFT: (logits, targets) → scalar, a mean over states.

    Args:
        in_batch: its candidates are the batch's own, a positive and a hard negative for each single state; else
            whole sequences are trained against all candidates, and the mean is over states with something to gain.
    """

    in_batch: bool = False


@dataclass(frozen=True, slots=True)
class Advantage(Entry):
    """An advantage of GRPO: rewards (B, G) → advantages (B, G).

    Args:
        reads_greedy: it takes the rewards (B,) of the greedy sequences, too.
        kl_in_loss: the penalty for leaving the reference policy is a term of the loss; else it is in the reward.
    """

    reads_greedy: bool = False
    kl_in_loss: bool = False


_LOSSES, _ADVANTAGES = "rcr_trainer.training.losses", "rcr_trainer.training.advantages"

LOSSES = {
    "listwise": Loss(f"{_LOSSES}:listwise", "soft targets over the pool, by how much each candidate adds"),
    "infonce": Loss(f"{_LOSSES}:info_nce", "the paper's, one positive against in-batch and hard negatives", True),
}
ADVANTAGES = {
    "grpo": Advantage(f"{_ADVANTAGES}:grpo", "mean and spread of its group", kl_in_loss=True),
    "rloo": Advantage(f"{_ADVANTAGES}:rloo", "the rest of its group"),
    "remax": Advantage(f"{_ADVANTAGES}:remax", "the greedy picks", reads_greedy=True),
    "nb": Advantage(f"{_ADVANTAGES}:nb", "nothing"),
}
