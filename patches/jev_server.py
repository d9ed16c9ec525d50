"""jev.server: `/health` says which backend answers and who decided; a backend's server is bounded, and answers requests
side by side where its engine can.

Applied when a backend has been loaded, to the namespace that holds `make_server`: `__main__` under
`python -m jev.server`, else the imported module. Knows `make_server(predictor, host, port, *,
static_root, max_body_bytes)`; further parameters with a default are passed on. Upstream's own answer
to `/health` is kept, with one field more. Where an engine of ours answers, the server that was made is
handed to `connections`; it has to be a ThreadingHTTPServer whose handler leaves the reading of requests
to BaseHTTPRequestHandler.
"""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from .. import backend_flag, bootstrap
from . import Changes, Known, UnknownUpstream, _parts, jev_server_lock

MAKE_SERVER = Known(
    "jev.server.make_server",
    positional=("predictor", "host", "port"),
    keyword_only=("static_root", "max_body_bytes"),
    defaults={"host": "127.0.0.1", "port": 8791, "static_root": None, "max_body_bytes": 4 * 1024 * 1024},
    grows=True,
)


def verify() -> None:
    """Raise UnknownUpstream if a server module is loaded whose `make_server` we do not know."""
    for module in _unpatched():
        MAKE_SERVER.verify(vars(module).get("make_server"))


def install() -> None:
    """Patch the server modules that are loaded, and those that will be."""
    bootstrap.also_patch_server()
    for module in _unpatched():
        bootstrap._undo[module.__name__] = apply(module)


def apply(module: ModuleType) -> Callable[[], None]:
    original = vars(module).get("make_server")
    if hasattr(original, "openjev_fast"):
        return lambda: None
    MAKE_SERVER.verify(original)
    with Changes() as changes:
        changes.rebind(module, "make_server", _make_server)
    return changes.undo


def _unpatched() -> Iterator[ModuleType]:
    """The server modules that are loaded and have their own `make_server`."""
    main, imported = sys.modules.get("__main__"), sys.modules.get("jev.server")
    if getattr(getattr(main, "__spec__", None), "name", None) != "jev.server":
        main = None
    for module in (main, imported):
        if module is not None and not hasattr(vars(module).get("make_server"), "openjev_fast"):
            yield module


def _make_server(original: Callable) -> Callable:
    defaults = _parts(original)[2]

    @functools.wraps(original)
    def make_server(*args: Any, **arguments: Any) -> Any:
        server = original(*args, **arguments)
        predictor = args[0] if args else arguments["predictor"]
        taken = getattr(predictor, "openjev_fast", None)
        if taken is not None and taken.engine is not None:
            try:
                _bound(server, predictor, arguments, defaults)
            except UnknownUpstream as error:
                backend_flag.stop(error, sys._getframe(1))
            _report_health(server.RequestHandlerClass, lambda: {**taken.describe(), "status": server.state})
        elif taken is not None:
            _report_health(server.RequestHandlerClass, taken.describe)
        return server

    make_server.openjev_fast = True  # type: ignore[attr-defined]
    return make_server


def _bound(server: Any, predictor: Any, arguments: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Hand a server to `connections`; raises UnknownUpstream, and changes nothing, where it cannot go there."""
    # Not before a backend answers.
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    from .. import connections

    handler = getattr(server, "RequestHandlerClass", object)
    if not (isinstance(server, ThreadingHTTPServer) and issubclass(handler, BaseHTTPRequestHandler)):
        raise UnknownUpstream(
            "jev.server.make_server",
            "a ThreadingHTTPServer with a BaseHTTPRequestHandler",
            f"{type(server).__name__} with {handler.__name__}",
        )
    for name in ("handle", "handle_one_request", "parse_request"):
        if getattr(handler, name) is not getattr(BaseHTTPRequestHandler, name):
            expected = f"{name} of BaseHTTPRequestHandler"
            raise UnknownUpstream("the handler of jev.server.make_server", expected, f"a {name} of its own")
    limits, idle = connections.Limits(), arguments.get("idle_timeout")
    if idle is not None and idle != defaults["idle_timeout"]:
        # Somebody chose it.
        limits = replace(limits, idle=idle)
    most = arguments.get("max_body_bytes", defaults["max_body_bytes"])
    taken = predictor.openjev_fast
    if taken.concurrent:
        jev_server_lock.lift(handler)
    connections.bound(server, predictor, most, limits)
    taken.on_broken(connections.fail)


def _report_health(handler: Any, describe: Callable[[], dict[str, Any]]) -> None:
    # The class was made for this one server.
    original = handler.do_GET

    @functools.wraps(original)
    def do_GET(self: Any) -> Any:
        if urlsplit(self.path).path != "/health":
            return original(self)
        real, self.wfile = self.wfile, io.BytesIO()
        try:
            return original(self)
        finally:
            answer, self.wfile = self.wfile.getvalue(), real
            real.write(_with_backend(answer, describe()))

    handler.do_GET = do_GET


def _with_backend(response: bytes, backend: dict[str, Any]) -> bytes:
    """A good HTTP response with `"backend"` added to its JSON object; any other response as it is."""
    head, separator, body = response.partition(b"\r\n\r\n")
    try:
        content = json.loads(body)
    except ValueError:
        return response
    status = head.partition(b" ")[2][:3]
    if not isinstance(content, dict) or status != b"200":
        return response
    body = json.dumps({**content, "backend": backend}, ensure_ascii=False, allow_nan=False).encode()
    lines = [
        b"Content-Length: %d" % len(body) if line.lower().startswith(b"content-length:") else line
        for line in head.split(b"\r\n")
    ]
    return b"\r\n".join(lines) + separator + body
