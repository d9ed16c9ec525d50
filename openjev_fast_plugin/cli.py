"""The `openjev-fast` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from openjev_fast_plugin.checkpoint import PROFILES, make_checkpoint
from openjev_fast_plugin.console import say

_EPILOG = """\
The plugin itself needs no command: install it beside Open-Jev and add --backend fast to the server you already start,

  python -m jev.server --checkpoint DIR --backend fast
  OPENJEV_BACKEND=fast python -m jev.predict --checkpoint DIR --request FILE

exit status: 0 done, 1 it failed and said why, 2 the command line was wrong, 130 interrupted
"""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


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


_COMMANDS = {"demo": _demo, "make-checkpoint": _make_checkpoint}


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
