"""The JevBench runner on a checkout in JevBench's format, with an adapter, a scorer and tasks of our own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import run_jevbench
from answering_server import answering

TASKS = """
import json
from dataclasses import dataclass

@dataclass
class Task:
    id: str
    family: str
    state: object
    question: dict
    labels: list
    expected: object
    split: str = "public"

def load_jsonl(path):
    with open(path) as lines:
        return [Task(**json.loads(line)) for line in lines if line.strip()]
"""
# The label with the largest probability, the first of equal ones; a sum away from 1 is invalid and wrong.
SCORING = """
def score_task(probs, task):
    valid = set(probs) == set(task.labels) and abs(sum(probs.values()) - 1) < 1e-3
    predicted = sorted(probs, key=lambda label: (-probs[label], label))[0] if valid else None
    return {"valid": valid, "predicted": predicted, "correct": valid and predicted == str(task.expected)}
"""
TYPESAFE = """
import json, time, urllib.error, urllib.request
from types import SimpleNamespace

class TypeSafeAdapter:
    name = "typesafe"

    def __init__(self, endpoint=None, model=None, key_env="TYPESAFE_API_KEY", timeout_s=60):
        assert key_env is None
        self.endpoint, self.model, self.timeout_s = endpoint, model, timeout_s

    def run(self, task):
        body = {"model": self.model, "state": task.state, "questions": {"decision": task.question}}
        call = urllib.request.Request(
            self.endpoint + "/v1/systemone", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(call, timeout=self.timeout_s) as response:
                answer = json.load(response)["answers"]["decision"]
        except OSError as error:
            status = getattr(error, "code", None)
            return SimpleNamespace(ok=False, probs=None, status=status, error=f"HTTP {status}", latency_s=0.1)
        if answer["type"] == "noul":
            probs = {"no": 1 - answer["noul"], "yes": answer["noul"]}
        else:
            probs = answer["probabilities"]
        return SimpleNamespace(ok=True, probs=probs, status=200, error=None, latency_s=0.1)
"""


def task(name: str, kind: str, state: str, expected: Any = None) -> dict[str, Any]:
    criteria, labels = {
        "choice": ({"red": "warm", "blue": "cold", "green": None}, ["red", "blue", "green"]),
        "noul": ({"true": "it is", "false": "it is not"}, ["no", "yes"]),
        "score": (["low", "middle", "high"], ["0", "1", "2"]),
    }[kind]
    question = {"type": kind, "instructions": "Which?", "criteria": criteria}
    expected = expected if expected is not None else {"choice": "red", "noul": "yes", "score": 1}[kind]
    return {
        "id": name,
        "family": "colours",
        "state": state,
        "question": question,
        "labels": labels,
        "expected": expected,
    }


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A JEVBENCH_DIR with 14 tasks, and no trace of it in this process afterwards."""
    folder = tmp_path / "jevbench"
    package = folder / "jevbench"
    (package / "adapters").mkdir(parents=True)
    for name, content in {
        "__init__": "",
        "tasks": TASKS,
        "scoring": SCORING,
        "adapters/__init__": "from .typesafe import TypeSafeAdapter\n",
        "adapters/typesafe": TYPESAFE,
    }.items():
        (package / f"{name}.py").write_text(content)
    public = folder / "datasets" / "public"
    public.mkdir(parents=True)
    tiers = {
        "original": [task(f"original-{i}", ("choice", "noul")[i % 2], f"state {i}") for i in range(6)],
        "easy": [task(f"easy-{i}", ("choice", "score")[i % 2], f"easy {i}") for i in range(4)],
        "hard": [task(f"hard-{i}", "choice", f"a long state {i} " * 40) for i in range(4)],
    }
    for tier, lines in tiers.items():
        (public / f"{tier}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    monkeypatch.setenv("JEVBENCH_DIR", str(folder))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "jevbench"]:
        del sys.modules[name]


def run(*arguments: object) -> int:
    return run_jevbench.main([str(argument) for argument in arguments])


def rows_of(file: Path, scope: str) -> list[dict[str, Any]]:
    return [row for row in json.loads(file.read_text())["rows"] if row["scope"] == scope]


def test_every_task_is_run_by_its_adapter_and_judged_by_its_scorer(checkout, tmp_path, capsys):
    out = tmp_path / "out.json"
    with answering() as server:
        assert run(server.url, "open-jev", out, "--passes", 2) == 0
        assert len(server.asked) == 28 and {request["model"] for request in server.asked} == {"open-jev"}
        # A connection a task, and one for /health.
        assert server.connections == 29
    tasks, passes = rows_of(out, "task"), rows_of(out, "pass")
    assert [row["pass"] for row in passes] == [1, 2] and passes[0]["model"] == "open-jev"
    assert {row["tier"] for row in tasks} == {"original", "easy", "hard"} and len(tasks) == 14
    for row in tasks:
        assert row["correct"] == (row["decision"] == row["expected"]) and row["valid"]
        assert len(row["ms"]) == 2 and min(row["ms"]) > 0 and row["family"] == "colours"
    right = sum(row["correct"] for row in tasks)
    assert 0 < right < 14
    shown = capsys.readouterr().out
    table = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    assert table["right"] == ["choice", "noul", "score", "all"]
    assert table["all"][-1] == f"{right}/14" and table["hard"][0] == table["hard"][-1]
    of_easy = [row["correct"] for row in tasks if (row["tier"], row["kind"]) == ("easy", "score")]
    assert table["easy"][1] == f"{sum(of_easy)}/2"
    assert "p95 ms" in shown and "0 invalid" in shown


def test_two_files_are_compared_task_by_task(checkout, tmp_path, capsys):
    files = [tmp_path / "one.json", tmp_path / "other.json"]
    for file, shift in zip(files, (0.0, 0.3), strict=True):
        with answering(shift=shift) as server:
            assert run(server.url, "open-jev", file) == 0
    capsys.readouterr()
    assert run("--compare", *files) == 0
    shown = capsys.readouterr().out
    one, other = ({row["id"]: row for row in rows_of(file, "task")} for file in files)
    changed = [name for name in one if one[name]["decision"] != other[name]["decision"]]
    assert 0 < len(changed) < 14 and f"{len(changed)} of 14 decisions changed" in shown
    right = [sum(row["correct"] for row in rows.values()) for rows in (one, other)]
    assert f"right: {right[0]} and {right[1]}" in shown
    for name in changed:
        (line,) = [line for line in shown.splitlines() if line.startswith(f"  {name}:")]
        assert line.count("right") == one[name]["correct"] + other[name]["correct"]


def test_refused_tasks_are_wrong_and_do_not_end_the_run(checkout, tmp_path, capsys):
    out = tmp_path / "out.json"
    with answering(refused=lambda request: "long" in request["state"]) as server:
        assert run(server.url, "open-jev", out) == 1
    hard = [row for row in rows_of(out, "task") if row["tier"] == "hard"]
    assert all(not row["correct"] and row["error"] == "HTTP 422" and row["ms"] == [None] for row in hard)
    assert rows_of(out, "pass")[0]["errors"] == 4 and "4 invalid" in capsys.readouterr().out


def test_a_server_that_went_away_ends_the_run(checkout, tmp_path, capsys):
    with answering() as server:
        real = run_jevbench.Client.health
        run_jevbench.Client.health = lambda self: (real(self), server.shutdown(), server.server_close())[0]
        try:
            assert run(server.url, "open-jev", tmp_path / "out.json") == 2
        finally:
            run_jevbench.Client.health = real
    assert "3 tasks in a row failed" in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_a_server_that_tells_nothing_of_itself_is_run_too(checkout, tmp_path):
    with answering(health=None) as server:
        assert run(server.url, "jev-latest", tmp_path / "out.json") == 0
    assert rows_of(tmp_path / "out.json", "pass")[0]["mode"] == "unknown"


def test_without_jevbench_there_is_one_clear_message(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("JEVBENCH_DIR", raising=False)
    assert run("http://127.0.0.1:1", "open-jev", tmp_path / "out.json") == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(
        "run_jevbench: JEVBENCH_DIR is not set: clone https://"
    )
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("missing", ["jevbench/tasks.py", "datasets/public/hard.jsonl"])
def test_a_folder_that_is_no_checkout_is_named(checkout, tmp_path, capsys, missing):
    (checkout / missing).unlink()
    assert run("http://127.0.0.1:1", "open-jev", tmp_path / "out.json") == 2
    assert f"is no checkout of JevBench: {missing} is not there" in capsys.readouterr().err


def test_another_jevbench_is_not_taken_for_it(checkout, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other" / "jevbench"
    other.parent.mkdir()
    (checkout / "jevbench").rename(other)
    monkeypatch.syspath_prepend(str(other.parent))
    __import__("jevbench.tasks")
    (checkout / "jevbench").mkdir()
    (checkout / "jevbench" / "tasks.py").write_text(TASKS)
    assert run("http://127.0.0.1:1", "open-jev", tmp_path / "out.json") == 2
    assert "another JevBench" in capsys.readouterr().err


def test_a_checkout_that_cannot_be_imported_is_named(checkout, tmp_path, capsys):
    (checkout / "jevbench" / "scoring.py").write_text("import nowhere_to_be_found\n")
    assert run("http://127.0.0.1:1", "open-jev", tmp_path / "out.json") == 2
    assert "cannot be imported: No module named 'nowhere_to_be_found'" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_2(checkout, tmp_path, capsys):
    assert run("http://127.0.0.1:1", "open-jev", tmp_path / "out.json") == 2
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["http://x"], ["http://x", "m", "out", "--compare", "a", "b"]])
def test_a_wrong_command_line_is_2(arguments):
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
