"""Every matmul of the released models: plain `F.linear`, the default way, and the one the tuner finds, in one run.

    python bench/gemm_bench.py                                  # 27b, 9b and 2b: some minutes on an H200
    python bench/gemm_bench.py --profile 27b --rows 72,280      # some of it
    python bench/gemm_bench.py --profile 27b --rows 8-512 --seconds 500 --write-table     # the package's own table
    python bench/gemm_bench.py --device cpu --profile narrow --rows 8                     # a dry run without a GPU

For each weight of a model and each number of rows the tuner (openjev_fast_plugin/tuner.py) times every candidate; then
three variants take turns: `linear` is `F.linear`, `default` the way without a choice (our kernel for few rows), and
`openjev_fast` the way chosen. `us` is the median of a product and of the op that reads it (silu_mul after gate and up,
add_rms_norm after what is added to the residual stream), on cold weights, in CUDA graphs; `alone_us`, `tflops` and
`gb_s` (weight and x read once, product written once) are of the product alone, except where the chosen way has the
activation fused. rel_l2 is the relative L2 error of the product against a float32 one.

Prints a table and, for each model and number of rows, the sum over a forward's layers; writes
results/<device>/gemm.json, rows {op, case, variant, us, rel_l2, profile, weight, rows, features, columns, way,
alone_us, tflops, gb_s, refused, skipped}. What does not fit in --seconds is skipped, said, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import write
from op_inputs import PROFILES, Profile

from openjev_fast_plugin import tables
from openjev_fast_plugin.console import say, step
from openjev_fast_plugin.ops import _cuda, silu_mul
from openjev_fast_plugin.ops._choices import PYTORCH, Choice, Product
from openjev_fast_plugin.replay_timer import GraphTimer, Recording
from openjev_fast_plugin.tables import Entry
from openjev_fast_plugin.tuner import DeviceWays, Tuner, Weight, facts_of
from openjev_fast_plugin.warmup import parse_rows

MODELS = ("27b", "9b", "2b")
ROWS = "8,72,128,192,256,280,384,512,1152,1504,1712"
VARIANTS = ("linear", "default", "openjev_fast")
# Copies of a weight hold more than this many times the L2 cache together.
_CACHES = 3


class Shape(NamedTuple):
    """A weight by name. layers: of four layers, how many multiply with it; with slices the last layer alone does."""

    name: str
    weight: Weight
    layers: int


def shapes(p: Profile) -> list[Shape]:
    """The weights a forward multiplies with, each size once, of a model whose last layer is full attention."""
    keys, values = p.key_heads * p.key_dim, p.value_heads * p.value_dim
    queries, kv = p.query_heads * p.head_dim, p.kv_heads * p.head_dim
    every = [
        Shape("linear_in", Weight("linear", 2 * keys + 2 * values + 2 * p.value_heads, p.hidden), 3),
        Shape("attention_in", Weight("linear", 2 * queries + 2 * kv, p.hidden), 1),
        Shape("linear_out", Weight("linear_update", p.hidden, values), 3),
        Shape("attention_out", Weight("linear_update", p.hidden, queries), 1),
        Shape("gate_up", Weight("linear_silu_mul", 2 * p.intermediate, p.hidden), 4),
        Shape("down", Weight("linear_update", p.hidden, p.intermediate), 4),
        Shape("last_queries", Weight("linear", 2 * queries, p.hidden), 0),
        Shape("last_keys", Weight("linear", 2 * kv, p.hidden), 0),
    ]
    found: dict[Weight, Shape] = {}
    for shape in every:
        known = found.get(shape.weight)
        found[shape.weight] = shape if known is None else known._replace(layers=known.layers + shape.layers)
    return list(found.values())


class HostTimer:
    """Times calls by the host's clock, for a dry run."""

    def record(self, calls: Sequence) -> Recording:
        calls[0]()

        def replay() -> None:
            for call in calls:
                call()

        return Recording(len(calls), replay)

    def round(self, recordings: Sequence[Recording]) -> list[float]:
        found = []
        for recording in recordings:
            start = time.perf_counter()
            recording.replay()
            found.append(1e6 * (time.perf_counter() - start) / recording.calls)
        return found


