"""Compile every kernel for every architecture, and every binding, with nvcc; needs no GPU.

    python .ci/compile_kernels.py [sm_90a ...]

Prints one line per kernel (registers on each architecture, shared memory, stack frame, spills) and exits with
an error where a file does not compile, where a kernel spills whose header comment promises "no spills", or where a
kernel that may start early touches memory before it waits for those launched earlier.

A binding that does not compile would leave every GPU without kernels, and only a GPU's first start would show it. They
need headers of torch, of which any build will do, and cublasLt.h, of the toolkit or of the nvidia-cublas wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from openjev_fast_plugin import build  # noqa: E402

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120")
PROMISE = "no spills"
EARLY = "launch_early("
# An architecture on which kernels start early.
EARLY_ARCHITECTURE = "sm_90a"

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_PTX_ACCESS = re.compile(r"\s(?:ld|ldu|st|red|atom|cp)\.(?!param\b|shared\b)")


@dataclass
class Kernel:
    """What ptxas reports of one kernel on one architecture."""

    file: str
    name: str
    architecture: str
    promised: bool
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    registers: int = 0
    shared: int = 0

    @property
    def spills(self) -> int:
        """Bytes spilled, stores and loads."""
        return self.spill_stores + self.spill_loads

    @property
    def broken(self) -> bool:
        """A spill or a stack frame, against the header's promise."""
        return self.promised and self.stack + self.spills > 0


def promises_no_spills(source: Path) -> bool:
    """Whether the header comment of a `.cu` or of its `.cuh` promises it."""
    for path in (source, source.with_suffix(".cuh")):
        if path.is_file():
            header = takewhile(lambda line: line.startswith("//"), path.read_text().splitlines())
            if PROMISE in " ".join(line.removeprefix("//").strip() for line in header):
                return True
    return False


def parse(report: str, file: str, promised: bool) -> list[Kernel]:
    """Kernels in the output of `ptxas -v`, mangled names."""
    kernels: list[Kernel] = []
    for line in report.splitlines():
        if match := _ENTRY.search(line):
            kernels.append(Kernel(file, match.group(1), match.group(2), promised))
        elif kernels and (match := _STACK.search(line)):
            stack, stores, loads = map(int, match.groups())
            kernels[-1].stack, kernels[-1].spill_stores, kernels[-1].spill_loads = stack, stores, loads
        elif kernels and (match := _USED.search(line)):
            kernels[-1].registers = int(match.group(1))
            shared = _SHARED.search(line)
            kernels[-1].shared = int(shared.group(1)) if shared else 0
    return kernels


