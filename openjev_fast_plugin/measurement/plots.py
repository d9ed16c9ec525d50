"""Pictures of results: the ladder of modes, where the time goes, and how latencies are spread. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openjev_fast_plugin.console import UsageError

from .budget import FAMILIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One colour a mode everywhere; told apart without seeing red and green.
MODE_COLOURS = {"torch": "#7f7f7f", "fla": "#b0782e", "graph": "#56a0d3", "fast": "#1b4f8a"}
_OTHER_COLOURS = ("#5b3f8c", "#c05a7e", "#3f8c84", "#8c8c3f")
_FAMILY_COLOURS = dict(zip(FAMILIES, ("#1b4f8a", "#d98b2b", "#8c3f6e", "#6aaed6", "#b9b9b9"), strict=True))
_IDLE_COLOUR = "#efefef"
_TEXT = 8


def require() -> None:
    """UsageError, with the way to install it, where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            "matplotlib, which draws the picture, is not installed: pip install 'openjev-fast-plugin[bench]', or use "
            "--no-png"
        )


def figure(width: float, height: float, axes: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure with so many axes in so many rows. width, height: inches."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=120, layout="constrained")
    found = made.subplots(rows, -(-axes // rows), squeeze=False).ravel().tolist()
    for extra in found[axes:]:
        extra.remove()
    for each in found[:axes]:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=_TEXT)
    return made, found[:axes]


def save(made: Figure, path: Path, description: str = "") -> None:
    """Write a PNG: the same figure, the same bytes. description: kept in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, metadata={"Software": None, "Description": description})


def colours(modes: Sequence[str]) -> dict[str, str]:
    """A colour for every mode, the known ones always the same."""
    unknown = [mode for mode in modes if mode not in MODE_COLOURS]
    own = {mode: _OTHER_COLOURS[index % len(_OTHER_COLOURS)] for index, mode in enumerate(unknown)}
    return {mode: MODE_COLOURS.get(mode) or own[mode] for mode in modes}


def ladder(axes: Axes, rows: Sequence[Mapping[str, Any]], title: str = "median time of a request") -> None:
    """A group of bars a case, a bar a mode; over a bar its time and how much faster than the group's first it is.

    rows: {case, mode, p50_ms}.
    """
    cases, modes = _order(rows, "case"), _order(rows, "mode")
    paint, height = colours(modes), 0.8 / len(modes)
    times = {(row["case"], row["mode"]): row["p50_ms"] for row in rows}
    for group, case in enumerate(cases):
        here = [mode for mode in modes if (case, mode) in times]
        for index, mode in enumerate(here):
            value, first = times[case, mode], times[case, here[0]]
            at = group + (index - (len(here) - 1) / 2) * height
            axes.barh(at, value, height * 0.92, color=paint[mode], label=mode if group == 0 else None)
            faster = "" if index == 0 else f"  {first / value:.3g}x"
            axes.text(value * 1.05, at, f"{_ms(value)}{faster}", va="center", fontsize=_TEXT - 1)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    logarithmic(axes)
    low, high = min(times.values()), max(times.values())
    axes.set_xlim(low / 2, high * (high / low) ** 0.4 * 2)
    axes.set_xlabel("milliseconds, logarithmic", fontsize=_TEXT)
    axes.set_title(title, fontsize=_TEXT + 2)
    axes.legend(fontsize=_TEXT, frameon=False, loc="lower right")


def time_budget(axes: Axes, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """One bar a mode of one case, made of its kernel families and the time in which nothing ran.

    rows: {mode, families, idle_ms}.
    """
    whole = max(sum(row["families"].values()) + row["idle_ms"] for row in rows)
    for index, row in enumerate(rows):
        parts = {**row["families"], "idle, gaps": row["idle_ms"]}
        left = 0.0
        for name, value in parts.items():
            colour = _FAMILY_COLOURS.get(name, _IDLE_COLOUR)
            bars = axes.barh(index, value, 0.7, left=left, color=colour, label=name if index == 0 else None)
            bars.patches[0].set(edgecolor="#999999", linewidth=0.5)
            left += value
        axes.text(left + 0.01 * whole, index, _ms(left), va="center", fontsize=_TEXT - 1)
    axes.set_yticks(range(len(rows)), [row["mode"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, whole * 1.15)
    axes.set_xlabel("milliseconds", fontsize=_TEXT)
    axes.set_title(title, fontsize=_TEXT + 2)
    axes.legend(
        fontsize=_TEXT - 1,
        frameon=False,
        ncols=3,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.18),
        columnspacing=1,
    )


def logarithmic(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers, at 2 and 5 times a power of ten too where there is room."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=10))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def latency_cdf(axes: Axes, times: Mapping[str, Sequence[float]], title: str) -> None:
    """The share of answers that came within so many milliseconds, a line a name."""
    paint = colours([name.partition(",")[0] for name in times])
    for name, given in times.items():
        ordered = sorted(given)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        mode, _, rest = name.partition(",")
        style = "--" if "first" in rest else "-"
        axes.step(
            [ordered[0], *ordered], [0, *shares], where="post", label=name, color=paint[mode], linestyle=style
        )
    logarithmic(axes)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95], ["0", "25 %", "50 %", "75 %", "95 %"])
    axes.grid(alpha=0.3)
    axes.set_xlabel("milliseconds, logarithmic", fontsize=_TEXT)
    axes.set_title(title, fontsize=_TEXT + 2)
    axes.legend(fontsize=_TEXT, frameon=False, loc="lower right")


def overview(result: Mapping[str, Any], path: Path) -> None:
    """The picture of a `run`: ladder, budget of its first case, and all timed calls as a CDF."""
    rows, modes = result["rows"], _order(result["rows"], "mode")
    cases = _order(rows, "case")
    made, (left, middle, right) = figure(17, 1.9 + 0.2 * len(cases) * len(modes), 3)
    made.suptitle(f"{result['model']} on {result['meta']['device']}, {result['order']}", fontsize=_TEXT + 3)
    ladder(left, rows)
    time_budget(middle, [row for row in rows if row["case"] == cases[0]], f"where the time goes: {cases[0]}")
    times = {mode: [each for row in rows if row["mode"] == mode for each in row["ms"]] for mode in modes}
    latency_cdf(right, times, "all timed requests answered within")
    save(made, path)


def _order(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
