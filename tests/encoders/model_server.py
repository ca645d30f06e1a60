"""A model server on this machine that answers as OpenAI, vLLM and SGLang do, with faults on request."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DIM = 6


def embedding(content: Any) -> list[float]:
    """What the model makes of a sample: other for other tokens, or for other text."""
    values = [float(one) for one in (content.encode() if isinstance(content, str) else content)]
    return [sum(v * (place + k) for place, v in enumerate(values, 1)) / 1000 for k in range(DIM)]


def states(content: Any, layer: int = 0) -> list[list[float]]:
    """A state for each token, of the tokens up to it."""
    return [[v + layer for v in embedding(content[: end + 1])] for end in range(len(content))]


class ModelServer:
    """Settings of the server, and what it was asked."""

    def __init__(self) -> None:
        self.faults: dict[int, list[str]] = {}
        """Faults of the requests with a token, one for each request, then none; `always:FAULT` stays."""
        self.every: str = ""
        """A fault of all requests."""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.asked: Counter[int] = Counter()
        """Requests by the first token of their first sample."""
        self.most_at_once = 0
        self.headers: list[str | None] = []
        self.times: list[float] = []
        self.shuffled = False
        self.wait_s = 0.0
        self.folder: Path | None = None
        self.url = ""
        self.lock = threading.Lock()
        self.hung = threading.Event()
        self.now = 0

    def fault(self, contents: list[Any]) -> str:
        with self.lock:
            if self.every:
                return self.every
            for content in contents:
                for token, faults in self.faults.items():
                    if not isinstance(content, str) and token in content and faults:
                        return (
                            faults[0].removeprefix("always:")
                            if faults[0].startswith("always:")
                            else faults.pop(0)
                        )
        return ""


@contextmanager
def running() -> Generator[ModelServer]:
    server = ModelServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            with server.lock:
                server.now += 1
                server.most_at_once = max(server.most_at_once, server.now)
            try:
                _answer(self, server)
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                with server.lock:
                    server.now -= 1

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.hung.set()
        http.shutdown()
        http.server_close()
        thread.join(10)


def _answer(handler: BaseHTTPRequestHandler, server: ModelServer) -> None:
    body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
    given = body.get("input", body.get("prompt", body.get("input_ids")))
    contents = given if given and isinstance(given[0], list | str) else [given]
    with server.lock:
        server.requests.append((handler.path, body))
        server.headers.append(handler.headers.get("Authorization"))
        server.times.append(time.monotonic())
        if not isinstance(contents[0], str):
            server.asked[contents[0][0]] += 1
    fault = server.fault(contents)
    if server.wait_s:
        time.sleep(server.wait_s)
    if fault == "hang":
        server.hung.wait(30)
        return
    if fault.startswith("status:"):
        _, status, *after = fault.split(":")
        _send(handler, b'{"error": "no"}', int(status), {"Retry-After": after[0]} if after else {})
        return
    if fault == "closed":
        handler.close_connection = True
        handler.connection.close()
        return
    answer = _made(handler, body, contents, fault, server)
    text = json.dumps(answer).encode()
    if fault == "cut":
        text = text[: len(text) // 2]
    _send(handler, text, 200, {})


def _send(handler: BaseHTTPRequestHandler, text: bytes, status: int, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in {
        "Content-Type": "application/json",
        "Content-Length": str(len(text)),
        **headers,
    }.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(text)


def _made(
    handler: BaseHTTPRequestHandler,
    body: dict[str, Any],
    contents: list[Any],
    fault: str,
    server: ModelServer,
) -> dict[str, Any]:
    request_id = "other" if fault == "other-id" else handler.headers.get("X-Request-Id")
    read = sum(map(len, contents)) - (fault == "fewer-tokens")
    if handler.path == "/generate":
        made = _broken([states(contents[0]), embedding(contents[0])], fault)
        rid = "other" if fault == "other-id" else body["rid"]
        return {"text": "", "meta_info": {"id": rid, "prompt_tokens": read, "hidden_states": made}}
    if handler.path == "/v1/completions":
        assert server.folder is not None
        path = server.folder / f"{request_id}.safetensors"
        made = torch.tensor([states(contents[0], layer) for layer in (4, 8)]).transpose(0, 1).contiguous()
        if fault == "nan":
            made[0, 0, 0] = torch.nan
        tokens = torch.tensor(contents[0]) + (fault == "other-tokens")
        save_file({"hidden_states": made.bfloat16(), "token_ids": tokens}, path)
        if fault == "outside":
            path = server.folder.parent / "secret.safetensors"
        return {"id": f"cmpl-{request_id}", "kv_transfer_params": {"hidden_states_path": str(path)}}
    name, make = ("embedding", embedding) if handler.path == "/v1/embeddings" else ("data", states)
    entries = [{"index": place, name: _broken(make(one), fault)} for place, one in enumerate(contents)]
    if fault == "swapped" and len(entries) > 1:
        entries[0]["index"], entries[1]["index"] = 0, 0
    elif fault == "swapped":
        entries[0]["index"] = 1
    if server.shuffled:
        entries.reverse()
    prefix = {"embedding": "embd-", "data": "pool-"}[name]
    usage = {} if isinstance(contents[0], str) else {"prompt_tokens": read}
    return {"id": f"{prefix}{request_id}", "model": body["model"], "data": entries, "usage": usage}


def _broken(values: Any, fault: str) -> Any:
    """Return nested lists with one number that is wrong."""
    if fault == "short":
        return values[:-1] if not isinstance(values[0], list) else [_broken(values[0], fault), *values[1:]]
    if fault in ("nan", "null", "text"):
        bad = {"nan": float("nan"), "null": None, "text": "x"}[fault]
        return [_broken(values[0], fault), *values[1:]] if isinstance(values[0], list) else [bad, *values[1:]]
    return values
