"""The `openjev-fast` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from openjev_fast_plugin import warmup
from openjev_fast_plugin.checkpoint import PROFILES, make_checkpoint
from openjev_fast_plugin.console import UsageError, say

_EPILOG = """\
The plugin itself needs no command: install it beside Open-Jev and add --backend fast to the server you already start,

  python -m jev.server --checkpoint DIR --backend fast
  OPENJEV_BACKEND=fast python -m jev.predict --checkpoint DIR --request FILE

exit status: 0 done, 1 it failed and said why, 2 the command line was wrong, 130 interrupted
"""

_VERIFY_EPILOG = """\
The original and then the backend answer the same requests, and four levels are compared on the way. The first level
that fails says where to look; the report names the place, the figure, what was allowed, and what to do next.

  preparation  the prompts' token ids, the tree they form, every row of every weight
  ops          every op or kernel against its reference, on the inputs a forward of your requests gave it, in the first,
               the middle and the last layer of each type (backend fast)
  states       hidden states after every layer: relative L2 to the original's, and the distance to a float32 forward of
               the same weights over the original's own distance to it
  answers      the largest probability difference, changed decisions with both margins, thresholds 0.5 to 0.99 crossed

One model is in memory at a time. The float32 forward converts one layer at a time, so it fits where the model fits.

  openjev-fast verify --checkpoint package/checkpoint
  openjev-fast verify --checkpoint package/checkpoint --requests monday.json tuesday.json --json > report.json
  openjev-fast verify --checkpoint package/checkpoint --float32 --device cpu

A request file holds what is posted to the server, {"state": ..., "questions": {...}}, or an array of such objects.

