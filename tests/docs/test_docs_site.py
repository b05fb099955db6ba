"""The site: built strictly, whole, and without a network; as Chromium shows it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import BINARY, chromium
from places import ROOT

pytestmark = pytest.mark.slow


def test_the_site_is_built_whole_loads_nothing_from_elsewhere_and_fits_a_phone(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")

    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    names = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "cli", "settings", "404"}
    assert {f"{name}.html" for name in names} == pages.keys()
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]+)"', text)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*href="([^"]+)"', text)
        assert loaded
        assert [address for address in loaded if "//" in address] == [], name
        # A list that goes on after a paragraph of its own: Python-Markdown wants that indented by four spaces.
        _, _, page = text.partition("<article")
        written = re.sub(r"<pre.*?</pre>", "", page.partition("</article>")[0], flags=re.DOTALL)
        assert re.findall(r"\n *(?:\d+\.|[-*|#]+) .*", written) == [], name
    for name, part in (
        ("settings", "<code>sft.epochs</code>"),
        ("cli", "rcr-train evaluate"),
        ("api", "langchain_rcr.SequentialCompositionalRetriever"),
        ("api", "langchain_rcr.text_to_sql_chain"),
    ):
        assert part in pages[f"{name}.html"]
    if BINARY is not None:
        in_a_browser(site, tmp_path / "profile")


def in_a_browser(site: Path, profile: Path) -> None:
    """No page is wider than its window, or asks for anything from elsewhere; the search finds something."""
    wide, foreign = [], []
    with chromium(profile) as page:
        for width in (390, 1280):
            for name in ("index", "tutorial", "results", "api", "settings"):
                page.open(site / f"{name}.html", width=width, dark=width == 390)
                if page.run("document.documentElement.scrollWidth") > width:
                    wide.append((name, width))
                foreign += [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))]
        found = page.run(SEARCH)
        complaints = [*page.complaints]
    assert (wide, foreign, complaints) == ([], [], [])
    assert found


SEARCH = """
(async () => {
  const box = document.querySelector('.md-search__input');
  box.focus();
  box.value = 'repairs';
  box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
  for (let n = 0; n < 200; n++) {
    await new Promise(resolve => setTimeout(resolve, 50));
    const hits = document.querySelectorAll('.md-search-result__item').length;
    if (hits) return hits;
  }
  return 0;
})()
"""
