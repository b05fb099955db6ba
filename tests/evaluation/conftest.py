"""What tests of evaluations share."""

from pathlib import Path

import pytest
from demo_run import CONFIG


@pytest.fixture
def demo(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a tiny run in the current folder; its selectors are timed in one round, not three."""
    monkeypatch.setattr("rcr_trainer.evaluation.harness.LATENCY_ROUNDS", 1)
    (here / "demo.yaml").write_text(CONFIG, encoding="utf-8")
