"""Reading and writing the settings of a run (`rcr_trainer.schema`): YAML file < environment < flags.

The three layers are flat dictionaries keyed by dotted paths ("sft.epochs"), each value with its origin, so that an
error can say which file and line, variable or flag to mend. Values from the environment and from flags share one
syntax (see `parse_text`), which is why neither is left to a settings library's own reader.
"""

from __future__ import annotations

import difflib
import os
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from langchain_rcr.errors import MissingExtraError
from langchain_rcr.families import ModelSettings, families
from langchain_rcr.section import OneOf, show
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.settings import LLMSettings
from rcr_trainer.schema import (
    Config,
    DataConfig,
    EvaluationConfig,
    GRPOConfig,
    ProgramConfig,
    RewardConfig,
    SFTConfig,
)

__all__ = [
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "GRPOConfig",
    "LLMSettings",
    "ProgramConfig",
    "RewardConfig",
    "SFTConfig",
    "Setting",
    "differences",
    "load_config",
    "settings",
    "to_yaml",
]

PREFIX = "RCR_"
RESERVED = frozenset({"RCR_DATA"})
"""Variables with our prefix that are no settings: RCR_DATA tells the project's tests where the corpora lie."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Args:
        path: dotted, "sft.epochs"; without a dot at the top level.
        info: pydantic's record of the field: annotation, default, description. Of a family's own setting, that of the
            first family that has it.
    """

    path: str
    info: FieldInfo

    @property
    def section(self) -> str:
        """The section's name, empty at the top level."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The name within its section."""
        return self.path.rpartition(".")[2]

    @property
    def families(self) -> dict[str, Any]:
        """The default of each family that has the setting, where it depends on the family; else empty."""
        if self.path == "model.family":
            return {}
        every, found = families(), {}
        for family in every:
            fields = family.Settings.model_fields if self.section == "model" else {}
            table = {name: info.get_default() for name, info in fields.items()} or family.training.get(self.section, {})
            if self.name in table:
                found[family.name] = table[self.name]
        same = len(found) == len(every) and len(set(map(repr, found.values()))) == 1
        return {} if same and self.section == "model" else found

    @property
    def default(self) -> Any:
        """The value that stands in a fresh YAML file; None where it depends on the family."""
        return None if self.families else self.info.get_default(call_default_factory=True)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, where they are few; else empty."""
        if self._one_of is not None:
            return tuple(self._one_of.names())
        return get_args(self.info.annotation) if get_origin(self.info.annotation) is Literal else ()

    @property
    def _one_of(self) -> OneOf | None:
        return next((mark for mark in self.info.metadata if isinstance(mark, OneOf)), None)

    @property
    def kind(self) -> str:
        """A short name of the type, for help texts: INT, FLOAT, BOOL, PATH, LIST, TEXT."""
        names = {int: "INT", float: "FLOAT", bool: "BOOL", Path: "PATH"}
        if any(get_origin(part) is list for part in _parts(self.info.annotation)):
            return "LIST"
        return next((names[part] for part in _parts(self.info.annotation) if part in names), "TEXT")

    @property
    def comment(self) -> str:
        """The description and, where the default depends on the family, what null stands for."""
        text = self.info.description or ""
        if self.section == "model":
            own = [family.Settings.model_fields.get(self.name) for family in families()]
            text = " ".join(dict.fromkeys([text, *(info.description or "" for info in own if info)]))
        if self._one_of is not None:
            text += f" {'; '.join(f'{name}: {line}' for name, line in self._one_of.names().items())}."
        if not self.families:
            return text
        each = ", ".join(f"{family} {_plain(value)}" for family, value in self.families.items())
        return f"{text} null: by family, {each}."

    @property
    def help(self) -> str:
        """The comment and the default."""
        return self.comment if self.families else f"{self.comment} (default: {_plain(self.default)})"


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (types.UnionType, Union) else (annotation,)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(map(_plain, value))
    return "null" if value is None else str(value)


def settings() -> Iterator[Setting]:
    """Every setting, top level first, then section by section, in the order in which they are written above."""
    sections: list[tuple[str, type[BaseModel]]] = []
    for name, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            sections.append((name, info.annotation))
        else:
            yield Setting(name, info)
    for section, model in sections:
        fields = dict(model.model_fields)
        if model is ModelSettings:
            for family in families():
                fields |= {name: info for name, info in family.Settings.model_fields.items() if name not in fields}
        for name, info in fields.items():
            yield Setting(f"{section}.{name}", info)


def section_title(section: str) -> str:
    """The one line that describes a section ("" is the top level)."""
    model = Config.model_fields[section].annotation if section else Config
    return (model.__doc__ or "").partition("\n")[0]


def to_yaml(config: Config | None = None, name: str = "rcr") -> str:
    """YAML of all settings: those of `config`, or a fresh commented file with the defaults.

    Args:
        config: a resolved configuration, written without comments; None for the commented defaults.
        name: the run's name in a fresh file.

    Returns:
        The text; `load_config` reads it back to the same Config.
    """
    lines: list[str] = []
    section = ""
    for setting in settings():
        if config is not None and not _has(config, setting.path):
            continue
        if setting.section != section:
            section = setting.section
            lines += ["", f"# {section_title(section)}"] if config is None else []
            lines.append(f"{section}:")
        pad = "  " if section else ""
        if config is None:
            mark = f"{pad}# "
            lines += textwrap.wrap(
                setting.comment, 100, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False
            )
        value = setting.default if config is None else _get(config, setting.path)
        if config is None and setting.path == "name":
            value = name
        lines.append(f"{pad}{setting.name}: {_yaml_value(value)}")
    return "\n".join(lines) + "\n"


def _has(config: Config, path: str) -> bool:
    """Whether the run's family has the setting."""
    section, _, name = path.rpartition(".")
    return section != "model" or name in type(config.model).model_fields


