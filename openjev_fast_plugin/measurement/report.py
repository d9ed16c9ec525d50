"""The result of a `run` for a person to read."""

from __future__ import annotations

from typing import Any

from .budget import FAMILIES

_SHORT = dict(zip(FAMILIES, ("matmul", "delta rule", "attention", "norms etc.", "other"), strict=True))


def render(result: dict[str, Any]) -> str:
    """A table of times and one of where they go."""
    meta, memory = result["meta"], result["memory"]
    rows = result["rows"]
    width = max(len(case["name"]) for case in result["cases"]) + 2
    lines = [
        f"{result['model']} on {meta['device']}: torch {meta['torch']}, transformers {meta['transformers']}, "
        f"flash-linear-attention {meta['fla'] or 'not installed'}",
        f"{memory['models']} models of {memory['model_bytes'] / 2**30:.2f} GiB in "
        f"{memory['free_bytes'] / 2**30:.1f} GiB, timed {result['order']}",
        "",
        "From records to scores; p50 is the median, first the very first answer of that shape, speedup over the first",
        "mode, difference the largest of any probability to it.",
        f"{'request':<{width}}{'mode':<7}{'p50 ms':>10}{'min ms':>10}{'max ms':>10}{'first ms':>10}{'rows':>8}"
        f"{'speedup':>9}{'difference':>12}",
    ]
    first: dict[str, float] = {}
    for row in rows:
        shown = row["case"] if row["case"] not in first else ""
        base = first.setdefault(row["case"], row["p50_ms"])
        lines.append(
            f"{shown:<{width}}{row['mode']:<7}{row['p50_ms']:>10.2f}{row['min_ms']:>10.2f}{row['max_ms']:>10.2f}"
            f"{row['first_ms']:>10.2f}{row['rows_computed']:>8}{base / row['p50_ms']:>9.2f}"
            f"{row['largest_probability_difference']:>12.6f}"
        )
    profiled = (
        "of one answer; idle is the rest of the median"
        if meta["cuda"] and rows[0]["kernels"]
        else ("of one profiled answer, operator by operator; idle is Python between them")
    )
    lines += [
        "",
        f"Where the time goes, ms {profiled}.",
        f"{'request':<{width}}{'mode':<7}"
        + "".join(f"{_SHORT[family]:>12}" for family in FAMILIES)
        + f"{'idle':>12}",
    ]
    previous = None
    for row in rows:
        shown = row["case"] if row["case"] != previous else ""
        previous = row["case"]
        figures = [*row["families"].values(), row["idle_ms"]]
        lines.append(f"{shown:<{width}}{row['mode']:<7}" + "".join(f"{each:>12.2f}" for each in figures))
    return "\n".join(lines)
