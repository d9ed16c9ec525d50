"""What every benchmark shares: the interleaved timer, the record of where it ran, and the results file."""

from __future__ import annotations

import json
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().with_name("results")


def interleaved(
    variants: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    warmups: int,
    synchronize: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, list[float]]:
    """Milliseconds of each variant, measured in turn so that a slow spell of the machine meets them all.

    variants: name to a call that does the work. repeats: timed rounds, each of one call per variant.
    warmups: untimed rounds first. synchronize: waits for the device before and after a call.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(warmups + repeats):
        for name, call in variants.items():
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            if round_ >= warmups:
                times[name].append(1e3 * (time.perf_counter() - start))
        timed = round_ + 1 - warmups
        progress(f"warm-up {round_ + 1} of {warmups}" if timed <= 0 else f"round {timed} of {repeats}")
    return times


def summary(times: list[float]) -> dict[str, float]:
    """The three figures a results row holds, in milliseconds to the microsecond."""
    return {
        "p50_ms": round(statistics.median(times), 3),
        "min_ms": round(min(times), 3),
        "max_ms": round(max(times), 3),
    }


def row(**values: Any) -> dict[str, Any]:
    """A results row; figures that a device or mode does not have are null."""
    return {**dict.fromkeys(("kernels", "busy_ms", "floor_ms", "peak_gib")), **values}


def device_slug(device: torch.device) -> str:
    """The results folder of a device: `cpu`, or its name such as `nvidia-h200`."""
    if device.type == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def meta(device: torch.device) -> dict[str, Any]:
    """Where and with what a run was made."""
    return {
        "device": _device_name(device),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "fla": _version("fla-core"),
        "date": date.today().isoformat(),
        "commit": _output("git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"),
        "command": shlex.join(["python", *sys.argv]),
    }


def write(device: torch.device, bench: str, rows: list[dict[str, Any]], path: Path | None = None) -> Path:
    """Write all rows of this run to `path`, by default `results/<device>/<bench>.json`; an earlier file is replaced."""
    path = path or RESULTS / device_slug(device) / f"{bench}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": meta(device), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return path


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
