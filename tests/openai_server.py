"""A real HTTP server on loopback that speaks the OpenAI protocol: completions, chat, and every fault on demand."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Request:
    """What arrived: path, decoded body, the prompt in it, two headers, and what became of it."""

    path: str
    body: dict[str, Any]
    prompt: str
    authorization: str
    encodings: str
    fault: str | None
    time: float = field(default_factory=time.monotonic)
    answered: bool = False


class OpenAIServer:
    """`with OpenAIServer(answer) as server:` serves `answer(prompt)` at `server.base_url`.

    Args:
        answer: prompt → text, or text and finish reason, or a chat message, such as one with tool calls. A chat request
            for a stream gets the message in two parts.
        delay: seconds that each good answer takes.
        echo: text → the field `logprobs` of a response with the prompt in it; None: the server ignores `echo`.
        grammar: the same of a response that a `grammar` of one text holds to it; None: the server ignores `grammar`.

    A fault is a name: "429", "429:SECONDS" (Retry-After), "429:date:SECONDS", "429:ms:MILLISECONDS", any other status
    such as "500", "hang", "drop" (the connection), "cut" (the body shorter than announced), "truncated" (JSON),
    "html", "no_choices", "null_choices", "null_text", "error_body", "error_choice", "no_usage", "empty", "refusal",
    "filter", "azure_filter", "length", "slow", "quota", "context", "echo_key" (401, repeats the key), "usage:JSON" (in
    place of the token counts), "deep" (nested a hundred thousand times), "endless" (a compressed body without end),
    "redirect:URL", "gzip" (compressed), "gzip_cut", "gzip_junk", "gzip_tail" (which goes on behind its end), "zstd" (48
    kB that unpack to 1.6 GB), "gzip, gzip". `faults` are used up in order of arrival, before good answers; `fault_of`,
    if set, decides by the request instead.
    """

    def __init__(
        self,
        answer: Callable[[str], str | tuple[str, str] | dict[str, Any]] = lambda prompt: "answer ( all )",
        delay: float = 0.0,
        echo: Callable[[str], dict[str, Any]] | None = None,
        grammar: Callable[[str], dict[str, Any]] | None = None,
    ) -> None:
        self.answer, self.echo, self.grammar = answer, echo, grammar
        self.delay = delay
        self.slow = 0.3
        self.faults: deque[str | None] = deque()
        self.fault_of: Callable[[Request], str | None] | None = None
        self.requests: list[Request] = []
        self.running = self.peak = self.sent = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @property
    def paid(self) -> list[str]:
        """The prompts of the requests that got a proper answer (of whatever content), in order."""
        return [request.prompt for request in self.requests if request.answered]

    def fail(self, *faults: str | None) -> None:
        self.faults.extend(faults)

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: OpenAIServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        owner = self.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path.partition("?")[0].endswith("/chat/completions")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        prompt = prompt[0] if isinstance(prompt, list) else prompt
        headers = [self.headers.get(name, "") for name in ("Authorization", "Accept-Encoding")]
        request = Request(self.path, body, prompt, *headers, None)
        with owner.lock:
            if owner.fault_of is not None:
                request.fault = owner.fault_of(request)
            elif owner.faults:
                request.fault = owner.faults.popleft()
            owner.requests.append(request)
            owner.running += 1
            owner.peak = max(owner.peak, owner.running)
        try:
            self._respond(request, chat)
        finally:
            with owner.lock:
                owner.running -= 1

    def _respond(self, request: Request, chat: bool) -> None:
        fault = request.fault or ""
        if self._broke(request, fault):
            return
        if fault == "slow":
            self.owner.stopping.wait(self.owner.slow)
        elif self.owner.delay:
            self.owner.stopping.wait(self.owner.delay)
        body = self._body(request, chat, fault)
        data = json.dumps(body).encode()
        if fault == "truncated":
            data = data[: len(data) // 2]
        elif fault == "deep":
            data = data[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        # Before it is sent: whoever has the answer may look here at once.
        no_answer = ("truncated", "no_choices", "null_choices", "error_body", "error_choice", "deep")
        request.answered = fault not in (*no_answer, *_PACKED)
        try:
            if chat and request.body.get("stream"):
                self._send(200, _events(body), {"Content-Type": "text/event-stream"})
            elif fault in _PACKED:
                self._send(200, _PACKED[fault](data), {"Content-Encoding": fault.partition("_")[0]})
            else:
                self._send(200, data)
        except OSError:
            request.answered = False
            raise

    def _broke(self, request: Request, fault: str) -> bool:
        """Serve the faults that are no answer at all."""
        status, _, rest = fault.partition(":")
        error = {"message": f"the server was told to fail with {fault}", "type": "server_error", "code": None}
        if fault == "hang":
            self.owner.stopping.wait(30)
            self.close_connection = True
        elif fault == "drop":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "cut":
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        elif fault == "endless":
            self._endless()
        elif status == "redirect":
            self._send(307, b"", {"Location": rest})
        elif fault == "html":
            self._send(200, b"<html>It works!</html>", {"Content-Type": "text/html"})
        elif fault == "quota":
            error |= {"type": "insufficient_quota", "code": "insufficient_quota", "message": "You exceeded your quota."}
            self._send(429, json.dumps({"error": error}).encode(), {"Retry-After": "20"})
        elif fault == "context":
            error |= {"code": "context_length_exceeded", "message": "maximum context length is 10 tokens"}
            self._send(400, json.dumps({"error": error}).encode())
        elif fault == "azure_filter":
            error |= {"code": "content_filter", "message": "The response was filtered"}
            self._send(400, json.dumps({"error": error}).encode())
        elif fault == "echo_key":
            error |= {"code": "invalid_api_key", "message": f"Incorrect API key: {request.authorization}"}
            self._send(401, json.dumps({"error": error}).encode())
        elif status.isdigit():
            self._send(int(status), json.dumps({"error": error}).encode(), _retry_after(rest))
        else:
            return False
        return True

    def _body(self, request: Request, chat: bool, fault: str) -> dict[str, Any]:
        given = self.owner.answer(request.prompt)
        text: str | None
        whole = given if isinstance(given, dict) else {}
        text, ended = (given, "stop") if isinstance(given, str) else given if isinstance(given, tuple) else ("", "stop")
        for stop in request.body.get("stop") or []:
            text = (text or "").split(stop)[0]
        reason = {"length": "length", "filter": "content_filter"}.get(fault, ended)
        refusal = None
        if fault == "empty":
            text = ""
        elif fault == "length":
            text = (text or "")[:-1]
        elif fault == "refusal":
            text, refusal = ("" if not chat else None), "I can't help with that."
        elif fault == "null_text":
            text = None
        logprobs = None
        if self.owner.echo is not None and request.body.get("echo"):
            text, logprobs = f"{request.prompt}{text}", self.owner.echo(request.prompt)
        elif self.owner.grammar is not None and request.body.get("grammar"):
            text = json.loads(request.body["grammar"].removeprefix("root ::= "))
            logprobs = self.owner.grammar(text)
        message = {"role": "assistant", "content": text, "refusal": refusal} | whole
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": logprobs}
        choice |= {"message": message} if chat else {"text": text}
        usage = {"prompt_tokens": len(request.prompt.split()), "completion_tokens": len((text or "").split())}
        body = {
            "id": "x",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": request.body["model"],
            "choices": [choice],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }
        if fault == "no_choices":
            body["choices"] = []
        elif fault == "null_choices":
            body["choices"] = None
        elif fault == "error_body":
            body = {"error": {"message": "upstream failed", "code": 502}}
        elif fault == "error_choice":
            choice |= {"finish_reason": "error", "error": {"message": "upstream failed", "code": 502}}
        elif fault == "no_usage":
            del body["usage"]
        elif fault.startswith("usage:"):
            body["usage"] = json.loads(fault.removeprefix("usage:"))
        return body

    def _endless(self) -> None:
        """Send blanks until the client has enough."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        packed = zlib.compressobj(wbits=31)
        with suppress(OSError):
            while not self.owner.stopping.is_set():
                self.wfile.write(packed.compress(b" " * (1 << 20)) + packed.flush(zlib.Z_SYNC_FLUSH))
                self.owner.sent += 1 << 20

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


_PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "gzip_cut": lambda data: gzip.compress(data)[:-20],
    "gzip_junk": lambda data: data,
    "gzip_tail": lambda data: gzip.compress(data) + bytes(20 << 20),
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
    # A frame with a window of 128 KiB, and blocks that each say "128 KiB of blanks".
    "zstd": lambda data: bytes.fromhex("28b52ffd0038") + bytes.fromhex("02001020") * 12_000 + bytes.fromhex("03000020"),
}


def _events(body: dict[str, Any]) -> bytes:
    """A chat completion as a stream of server-sent events: half of its text, then the rest."""
    (choice,) = body["choices"]
    message = choice["message"]
    text = message.get("content") or ""
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or [])]
    first = {"role": "assistant", "content": text[: len(text) // 2]}
    rest = {"content": text[len(text) // 2 :]} | ({"tool_calls": calls} if calls else {})
    parts = [(first, None), (rest, None), ({}, "tool_calls" if calls else choice["finish_reason"])]
    shared = {"id": body["id"], "object": "chat.completion.chunk", "created": body["created"], "model": body["model"]}
    chunks = [{**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": why}]} for delta, why in parts]
    return "".join(f"data: {data}\n\n" for data in [*map(json.dumps, chunks), "[DONE]"]).encode()


def _retry_after(text: str) -> dict[str, str]:
    if not text:
        return {}
    kind, _, value = text.rpartition(":")
    if kind == "date":
        return {"Retry-After": formatdate(time.time() + float(value), usegmt=True)}
    if kind == "ms":
        return {"retry-after-ms": value}
    return {"Retry-After": value}


def prompts_of(count: int, start: int = 0) -> list[str]:
    """Different prompts in the paper's format."""
    return [f"Source: question {n}\nTarget:" for n in range(start, start + count)]


def each(faults: Iterable[str | None]) -> Callable[[Request], str | None]:
    """For `fault_of`: the first request of every prompt gets the fault of its turn, later ones are answered."""
    left = deque(faults)
    seen: set[str] = set()

    def decide(request: Request) -> str | None:
        if request.prompt in seen or not left:
            return None
        seen.add(request.prompt)
        return left.popleft()

    return decide


def echo_of(folder: str) -> Callable[[str], dict[str, Any]]:
    """For `echo`: the log-probabilities of a text's tokens, and of one more, by the model in a folder."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer, network = AutoTokenizer.from_pretrained(folder), LlamaForCausalLM.from_pretrained(folder)

    def echo(text: str) -> dict[str, Any]:
        read = tokenizer(text, return_offsets_mapping=True)
        ids = read["input_ids"]
        with torch.no_grad():
            values = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        told = [float(values[at, token]) for at, token in enumerate(ids[1:])]
        best = int(values[-1].argmax())
        offsets = [start for start, _ in read["offset_mapping"]]
        return {
            "tokens": [*(text[start:end] for start, end in read["offset_mapping"]), tokenizer.decode([best])],
            "text_offset": [*offsets, len(text)],
            "token_logprobs": [None, *told, float(values[-1, best])],
        }

    return echo
