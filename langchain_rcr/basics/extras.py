"""Optional packages, and the versions of those that are installed."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from langchain_rcr.errors import MissingExtraError


def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return find_spec(package) is not None


def require(package: str, extra: str) -> None:
    """Raise a `MissingExtraError` that names the extra, unless the package is installed."""
    if not installed(package):
        raise MissingExtraError(package, extra)


@cache
def library_versions() -> dict[str, str]:
    """Versions of what a checkpoint depends on, for bug reports; not to be changed. Read once, which takes 20 ms."""
    versions = {"python": platform.python_version()}
    for package in ("langchain-rcr", "torch", "transformers", "numpy", "scipy", "langchain-core"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions
