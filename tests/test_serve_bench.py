"""The serve benchmark's figures, its modes, and the soak: what it reads, and that memory which grows is noticed."""

from __future__ import annotations

import argparse
import json
import mmap
import os
from pathlib import Path

import load
import pytest
import serve_bench
import soak
from hosts import run
from http_server import JEV, ONE_THREAD, PYTHON

from openjev_fast_plugin.settings import Settings

ROOT = Path(__file__).resolve().parents[1]


def level(**answers_by_milliseconds) -> load.Level:
    found = load.Level(seconds=1.0)
    for name, metadata in answers_by_milliseconds.items():
        found.latencies.append(float(name.removeprefix("ms")) / 1e3)
        found.answers.append(json.dumps({"metadata": metadata}).encode())
    return found


def test_what_answers_say_of_themselves():
    three = level(
        ms10={"inference_seconds": 0.008, "backend": {"forward_ms": 7.0, "shared_with": 0}},
        ms20={"inference_seconds": 0.016, "backend": {"forward_ms": 15.0, "shared_with": 3}},
        ms30={"inference_seconds": 0.028, "backend": {"forward_ms": 29.0, "shared_with": 0}},
    )
    # The overhead is that of each request: not 20 - 15.
    assert serve_bench.said(three) == {
        "inference_p50_ms": 16.0,
        "forward_p50_ms": 15.0,
        "overhead_p50_ms": 3.0,
        "forward_requests": 2.0,
        "replayed": None,
    }
    two = level(
        ms10={"backend": {"forward_ms": 7.0, "shared_with": 1, "forwards": 1, "graph_replays": 1}},
        ms20={"backend": {"forward_ms": 15.0, "shared_with": 1, "forwards": 3, "graph_replays": 0}},
    )
    assert serve_bench.said(two)["replayed"] == 0.25
    original = level(ms10={"inference_seconds": 0.008})
    assert serve_bench.said(original) == {
        "inference_p50_ms": 8.0,
        "forward_p50_ms": None,
        "overhead_p50_ms": None,
        "forward_requests": None,
        "replayed": None,
    }
    assert set(serve_bench.said(load.Level()).values()) == {None}


def test_throughput_over_one_client_s():
    def row(mode, clients, rps, number=1):
        return {"case": "mixed", "mode": mode, "pass": number, "clients": clients, "rps": rps}

    found = [row("fast", 1, 50.0), row("fast", 8, 200.0), row("fla", 8, 7.0), row("fast", 1, 40.0, 2)]
    serve_bench.scaled(found)
    assert [each["times_one_client"] for each in found] == [1.0, 4.0, None, 1.0]


@pytest.mark.parametrize("text, mode", [("fast", ("fast", None)), ("fla:1,8", ("fla", [1, 8]))])
def test_modes(text, mode):
    assert serve_bench.mode_of(text) == mode


@pytest.mark.parametrize("text", ["", ":1", "fla:0", "fla:a", "fla:1,"])
def test_modes_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no mode such as"):
        serve_bench.mode_of(text)


def test_servers_of_modes():
    args = argparse.Namespace(checkpoint=None, profile="27b", device="cuda:0", warmup="72")

    def words(mode):
        return " ".join(serve_bench.server_of(mode, args)).partition("random_server.py ")[2]

    assert words("fast") == "--profile 27b --device cuda:0 --backend fast --warmup 72"
    assert words("fla") == "--profile 27b --delta-rule fla --device cuda:0 --backend torch"
    assert words("torch") == "--profile 27b --delta-rule torch --device cuda:0 --backend torch"
    assert words("kept") == words("waiting") == words("fast")
    kept, waiting, plain = (
        Settings.read(serve_bench.environment_of(mode)) for mode in ("kept", "waiting", "fast")
    )
    assert (kept.prefix_bytes, kept.prefix_rows, plain.prefix_bytes) == (2 << 30, 32, 0)
    assert (waiting.wait_us, kept.wait_us, plain.wait_us) == (4000, 0, 0)
    args.checkpoint = Path("C")
    assert serve_bench.server_of("fla", args) == [
        "-m", "jev.server", "--checkpoint", "C", "--device", "cuda:0", "--backend", "torch",
    ]  # fmt: skip


def test_without_flash_linear_attention_its_mode_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(serve_bench, "best_delta_rule", lambda: "torch")
    with pytest.raises(SystemExit) as stopped:
        serve_bench.main(["--device", "cuda:0"])
    assert stopped.value.code == 2 and "needs flash-linear-attention" in capsys.readouterr().err


