"""Asks a server for minutes, requests of mixed sizes from several clients, and fails if its memory goes on growing.

    python bench/soak.py                                              # small profile, CPU, 10 minutes
    python bench/soak.py --device cuda:0 --profile 27b --minutes 5

Starts one server in its own process, with random weights of the profile (`random_server.py`) or with --checkpoint.
After every few seconds of load, between two bursts, it reads the server's resident memory, and from /metrics the
device's and what its CUDA graphs hold. The first part warms up: allocators, graphs and thread pools have a size that
they come to. Of the rest, the median of the last third of the readings may be above that of the first third by no more
than the bounds; the device's without its graphs, for which the server has a bound of its own. Exit status 1 where it
is, or where any request was not answered. Writes results/<device>/soak.json: one row, with every reading in `samples`.

On a CPU PyTorch and oneDNN each keep the compiled bfloat16 matmuls of the last 1,024 shapes: about a GiB, which these
requests take long to fill and which hides all else. The server is started with 64 of each; --own-caches leaves them as
they are.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import load
import torch
from harness import write
from prometheus_client.parser import text_string_to_metric_families
from serve_bench import bodies, longest_prompt, server_of

from openjev_fast_plugin.checkpoint import PROFILES
from openjev_fast_plugin.console import say, step
from openjev_fast_plugin.demo import running

_MIB = 1 << 20
# Shapes whose compiled matmuls are kept on a CPU: by PyTorch, by oneDNN.
_CACHES = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
_GAUGES = {"device_mib": "openjev_fast_device_memory_used_bytes", "graphs_mib": "openjev_fast_graph_bytes"}


def resident_mib(pid: int) -> float:
    """Resident memory of a process of this machine (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def device_mib(url: str) -> dict[str, float | None]:
    """Memory of the device and of its CUDA graphs, as a server's /metrics says; None without a GPU or such a route."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            families = text_string_to_metric_families(response.read().decode())
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return dict.fromkeys(_GAUGES)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return {name: values[metric] / _MIB if metric in values else None for name, metric in _GAUGES.items()}


def growth(samples: list[dict[str, Any]], of: str) -> float | None:
    """MiB between the medians of the first and the last third of the readings; None where there are none of it."""
    readings = [sample[of] for sample in samples if sample[of] is not None]
    third = len(readings) // 3
    if not third:
        return None
    return round(statistics.median(readings[-third:]) - statistics.median(readings[:third]), 1)


def judged(samples: list[dict[str, Any]], warm_up: float, bounds: dict[str, float]) -> dict[str, Any]:
    """{grown, failures}: growth in the samples after `warm_up` seconds of what has a bound; in words, what is wrong."""
    after = [sample for sample in samples if sample["seconds"] > warm_up]
    failures = []
    grown = {name: growth(after, name) for name in bounds}
    if grown["resident_mib"] is None:
        failures.append(f"{len(after)} readings after the warm-up are too few to tell: let it run longer")
    for name, most in bounds.items():
        if (found := grown[name]) is not None and found > most:
            failures.append(f"{name} grew by {found} after the warm-up, {most:g} are allowed")
    requests, errors = (sum(sample[key] for sample in samples) for key in ("requests", "errors"))
    if errors or not requests:
        failures.append(f"{errors} requests were not answered, {requests} were")
    return {"grown": grown, "failures": failures}


def soak(args: argparse.Namespace, url: str, pid: int) -> list[dict[str, Any]]:
    """A sample after every burst of load."""
    with step("making the requests"):
        requests = bodies("mixed", longest_prompt(url))
    start, found = time.monotonic(), []
    while (passed := time.monotonic() - start) < 60 * args.minutes:
        # Another order each time: other requests share their forwards.
        random.Random(len(found)).shuffle(requests)
        level = load.run(url, requests, args.clients, args.every)
        memory = device_mib(url)
        found.append(
            {
                "seconds": round(time.monotonic() - start, 1),
                "requests": len(level.latencies),
                "errors": level.errors,
                "p99_ms": level.figures()["p99_ms"],
                "resident_mib": round(resident_mib(pid), 1),
                # What graphs hold comes and goes with the shapes asked for, within a bound of the server's.
                "device_mib": None
                if memory["device_mib"] is None
                else round(memory["device_mib"] - (memory["graphs_mib"] or 0.0), 1),
                "graphs_mib": None if memory["graphs_mib"] is None else round(memory["graphs_mib"], 1),
            }
        )
        if int(passed // 30) != int((passed + args.every) // 30):
            say(str(found[-1]))
    return found


def main(argv: list[str] | None = None) -> int:
    """0 flat and everything answered, 1 not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--profile", choices=sorted(PROFILES), default="small", help="model shapes (default: small)"
    )
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument("--mode", default="fast", help="a backend (default: fast)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of load (default: 10)")
    parser.add_argument("--warm-up", type=float, default=0.3, help="share of it that warms up (default: 0.3)")
    parser.add_argument("--clients", type=int, default=8, help="default: 8")
    parser.add_argument("--every", type=float, default=5.0, help="seconds of a burst (default: 5)")
    parser.add_argument("--most-mib", type=float, default=64.0, help="host memory may grow (default: 64)")
    parser.add_argument(
        "--most-device-mib", type=float, default=256.0, help="device memory may grow (default: 256)"
    )
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint package (default: random weights)")
    parser.add_argument("--warmup", metavar="ROWS|FILE", help="--warmup of the server of mode fast")
    parser.add_argument(
        "--own-caches",
        action="store_true",
        help="on a CPU leave the caches of matmuls at their default sizes",
    )
    parser.add_argument("--out", type=Path, help="the results file")
    args = parser.parse_args(argv)
    # The server inherits it; nothing has computed here.
    variables = _CACHES if torch.device(args.device).type == "cpu" and not args.own_caches else {}
    os.environ |= variables
    with running(server_of(args.mode, args), f"the server of mode {args.mode}") as server:
        samples = soak(args, server.url, server.pid)
    bounds = {"resident_mib": args.most_mib, "device_mib": args.most_device_mib}
    found = judged(samples, 60 * args.minutes * args.warm_up, bounds)
    row = {
        "profile": args.profile if args.checkpoint is None else str(args.checkpoint),
        "mode": args.mode,
        "clients": args.clients,
        "minutes": args.minutes,
        "requests": sum(sample["requests"] for sample in samples),
        "errors": sum(sample["errors"] for sample in samples),
        "environment": variables,
        "bounds": bounds,
        **found,
        "samples": samples,
    }
    print({key: value for key, value in row.items() if key != "samples"})
    say(f"wrote {write(torch.device(args.device), 'soak', [row], args.out)}")
    for failure in found["failures"]:
        say(f"soak: {failure}")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
