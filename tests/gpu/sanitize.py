"""Run one case of every CUDA op, vectors and scalars, under compute-sanitizer's memcheck and racecheck.

    python tests/gpu/sanitize.py

Exits with an error where a tool reports one. The kernels are built first, outside the tools.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck")


def run_cases() -> None:
    """Every op once at vector shapes and once at odd ones."""
    import torch
    from cases import CASES, PROFILES

    from openjev_fast_plugin import ops

    for profile in ("2b", "odd"):
        for name, case in CASES.items():
            getattr(ops, name)(*case(PROFILES[profile], 9))
            torch.cuda.synchronize()
            print(f"{name} {profile}", flush=True)


def main() -> int:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        # One allocation a tensor, so that memcheck sees an access past a tensor's end.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    command = [sys.executable, __file__, "cases"]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    failed = []
    for tool in TOOLS:
        print(f"== {tool}", flush=True)
        sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *command]
        if subprocess.run(sanitizer, env=environment).returncode != 0:
            failed.append(tool)
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["cases"]:
        run_cases()
    else:
        sys.exit(main())
