"""What a start costs, measured on the tiny checkpoint: real servers, each with a home folder of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import cold_start
import pytest

from openjev_fast_plugin.checkpoint import train_tokenizer


def test_starts_and_first_answers(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    homes = []
    environment_of = cold_start.environment_of
    monkeypatch.setattr(cold_start, "environment_of", lambda home: homes.append(home) or environment_of(home))
    out = tmp_path / "cold.json"
    given = ["--checkpoint", str(tiny_checkpoint), "--starts", "2", "--asks", "3", "--out", str(out)]
    assert cold_start.main([*given, "--case", "noul_70", "--case", "example"]) == 0
    content = json.loads(out.read_text())
    starts = [row for row in content["rows"] if row["scope"] == "start"]
    assert [(row["mode"], row["caches"], row["start"]) for row in starts] == [
        ("fast", "empty", 1),
        ("fast", "full", 2),
    ]
    assert all(row["ready_s"] > 0.5 for row in starts)
    answers = [row for row in content["rows"] if row["scope"] == "answer"]
    assert [(row["start"], row["case"]) for row in answers] == [
        (start, case) for start in (1, 2) for case in ("noul_70", "example")
    ]
    for row in answers:
        assert min(row["first_ms"], row["second_ms"], row["later_p50_ms"]) > 0 and row["rows_computed"] > 0
    assert content["meta"]["sources"] and content["meta"]["torch"]
    # Both starts of a mode share one folder, which is nobody's else.
    assert homes[0] == homes[1] != Path.home() and not homes[0].exists()
    shown = capsys.readouterr().out
    assert f"{starts[0]['ready_s']:.2f}" in shown and f"{answers[0]['first_ms']:.2f}" in shown


def test_a_server_has_a_home_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/shared")
    found = cold_start.environment_of(tmp_path)
    assert found["HOME"] == str(tmp_path) and "TRITON_CACHE_DIR" not in found
    assert found["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("case, tokens", [("noul_70", 70), ("choice_8x250", 250), ("noul_1000", 1000)])
def test_requests_are_about_as_long_as_their_names_say(case, tokens):
    from jev.api import candidate_prompts, compile_request

    from openjev_fast_plugin.prompts import PromptEncoder

    tokenizer = train_tokenizer(4096)
    request = cold_start.request_of(case, tokenizer)
    groups = PromptEncoder(tokenizer, candidate_prompts).encode(
        compile_request(request["state"], request["questions"])
    )
    longest = max(len(sequence) for group in groups for sequence in group)
    assert abs(longest - tokens) <= 15


@pytest.mark.parametrize(
    "arguments",
    [["--starts", "0"], ["--asks", "2"], ["--mode", "fla"], ["--mode", "unknown"], ["--case", "none"]],
)
def test_a_wrong_command_line_is_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cold_start.main(arguments)
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_a_server_that_does_not_start_is_1(tmp_path, capsys):
    assert cold_start.main(["--checkpoint", str(tmp_path / "missing"), "--out", str(tmp_path / "out")]) == 1
    assert "did not start" in capsys.readouterr().err and not (tmp_path / "out").exists()
