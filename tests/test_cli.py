"""The `openjev-fast` command and the quickstart of a fresh checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from openjev_fast_plugin import cli, quickstart
from openjev_fast_plugin.demo import EXAMPLE, render


def refused(*arguments: str) -> int:
    """The exit status of a command line that argparse does not take."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    return stopped.value.code


def test_help_as_a_process():
    script = Path(sys.executable).with_name("openjev-fast")
    command = [script] if script.exists() else [sys.executable, "-m", "openjev_fast_plugin.cli"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    for words in ("bench", "demo", "make-checkpoint", "verify", "warmup", "--backend fast", "exit status"):
        assert words in shown
    assert subprocess.run([*command, "unknown"], capture_output=True).returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve"],
        ["make-checkpoint"],
        ["make-checkpoint", "--profile", "huge", "out"],
        ["make-checkpoint", "--seed", "one", "out"],
        ["demo", "--repeats", "0"],
        ["demo", "--repeats", "many"],
        ["warmup"],
        ["warmup", "--checkpoint"],
        ["bench"],
        ["bench", "--checkpoint", "DIR", "--profile", "tiny"],
        ["bench", "--profile", "tiny", "--mode", "slow"],
        ["bench", "--profile", "tiny", "--repeats", "0"],
        ["verify"],
        ["verify", "--checkpoint", "DIR", "--backend", "torch"],
        ["verify", "--checkpoint", "DIR", "--seed", "one"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_2(arguments, capsys):
    assert refused(*arguments) == 2
    shown = capsys.readouterr().err
    assert "usage: openjev-fast" in shown and "_positive" not in shown


@pytest.mark.parametrize("command", ["bench", "demo", "doctor", "make-checkpoint", "warmup"])
def test_every_command_explains_itself(command, capsys):
    assert refused(command, "--help") == 0
    assert "jev.server" in capsys.readouterr().out


def test_make_checkpoint(tmp_path, capsys):
    assert (
        cli.main(["make-checkpoint", "--profile", "tiny", "--seed", "3", "--json", str(tmp_path / "out")])
        == 0
    )
    printed = capsys.readouterr()
    checkpoint = tmp_path / "out" / "package" / "checkpoint"
    assert json.loads(printed.out) == {"checkpoint": str(checkpoint), "profile": "tiny", "seed": 3}
    assert (checkpoint / "model.json").is_file() and (tmp_path / "out" / "base" / "config.json").is_file()
    assert printed.err, "progress is shown"


def test_make_checkpoint_refuses_a_folder_with_something_in_it(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert cli.main(["make-checkpoint", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert not printed.out and str(tmp_path) in printed.err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("raised", "status"), [(OSError("disk full"), 1), (KeyboardInterrupt(), 130)])
def test_the_exit_status_says_how_it_ended(monkeypatch, capsys, raised, status):
    def fails(args):
        raise raised

    monkeypatch.setitem(cli._COMMANDS, "demo", fails)
    assert cli.main(["demo"]) == status
    assert capsys.readouterr().err == ("openjev-fast demo: disk full\n" if status == 1 else "")


def test_demo(tiny_checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["--checkpoint", str(tiny_checkpoint), "--device", "cpu", "--repeats", "2", "--json"]
    assert cli.main(["demo", *arguments]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    questions = json.loads(EXAMPLE.read_text(encoding="utf-8"))["questions"]
    assert set(result) == {
        "answers",
        "rows_asked",
        "rows_computed",
        "largest_probability_difference",
        "original_ms",
        "fast_ms",
        "device",
    }
    types = {name: answer["type"] for name, answer in result["answers"].items()}
    assert types == {name: asked["type"] for name, asked in questions.items()}
    assert 0 < result["rows_computed"] < result["rows_asked"] / 1.5
    # Two bfloat16 forwards: close, and not one forward asked twice.
    assert 0 < result["largest_probability_difference"] < 0.1
    assert result["fast_ms"] > 0 and result["original_ms"] > 0 and result["device"] == "cpu"
    assert "--backend torch" in printed.err and "--backend fast" in printed.err
    shown = render(result)
    assert all(name in shown for name in questions) and f"{result['rows_computed']} computed" in shown


def test_demo_passes_on_what_a_server_says_that_does_not_start(tmp_path, capsys):
    missing = str(tmp_path / "missing")
    assert cli.main(["demo", "--checkpoint", missing, "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert not printed.out and "did not start (exit code 1)" in printed.err and missing in printed.err


# The quickstart


class Finished:
    def __init__(self, returncode: int) -> None:
        self.returncode = returncode


@pytest.mark.parametrize(
    ("tool", "returncode", "expected"),
    [(None, None, False), ("/bin/nvidia-smi", 0, True), ("/bin/nvidia-smi", 9, False)],
    ids=["no driver", "a GPU", "a driver without one"],
)
def test_has_gpu(monkeypatch, tool, returncode, expected):
    monkeypatch.setattr(quickstart.shutil, "which", lambda name: tool)
    monkeypatch.setattr(quickstart.subprocess, "run", lambda command, **_: Finished(returncode))
    assert quickstart.has_gpu() is expected


def test_torch_arguments(monkeypatch, capsys):
    class Answer:
        def close(self) -> None:
            pass

    def unreachable(url, timeout):
        raise OSError("no route")

    plain = [quickstart.TORCH]
    monkeypatch.setattr(quickstart.platform, "system", lambda: "Linux")
    monkeypatch.setattr(quickstart, "has_gpu", lambda: False)
    monkeypatch.setattr(quickstart.urllib.request, "urlopen", lambda url, timeout: Answer())
    assert quickstart.torch_arguments() == [*plain, "--extra-index-url", quickstart.CPU_INDEX]
    # The CPU index is asked for only where the default build would be the CUDA one.
    monkeypatch.setattr(quickstart.urllib.request, "urlopen", unreachable)
    assert quickstart.torch_arguments() == plain
    assert "no route" in capsys.readouterr().out
    monkeypatch.setattr(quickstart, "has_gpu", lambda: True)
    assert quickstart.torch_arguments() == plain
    monkeypatch.setattr(quickstart, "has_gpu", lambda: False)
    monkeypatch.setattr(quickstart.platform, "system", lambda: "Darwin")
    assert quickstart.torch_arguments() == plain
    assert not capsys.readouterr().out
