"""JevBench's public tasks against a running server, by JevBench's own adapter and scorer, unmodified.

    git clone https://github.com/fstandhartinger/jevbench
    JEVBENCH_DIR=jevbench python bench/run_jevbench.py http://127.0.0.1:8791 open-jev out.json
    python bench/run_jevbench.py --compare one.json other.json

One task at a time: the adapter sends each on a connection of its own. Prints right answers by tier and type and the
latency distribution, and writes OUT (rows as in http_tasks.py), which --compare holds against another run task by task.
A run of the public tasks is no published JevBench result. Start the server with --max-length 16384.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import write
from http_tasks import Client, decided, figures, latency_table, read_results, render_comparison
from tqdm import tqdm

from openjev_fast_plugin.console import say

VARIABLE = "JEVBENCH_DIR"
TIERS = ("original", "easy", "hard")
_SECONDS = 300
# JevBench's own runner stops after as many failures in a row.
_FAILURES = 3


@dataclass(frozen=True)
class JevBench:
    """The parts of a checkout that are used. commit: what `git describe` says of it, None outside git."""

    load: Callable[[str], list[Any]]
    adapter: Callable[..., Any]
    score: Callable[..., dict[str, Any]]
    folder: Path
    commit: str | None

    @classmethod
    def find(cls, environment: str | None) -> JevBench:
        """The checkout that JEVBENCH_DIR names; ValueError, saying what to do, where there is none."""
        if not environment:
            raise ValueError(
                f"{VARIABLE} is not set: clone https://github.com/fstandhartinger/jevbench and set {VARIABLE} to the "
                "folder, or use bench/run_workload.py, which needs no JevBench"
            )
        folder = Path(environment).resolve()
        missing = [f"datasets/public/{tier}.jsonl" for tier in TIERS]
        missing = [name for name in ("jevbench/tasks.py", *missing) if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{VARIABLE}={environment} is no checkout of JevBench: {missing[0]} is not there"
            )
        sys.path.insert(0, str(folder))
        try:
            tasks, scoring, typesafe = (
                importlib.import_module(f"jevbench.{name}")
                for name in ("tasks", "scoring", "adapters.typesafe")
            )
        except ImportError as error:
            raise ValueError(f"JevBench in {folder} cannot be imported: {error}") from error
        if not Path(tasks.__file__ or "").resolve().is_relative_to(folder):
            raise ValueError(f"another JevBench, {tasks.__file__}, is imported before the one in {folder}")
        described = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty"], capture_output=True, text=True
        )
        commit = described.stdout.strip() or None
        return cls(tasks.load_jsonl, typesafe.TypeSafeAdapter, scoring.score_task, folder, commit)

    def tasks(self) -> list[tuple[str, Any]]:
        """Every public task with its tier."""
        return [
            (tier, task)
            for tier in TIERS
            for task in self.load(str(self.folder / "datasets" / "public" / f"{tier}.jsonl"))
        ]


def run(bench: JevBench, endpoint: str, model: str, passes: int) -> list[dict[str, Any]]:
    """Rows of one server; ValueError where it does not answer, or stops answering."""
    client = Client(endpoint)
    try:
        server = client.health()
    except OSError as error:
        raise ValueError(f"no server answers at {endpoint}: {error}") from error
    except ValueError:
        # Another implementation of the same interface.
        server = {"backend": {"name": "unknown"}}
    adapter = bench.adapter(endpoint=endpoint, model=model, key_env=None, timeout_s=_SECONDS)
    mode = server.get("backend", {}).get("name", "torch")
    every = bench.tasks()
    rows = [
        {
            "scope": "task",
            "mode": mode,
            "id": task.id,
            "tier": tier,
            "kind": task.question["type"],
            "family": task.family,
            "expected": str(task.expected),
            "ms": [],
            "error": None,
        }
        for tier, task in every
    ]
    totals = []
    for number in range(passes):
        failures = 0
        for (_, task), row in zip(tqdm(every, f"pass {number + 1} of {passes}", delay=2), rows, strict=True):
            start = time.perf_counter()
            result = adapter.run(task)
            milliseconds = 1e3 * (time.perf_counter() - start)
            _note(row, result, bench.score(result.probs, task) if result.ok else None, milliseconds)
            # A request that is refused is a wrong answer; the server is there.
            failures = 0 if result.ok or result.status == 422 else failures + 1
            if failures == _FAILURES:
                raise ValueError(f"{failures} tasks in a row failed; the last, {task.id}: {result.error}")
        good = [row["ms"][-1] for row in rows if row["ms"][-1] is not None]
        totals.append(
            {
                "scope": "pass",
                "mode": mode,
                "pass": number + 1,
                "tasks": len(rows),
                "errors": len(rows) - len(good),
                **figures(good),
                "model": model,
                "jevbench": bench.commit,
                "server": server,
            }
        )
    return [*totals, *rows]


def _note(row: dict[str, Any], result: Any, scored: dict[str, Any] | None, milliseconds: float) -> None:
    """scored: what JevBench's scorer says of an answer, None where there was none."""
    row["ms"].append(round(milliseconds, 3) if scored is not None else None)
    if scored is None:
        row |= {"correct": False, "valid": False, "error": row["error"] or str(result.error)}
        return
    row |= decided(dict(result.probs))
    # JevBench breaks ties by the label, and judges what is valid.
    row |= {
        "decision": scored.get("predicted"),
        "correct": bool(scored["correct"]),
        "valid": bool(scored["valid"]),
    }


