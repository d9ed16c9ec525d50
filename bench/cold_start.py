"""What a start costs: from the process to ready, and the first answers of every shape.

    python bench/cold_start.py                                              # tiny checkpoint, CPU: a minute
    python bench/cold_start.py --profile 27b --device cuda:0 --mode fast --mode fla

Starts a server of every mode --starts times, once with all caches empty (a home folder of its own: compiled kernels,
tables of matmuls, Triton's cache) and then with what that start left there. On a CPU the package makes a checkpoint and
`python -m jev.server` serves it; on a GPU `random_server.py` draws the weights there, so that no disk is read. Every
server is asked each case --asks times on new connections: the first answer meets a new shape. Prints two tables and
writes results/<device>/cold_start.json:

    {scope: "start", profile, mode, caches: "empty" | "full", start, ready_s}
    {scope: "answer", profile, mode, caches, start, case, tokens, rows_computed, first_ms, second_ms, later_p50_ms}
"""

from __future__ import annotations

import argparse
import os
import site
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from harness import write
from http_tasks import Client
from workload import example, sized

from openjev_fast_plugin.checkpoint import PROFILES, make_checkpoint, train_tokenizer
from openjev_fast_plugin.console import say, step
from openjev_fast_plugin.demo import DemoFailed, running

_NOUL = {"type": "noul", "instructions": "Is the parcel lost?"}
_CHOICE = {
    "type": "choice",
    "instructions": "Which of these answers the customer best?",
    "criteria": {f"option {index}": f"answer number {index}" for index in range(8)},
}
# In the order they are asked.
CASES = {
    "noul_70": (_NOUL, 70),
    "example": (None, 0),
    "choice_8x250": (_CHOICE, 250),
    "noul_1000": (_NOUL, 1000),
}
# Tokens of a prompt beside its state, about.
_FRAME = 45


def request_of(case: str, tokenizer: Any) -> dict[str, Any]:
    """The request of a case, its longest prompt about as long as the name says."""
    question, tokens = CASES[case]
    if question is None:
        return example()
    return sized(question, tokens, lambda request: len(tokenizer(request["state"])["input_ids"]) + _FRAME)


def environment_of(home: Path) -> dict[str, str]:
    """This process's, with a home folder of its own, where all caches are; packages of the user stay importable."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR")
    }
    return {
        **kept,
        "HOME": str(home),
        "CUDA_CACHE_PATH": str(home / "nv"),
        "PYTHONUSERBASE": site.getuserbase(),
    }


def start_once(
    arguments: list[str], about: dict[str, Any], home: Path, requests: dict[str, dict[str, Any]], asks: int
) -> list[dict[str, Any]]:
    """Rows of one start: the start itself, and every case. about: what all of them hold."""
    found: list[dict[str, Any]] = []
    begun = time.perf_counter()
    name = f"{about['mode']}, caches {about['caches']}, start {about['start']}"
    with running(arguments, name, environment_of(home)) as server:
        found.append({"scope": "start", **about, "ready_s": round(time.perf_counter() - begun, 2)})
        client = Client(server.url)
        for case, request in requests.items():
            answers = [client.ask(request) for _ in range(asks)]
            times = [round(milliseconds, 3) for _, milliseconds in answers]
            last = answers[-1][0]
            found.append(
                {
                    "scope": "answer",
                    **about,
                    "case": case,
                    "tokens": last["usage"]["input_tokens"],
                    "rows_computed": last["metadata"].get("backend", {}).get("rows_computed"),
                    "first_ms": times[0],
                    "second_ms": times[1],
                    "later_p50_ms": round(statistics.median(times[2:]), 3),
                }
            )
    return found


def render(rows: list[dict[str, Any]]) -> str:
    """A table of starts and one of answers."""
    lines = [f"{'mode':<7}{'caches':<8}{'start':>6}{'ready s':>10}"]
    for row in rows:
        if row["scope"] == "start":
            lines.append(f"{row['mode']:<7}{row['caches']:<8}{row['start']:>6}{row['ready_s']:>10.2f}")
    lines += [
        "",
        f"{'case':<15}{'mode':<7}{'caches':<8}{'start':>6}{'first ms':>11}{'second ms':>11}{'later ms':>11}",
    ]
    for row in rows:
        if row["scope"] == "answer":
            times = "".join(f"{row[key]:>11.2f}" for key in ("first_ms", "second_ms", "later_p50_ms"))
            lines.append(f"{row['case']:<15}{row['mode']:<7}{row['caches']:<8}{row['start']:>6}{times}")
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--profile", choices=sorted(PROFILES), default="tiny", help="model shapes (default: tiny)")
    add("--checkpoint", type=Path, metavar="DIR", help="a checkpoint package instead of random weights")
    add("--device", default="cpu", help="torch device (default: cpu)")
    add(
        "--mode",
        action="append",
        choices=("fast", "graph", "fla", "torch"),
        help="repeat for several (default: fast)",
    )
    add("--starts", type=int, default=3, help="of every mode, the first with empty caches (default: 3)")
    add("--asks", type=int, default=8, help="of every case, at least 3 (default: 8)")
    add("--case", action="append", choices=tuple(CASES), help="repeat for several (default: all)")
    add("--out", type=Path, help="the results file")
    args = parser.parse_args(arguments)
    if args.starts < 1 or args.asks < 3:
        parser.error(f"--starts {args.starts} must be at least 1, --asks {args.asks} at least 3")
    fla = find_spec("fla") is not None and torch.device(args.device).type == "cuda"
    for mode in args.mode or ():
        if mode in ("fla", "torch") and (mode == "fla") != fla:
            parser.error(f"--mode {mode}: on {args.device} the original here is {'fla' if fla else 'torch'}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """0 all was measured, 1 a server did not start or answer."""
    args = parse(arguments)
    tokenizer = train_tokenizer(PROFILES[args.profile].vocab)
    requests = {case: request_of(case, tokenizer) for case in args.case or CASES}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="openjev-fast-cold-")))
        checkpoint = args.checkpoint
        if checkpoint is None and torch.device(args.device).type == "cpu":
            with step(f"making a random {args.profile} checkpoint"):
                checkpoint = make_checkpoint(args.profile, folder / "checkpoint")
        model = ["-m", "jev.server", "--checkpoint", str(checkpoint)]
        if checkpoint is None:
            model = [str(Path(__file__).with_name("random_server.py")), "--profile", args.profile]
        for mode in args.mode or ["fast"]:
            backend = "torch" if mode == "fla" else mode
            home = folder / f"home-{mode}"
            home.mkdir()
            for start in range(1, args.starts + 1):
                caches = "empty" if start == 1 else "full"
                about = {"profile": args.profile, "mode": mode, "caches": caches, "start": start}
                command = [*model, "--device", args.device, "--backend", backend]
                try:
                    rows += start_once(command, about, home, requests, args.asks)
                except (DemoFailed, OSError, ValueError) as error:
                    print(f"cold_start: {mode}, start {start}: {error}", file=sys.stderr)
                    return 1
    print(render(rows))
    say(f"wrote {write(torch.device(args.device), 'cold_start', rows, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