def compile_one(nvcc: str, source: Path, architecture: str) -> tuple[list[Kernel], str]:
    """Kernels of one file on one architecture, and the compiler's output where it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        flags = [*build.DEVICE_FLAGS, build.gencode(architecture), "-Xptxas", "-v"]
        done = subprocess.run(
            [nvcc, *flags, "-c", str(source), "-o", str(Path(scratch) / "kernel.o")],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        return [], f"{source.name} for {architecture}:\n{done.stdout}{done.stderr}"
    return parse(done.stderr, source.name, promises_no_spills(source)), ""


def touches_before_waiting(ptx: str) -> list[str]:
    """Kernels of a PTX text that read or write global memory before they wait for earlier kernels, or never wait."""
    found = []
    for kernel in ptx.split(".entry ")[1:]:
        before, wait, _ = kernel.partition("griddepcontrol.wait")
        if not wait or _PTX_ACCESS.search(before):
            found.append(before[: before.index("(")])
    return found


def check_early(nvcc: str, source: Path) -> str:
    """What is wrong with the kernels of a file that launches them early; empty where nothing is or none are."""
    if EARLY not in source.read_text():
        return ""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "kernel.ptx"
        command = [
            nvcc,
            *build.DEVICE_FLAGS,
            f"-arch={EARLY_ARCHITECTURE}",
            "-ptx",
            str(source),
            "-o",
            str(target),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"{source.name} as PTX:\n{done.stdout}{done.stderr}"
        broken = touches_before_waiting(target.read_text())
    if not broken:
        return ""
    return f"{source.name}: launched early, touches memory before it waits: {', '.join(demangled(broken))}"


def compile_binding(nvcc: str, source: Path, torch_folder: Path, cublas: Path) -> str:
    """The compiler's output where a host file does not compile."""
    with tempfile.TemporaryDirectory() as scratch:
        # The one header of torch's that only its CUDA builds have; it says how torch itself was built.
        missing = Path(scratch) / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
        missing.parent.mkdir(parents=True)
        missing.touch()
        flags = [*build.host_flags(source, torch_folder, True, cublas), "-isystem", scratch]
        command = [
            nvcc,
            *flags,
            "-Xcompiler",
            "-Werror",
            "-c",
            str(source),
            "-o",
            str(Path(scratch) / "binding.o"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    return f"{source.name}:\n{done.stdout}{done.stderr}" if done.returncode else ""


def compile_bindings(nvcc: str) -> tuple[int, list[str]]:
    """How many host files there are, and what failed."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return 0, ["the bindings were not compiled: torch is not installed"]
    cublas = build.find_cublas(nvcc, "13")
    if cublas is None:
        return 0, [f"the bindings were not compiled: no {build.CUBLAS_HEADER}: pip install nvidia-cublas"]
    found = build.sources(build.source_folder(), ".cpp")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = pool.map(
            lambda source: compile_binding(nvcc, source, Path(torch.origin).parent, cublas), found
        )
    return len(found), [error for error in errors if error]


def demangled(names: list[str]) -> list[str]:
    """Kernel names without namespace and arguments; as they are where c++filt is not installed."""
    try:
        text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    except OSError:
        return names
    short = []
    for name in text.stdout.splitlines():
        name = name.removeprefix("void ").replace("openjev_fast::", "")
        short.append(name[: name.rfind("(")] if "(" in name else name)
    return short


def print_table(kernels: list[Kernel], architectures: list[str]) -> None:
    """One line a kernel: registers on each architecture, then the largest of each other figure."""
    rows: dict[tuple[str, str], dict[str, Kernel]] = {}
    for kernel in kernels:
        rows.setdefault((kernel.file, kernel.name), {})[kernel.architecture] = kernel
    width = max((len(name) for _, name in rows), default=6)
    registers = " ".join(f"{name:>7}" for name in architectures)
    print(f"{'registers of kernel':{width}} {registers} {'smem':>6} {'stack':>6} {'spills':>6}")
    for (_, name), row in sorted(rows.items()):
        found = list(row.values())
        registers = " ".join(f"{row[arch].registers if arch in row else '-':>7}" for arch in architectures)
        largest = [max(getattr(kernel, field) for kernel in found) for field in ("shared", "stack", "spills")]
        note = "  promised none" if any(kernel.broken for kernel in found) else ""
        print(f"{name:{width}} {registers} " + " ".join(f"{value:6}" for value in largest) + note)


def main(architectures: list[str]) -> int:
    nvcc = build.find_nvcc()
    if nvcc is None:
        print(
            "nvcc was not found on PATH or in /usr/local/cuda/bin: install the CUDA toolkit 13.0 or newer "
            "from https://developer.nvidia.com/cuda-downloads (cuda-nvcc and cuda-cudart are enough)",
            file=sys.stderr,
        )
        return 2
    jobs = [
        (source, name) for source in build.sources(build.source_folder(), ".cu") for name in architectures
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda job: compile_one(nvcc, *job), jobs))
        early = list(
            pool.map(lambda source: check_early(nvcc, source), build.sources(build.source_folder(), ".cu"))
        )
    bindings, broken_bindings = compile_bindings(nvcc)
    failures = [error for error in [*(error for _, error in results), *early, *broken_bindings] if error]
    kernels = [kernel for found, _ in results for kernel in found]
    for kernel, name in zip(kernels, demangled([kernel.name for kernel in kernels]), strict=True):
        kernel.name = name
    print_table(kernels, architectures)
    broken = [kernel for kernel in kernels if kernel.broken]
    for failure in failures:
        print(failure, file=sys.stderr)
    print(
        f"{len(kernels)} kernels on {len(architectures)} architectures, {bindings} bindings: {len(failures)} "
        f"compilations or checks failed, {len(broken)} kernels broke their promise of no spills"
    )
    return 1 if failures or broken or not kernels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(ARCHITECTURES)))
