"""Closed-loop HTTP load: each client sends its next request when it has read the answer to the last."""

from __future__ import annotations

import itertools
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Level:
    """What one number of clients gave: seconds of each good answer, how many others, seconds it all took.

    answers: bodies of the good ones, in the order of `latencies`, where they are kept.
    """

    latencies: list[float] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    errors: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, float | int | None]:
        """The figures of a results row; percentiles of good answers, None without any."""
        percentiles = dict.fromkeys((50, 95, 99))
        if len(self.latencies) > 1:
            cuts = statistics.quantiles(self.latencies, n=100, method="inclusive")
            percentiles = {percent: round(1e3 * cuts[percent - 1], 3) for percent in percentiles}
        return {
            "requests": len(self.latencies),
            "errors": self.errors,
            "rps": round(len(self.latencies) / self.seconds, 2),
            **{f"p{percent}_ms": value for percent, value in percentiles.items()},
        }


class Client:
    """One connection to a server, kept open as long as the server keeps it."""

    def __init__(self, url: str):
        address = urlsplit(url)
        self._address = (address.hostname, address.port)
        self._head = (
            f"POST /v1/systemone HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            "Content-Length: %d\r\n\r\n"
        )
        self._socket: socket.socket | None = None
        self._left = b""

    def ask(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer; OSError or ValueError where there is none."""
        if self._socket is None:
            self._left = b""
            self._socket = socket.create_connection(self._address, timeout=600)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._socket.sendall((self._head % len(body)).encode() + body)
            head = self._read_until(b"\r\n\r\n").lower()
            lines = dict(line.split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
            answer = self._read(int(lines[b"content-length"]))
        except BaseException:
            self.close()
            raise
        kept = head.startswith(b"http/1.1") and lines.get(b"connection", b"").strip() != b"close"
        if not kept:
            self.close()
        return int(head.split(b" ", 2)[1]), answer

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _receive(self) -> bytes:
        assert self._socket is not None
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed the connection before its answer ended")
        return data

    def _read_until(self, mark: bytes) -> bytes:
        while mark not in self._left:
            self._left += self._receive()
        found, _, self._left = self._left.partition(mark)
        return found

    def _read(self, length: int) -> bytes:
        while len(self._left) < length:
            self._left += self._receive()
        found, self._left = self._left[:length], self._left[length:]
        return found


def run(url: str, bodies: Sequence[bytes], clients: int, seconds: float, keep: bool = False) -> Level:
    """Ask for `seconds` with so many clients, one thread each; the bodies in turn, over all clients.

    keep: the answers too; nobody reads them before the end, so that reading delays no request.
    """
    level, lock = Level(), threading.Lock()
    order = itertools.cycle(bodies)
    go = threading.Barrier(clients + 1)

    def ask() -> None:
        client, latencies, answers, errors = Client(url), [], [], 0
        go.wait()
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            with lock:
                body = next(order)
            try:
                status, answer = client.ask(body)
            except (OSError, ValueError, KeyError):
                status = 0
            if status == 200:
                latencies.append(time.perf_counter() - start)
                if keep:
                    answers.append(answer)
            else:
                errors += 1
        client.close()
        with lock:
            level.latencies += latencies
            level.answers += answers
            level.errors += errors

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    go.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    level.seconds = time.perf_counter() - start
    return level
