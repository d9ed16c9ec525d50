"""A server in Open-Jev's format that answers from the text of a request alone, for tests of what asks servers."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HEALTH = {"status": "ready", "model": "toy", "method": "text", "backend": {"name": "fast", "device": "cpu"}}


class Answering(ThreadingHTTPServer):
    """shift: added to the number a request is turned into, so that two servers decide differently.
    refused: whether a request gets a 422. connections, asked: what was seen."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, shift: float, refused: Callable[[dict[str, Any]], bool], health: dict[str, Any] | None
    ):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.shift, self.refused, self.health = shift, refused, health
        self.connections = 0
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Answering

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        self._send(404 if self.server.health is None else 200, self.server.health or {"error": "not found"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(request)
        if self.path != "/v1/systemone" or self.server.refused(request):
            self._send(422, {"error": "too long"})
            return
        answers = {name: self._answer(request, asked) for name, asked in request["questions"].items()}
        usage = {"input_tokens": len(json.dumps(request)), "output_tokens": 0}
        metadata = {"backend": {"name": "fast", "rows_computed": 7, "forward_ms": 0.125}}
        self._send(200, {"model": "toy", "answers": answers, "usage": usage, "metadata": metadata})

    def _answer(self, request: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps([request["state"], asked], sort_keys=True)
        number = (zlib.crc32(text.encode()) % 1000 / 1000 + self.server.shift) % 1.0
        if asked["type"] == "noul":
            return {"type": "noul", "noul": number}
        names = [str(index) for index in range(len(asked["criteria"]))]
        if asked["type"] == "choice":
            names = list(asked["criteria"])
        chosen = names[int(number * len(names))]
        rest = 0.4 / len(names)
        probabilities = {name: rest + (0.6 if name == chosen else 0.0) for name in names}
        about = {"choice": chosen} if asked["type"] == "choice" else {"score": 0.0, "legend": {}}
        return {"type": asked["type"], "probabilities": probabilities, "confidence": 0.5, **about}

    def _send(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def answering(
    shift: float = 0.0,
    refused: Callable[[dict[str, Any]], bool] = lambda request: False,
    health: dict[str, Any] | None = HEALTH,
) -> Iterator[Answering]:
    """Such a server, running."""
    with Answering(shift, refused, health) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
