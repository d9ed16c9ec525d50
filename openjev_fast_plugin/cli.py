"""The `openjev-fast` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from openjev_fast_plugin import warmup
from openjev_fast_plugin.checkpoint import PROFILES, make_checkpoint
from openjev_fast_plugin.console import say

_EPILOG = """\
The plugin itself needs no command: install it beside Open-Jev and add --backend fast to the server you already start,

  python -m jev.server --checkpoint DIR --backend fast
  OPENJEV_BACKEND=fast python -m jev.predict --checkpoint DIR --request FILE

exit status: 0 done, 1 it failed and said why, 2 the command line was wrong, 130 interrupted
"""


_WARMUP = """\
Loads a checkpoint as `python -m jev.server --checkpoint DIR --backend fast` does, times every way to compute each of
its matmuls (PyTorch's, our kernel's, cuBLASLt's algorithms) on the model's own weights, checks the fastest against a
float32 product, and keeps the choices on disk.
"""
_WARMUP_EPILOG = """\
How many rows a request takes depends on its text and its questions: every answer's metadata says it (rows_computed),
rounded up to a multiple of 8. A number of rows that was never tuned is computed all the same, in the default way. What
is known is not measured again, so a second run takes no time; with 64 numbers of rows a first one takes some minutes.

Choices are kept for this GPU, its driver, cuBLAS and this version's kernels: run it again after an update of any of
them. Servers read them when they start, and compute the same request in the same way, to the last bit, until they end.
OPENJEV_FAST_TUNING=off leaves them out; =idle makes a server measure what it lacks by itself, between requests.

On a CPU there is nothing to tune, and the command says so.

exit status: 0 done, or nothing to tune; 1 something could not be tuned or kept, and why; 2 the command line was wrong;
130 interrupted: what was measured by then is kept
"""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


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

    tune = commands.add_parser(
        "warmup",
        help="measure the fastest way to compute every matmul of a checkpoint on this GPU, ahead of a server",
        description=_WARMUP,
        epilog=_WARMUP_EPILOG,
        formatter_class=raw,
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
    return parser


def _demo(args: argparse.Namespace) -> None:
    from openjev_fast_plugin import demo

    result = demo.run(args.checkpoint, args.device, args.repeats)
    print(json.dumps(result) if args.json else demo.render(result))


def _make_checkpoint(args: argparse.Namespace) -> None:
    path = make_checkpoint(args.profile, args.out, seed=args.seed, progress=say)
    print(
        json.dumps({"checkpoint": str(path), "profile": args.profile, "seed": args.seed})
        if args.json
        else path
    )


def _warmup(args: argparse.Namespace) -> None:
    def bar(products: list) -> Iterable:
        return tqdm(products, "tuning", unit="product", disable=not products)

    result = warmup.run(args.checkpoint, args.device, args.rows, args.again, bar)
    print(json.dumps(result) if args.json else warmup.render(result))
    if result.get("failed"):
        raise warmup.WarmupFailed(f"{len(result['failed'])} products could not be tuned")


_COMMANDS = {"demo": _demo, "make-checkpoint": _make_checkpoint, "warmup": _warmup}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        _COMMANDS[args.command](args)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, RuntimeError) as error:
        print(f"openjev-fast {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
