"""The JevBench-shaped workload has the shape it claims, and its runner measures and compares what servers answer."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import run_workload
from answering_server import HEALTH, answering
from hosts import ROOT
from http_server import Start, running
from http_tasks import Client, by_label, compare, decided, figures, read_results, results
from jev.api import candidate_prompts, compile_request
from workloads.jevbench_shaped import COUNTS, Task, tasks

from openjev_fast_plugin.checkpoint import train_tokenizer
from openjev_fast_plugin.forest import count_rows
from openjev_fast_plugin.prompts import PromptEncoder


@pytest.fixture(scope="module")
def sizes() -> list[tuple[Task, int, int, int]]:
    """Every task with the tokens of its longest prompt, its rows and the tokens of all its prompts."""
    encoder = PromptEncoder(train_tokenizer(8192), candidate_prompts)
    found = []
    for task in tasks():
        records = compile_request(task.request["state"], task.request["questions"])
        sequences = [sequence for group in encoder.encode(records) for sequence in group]
        lengths = [len(sequence) for sequence in sequences]
        found.append((task, max(lengths), count_rows(sequences), sum(lengths)))
    return found


def test_tiers_and_kinds_are_counted_as_published():
    counted = Counter((task.tier, task.kind) for task in tasks())
    assert counted == {(tier, kind): count for tier, kinds in COUNTS.items() for kind, count in kinds.items()}
    tiers, kinds = Counter(task.tier for task in tasks()), Counter(task.kind for task in tasks())
    assert tiers == {"original": 72, "easy": 48, "hard": 111}
    assert kinds == {"choice": 139, "noul": 74, "score": 18}
    assert len({task.id for task in tasks()}) == 231


def test_prompt_lengths_are_spread_like_the_published_run(sizes):
    paths, rows, tokens = ([size[index] for size in sizes] for index in (1, 2, 3))
    assert 80 <= sum(65 <= path <= 96 for path in paths) <= 100
    # The tail: one request of 10,722 tokens in 2,793 rows, prompts of about 2,680.
    longest = max(sizes, key=lambda size: size[3])
    assert longest[0].kind == "choice" and len(longest[0].request["questions"]["decision"]["criteria"]) == 4
    assert 2600 <= longest[1] == max(paths) <= 2700
    assert 2720 <= longest[2] == max(rows) <= 2800
    assert 10_500 <= longest[3] == max(tokens) <= 10_722
    # Most are short, and what is not reaches far: the mean is held up by the tail.
    assert 90 <= statistics.median(paths) <= 170
    assert 400 <= statistics.fmean(rows) <= 600
    assert 1700 <= statistics.quantiles(rows, n=20)[18] <= 2300
    assert min(paths) >= 50


def test_states_are_text_and_objects_and_every_request_is_one_question(sizes):
    states = Counter(type(task.request["state"]).__name__ for task, *_ in sizes)
    assert min(states["str"], states["dict"]) > 50 and len(states) == 2
    assert all(list(task.request["questions"]) == ["decision"] for task, *_ in sizes)
    for task, *_ in sizes:
        labels = by_label({"type": "noul", "noul": 0.5}) if task.kind == "noul" else None
        asked = task.request["questions"]["decision"]["criteria"]
        names = labels or (asked if task.kind == "choice" else map(str, range(len(asked))))
        assert task.expected in names


def test_the_text_follows_the_seed():
    assert tasks(1) == tasks(1) != tasks(2)
    assert [len(json.dumps(task.request)) for task in tasks(1)] != [0] * 231
    script = ROOT / "bench" / "workloads" / "jevbench_shaped.py"
    shown = subprocess.run(
        [sys.executable, script, "--seed", "1"], capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [line["request"] for line in lines] == [task.request for task in tasks(1)]


# The runner


def run(*arguments: object) -> int:
    return run_workload.main([str(argument) for argument in arguments])


def rows_of(file: Path, scope: str) -> list[dict[str, Any]]:
    content = json.loads(file.read_text())
    assert content["meta"]["command"] and content["meta"]["torch"]
    return [row for row in content["rows"] if row["scope"] == scope]


def test_one_server_is_asked_everything_twice_on_new_connections(tmp_path, capsys):
    out = tmp_path / "out.json"
    with answering() as server:
        assert run(server.url, "--out", out) == 0
        # One more for /health.
        assert server.connections == 1 + 2 * 231
        assert [request["state"] for request in server.asked] == [
            task.request["state"] for task in tasks()
        ] * 2
    first, second = rows_of(out, "pass")
    assert (first["pass"], second["pass"]) == (1, 2) and first["mode"] == "fast"
    assert first["tasks"] == 231 and first["errors"] == 0 and first["server"] == HEALTH
    assert 0 < first["min_ms"] <= first["p50_ms"] <= first["p95_ms"] <= first["max_ms"]
    rows = rows_of(out, "task")
    assert [row["id"] for row in rows] == [task.id for task in tasks()]
    for row in rows:
        assert len(row["ms"]) == 2 and row["error"] is None and row["rows_computed"] == 7
        assert row["forward_ms"] == [0.125, 0.125]
        assert sum(row["probabilities"].values()) == pytest.approx(1)
        assert row["probabilities"][row["decision"]] == max(row["probabilities"].values())
    times = [row["ms"][0] for row in rows]
    assert first["max_ms"] == max(times) and first["p50_ms"] == pytest.approx(
        statistics.median(times), abs=1e-3
    )
    assert first["overhead_p50_ms"] == pytest.approx(first["p50_ms"] - 0.125, abs=2e-3)
    printed = capsys.readouterr().out
    assert "p50 ms" in printed and "p95 ms" in printed and printed.count("\nfast ") == 2


def test_connections_are_kept_where_asked(tmp_path):
    with answering() as server:
        assert run(server.url, "--tasks", 9, "--keep-alive", "--out", tmp_path / "out.json") == 0
        assert server.connections == 1 and len(server.asked) == 18


def test_servers_are_asked_in_turn_and_their_decisions_compared(tmp_path, capsys):
    out = tmp_path / "out.json"
    with answering() as one, answering(shift=0.05) as other:
        arguments = (f"one={one.url}", f"other={other.url}", "--tasks", 30, "--sample", 12, "--passes", 1)
        assert run(*arguments, "--out", out) == 0
        assert (len(one.asked), len(other.asked)) == (30, 12)
    rows = {(row["mode"], row["id"]): row for row in rows_of(out, "task")}
    sample = [name for mode, name in rows if mode == "other"]
    changed = [name for name in sample if rows["one", name]["decision"] != rows["other", name]["decision"]]
    assert 0 < len(changed) < 12
    row = next(row for row in rows_of(out, "pass") if row["mode"] == "other")
    assert row["changed_decisions"] == len(changed) and row["tasks"] == 12
    # The ratio is over the tasks that both were asked.
    medians = [statistics.median(rows[mode, name]["ms"][0] for name in sample) for mode in ("one", "other")]
    assert row["same_tasks_p50_ms"] == medians[0] and row["p50_ratio"] == round(medians[1] / medians[0], 2)
    assert "p50_ratio" not in next(row for row in rows_of(out, "pass") if row["mode"] == "one")
    assert f"other: {len(changed)} of 12 decisions are not one's" in capsys.readouterr().out
    # From the shortest to the longest.
    chosen = run_workload.evenly(tasks(), 30)
    size = {task.id: len(json.dumps(task.request)) for task in tasks()}
    assert {min(size, key=size.get), max(size, key=size.get)} <= {task.id for task in chosen}
    assert len(chosen) == 30 and len(run_workload.evenly(tasks(), 1)) == 1


def test_tasks_without_an_answer_are_counted_and_shown(tmp_path, capsys):
    out = tmp_path / "out.json"
    with answering(refused=lambda request: len(json.dumps(request)) > 4000) as server:
        assert run(server.url, "--tasks", 20, "--passes", 1, "--out", out) == 1
    (row,) = rows_of(out, "pass")
    failed = [row for row in rows_of(out, "task") if row["error"]]
    assert 0 < row["errors"] == len(failed) < 20
    assert failed[0]["error"] == 'ValueError: status 422: {"error": "too long"}' and failed[0]["ms"] == [None]
    assert "status 422" in capsys.readouterr().err


def test_two_results_files_are_compared_task_by_task(tmp_path, capsys):
    files = [tmp_path / f"{name}.json" for name in ("one", "other")]
    for file, shift in zip(files, (0.0, 0.05), strict=True):
        with answering(shift=shift) as server:
            assert run(f"toy={server.url}", "--tasks", 30, "--passes", 1, "--out", file) == 0
    capsys.readouterr()
    assert run("--compare", *files) == 0
    shown = capsys.readouterr().out
    one, other = (read_results(str(file)) for file in files)
    found = compare(one, other)
    assert found["tasks"] == 30 and 0 < len(found["changed"]) < 30 and found["correct"] is None
    assert f"{len(found['changed'])} of 30 decisions changed" in shown
    for each in found["changed"]:
        assert f"{each['id']}: {each['one']!r} (margin {each['one_margin']:.4f}) became" in shown
    assert compare(one, one)["changed"] == [] and compare(one, one)["largest_probability_difference"] == 0
    assert run("--compare", files[0], f"{files[1]}:toy") == 0
    assert run("--compare", files[0], f"{files[1]}:missing") == 2
    assert "no tasks of mode 'missing'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["ftp://somewhere"], "is not the URL of a server"),
        (["--compare", "missing.json", "missing.json"], "missing.json is not a results file"),
    ],
)
def test_what_cannot_be_asked_is_2(arguments, message, capsys):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_two_servers_of_one_name_are_refused(capsys):
    with answering() as server:
        assert run(server.url, server.url) == 2
    assert "two servers are named 'fast'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["http://x", "--compare", "a", "b"], ["http://x", "--tasks", "0"]])
def test_a_wrong_command_line_is_2(arguments):
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2


def test_real_servers_agree(tiny_checkpoint, tmp_path):
    serve = ("-m", "jev.server", "--checkpoint", tiny_checkpoint, "--backend")
    with running(Start((*serve, "torch")), Start((*serve, "fast"))) as servers:
        out = tmp_path / "out.json"
        assert run(*(server.url for server in servers), "--tasks", 5, "--passes", 1, "--out", out) == 0
    original, fast = rows_of(out, "pass")
    assert (original["mode"], fast["mode"]) == ("torch", "fast") and fast["errors"] == 0
    assert 0 < fast["largest_probability_difference"] < 0.2
    computed = [row["rows_computed"] for row in rows_of(out, "task") if row["mode"] == "fast"]
    assert all(isinstance(rows, int) for rows in computed)


# What both runners share


def test_figures_of_a_distribution():
    found = figures([float(value) for value in range(101)])
    assert found == {"p50_ms": 50.0, "p95_ms": 95.0, "mean_ms": 50.0, "min_ms": 0.0, "max_ms": 100.0}
    assert figures([3.0])["p95_ms"] == 3.0 and figures([])["p50_ms"] is None


def test_decisions_and_margins():
    assert decided(by_label({"type": "noul", "noul": 0.4})) == {
        "decision": "no",
        "margin": pytest.approx(0.2),
        "probabilities": {"no": 0.6, "yes": 0.4},
    }
    assert decided({"only": 1.0})["margin"] == 1.0


def test_only_what_both_answered_is_compared():
    def rows(decision: str, error: str | None = None) -> list[dict[str, Any]]:
        task = {"scope": "task", "mode": "m", "id": "a", "ms": [1.0], "error": error}
        return [{**task, "decision": decision, "margin": 0.5, "probabilities": {"x": 0.75, "y": 0.25}}]

    failed = compare(results("one", rows("x")), results("other", rows("y", "timed out")))
    assert failed["tasks"] == 0 and failed["changed"] == [] and failed["correct"] is None
    assert len(compare(results("one", rows("x")), results("other", rows("y")))["changed"]) == 1


def test_a_path_before_the_route_is_kept():
    with answering() as server, pytest.raises(ValueError, match="status 422"):
        Client(f"{server.url}/prefix/").ask(tasks()[0].request)


def test_it_starts_the_servers_itself(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out.json"
    given = ("--checkpoint", tiny_checkpoint, "--tasks", 5, "--sample", 2, "--out", out)
    assert run("--start", "fast", "--start", "torch", *given) == 0
    passes = {(row["mode"], row["pass"]): row for row in rows_of(out, "pass")}
    assert set(passes) == {(mode, number) for mode in ("fast", "torch") for number in (1, 2)}
    assert passes["fast", 2]["tasks"] == 5 and passes["torch", 2]["tasks"] == 2
    assert passes["fast", 1]["server"]["backend"]["name"] == "fast"
    assert passes["torch", 1]["server"].get("backend", {}).get("name", "torch") == "torch"
    assert passes["torch", 2]["p50_ratio"] > 0 and "times fast's on the same tasks" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--start", "fast"], "--start takes one of --checkpoint and --profile"),
        (["--start", "fast", "--profile", "tiny", "--checkpoint", "here"], "--start takes one of"),
        (["--profile", "tiny", "http://127.0.0.1:1"], "--start takes one of"),
        (
            ["--start", "fast", "--profile", "tiny", "http://127.0.0.1:1"],
            "give the URL of a server, or --start",
        ),
    ],
)
def test_start_is_told_what_to_serve(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_original_is_called_what_it_runs(capsys):
    assert run("--start", "fla", "--profile", "tiny") == 2
    assert "needs a GPU as --device and flash-linear-attention" in capsys.readouterr().err
