"""From a fresh checkout to a running demo: `python3.11 -m openjev_fast_plugin.quickstart`. Standard library only.

Makes a virtual environment, installs PyTorch (the CPU build where there is no NVIDIA GPU), this project with what
its tests need, and the stand-in for Open-Jev unless the real one is there, then runs `openjev-fast demo`.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
import urllib.request
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROOT = Path(__file__).resolve().parent.parent


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def torch_arguments() -> list[str]:
    """What pip needs to install PyTorch without a CUDA build where there is no GPU."""
    if has_gpu() or platform.system() != "Linux":
        return [TORCH]
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/", timeout=5).close()
    except OSError as error:
        print(
            f"# PyTorch's CPU wheels cannot be reached ({error}); taking what pip's own index has", flush=True
        )
        return [TORCH]
    return [TORCH, "--extra-index-url", CPU_INDEX]


def run(*command: str | os.PathLike[str]) -> None:
    """Show a command, run it with its output visible, and stop with its status when it fails."""
    print("$", " ".join(map(str, command)), flush=True)
    start = time.monotonic()
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        sys.exit(f"that command failed with exit status {code}; its own words are above")
    print(f"# {time.monotonic() - start:.0f} s", flush=True)


def install(environment: Path) -> Path:
    """Make or refresh the environment; returns its Python."""
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    # An interrupted creation leaves an environment without pip behind, which is made anew.
    if not _has_pip(python):
        print(f"# making a virtual environment in {environment}", flush=True)
        try:
            venv.create(environment, with_pip=True, clear=(environment / "pyvenv.cfg").exists())
        except subprocess.CalledProcessError:
            shutil.rmtree(environment, ignore_errors=True)
            sys.exit(
                "this Python cannot make a virtual environment with pip (on Debian and Ubuntu: "
                f"apt install python{sys.version_info.major}.{sys.version_info.minor}-venv)"
            )
    host = [] if _has_open_jev(python) else ["./tests/open_jev"]
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    # Editable, so that the tests run against the checkout.
    run(*pip, *torch_arguments(), *host, "-e", ".[test]")
    return python


def _has_pip(python: Path) -> bool:
    return (
        python.exists()
        and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    )


def _has_open_jev(python: Path) -> bool:
    """Whether the real Open-Jev is already installed in the environment; the stand-in is installed anew."""
    look = "from importlib.metadata import version; print(version('open-jev'))"
    found = subprocess.run([python, "-c", look], capture_output=True, text=True)
    return found.returncode == 0 and not found.stdout.strip().endswith("+standin")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m openjev_fast_plugin.quickstart", description=__doc__)
    parser.add_argument(
        "--venv",
        type=Path,
        default=ROOT / ".venv",
        help="where the environment goes (default: .venv in the checkout)",
    )
    parser.add_argument("--no-demo", action="store_true", help="only install")
    args = parser.parse_args()
    # Run by whatever Python the user has, before anything checked requires-python.
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(f"Python 3.11 or newer is needed, this is {platform.python_version()}")
    if not (ROOT / "tests" / "open_jev").is_dir():
        sys.exit("run this from a checkout of the project; an installed plugin has `openjev-fast demo`")
    python = install(args.venv)
    if not args.no_demo:
        run(python, "-m", "openjev_fast_plugin.cli", "demo")


if __name__ == "__main__":
    main()
