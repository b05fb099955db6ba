"""What the site makes of the repository: its home page of the README, its reference of the code."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r'(\]\(|src(?:set)?=")(?!\w+:|#)([^)"#\s]+)')


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of other files and of the code."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {"index.md": _relinked(readme, ROOT), "cli.md": cli_page(), "settings.md": settings_page()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead out of docs/ lead to the repository."""
    return markdown if page.file.generated_by else _relinked(markdown, ROOT / "docs")


def _relinked(markdown: str, folder: Path) -> str:
    def target(match: re.Match[str]) -> str:
        path = Path(os.path.relpath(folder / match[2], ROOT))
        if path.parts[0] == "docs":
            return match[1] + path.relative_to("docs").as_posix()
        return f"{match[1]}https://github.com/langchain-rcr/langchain-rcr/blob/main/{path.as_posix()}"

    return _LINK.sub(target, markdown)


def cli_page() -> str:
    """The reference of the command line, from its own help."""
    from rcr_trainer.cli import build_parser

    os.environ["COLUMNS"] = "100"  # argparse wraps at it
    text = [
        "# Command line",
        "",
        "`run`, `sft`, `evaluate` and `paper` also take a flag for each [setting](settings.md), `--sft.epochs 10`.",
        "Exit codes: 0 done, 2 for what you can fix (one line says what), 130 for Ctrl-C, 141 if nobody reads the",
        "output any more, 1 (a traceback) for a bug.",
    ]
    for parser in _commands(build_parser([])):
        text += ["", f"## {parser.prog}", "", "```text", parser.format_help().strip(), "```"]
    return "\n".join(text)


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    below = [each for action in parser._actions if isinstance(action, argparse._SubParsersAction) for each in
             action.choices.values()]  # fmt: skip
    if not below:
        yield parser
    for each in below:
        yield from _commands(each)


def settings_page() -> str:
    """The reference of the settings, from their model."""
    from rcr_trainer.runs.layers import plain, section_title, settings

    text = [
        "# Settings",
        "",
        "A setting is given in the YAML file, in an environment variable (`sft.epochs` is `RCR_SFT__EPOCHS`) or as a",
        "flag (`--sft.epochs 10`); what comes later in this list wins. `rcr-train init config.yaml` writes them all.",
    ]
    section = None
    for setting in settings().values():
        if setting.section != section:
            section = setting.section
            text += ["", f"## {section or 'The run'}", "", section_title(section), ""]
            text += ["| setting | default | what it sets |", "|---|---|---|"]
        default = "by family" if setting.families else f"`{plain(setting.default)}`"
        about = setting.description.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
        text.append(f"| `{setting.path}` | {default} | {about} |")
    return "\n".join(text)
