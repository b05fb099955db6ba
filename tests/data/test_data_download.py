from __future__ import annotations

import hashlib
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from rcr_trainer.data import geoquery
from rcr_trainer.data.geoquery import download_geoquery
from rcr_trainer.errors import DataError

CONTENT = b"<corpus/>" * 50_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.path == "/missing":
            self.send_error(404)
            return
        body = CONTENT[:-1] if self.path == "/short" else CONTENT
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        _Handler.requests.clear()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def served(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers for https://corpus, whose right content is CONTENT."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    monkeypatch.setattr(
        urllib.request,
        "urlopen",
        lambda url, timeout: opener.open(url.replace("https://corpus", server), timeout=timeout),
    )
    monkeypatch.setattr(geoquery, "CORPUS_SHA256", SHA256)


def test_the_file_is_put_in_place_and_not_fetched_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "corpus.xml"
    assert download_geoquery(path, url="https://corpus/corpus") == path
    assert path.read_bytes() == CONTENT
    download_geoquery(path, url="https://corpus/corpus")
    assert _Handler.requests == ["/corpus"]


@pytest.mark.parametrize(
    ("address", "constant", "message"),
    [
        (
            "https://corpus/corpus",
            {"CORPUS_SHA256": "0" * 64},
            "is not the published file: its sha256 is .*, expected 0",
        ),
        ("https://corpus/corpus", {"_MOST_BYTES": 1000}, "is not the published file"),
        ("https://corpus/missing", {}, "can't download .*/missing: Not Found"),
        ("https://corpus/short", {}, "is not the published file|can't download"),
        ("https://127.0.0.1:1/corpus", {}, "can't download"),
    ],
)
def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch, address, constant, message) -> None:
    for name, value in constant.items():
        monkeypatch.setattr(geoquery, name, value)
    with pytest.raises(DataError, match=message) as caught:
        download_geoquery(tmp_path / "corpus.xml", url=address)
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_another_file_that_is_there_is_kept_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.xml"
    path.write_text("mine")
    with pytest.raises(DataError, match=r"corpus\.xml is not the published file"):
        download_geoquery(path, url="https://corpus/corpus")
    assert (path.read_text(), _Handler.requests) == ("mine", [])
