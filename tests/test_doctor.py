"""`openjev-fast doctor`: it names what is wrong, and only that."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from openjev_fast_plugin import bootstrap, build, cli, doctor, plugin
from openjev_fast_plugin.patches import UnknownUpstream, transformers_masks


@pytest.fixture(autouse=True)
def healthy(monkeypatch, tmp_path):
    """An environment without problems, whatever this one is like."""
    for name in ("OPENJEV_BACKEND", "OPENJEV_FAST_MAX_ROWS", "OPENJEV_FAST_ACCESS_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [bootstrap._finder, *sys.meta_path])
    monkeypatch.setattr(build, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_output", lambda *command: "")


def problems() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine() if finding.state == "problem"}


def test_an_environment_without_problems(capsys):
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("no problem found\n")
    for words in (
        torch.__version__,
        "open-jev",
        "torch, fast, graph, auto",
        "none: everything runs on the CPU",
    ):
        assert words in shown


def test_for_machines(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert {"name", "state", "found", "hint"} == set(found["findings"][0])


def test_every_problem_has_a_hint_and_decides_the_exit_status(monkeypatch, capsys):
    monkeypatch.setenv("OPENJEV_FAST_MAX_ROWS", "many")
    monkeypatch.setenv("OPENJEV_FAST_MAXROWS", "5")
    monkeypatch.setenv("OPENJEV_BACKEND", "fsat")
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if each is not bootstrap._finder])
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    wrong = [finding for finding in found["findings"] if finding["state"] == "problem"]
    assert found["ok"] is False and all(finding["hint"] for finding in wrong)
    text = json.dumps(wrong)
    for words in ("'many'", "OPENJEV_FAST_MAXROWS is no variable", "OPENJEV_BACKEND=fsat", "start-up file"):
        assert words in text
    assert len(wrong) == 4


def test_no_host(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert set(problems()) == {"open-jev"}


def test_a_library_that_is_missing(monkeypatch):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "peft" else real(name))
    assert problems()["peft"].hint == "pip install peft"


def test_a_plugin_that_fails_to_load(monkeypatch):
    monkeypatch.setattr(plugin, "load_failures", lambda: {"other": "ImportError: no such thing"})
    assert "'other'" in problems()["backends"].found


def test_a_gpu_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(doctor, "_output", lambda *command: "NVIDIA H200, 580.1\nNVIDIA H200, 580.1")
    assert problems()["gpu"].found.startswith("NVIDIA H200, 580.1, which torch")


@pytest.mark.parametrize("capability, wrong", [((9, 0), {"kernels"}), ((7, 5), {"gpu cuda:0", "kernels"})])
def test_a_gpu_without_a_compiler(monkeypatch, capability, wrong):
    about = SimpleNamespace(
        name="NVIDIA Card", major=capability[0], minor=capability[1], total_memory=80 << 30
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70 << 30, 80 << 30))

    def no_compiler():
        raise build.BuildError("missing:\n  nvcc")

    monkeypatch.setattr(build, "make_plan", no_compiler)
    found = problems()
    assert set(found) == wrong
    assert "nvcc" in found["kernels"].found and "--backend graph" in found["kernels"].hint


def test_kernels_that_are_built_already(monkeypatch, tmp_path):
    library = tmp_path / "cache" / "torch-sm_90-digest" / build.LIBRARY
    library.parent.mkdir(parents=True)
    library.write_bytes(bytes(3 << 20))
    (found,) = (finding for finding in doctor.examine() if finding.name == "kernel cache")
    assert found.found.endswith("1 built, 3 MiB")


def test_masks_that_are_not_known(monkeypatch):
    def unknown():
        raise UnknownUpstream("transformers.masking_utils", "what was known", "something else")

    monkeypatch.setattr(transformers_masks, "apply", unknown)
    assert "something else" in problems()["masks"].found


def test_a_check_that_fails_hides_no_other(monkeypatch):
    def broken(index):
        raise RuntimeError("driver fell over")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    found = doctor.examine()
    assert "driver fell over" in problems()["devices"].found
    assert found[-1].name == "masks"
