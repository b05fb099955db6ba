"""Every block of docs/serving.md runs, from top to bottom."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from langchain_rcr import Item, SequentialCompositionalRetriever, TriEncoder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
EXAMPLES = [
    {"source": f"what is the number of {color} {animal}", "target": f"count ( filter ( {color} , find ( {animal} ) ) )"}
    for color in ("black", "round", "gray")
    for animal in ("cat", "dog", "mouse")
]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_url: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", postgres_url)
    items = [Item(example["source"], example["target"]) for example in EXAMPLES]
    encoder = TriEncoder.build("structure", items, state="saturating")
    SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES).save("runs/demo")
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, "docs/serving.md", "exec"), names)
        assert "print" not in block or out.getvalue().strip()
