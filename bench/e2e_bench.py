"""The original and the backends side by side, in one process, on one machine.

    python bench/e2e_bench.py                                   # small profile, CPU, records to logits
    python bench/e2e_bench.py --device cuda:0 --profile 27b --scope forward --scope e2e

Scope `e2e` times records to logits through the host's own model, each round one call of each mode, so that a slow
spell of the machine meets all; scope `forward` times tokenized prompts to scores. On a GPU both draw random weights
there. Prints a table and writes results/<device>/e2e.json. Rows of scope `forward` say what rates were reached:
`tflops`, matmuls, attention and delta rule of the rows computed over p50, and `gb_s`, every weight read once and every
matmul's input and output written and read once over p50; `forward_work.py` says what counts. `families` is where the
time of a profiled call goes (openjev_fast_plugin/measurement/budget.py).
"""

from __future__ import annotations

import argparse
import gc
import importlib
from pathlib import Path
from typing import Any

import torch
from harness import write

from openjev_fast_plugin.checkpoint import PROFILES
from openjev_fast_plugin.console import say


def render(rows: list[dict[str, Any]]) -> str:
    """A table; the ratio is the first mode of a scope's case over this one."""
    lines = [
        f"{'scope':<9}{'case':<16}{'mode':<7}{'p50 ms':>10}{'min ms':>10}{'max ms':>10}{'rows':>7}{'ratio':>7}"
        f"{'kernels':>9}{'busy ms':>9}{'floor ms':>9}{'TFLOP/s':>9}{'GB/s':>9}"
    ]
    first: dict[tuple[str, str], float] = {}
    for row in rows:
        base = first.setdefault((row["scope"], row["case"]), row["p50_ms"])
        device = "".join(
            f"{'' if row.get(key) is None else row[key]:>9}"
            for key in ("kernels", "busy_ms", "floor_ms", "tflops", "gb_s")
        )
        lines.append(
            f"{row['scope']:<9}{row['case']:<16}{row['mode']:<7}{row['p50_ms']:>10.2f}{row['min_ms']:>10.2f}{row['max_ms']:>10.2f}"
            f"{row['rows_computed']:>7}{base / row['p50_ms']:>7.2f}{device}"
        )
    return "\n".join(lines)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--profile", choices=sorted(PROFILES), default="small", help="model shapes (default: small)"
    )
    parser.add_argument(
        "--scope",
        choices=("e2e", "forward"),
        action="append",
        help="what is timed; repeat for both in one results file (default: e2e)",
    )
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument(
        "--mode",
        action="append",
        help="torch, fast and, on a GPU, fla (flash-linear-attention) and graph; repeat for several (default: torch "
        "and fast on a CPU, fla and fast on a GPU, in scope forward graph too)",
    )
    parser.add_argument("--case", action="append", help="repeat for several (default: all of the scope)")
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds (default: 15)")
    parser.add_argument("--warmups", type=int, default=2, help="untimed rounds first (default: 2)")
    parser.add_argument(
        "--checkpoint", type=Path, help="scope e2e: a checkpoint package (default: one is made)"
    )
    parser.add_argument(
        "--rest-ms",
        type=float,
        default=0.0,
        help="scope forward: time some calls once more, the device resting so long before each, as between a lone "
        "client's requests; without rest a card at its power limit lowers its clock (default: 0, not again)",
    )
    parser.add_argument("--layers", type=int, help="scope forward: fewer layers than the profile has")
    args = parser.parse_args()
    if "graph" in (args.mode or ()) and torch.device(args.device).type != "cuda":
        parser.error(f"mode graph captures CUDA Graphs and needs a GPU, found --device {args.device}")
    found = []
    for scope in args.scope or ["e2e"]:
        found += importlib.import_module({"e2e": "host_scope", "forward": "forward_scope"}[scope]).rows(args)
        gc.collect()
    print(render(found))
    say(f"wrote {write(torch.device(args.device), 'e2e', found)}")


if __name__ == "__main__":
    main()
