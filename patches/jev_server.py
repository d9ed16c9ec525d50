"""jev.server: `/health` says which backend answers and who decided; requests run side by side where it can.

Applied when a backend has been loaded, to the namespace that holds `make_server`: `__main__` under
`python -m jev.server`, else the imported module. Knows `make_server(predictor, host, port, *,
static_root, max_body_bytes)`; further parameters with a default are passed on. Upstream's own answer
to `/health` is kept, with one field more.
"""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from .. import bootstrap
from . import Changes, Known, jev_server_concurrency

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
    @functools.wraps(original)
    def make_server(*args: Any, **arguments: Any) -> Any:
        server = original(*args, **arguments)
        predictor = args[0] if args else arguments["predictor"]
        if hasattr(predictor, "openjev_fast"):
            jev_server_concurrency.apply(server, predictor.openjev_fast)
            _report_health(server.RequestHandlerClass, predictor.openjev_fast)
        return server

    make_server.openjev_fast = True  # type: ignore[attr-defined]
    return make_server


def _report_health(handler: Any, taken: Any) -> None:
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
            real.write(_with_backend(answer, taken.describe()))

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
