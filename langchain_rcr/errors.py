"""The exceptions that users see. Each message is one line that says what is wrong and what to do."""

from __future__ import annotations


class RCRError(Exception):
    """Base of every error that langchain-rcr raises on purpose."""


class InputError(RCRError, ValueError):
    """An invalid argument: a wrong key, a query that is not a string, k out of range."""


class PoolError(RCRError, ValueError):
    """An example can't be added to the pool, or the pool can't serve the request."""


class CheckpointError(RCRError):
    """A checkpoint is missing a file, damaged, foreign, or written by a newer version."""


class EngineError(RCRError):
    """The engine that holds the pool can't be reached or failed; the call may be repeated."""


class ProgramError(RCRError):
    """A program can't be run: wrong, too slow, too much output. Any other exception of an executor is a bug."""


class MissingExtraError(RCRError, ImportError):
    """An optional dependency is not installed; the message names the pip command."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"{package} is not installed: pip install 'langchain-rcr[{extra}]'")