class PytorchWays:
    """PyTorch alone, for a dry run."""

    def default(self, product: Product) -> Choice:
        return PYTORCH

    def candidates(self, product: Product) -> Iterator[Choice]:
        yield PYTORCH

    def compute(self, op: str, choice: Choice, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = F.linear(x, weight)
        return silu_mul(product) if op == "linear_silu_mul" else product


def copies(weight: Weight, device: torch.device, cache_bytes: int) -> list[torch.Tensor]:
    """Random weights of one size, more than fit in the cache; at least two."""
    bytes_of_one = 2 * weight.features * weight.columns
    count = max(2, -(-_CACHES * cache_bytes // bytes_of_one))
    draw = torch.Generator(device).manual_seed(weight.features)

    def one() -> torch.Tensor:
        values = torch.randn(weight.features, weight.columns, device=device, generator=draw)
        return (weight.columns**-0.5 * values).to(torch.bfloat16)

    return [one() for _ in range(count)]


def tuned(tuner: Tuner, product: Product) -> Entry:
    """What the tuner finds for a product."""
    running = tuner.tune(product)
    while True:
        try:
            next(running)
        except StopIteration as done:
            return done.value


def row(profile: str, shape: Shape, rows: int, variant: str, **values: Any) -> dict[str, Any]:
    """A results row; figures that were not measured are null."""
    op, features, columns = shape.weight
    empty = dict.fromkeys(("us", "rel_l2", "way", "alone_us", "tflops", "gb_s", "refused", "skipped"))
    sizes = {"profile": profile, "weight": shape.name, "rows": rows, "features": features, "columns": columns}
    case = f"{profile}_{shape.name}_{rows}"
    return {"op": op, "case": case, "variant": variant, **empty, **sizes, **values}


def measured(
    tuner: Tuner, profile: str, shape: Shape, rows: int, repeats: int
) -> tuple[list[dict[str, Any]], Entry]:
    """The rows of one product, and what the tuner found."""
    product = Product(shape.weight.op, rows, shape.weight.features, shape.weight.columns)
    entry = tuned(tuner, product)
    # Ways that are one are measured once.
    choices = dict(zip(VARIANTS, (PYTORCH, tuner.ways.default(product), entry.choice), strict=True))
    ways = list(dict.fromkeys(choices.values()))
    figures = dict(zip(ways, tuner.measure(product, ways, repeats), strict=True))
    alone = figures
    if shape.weight.op != "linear":
        alone = dict(zip(ways, tuner.measure(product, ways, repeats, alone=True), strict=True))
    moved = 2 * (product.features * product.columns + rows * (product.columns + product.features))
    work = 2 * rows * product.features * product.columns
    found = []
    for variant, choice in choices.items():
        (us, error), alone_us = figures[choice], alone[choice][0]
        found.append(
            row(
                profile,
                shape,
                rows,
                variant,
                us=round(us, 2),
                rel_l2=float(f"{error:.3e}"),
                way=str(choice),
                alone_us=round(alone_us, 2),
                tflops=round(work / alone_us / 1e6, 1),
                gb_s=round(moved / alone_us / 1e3, 1),
                refused=len(tuner.refused) if variant == "openjev_fast" else None,
            )
        )
    return found, entry


def render(rows: list[dict[str, Any]]) -> str:
    """A table, a line for each product; its ratio is the time of `F.linear` over the chosen way's."""
    line = "{:<7}{:<14}{:>6}{:>11}{:>11}{:>11}{:>7}{:>9}{:>8}{:>11}  {}"
    head = (
        "model",
        "weight",
        "rows",
        "linear us",
        "default",
        "chosen",
        "ratio",
        "TFLOP/s",
        "GB/s",
        "rel_l2",
        "way",
    )
    lines = [line.format(*head)]
    for plain, default, ours in zip(*[iter(rows)] * len(VARIANTS), strict=True):
        where = (ours["profile"], ours["weight"], ours["rows"])
        if ours["skipped"]:
            lines.append(line.format(*where, *[""] * 7, f"skipped: {ours['skipped']}"))
            continue
        ratio = f"{plain['us'] / ours['us']:.2f}"
        lines.append(
            line.format(
                *where, plain["us"], default["us"], ours["us"], ratio, ours["tflops"], ours["gb_s"], ours["rel_l2"],
                ours["way"],
            )
        )  # fmt: skip
    return "\n".join(lines)


def forward_sums(rows: list[dict[str, Any]]) -> list[tuple[str, int, list[float]]]:
    """Of every model and number of rows the milliseconds of the matmuls of a forward's layers and of what reads them.

    In VARIANTS' order, and what the chosen ones take alone; the last layer counts like the others.
    """
    layers, found = {"27b": 64, "9b": 32, "2b": 24}, []
    for profile in dict.fromkeys(row["profile"] for row in rows if row["profile"] in layers):
        counts = {shape.name: shape.layers * layers[profile] // 4 for shape in shapes(PROFILES[profile])}
        for count in dict.fromkeys(row["rows"] for row in rows if row["profile"] == profile):
            here = [
                row
                for row in rows
                if (row["profile"], row["rows"]) == (profile, count) and counts[row["weight"]]
            ]
            if len(here) < len(VARIANTS) * sum(map(bool, counts.values())) or any(
                row["skipped"] for row in here
            ):
                continue
            sums = [
                sum(counts[row["weight"]] * row[figure] for row in here if row["variant"] == variant) / 1e3
                for variant, figure in [*((name, "us") for name in VARIANTS), ("openjev_fast", "alone_us")]
            ]
            found.append((profile, count, sums))
    return found


def forwards(rows: list[dict[str, Any]]) -> str:
    """A table of `forward_sums`."""
    lines = [f"{'model':<6}{'rows':>6}{'linear ms':>11}{'default':>9}{'chosen':>9}{'alone':>9}"]
    for profile, count, sums in forward_sums(rows):
        lines.append(f"{profile:<6}{count:>6}{sums[0]:>11.2f}" + "".join(f"{ms:>9.2f}" for ms in sums[1:]))
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--profile", action="append", choices=sorted(PROFILES), help=f"default: {', '.join(MODELS)}")
    add(
        "--rows",
        default=ROWS,
        type=parse_rows,
        metavar="ROWS",
        help=f"such as 72,280 or 8-512; default: {ROWS}",
    )
    add("--weight", action="append", metavar="NAME", help="linear_in, gate_up, down, ...; default: all")
    add("--repeats", type=int, default=11, help="rounds of the three variants (default: 11)")
    add(
        "--seconds",
        type=float,
        default=280.0,
        help="no product is begun after so many seconds (default: 280)",
    )
    add("--device", default="cuda:0", help="torch device (default: cuda:0)")
    add("--output", type=Path, help="results file (default: bench/results/<device>/gemm.json)")
    add(
        "--write-table",
        type=Path,
        nargs="?",
        const=tables.SHIPPED,
        metavar="FILE",
        help="add what the tuner found to a table of choices, by default the package's own",
    )
    args = parser.parse_args(arguments)
    if args.write_table is not None and torch.device(args.device).type != "cuda":
        parser.error("a table of choices is measured on a GPU")
    return args


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    args, start = parse(arguments), time.monotonic()
    device, cache_bytes = torch.device(args.device), 0
    timer: Any = HostTimer()
    ways: Any = PytorchWays()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        with step("loading the kernels"):
            _cuda.load()
        start = time.monotonic()
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        timer, ways = GraphTimer(device), DeviceWays(device)
    rows: list[dict[str, Any]] = []
    entries: dict[Product, Entry] = {}
    for profile in args.profile or MODELS:
        for shape in shapes(PROFILES[profile]):
            if args.weight and shape.name not in args.weight:
                continue
            tuner = Tuner({shape.weight: copies(shape.weight, device, cache_bytes)}, ways, timer)
            for count in args.rows:
                if time.monotonic() - start > args.seconds:
                    late = f"more than {args.seconds:.0f} s"
                    rows += [row(profile, shape, count, variant, skipped=late) for variant in VARIANTS]
                    continue
                found, entry = measured(tuner, profile, shape, count, args.repeats)
                rows += found
                entries[Product(shape.weight.op, count, shape.weight.features, shape.weight.columns)] = entry
                say(f"{found[-1]['case']}: {found[0]['us']} -> {found[-1]['us']} us, {found[-1]['way']}")
            del tuner
    if not rows:
        raise SystemExit(f"no weight is named {', '.join(args.weight)}")
    print(render(rows))
    print(forwards(rows))
    say(f"wrote {write(device, 'gemm', rows, args.output)} after {time.monotonic() - start:.0f} s")
    if args.write_table is not None:
        tables.merge(args.write_table, facts_of(device), entries)
        say(f"{len(entries)} choices are in {args.write_table}")
    skipped = sum(row["skipped"] is not None for row in rows) // len(VARIANTS)
    if skipped:
        say(f"SKIPPED {skipped} products: more than {args.seconds:.0f} s")
    return 1 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
