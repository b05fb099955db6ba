"""A Hugging Face hub on loopback with one commit for each repository: enough for huggingface-hub to fetch."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """`with HubServer() as hub`; `hub.files` maps repository → path → content, `hub.log` has every request."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.log: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                hub.get(self)

            do_HEAD = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def get(self, request: BaseHTTPRequestHandler) -> None:
        self.log.append((request.command, request.path))
        path = request.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/(\w+/\w+)(?:/revision/(\w+))?", path):
            if found[1] not in self.files:
                return _answer(request, 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            siblings = [{"rfilename": name} for name in self.files[found[1]]]
            return _answer(request, 200, {"id": found[1], "sha": SHA, "siblings": siblings})
        if found := re.fullmatch(r"/api/models/(\w+/\w+)/tree/(\w+)", path):
            files = self.files[found[1]].items()
            rows = [{"type": "file", "path": name, "size": len(text), "oid": _etag(text)} for name, text in files]
            return _answer(request, 200, rows)
        if found := re.fullmatch(r"/(\w+/\w+)/resolve/\w+/(.+)", path):
            content = self.files[found[1]][found[2]]
            return _send(request, 200, content, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": SHA})
        return _answer(request, 404, {"error": f"no {path}"})


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _answer(request: BaseHTTPRequestHandler, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
    _send(request, status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})


def _send(request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str]) -> None:
    request.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(content))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)
