"""Throughput and latency of real servers, original and fast, as clients see them.

    python bench/serve_bench.py                                   # small profile, CPU
    python bench/serve_bench.py --device cuda:0 --profile 27b

Starts one server a mode, each in its own process with random weights of the profile (`random_server.py`) or with
--checkpoint, and asks them from this one: 1 to 32 clients, each sending its next request when it has its answer. A
level of one mode is followed by the same level of the next, so that a slow spell of the machine meets all. Prints a
table and writes results/<device>/serve.json.

Cases: noul_70, one yes-or-no question of 70 tokens, each about a state of its own; noul_70_one_state, different
questions about one state; mixed, of a hundred requests 60 noul_70, 25 the example (7 prompts), 10 a choice of 8 over
250 tokens and 5 a yes-or-no question of 1,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import load
import torch
from harness import write
from workload import choice, example, nouls

from openjev_fast_plugin.checkpoint import PROFILES
from openjev_fast_plugin.console import say, step
from openjev_fast_plugin.demo import running

CASES = ("noul_70", "noul_70_one_state", "mixed")
MODES = ("torch", "fast")
CLIENTS = (1, 2, 4, 8, 16, 32)
# Distinct requests of a case, asked in turn: more than there are clients.
DISTINCT = 200


def bodies(case: str, tokens: Callable[[dict[str, Any]], int]) -> list[bytes]:
    """The requests of a case. tokens: of the longest prompt of a request, by the server's tokenizer."""
    if case == "noul_70":
        requests = nouls(70, tokens, [(seed, 0) for seed in range(DISTINCT)])
    elif case == "noul_70_one_state":
        requests = nouls(70, tokens, [(0, seed) for seed in range(DISTINCT)])
    else:
        requests = nouls(70, tokens, [(seed, seed) for seed in range(60)])
        requests += nouls(1000, tokens, [(seed, seed) for seed in range(5)])
        for kind, count in ((example(), 25), (choice(8, 250, tokens), 10)):
            requests += [{**kind, "state": [kind["state"], f"number {index}"]} for index in range(count)]
        random.Random(0).shuffle(requests)
    return [json.dumps(request).encode() for request in requests]


def longest_prompt(url: str) -> Callable[[dict[str, Any]], int]:
    """Asks a server how long a request's prompts are: exact for one candidate, else their mean."""
    client = load.Client(url)

    def tokens(request: dict[str, Any]) -> int:
        status, answer = client.ask(json.dumps(request).encode())
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {answer.decode(errors='replace')}")
        content = json.loads(answer)
        return content["usage"]["input_tokens"] // content["metadata"]["candidate_sequences"]

    return tokens


def rows(args: argparse.Namespace, urls: dict[str, str]) -> list[dict[str, Any]]:
    """A row for every pass, case, number of clients and mode."""
    tokens = longest_prompt(urls.get("fast") or next(iter(urls.values())))
    found = []
    with step("making the requests"):
        asked = {case: bodies(case, tokens) for case in args.case or CASES}
    for case, requests in asked.items():
        for mode, url in urls.items():
            with step(f"warming {mode} up for {case}"):
                load.run(url, requests, max(args.clients), args.warm_up)
    for number in range(1, args.passes + 1):
        for case, requests in asked.items():
            for clients in args.clients:
                for mode, url in urls.items():
                    level = load.run(url, requests, clients, args.seconds)
                    found.append(
                        {
                            "profile": args.profile,
                            "case": case,
                            "mode": mode,
                            "clients": clients,
                            **level.figures(),
                            "pass": number,
                        }
                    )
                    say(render(found[-1:]).splitlines()[-1])
    return found


def render(found: list[dict[str, Any]]) -> str:
    """A table of rows."""
    lines = [
        f"{'case':<20}{'mode':<7}{'pass':>5}{'clients':>8}{'requests':>9}{'errors':>7}{'rps':>9}"
        f"{'p50 ms':>10}{'p95 ms':>10}{'p99 ms':>10}"
    ]
    for row in found:
        times = "".join(
            f"{'' if row[key] is None else format(row[key], '.2f'):>10}"
            for key in ("p50_ms", "p95_ms", "p99_ms")
        )
        lines.append(
            f"{row['case']:<20}{row['mode']:<7}{row['pass']:>5}{row['clients']:>8}{row['requests']:>9}"
            f"{row['errors']:>7}{row['rps']:>9.2f}{times}"
        )
    return "\n".join(lines)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--profile", choices=sorted(PROFILES), default="small", help="model shapes (default: small)"
    )
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument(
        "--mode", action="append", help="a backend; repeat for several (default: torch and fast)"
    )
    parser.add_argument("--case", action="append", choices=CASES, help="repeat for several (default: all)")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="default: 1 2 4 8 16 32")
    parser.add_argument("--seconds", type=float, default=5.0, help="of every level (default: 5)")
    parser.add_argument(
        "--warm-up", type=float, default=5.0, help="seconds a case and mode first (default: 5)"
    )
    parser.add_argument("--passes", type=int, default=2, help="over everything (default: 2)")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint package (default: random weights)")
    parser.add_argument(
        "--server",
        action="append",
        metavar="MODE=URL",
        help="measure a server that runs already, under this mode's name; starts none, repeat for several",
    )
    args = parser.parse_args()
    model = ["-m", "jev.server", "--checkpoint", str(args.checkpoint)]
    if args.checkpoint is None:
        model = [str(Path(__file__).with_name("random_server.py")), "--profile", args.profile]
    with ExitStack() as stack:
        urls = dict(each.split("=", 1) for each in args.server or ())
        for mode in [] if urls else args.mode or MODES:
            arguments = [*model, "--device", args.device, "--backend", mode]
            urls[mode] = stack.enter_context(running(arguments, f"the server of mode {mode}")).url
        found = rows(args, urls)
    print(render(found))
    say(f"wrote {write(torch.device(args.device), 'serve', found)}")


if __name__ == "__main__":
    main()
