"""The JevBench-shaped workload against running servers: latency pass by pass, and decisions between servers.

    python bench/run_workload.py http://127.0.0.1:8791
    python bench/run_workload.py fast=http://127.0.0.1:8791 fla=http://127.0.0.1:8792 --sample 40 --device cuda:0
    python bench/run_workload.py --start fast --start fla --sample 24 --profile 27b --device cuda:0
    python bench/run_workload.py --compare one.json other.json

231 tasks (bench/workloads/jevbench_shaped.py), one request at a time, each on a new connection, the way JevBench asks.
The first pass meets every shape for the first time; the second shows what is left of that. Several servers are asked in
turn, task by task, so that a slow spell of the machine meets all. Start a server with --max-length of at least 4096.
--start starts a server itself: fast, graph, torch, or fla (the original, where flash-linear-attention is there), with
--checkpoint or with random weights of --profile. With --sample servers after the first get an even part of the tasks:
an original that takes seconds a task fits in beside the others. Their rows of scope `pass` then hold the first
server's p50 over the same tasks (same_tasks_p50_ms) and how many times theirs is that (p50_ratio).
Writes results/<device>/jevbench_shaped.json: rows of scope `pass` and of scope `task` (http_tasks.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from harness import write
from http_tasks import (
    Client,
    by_label,
    compare,
    decided,
    figures,
    latency_table,
    read_results,
    render_comparison,
    results,
)
from tqdm import tqdm
from workloads.jevbench_shaped import Task, tasks

from openjev_fast_plugin.checkpoint import PROFILES
from openjev_fast_plugin.console import say
from openjev_fast_plugin.demo import DemoFailed, running


class Run:
    """What one server answered. mode: its name in the results. chosen: the tasks it is asked."""

    def __init__(self, mode: str, client: Client, server: dict[str, Any], chosen: list[Task]):
        self.mode = mode
        self._client, self._server = client, server
        self.chosen = {task.id for task in chosen}
        self._tasks: dict[str, dict[str, Any]] = {
            task.id: {
                "scope": "task",
                "mode": mode,
                "id": task.id,
                "tier": task.tier,
                "kind": task.kind,
                "ms": [],
                "forward_ms": [],
                "error": None,
            }
            for task in chosen
        }
        self.passes: list[dict[str, Any]] = []

    def ask(self, task: Task) -> None:
        """One task, once more; its row keeps the last answer, or the first error there was."""
        row = self._tasks[task.id]
        try:
            answer, milliseconds = self._client.ask(task.request)
            row |= decided(by_label(answer["answers"]["decision"]))
        except (OSError, ValueError, KeyError) as error:
            row["ms"].append(None)
            row["forward_ms"].append(None)
            row["error"] = row["error"] or f"{type(error).__name__}: {error}"
            return
        row["ms"].append(round(milliseconds, 3))
        row["input_tokens"] = answer["usage"]["input_tokens"]
        backend = answer.get("metadata", {}).get("backend", {})
        row["rows_computed"] = backend.get("rows_computed")
        row["forward_ms"].append(backend.get("forward_ms"))

    def end_pass(self) -> None:
        """Add up the pass that is over."""
        times = [row["ms"][-1] for row in self._tasks.values()]
        good = [each for each in times if each is not None]
        last = [(row["ms"][-1], row["forward_ms"][-1]) for row in self._tasks.values()]
        overhead = [waited - forward for waited, forward in last if forward is not None]
        self.passes.append(
            {
                "scope": "pass",
                "mode": self.mode,
                "pass": len(self.passes) + 1,
                "tasks": len(times),
                "errors": len(times) - len(good),
                **figures(good),
                # What a client waited beyond the forward; null where the server does not say how long that took.
                "overhead_p50_ms": round(statistics.median(overhead), 3) if overhead else None,
                "server": self._server,
            }
        )

    def hold_against(self, first: Run) -> None:
        """Add to every pass the other server's median over the tasks that both answered in it, and the ratio to it."""
        for index, row in enumerate(self.passes):
            pairs = [
                (task["ms"][index], first._tasks[name]["ms"][index]) for name, task in self._tasks.items()
            ]
            both = [pair for pair in pairs if None not in pair]
            ours, theirs = (
                (statistics.median(times) for times in zip(*both, strict=True)) if both else (None, None)
            )
            row["same_tasks_p50_ms"] = theirs
            row["p50_ratio"] = None if ours is None or theirs is None else round(ours / theirs, 2)

    def rows(self) -> list[dict[str, Any]]:
        return [*self.passes, *self._tasks.values()]


def evenly(chosen: list[Task], count: int | None) -> list[Task]:
    """So many tasks from the shortest request to the longest, in their order; all of them for None."""
    if count is None or count >= len(chosen):
        return chosen
    by_size = sorted(chosen, key=lambda task: len(json.dumps(task.request)))
    steps = max(count - 1, 1)
    kept = {by_size[round(index * (len(by_size) - 1) / steps)].id for index in range(count)}
    return [task for task in chosen if task.id in kept]


