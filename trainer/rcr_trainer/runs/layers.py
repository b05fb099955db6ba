"""Reads and writes the settings of a run (`rcr_trainer.settings`): YAML file < environment < flags.

pydantic-settings (2.16) can't do this: it doesn't name the line, variable or flag of a bad value, accepts keys set
twice and unknown variables, and has no flags for settings that only some families have.
"""

from __future__ import annotations

import difflib
import os
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from langchain_rcr.basics.section import OneOf, explained, show
from langchain_rcr.errors import RCRError
from langchain_rcr.families import DEFAULT_FAMILY, Family, families, get_family
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.redaction import HIDDEN, PLACES, redact, remember, without_secrets
from rcr_trainer.settings import Settings

PREFIX = "RCR_"
RESERVED = frozenset({"RCR_DATA"})
"""Not settings: where the project's tests find the corpora."""

SPENDING = ("llm.price_prompt", "llm.price_completion", "llm.budget_calls", "llm.budget_tokens", "llm.budget_money")
"""The settings that bound what a run may cost."""

_KINDS = {"list": "LIST", "dict": "MAPPING", "int": "INT", "float": "FLOAT", "bool": "BOOL", "Path": "PATH"}
_MAX_NODES = 100_000
"""Values in a settings file; there are some 150 settings."""
_MAX_DIGITS = 3_500
"""Digits of a number in any notation: Python prints at most 4,300 decimal ones."""

_Given = tuple[str, Any, str]
"""Dotted path, value, and where it was given: "demo.yaml line 3", "RCR_SFT__EPOCHS" or "--sft.epochs"."""
_Texts: TypeAlias = Mapping[str, str]


# ---------------------------------------------------------------- the settings there are


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting as help texts and fresh files show it."""

    path: str  # dotted: "sft.epochs"; without a dot at the top level
    section: str  # empty at the top level
    name: str  # without the section
    description: str  # with the meanings of choices and, where the default depends on the family, of null
    kind: str  # {one,other}, INT, FLOAT, BOOL, PATH, LIST, MAPPING or TEXT
    default: Any  # None where it depends on the family
    families: Mapping[str, Any]  # family → its default, where it depends on the family


@cache
def sections() -> dict[str, type[BaseModel]]:
    """The model of each section by name; "" is the top level."""
    kinds = {name: info.annotation for name, info in Settings.model_fields.items()}
    return {"": Settings} | {
        name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)
    }


@cache
def settings() -> dict[str, Setting]:
    """Every setting by its dotted path: the top level, then section by section, in the order of their fields."""
    found: dict[str, Setting] = {}
    for section, model in sections().items():
        models = {family: family.Settings if section == "model" else model for family in families()}
        for name in dict.fromkeys(name for each in (model, *models.values()) for name in each.model_fields):
            path = f"{section}.{name}" if section else name
            if path not in sections():
                found[path] = _setting(path, model.model_fields.get(name), models)
    return found


def _setting(path: str, common: FieldInfo | None, models: Mapping[Family, type[BaseModel]]) -> Setting:
    """One setting, by its section's model for each family; `common` is the field that all families share."""
    section, _, name = path.rpartition(".")
    infos = {family: model.model_fields[name] for family, model in models.items() if name in model.model_fields}
    info = common or next(iter(infos.values()))
    defaults = {f.name: f.training.get(section, {}).get(name, own.get_default()) for f, own in infos.items()}
    if common is not None and all(value == common.get_default() for value in defaults.values()):
        defaults = {}
    texts: dict[str, list[str]] = {}
    for family, own in infos.items():
        texts.setdefault(" ".join((own.description or "").split()), []).append(family.name)
    text = next(iter(texts)) if len(texts) == 1 else " ".join(f"{', '.join(of)}: {each}" for each, of in texts.items())
    literal = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    choices = next((mark.names() for mark in info.metadata if isinstance(mark, OneOf)), dict.fromkeys(literal, ""))
    match = re.search(r"\b(list|dict|int|float|bool|Path)\b", str(info.annotation))
    kind = f"{{{','.join(choices)}}}" if choices else _KINDS[match[1]] if match else "TEXT"
    if explained := "; ".join(f"{choice}: {meaning}" for choice, meaning in choices.items() if meaning):
        text += f" {explained}."
    if defaults:
        text += f" null: by family, {', '.join(f'{family} {plain(value)}' for family, value in defaults.items())}."
    default = None if defaults else info.get_default(call_default_factory=True)
    return Setting(path, section, name, text, kind, default, defaults)


def section_title(section: str) -> str:
    """The one line that describes a section ("" is the top level)."""
    return (sections()[section].__doc__ or "").partition("\n")[0]


