"""Our ops beside what others offer for them, one by one, on one device, in one run.

    python bench/ops_bench.py                                   # everything at 27B shapes: under 3 minutes on an H200
    python bench/ops_bench.py --op delta --case example         # one op on one case
    python bench/ops_bench.py --variant openjev_fast            # ours alone, without FLA's compilation
    python bench/ops_bench.py --device cpu --profile narrow --op silu_mul --case noul_70    # a dry run without a GPU

Ops: `delta` and `attention` over a tree (one layer), and every op that takes rows. Variants: `openjev_fast` is ours,
on the packed rows of the case as the forward pads them, attention in the tiles the engine has for them on this device;
`other_tiles` is ours in the other size of tile; `fla_padded` is FLA's chunk_gated_delta_rule with every
candidate a sequence of its own, q and k repeated for each value head, without its L2 norm; `fla_levels` the same
function level by level, states handed down; `sdpa_padded`, `sdpa_dense` (packed rows, dense mask) and `sdpa_root` (the
shared root alone) are the fastest of PyTorch's attention backends, layouts and forms of the key heads, and a separate
gate multiply; `torch` is the faster of an op's reference and its portable form. Inputs are laid out before, untimed.

Time: a CUDA graph calls the op on sets of inputs that together exceed the L2 cache twice (at most 64 sets, so small
inputs may stay warm); a replay over its calls is one sample, `us` their median. Variants of a case take turns, replay
by replay. A slow variant gets fewer replays. FLA's kernels are compiled first, in processes side by side, and tuned by
Triton on the first case, by default the example.

Prints a table, whose ratio is a variant's time over ours, and writes results/<device>/ops.json: rows {op, case,
variant, us, rel_l2, ...}. rel_l2 is the relative L2 norm of the difference to what `against` names; `rows` the rows a
call computes; `how` the way that stands for the variant; `refused` the ways that take no such inputs; gb_s the bytes a
call must move (each input read once, each output written once) over its time. A variant that fails has us = null and
its `error`; the others have their figures all the same, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from harness import write
from op_inputs import PROFILES, Profile
from op_problems import OPS, OTHER_TILES, OURS, Setting
from op_registry import Problem, measure
from op_timer import GraphTimer, HostTimer

from openjev_fast_plugin.console import say, step
from openjev_fast_plugin.ops import _cuda
from openjev_fast_plugin.ops._choices import Heads
from openjev_fast_plugin.ops.tree_attention import few_queries_for
from openjev_fast_plugin.tables import AttentionFacts, Store, TileEntry, stored_in
from openjev_fast_plugin.tuner import attention_facts_of

FLA = ("fla_padded", "fla_levels")
VARIANTS = (OURS, OTHER_TILES, *FLA, "sdpa_padded", "sdpa_dense", "sdpa_root", "torch")


def render(rows: list[dict[str, Any]]) -> str:
    """A table; the ratio is a variant's time over ours."""
    line = "{:<19}{:<21}{:<14}{:>11}{:>8}{:>11}{:>8}  {}"
    lines = [line.format("op", "case", "variant", "us", "ratio", "rel_l2", "GB/s", "how")]
    ours = {(row["op"], row["case"]): row["us"] for row in rows if row["variant"] == OURS}
    for row in rows:
        base = ours.get((row["op"], row["case"]))
        ratio = f"{row['us'] / base:.2f}" if base and row["us"] else ""
        us, error, rate = ("" if row[key] is None else row[key] for key in ("us", "rel_l2", "gb_s"))
        note = "FAILED" if row["error"] else "skipped" if row["skipped"] else row["how"]
        lines.append(line.format(row["op"], row["case"], row["variant"], us, ratio, error, rate, note))
    return "\n".join(lines)


def selected(problem: Problem, variants: list[str] | None, way: str | None) -> Problem:
    """The problem with the variants and ways asked for; a variant without such a way is left out."""
    kept = []
    for variant in problem.variants:
        ways = [one for one in variant.ways if way is None or way in one.how]
        if ways and (variants is None or variant.name in variants):
            kept.append(replace(variant, ways=ways))
    return replace(problem, variants=kept)


