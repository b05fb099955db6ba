"""A real HTTP server on loopback that speaks what LangSmith's client does for runs and feedback."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class LangSmithServer:
    """`with LangSmithServer() as server:` serves at `server.url`.

    Attributes:
        runs: what was sent of each run, by id.
        feedback: what was sent, oldest first.
        asked: the query of each request for feedback.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.feedback: list[dict[str, Any]] = []
        self.asked: list[dict[str, list[str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = urlsplit(self.path)
                query = parse_qs(address.query)
                self._send(outer._list(query) if address.path == "/feedback" else {})

            def do_POST(self) -> None:
                self._take()

            def do_PATCH(self) -> None:
                self._take()

            def _take(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.startswith("/feedback"):
                    now = datetime.now(UTC).isoformat()
                    given = {name: value for name, value in body.items() if value is not None}
                    own = {"trace_id": body["run_id"], "created_at": now, "modified_at": now}
                    outer.feedback.append({**own, **given})
                elif self.path.startswith("/runs"):
                    name = body.get("id") or self.path.rpartition("/")[2]
                    outer.runs.setdefault(str(name), {}).update(body)
                self._send({})

            def _send(self, value: Any) -> None:
                content = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def _list(self, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        """A page of the feedback on these runs by these names, the newest first."""
        self.asked.append(query)
        found = [
            each
            for each in reversed(self.feedback)
            if each["run_id"] in query["run"] and each["key"] in query.get("key", [each["key"]])
        ]
        start = int(query["offset"][0])
        return found[start : start + int(query["limit"][0])]

    def __enter__(self) -> LangSmithServer:
        self._thread.start()
        return self

    def __exit__(self, *arguments: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
