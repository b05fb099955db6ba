"""Reading and writing the settings of a run (`rcr_trainer.settings`): YAML file < environment < flags.

The layers are our own. pydantic-settings (2.16) names no line, variable or flag that a bad value comes from, passes
over missing files, keys that are set twice and unknown variables, suggests nothing for a typo, takes lists in
variables as JSON alone, and has no flags for settings that only some families have.
"""

from __future__ import annotations

import difflib
import os
import re
import textwrap
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from langchain_rcr.basics.section import OneOf, show
from langchain_rcr.families import Family, families
from rcr_trainer.errors import ConfigError
from rcr_trainer.redaction import HIDDEN, PLACES, redact, remember, without_secrets
from rcr_trainer.settings import Settings
from rcr_trainer.settings_file import read_settings_file, read_value

PREFIX = "RCR_"
RESERVED = frozenset({"RCR_DATA"})
"""Variables with our prefix that are no settings: RCR_DATA tells the project's tests where the corpora lie."""

_KINDS = {"list": "LIST", "dict": "MAPPING", "int": "INT", "float": "FLOAT", "bool": "BOOL", "Path": "PATH"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Args:
        path: dotted, "sft.epochs"; without a dot at the top level.
        info: pydantic's record of the field: annotation and default.
        description: what it sets; of the section model, with what single families add to it.
        families: the default of each family that has the setting, where it depends on the family; else empty.
    """

    path: str
    info: FieldInfo
    description: str
    families: Mapping[str, Any]

    @property
    def section(self) -> str:
        """The section's name, empty at the top level."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The name within its section."""
        return self.path.rpartition(".")[2]

    @property
    def default(self) -> Any:
        """The value in a fresh YAML file; None where it depends on the family."""
        return None if self.families else self.info.get_default(call_default_factory=True)

    @property
    def choices(self) -> Mapping[str, str]:
        """The allowed words, where they are few, each with what it stands for, if that is known."""
        for mark in self.info.metadata:
            if isinstance(mark, OneOf):
                return mark.names()
        literal = get_origin(self.info.annotation) is Literal
        return dict.fromkeys(get_args(self.info.annotation), "") if literal else {}

    @property
    def kind(self) -> str:
        """The type as help texts name it: {one,other}, INT, FLOAT, BOOL, PATH, LIST, MAPPING or TEXT."""
        if choices := self.choices:
            return f"{{{','.join(choices)}}}"
        found = re.search(r"\b(list|dict|int|float|bool|Path)\b", str(self.info.annotation))
        return _KINDS[found[1]] if found else "TEXT"

    @property
    def comment(self) -> str:
        """The description, what each choice means and, where the default depends on the family, what null means."""
        text = self.description
        explained = "; ".join(f"{name}: {meaning}" for name, meaning in self.choices.items() if meaning)
        text += f" {explained}." if explained else ""
        each = ", ".join(f"{family} {plain(value)}" for family, value in self.families.items())
        return f"{text} null: by family, {each}." if each else text


@cache
def sections() -> dict[str, type[BaseModel]]:
    """The model of each section, by name; "" is the top level."""
    kinds = {name: info.annotation for name, info in Settings.model_fields.items()}
    inner = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}
    return {"": Settings, **inner}


@cache
def settings() -> dict[str, Setting]:
    """Every setting by its dotted path, top level first, then section by section, in the order of their fields."""
    found: dict[str, Setting] = {}
    for section, model in sections().items():
        models = {family: family.Settings if section == "model" else model for family in families()}
        for name in dict.fromkeys(name for each in (model, *models.values()) for name in each.model_fields):
            path = f"{section}.{name}" if section else name
            if path not in sections():
                found[path] = _setting(path, model.model_fields.get(name), models)
    return found


def _setting(path: str, common: FieldInfo | None, models: Mapping[Family, type[BaseModel]]) -> Setting:
    """A setting of the section that each family has a model of; `common` is the field that all families share."""
    section, _, name = path.rpartition(".")
    infos = {family: model.model_fields[name] for family, model in models.items() if name in model.model_fields}
    defaults = {f.name: f.training.get(section, {}).get(name, info.get_default()) for f, info in infos.items()}
    if common is not None and all(value == common.get_default() for value in defaults.values()):
        defaults = {}
    texts: dict[str, list[str]] = {}
    for family, info in infos.items():
        texts.setdefault(" ".join((info.description or "").split()), []).append(family.name)
    text = next(iter(texts)) if len(texts) == 1 else " ".join(f"{', '.join(of)}: {each}" for each, of in texts.items())
    return Setting(path, common or next(iter(infos.values())), text, defaults)