def problems(args: argparse.Namespace, setting: Setting) -> Iterator[Problem]:
    """The problems asked for, each built when it is reached."""
    for op in args.op or OPS:
        for case in args.case or OPS[op].cases:
            say(f"{op} {case} ...")
            yield selected(OPS[op].build(case, setting), args.variant, args.way)


def few_queries(profile: Profile, device: torch.device) -> int:
    """The most queries that attention has in small tiles: as a server would find it measured, else the default."""
    heads = Heads(profile.query_heads, profile.kv_heads, profile.head_dim)
    if device.type == "cuda":
        store: Store[AttentionFacts, Heads, TileEntry] = Store(attention_facts_of(device), stored_in())
        if heads in (known := store.known()):
            return known[heads].few_queries
    return few_queries_for(device, heads)


def compile_only(args: argparse.Namespace, setting: Setting) -> None:
    """Call every way of every variant asked for once, untimed."""
    for problem in problems(args, setting):
        for variant in problem.variants:
            if variant.skipped is None:
                for way in variant.ways[:1] if variant.first else variant.ways:
                    way.prepare().calls[0]()


def compile_ahead(args: argparse.Namespace) -> None:
    """Compile FLA's kernels, a process for each variant: one process would take most of a minute for each.

    What the processes leave in Triton's cache on disk, this one loads. They do not keep what tuning found, which they
    disturb one another in: this process tunes for itself. One that fails only makes this one compile.
    """
    names = [name for name in FLA if args.variant is None or name in args.variant]
    if "delta" not in (args.op or OPS) or not names or find_spec("fla") is None:
        return
    shared = ["--op", "delta", "--profile", args.profile, "--device", args.device, "--compile-only"]
    for case in args.case or ():
        shared += ["--case", case]
    if args.way is not None:
        shared += ["--way", args.way]
    environment = {**os.environ, "FLA_CACHE_RESULTS": "0"}
    with step(f"compiling FLA's kernels, {len(names)} processes"), tempfile.TemporaryDirectory() as folder:
        running = []
        for name in names:
            log = Path(folder, name)
            with log.open("w") as output:
                command = [sys.executable, __file__, *shared, "--variant", name]
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            running.append((name, log, process))
        for name, log, process in running:
            if process.wait() != 0:
                say(f"compiling {name} ahead failed:\n{log.read_text()}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--op", action="append", choices=tuple(OPS), metavar="OP", help=f"{', '.join(OPS)}; default: all")
    add(
        "--case",
        action="append",
        help="example, noul_70, choice_32x1056, root_10000_tails_32 or any other numbers in these names; default: "
        "seven for the tree's ops, three for the others",
    )
    add("--variant", action="append", choices=VARIANTS, metavar="NAME", help=f"{', '.join(VARIANTS)}")
    add("--way", help="only ways of a variant whose `how` contains this, such as cudnn or rectangles")
    add("--repeats", type=int, default=30, help="replays of a variant, at most (default: 30)")
    add("--profile", choices=sorted(PROFILES), default="27b", help="model shapes (default: 27b)")
    add("--device", default="cuda:0", help="torch device (default: cuda:0)")
    add("--output", type=Path, help="results file (default: bench/results/<device>/ops.json)")
    add("--compile-only", action="store_true", help="call everything asked for once, time and write nothing")
    return parser.parse_args(arguments)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    device, profile = torch.device(args.device), PROFILES[args.profile]
    if args.compile_only:
        compile_only(args, Setting(profile, device, cache_bytes=0))
        return 0
    timer: GraphTimer | HostTimer = HostTimer()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        with step("loading the kernels"):
            _cuda.load()
        compile_ahead(args)
        timer = GraphTimer(device)
    rows: list[dict[str, Any]] = []
    setting = Setting(profile, device, timer.cache_bytes, few_queries(profile, device))
    for problem in problems(args, setting):
        start = time.monotonic()
        rows += measure(problem, timer, args.repeats)
        say(f"{problem.op} {problem.case}: {time.monotonic() - start:.1f} s")
    print(render(rows))
    say(f"wrote {write(device, 'ops', rows, args.output)}")
    failed = [row for row in rows if row["error"]]
    for row in failed:
        say(f"FAILED {row['op']} {row['case']} {row['variant']}: {row['error']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
