"""The lines that close GRPO's log."""

from rcr_trainer.grpo import closing_lines
from rcr_trainer.training.runner import Result

BEFORE = {"epoch": 0.0, "dev_reward": 0.5}
EARLY = {"epoch": 1.0, "reward": 0.4, "kl": 0.0, "no_signal": 0.75, "clipped": 0.0, "dev_reward": 0.55}
LATE = {
    **{"epoch": 2.0, "reward": 0.6, "kl": 0.02, "no_signal": 0.25, "no_program": 0.2, "unscored": 0.0},
    **{"perplexity_1": 4.0, "perplexity_2": 3.25, "dev_reward": 0.6},
}


def test_each_figure_is_explained():
    result = Result("grpo", best_round=6, best_score=0.6, history=[BEFORE, EARLY, LATE])
    assert list(closing_lines(result, "dev_reward")) == [
        "reward of the drawn picks 0.400 → 0.600, first to last evaluation",
        "KL 0.02: how far the policy has moved from SFT's, in nats a sequence of picks",
        "no signal 25%: questions whose sequences all earned the same, which teaches nothing",
        "no program 20%: answers of the language model that hold none; look at the prompt, llm.stop and llm.max_tokens",
        "perplexity 4.0, 3.2: candidates that each step draws among in effect",
        "kept: the weights after batch 6 (dev_reward 0.5 → 0.6)",
    ]


def test_a_run_that_does_not_learn_is_told_what_to_try():
    result = Result("grpo", best_round=0, best_score=0.5, history=[BEFORE, EARLY])
    lines = list(closing_lines(result, "dev_reward"))
    assert "next to nothing: try a larger grpo.lr or more epochs" in lines[1]
    assert "try a larger grpo.group_size" in lines[2]
    assert lines[-1] == "kept: SFT's own weights, as no later dev_reward was better than theirs, 0.5"


def test_without_steps_or_development_queries():
    assert list(closing_lines(Result("grpo", history=[BEFORE]), "dev_reward")) == []
    assert list(closing_lines(Result("grpo", history=[{"reward": 0.4, "kl": 0.1}]), ""))[-1] == "kept: the last weights"
