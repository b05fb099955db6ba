"""A Qdrant client for any number of callers; whatever goes wrong with it becomes one clear error.

The async client lives on the background loop, since its connections belong to one loop. A client that is none (Qdrant
inside this process, or one that the user made) is called on threads of its own, so that it holds up no loop; Qdrant in
this process is not safe from threads and has exactly one.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sqlite3
import warnings
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from qdrant_client import AsyncQdrantClient, QdrantClient
from qdrant_client.common.client_exceptions import QdrantException
from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse

from langchain_rcr.background import BackgroundLoop, background
from langchain_rcr.errors import EngineError, InputError

_FAILURES = (ApiException, QdrantException, OSError, ValueError, RuntimeError, sqlite3.Error)
_THREADS = 8
_LONGEST_TEXT = 300


class NotThereError(EngineError):
    """The server says that there is no such thing, which most likely is the collection."""


class Link(ABC):
    """A client, and what names it in messages.

    Args:
        place: the server's address or the folder.
    """

    in_process = False

    def __init__(self, place: str) -> None:
        self.place = place
        self.process = os.getpid()
        self.loop: BackgroundLoop = background()

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the client, once more if the connection broke: all that we send may arrive twice.

        Raises:
            EngineError: it failed; `NotThereError`, if that is the reason.
        """
        try:
            try:
                return await self._call(method, arguments)
            except ResponseHandlingException:
                return await self._call(method, arguments)
        except ResponseHandlingException as error:
            raise self.error(_reason(error.source)) from error
        except UnexpectedResponse as error:
            kind = NotThereError if error.status_code == 404 else EngineError
            raise self.error(_answer(error), kind) from error
        except _FAILURES as error:
            kind = NotThereError if "not found" in str(error) else EngineError
            raise self.error(_reason(error), kind) from error

    def error(self, text: str, kind: type[EngineError] = EngineError) -> EngineError:
        """An error of one line that names the place."""
        text = " ".join(text.split())
        text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} …"
        return kind(f"qdrant ({self.place}): {text}")

    @abstractmethod
    async def _call(self, method: str, arguments: dict[str, Any]) -> Any: ...

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections and files."""


class Remote(Link):
    """A server.

    Args:
        url: its address; port 6333 where it names none.
        api_key: sent with each request, never shown.
        timeout_s: how long it may take to answer one.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        super().__init__(url)
        self._api_key, self._timeout_s = api_key, timeout_s
        # As a header: the client's own argument warns, as Python does, where the connection is not encrypted.
        headers = {} if api_key is None else {"api-key": api_key}
        # Our time limit is for the whole answer and comes first; the client's starts anew with each piece.
        limit = math.ceil(timeout_s) + 5
        self._client = AsyncQdrantClient(url=url, headers=headers, timeout=limit, check_compatibility=False)

    async def _call(self, method: str, arguments: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await getattr(self._client, method)(**arguments)
        except TimeoutError:
            raise self.error(f"no answer to {method} within {self._timeout_s:g} seconds (timeout_s)") from None

    def error(self, text: str, kind: type[EngineError] = EngineError) -> EngineError:
        """An error of one line that names the address and not the key."""
        return super().error(text.replace(self._api_key, "***") if self._api_key else text, kind)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


class Threaded(Link):
    """A client that isn't async.

    Args:
        where: a folder, `":memory:"`, or a client that the user made and closes.
    """

    def __init__(self, where: str | QdrantClient) -> None:
        theirs = isinstance(where, QdrantClient)
        super().__init__("the given client" if theirs else str(where))
        self.in_process = not theirs or is_in_process(where)
        self._owned = not theirs
        self._where = where
        self._client: QdrantClient | None = where if isinstance(where, QdrantClient) else None
        threads = 1 if self.in_process else _THREADS
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="langchain-rcr-qdrant")

    async def _call(self, method: str, arguments: dict[str, Any]) -> Any:
        work = partial(self._work, method, arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _work(self, method: str, arguments: dict[str, Any]) -> Any:
        if self._client is None:
            # An advice about large pools; the documentation of `QdrantIndex` gives it too.
            warnings.filterwarnings("ignore", message="Local mode is not recommended", category=UserWarning)
            memory = self._where == ":memory:"
            self._client = QdrantClient(":memory:") if memory else QdrantClient(path=str(self._where))
        return getattr(self._client, method)(**arguments)

    async def close(self) -> None:
        """Close the folder; the user's own client stays open."""
        if self._owned:
            try:
                closing = self._threads.submit(self._close)
            except RuntimeError:  # at the end of the process threads end before the loop
                self._close()
            else:
                await asyncio.wrap_future(closing)
        self._threads.shutdown(wait=False)

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()


def is_in_process(client: object) -> bool:
    """Whether a client keeps its data in this process: in memory or in a folder."""
    options = client.init_options if isinstance(client, QdrantClient) else {}
    return options.get("location") == ":memory:" or options.get("path") is not None


def check_url(url: str) -> None:
    """Whether a server's address is one, and holds no secret.

    Raises:
        InputError: it isn't; the message doesn't show it where it may hold one.
    """
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_fine = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        msg = "qdrant: the address of a server must look like http://host:6333 or https://host:6333"
        raise InputError(msg)
    if "@" in parts.netloc or parts.query or parts.fragment:
        msg = f"qdrant: {parts.scheme}://{parts.hostname} must come without user, query and fragment; give api_key"
        raise InputError(msg)


def _answer(error: UnexpectedResponse) -> str:
    """What a server said that refused: its own words, if it is Qdrant."""
    try:
        said = json.loads(error.content)["status"]["error"]
    except (ValueError, TypeError, KeyError):
        said = error.content[:_LONGEST_TEXT].decode("utf-8", "replace") or error.reason_phrase
    return f"status {error.status_code}: {said}"


def _reason(error: BaseException) -> str:
    return f"{error}" or type(error).__name__
