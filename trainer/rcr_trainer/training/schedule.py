"""The learning rate over a run."""

from __future__ import annotations


def linear(step: int, planned: int, warmup: float) -> float:
    """Factor on the learning rate: a climb over the first `warmup` share of the steps, then linear decay to 0.

    Args:
        step: optimiser steps taken.
        planned: optimiser steps of the whole run.
        warmup: share of them in which the rate climbs.
    """
    climb = warmup * planned
    if step < climb:
        return (step + 1) / climb
    return max(0.0, (planned - step) / max(1.0, planned - climb))
