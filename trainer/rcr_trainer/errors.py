"""The trainer's exceptions; the command line turns each into one line on stderr and exit code 2."""

from __future__ import annotations

from langchain_rcr.errors import RCRError


class DataError(RCRError, ValueError):
    """A data file can't be read as it should; the message names the file and, where there is one, the line."""


class ConfigError(RCRError, ValueError):
    """A setting is unknown, out of range or contradicts another; the message names the field."""
