"""A real HTTP server on loopback that speaks Qdrant's REST protocol, as far as it is needed, with faults on demand.

The engine behind it is Qdrant's own, from the package `qdrant-edge-py`: the server's Rust code for storing, searching,
filtering and payload indexes. HTTP, collections and their metadata are ours.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import qdrant_edge as edge

SCHEMAS = {
    "keyword": edge.PayloadSchemaType.Keyword,
    "integer": edge.PayloadSchemaType.Integer,
    "float": edge.PayloadSchemaType.Float,
}
MODES = {
    None: edge.UpdateMode.Upsert,
    "upsert": edge.UpdateMode.Upsert,
    "insert_only": edge.UpdateMode.InsertOnly,
}


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where a file need not wait for a disk


class Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Collection:
    def __init__(self, body: dict, keeps_metadata: bool) -> None:
        self.folder = tempfile.mkdtemp(prefix="rcr-qdrant-", dir=MEMORY)
        vectors = {
            name: edge.EdgeVectorParams(size=params["size"], distance=edge.Distance.Dot)
            for name, params in body["vectors"].items()
        }
        self.vectors = body["vectors"]
        self.metadata = body.get("metadata") if keeps_metadata else None
        self.indexes: dict[str, str] = {}
        self.shard = edge.EdgeShard.create(self.folder, edge.EdgeConfig(vectors=vectors))

    def remove(self) -> None:
        self.shard.close()
        shutil.rmtree(self.folder)

    def info(self) -> dict:
        count = self.shard.count(edge.CountRequest(exact=True))
        return {
            "status": "green",
            "optimizer_status": "ok",
            "points_count": count,
            "segments_count": 1,
            "config": {
                "params": {"vectors": self.vectors},
                "hnsw_config": {"m": 16, "ef_construct": 100, "full_scan_threshold": 10000},
                "optimizer_config": {
                    "deleted_threshold": 0.2,
                    "vacuum_min_vector_number": 1000,
                    "default_segment_number": 0,
                    "flush_interval_sec": 5,
                },
                "metadata": self.metadata,
            },
            "payload_schema": {name: {"data_type": kind, "points": count} for name, kind in self.indexes.items()},
        }


class QdrantServer:
    """`with QdrantServer() as server:` listens at `server.url`; what it holds outlives `stop` and `start`.

    A fault is a name: a status such as "500", "hang", "drop" (the connection), "html", "truncated", "drip" (an answer
    that comes byte by byte), "acknowledged" (an update that is not done yet). `faults` are used up in order of arrival;
    `fault_of`, if set, decides by method and path instead.
    """

    def __init__(self, api_key: str | None = None, keeps_metadata: bool = True) -> None:
        self.api_key = api_key
        self.keeps_metadata = keeps_metadata
        self.collections: dict[str, Collection] = {}
        self.faults: deque[str] = deque()
        self.fault_of = None
        self.asked: list[tuple[str, str]] = []
        self.lock = threading.RLock()
        self._port = 0
        self._http = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> QdrantServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for collection in self.collections.values():
            collection.remove()

    def start(self) -> None:
        self.stopping = threading.Event()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = _Server(("127.0.0.1", self._port), handler)
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._http is not None:
            self.stopping.set()
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def count_of(self, path_end: str) -> int:
        return sum(path.endswith(path_end) for _, path in self.asked)

    def answer(self, method: str, path: str, body: dict) -> object:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        name, rest = parts[1], "/".join(parts[2:])
        with self.lock:
            if (method, rest) == ("PUT", ""):
                if name in self.collections:
                    raise Refused(409, f"Wrong input: Collection `{name}` already exists!")
                self.collections[name] = Collection(body, self.keeps_metadata)
                return True
            if name not in self.collections:
                raise Refused(404, f"Not found: Collection `{name}` doesn't exist!")
            if (method, rest) == ("DELETE", ""):
                self.collections.pop(name).remove()
                return True
            return ROUTES[method, rest](self.collections[name], body)


def patch(collection: Collection, body: dict) -> bool:
    if "metadata" in body:
        collection.metadata = (collection.metadata or {}) | body["metadata"]
    for name, params in body.get("vectors", {}).items():
        collection.vectors[name] |= params
    return True


def done(collection: Collection, operation: edge.UpdateOperation) -> dict:
    collection.shard.update(operation)
    return {"operation_id": 1, "status": "completed"}


def index(collection: Collection, body: dict) -> dict:
    collection.indexes[body["field_name"]] = body["field_schema"]
    return done(collection, edge.UpdateOperation.create_field_index(body["field_name"], SCHEMAS[body["field_schema"]]))


def upsert(collection: Collection, body: dict) -> dict:
    batch = body["batch"]
    columns = [dict(zip(batch["vectors"], row, strict=True)) for row in zip(*batch["vectors"].values(), strict=True)]
    for vectors in columns:
        for name, vector in vectors.items():
            if len(vector) != collection.vectors[name]["size"]:
                raise Refused(400, "Wrong input: Vector dimension error")
    points = [edge.Point(*point) for point in zip(batch["ids"], columns, batch["payloads"], strict=True)]
    mode = MODES[body.get("update_mode")]
    return done(collection, edge.UpdateOperation.upsert_points(points, update_mode=mode))


def delete(collection: Collection, body: dict) -> dict:
    return done(collection, edge.UpdateOperation.delete_points(body["points"]))


def count(collection: Collection, body: dict) -> dict:
    request = edge.CountRequest(exact=body["exact"], filter=filter_of(body.get("filter")))
    return {"count": collection.shard.count(request)}


def retrieve(collection: Collection, body: dict) -> list:
    found = collection.shard.retrieve(body["ids"], body.get("with_payload"), body.get("with_vector", False))
    return [record(point) for point in found]


def scroll(collection: Collection, body: dict) -> dict:
    order = body.get("order_by")
    assert order is None or order["direction"] == "desc"
    if order and order["key"] not in collection.indexes:
        raise Refused(400, f"Bad request: No range index for `order_by` key: `{order['key']}`.")
    points, following = collection.shard.scroll(
        edge.ScrollRequest(
            offset=body.get("offset"),
            limit=body["limit"],
            filter=filter_of(body.get("filter")),
            with_payload=body.get("with_payload"),
            with_vector=body.get("with_vector", False),
            order_by=order
            and edge.OrderBy(order["key"], direction=getattr(edge.Direction, order["direction"].title())),
        )
    )
    return {"points": [record(point) for point in points], "next_page_offset": following and str(following)}


def query(collection: Collection, body: dict) -> list:
    requests = []
    for one in body["searches"]:
        vector = one["query"]["nearest"] if isinstance(one["query"], dict) else one["query"]
        requests.append(
            edge.QueryRequest(
                query=edge.Query.Nearest(vector, using=one["using"]),
                filter=filter_of(one.get("filter")),
                limit=one["limit"],
                params=edge.SearchParams(exact=one["params"]["exact"], hnsw_ef=one["params"].get("hnsw_ef")),
                with_payload=one["with_payload"],
                with_vector=one.get("with_vector", False),
            )
        )
    found = collection.shard.query_batch(edge.QueryBatchRequest(requests))
    return [{"points": [record(hit) | {"version": 0, "score": hit.score} for hit in hits]} for hits in found]


def facet(collection: Collection, body: dict) -> dict:
    if body["key"] not in collection.indexes:
        raise Refused(400, "Bad request: no index for facet")
    answer = collection.shard.facet(edge.FacetRequest(body["key"], limit=body["limit"], exact=body["exact"]))
    return {"hits": [{"value": hit.value, "count": hit.count} for hit in answer.hits]}


ROUTES = {
    ("GET", ""): lambda collection, body: collection.info(),
    ("PATCH", ""): patch,
    ("PUT", "index"): index,
    ("PUT", "points"): upsert,
    ("POST", "points"): retrieve,
    ("POST", "points/delete"): delete,
    ("POST", "points/count"): count,
    ("POST", "points/scroll"): scroll,
    ("POST", "points/query/batch"): query,
    ("POST", "facet"): facet,
}


def record(point: edge.Record) -> dict:
    return {"id": str(point.id), "payload": point.payload, "vector": point.vector}


def filter_of(body: dict | None) -> edge.Filter | None:
    if body is None:
        return None
    return edge.Filter(**{part: [condition_of(one) for one in conditions] for part, conditions in body.items()})


def condition_of(body: dict) -> object:
    if "key" not in body:
        return filter_of(body)
    if "range" in body:
        return edge.FieldCondition(body["key"], range=edge.RangeFloat(**body["range"]))
    match = body["match"]
    one = edge.MatchValue(match["value"]) if "value" in match else edge.MatchAny(match["any"])
    return edge.FieldCondition(body["key"], match=one)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that hung up


class _Handler(BaseHTTPRequestHandler):
    owner: QdrantServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def _serve(self) -> None:
        owner, path = self.owner, urlsplit(self.path).path
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        with owner.lock:
            owner.asked.append((self.command, path))
            if owner.fault_of is not None:
                fault = owner.fault_of(self.command, path)
            else:
                fault = owner.faults.popleft() if owner.faults else None
        if fault == "hang":
            owner.stopping.wait(30)
            return
        if fault == "drop":
            self.close_connection = True
            self.connection.close()
            return
        if fault == "html":
            self._send(200, b"<html>a proxy's page</html>")
            return
        if fault is not None and fault.isdigit():
            self._send_json(int(fault), {"status": {"error": f"fault {fault}"}})
            return
        if owner.api_key is not None and self.headers.get("api-key") != owner.api_key:
            self._send(401, f"Invalid API key: {self.headers.get('api-key')}".encode())
            return
        try:
            result = owner.answer(self.command, path, body)
        except Refused as refusal:
            self._send_json(refusal.status, {"status": {"error": str(refusal)}, "time": 0.0})
            return
        except Exception as error:
            self._send_json(500, {"status": {"error": f"{type(error).__name__}: {error}"}, "time": 0.0})
            return
        if fault == "acknowledged":
            result = {"operation_id": 1, "status": "acknowledged"}
        text = json.dumps({"result": result, "status": "ok", "time": 0.0}).encode()
        if fault == "truncated":
            text = text[: len(text) // 2]
        self._send(200, text, drip=fault == "drip")

    def _send_json(self, status: int, body: dict) -> None:
        self._send(status, json.dumps(body).encode())

    def _send(self, status: int, body: bytes, drip: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for part in [bytes([byte]) for byte in body] if drip else [body]:
            self.wfile.write(part)
            if drip and self.owner.stopping.wait(0.05):
                return

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _serve
