"""What tests of training share."""

import pytest
from small_grpo import SPLIT
from tiny_bert import knowing


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny BERT that knows COVR's words."""
    return knowing(SPLIT.train, tmp_path_factory.mktemp("bert") / "model")
