"""The exceptions that users see. Each message is one line that says what is wrong and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff]"
)
"""Characters that control a terminal, change a text's direction or can't be encoded; not tab and newline."""


def printable(text: str) -> str:
    """A text made safe for a terminal or plot: U+FFFD replaces control characters."""
    return _CONTROL.sub("\ufffd", text)


class RCRError(Exception):
    """Base of every error that langchain-rcr raises on purpose. Messages may quote a stranger's data."""

    def __str__(self) -> str:
        return printable(super().__str__())


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

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str]]:
        return type(self), (self.package, self.extra)  # else a pool of processes would wait for it forever


@contextmanager
def refusing(what: str, kind: type[RCRError] = InputError) -> Iterator[None]:
    """Turn whatever a library raises on bad data into a one-line `kind`: `what`, and why.

    A `CheckpointError` passes through, as it already names its source.
    """
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust isn't an Exception
        # PyTorch appends its stack to the first line.
        why = " ".join(str(error).partition("\nException raised from")[0].split()) or type(error).__name__
        raise kind(f"{what}: {why[:300]}") from error