def render(rows: list[dict[str, Any]]) -> str:
    """Right answers by tier and type, then latencies."""
    tasks = [row for row in rows if row["scope"] == "task"]
    kinds = list(dict.fromkeys(row["kind"] for row in tasks))
    lines = [f"{'right':<10}" + "".join(f"{kind:>14}" for kind in [*kinds, "all"])]
    for tier in [*dict.fromkeys(row["tier"] for row in tasks), "all"]:
        of_tier = [row for row in tasks if tier in (row["tier"], "all")]
        cells = [_share(row for row in of_tier if kind in (row["kind"], "all")) for kind in [*kinds, "all"]]
        lines.append(f"{tier:<10}" + "".join(f"{cell:>14}" for cell in cells))
    invalid = sum(not row["valid"] for row in tasks)
    return "\n".join(
        [*lines, f"{invalid} invalid", "", latency_table(r for r in rows if r["scope"] == "pass")]
    )


def _share(rows: Iterable[dict[str, Any]]) -> str:
    judged = [row["correct"] for row in rows]
    return f"{sum(judged)}/{len(judged)}" if judged else ""


def main(argv: list[str] | None = None) -> int:
    """0 every task was answered, 1 some were not, 2 the command line, JevBench or the server cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("endpoint", nargs="?", metavar="ENDPOINT", help="URL of a running server")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the model to ask for, such as open-jev")
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help="the results file to write")
    parser.add_argument("--passes", type=int, default=1, help="rounds over the tasks (default: 1)")
    parser.add_argument(
        "--device", default="cpu", help="what the server computes on, for the record (default: cpu)"
    )
    parser.add_argument(
        "--compare", nargs=2, metavar="FILE[:MODE]", help="two results files, task by task; asks no server"
    )
    args = parser.parse_args(argv)
    if bool(args.out) == bool(args.compare) or args.passes < 1:
        parser.error("give ENDPOINT MODEL OUT, or --compare with two results files; --passes is at least 1")
    try:
        if args.compare:
            print(render_comparison(*map(read_results, args.compare)))
            return 0
        rows = run(JevBench.find(os.environ.get(VARIABLE)), args.endpoint, args.model, args.passes)
    except ValueError as error:
        print(f"run_jevbench: {error}", file=sys.stderr)
        return 2
    print(render(rows))
    say(f"wrote {write(torch.device(args.device), 'jevbench', rows, args.out)}")
    return 1 if any(row["error"] for row in rows if row["scope"] == "task") else 0


if __name__ == "__main__":
    sys.exit(main())
