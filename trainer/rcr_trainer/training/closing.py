"""The closing lines of GRPO's log: what its figures mean, and which weights are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rcr_trainer.training.runner import Result

_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "kl": (
        "KL {:.3g}: how far the policy has moved from SFT's, in nats a sequence of picks",
        lambda kl: "next to nothing: try a larger grpo.lr or more epochs" if kl < 1e-3 else "",
    ),
    "no_signal": (
        "no signal {:.0%}: questions whose sequences all earned the same, which teaches nothing",
        lambda share: "try a larger grpo.group_size or grpo.perplexity, or a graded reward" if share > 0.5 else "",
    ),
    "clipped": ("clipped {:.0%}: sequences whose ratio left 1 ± grpo.epsilon; 0 with grpo.updates: 1", lambda _: ""),
    "unscored": (
        "unscored {:.0%}: sequences without a reward",
        lambda share: "look at the programs, or the reward" if share > 0.1 else "",
    ),
    "no_program": (
        "no program {:.0%}: answers of the language model that hold none",
        lambda share: "look at the prompt, llm.stop and llm.max_tokens" if share > 0.1 else "",
    ),
}
"""Figure of the log → what it means, and advice if the value calls for some."""


def closing_lines(result: Result, best_by: str) -> Iterator[str]:
    """Explain the figures of the last batch, and which weights were kept."""
    trained = [figures for figures in result.history if "reward" in figures]
    if not trained:
        return
    first, last = trained[0], trained[-1]
    yield f"reward of the drawn picks {first['reward']:.3f} → {last['reward']:.3f}, first to last evaluation"
    for name, (text, advise) in _FIGURES.items():
        if name in last and not (name != "kl" and last[name] == 0):
            advice = advise(last[name])
            yield text.format(last[name]) + (f"; {advice}" if advice else "")
    drawn = [f"{last[name]:.1f}" for name in sorted(last) if name.startswith("perplexity_")]
    if drawn:
        yield f"perplexity {', '.join(drawn)}: candidates that each step draws among in effect"
    scores = [figures[best_by] for figures in result.history if best_by in figures]
    if not scores or math.isnan(result.best_score):
        yield "kept: the last weights"
    elif result.best_round == 0:
        yield f"kept: SFT's own weights, as no later {best_by} was better than theirs, {scores[0]:.4g}"
    else:
        yield f"kept: the weights after batch {result.best_round} ({best_by} {scores[0]:.4g} → {result.best_score:.4g})"
