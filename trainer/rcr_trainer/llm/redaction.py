"""Keeps keys and passwords out of files and messages, and control characters out of terminals.

Run folders hold HIDDEN in place of a secret; to continue the run, the user gives the secret again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from langchain_rcr.errors import printable

HIDDEN = "***HIDDEN***"
PLACES = ("llm.base_url", "llm.extra_body", "reward.database")
"""Settings that may hold a secret."""

_LONG = "api[_-]?key|access[_-]?key|secret|token|password|passwd|passphrase|pwd|authorization|credential|cookie"
"""A name that ends in one of these belongs to a secret: clientSecret, sslpassword."""
_WORDS = f"{_LONG}|auth|sig(?:nature)?"
_NAME = re.compile(rf"(?i:{_LONG}|(?:^|[_.-])(?:key|auth|sig(?:nature)?))s?$|(?:Key|Auth|Sig(?:nature)?)s?$")
_HARMLESS = re.compile(r"(?i)^(?:keys|(?:source|target)_?keys?|max\w*tokens)$")
_BEFORE_AT = re.compile(r"(?<!\S)\S+@")
_LOGIN = re.compile(r"(?<=://)(?P<secret>[^/\s:@]+(?::\S*)?|:\S+)(?=@)")
"""user:password@, sought only in what ends in an @: elsewhere it would take quadratic time."""
_PATTERNS = (
    re.compile(rf"(?i)(?<![\w-])[\w-]*(?:{_WORDS})=(?P<secret>[^&;,\s'\"]+)"),  # ?api_key=…, password=…
    re.compile(r"(?i)pass(?:word|wd)\s*=\s*'?(?P<secret>(?<=')(?:[^'\\]|\\.)+|[^&;,\s'\"]+)"),  # password = '…'
    re.compile(r"(?i)(?<=[?&])key=(?P<secret>[^&;,\s'\"]+)"),  # https://host/v1?key=…
    re.compile(rf"(?i)['\"][\w-]*(?:{_WORDS})['\"]: ?['\"](?P<secret>[^'\"]+)"),  # "api_key": "…"
    re.compile(r"(?i)\bbearer\s+(?P<secret>[\w.~+/=-]{6,})"),
    re.compile(r"\b(?P<secret>(?:sk-|hf_|gh[opsu]_|xox[a-z]-|AKIA|AIza)[\w-]{8,})"),
)
_MIN_KEY = 8
"""Services' keys have 20 or more characters; a shorter one, such as "none" or "EMPTY", is a placeholder."""
_known: set[str] = set()


def remember(value: Any) -> None:
    """Hide a setting's secrets in all later messages, except the shortest, which would match in any text."""
    found: list[str] = []
    without_secrets(value, found=found)
    for secret in found:
        for part in (secret, *secret.split(":", 1)[1:]):
            _known.update(text for text in (part, unquote(part)) if len(text) > 3 and text != HIDDEN)


def remember_key(key: str) -> None:
    """Hide a key in all later messages."""
    if len(key) >= _MIN_KEY:
        _known.add(key)


def redact(text: str) -> str:
    """A text without known secrets or anything that looks like one."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return without_secrets(text)  # type: ignore[no-any-return]


def shown(text: str) -> str:
    """A text as a terminal may show it: without secrets or control characters."""
    return printable(redact(text))


def without_secrets(value: Any, name: str = "", *, found: list[str] | None = None) -> Any:
    """A JSON value with HIDDEN in place of secrets, which are added to `found`; `name` may mark it as a secret."""
    secrets = [] if found is None else found
    if isinstance(value, Mapping):
        names = {key: "authorization" if re.search("(?i)headers?$", name) else str(key) for key in value}
        return {key: without_secrets(inner, names[key], found=secrets) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner, name, found=secrets) for inner in value]
    if not isinstance(value, str):
        return value
    if value and _NAME.search(name) and not _HARMLESS.match(name):
        secrets.append(value)
        return HIDDEN

    def hidden(match: re.Match[str]) -> str:
        secrets.append(match["secret"])
        return match[0].replace(match["secret"], HIDDEN)

    value = _BEFORE_AT.sub(lambda match: _LOGIN.sub(hidden, match[0]), value)
    for pattern in _PATTERNS:
        value = pattern.sub(hidden, value)
    return value
