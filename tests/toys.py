"""Small policies for tests that need one but don't care which."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_rcr import Item, TriEncoder
from langchain_rcr.policy.manifest import MANIFEST, seal


def lexical(
    rows: Sequence[Mapping[str, Any]], dim: int, *, keys: tuple[str, str] = ("source", "target"), **settings: Any
) -> TriEncoder:
    """An untrained policy of the lexical family over rows of examples, which shows picks in the order of picking."""
    source, target = keys
    settings = {"order": "picked"} | settings
    return TriEncoder.build("lexical", [Item(row[source], row[target]) for row in rows], dim=dim, **settings)


def reseal(checkpoint: Path) -> None:
    """Write the manifest anew, as somebody would who changed files on purpose."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    seal(checkpoint)


def installed(folder: Path, name: str, *files: str) -> None:
    """Have a package in a folder of `sys.path` installed, as pip does: with a list of its files, or with this one."""
    listed = files or [str(file.relative_to(folder)) for file in (folder / name).rglob("*")]
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "RECORD").write_text("".join(f"{file},,\n" for file in listed))


def tuned(selector, **values):
    """A plain selector with other values than its own."""
    for name, value in values.items():
        setattr(selector, name, value)
    return selector
