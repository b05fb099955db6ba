"""What makes two models the same to the cache: model name, server and parameters, never a key."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from pydantic import SecretStr

from rcr_trainer.errors import ConfigError

_FORMAT = 1
"""Part of every key: raised when the same answer would be read or cut differently."""

_TRANSPORT = frozenset(
    {
        *("cache", "verbose", "callbacks", "callback_manager", "tags", "metadata", "name", "profile"),
        *("client", "async_client", "root_client", "root_async_client"),
        *("http_client", "http_async_client", "http_socket_options"),
        *("request_timeout", "timeout", "max_retries", "rate_limiter", "batch_size"),
        *("streaming", "disable_streaming", "stream_usage", "stream_chunk_timeout", "include_response_headers"),
        *("custom_get_token_ids", "tiktoken_model_name", "allowed_special", "disallowed_special"),
    }
)
"""Fields that change how an answer travels, not what it says."""

_SECRET = re.compile(r"api_?key|secret|password|passwd|token$|authorization|credential|headers|proxy", re.IGNORECASE)
_ADDRESSES = ("base_url", "openai_api_base", "azure_endpoint", "endpoint_url", "endpoint", "api_base")


def identity(model: BaseLanguageModel[Any], extra: Mapping[str, Any], *, named: str | None, strict: bool) -> str:
    """A canonical text, the same for models whose answers are interchangeable.

    It is made of the class, LangChain's identifying parameters, the fields that are plain values, and the address.

    Args:
        model: any LangChain model.
        extra: what else decides the answer, such as the stop sequences.
        named: the user's name for the model; takes the place of everything that is read off it.
        strict: answers outlive this process, so refuse a model that can't be told from others of its class.

    Raises:
        ConfigError: strict, and the model has parts that have no text, and no identifying parameters.
    """
    if named is not None:
        own: dict[str, Any] = {"named": named}
    else:
        known = dict(model._identifying_params)
        plain, opaque = _fields(model)
        if strict and opaque and not known:
            msg = (
                f"the answers of {type(model).__name__} can't be kept in a file: its {', '.join(opaque)} can't be "
                "compared with another run's; pass identity='…', a name that changes whenever the model does"
            )
            raise ConfigError(msg)
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        own = {"class": kind, "params": known, "fields": plain, "address": address(model)}
    return json.dumps({"format": _FORMAT, **own, **extra}, sort_keys=True, default=_text)


def key(identity: str, prompt: str) -> bytes:
    """The cache's key of a prompt."""
    return hashlib.sha256(f"{len(identity)}:{identity}{prompt}".encode("utf-8", "surrogatepass")).digest()


def address(model: BaseLanguageModel[Any]) -> str:
    """Where the model is served, "" if it doesn't say; without user name and password."""
    for client in (getattr(model, "root_async_client", None), getattr(model, "async_client", None)):
        # The client knows best: it has looked into the environment too.
        url = getattr(getattr(client, "_client", client), "base_url", None)
        if url is not None and not callable(url):
            return _public(str(url))
    return next((_public(str(url)) for name in _ADDRESSES if (url := getattr(model, name, None))), "")


def secrets(model: BaseLanguageModel[Any]) -> frozenset[str]:
    """The keys that the model holds."""
    found = set()
    for name in type(model).model_fields:
        value = getattr(model, name, None)
        if isinstance(value, SecretStr):
            found.add(value.get_secret_value())
        elif isinstance(value, str) and _SECRET.search(name):
            found.add(value)
        elif isinstance(value, Mapping) and _SECRET.search(name):
            found |= {str(part) for part in value.values()}
    return frozenset(secret for secret in found if len(secret) > 3)


def _fields(model: BaseLanguageModel[Any]) -> tuple[dict[str, Any], list[str]]:
    plain: dict[str, Any] = {}
    opaque = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name, None)
        if name in _TRANSPORT or name in _ADDRESSES or value is None or field.exclude or _SECRET.search(name):
            continue
        if isinstance(value, SecretStr):
            continue
        if _is_plain(value):
            plain[name] = value
        else:
            opaque.append(name)
    return plain, opaque


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, str | int | float | bool | Path)


def _text(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if _is_plain(value) else f"{type(value).__module__}.{type(value).__qualname__}"


def _public(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url).rstrip("/")
