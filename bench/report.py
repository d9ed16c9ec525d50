"""docs/report.md, its plots, and the README's table, from the results files alone.

    python bench/report.py           # writes docs/report.md, docs/report/*.png and the README's table
    python bench/report.py --check   # writes nothing; 1 where one of them is not what the results give

Reads bench/results/<device>/*.json. The same files give the same report; a results file that is missing is named in it.
On standard error it says which results were measured with other sources than this checkout's.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemm_bench import forward_sums
from harness import BENCH, RESULTS, source_digest

from openjev_fast_plugin.console import UsageError, say
from openjev_fast_plugin.measurement import plots

ROOT = BENCH.parent
BEGIN, END = "<!-- written by bench/report.py: begin -->", "<!-- written by bench/report.py: end -->"
# Every results file there can be, and the command that makes it.
FILES = {
    "e2e": "bench/e2e_bench.py",
    "ops": "bench/ops_bench.py",
    "gemm": "bench/gemm_bench.py",
    "serve": "bench/serve_bench.py",
    "jevbench_shaped": "bench/run_workload.py",
    "soak": "bench/soak.py",
    "cold_start": "bench/cold_start.py",
}
# Only a GPU has these.
GPU_ONLY = ("ops", "gemm", "soak")
ORIGINALS = ("fla", "torch")
_CASES = {
    "example": "example request: 7 prompts",
    "noul_70": "a yes or no, 70 tokens",
    "noul_1500": "a yes or no, 1,500 tokens",
    "choice_8x1000": "choice of 8, 1,000 tokens each",
    "choice_32x512": "choice of 32, 512 tokens each",
    "choice_32x1056": "choice of 32, 1,056 tokens each",
}
_MODES = {
    "torch": "the original, PyTorch alone",
    "fla": "the original with flash-linear-attention's kernels",
    "graph": "the original's modules, replayed as CUDA Graphs",
    "fast": "one packed forward",
}
_SHAPES = {"small": "110 M parameters", "tiny": "the tests' tiny model"}

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Results:
    """One results file. slug: its folder. name: its bench. digest: of its bytes."""

    slug: str
    name: str
    meta: dict[str, Any]
    rows: Rows
    digest: str


@dataclass(frozen=True)
class Plot:
    """A picture of the report. file: its name in docs/report/. digest: of the results it is drawn from."""

    file: str
    alt: str
    digest: str
    draw: Callable[[Path], None]

    @property
    def line(self) -> str:
        return f"![{self.alt}](report/{self.file})"


def read(folder: Path) -> list[Results]:
    """All results, CPU first. ValueError for a file that is none."""
    found = []
    for path in sorted(folder.glob("*/*.json")):
        content = path.read_bytes()
        try:
            parsed = json.loads(content)
            meta, rows = parsed["meta"], parsed["rows"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a results file: {error!r}") from error
        if path.stem not in FILES:
            raise ValueError(f"{path}: no benchmark is named {path.stem!r}; known: {', '.join(FILES)}")
        digest = hashlib.sha256(content).hexdigest()[:16]
        found.append(Results(path.parent.name, path.stem, meta, rows, digest))
    order = list(FILES)
    return sorted(found, key=lambda each: (each.slug != "cpu", each.slug, order.index(each.name)))


def document(results: list[Results]) -> tuple[str, list[Plot]]:
    """The text of docs/report.md and its pictures."""
    modes = "; ".join(f"`{name}`: {text}" for name, text in _MODES.items())
    lines = [
        "# What was measured",
        "",
        "Written by `python bench/report.py` from [`bench/results/`](../bench/results/): nothing here is changed by "
        "hand. Weights are random and of the released shapes, so times and memory are a real model's, and answers mean "
        "nothing.",
        "",
        f"Modes are {modes}. p50 is the median; 95 of 100 stay under p95. What stands in one table comes from one run.",
    ]
    drawn: list[Plot] = []
    for slug in dict.fromkeys(each.slug for each in results):
        here = [each for each in results if each.slug == slug]
        lines += ["", f"## {here[0].meta['device'].split(',')[0]}"]
        missing = [
            f"`{name}.json` ({command})"
            for name, command in FILES.items()
            if name not in {each.name for each in here} and not (slug == "cpu" and name in GPU_ONLY)
        ]
        if missing:
            lines += ["", f"Not measured here yet: {', '.join(missing)}."]
        for each in here:
            text, pictures = _SECTIONS[each.name](each)
            lines += ["", *text, "", *_provenance(each)]
            drawn += pictures
    return "\n".join(lines) + "\n", drawn


def _provenance(results: Results) -> list[str]:
    meta = results.meta
    facts = [
        meta["device"],
        meta.get("driver") and f"driver {meta['driver']}",
        meta.get("cuda") and f"CUDA {meta['cuda']}",
        f"Python {meta['python']}",
        f"torch {meta['torch']}",
        f"Transformers {meta['transformers']}",
        meta.get("fla") and f"flash-linear-attention {meta['fla']}",
    ]
    sources = f"sources `{meta['sources']}`" if meta.get("sources") else None
    commit = f"commit {meta['commit']}" if meta.get("commit") else None
    return [
        f"Measured {meta['date']} on {', '.join(filter(None, facts))}; "
        f"{', '.join(filter(None, (commit, sources))) or 'of unknown sources'}:",
        "",
        "```sh",
        meta["command"],
        "```",
    ]


# Forwards


def _e2e(results: Results) -> tuple[list[str], list[Plot]]:
    lines = [
        "### One request at a time",
        "",
        "The time of one answer. Scope *e2e* is records to scores, tokenizing included, its modes asked in turn, round "
        "by round; *forward* is tokens to scores, mode after mode. Rows are tokens that pass through the model: the "
        "original computes every prompt whole, padded to the longest.",
        "",
    ]
    if any(row.get("rested_p50_ms") for row in results.rows):
        lines[2] += (
            " Calls follow each other without a pause, which a card at its power limit pays for with its clock; "
            "*rested* are others, with a pause before each."
        )
    pictures = []
    for profile, scope in dict.fromkeys((row["profile"], row["scope"]) for row in results.rows):
        rows = [row for row in results.rows if (row["profile"], row["scope"]) == (profile, scope)]
        head = ["case", "mode", "rows computed", "p50 ms", "fastest", "slowest", "times faster"]
        device = [
            ("kernels", "kernels"),
            ("busy_ms", "device busy ms"),
            ("floor_ms", "matmuls alone ms"),
            ("rested_p50_ms", "p50 ms, rested"),
            ("rested_floor_ms", "matmuls alone, rested"),
        ]
        device = [(key, title) for key, title in device if any(row.get(key) is not None for row in rows)]
        lines += [f"Shape {profile}, scope {scope}:", ""]
        body = []
        for row in rows:
            first = next(each["p50_ms"] for each in rows if each["case"] == row["case"])
            body.append(
                [
                    row["case"],
                    row["mode"],
                    f"{row['rows_computed']:,}",
                    _ms(row["p50_ms"]),
                    _ms(row["min_ms"]),
                    _ms(row["max_ms"]),
                    f"{first / row['p50_ms']:.3g}" if row["p50_ms"] != first else "",
                    *("" if row.get(key) is None else f"{row[key]:,.4g}" for key, _ in device),
                ]
            )
        lines += _table([*head, *(title for _, title in device)], body, left=2)
        name = f"{profile}, {scope}"
        pictures.append(_ladder(results, f"ladder-{profile}-{scope}", rows, f"median time, {name}"))
        lines += ["", pictures[-1].line, ""]
        with_budget = [row for row in rows if row.get("families")]
        if with_budget:
            pictures.append(_budgets(results, f"budget-{profile}-{scope}", with_budget))
            lines += [
                "Where the time of one profiled answer goes, by kernel family:",
                "",
                pictures[-1].line,
                "",
            ]
    return lines[:-1], pictures


def _ladder(results: Results, name: str, rows: Rows, title: str) -> Plot:
    def draw(path: Path) -> None:
        made, (axes,) = plots.figure(8, 1.2 + 0.27 * len(rows))
        plots.ladder(axes, rows, title)
        plots.save(made, path, results.digest)

    return Plot(f"{results.slug}-{name}.png", f"Bars: {title}", results.digest, draw)


def _budgets(results: Results, name: str, rows: Rows) -> Plot:
    cases = list(dict.fromkeys(row["case"] for row in rows))

    def draw(path: Path) -> None:
        made, axes = plots.figure(
            6.5 * min(len(cases), 2), 2.6 * -(-len(cases) // 2), len(cases), -(-len(cases) // 2)
        )
        for each, case in zip(axes, cases, strict=True):
            here = [{**row, "idle_ms": _idle(row)} for row in rows if row["case"] == case]
            plots.time_budget(each, here, case)
        plots.save(made, path, results.digest)

    return Plot(f"{results.slug}-{name}.png", "Bars: time by kernel family", results.digest, draw)


def _idle(row: dict[str, Any]) -> float:
    return row.get("idle_ms", max(row["p50_ms"] - sum(row["families"].values()), 0.0))


# Ops and matmuls


def _ops(results: Results) -> tuple[list[str], list[Plot]]:
    lines = [
        "### Op by op",
        "",
        "Microseconds of one layer's op, replayed in a CUDA graph on inputs that are not in the cache. `openjev_fast` "
        "is ours; the last column is the fastest other that computes the same over ours; relative L2 is our distance "
        "to the exact result. `sdpa_root` computes the shared text alone.",
    ]
    ratios = []
    for op in dict.fromkeys(row["op"] for row in results.rows):
        rows = [row for row in results.rows if row["op"] == op]
        variants = list(dict.fromkeys(row["variant"] for row in rows))
        body = []
        for case in dict.fromkeys(row["case"] for row in rows):
            here = {row["variant"]: row for row in rows if row["case"] == case}
            ours = here.get("openjev_fast", {}).get("us")
            aside = ("openjev_fast", "other_tiles", "sdpa_root")
            others = [each["us"] for name, each in here.items() if name not in aside and each["us"]]
            ratio = min(others) / ours if ours and others else None
            if ratio is not None:
                ratios.append({"op": op, "case": case, "ratio": ratio})
            body.append(
                [
                    case,
                    *(_us(here[name]["us"]) if name in here else "" for name in variants),
                    "" if not ours else f"{here['openjev_fast']['rel_l2']:.1e}",
                    "" if ratio is None else f"{ratio:.2f}",
                ]
            )
        lines += [
            "",
            f"`{op}`:",
            "",
            *_table(["case", *variants, "relative L2", "times faster"], body, left=1),
        ]
    picture = _op_ratios(results, [row for row in ratios if row["op"] in ("delta", "attention")])
    return [*lines, "", picture.line], [picture]


def _op_ratios(results: Results, rows: Rows) -> Plot:
    def draw(path: Path) -> None:
        made, (axes,) = plots.figure(8, 1.2 + 0.25 * len(rows))
        names = [f"{row['op']}, {row['case']}" for row in rows]
        paint = plots.colours(["fast", "graph"])
        colours = [paint["fast" if row["op"] == "delta" else "graph"] for row in rows]
        ratios = [row["ratio"] for row in rows]
        axes.axvline(1, color="#444444", linewidth=0.8, zorder=0)
        axes.barh(range(len(rows)), ratios, 0.7, color=colours)
        for index, ratio in enumerate(ratios):
            axes.text(max(ratio, 1) * 1.04, index, f"{ratio:.2f}x", va="center", fontsize=7)
        plots.logarithmic(axes)
        axes.set_xlim(0.5, max(ratios) * 1.5)
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.set_xlabel("times faster than the fastest other kernel, logarithmic", fontsize=8)
        axes.set_title("delta rule and attention, one layer", fontsize=10)
        plots.save(made, path, results.digest)

    alt = "Bars: delta rule and attention against the fastest other kernel"
    return Plot(f"{results.slug}-ops.png", alt, results.digest, draw)


def _gemm(results: Results) -> tuple[list[str], list[Plot]]:
    lines = [
        "### Matmuls",
        "",
        "Milliseconds of all matmuls of a forward and of the ops that read them, on cold weights, by its rows. "
        "`linear` is PyTorch's, `default` what is computed without a table, `openjev_fast` the ways the tuner chose; "
        f"[`gemm.json`](../bench/results/{results.slug}/gemm.json) has every product.",
        "",
    ]
    body = [
        [profile, f"{count:,}", *(f"{ms:.2f}" for ms in sums[:3]), f"{sums[0] / sums[2]:.3f}"]
        for profile, count, sums in forward_sums(results.rows)
    ]
    return [
        *lines,
        *_table(["shape", "rows", "linear", "default", "openjev_fast", "times faster"], body, left=1),
    ], []


# Servers


def _serve(results: Results) -> tuple[list[str], list[Plot]]:
    last = max((row.get("pass", 1) for row in results.rows), default=1)
    rows = [row for row in results.rows if row.get("pass", 1) == last]
    lines = [
        "### A server under load",
        "",
        f"Over HTTP, each client sending its next request when it has its answer; pass {last} of the run.",
        "",
    ]
    head = ["case", "mode", "clients", "requests", "errors", "answers a second", "p50 ms", "p95 ms", "p99 ms"]
    body = [
        [
            row["case"],
            row["mode"],
            str(row["clients"]),
            f"{row['requests']:,}",
            str(row["errors"]),
            f"{row['rps']:,.1f}",
            *(_ms(row[key]) for key in ("p50_ms", "p95_ms", "p99_ms")),
        ]
        for row in rows
    ]
    picture = _throughput(results, rows)
    return [*lines, *_table(head, body, left=2), "", picture.line], [picture]


def _throughput(results: Results, rows: Rows) -> Plot:
    cases = list(dict.fromkeys(row["case"] for row in rows))

    def draw(path: Path) -> None:
        made, axes = plots.figure(4.2 * len(cases), 3.2, len(cases))
        for each, case in zip(axes, cases, strict=True):
            here = [row for row in rows if row["case"] == case]
            modes = list(dict.fromkeys(row["mode"] for row in here))
            for mode in modes:
                line = [(row["clients"], row["rps"]) for row in here if row["mode"] == mode]
                each.plot(*zip(*line, strict=True), marker="o", label=mode, color=plots.colours(modes)[mode])
            each.set_xscale("log", base=2)
            each.xaxis.set_major_formatter("{x:g}")
            each.set_ylim(bottom=0)
            each.grid(alpha=0.3)
            each.set_xlabel("clients", fontsize=8)
            each.set_ylabel("answers a second", fontsize=8)
            each.set_title(case, fontsize=10)
            each.legend(fontsize=8, frameon=False)
        plots.save(made, path, results.digest)

    return Plot(f"{results.slug}-serve.png", "Lines: answers a second by clients", results.digest, draw)


def _workload(results: Results) -> tuple[list[str], list[Plot]]:
    passes = [row for row in results.rows if row["scope"] == "pass"]
    tasks = [row for row in results.rows if row["scope"] == "task"]
    lines = [
        "### A workload of JevBench's shape",
        "",
        f"{passes[0]['tasks']} single-question tasks over HTTP, one at a time on new connections, lengths spread like "
        "JevBench's public tasks. The first pass meets every shape for the first time. *ratio* is a mode's p50 over "
        f"that of `{passes[0]['mode']}` on the same tasks.",
        "",
    ]
    head = [
        "mode",
        "pass",
        "tasks",
        "errors",
        "p50 ms",
        "p95 ms",
        "mean ms",
        "slowest",
        "ratio",
        "changed decisions",
    ]
    body = [
        [
            row["mode"],
            str(row["pass"]),
            str(row["tasks"]),
            str(row["errors"]),
            *(_ms(row[key]) for key in ("p50_ms", "p95_ms", "mean_ms", "max_ms")),
            "" if row.get("p50_ratio") is None else f"{row['p50_ratio']:.2f}",
            "" if row.get("changed_decisions") is None else str(row["changed_decisions"]),
        ]
        for row in passes
    ]

    asked = {
        mode: {row["id"] for row in tasks if row["mode"] == mode} for mode in {row["mode"] for row in tasks}
    }
    common = set.intersection(*asked.values())
    panels = [(f"the {len(common)} tasks that all modes were asked", tasks, common)]
    if len(common) < passes[0]["tasks"]:
        first = [row for row in tasks if row["mode"] == passes[0]["mode"]]
        panels.insert(0, (f"all {passes[0]['tasks']} tasks", first, asked[passes[0]["mode"]]))

    def draw(path: Path) -> None:
        made, axes = plots.figure(6.5 * len(panels), 3.8, len(panels))
        for each, (title, rows, ids) in zip(axes, panels, strict=True):
            plots.latency_cdf(each, _by_pass([row for row in rows if row["id"] in ids]), title)
        plots.save(made, path, results.digest)

    alt = "Lines: cumulative distribution of latencies"
    picture = Plot(f"{results.slug}-jevbench-shaped.png", alt, results.digest, draw)
    return [*lines, *_table(head, body, left=1), "", picture.line], [picture]


def _by_pass(rows: Rows) -> dict[str, list[float]]:
    """Milliseconds of the first and of the last pass, by mode."""
    times: dict[str, list[float]] = {}
    for row in rows:
        for index, each in enumerate(row["ms"]):
            name = f"{row['mode']}, {'first' if index == 0 else 'last'} pass"
            if each is not None and index in (0, len(row["ms"]) - 1):
                times.setdefault(name, []).append(each)
    return times


def _cold_start(results: Results) -> tuple[list[str], list[Plot]]:
    starts = [row for row in results.rows if row["scope"] == "start"]
    answers = [row for row in results.rows if row["scope"] == "answer"]
    lines = [
        "### Starting",
        "",
        f"From the start of the process to ready, weights of shape {starts[0]['profile']}. With empty caches the first "
        "start compiles what it needs. First, second and later are answers to one request after that start.",
        "",
        *_table(
            ["mode", "caches", "start", "seconds to ready"],
            [[row["mode"], row["caches"], str(row["start"]), f"{row['ready_s']:.1f}"] for row in starts],
            left=2,
        ),
        "",
    ]
    body = [
        [
            row["case"],
            row["mode"],
            row["caches"],
            str(row["start"]),
            *(_ms(row[key]) for key in ("first_ms", "second_ms", "later_p50_ms")),
        ]
        for row in answers
    ]
    head = ["case", "mode", "caches", "start", "first ms", "second ms", "later p50 ms"]
    return [*lines, *_table(head, body, left=3)], []


def _soak(results: Results) -> tuple[list[str], list[Plot]]:
    keys = [
        key
        for key in dict.fromkeys(key for row in results.rows for key in row)
        if any(isinstance(row.get(key), str | int | float | dict) for row in results.rows)
    ]
    body = [[_plain(row.get(key)) for key in keys] for row in results.rows]
    return ["### Under load for long", "", *_table(keys, body, left=1)], []


def _plain(value: Any) -> str:
    """A figure, a text, or the names and figures of a dictionary, those without one left out."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items() if each is not None)
    if isinstance(value, float):
        return f"{value:,.6g}"
    return "" if value is None else str(value)


