"""Throughput and latency of real servers, original and fast, as clients see them.

    python bench/serve_bench.py                                   # small profile, CPU
    python bench/serve_bench.py --device cuda:0 --profile 27b --seconds 2 --passes 1 --mode fast --mode fla:1,8

Starts one server a mode, each in its own process with random weights of the profile (`random_server.py`) or with
--checkpoint, and asks them from this one: 1 to 32 clients, each sending its next request when it has its answer. A
level of one mode is followed by the same level of the next, so that a slow spell of the machine meets all. Prints a
table and writes results/<device>/serve.json. Beside what the clients saw, a row has

  times_one_client   throughput over that of one client in the same mode, case and pass
  inference_p50_ms   what the server says of an answer: from the request's prompts to its scores, waiting included
  forward_p50_ms     of that, the forward alone (modes of the plugin that say so)
  overhead_p50_ms    what a client waited beyond its forward; with one client nobody else is in it
  forward_requests   requests that shared a request's forward, itself included, on average
  replayed           the share of forwards that were replays of a captured graph (on a GPU), counted per request

Modes: a backend's name, torch being the original without and fla with flash-linear-attention, kept being fast with
states kept from one request to the next (OPENJEV_FAST_PREFIX_BYTES=2GiB, OPENJEV_FAST_PREFIX_ROWS=32), waiting being
fast with a device that may stay free for those just answered (OPENJEV_FAST_WAIT_US=4000). After a colon stand the
numbers of clients, where they are not those of --clients. Every server holds weights of its own: of the 27B shape two
fit into 140 GB.

Cases: noul_70, one yes-or-no question of 70 tokens, each about a state of its own; noul_70_one_state, different
questions about one state; mixed, of a hundred requests 60 noul_70, 25 the example (7 prompts), 10 a choice of 8 over
250 tokens and 5 a yes-or-no question of 1,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import load
import torch
from harness import write
from workload import example, nouls, request_for

from openjev_fast_plugin.checkpoint import PROFILES
from openjev_fast_plugin.console import say, step
from openjev_fast_plugin.demo import running
from openjev_fast_plugin.measurement.originals import best_delta_rule
from openjev_fast_plugin.settings import PREFIX_BYTES_VARIABLE, PREFIX_ROWS_VARIABLE, WAIT_VARIABLE

# The variables of the modes that are fast with settings.
SETTINGS = {
    "kept": {PREFIX_BYTES_VARIABLE: "2GiB", PREFIX_ROWS_VARIABLE: "32"},
    "waiting": {WAIT_VARIABLE: "4000"},
}
CASES = ("noul_70", "noul_70_one_state", "mixed")
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
        for kind, count in ((example(), 25), (request_for("choice_8x250", tokens), 10)):
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


def said(level: load.Level) -> dict[str, float | None]:
    """What the server's answers say of themselves, times in milliseconds; None for what they do not say."""
    inference, forward, overhead, requests, forwards, replays = [], [], [], [], 0, 0
    for seconds, answer in zip(level.latencies, level.answers, strict=True):
        metadata = json.loads(answer)["metadata"]
        if "inference_seconds" in metadata:
            inference.append(1e3 * metadata["inference_seconds"])
        backend = metadata.get("backend", {})
        took = backend.get("forward_ms")
        if took is not None:
            forward.append(took)
            overhead.append(1e3 * seconds - took)
            requests.append(backend["shared_with"] + 1)
        if "graph_replays" in backend:
            forwards += backend["forwards"]
            replays += backend["graph_replays"]
    medians = {"inference_p50_ms": inference, "forward_p50_ms": forward, "overhead_p50_ms": overhead}
    return {
        **{name: round(statistics.median(each), 3) if each else None for name, each in medians.items()},
        "forward_requests": round(statistics.fmean(requests), 2) if requests else None,
        "replayed": round(replays / forwards, 3) if forwards else None,
    }


def scaled(found: list[dict[str, Any]]) -> None:
    """Put `times_one_client` into every row, None where there is no row of one client."""
    same = ("case", "mode", "pass")
    one = {tuple(row[key] for key in same): row["rps"] for row in found if row["clients"] == 1}
    for row in found:
        alone = one.get(tuple(row[key] for key in same))
        row["times_one_client"] = round(row["rps"] / alone, 2) if alone else None


def rows(
    args: argparse.Namespace, urls: dict[str, str], clients_of: dict[str, list[int]]
) -> list[dict[str, Any]]:
    """A row for every pass, case, number of clients and mode. clients_of: numbers of clients, by mode."""
    tokens = longest_prompt(urls.get("fast") or next(iter(urls.values())))
    found = []
    with step("making the requests"):
        asked = {case: bodies(case, tokens) for case in args.case or CASES}
    for case, requests in asked.items():
        for mode, url in urls.items():
            with step(f"warming {mode} up for {case}"):
                for clients in (min(clients_of[mode]), max(clients_of[mode])):
                    load.run(url, requests, clients, args.warm_up / 2)
    for number in range(1, args.passes + 1):
        for case, requests in asked.items():
            for clients in sorted(set().union(*clients_of.values())):
                for mode, url in urls.items():
                    if clients not in clients_of[mode]:
                        continue
                    level = load.run(url, requests, clients, args.seconds, keep=True)
                    found.append(
                        {
                            "profile": args.profile,
                            "case": case,
                            "mode": mode,
                            "clients": clients,
                            **level.figures(),
                            **said(level),
                            "pass": number,
                        }
                    )
                    scaled(found)
                    say(render(found[-1:]).splitlines()[-1])
    return found


