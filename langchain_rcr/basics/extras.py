"""Packages that may not be installed."""

from __future__ import annotations

from importlib.util import find_spec

from langchain_rcr.errors import MissingExtraError


def installed(package: str) -> bool:
    """Whether a package is there to be imported; it isn't imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a finder hides it
        return False


def require(package: str, extra: str) -> None:
    """Raise a `MissingExtraError` that names the extra, unless the package is installed."""
    if not installed(package):
        raise MissingExtraError(package, extra)