exit status: 0 every level passed, 1 one failed, 2 the command line, a file or the backend cannot be used,
130 interrupted
"""


_WARMUP = """\
Loads a checkpoint as `python -m jev.server --checkpoint DIR --backend fast` does, times every way to compute each of
its matmuls (PyTorch's, our kernel's, cuBLASLt's algorithms) on the model's own weights, checks the fastest against a
float32 product, and keeps the choices on disk. Before that it measures up to how many rows attention is faster in small
tiles.
"""
_WARMUP_EPILOG = """\
How many rows a request takes depends on its text and its questions: every answer's metadata says it (rows_computed),
rounded up to a multiple of 8. A number of rows that was never tuned is computed all the same, in the default way. What
is known is not measured again, so a second run takes no time; with 64 numbers of rows a first one takes some minutes.

Choices are kept for this GPU, its driver, this version's kernels and, for matmuls, cuBLAS: run it again after an update
of any of them. Servers read them when they start, and compute the same request in the same way, to the last bit, until
they end. OPENJEV_FAST_TUNING=off leaves them out; =idle makes a server measure what it lacks by itself, between
requests.

On a CPU there is nothing to tune, and the command says so.

exit status: 0 done, or nothing to tune; 1 something could not be tuned or kept, and why; 2 the command line was wrong;
130 interrupted: what was measured by then is kept
"""


_BENCH = """\
Times your checkpoint's answers on this machine, request by request, with the original forward and with the backends:

  torch  the original, its linear attention in PyTorch
  fla    the original with flash-linear-attention's kernels, as `python -m jev.server` runs where it is there (GPU)
  graph  the original's modules, replayed as CUDA Graphs (GPU)
  fast   one packed forward
"""
_BENCH_EPILOG = """\
Every round asks each mode once, so that a slow spell of the machine meets all. Where the models do not fit into memory
together they are loaded one after the other, and the output says so. Writes to --out, replacing what was there:

  bench.json  device, driver, versions, command, and for every request and mode all times, and where they go
  bench.png   the ladder of modes, time by kernel family, latencies as a cumulative distribution; needs matplotlib:
              pip install 'openjev-fast-plugin[bench]'

  openjev-fast bench --checkpoint package/checkpoint
  openjev-fast bench --checkpoint package/checkpoint --requests monday.json --mode fla --mode fast --out monday
  openjev-fast bench --profile small --device cpu

A request file holds what is posted to the server, {"state": ..., "questions": {...}}, or an array of such objects.
Times are from records to scores; a server adds HTTP and JSON to both.

exit status: 0 done, 1 it failed and said why, 2 the command line, a file or a mode cannot be used, 130 interrupted
"""


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _rows(text: str) -> list[int]:
    try:
        return warmup.parse_rows(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="openjev-fast",
        description="Tools around the fast backend of Open-Jev.",
        epilog=_EPILOG,
        formatter_class=raw,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="serve a tiny model with and without the plugin, ask both one request, and compare",
        description="Starts `python -m jev.server` twice for real, with --backend torch (the original forward) and "
        "with --backend fast, posts one customer conversation with three typed questions to both in turn, and "
        "prints the answers, the rows computed, the largest probability difference and both latencies.",
    )
    demo.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="checkpoint package (default: a tiny one is made)"
    )
    demo.add_argument("--device", help="torch device (default: cuda:0 where there is a GPU, else cpu)")
    demo.add_argument(
        "--repeats", type=_positive, default=15, help="timed requests to each server (default: 15)"
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    doctor = commands.add_parser(
        "doctor",
        help="say what this environment has for a backend, and what to do about what it lacks",
        description="Looks at Python, the libraries, the start-up file that brings the plugin into jev.server, "
        "Open-Jev, the settings, the GPUs, the compiler and the kernels built so far. Changes nothing. Exits with 1 "
        "where something is a problem.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    make = commands.add_parser(
        "make-checkpoint",
        help="write a random-weight checkpoint in Open-Jev's layout",
        description="Writes OUT/base (a random-weight model with a tokenizer and a chat template) and "
        "OUT/package/checkpoint (adapter, head, temperature), the same from the same seed. Nothing is downloaded. "
        "Start it with: python -m jev.server --checkpoint OUT/package/checkpoint",
    )
    make.add_argument(
        "--profile", choices=sorted(PROFILES), default="tiny", help="model shapes (default: tiny)"
    )
    make.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    make.add_argument("--json", action="store_true", help="print one JSON object instead of a path")
    make.add_argument("out", type=Path, metavar="OUT", help="a folder that does not exist yet or is empty")
    _add_verify(commands)
    _add_warmup(commands)
    _add_bench(commands)
    return parser


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="hold a backend against the original on your own model and requests",
        description="Checks that a backend computes your checkpoint's answers as the original does, level by level.",
        epilog=_VERIFY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.add_argument(
        "--checkpoint", type=Path, metavar="DIR", required=True, help="the checkpoint package to verify on"
    )
    _add_requests(verify)
    verify.add_argument("--device", help="torch device (default: cuda:0 where there is a GPU, else cpu)")
    verify.add_argument(
        "--backend",
        choices=("fast", "graph"),
        default="fast",
        help="the backend to verify (default: fast); graph needs a GPU",
    )
    verify.add_argument(
        "--float32",
        action="store_true",
        help="convert both models to float32 first: there all must agree closely, so that a fault of the maths stands "
        "apart from rounding (backend fast)",
    )
    verify.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _add_requests(command: argparse.ArgumentParser) -> None:
    """What a command asks the models; `--seed` comes with it."""
    command.add_argument(
        "--requests",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="JSON files of requests (default: the demo's example and some drawn from --seed)",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the default requests (default: 0)")


def _add_warmup(commands: Any) -> None:
    tune = commands.add_parser(
        "warmup",
        help="measure the fastest way to compute matmuls and attention of a checkpoint on this GPU, ahead of a server",
        description=_WARMUP,
        epilog=_WARMUP_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tune.add_argument("--checkpoint", type=Path, metavar="DIR", required=True, help="checkpoint package")
    tune.add_argument(
        "--rows",
        type=_rows,
        metavar="ROWS",
        default=warmup.DEFAULT_ROWS,
        help="numbers of rows to tune for: 280, or 72,280, or 8-512 (every 8th), or 512-2048:64 (every 64th), rounded "
        f"up to multiples of 8 as forwards are (default: {warmup.DEFAULT_ROWS})",
    )
    tune.add_argument("--device", help="torch device (default: cuda:0 where there is a GPU, else cpu)")
    tune.add_argument("--again", action="store_true", help="measure what is known already once more")
    tune.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time the original and the backends on your own machine, checkpoint and requests",
        description=_BENCH,
        epilog=_BENCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = bench.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", type=Path, metavar="DIR", help="the checkpoint package to time")
    model.add_argument(
        "--profile", choices=sorted(PROFILES), help="instead of a checkpoint, random weights of these shapes"
    )
    _add_requests(bench)
    bench.add_argument("--device", help="torch device (default: cuda:0 where there is a GPU, else cpu)")
    bench.add_argument(
        "--mode",
        action="append",
        choices=("torch", "fla", "graph", "fast"),
        help="repeat for several; speedups are over the first in this order (default: all that run on the device)",
    )
    bench.add_argument(
        "--repeats", type=_positive, default=15, help="timed rounds a request, at most (default: 15)"
    )
    bench.add_argument("--warmups", type=_positive, default=2, help="untimed rounds first (default: 2)")
    bench.add_argument(
        "--seconds",
        type=_positive,
        default=8,
        help="of timed rounds a request and mode; then no other starts, once there are three (default: 8)",
    )
    bench.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("openjev-fast-bench"),
        help="folder of bench.json and bench.png (default: openjev-fast-bench)",
    )
    bench.add_argument("--no-png", action="store_true", help="draw nothing, so that matplotlib is not needed")
    bench.add_argument("--json", action="store_true", help="print what bench.json holds instead of text")


def _demo(args: argparse.Namespace) -> int:
    from openjev_fast_plugin import demo

    result = demo.run(args.checkpoint, args.device, args.repeats)
    print(json.dumps(result) if args.json else demo.render(result))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from openjev_fast_plugin import doctor

    result = doctor.report()
    print(json.dumps(result) if args.json else doctor.render(result))
    return 0 if result["ok"] else 1


def _make_checkpoint(args: argparse.Namespace) -> int:
    path = make_checkpoint(args.profile, args.out, seed=args.seed, progress=say)
    print(
        json.dumps({"checkpoint": str(path), "profile": args.profile, "seed": args.seed})
        if args.json
        else path
    )
    return 0


def _verify(args: argparse.Namespace) -> int:
    from openjev_fast_plugin.verification import report, run

    result = run.run(args.checkpoint, args.requests, args.device, args.backend, args.float32, args.seed)
    print(json.dumps(report.finite(result), allow_nan=False) if args.json else report.render(result))
    return 0 if result["passed"] else 1


def _bench(args: argparse.Namespace) -> int:
    from openjev_fast_plugin.measurement import plots, report, run

    if not args.no_png:
        plots.require()
    if args.out.exists() and not args.out.is_dir():
        raise UsageError(f"--out {args.out} is a file: name a folder")
    result = run.run(
        args.checkpoint,
        args.profile,
        args.requests,
        args.device,
        args.mode,
        args.repeats,
        args.warmups,
        args.seconds,
        args.seed,
    )
    text = json.dumps(result, indent=1)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bench.json").write_text(text + "\n", encoding="utf-8")
    if not args.no_png:
        plots.overview(result, args.out / "bench.png")
    print(text if args.json else report.render(result))
    say(f"wrote {args.out / 'bench.json'}{'' if args.no_png else ' and bench.png beside it'}")
    return 0


def _warmup(args: argparse.Namespace) -> int:
    def bar(products: list) -> Iterable:
        return tqdm(products, "tuning", unit="product", disable=not products)

    result = warmup.run(args.checkpoint, args.device, args.rows, args.again, bar)
    print(json.dumps(result) if args.json else warmup.render(result))
    failed = len(result.get("failed", ()))
    if failed:
        say(f"openjev-fast warmup: {failed} ops could not be tuned")
    return 1 if failed else 0


# What a command returns is the exit status.
_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "bench": _bench,
    "demo": _demo,
    "doctor": _doctor,
    "make-checkpoint": _make_checkpoint,
    "verify": _verify,
    "warmup": _warmup,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        return _COMMANDS[args.command](args)
    except KeyboardInterrupt:
        return 130
    except UsageError as error:
        print(f"openjev-fast {args.command}: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError, RuntimeError) as error:
        print(f"openjev-fast {args.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
