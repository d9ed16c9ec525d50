"""`openjev-fast doctor`: what of this environment a backend needs, what it found, and a hint for each thing wrong."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from openjev_fast_plugin import __version__, bootstrap, build, plugin, settings

State = Literal["ok", "note", "problem"]

# Distributions a backend computes with, and those that make `graph` faster.
_LIBRARIES = ("torch", "transformers", "tokenizers", "peft", "numpy", "pluggy")
_OPTIONAL = {
    "fla-core": "the delta rule of `--backend graph` runs as PyTorch operations: pip install flash-linear-attention",
    "causal-conv1d": "the convolution of `--backend graph` runs as PyTorch operations",
}
_PREFIX = "OPENJEV_FAST_"


@dataclass(frozen=True)
class Finding:
    """One line of the report. hint: what to do; empty where nothing has to be done."""

    name: str
    state: State
    found: str
    hint: str = ""


def examine() -> list[Finding]:
    """Everything, in the order of the report. No check hides another: one that fails says so in its own line."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions,
        _activation,
        _host,
        _environment,
        _backends,
        _devices,
        _kernels,
        _masks,
    )
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:
            name = check.__name__.removeprefix("_")
            findings.append(Finding(name, "problem", f"the check failed: {type(error).__name__}: {error}"))
    return findings


def report() -> dict[str, Any]:
    """The findings for machines: `ok` is false where one is a problem."""
    findings = examine()
    return {
        "ok": all(finding.state != "problem" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


def render(result: dict[str, Any]) -> str:
    """The report for people, one line a finding and its hint below."""
    marks = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    lines = []
    for finding in result["findings"]:
        lines.append(f"{marks[finding['state']]:<8} {finding['name']:<16} {finding['found']}")
        if finding["hint"]:
            lines.append(f"{'':<26}-> {finding['hint']}")
    problems = sum(finding["state"] == "problem" for finding in result["findings"])
    lines.append("")
    lines.append(f"{problems} problem{'s' * (problems != 1)} found" if problems else "no problem found")
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    where = Path(__file__).resolve().parent
    yield Finding("plugin", "ok", f"openjev-fast-plugin {__version__} in {where}")
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")
    for name in _LIBRARIES:
        found = _version(name)
        if found is None:
            yield Finding(name, "problem", "not installed", f"pip install {name}")
        else:
            yield Finding(name, "ok", found)
    for name, hint in _OPTIONAL.items():
        found = _version(name)
        yield Finding(name, "ok", found) if found else Finding(name, "note", "not installed", hint)


def _activation() -> Iterator[Finding]:
    if bootstrap._finder in sys.meta_path:
        yield Finding("hook", "ok", "active since this interpreter started")
    else:
        yield Finding(
            "hook",
            "problem",
            "not active: Python has not read the plugin's start-up file",
            "reinstall the plugin into this environment's site-packages, or start Open-Jev as `python -m "
            "openjev_fast_plugin jev.server ...`",
        )


def _host() -> Iterator[Finding]:
    spec = find_spec("jev")
    if spec is None:
        yield Finding(
            "open-jev",
            "problem",
            "no module jev in this environment",
            "install Open-Jev here, or the plugin where Open-Jev is",
        )
    else:
        place = next(iter(spec.submodule_search_locations or ()), "?")
        yield Finding("open-jev", "ok", f"{_version('open-jev') or 'version unknown'} in {place}")


def _environment() -> Iterator[Finding]:
    known = {name for key, name in vars(settings).items() if key.endswith("_VARIABLE")}
    chosen = {name: os.environ[name] for name in sorted(known) if os.environ.get(name, "").strip()}
    text = ", ".join(f"{name}={value}" for name, value in chosen.items()) or "none set"
    try:
        settings.Settings.read()
    except settings.BackendError as error:
        yield Finding("settings", "problem", str(error), "correct the variable or unset it")
    else:
        yield Finding("settings", "ok", text)
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in known:
            yield Finding("settings", "problem", f"{name} is no variable of the plugin", "see its README")


def _backends() -> Iterator[Finding]:
    yield Finding("backends", "ok", ", ".join(plugin.names()))
    for name, reason in plugin.load_failures().items():
        yield Finding(
            "backends", "problem", f"plugin {name!r} failed to load: {reason}", "update or remove it"
        )
    asked = os.environ.get(settings.BACKEND_VARIABLE, "").strip()
    if asked and asked not in plugin.names():
        yield Finding(
            "backends",
            "problem",
            f"{settings.BACKEND_VARIABLE}={asked} names no backend known here",
            f"one of {', '.join(plugin.names())}, or what Open-Jev itself offers",
        )


def _devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        smi = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        if smi:
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            yield Finding(
                "gpu",
                "problem",
                f"{smi.splitlines()[0]}, which torch {torch.__version__}, {built}, cannot use",
                "install a CUDA build of torch that this driver supports",
            )
        else:
            # Its own word says which build it is: of a wheel from the index the distribution's version does not.
            found = f"none: everything runs on the CPU, with PyTorch operations of torch {torch.__version__}"
            yield Finding("gpu", "note", found)
        return
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free = torch.cuda.mem_get_info(index)[0]
        capability = (about.major, about.minor)
        supported = build.OLDEST <= capability <= build.NEWEST
        yield Finding(
            f"gpu cuda:{index}",
            "ok" if supported else "problem",
            f"{about.name}, sm_{about.major}{about.minor}, {free / 2**30:.0f} of {about.total_memory / 2**30:.0f} GiB "
            f"free, driver {driver.splitlines()[0] if driver else 'unknown'}, CUDA {torch.version.cuda}",
            ""
            if supported
            else "the kernels need compute capability 8.0 to 12.x: hide it with CUDA_VISIBLE_DEVICES",
        )


def _kernels() -> Iterator[Finding]:
    import torch

    root = build.cache_root()
    held = sorted(path.parent.name for path in root.glob(f"*/{build.LIBRARY}"))
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    yield Finding("kernel cache", "ok", f"{root}: {len(held)} built, {size / 2**20:.0f} MiB")
    if not torch.cuda.is_available():
        yield Finding("kernels", "note", "not needed without a GPU")
        return
    try:
        plan = build.make_plan()
    except build.BuildError as error:
        yield Finding("kernels", "problem", str(error).replace("\n", " "), "or serve with `--backend graph`")
        return
    compiler = f"{plan.toolchain.nvcc}, {plan.toolchain.ninja}"
    state = "built" if plan.name in held else "not built yet: the first start compiles them, once"
    yield Finding("kernels", "ok", f"{state}, for {', '.join(plan.architectures)}, by {compiler}")


def _masks() -> Iterator[Finding]:
    from .patches import UnknownUpstream, transformers_masks

    try:
        transformers_masks.apply()()
    except UnknownUpstream as error:
        yield Finding(
            "masks",
            "problem",
            f"`--backend graph` cannot run on Transformers {_version('transformers')}: {error}",
            "install a version that the plugin is tested with",
        )
    else:
        yield Finding("masks", "ok", "as `--backend graph` knows them")


def _output(*command: str) -> str:
    """What a program prints; empty where there is no such program or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