def test_a_run_writes_every_figure(tiny_checkpoint, monkeypatch):
    written = []
    monkeypatch.setattr(serve_bench, "write", lambda device, bench, rows: written.append((bench, rows)))
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, JEV)))
    # Not the checkout, whose folders are not the package.
    monkeypatch.chdir(PYTHON.parent)
    arguments = [
        "--checkpoint",
        str(tiny_checkpoint),
        "--case",
        "noul_70",
        "--seconds",
        "0.5",
        "--warm-up",
        "0.2",
    ]
    serve_bench.main(
        [
            *arguments,
            "--passes",
            "1",
            "--clients",
            "1",
            "4",
            "--mode",
            "torch:1",
            "--mode",
            "fast",
            "--warmup",
            "72",
        ]
    )
    ((bench, rows),) = written
    assert bench == "serve"
    assert [(row["mode"], row["clients"]) for row in rows] == [("torch", 1), ("fast", 1), ("fast", 4)]
    assert all(row["errors"] == 0 and row["requests"] > 0 and row["inference_p50_ms"] > 0 for row in rows)
    original, alone, together = rows
    assert original["forward_p50_ms"] is None
    for row in (alone, together):
        assert 0 < row["forward_p50_ms"] < row["p50_ms"]
    assert alone["forward_requests"] == 1.0 < together["forward_requests"] <= 4.0
    # What one client waits beyond its forward, to the rounding of two medians.
    assert 0 < alone["overhead_p50_ms"] < alone["p50_ms"]
    assert alone["times_one_client"] == 1.0 and together["times_one_client"] > 0


# Soak


def samples(resident, device=lambda index: None, errors=0):
    return [
        {
            "seconds": 5.0 * (index + 1),
            "requests": 10,
            "errors": errors if index == 7 else 0,
            "resident_mib": resident(index),
            "device_mib": device(index),
        }
        for index in range(40)
    ]


BOUNDS = {"resident_mib": 64.0, "device_mib": 256.0}


def test_memory_that_comes_to_a_size_is_flat():
    # It grows while it warms up, and swings after.
    found = soak.judged(samples(lambda index: min(100 * index, 1000) + 40 * (index % 3 == 0)), 60.0, BOUNDS)
    assert found == {"grown": {"resident_mib": 0, "device_mib": None}, "failures": []}


@pytest.mark.parametrize(
    "found, told",
    [
        (
            samples(lambda index: 1000 + 5 * index),
            "resident_mib grew by 95 after the warm-up, 64 are allowed",
        ),
        (samples(lambda index: 1000, lambda index: 20 * index), "device_mib grew by 380"),
        (samples(lambda index: 1000, errors=2), "2 requests were not answered, 400 were"),
        (samples(lambda index: 1000)[:14], "2 readings after the warm-up are too few to tell"),
    ],
    ids=["host", "device", "errors", "short"],
)
def test_what_is_wrong_is_told(found, told):
    (failure,) = soak.judged(found, 60.0, BOUNDS)["failures"]
    assert failure.startswith(told)


def test_resident_memory_is_that_of_the_process():
    before = soak.resident_mib(os.getpid())
    # From the kernel: an allocator may hand out pages it holds already.
    with mmap.mmap(-1, 1 << 26, flags=mmap.MAP_PRIVATE) as pages:
        assert soak.resident_mib(os.getpid()) - before < 10
        for start in range(0, len(pages), mmap.PAGESIZE):
            pages[start] = 1
        assert 60 < soak.resident_mib(os.getpid()) - before < 70


def test_a_short_soak_that_grows_too_much(tiny_checkpoint, tmp_path):
    out = tmp_path / "soak.json"
    result = run(
        PYTHON,
        *(ROOT / "bench" / "soak.py", "--checkpoint", tiny_checkpoint, "--minutes", 0.07, "--every", 0.3),
        *("--warm-up", 0.1, "--most-mib", -10_000, "--out", out),
        path=JEV,
        **ONE_THREAD,
    )
    assert result.returncode == 1, result.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["errors"] == 0 and row["requests"] == sum(each["requests"] for each in row["samples"]) > 0
    assert len(row["samples"]) > 5 and all(each["resident_mib"] > 100 for each in row["samples"])
    assert row["grown"]["device_mib"] is None
    (failure,) = row["failures"]
    assert failure.startswith("resident_mib grew by ") and f"soak: {failure}" in result.stderr
