"""A Hugging Face hub on loopback with one commit for each repository: enough for huggingface-hub to push and fetch."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """`with HubServer() as hub`; `hub.files` maps repository → path → content, `hub.log` has every request.

    Attributes:
        private: by repository, as it was made.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.log: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                hub.get(self)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                hub.post(self)

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

    def post(self, request: BaseHTTPRequestHandler) -> None:
        self.log.append((request.command, request.path))
        body = (
            request.rfile.read(int(request.headers["Content-Length"])) if "Content-Length" in request.headers else b""
        )
        if not body and request.headers.get("Transfer-Encoding") == "chunked":
            while size := int(request.rfile.readline(), 16):
                body += request.rfile.read(size)
                request.rfile.readline()
        if request.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            self.private.setdefault(name, "private" in (asked.get("visibility"), asked.get("private") and "private"))
            self.files.setdefault(name, {})
            return _answer(request, 200, {"url": f"{self.url}/{name}", "name": name})
        if request.path == "/api/validate-yaml":
            return _answer(request, 200, {"errors": [], "warnings": []})
        if request.path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return _answer(request, 200, {"files": files})
        if found := re.fullmatch(r"/api/models/(\w+/\w+)/commit/main", request.path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[found[1]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.files[found[1]][line["value"]["path"]]
            return _answer(request, 200, {"commitUrl": f"{self.url}/{found[1]}/commit/{SHA}", "commitOid": SHA})
        return _answer(request, 404, {"error": f"no {request.path}"})


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
