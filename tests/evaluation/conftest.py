"""What tests of evaluations share."""

from pathlib import Path

import pytest
from demo_run import CONFIG


@pytest.fixture
def demo(here: Path) -> None:
    """The settings of a tiny run in the current folder."""
    (here / "demo.yaml").write_text(CONFIG, encoding="utf-8")
