"""Where and with what a run was made, as every results file says it."""

from __future__ import annotations

import hashlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from openjev_fast_plugin.build import source_folder

PACKAGE = Path(__file__).resolve().parent.parent
# Of a source file that can change a number: code, kernels, and tables such as the choices of matmuls.
_SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h", ".json")


def device_slug(device: torch.device) -> str:
    """The results folder of a device: `cpu`, or its name such as `nvidia-h200`."""
    if device.type == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def patches_folder() -> Path:
    """`patches/`: inside the installed package, beside the package in a source checkout."""
    inside = PACKAGE / "patches"
    return inside if inside.is_dir() else PACKAGE.parent / "patches"


def source_folders() -> dict[str, Path]:
    """The folders of the package, by the names they have in a checkout."""
    return {"openjev_fast_plugin": PACKAGE, "csrc": source_folder(), "patches": patches_folder()}


def source_digest(folders: Mapping[str, Path]) -> str:
    """16 hexadecimal digits over the names and bytes of all sources; results of another digest may be stale.

    folders: name to folder. Files under `results/` and what is no source is left out, so that a checkout and an
    installed package of the same sources agree.
    """
    digest = hashlib.sha256()
    for name, folder in sorted(folders.items()):
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            nested = name == "openjev_fast_plugin" and inside.parts[0] in folders
            if path.suffix in _SUFFIXES and not nested and "results" not in inside.parts:
                digest.update(f"{name}/{inside.as_posix()}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def meta(device: torch.device, command: str, folders: Mapping[str, Path] | None = None) -> dict[str, Any]:
    """Device, driver, versions, source digest, date and command of a run.

    command: the program as a user calls it; the arguments of this process are added. folders: what `sources` digests,
    `source_folders()` where not given.
    """
    return {
        "device": device_name(device),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        if device.type == "cuda"
        else None,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "fla": _version("fla-core"),
        "plugin": _version("openjev-fast-plugin"),
        "sources": source_digest(folders or source_folders()),
        "commit": _output("git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty"),
        "date": date.today().isoformat(),
        "command": shlex.join([*shlex.split(command), *sys.argv[1:]]),
    }


def device_name(device: torch.device) -> str:
    """A GPU by its name; a CPU with its threads and its widest instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints; None where there is no such command, or it fails, as git outside a checkout does."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
