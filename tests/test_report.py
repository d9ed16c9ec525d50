"""docs/report.md and the README's table are what the committed results give, and change when those do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import report
from gemm_bench import shapes
from hosts import ROOT
from op_inputs import PROFILES

RESULTS = ROOT / "bench" / "results"
META = {
    "device": "NVIDIA Something",
    "driver": "1.2.3",
    "cuda": "13.0",
    "python": "3.11.1",
    "torch": "2.11.0",
    "transformers": "5.10.2",
    "fla": None,
    "sources": "0123456789abcdef",
    "commit": None,
    "date": "2026-01-02",
    "command": "python bench/some.py --of 'this'",
}


def test_the_committed_report_is_what_the_committed_results_give(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().err


def forward(case: str, mode: str, p50: float, **more) -> dict:
    return {
        "profile": "27b",
        "scope": "forward",
        "case": case,
        "mode": mode,
        "p50_ms": p50,
        "min_ms": p50 - 0.5,
        "max_ms": p50 + 0.5,
        "rows_computed": 72,
        **more,
    }


def task(mode: str, name: str, ms: list[float | None]) -> dict:
    return {"scope": "task", "mode": mode, "id": name, "ms": ms}


def passed(mode: str, number: int, tasks: int, **more) -> dict:
    times = {"p50_ms": 10.0, "p95_ms": 20.0, "mean_ms": 12.0, "max_ms": 30.0}
    return {"scope": "pass", "mode": mode, "pass": number, "tasks": tasks, "errors": 0, **times, **more}


FAMILIES = {"matmul": 6.0, "delta rule": 2.0, "attention": 1.0, "norms and elementwise": 1.0, "other": 0.5}
ROWS = {
    "e2e": [
        forward("example", "fla", 128.25, kernels=4000, busy_ms=66.0, families=FAMILIES),
        forward("example", "fast", 16.03, kernels=700, busy_ms=10.5, families=FAMILIES),
    ],
    "ops": [
        {"op": "attention", "case": "root_9", "variant": "openjev_fast", "us": 50.0, "rel_l2": 0.001},
        {"op": "attention", "case": "root_9", "variant": "sdpa_padded", "us": 100.0, "rel_l2": 0.001},
        {"op": "attention", "case": "root_9", "variant": "sdpa_dense", "us": None, "rel_l2": None},
        # The shared text alone: no rival.
        {"op": "attention", "case": "root_9", "variant": "sdpa_root", "us": 10.0, "rel_l2": 0.001},
    ],
    # A product a weight; each of 64 layers, or of 16 or 48 of them, has one.
    "gemm": [
        {"profile": "27b", "weight": shape.name, "rows": 72, "variant": name, "us": us,
         "alone_us": 1.0, "skipped": None}
        for shape in shapes(PROFILES["27b"])
        for name, us in (("linear", 20.0), ("default", 19.0), ("openjev_fast", 16.0))
    ],
    "serve": [
        {"case": "mixed", "mode": mode, "clients": clients, "requests": 1000, "errors": 0, "rps": rps, "p50_ms": 1.5,
         "p95_ms": 2.5, "p99_ms": None, "pass": number}
        for number in (1, 2) for mode, rps in (("torch", 5.5), ("fast", 55.5)) for clients in (1, 4)
    ],
    "jevbench_shaped": [
        passed("fast", 1, 3), passed("fast", 2, 3), passed("fla", 1, 2, p50_ratio=7.25, changed_decisions=1),
        *(task("fast", name, [5.0, 4.0]) for name in "abc"), *(task("fla", name, [50.0, None]) for name in "ab"),
    ],
    "soak": [
        {"minutes": 1, "errors": 0, "environment": {"CACHE": "64"}, "grown": {"mib": -2.5, "gpu": None}, "samples": []}
    ],
    "cold_start": [
        {"scope": "start", "profile": "27b", "mode": "fast", "caches": "empty", "start": 1, "ready_s": 61.25},
        {"scope": "answer", "profile": "27b", "mode": "fast", "caches": "empty", "start": 1, "case": "noul_70",
         "first_ms": 49.75, "second_ms": 20.5, "later_p50_ms": 16.5},
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    """A results folder with one of everything, a README with the markers, and no docs."""
    for name, rows in ROWS.items():
        file = tmp_path / "results" / "nvidia-something" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"meta": META, "rows": rows}))
    (tmp_path / "README.md").write_text(f"Before.\n{report.BEGIN}\nold\n{report.END}\nAfter.\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    places = ["--results", "results", "--docs", "docs", "--readme", "README.md"]
    return report.main(
        [*(str(folder / each) if not each.startswith("--") else each for each in places), *arguments]
    )


def written(folder: Path) -> dict[str, bytes]:
    files = [*(folder / "docs").rglob("*"), folder / "README.md"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


def test_every_results_file_has_a_section_with_its_figures(folder, capsys):
    assert run(folder) == 0
    shown = (folder / "docs" / "report.md").read_text()
    assert "## NVIDIA Something" in shown and "Not measured here yet" not in shown
    for figures in (
        "| example | fast | 72 | 16.0 | 15.5 | 16.5 | 8 | 700 | 10.5 |",
        "| root_9 | 50.0 | 100.0 |  | 10.0 | 1.0e-03 | 2.00 |",
        "| 27b | 72 | 5.12 | 4.86 | 4.10 | 1.250 |",
        "| mixed | fast | 4 | 1,000 | 0 | 55.5 | 1.50 | 2.50 |  |",
        "| fla | 1 | 2 | 0 | 10.0 | 20.0 | 12.0 | 30.0 | 7.25 | 1 |",
        "| 1 | 0 | CACHE 64 | mib -2.5 |",
        "| fast | empty | 1 | 61.2 |",
        "| noul_70 | fast | empty | 1 | 49.8 | 20.5 | 16.5 |",
        "driver 1.2.3",
        "torch 2.11.0",
        "Measured 2026-01-02",
        "sources `0123456789abcdef`",
        META["command"],
    ):
        assert figures in shown, figures
    pictures = {path.name for path in (folder / "docs" / "report").iterdir()}
    assert len(pictures) == 5 and all(f"(report/{name})" in shown for name in pictures)
    readme = (folder / "README.md").read_text()
    assert readme.startswith("Before.\n") and readme.endswith("After.\n") and "old" not in readme
    assert "| NVIDIA Something, 27B shape " in readme and "| 128.2 ms (fla) | 16.0 ms | 8.0 |" in readme
    # The sources these were measured with are not this checkout's.
    assert capsys.readouterr().err.count("measured with other sources") == len(ROWS)


def test_the_same_results_give_the_same_bytes(folder):
    assert run(folder) == 0
    first = written(folder)
    assert run(folder, "--check") == 0 and written(folder) == first
    assert run(folder) == 0 and written(folder) == first


def test_a_check_finds_what_is_not_as_the_results_are(folder, capsys):
    assert run(folder) == 0
    before = written(folder)

    def refused(what: str) -> None:
        capsys.readouterr()
        assert run(folder, "--check") == 1
        assert what in capsys.readouterr().err

    readme = folder / "README.md"
    readme.write_text(readme.read_text().replace("16.0 ms", "11.0 ms"))
    refused("README.md is not what the results give")
    readme.write_bytes(before["README.md"])
    picture = next((folder / "docs" / "report").glob("*ladder*"))
    picture.unlink()
    refused(f"{picture.name} was not drawn from the results there are")
    assert run(folder) == 0
    (folder / "docs" / "report" / "older.png").write_bytes(b"")
    refused("older.png is in no report")
    assert run(folder) == 0
    file = folder / "results" / "nvidia-something" / "serve.json"
    file.write_text(file.read_text().replace("55.5", "66.6"))
    refused("report.md is not what the results give")
    # A change that no table shows makes the picture old all the same.
    assert run(folder) == 0
    file.write_text(file.read_text() + "\n")
    refused("serve.png was not drawn from the results there are")


def test_what_was_not_measured_is_named(folder):
    for name in ("serve", "soak"):
        (folder / "results" / "nvidia-something" / f"{name}.json").unlink()
    shutil.copytree(RESULTS / "cpu", folder / "results" / "cpu")
    assert run(folder) == 0
    cpu, gpu = (folder / "docs" / "report.md").read_text().split("## NVIDIA Something")
    assert "`serve.json` (bench/serve_bench.py), `soak.json`" in gpu and "### A server under load" not in gpu
    assert "cold_start.json" in cpu and "ops.json" not in cpu


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("e2e.json", "[]", "is not a results file"),
        ("e2e.json", "{", "is not a results file"),
        ("other.json", json.dumps({"meta": META, "rows": []}), "no benchmark is named 'other'"),
    ],
)
def test_a_file_that_holds_no_results_is_2(folder, capsys, name, content, message):
    (folder / "results" / "nvidia-something" / name).write_text(content)
    assert run(folder) == 2
    shown = capsys.readouterr().err
    assert message in shown and name in shown and not (folder / "docs").exists()


def test_a_readme_without_the_markers_is_2(folder, capsys):
    (folder / "README.md").write_text("nothing")
    assert run(folder) == 2
    assert "README.md has no" in capsys.readouterr().err
