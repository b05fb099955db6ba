"""Where things are."""

import os
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DATA = Path(os.environ.get("RCR_DATA", ROOT.parent / "shared" / "data"))
"""Published data sets, which are not in the repository; tests of them are skipped where they aren't there."""
MODEL = ROOT / "examples" / "models" / "covr-parser"
"""A small language model."""