def plain(value: object) -> str:
    """A default as help texts show it."""
    if isinstance(value, list):
        return ",".join(map(plain, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def unknown_key(path: str, known: Mapping[str, Setting]) -> str:
    """The message about a path that isn't a setting: it says that it is a section, or names the nearest setting."""
    if path in sections():
        first = next((each.path for each in known.values() if each.section == path), "")
        return f"'{path}' is a section, not a setting: set one of its own, such as {first}"
    near = difflib.get_close_matches(path, known, 1, 0.9)
    near += [setting.path for setting in known.values() if setting.name == path.rpartition(".")[2]]
    near += difflib.get_close_matches(path, [*known, *sections()], 1)
    return f"unknown setting '{path}'" + (f": did you mean '{near[0]}'?" if near else "")


# ---------------------------------------------------------------- writing


def fresh_yaml(name: str = "rcr", values: Mapping[str, Any] | None = None) -> str:
    """A YAML file of all settings, each under a comment; `values` (by dotted path) replace defaults."""
    values = {"name": name, **(values or {})}
    lines: list[str] = []
    section = ""
    for setting in settings().values():
        if setting.section != section:
            section = setting.section
            lines += ["", f"# {section_title(section)}", f"{section}:"]
        pad = "  " if section else ""
        about = textwrap.wrap(setting.description, 98 - len(pad), break_on_hyphens=False)
        lines += [f"{pad}# {line}" for line in about]
        value = values.get(setting.path, setting.default)
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
        text = text.removesuffix("...\n").strip()
        lines.append(f"{pad}{setting.name}: {text}")
    return "\n".join(lines) + "\n"


def to_yaml(config: Settings) -> str:
    """The settings as YAML that `load_config` reads back, without secrets."""
    return str(yaml.safe_dump(_nested(_shown(config)), sort_keys=False, allow_unicode=True))


def differences(one: Settings, other: Settings, *, ignore: Collection[str] = ()) -> list[str]:
    """The settings in which two runs differ, each as "sft.epochs (3, now 5)"; an unset k counts as the model's."""
    before, now = _shown(one), _shown(other)
    for values, path in product((before, now), ("sft.k", "grpo.k", "evaluation.k")):
        values[path] = values[path] or values["model.k"]
    changed = [path for path in {**before, **now} if path not in ignore and before.get(path) != now.get(path)]
    return [f"{path} ({show(before.get(path))}, now {show(now.get(path))})" for path in changed]


def _shown(config: Settings) -> dict[str, Any]:
    """Dotted path → JSON value, without secrets."""
    return {path: without_secrets(value) for path, value in _flat(config.model_dump(mode="json")).items()}


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return nested


def merged(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section; later ones win."""
    return _nested({path: value for each in settings for path, value in _flat(each).items()})


# ---------------------------------------------------------------- reading


def load_config(path: str | Path | None = None, flags: _Texts | None = None, environ: _Texts | None = None) -> Settings:
    """Read and check the settings of a run. Its name is that of the YAML file unless a layer gives one.

    Args:
        path: the YAML file; None for the defaults.
        flags: dotted path → text.
        environ: RCR_NAME and RCR_SECTION__NAME; None for this process's environment.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or range, settings contradict each other, or the
            file can't be read; one line says where.
    """
    file = None if path is None else Path(path)
    given = _layers(file, flags, environ)
    values = {dotted: value for dotted, value, _ in given}
    remember([values.get(place) for place in PLACES])
    if file is not None:
        values.setdefault("name", run_name(file))
    return checked(_nested(values), {dotted: where for dotted, _, where in given})


def given_settings(path: Path | None, flags: _Texts) -> dict[str, Any]:
    """What the layers of `load_config` set, by section; only the keys are checked."""
    return _nested({dotted: value for dotted, value, _ in _layers(path, flags, None)})


def run_name(path: Path) -> str:
    """A run's name from its settings file: the stem, made fit to name a folder."""
    return re.sub(r"[^\w.\-]", "-", path.stem).lstrip(".-")[:200] or "rcr"


def checked(nested: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Settings:
    """Validate settings given by section; a `ConfigError` names a value's place by `origins` (dotted path → place)."""
    places = origins or {}

    def name(location: Sequence[int | str]) -> str:
        dotted = ".".join(map(str, location[:2]))
        return "" if dotted not in settings() else f"{places[dotted]}: {dotted}" if dotted in places else dotted

    try:
        return Settings.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(redact(explained(error, name))) from None


def run_config(path: Path, flags: _Texts | None = None) -> Settings:
    """The settings of a run folder's config.yaml, overridden by flags.

    Of the environment only secrets and `SPENDING` count, so that variables for the next training don't alter this run.
    """
    config = load_config(path, flags, environ={})
    names = {_variable(place) for place in (*hidden(config), *SPENDING)}
    given = {name: text for name, text in os.environ.items() if name in names}
    return load_config(path, flags, given) if given else config


def hidden(config: Settings) -> list[str]:
    """The settings whose secrets were left out when they were written."""
    return [place for place in PLACES if HIDDEN in str(attrgetter(place)(config))]


def check_hidden(config: Settings, section: str) -> None:
    """Refuse to use settings of a section that lack their secret."""
    for place in hidden(config):
        if place.startswith(f"{section}."):
            raise ConfigError(
                f"{place} had a secret, which run folders don't keep: give it again, as {_variable(place)} or --{place}"
            )


def _layers(path: Path | None, flags: _Texts | None, environ: _Texts | None) -> list[_Given]:
    """All values given, the strongest last."""
    known = settings()
    given = [] if path is None else list(_from_file(path))
    variables = {_variable(each): each for each in known}
    for name, text in (os.environ if environ is None else environ).items():
        if not name.startswith(PREFIX) or name in RESERVED:
            continue
        if name not in variables:
            near = difflib.get_close_matches(name, variables, 1)
            hint = f"did you mean {near[0]}?" if near else f"settings are {PREFIX}NAME and {PREFIX}SECTION__NAME"
            raise ConfigError(f"unknown setting in the environment variable {name}: {hint}")
        given.append((variables[name], _value_of(known[variables[name]], text), name))
    for dotted, text in (flags or {}).items():
        if dotted not in known:
            raise ConfigError(unknown_key(dotted, known))
        given.append((dotted, _value_of(known[dotted], text), f"--{dotted}"))
    return given


def _variable(path: str) -> str:
    return PREFIX + path.upper().replace(".", "__")


def _value_of(setting: Setting, text: str) -> Any:
    r"""The value of a flag or variable: null is None, lists are split at commas, mappings are YAML, the rest is text.

    A list in brackets is read as YAML, so that "\n" in double quotes is a line break; its items stay text.
    """
    stripped, is_list = text.strip(), setting.kind == "LIST"
    if stripped.lower() == "null":
        return None
    if setting.kind == "MAPPING" or (is_list and stripped.startswith("[")):
        with suppress(yaml.YAMLError, ValueError, OverflowError, RecursionError):
            loader = yaml.BaseLoader(text) if is_list else yaml.SafeLoader(text)  # BaseLoader makes no numbers
            root = _root_node(loader)
            return None if root is None else loader.construct_document(root)
    parts = stripped.removeprefix("[").removesuffix("]").split(",")
    return [part.strip().strip("'\"") for part in parts if part.strip()] if is_list else text


def check_name(path: Path) -> None:
    """Raise a `ConfigError` for a file of settings that is named like one of examples."""
    if path.suffix.lower() in (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"):
        raise ConfigError(f"{path} holds examples, not settings: `rcr-train init --train {path}` writes these")


def _from_file(path: Path) -> Iterator[_Given]:
    check_name(path)
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8-sig"))  # libyaml's overflows the stack on deep nesting
        if (root := _root_node(loader)) is not None:
            yield from _flatten(loader, root, path, set())
        return
    except RCRError:
        raise
    except FileNotFoundError:
        fault = f": no such file (`rcr-train init {path}` writes one with all settings)"
    except UnicodeDecodeError:
        fault = ": not a text file in UTF-8"
    except OSError as error:
        fault = f": can't be read: {error.strerror}"
    except RecursionError:
        fault = ": not a settings file: nested too deeply"
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # such as an impossible date
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = f" line {mark.line + 1}" if mark is not None else ""
        fault = f"{where}: not YAML: {redact(' '.join(problem.split()))[:200]}"
    raise ConfigError(f"{path}{fault}") from None


def _root_node(loader: Any) -> Any:
    """The YAML's root node; aliases (`*name`) must not make it endless or huge."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if isinstance(node, tuple):
            return sum(map(size, node))
        if node.tag.endswith(":int") and len(node.value) > _MAX_DIGITS:
            problem = f"not a number of at most {_MAX_DIGITS:,} digits"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if id(node) not in sizes:
            sizes[id(node)] = _MAX_NODES  # in case it contains itself
            sizes[id(node)] = 1 + (sum(map(size, node.value)) if isinstance(node.value, list) else 0)
        return sizes[id(node)]

    root = loader.get_single_node()
    if root is not None and size(root) > _MAX_NODES:
        raise yaml.YAMLError(f"more than {_MAX_NODES:,} values, aliases written out")
    return root


def _flatten(loader: Any, root: Any, path: Path, seen: set[str], prefix: str = "") -> Iterator[_Given]:
    """The values of a mapping node; a section's are one level down. `seen` has the keys of the nodes before."""
    where = f"{path} line {root.start_mark.line + 1}"
    if root.id != "mapping":
        raise ConfigError(f"{where}: the file must hold settings as `key: value`, not a {root.id}")
    for key_node, node in root.value:
        key = prefix + str(loader.construct_object(key_node, deep=True))
        where = f"{path} line {key_node.start_mark.line + 1}"
        if key in seen:
            raise ConfigError(f"{where}: '{key}' is set twice")
        seen.add(key)
        if key in sections() and node.id == "mapping":
            yield from _flatten(loader, node, path, seen, f"{key}.")
            continue
        value = loader.construct_object(node, deep=True)
        if key in sections():
            if value is not None:
                raise ConfigError(f"{where}: '{key}' is a section with settings of its own, not {show(value)}")
        elif key not in settings():
            if prefix == "model.":  # of a family that is not installed?
                family = {name.value: each for name, each in root.value}.get("family")
                get_family(str((family and loader.construct_object(family)) or DEFAULT_FAMILY))
            raise ConfigError(f"{where}: {unknown_key(key, settings())}")
        else:
            yield key, value, where
