from __future__ import annotations

import hashlib
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, ClassVar

import pytest
from rcr_trainer.data import download_geoquery
from rcr_trainer.data.download import _https_director, download, open_https
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


def _open_plain(url: str, timeout: float) -> IO[bytes]:
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=timeout)


def _get(url: str, path: Path, sha256: str = SHA256, max_bytes: int = 10**6) -> Path:
    return download(url, path, sha256=sha256, max_bytes=max_bytes, timeout=5, opener=_open_plain)


def test_the_file_is_put_in_place_and_not_fetched_again(server: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "corpus.xml"
    assert _get(f"{server}/corpus", path) == path
    assert path.read_bytes() == CONTENT
    _get(f"{server}/corpus", path)
    assert _Handler.requests == ["/corpus"]


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        ("/corpus", {"sha256": "0" * 64}, "is not the expected file: its sha256 is "),
        ("/corpus", {"max_bytes": 1000}, "more than 1,000 bytes came"),
        ("/missing", {}, "can't download .*/missing: Not Found"),
        ("/short", {}, "is not the expected file|can't download"),
    ],
)
def test_a_failure_leaves_what_was_there(server: str, tmp_path: Path, address, options, message) -> None:
    path = tmp_path / "corpus.xml"
    path.write_text("mine")
    with pytest.raises(DataError, match=message) as caught:
        _get(server + address, path, **options)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus.xml"]


def test_nobody_answers(server: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't download"):
        _get("http://127.0.0.1:1/corpus", tmp_path / "corpus.xml")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_as_destination(server: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        _get(f"{server}/corpus", tmp_path)


def test_users_get_https_only(server: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="downloads need an https address"):
        open_https(f"{server}/corpus", 5)
    with pytest.raises(DataError, match="downloads need an https address"):
        download_geoquery(tmp_path / "corpus.xml", url=f"{server}/corpus")
    # Where a redirect would lead: plain http can't be opened at all.
    with pytest.raises(urllib.error.URLError, match="unknown url type: http"):
        _https_director().open(f"{server}/corpus", timeout=5)
    assert _Handler.requests == []


def test_the_corpus_is_checked(server: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected 38f90017a242"):
        download_geoquery(tmp_path / "corpus.xml", url=f"{server}/corpus", opener=_open_plain)
    assert list(tmp_path.iterdir()) == []
