"""A Qdrant server that refuses, fails, hangs or lies: one clear error each time, and the next call works again."""

import time
import warnings

import numpy as np
import pytest

pytest.importorskip("qdrant_client")
pytest.importorskip("qdrant_edge")
from qdrant_server import QdrantServer

from langchain_rcr.errors import EngineError, PoolError
from langchain_rcr.index import qdrant_collection
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.qdrant import QdrantIndex

NOTHING = np.empty(0, dtype=np.int64)
MATRIX = np.eye(4, dtype=np.float32)
VECTORS = PoolVectors(MATRIX, MATRIX)
KEY = "a-secret-key"


def rows(prefix: str, count: int = 4) -> list[Row]:
    return [Row(f"{prefix} {at}", {"source": "q"}, at) for at in range(count)]


@pytest.fixture(scope="module")
def shared():
    with QdrantServer(api_key=KEY) as server:
        yield server


@pytest.fixture
def server(shared):
    yield shared
    shared.faults.clear()
    shared.fault_of = None


@pytest.fixture
def index(server, request):
    index = QdrantIndex(server.url, request.node.name, api_key=KEY, timeout_s=0.4)
    index.bind("f", 4)
    index.add(rows("old"), VECTORS)
    yield index
    index.close()


def calls(index: QdrantIndex) -> dict:
    def search() -> None:
        with index.read() as reader:
            reader.search(MATRIX, 1, [NOTHING] * 4)

    return {
        "count": index.count,
        "known": lambda: index.known(["old 1"]),
        "search": search,
        "add": lambda: index.add(rows("new", 4), VECTORS),
        "delete": lambda: index.delete(["old 1"]),
        "bind": lambda: index.bind("f", 4),
    }


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("500", "status 500: fault 500"),
        ("503", "status 503"),
        ("429", "status 429"),
        ("403", "status 403"),
        ("hang", "no answer to .* within 0.4 seconds"),
        ("drip", "no answer to .* within 0.4 seconds"),
        ("drop", "qdrant"),
        ("html", "qdrant"),
        ("truncated", "qdrant"),
    ],
)
@pytest.mark.parametrize("call", ["search", "add"])
def test_each_fault_is_one_error_and_heals(index, server, fault, says, call) -> None:
    server.fault_of = lambda method, path: fault
    began = time.monotonic()
    with pytest.raises(EngineError, match=says) as caught:
        calls(index)[call]()
    assert time.monotonic() - began < 4
    message = str(caught.value)
    assert server.url in message
    assert KEY not in message
    assert "\n" not in message
    assert len(message) < 500
    server.fault_of = None
    calls(index)[call]()
    assert index.known(["new 1"]) == ({"new 1"} if call == "add" else set())


@pytest.mark.parametrize("call", ["count", "known", "search", "add", "delete", "bind"])
def test_a_server_that_is_gone_and_comes_back(index, server, call) -> None:
    server.stop()
    try:
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(EngineError, match=r"qdrant \(http://127\.0\.0\.1:\d+\): .*onnect"):
                calls(index)[call]()
        assert time.monotonic() - began < 5
    finally:
        server.start()
    calls(index)[call]()


def test_a_connection_that_breaks_once_is_not_noticed(index, server) -> None:
    for call in calls(index).values():
        server.faults.append("drop")
        call()
        assert not server.faults
    assert index.count() == 7


def test_a_server_that_dies_in_the_middle_of_a_selection(index, server) -> None:
    with index.read() as reader:
        keys, _ = reader.search(MATRIX, 1, [NOTHING] * 4)
        server.stop()
        try:
            with pytest.raises(EngineError):
                reader.search(MATRIX, 1, [keys[:, 0]] * 4)
            assert reader.vectors(keys[:, 0]).shape == (4, 4)
        finally:
            server.start()
        again, _ = reader.search(MATRIX, 1, [keys[:1, 0]] * 4)
        assert again[1] == keys[1]