def section_title(section: str) -> str:
    """The one line that describes a section ("" is the top level)."""
    return (sections()[section].__doc__ or "").partition("\n")[0]


def plain(value: object) -> str:
    """A default as help texts show it."""
    if isinstance(value, list):
        return ",".join(map(plain, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ---------------------------------------------------------------- writing


def fresh_yaml(name: str = "rcr", values: Mapping[str, Any] | None = None) -> str:
    """A YAML file of all settings, each under a comment that explains it.

    Args:
        name: the run's name.
        values: dotted path → value, where that is not the default.
    """
    values = {"name": name, **(values or {})}
    lines: list[str] = []
    section = ""
    for setting in settings().values():
        if setting.section != section:
            section = setting.section
            lines += ["", f"# {section_title(section)}", f"{section}:"]
        pad = "  " if section else ""
        mark = f"{pad}# "
        lines += textwrap.wrap(
            setting.comment, 100, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False
        )
        value = values.get(setting.path, setting.default)
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
        lines.append(f"{pad}{setting.name}: {text}")
    return "\n".join(lines) + "\n"


def to_yaml(config: Settings) -> str:
    """The settings of a run as YAML that `load_config` reads back to the same but for secrets, which are left out."""
    text: str = yaml.safe_dump(_nested(_shown(config)), sort_keys=False, allow_unicode=True)
    return text


def differences(one: Settings, other: Settings, *, ignore: Collection[str] = ()) -> list[str]:
    """The settings in which two configurations differ, each as "sft.epochs (3, now 5)"."""
    before, now = _shown(one), _shown(other)
    changed = [path for path in {**before, **now} if path not in ignore and before.get(path) != now.get(path)]
    return [f"{path} ({show(before.get(path))}, now {show(now.get(path))})" for path in changed]


def _shown(config: Settings) -> dict[str, Any]:
    """Dotted path → value as JSON has it, without secrets."""
    return {path: without_secrets(value) for path, value in _flat(config.model_dump(mode="json")).items()}


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section, from those by dotted path."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return nested


def merged(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section; what comes later wins."""
    return _nested({path: value for each in settings for path, value in _flat(each).items()})


# ---------------------------------------------------------------- the three layers


def load_config(
    path: str | os.PathLike[str] | None = None,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
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
    values, origins = _layers(path, flags, environ)
    for place in PLACES:
        remember(values.get(place))
    if path is not None:
        values.setdefault("name", run_name(path))
    return checked(_nested(values), origins)


def run_name(path: str | os.PathLike[str]) -> str:
    """The name of the run of a settings file that gives none: its stem, as far as that may name a folder."""
    return re.sub(r"[^\w.\-]", "-", Path(path).stem).lstrip(".-")[:200] or "rcr"


def given_settings(
    path: str | os.PathLike[str] | None = None,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What the layers of `load_config` set, by section, unchecked but for the keys: for commands that add to it.

    Raises:
        ConfigError: a key is unknown, or the file can't be read.
    """
    return _nested(_layers(path, flags, environ)[0])


def checked(nested: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Settings:
    """The settings, by section, as an object.

    Args:
        nested: what differs from the defaults.
        origins: dotted path → where it was given: "demo.yaml line 3", "RCR_SFT__EPOCHS", "--sft.epochs".

    Raises:
        ConfigError: a value has the wrong type or range, or settings contradict each other.
    """
    try:
        return Settings.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(redact(_explain(error, origins or {}))) from None


def run_config(path: str | os.PathLike[str], flags: Mapping[str, str] | None = None) -> Settings:
    """The settings of a run folder's config.yaml, then flags.

    The environment gives what the file must not hold, secrets, and nothing else: a variable that is set for the next
    training doesn't alter this run.
    """
    config = load_config(path, flags, environ={})
    names = {_variable(place) for place in hidden(config)}
    return load_config(path, flags, {name: text for name, text in os.environ.items() if name in names})


def hidden(config: Settings) -> list[str]:
    """The settings that lack the secret which they were first given with."""
    return [place for place in PLACES if HIDDEN in str(attrgetter(place)(config))]


def check_hidden(config: Settings, section: str) -> None:
    """Refuse to use settings of a section that lack their secret.

    Raises:
        ConfigError: naming the setting, and how to give it.
    """
    for place in hidden(config):
        if place.startswith(f"{section}."):
            raise ConfigError(
                f"{place} had a secret, which run folders don't keep: give it again, as {_variable(place)} or --{place}"
            )


def _layers(
    path: str | os.PathLike[str] | None, flags: Mapping[str, str] | None, environ: Mapping[str, str] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Dotted path → value, and → where it was given."""
    known, values, origins = settings(), dict[str, Any](), dict[str, str]()
    for dotted, value, where in read_settings_file(Path(path), sections().keys()) if path is not None else ():
        if dotted not in known:
            raise ConfigError(f"{where}: {unknown_key(dotted, known)}")
        values[dotted], origins[dotted] = value, where
    variables = {_variable(each): each for each in known}
    for name, text in (os.environ if environ is None else environ).items():
        if not name.startswith(PREFIX) or name in RESERVED:
            continue
        if name not in variables:
            near = difflib.get_close_matches(name, variables, 1)
            hint = f"did you mean {near[0]}?" if near else f"settings are {PREFIX}NAME and {PREFIX}SECTION__NAME"
            raise ConfigError(f"unknown setting in the environment variable {name}: {hint}")
        dotted = variables[name]
        values[dotted], origins[dotted] = parse_text(known[dotted], text), name
    for dotted, text in (flags or {}).items():
        if dotted not in known:
            raise ConfigError(unknown_key(dotted, known))
        values[dotted], origins[dotted] = parse_text(known[dotted], text), f"--{dotted}"
    return values, origins


def parse_text(setting: Setting, text: str) -> Any:
    r"""The value of a flag or variable: null is None, lists are split at commas, mappings are YAML, the rest is left.

    A list in brackets is read as YAML, so that "\n" in double quotes is a line break; its items stay texts.
    """
    if text.strip().lower() == "null":
        return None
    is_list, listed = setting.kind == "LIST", text.strip().removeprefix("[").removesuffix("]")
    if setting.kind == "MAPPING" or (is_list and text.lstrip().startswith("[")):
        with suppress(yaml.YAMLError, ValueError, OverflowError, RecursionError):
            return read_value(text, yaml.BaseLoader if is_list else yaml.SafeLoader)  # the former makes no numbers
    return [part.strip().strip("'\"") for part in listed.split(",") if part.strip()] if is_list else text


def _variable(path: str) -> str:
    return PREFIX + path.upper().replace(".", "__")


def unknown_key(path: str, known: Mapping[str, Setting]) -> str:
    """What to say of an unknown dotted path: that it is a section, or unknown, and which known one is nearest."""
    if path in sections():
        first = next((each.path for each in known.values() if each.section == path), "")
        return f"'{path}' is a section, not a setting: set one of its own, such as {first}"
    near = [setting.path for setting in known.values() if setting.name == path.rpartition(".")[2]]
    near += difflib.get_close_matches(path, [*known, *sections()], 1)
    return f"unknown setting '{path}'" + (f": did you mean '{near[0]}'?" if near else "")


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One line for what pydantic found: field, value, what is expected, and where the value was given."""
    messages: list[str] = []
    for item in error.errors(include_url=False):
        text = item["msg"].removeprefix("Value error, ")
        dotted = ".".join(str(part) for part in item["loc"][:2])
        if dotted not in settings():
            messages.append(text)
            continue
        # pydantic appends how it failed ("…, unable to parse string as an integer"): the value says that better.
        expected = re.sub(r", (unable|got) .*", "", text.removeprefix("Input should be "))
        too_short = re.match(r"(?:List|String) should (have at least \d+ \w+)", text)
        words = [part.strip("' ") for part in re.split(",| or ", expected)] if item["type"] == "literal_error" else []
        near = difflib.get_close_matches(str(item["input"]), words, 1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        origin = f"{origins[dotted]}: " if dotted in origins else ""
        must = too_short[1] if too_short else f"be {expected}"
        messages.append(f"{origin}{dotted} must {must}, not {show(item['input'])}{hint}")
    return "; ".join(dict.fromkeys(messages))
