"""`openjev-fast demo`: the real server, one real request, and what the plugin changed about it."""

from __future__ import annotations

import json
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openjev_fast_plugin.checkpoint import make_checkpoint
from openjev_fast_plugin.console import say, step

EXAMPLE = Path(__file__).with_name("example_request.json")
_START_SECONDS = 600.0
_STOP_SECONDS = 30.0
_REQUEST_SECONDS = 600.0


class DemoFailed(RuntimeError):
    """The demo could not be shown; the message says what failed and what to do."""


class Server:
    """A running `python -m jev.server` of ours."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any]):
        self._process = process
        self.pid = process.pid
        self.url: str = ready["url"]

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """The answer to one request and the seconds it took, connection included."""
        body = json.dumps(request).encode()
        call = urllib.request.Request(
            f"{self.url}/v1/systemone", data=body, headers={"Content-Type": "application/json"}
        )
        start = time.perf_counter()
        with urllib.request.urlopen(call, timeout=_REQUEST_SECONDS) as response:
            answer = json.load(response)
        return answer, time.perf_counter() - start

    def stop(self) -> None:
        """Interrupt the server as Ctrl-C does and wait until it is gone."""
        self._process.send_signal(signal.SIGINT)
        try:
            code = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoFailed(
                f"the server did not stop within {_STOP_SECONDS:.0f} s of an interrupt"
            ) from None
        if code != 0:
            raise DemoFailed(f"the server did not stop cleanly: exit code {code}")


@contextmanager
def interruptible_children() -> Iterator[None]:
    """Children started inside can be interrupted, even where this process ignores SIGINT (`command &` in a script).

    A child inherits an ignored SIGINT, and then Python installs no handler for it. Main thread only.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def running_server(checkpoint: Path, backend: str, device: str) -> Iterator[Server]:
    """Start `python -m jev.server --backend BACKEND` on a free port, wait until it is ready, stop it at the end.

    Raises DemoFailed, with the server's own words, when it exits or is not ready in ten minutes.
    """
    arguments = [
        "-m",
        "jev.server",
        "--checkpoint",
        str(checkpoint),
        "--backend",
        backend,
        "--device",
        device,
    ]
    with running(arguments, f"the server with --backend {backend}") as server:
        yield server


@contextmanager
def running(arguments: list[str], name: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A server started as `python ARGUMENTS` on a free port; see `running_server`.

    environment: variables it gets instead of this process's.
    """
    arguments = [*arguments, "--host", "127.0.0.1", "--port", "0"]
    say("$ " + " ".join(["python", *arguments]))
    with tempfile.TemporaryFile("w+") as errors:
        with interruptible_children():
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        try:
            with step(f"starting {name}"):
                line = _first_line(process)
            try:
                server = Server(process, json.loads(line))
            except ValueError:
                process.wait(_STOP_SECONDS)
                errors.seek(0)
                raise DemoFailed(
                    f"{name} did not start (exit code {process.returncode}):\n{line}{errors.read().strip()}"
                ) from None
            yield server
            server.stop()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _first_line(process: subprocess.Popen[str]) -> str:
    """The line a server prints when it is ready; empty when it ended without one."""
    output = process.stdout
    assert output is not None
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: lines.put(output.readline()), daemon=True).start()
    try:
        return lines.get(timeout=_START_SECONDS)
    except queue.Empty:
        process.kill()
        raise DemoFailed(f"the server was not ready after {_START_SECONDS:.0f} s") from None


def run(checkpoint: Path | None, device: str | None, repeats: int) -> dict[str, Any]:
    """Serve a checkpoint with the original and with the fast backend, ask both, and compare.

    checkpoint: a checkpoint package, or None for a tiny one made on the spot.
    device: a torch device, or None for the first GPU where there is one and the CPU elsewhere.
    repeats: timed requests to each server, alternating, after one that warms up.

    Returns {answers, rows_asked, rows_computed, largest_probability_difference, original_ms, fast_ms, device}.
    """
    if find_spec("jev") is None:
        raise DemoFailed(
            "Open-Jev (module jev) is not installed here: install it, or from a checkout of this project its "
            "stand-in with `pip install ./tests/open_jev`"
        )
    request = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    with ExitStack() as stack:
        if checkpoint is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="openjev-fast-demo-"))
            with step("making a tiny random-weight checkpoint"):
                checkpoint = make_checkpoint("tiny", Path(folder) / "tiny")
        if device is None:
            import torch

            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        original = stack.enter_context(running_server(checkpoint, "torch", device))
        fast = stack.enter_context(running_server(checkpoint, "fast", device))
        with step(f"asking both the example request {repeats + 1} times"):
            reference, answer = original.ask(request)[0], fast.ask(request)[0]
            times: dict[str, list[float]] = {"original": [], "fast": []}
            for _ in range(repeats):
                times["original"].append(original.ask(request)[1])
                times["fast"].append(fast.ask(request)[1])
    backend = answer["metadata"]["backend"]
    return {
        "answers": answer["answers"],
        "rows_asked": backend["rows_asked"],
        "rows_computed": backend["rows_computed"],
        "largest_probability_difference": largest_difference(reference["answers"], answer["answers"]),
        "original_ms": 1e3 * statistics.median(times["original"]),
        "fast_ms": 1e3 * statistics.median(times["fast"]),
        "device": device,
    }


def probabilities(answer: dict[str, Any]) -> dict[str, float]:
    """The probabilities of one typed answer by name; a noul's single one as `yes`."""
    return {"yes": answer["noul"]} if answer["type"] == "noul" else answer["probabilities"]


def largest_difference(reference: dict[str, Any], answers: dict[str, Any]) -> float:
    """Largest absolute difference of any probability between two sets of answers to one request."""
    return max(
        abs(p - probabilities(answers[name])[option])
        for name, answer in reference.items()
        for option, p in probabilities(answer).items()
    )


def render(result: dict[str, Any]) -> str:
    """The result of `run` for a person to read."""
    lines = []
    for name, answer in result["answers"].items():
        value = answer[answer["type"]]
        shown = value if isinstance(value, str) else f"{value:.4f}"
        options = "  ".join(f"{option} {p:.4f}" for option, p in probabilities(answer).items())
        lines.append(f"{name:<10} {answer['type']:<7} {shown:<10} {options}")
    asked, computed = result["rows_asked"], result["rows_computed"]
    original, fast = result["original_ms"], result["fast_ms"]
    lines += [
        "",
        f"rows                            {computed} computed for {asked} asked ({asked / computed:.2f} x fewer)",
        f"largest probability difference  {result['largest_probability_difference']:.6f} from the original forward",
        f"median latency                  {fast:.1f} ms with --backend fast, {original:.1f} ms original "
        f"({original / fast:.2f} x) on {result['device']}",
    ]
    return "\n".join(lines)
