"""Run small cases of every CUDA op under compute-sanitizer: memcheck, racecheck, synccheck and initcheck.

    python tests/gpu/sanitize.py                        # every tool, one after the other
    python tests/gpu/sanitize.py --tool memcheck        # one of them

Exits with an error where a tool reports one; the name of a case is printed before it runs, so a report stands below
its case. The kernels are built first, outside the tools.

What the tools cannot see: racecheck watches shared memory, so it says nothing about the delta rule's flags, by which
blocks of different nodes hand states on in global memory (tests/gpu/test_delta_rule.py repeats deep and wide forests
for those). Bulk tensor copies are written by hardware, not by a thread, and are not watched either.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def row_cases(device: str = "cuda") -> Iterator[tuple[str, Callable]]:
    """Every op that takes rows, once at vector shapes and once at odd ones."""
    from op_inputs import CASES, PROFILES

    from openjev_fast_plugin import ops

    for profile in ("2b", "odd"):
        for name, case in CASES.items():
            yield f"{name} {profile}", partial(getattr(ops, name), *case(PROFILES[profile], 9, device=device))


def product_cases(device: str = "cuda") -> Iterator[tuple[str, Callable]]:
    """The matmuls of few rows: one warpgroup and two, a width no tile divides, columns in one part and in two."""
    from op_inputs import normal

    from openjev_fast_plugin import ops

    for rows in (5, 72):
        for features, columns in ((200, 192), (400, 1536)):
            x, weight = normal(rows, columns, device=device), normal(features, columns, device=device)
            for op in (ops.linear, ops.linear_silu_mul, ops.linear_update):
                if op is ops.linear_silu_mul and features == 200:
                    # The kernel does not take it, and initcheck does not see what cuBLAS stores for the activation.
                    continue
                yield f"{op.__name__}, {rows} rows, {features} x {columns}", partial(op, x, weight)


def tree_cases(device: str = "cuda") -> Iterator[tuple[str, Callable]]:
    """The ops over a tree: one forest with every kind of node and padding, few heads."""
    import numpy as np
    import op_inputs
    import torch
    import torch.nn.functional as F
    from forests import Tree

    from openjev_fast_plugin import ops

    # Four levels, a second root, more than one chunk, chunks and tiles that are not full, a row alone.
    tree = Tree.of((70, -1), (17, 0), (1, 0), (20, 1), (5, 1), (33, 3), (3, -1))
    where = torch.device(device)

    # States are handed over two levels and to two children. The last rows belong to no node and are never written.
    profile = replace(op_inputs.PROFILES["27b"], key_heads=1, value_heads=2)
    given = []
    for x in op_inputs.delta_rule(profile, tree.rows, device=device):
        padded = torch.empty(tree.rows + 5, *x.shape[1:], dtype=x.dtype, device=where)
        padded[: tree.rows] = x
        given.append(padded)
    plan = ops.plan_delta_rule(*tree.nodes, 64, where)
    plan = plan._replace(
        node=F.pad(plan.node, (0, 0, 0, 3)),
        node_chunk=F.pad(plan.node_chunk, (0, 0, 0, 2)),
        node_tiles=plan.node_tiles + 2,
        node_slots=plan.node_slots + 1,
    )
    yield "delta_rule", partial(ops.delta_rule, *given, plan)
    # The second root starts from a kept state; it, a node with children and a leaf leave one each.
    sources, targets = np.array([[6, 1]]), np.array([[6, 2], [1, 0], [2, 3]])
    plan = ops.plan_delta_rule(*tree.nodes, 64, where, sources, targets)
    kept = torch.zeros(4, profile.value_heads, profile.value_dim, profile.key_dim, device=where)
    yield "delta_rule, kept states", partial(ops.delta_rule, *given, plan, kept)

    # Heads of 256 run on wgmma where the device has it: 10 queries of 6 heads are one warpgroup, 21 are two. Rows next
    # to a path's may be read, so the last two hold values; a copy of 8 rows still reaches past the end.
    rows = np.arange(tree.rows)
    for head_dim in (256, 128, 64):
        profile = replace(op_inputs.PROFILES["27b"], query_heads=6, kv_heads=1, head_dim=head_dim)
        given = op_inputs.tree_attention(profile, tree.rows, tree.rows + 2, device=device)
        for tile_queries in (10, 21):
            plan = ops.plan_attention(*tree.nodes, rows, tree.node_of_row, where, tile_queries)
            plan = plan._replace(tile=F.pad(plan.tile, (0, 0, 0, 2)))
            call = partial(ops.tree_attention, *given, plan)
            yield f"tree_attention, heads of {head_dim}, tiles of {tile_queries}", call


def run_cases() -> None:
    import torch

    for cases in (row_cases, product_cases, tree_cases):
        for name, call in cases():
            print(name, flush=True)
            call()
            torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeat for several (default: all)")
    tools = parser.parse_args().tool or TOOLS
    folders = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        # One allocation a tensor, so that memcheck sees an access past a tensor's end.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    command = [sys.executable, __file__, "cases"]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    failed = []
    for tool in tools:
        print(f"== {tool}", flush=True)
        start = time.monotonic()
        sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *command]
        if subprocess.run(sanitizer, env=environment).returncode != 0:
            failed.append(tool)
        print(f"== {tool}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["cases"]:
        run_cases()
    else:
        sys.exit(main())