def test_a_wrong_key_is_told_without_the_key(server) -> None:
    index = QdrantIndex(server.url, "c", api_key="wrong-key")
    with pytest.raises(EngineError, match=r"status 401: Invalid API key: \*\*\*"):
        index.bind("f", 4)
    index.close()


def test_nothing_warns_about_a_key_over_http(server) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index = QdrantIndex(server.url, "warns", api_key=KEY)
        index.bind("f", 4)
        index.close()


def test_a_collection_that_somebody_deleted(index, server) -> None:
    server.collections.pop(index._settings.collection).remove()
    for name in ("count", "search", "add", "known"):
        with pytest.raises(EngineError, match=r"Collection .* doesn't exist"):
            calls(index)[name]()
    index.bind("f", 4)
    index.add(rows("new"), VECTORS)
    assert index.count() == 4


def test_an_update_that_is_only_acknowledged_is_an_error(index, server) -> None:
    server.fault_of = lambda method, path: "acknowledged" if path.endswith("/points/delete") else None
    with pytest.raises(EngineError, match="delete is not done yet"):
        index.delete(["old 1"])


@pytest.mark.parametrize("fault", ["500", "hang", "drop"])
def test_an_add_that_fails_half_way_leaves_nothing(index, server, monkeypatch, fault) -> None:
    monkeypatch.setattr(qdrant_collection, "_REQUEST_BYTES", 1)
    seen = []

    def third(method: str, path: str) -> str | None:
        if (method, path.rsplit("/", 1)[1]) == ("PUT", "points"):
            seen.append(path)
            return fault if len(seen) >= 3 else None
        return None

    server.fault_of = third
    with pytest.raises(EngineError):
        index.add(rows("new"), VECTORS)
    server.fault_of = None
    assert index.count() == 4
    assert index.known(["new 0", "new 1", "new 2"]) == set()
    index.add(rows("new"), VECTORS)


def test_a_replacement_that_fails_half_way_keeps_what_was_replaced(index, server, monkeypatch) -> None:
    monkeypatch.setattr(qdrant_collection, "_REQUEST_BYTES", 1)
    seen = []

    def fails(method: str, path: str) -> str | None:
        if (method, path.rsplit("/", 1)[1]) == ("PUT", "points"):
            seen.append(path)
            return "500" if len(seen) >= 3 else None
        return None

    server.fault_of = fails
    mixed = [Row("old 0", {"source": "changed"}, 0), *rows("new", 3)]
    with pytest.raises(EngineError):
        index.add(mixed, VECTORS, replace=True)
    server.fault_of = None
    assert index.count() == 4
    with index.read() as reader:
        keys, _ = reader.search(MATRIX[:1], 1, [NOTHING])
        assert reader.rows(keys[0])[0].example == {"source": "changed"}
    index.add(mixed, VECTORS, replace=True)
    assert index.count() == 7


def test_an_id_taken_between_the_look_and_the_add(index, server) -> None:
    """The other writer's example stays, and nothing of ours does."""
    other = QdrantIndex(server.url, index._settings.collection, api_key=KEY)
    other.bind("f", 4)
    one = np.ones((1, 4), dtype=np.float32)
    real = server.answer

    def meddle(method: str, path: str, body: dict) -> object:
        if (method, path.rsplit("/", 1)[1]) == ("PUT", "points"):
            server.answer = real
            other.add([Row("new 2", {"source": "theirs"}, 0)], PoolVectors(one, one))
        return real(method, path, body)

    server.answer = meddle
    with pytest.raises(PoolError, match="the id 'new 2' is taken"):
        index.add(rows("new"), VECTORS)
    assert index.count() == 5
    with index.read() as reader:
        keys, _ = reader.search(one, 5, [NOTHING])
        assert {"source": "theirs"} in [row.example for row in reader.rows(keys[0])]
    other.close()
