"""A page in a headless Chromium, driven through a pipe by its DevTools protocol."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")


class Page:
    """A page that is open. What the browser says on its console, and every request beyond the file, is kept.

    Attributes:
        complaints: messages of the console, exceptions, violations of the content security policy.
        requests: the addresses that the page asked for.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._to, self._from = to_browser, os.fdopen(from_browser, "rb")
        self._number, self._buffer, self._session = 0, b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return dict(answer["result"])

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file, as a window of this size shows it."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.requests.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            some = os.read(self._from.fileno(), 1 << 16)
            assert some, "the browser is gone"
            self._buffer += some
        line, _, self._buffer = self._buffer.partition(b"\0")
        event: dict[str, Any] = json.loads(line)
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(event["params"]))
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        return event


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile in this folder."""
    assert BINARY is not None
    for_browser, to_browser = os.pipe()
    from_browser, of_browser = os.pipe()
    command = shlex.join([BINARY, *FLAGS, f"--user-data-dir={profile}"])
    # The protocol's pipes are the file descriptors 3 and 4.
    shell = f"exec {command} 3<&{for_browser} 4>&{of_browser}"
    process = subprocess.Popen(
        ["bash", "-c", shell], pass_fds=(for_browser, of_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(for_browser)
    os.close(of_browser)
    try:
        page = Page(to_browser, from_browser)
        yield page
        page._session = None
        page.call("Browser.close")
        page._from.close()
        process.wait(30)
    finally:
        os.close(to_browser)
        process.kill()
        process.wait()