def run(
    endpoints: list[str], count: int | None, sample: int | None, passes: int, keep: bool, seed: int
) -> list[dict[str, Any]]:
    """Rows of every server. endpoints: URL or NAME=URL. ValueError or OSError where one cannot be asked at all."""
    chosen = evenly(tasks(seed), count)
    runs: list[Run] = []
    for index, endpoint in enumerate(endpoints):
        name, _, url = endpoint.rpartition("=")
        client = Client(url, keep)
        try:
            server = client.health()
        except (OSError, ValueError) as error:
            raise ValueError(f"no server answers at {url}: {error}") from error
        mode = name or server.get("backend", {}).get("name", "torch")
        if any(other.mode == mode for other in runs):
            raise ValueError(f"two servers are named {mode!r}: give them names, such as one={url}")
        runs.append(Run(mode, client, server, evenly(chosen, sample) if index else chosen))
    for number in range(passes):
        for task in tqdm(chosen, f"pass {number + 1} of {passes}", delay=2):
            for each in runs:
                if task.id in each.chosen:
                    each.ask(task)
        for each in runs:
            each.end_pass()
    first = results("this run", runs[0].rows())
    for each in runs[1:]:
        each.hold_against(runs[0])
        found = compare(first, results("this run", each.rows()))
        for row in each.passes:
            row["changed_decisions"] = len(found["changed"])
            row["largest_probability_difference"] = found["largest_probability_difference"]
    return [row for each in runs for row in each.rows()]


def started(stack: ExitStack, mode: str, args: argparse.Namespace) -> str:
    """NAME=URL of a server of this mode, running until the stack closes. ValueError for a mode it would not be."""
    cuda, fla = torch.device(args.device).type == "cuda", find_spec("fla") is not None
    if mode == "fla" and not (cuda and fla):
        raise ValueError("--start fla needs a GPU as --device and flash-linear-attention beside this Python")
    if mode == "torch" and cuda and fla:
        raise ValueError("--start torch: the original runs flash-linear-attention here, say --start fla")
    model = ["-m", "jev.server", "--checkpoint", str(args.checkpoint)]
    if args.checkpoint is None:
        model = [str(Path(__file__).with_name("random_server.py")), "--profile", args.profile]
    backend = "torch" if mode == "fla" else mode
    arguments = [*model, "--device", args.device, "--backend", backend]
    return f"{mode}={stack.enter_context(running(arguments, f'the server of mode {mode}')).url}"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def main(argv: list[str] | None = None) -> int:
    """0 every task was answered, 1 some were not, 2 the command line or a server cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("endpoint", nargs="*", metavar="[NAME=]URL", help="running servers")
    parser.add_argument(
        "--start",
        action="append",
        choices=("fast", "graph", "fla", "torch"),
        help="start a server; repeat for several, the first is the one that others are held against",
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="a checkpoint package for --start")
    parser.add_argument(
        "--profile",
        choices=sorted(PROFILES),
        help="random weights of these shapes for --start, drawn on the device",
    )
    parser.add_argument(
        "--tasks", type=_positive, help="so many tasks, evenly over their sizes (default: all)"
    )
    parser.add_argument("--sample", type=_positive, help="so many tasks for the servers after the first")
    parser.add_argument("--passes", type=_positive, default=2, help="rounds over the tasks (default: 2)")
    parser.add_argument(
        "--keep-alive", action="store_true", help="one connection a server (default: one a task)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks (default: 0)")
    parser.add_argument("--device", default="cpu", help="what the servers compute on (default: cpu)")
    parser.add_argument("--out", type=Path, help="the results file")
    parser.add_argument(
        "--compare", nargs=2, metavar="FILE[:MODE]", help="two results files, task by task; asks no server"
    )
    args = parser.parse_args(argv)
    if [bool(args.endpoint), bool(args.start), bool(args.compare)].count(True) != 1:
        parser.error("give the URL of a server, or --start, or --compare with two results files")
    if bool(args.start) != (bool(args.checkpoint) != bool(args.profile)):
        parser.error("--start takes one of --checkpoint and --profile")
    try:
        if args.compare:
            print(render_comparison(*map(read_results, args.compare)))
            return 0
        with ExitStack() as stack:
            endpoints = args.endpoint or [started(stack, mode, args) for mode in args.start]
            rows = run(endpoints, args.tasks, args.sample, args.passes, args.keep_alive, args.seed)
    except (DemoFailed, OSError, ValueError) as error:
        print(f"run_workload: {error}", file=sys.stderr)
        return 2
    passes = [row for row in rows if row["scope"] == "pass"]
    print(latency_table(passes))
    for row in passes:
        if row["pass"] == args.passes and "changed_decisions" in row:
            print(
                f"{row['mode']}: {row['changed_decisions']} of {row['tasks']} decisions are not {rows[0]['mode']}'s; "
                f"p50 {row['p50_ratio']} times {rows[0]['mode']}'s on the same tasks"
            )
    failed = [row for row in rows if row["scope"] == "task" and row["error"]]
    for row in failed[:5]:
        say(f"{row['mode']}, {row['id']}: {row['error']}")
    say(f"wrote {write(torch.device(args.device), 'jevbench_shaped', rows, args.out)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
