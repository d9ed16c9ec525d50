"""The access log: one JSON object a line for every HTTP request. Standard library only.

A line holds time (UTC), client, method, path (without its query), status, seconds, request_bytes and response_bytes;
bodies and error texts, which quote prompts, are left out. Requests never wait for the file: a thread writes what has
come together.
"""

from __future__ import annotations

import atexit
import json
import logging
import logging.handlers
import os
import threading
import time

from .exchange import Exchange

# Lines that wait for the file; of what comes then, only the number is logged.
_WAITING = 10_000
# A method or a path as long as a request line may be is no use here.
_LONGEST = 200


class AccessLog:
    """Called with every finished exchange. The file is appended to, and opened anew when it has been moved away.

    Raises OSError where it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike):
        self._file = logging.handlers.WatchedFileHandler(path, encoding="utf-8")
        self._lines: list[str] = []
        self._dropped = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="openjev-fast access log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __call__(self, exchange: Exchange) -> None:
        with self._changed:
            if len(self._lines) >= _WAITING:
                self._dropped += 1
                return
            self._lines.append(_line(exchange))
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, and close the file. Later exchanges are not logged."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._file.close()

    def _write(self) -> None:
        closed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                lines, self._lines = self._lines, []
                dropped, self._dropped = self._dropped, 0
                closed = self._closed
            if dropped:
                lines.append(json.dumps({"dropped": dropped}))
            if lines:
                # One write; what goes wrong with it is printed to stderr.
                self._file.emit(logging.makeLogRecord({"msg": "\n".join(lines)}))


def _line(exchange: Exchange) -> str:
    whole, milliseconds = divmod(int(exchange.started * 1000), 1000)
    return json.dumps(
        {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{milliseconds:03d}Z",
            "client": exchange.client,
            "method": exchange.method[:_LONGEST],
            "path": exchange.path[:_LONGEST],
            "status": exchange.status,
            "seconds": round(exchange.seconds, 6),
            "request_bytes": exchange.request_bytes,
            "response_bytes": exchange.response_bytes,
        }
    )
