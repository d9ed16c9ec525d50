"""Stand-in for Open-Jev (see `jev/__init__.py`): the HTTP server and its small workbench page."""

import argparse
import json
import mimetypes
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .serving import load_predictor

POST_ROUTES = ("/v1/systemone", "/v1/inference", "/api/jev")
WORKBENCH = Path(__file__).with_name("workbench")


def strict_json(text: str | bytes) -> Any:
    """JSON without duplicate keys, NaN or infinities: those are ValueErrors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("duplicate key in JSON object")
        return value

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    if isinstance(text, bytes):
        text = text.decode("utf-8")
    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def make_server(
    predictor: Any,
    host: str,
    port: int,
    *,
    static_root: str | Path | None = None,
    max_body_bytes: int = 4 * 1024 * 1024,
) -> ThreadingHTTPServer:
    """A server ready for `serve_forever()`; predictions run one at a time."""
    lock = threading.Lock()
    root = Path(static_root or WORKBENCH).resolve()

    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == "/health":
                status = {"status": "ready", "model": predictor.model_name, "method": predictor.method}
                self.send_json(200, status)
            elif path == "/v1/models":
                model = {"description": predictor.method, "release_date": ""}
                names = dict.fromkeys((predictor.model_name, "open-jev", "jev-latest"))
                self.send_json(200, {"models": [{"name": name, **model} for name in names]})
            else:
                self.send_file(path)

        def do_POST(self) -> None:
            if urlsplit(self.path).path not in POST_ROUTES:
                self.send_json(404, {"error": "not found"})
                return
            if not self.same_origin():
                self.send_json(403, {"error": "cross-origin requests are not allowed"})
                return
            if self.headers.get_content_type() != "application/json":
                self.send_json(415, {"error": "Content-Type must be application/json"})
                return
            try:
                length = int(self.headers.get("Content-Length", "0"))
            except ValueError:
                self.send_json(422, {"error": "Content-Length must be a number"})
                return
            if not 0 < length <= max_body_bytes:
                self.send_json(413, {"error": f"the body must have 1 to {max_body_bytes} bytes"})
                return
            try:
                body = self.rfile.read(length)
                if len(body) < length:
                    raise ValueError(f"the body ends after {len(body)} of {length} bytes")
                request = strict_json(body)
                with lock:
                    result = predictor.predict(request)
                body = json.dumps(result, ensure_ascii=False, allow_nan=False).encode("utf-8")
            except (ValueError, KeyError, TypeError, UnicodeError) as error:
                self.send_json(422, {"error": str(error)})
            except Exception as error:
                self.send_json(500, {"error": "model inference failed", "error_type": type(error).__name__})
            else:
                self.send(200, body, "application/json; charset=utf-8")

        def same_origin(self) -> bool:
            origin = self.headers.get("Origin")
            return origin is None or urlsplit(origin).netloc == self.headers.get("Host")

        def send_file(self, path: str) -> None:
            file = (root / (unquote(path).lstrip("/") or "index.html")).resolve()
            if not file.is_relative_to(root) or not file.is_file():
                self.send_json(404, {"error": "not found"})
                return
            self.send(
                200, file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            )

        def send_json(self, status: int, data: dict) -> None:
            # Error texts may quote lone surrogates of the request, which UTF-8 cannot carry: escape them.
            self.send(status, json.dumps(data).encode("ascii"), "application/json; charset=utf-8")

        def send(self, status: int, data: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged: they hold the caller's text."""

    return ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a decision model over HTTP (stand-in for Open-Jev)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", help="a checkpoint package")
    source.add_argument("--model", dest="model_id", help="a base model, with --revision")
    parser.add_argument("--revision")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8791)
    args = vars(parser.parse_args())
    host, port = args.pop("host"), args.pop("port")
    predictor = load_predictor(**args)
    server = make_server(predictor, host, port)
    url = f"http://{host}:{server.server_address[1]}"
    print(json.dumps({"url": url, "model": predictor.model_name, "method": predictor.method}), flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


if __name__ == "__main__":
    main()
