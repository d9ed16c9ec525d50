"""Real servers for tests, started side by side, and requests to them down to the raw bytes."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hosts import environment, serving

PYTHON = Path(sys.executable)
# Where `jev` was found, for interpreters it is not installed in.
JEV = (Path(find_spec("jev").origin).parents[1],)
JSON = {"Content-Type": "application/json"}
# Processes side by side that each take every core spend their time waiting for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Reply:
    """status: 0 when the connection ended without an answer. headers: by their names in lower case."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> Any:
        return json.loads(self.body)


class Wire:
    """One TCP connection to a server, byte by byte."""

    def __init__(self, url: str, timeout: float = 20) -> None:
        address = urlsplit(url)
        self.socket = socket.create_connection((address.hostname, address.port), timeout)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def post(self, body: bytes, *headers: str, path: str = "/v1/systemone") -> Reply:
        self.send(request(body, *headers, path=path))
        return self.reply()

    def get(self, path: str) -> Reply:
        self.send(f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
        return self.reply()

    def reply(self) -> Reply:
        """The next response; status 0 where the server closes or resets the connection instead."""
        try:
            line = self._file.readline()
            if not line:
                return Reply(0)
            headers = {name.lower(): value for name, value in http.client.parse_headers(self._file).items()}
            return Reply(
                int(line.split()[1]), self._file.read(int(headers.get("content-length", 0))), headers
            )
        except ConnectionError:
            return Reply(0)

    def closed(self) -> bool:
        """Whether nothing more comes: waits for the server to close."""
        try:
            return self._file.read(1) == b""
        except ConnectionError:
            return True


def request(body: bytes, *headers: str, path: str = "/v1/systemone", length: object = None) -> bytes:
    """The bytes of a POST over HTTP/1.1. length: of its Content-Length, False for none."""
    length = len(body) if length is None else length
    fields = ["Host: test", "Content-Type: application/json", *headers]
    if length is not False:
        fields.append(f"Content-Length: {length}")
    return "\r\n".join([f"POST {path} HTTP/1.1", *fields, "", ""]).encode() + body


class Server:
    """A running server, by its URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._address = urlsplit(url)

    def send(
        self,
        body: bytes,
        *,
        path: str = "/v1/systemone",
        headers: dict[str, str] | None = None,
        length: int | None = None,
    ) -> Reply:
        """POST the bytes as they are; length: a Content-Length other than theirs, nothing follows them."""
        connection = http.client.HTTPConnection(self._address.hostname, self._address.port, timeout=120)
        try:
            connection.putrequest("POST", path)
            for name, value in (JSON if headers is None else headers).items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body) if length is None else length))
            try:
                connection.endheaders(body)
                if length is not None:
                    connection.sock.shutdown(socket.SHUT_WR)
            except ConnectionError:
                # Answered and closed before it had read everything: the answer may still be there.
                pass
            try:
                response = connection.getresponse()
                return Reply(response.status, response.read())
            except (ConnectionError, http.client.HTTPException):
                return Reply(0)
        finally:
            connection.close()

    def post(self, request: Any, **options: Any) -> Reply:
        return self.send(json.dumps(request).encode(), **options)

    def ask(self, request: dict[str, Any], **options: Any) -> dict[str, Any]:
        """The response to a request that must be answered."""
        reply = self.post(request, **options)
        assert reply.status == 200, reply
        return reply.content

    def get(self, path: str) -> Reply:
        connection = http.client.HTTPConnection(self._address.hostname, self._address.port, timeout=120)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return Reply(response.status, response.read())
        finally:
            connection.close()


@dataclass(frozen=True)
class Start:
    """How to start one server: what follows `python`, and its environment variables."""

    arguments: tuple[object, ...]
    variables: tuple[tuple[str, str], ...] = ()


@contextmanager
def process(start: Start) -> Iterator[tuple[subprocess.Popen, Server]]:
    """A server process to send signals to, and the server; killed in the end if it still runs."""
    variables = environment(*JEV, **ONE_THREAD, **dict(start.variables))
    command = [PYTHON, *map(str, start.arguments), "--device", "cpu", "--port", "0"]
    # Not the checkout, whose folders are not the package.
    started = subprocess.Popen(
        command, env=variables, cwd=PYTHON.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield started, Server(json.loads(started.stdout.readline())["url"])
    finally:
        started.kill()
        started.communicate()


@contextmanager
def running(*starts: Start) -> Iterator[list[Server]]:
    """The servers, started at the same time, each on one core and a port of its own."""
    with ExitStack() as stack:
        processes = [
            serving(
                PYTHON,
                *start.arguments,
                "--device",
                "cpu",
                "--port",
                "0",
                path=JEV,
                **{**ONE_THREAD, **dict(start.variables)},
            )
            for start in starts
        ]
        with ThreadPoolExecutor() as pool:
            urls = list(pool.map(stack.enter_context, processes))
        yield [Server(url) for url in urls]