def render(found: list[dict[str, Any]]) -> str:
    """A table of rows."""
    lines = [
        f"{'case':<20}{'mode':<8}{'pass':>5}{'clients':>8}{'requests':>9}{'errors':>7}{'rps':>9}"
        f"{'x one':>7}{'p50 ms':>10}{'p95 ms':>10}{'p99 ms':>10}{'forward':>10}{'overhead':>10}"
        f"{'shared':>8}{'replayed':>10}"
    ]
    widths = {
        "times_one_client": 7,
        **dict.fromkeys(("p50_ms", "p95_ms", "p99_ms", "forward_p50_ms", "overhead_p50_ms"), 10),
        "forward_requests": 8,
        "replayed": 10,
    }
    for row in found:
        times = "".join(
            f"{'' if row[key] is None else format(row[key], '.2f'):>{width}}" for key, width in widths.items()
        )
        lines.append(
            f"{row['case']:<20}{row['mode']:<8}{row['pass']:>5}{row['clients']:>8}{row['requests']:>9}"
            f"{row['errors']:>7}{row['rps']:>9.2f}{times}"
        )
    return "\n".join(lines)


def mode_of(text: str) -> tuple[str, list[int] | None]:
    """`fast` or `fla:1,8`: a mode, and its numbers of clients where they are given."""
    name, _, clients = text.partition(":")
    if not name or not all(each.isdigit() and int(each) > 0 for each in clients.split(",") if clients):
        raise argparse.ArgumentTypeError(f"{text!r} is no mode such as fast or fla:1,8")
    return name, [int(each) for each in clients.split(",")] if clients else None


def server_of(mode: str, args: argparse.Namespace) -> list[str]:
    """What follows `python` for the server of a mode."""
    original, backend = mode in ("torch", "fla"), "fast" if mode in SETTINGS else mode
    if args.checkpoint is not None:
        model = ["-m", "jev.server", "--checkpoint", str(args.checkpoint)]
    else:
        model = [str(Path(__file__).with_name("random_server.py")), "--profile", args.profile]
        model += ["--delta-rule", mode] if original else []
    warmup = ["--warmup", args.warmup] if args.warmup and backend == "fast" else []
    return [*model, "--device", args.device, "--backend", "torch" if original else backend, *warmup]


def environment_of(mode: str) -> dict[str, str]:
    """The variables of the server of a mode."""
    return {**os.environ, **SETTINGS.get(mode, {})}


def main(argv: Iterable[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--profile", choices=sorted(PROFILES), default="small", help="model shapes (default: small)"
    )
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument(
        "--mode",
        action="append",
        type=mode_of,
        metavar="MODE[:CLIENTS,...]",
        help="repeat for several (default: torch and fast; on a GPU fla and fast)",
    )
    parser.add_argument("--case", action="append", choices=CASES, help="repeat for several (default: all)")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="default: 1 2 4 8 16 32")
    parser.add_argument("--seconds", type=float, default=5.0, help="of every level (default: 5)")
    parser.add_argument(
        "--warm-up", type=float, default=5.0, help="seconds a case and mode first (default: 5)"
    )
    parser.add_argument("--passes", type=int, default=2, help="over everything (default: 2)")
    parser.add_argument(
        "--warmup", metavar="ROWS|FILE", help="--warmup of the servers of mode fast, kept and waiting"
    )
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint package (default: random weights)")
    parser.add_argument(
        "--server",
        action="append",
        metavar="MODE=URL",
        help="measure a server that runs already, under this mode's name; starts none, repeat for several",
    )
    args = parser.parse_args(None if argv is None else [*argv])
    given = dict(
        args.mode or [(mode, None) for mode in ("fla" if "cuda" in args.device else "torch", "fast")]
    )
    urls = dict(each.split("=", 1) for each in args.server or ())
    clients_of = {mode: given.get(mode) or list(args.clients) for mode in urls or given}
    if "fla" in clients_of and not urls and (best_delta_rule() != "fla" or "cuda" not in args.device):
        parser.error("mode fla needs flash-linear-attention and a GPU; --mode torch is the original without")
    if args.checkpoint is not None and not urls and "torch" in clients_of and best_delta_rule() != "torch":
        parser.error(
            "with a checkpoint the original runs as Transformers has it: its mode here is fla, not torch"
        )
    with ExitStack() as stack:
        for mode in [] if urls else given:
            urls[mode] = stack.enter_context(
                running(server_of(mode, args), f"the server of mode {mode}", environment_of(mode))
            ).url
        found = rows(args, urls, clients_of)
    print(render(found))
    say(f"wrote {write(torch.device(args.device), 'serve', found)}")


if __name__ == "__main__":
    main()
