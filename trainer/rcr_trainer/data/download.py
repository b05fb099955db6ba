"""A download that puts a file in place only after its checksum is right."""

from __future__ import annotations

import hashlib
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.parse import urlsplit

from langchain_rcr.files import atomic_file
from rcr_trainer.errors import DataError

Opener = Callable[[str, float], IO[bytes]]

_BLOCK = 1 << 16


def open_https(url: str, timeout: float) -> IO[bytes]:
    """Open an https address. Redirects stay with https, since nothing else can be opened here.

    Raises:
        DataError: the address isn't https.
        OSError: no connection, or an answer other than success.
    """
    if urlsplit(url).scheme != "https":
        raise DataError(f"{url} is refused: downloads need an https address")
    response: IO[bytes] = _https_director().open(url, timeout=timeout)
    return response


def _https_director() -> urllib.request.OpenerDirector:
    director = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        director.add_handler(handler())
    return director


def download(
    url: str,
    destination: str | Path,
    *,
    sha256: str,
    max_bytes: int,
    timeout: float = 30.0,
    opener: Opener = open_https,
) -> Path:
    """Fetch a file whose content is known. A file that is already there with this content is left as it is.

    Args:
        url: where from.
        destination: the file to write; its folder is made.
        sha256: the content's checksum, 64 hexadecimal digits.
        max_bytes: stop when more than this comes.
        timeout: seconds without an answer after which to give up.
        opener: opens the address; given (url, timeout), returns a binary stream.

    Returns:
        The destination.

    Raises:
        DataError: no connection, or another content. The destination is then as it was before.
        InputError: the destination can't be written.
    """
    destination = Path(destination)
    if destination.is_dir():
        raise DataError(f"{destination} is a folder; give the file to write")
    if destination.exists() and hashlib.sha256(destination.read_bytes()).hexdigest() == sha256:
        return destination
    with atomic_file(destination) as file:
        try:
            with opener(url, timeout) as response:
                _copy(response, file, url=url, sha256=sha256, max_bytes=max_bytes)
        except (OSError, HTTPException) as error:
            if isinstance(error, HTTPError):
                error.close()
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            detail = str(reason or type(error).__name__).splitlines()[0]
            raise DataError(f"can't download {url}: {detail}") from error
    return destination


def _copy(response: IO[bytes], file: IO[bytes], *, url: str, sha256: str, max_bytes: int) -> None:
    digest, size = hashlib.sha256(), 0
    while block := response.read(_BLOCK):
        size += len(block)
        if size > max_bytes:
            raise DataError(f"{url} is not the expected file: more than {max_bytes:,} bytes came")
        digest.update(block)
        file.write(block)
    if digest.hexdigest() != sha256:
        raise DataError(f"{url} is not the expected file: its sha256 is {digest.hexdigest()}, expected {sha256}")