_SECTIONS = {
    "e2e": _e2e,
    "ops": _ops,
    "gemm": _gemm,
    "serve": _serve,
    "jevbench_shaped": _workload,
    "soak": _soak,
    "cold_start": _cold_start,
}


# The README


def readme_table(results: Iterable[Results]) -> str:
    """The original against `fast`, by card and case, from every e2e.json; of two scopes the wider, e2e."""
    body = []
    for each in results:
        if each.name != "e2e":
            continue
        profile = each.rows[0]["profile"]
        rows = [row for row in each.rows if row["profile"] == profile]
        scopes: dict[str, str] = {}
        for row in rows:
            if scopes.get(row["case"]) != "e2e":
                scopes[row["case"]] = row["scope"]
        for case, scope in scopes.items():
            here = {row["mode"]: row for row in rows if (row["case"], row["scope"]) == (case, scope)}
            original = next((here[mode] for mode in ORIGINALS if mode in here), None)
            fast = here.get("fast")
            if original is None or fast is None:
                continue
            shape = _SHAPES.get(profile, f"{profile.upper()} shape")
            where = f"{each.meta['device'].split(', AVX')[0]}, {shape} ([`{each.slug}/e2e.json`]"
            where += f"(bench/results/{each.slug}/e2e.json))"
            body.append(
                [
                    where,
                    _CASES.get(case, case),
                    scope,
                    f"{original['rows_computed']:,} to {fast['rows_computed']:,}",
                    f"{_ms(original['p50_ms'])} ms ({original['mode']})",
                    f"{_ms(fast['p50_ms'])} ms",
                    f"{original['p50_ms'] / fast['p50_ms']:.1f}",
                ]
            )
    for index in range(len(body) - 1, 0, -1):
        if body[index][0] == body[index - 1][0]:
            body[index][0] = ""
    head = ["where", "case", "scope", "rows, original to `fast`", "original", "`fast`", "times faster"]
    return "\n".join(_table(head, body, left=3))