def _get(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _yaml_value(value: Any) -> str:
    plain = str(value) if isinstance(value, Path) else value
    text: str = _yaml().safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()


def differences(one: Config, other: Config, *, ignore: Sequence[str] = ()) -> list[str]:
    """The settings in which two configurations differ, each as "sft.epochs (3, now 5)"."""
    pairs = [(s.path, _get(one, s.path), _get(other, s.path)) for s in settings() if s.path not in ignore]
    return [f"{path} ({show(a)}, now {show(b)})" for path, a, b in pairs if a != b]


# ---------------------------------------------------------------- the three layers


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where it was given: "demo.yaml line 3", "RCR_SFT__EPOCHS", "--sft.epochs"."""

    value: Any
    origin: str


def load_config(
    path: str | os.PathLike[str] | None = None,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read the settings: YAML file < environment < flags.

    Args:
        path: the YAML file, or None for the defaults.
        flags: dotted path → text, as typed after `--path`.
        environ: the environment; None for this process's. Variables are RCR_NAME and RCR_SECTION__NAME.

    Returns:
        The checked configuration. Its name is the YAML file's stem unless a layer names it.

    Raises:
        ConfigError: a key is unknown (with the nearest known one), a value has the wrong type or range, settings
            contradict each other, or the file can't be read. One line each.
    """
    known = {setting.path: setting for setting in settings()}
    layers = {**_from_file(Path(path), known)} if path is not None else {}
    layers |= _from_environment(os.environ if environ is None else environ, known)
    layers |= _from_flags(flags or {}, known)
    if path is not None and "name" not in layers:
        stem = re.sub(r"[^\w.\-]", "-", Path(path).stem).lstrip(".-")
        layers["name"] = _Given(stem or "rcr", str(path))
    nested: dict[str, Any] = {}
    for dotted, given in layers.items():
        section, _, name = dotted.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = given.value
    try:
        return Config.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(_explain(error, known, layers)) from None


def parse_text(setting: Setting, text: str) -> Any:
    r"""The value of a flag or variable: null is None, a list is split at commas, the rest is left to the field.

    A list in brackets is read as YAML, so that "\n" in double quotes is a line break; its items stay texts.
    """
    if text.strip().lower() == "null":
        return None
    if setting.kind == "LIST":
        if text.lstrip().startswith("["):
            yaml = _yaml()
            with suppress(yaml.YAMLError):
                return yaml.load(text, Loader=yaml.BaseLoader)
        inner = text.strip().removeprefix("[").removesuffix("]")
        return [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]
    return text


def unknown_key(path: str, known: Mapping[str, Setting]) -> str:
    """What to say of an unknown dotted path: that it is unknown, and which known one is nearest."""
    section, _, name = path.rpartition(".")
    siblings = [setting.name for setting in known.values() if setting.section == section]
    sections = {setting.section for setting in known.values()} - {""}
    near = [f"{section}.{word}" if section else word for word in difflib.get_close_matches(name, siblings, 1)]
    near += [setting.path for setting in known.values() if setting.name == name]
    near += difflib.get_close_matches(path, [*known, *sections], 1)
    return f"unknown setting '{path}'" + (f": did you mean '{near[0]}'?" if near else "")


def _from_flags(flags: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, _Given]:
    for path in flags:
        if path not in known:
            raise ConfigError(unknown_key(path, known))
    return {path: _Given(parse_text(known[path], text), f"--{path}") for path, text in flags.items()}


def _from_environment(environ: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, _Given]:
    variables = {PREFIX + path.upper().replace(".", "__"): setting for path, setting in known.items()}
    found: dict[str, _Given] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name in RESERVED:
            continue
        if name not in variables:
            near = difflib.get_close_matches(name, variables, 1)
            hint = f"did you mean {near[0]}?" if near else f"settings are {PREFIX}NAME and {PREFIX}SECTION__NAME"
            msg = f"unknown setting in the environment variable {name}: {hint}"
            raise ConfigError(msg)
        found[variables[name].path] = _Given(parse_text(variables[name], text), name)
    return found


def _from_file(path: Path, known: Mapping[str, Setting]) -> dict[str, _Given]:
    sections = {setting.section for setting in known.values()} - {""}
    yaml = _yaml()
    try:
        loader = yaml.SafeLoader(_read(path))
        root = loader.get_single_node()
        found = _flatten(loader, root, path, sections) if root is not None else {}
    except RecursionError:
        msg = f"{path}: not a settings file: nested too deeply"
        raise ConfigError(msg) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        msg = f"{path}{where}: not YAML: {getattr(error, 'problem', None) or ' '.join(str(error).split())}"
        raise ConfigError(msg) from None
    for dotted, given in found.items():
        if dotted not in known:
            msg = f"{given.origin}: {unknown_key(dotted, known)}"
            raise ConfigError(msg)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        msg = f"{path}: no such file (`rcr-train init {path}` writes one with all settings)"
    except UnicodeDecodeError:
        msg = f"{path}: not a text file in UTF-8"
    except OSError as error:
        msg = f"{path}: can't be read: {error.strerror}"
    raise ConfigError(msg)


def _flatten(loader: Any, root: Any, path: Path, sections: set[str], prefix: str = "") -> dict[str, _Given]:
    """The values of a YAML mapping node by dotted path; a mapping under a section's name is gone into."""
    where = f"{path} line {root.start_mark.line + 1}"
    if root.id != "mapping":
        msg = f"{where}: the file must hold settings as `key: value`, not a {root.id}"
        raise ConfigError(msg)
    found: dict[str, _Given] = {}
    seen: set[str] = set()
    for key_node, node in root.value:
        key = str(loader.construct_object(key_node, deep=True))
        where = f"{path} line {key_node.start_mark.line + 1}"
        if key in seen:
            msg = f"{where}: '{prefix}{key}' is set twice"
            raise ConfigError(msg)
        seen.add(key)
        if not prefix and key in sections:
            if node.id == "mapping":
                found |= _flatten(loader, node, path, sections, f"{key}.")
            elif (value := loader.construct_object(node, deep=True)) is not None:
                msg = f"{where}: '{key}' is a section with settings of its own, not {show(value)}"
                raise ConfigError(msg)
        else:
            found[prefix + key] = _Given(loader.construct_object(node, deep=True), where)
    return found


def _explain(error: ValidationError, known: Mapping[str, Setting], layers: Mapping[str, _Given]) -> str:
    """One line for what pydantic found: field, value, what is expected, and where the value was given."""
    messages: list[str] = []
    for item in error.errors(include_url=False):
        text = item["msg"].removeprefix("Value error, ")
        dotted = ".".join(str(part) for part in item["loc"][:2])
        if dotted not in known:
            messages.append(text)
            continue
        # pydantic appends how it failed ("…, unable to parse string as an integer"): the value says that better.
        expected = re.sub(r", (unable|got) .*", "", text.removeprefix("Input should be "))
        words = [part.strip("' ") for part in re.split(",| or ", expected)] if item["type"] == "literal_error" else []
        near = difflib.get_close_matches(str(item["input"]), words, 1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        origin = f"{layers[dotted].origin}: " if dotted in layers else ""
        messages.append(f"{origin}{dotted} must be {expected}, not {show(item['input'])}{hint}")
    return "; ".join(dict.fromkeys(messages))


def _yaml() -> types.ModuleType:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("PyYAML", "train") from None
    return yaml
