"""A YAML file of settings, read such that a fault is named with its line."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from langchain_rcr.basics.section import show
from rcr_trainer.errors import ConfigError
from rcr_trainer.redaction import redact

_MOST_NODES = 100_000
"""Values in a settings file, at most; there are some 150 settings."""
_MOST_DIGITS = 3_500
"""Of a number, however it is written: Python writes out no more than 4,300 decimal digits."""


def read_settings_file(path: Path, sections: Collection[str]) -> Iterator[tuple[str, Any, str]]:
    """Dotted paths, each with its value and where it stands: "demo.yaml line 3".

    Args:
        path: the file.
        sections: the keys whose values are settings again.

    Raises:
        ConfigError: it can't be read, is no YAML, is too large or no mapping, or sets a key twice.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8-sig"))  # libyaml's overflows the stack on deep nesting
        if (root := _root_of(loader)) is not None:
            yield from _flatten(loader, root, path, sections)
        return
    except ConfigError:
        raise
    except FileNotFoundError:
        msg = f": no such file (`rcr-train init {path}` writes one with all settings)"
    except UnicodeDecodeError:
        msg = ": not a text file in UTF-8"
    except OSError as error:
        msg = f": can't be read: {error.strerror}"
    except RecursionError:
        msg = ": not a settings file: nested too deeply"
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # such as a date that isn't
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = f" line {mark.line + 1}" if mark is not None else ""
        msg = f"{where}: not YAML: {redact(' '.join(problem.split()))[:200]}"
    raise ConfigError(f"{path}{msg}") from None


def read_value(text: str, kind: type[Any]) -> Any:
    """What a piece of YAML stands for, read by a loader of this kind.

    Raises:
        yaml.YAMLError, ValueError, OverflowError, RecursionError: it is none, or too large.
    """
    loader = kind(text)
    root = _root_of(loader)
    return None if root is None else loader.construct_document(root)


def _root_of(loader: Any) -> Any:
    """The YAML's node; refused where aliases (`*name`) make it endless, or where it is larger than any settings."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if isinstance(node, tuple):
            return sum(map(size, node))
        if node.tag.endswith(":int") and len(node.value) > _MOST_DIGITS:
            problem = f"not a number of at most {_MOST_DIGITS:,} digits"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if id(node) not in sizes:
            sizes[id(node)] = _MOST_NODES  # what stands within itself
            sizes[id(node)] = 1 + (sum(map(size, node.value)) if isinstance(node.value, list) else 0)
        return sizes[id(node)]

    root = loader.get_single_node()
    if root is not None and size(root) > _MOST_NODES:
        raise yaml.YAMLError(f"more than {_MOST_NODES:,} values, aliases written out")
    return root


def _flatten(
    loader: Any, root: Any, path: Path, sections: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, Any, str]]:
    """The values of a YAML mapping node by dotted path; what is under a section's name is one level down."""
    where = f"{path} line {root.start_mark.line + 1}"
    if root.id != "mapping":
        raise ConfigError(f"{where}: the file must hold settings as `key: value`, not a {root.id}")
    seen = set()
    for key_node, node in root.value:
        key = prefix + str(loader.construct_object(key_node, deep=True))
        where = f"{path} line {key_node.start_mark.line + 1}"
        if key in seen:
            raise ConfigError(f"{where}: '{key}' is set twice")
        seen.add(key)
        if key in sections:
            if node.id == "mapping":
                yield from _flatten(loader, node, path, sections, f"{key}.")
            elif (value := loader.construct_object(node, deep=True)) is not None:
                raise ConfigError(f"{where}: '{key}' is a section with settings of its own, not {show(value)}")
        else:
            yield key, loader.construct_object(node, deep=True), where