def with_table(readme: str, table: str) -> str:
    """The README with the table between its two markers. ValueError where they are not there."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN!r} followed by {END!r}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


# Text


def _table(head: Sequence[str], body: Iterable[Sequence[str]], left: int) -> list[str]:
    """A Markdown table; columns from `left` on are numbers."""
    marks = ["---" if index < left else "---:" for index in range(len(head))]
    return [f"| {' | '.join(cells)} |" for cells in (head, marks, *body)]


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


# The command


def _described(path: Path) -> str | None:
    """The digest of the results that a picture was drawn from."""
    from PIL import Image

    if not path.is_file():
        return None
    with Image.open(path) as image:
        return image.info.get("Description")


def check(folder: Path, readme_path: Path, text: str, readme: str, pictures: list[Plot]) -> list[str]:
    """What is not as the results give it, in words."""
    wrong = []
    for path, wanted in ((folder / "report.md", text), (readme_path, readme)):
        found = path.read_text(encoding="utf-8") if path.is_file() else ""
        if found != wanted:
            lines = difflib.unified_diff(
                found.splitlines(), wanted.splitlines(), "found", "wanted", lineterm="", n=0
            )
            wrong.append(f"{path.name} is not what the results give:\n" + "\n".join([*lines][:12]))
    for picture in pictures:
        if _described(folder / "report" / picture.file) != picture.digest:
            wrong.append(f"{picture.file} was not drawn from the results there are")
    left_over = {path.name for path in (folder / "report").glob("*.png")} - {each.file for each in pictures}
    return wrong + [f"{name} is in no report" for name in sorted(left_over)]


def main(arguments: list[str] | None = None) -> int:
    """0 written, or all is as it should be; 1 something is not; 2 a file cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and fail where something would change"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: bench/results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="default: docs")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="default: README.md")
    args = parser.parse_args(arguments)
    try:
        plots.require()
        results = read(args.results)
        if not results:
            raise ValueError(
                f"{args.results} holds no results: run a benchmark such as bench/e2e_bench.py first"
            )
        text, pictures = document(results)
        readme = with_table(args.readme.read_text(encoding="utf-8"), readme_table(results))
    except (OSError, ValueError, UsageError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    now = source_digest()
    for each in results:
        if each.meta.get("sources") != now:
            say(f"{each.slug}/{each.name}.json, {each.meta['date']}: measured with other sources than these")
    if args.check:
        wrong = check(args.docs, args.readme, text, readme, pictures)
        for what in wrong:
            print(f"report: {what}\nrun python bench/report.py", file=sys.stderr)
        return 1 if wrong else 0
    (args.docs / "report").mkdir(parents=True, exist_ok=True)
    for stale in (args.docs / "report").glob("*.png"):
        stale.unlink()
    (args.docs / "report.md").write_text(text, encoding="utf-8")
    args.readme.write_text(readme, encoding="utf-8")
    for picture in pictures:
        picture.draw(args.docs / "report" / picture.file)
    say(f"wrote {args.docs / 'report.md'}, {len(pictures)} pictures and the table of {args.readme.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
