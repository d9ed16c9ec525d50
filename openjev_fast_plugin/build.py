"""Builds the CUDA kernels of `csrc/` at first use and keeps the library in a per-user cache.

The cache folder's name digests everything that decides the result: sources, flags, architectures, compilers,
torch. A folder is built beside its final place under a file lock and renamed into it, so a half-written one
is never seen and two processes that start together build once. Torch is imported where it is needed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

LIBRARY = "openjev_fast.so"
# The one header that the toolkit's installers may leave out, and the one file that includes it.
CUBLAS_HEADER, CUBLAS_SOURCE = "cublasLt.h", "cublaslt_binding.cpp"
# Where the toolkit's installer puts it.
TOOLKIT = Path("/usr/local/cuda")
OLDEST, NEWEST = (8, 0), (12, 9)

_SUFFIXES = (".cu", ".cuh", ".cpp", ".h")
# A line of a kernel's header comment that asks for targets with instructions no other architecture has.
_SPECIFIC = re.compile(r"^// Architecture-specific targets: (.+)$", re.MULTILINE)
DEVICE_FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall")
_HOST_FLAGS = ("-std=c++17", "-O2", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall")
# The way out where there is no compiler, or none that does.
NO_COMPILER = "serve with --backend graph, which needs no compiler"
_FINISHED = re.compile(r"\[(\d+)/(\d+)\]")


class BuildError(RuntimeError):
    """The kernels cannot be built here: the message says what is missing or shows the compiler's output."""


def cache_root() -> Path:
    """Where built libraries are kept, one folder each."""
    return Path.home() / ".cache" / "openjev-fast-plugin"


def source_folder() -> Path:
    """`csrc/`: inside the installed package, beside the package in a source checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "binding.cpp").is_file():
            return folder
    raise BuildError(f"the kernel sources are missing: no csrc/binding.cpp in {package} or {package.parent}")


def sources(folder: Path, suffix: str) -> list[Path]:
    """Files of one kind, in a fixed order."""
    return sorted(folder.glob(f"*{suffix}"))


def architectures(capabilities: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """`sm_` names of compute capabilities, each once, ascending. BuildError outside 8.0 to 12.x."""
    found = sorted(set(capabilities))
    for major, minor in found:
        if not OLDEST <= (major, minor) <= NEWEST:
            raise BuildError(
                f"a visible GPU has compute capability {major}.{minor}; the kernels need 8.0 to 12.x "
                f"(hide it with CUDA_VISIBLE_DEVICES, or {NO_COMPILER})"
            )
    if not found:
        raise BuildError("no CUDA device is visible, so there is no architecture to build the kernels for")
    return tuple(f"sm_{major}{minor}" for major, minor in found)


def gencode(architecture: str) -> str:
    """The nvcc flag for machine code of one `sm_` name."""
    return f"-gencode=arch=compute_{architecture.removeprefix('sm_')},code={architecture}"


def targets(source: Path, names: Iterable[str]) -> list[str]:
    """The architectures to compile one `.cu` for: the `a` target where its header comment asks for it."""
    texts = [path.read_text() for path in (source, source.with_suffix(".cuh")) if path.is_file()]
    asked = {name.strip() for text in texts for line in _SPECIFIC.findall(text) for name in line.split(",")}
    return [f"{name}a" if f"{name}a" in asked else name for name in names]


def device_flags(source: Path, names: Iterable[str]) -> list[str]:
    """nvcc flags of one `.cu` file. No fast-math flag: files name their approximate intrinsics one by one."""
    return [*DEVICE_FLAGS, *map(gencode, targets(source, names))]


def host_flags(source: Path, torch_folder: Path, cxx11_abi: bool, cublas: Path) -> list[str]:
    """nvcc arguments of one `.cpp` file. torch_folder: of the installed torch. cublas: the folder of cublasLt.h."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(cxx11_abi)}"
    flags = [*_HOST_FLAGS, abi, "-isystem", str(torch_folder / "include")]
    # Behind the toolkit's own headers, which the wheels' folder may hold another version of.
    return [*flags, "-isystem", str(cublas)] if source.name == CUBLAS_SOURCE else flags


@dataclass(frozen=True)
class Toolchain:
    """Programs the build runs, and what decides their output."""

    nvcc: str
    ninja: str
    # Version texts of nvcc and of the host compiler.
    versions: tuple[str, ...]
    # The folder that holds cublasLt.h.
    cublas: Path


def find_nvcc() -> str | None:
    """nvcc on PATH, or in the place the toolkit's installer uses."""
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(TOOLKIT / "bin"))


def find_cublas(nvcc: str | None, major: str) -> Path | None:
    """The folder of cublasLt.h: of the CUDA toolkit, else of the NVIDIA wheel that torch's builds depend on.

    nvcc: the toolkit's compiler. major: the CUDA version torch was built for.
    """
    roots = [Path(nvcc).resolve().parent.parent] if nvcc is not None else []
    roots.append(TOOLKIT)
    folders = [folder for root in roots for folder in (root / "include", *root.glob("targets/*/include"))]
    # A namespace package: wheels of CUDA 13 share one folder in it, before that each has its own.
    nvidia = importlib.util.find_spec("nvidia")
    for place in (nvidia.submodule_search_locations or ()) if nvidia is not None else ():
        folders += [Path(place) / f"cu{major}" / "include", Path(place) / "cublas" / "include"]
    return next((folder for folder in folders if (folder / CUBLAS_HEADER).is_file()), None)


def find_toolchain(names: Iterable[str], cuda_version: str) -> Toolchain:
    """The compilers for these architectures, or one BuildError that lists everything missing.

    cuda_version: the CUDA version torch was built for; the toolkit must have the same major version, since
        both use one CUDA runtime library.
    """
    major = cuda_version.split(".")[0]
    nvcc, host, ninja = find_nvcc(), shutil.which("g++"), _find_ninja()
    cublas = find_cublas(nvcc, major)
    missing = []
    if nvcc is None:
        missing.append(
            f"nvcc (looked on PATH and in /usr/local/cuda/bin): install the CUDA toolkit {major}.x from "
            "https://developer.nvidia.com/cuda-downloads and put its bin folder on PATH"
        )
    if host is None:
        missing.append("g++ (looked on PATH): install a C++17 compiler, for example `apt install g++`")
    if ninja is None:
        missing.append("ninja: `pip install ninja`")
    if cublas is None:
        package = f"libcublas-dev-{cuda_version.replace('.', '-')}"
        wheel = "nvidia-cublas" if int(major) >= 13 else f"nvidia-cublas-cu{major}"
        missing.append(
            f"{CUBLAS_HEADER} (looked in the CUDA toolkit's include folder and in the NVIDIA wheels beside torch): "
            f"install the toolkit's cuBLAS development files, for example `apt install {package}`, "
            f"or `pip install '{wheel}=={major}.*'`"
        )
    if nvcc is None or host is None or ninja is None or cublas is None:
        raise BuildError(
            "the CUDA kernels cannot be built; missing:\n  " + "\n  ".join(missing) + f"\nor {NO_COMPILER}"
        )
    version = _output(nvcc, "--version")
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release is None or release.group(1) != major:
        found = f"{release.group(1)}.{release.group(2)}" if release else f"unknown ({version.strip()!r})"
        raise BuildError(
            f"{nvcc} is of CUDA {found}, torch was built for CUDA {cuda_version}: install a CUDA {major}.x "
            f"toolkit and put its bin folder first on PATH, or {NO_COMPILER}"
        )
    known = _output(nvcc, "--list-gpu-code").split()
    for name in names:
        if name not in known:
            raise BuildError(
                f"{nvcc} {release.group(0)} does not know {name}: install a newer CUDA {major}.x toolkit, "
                f"or {NO_COMPILER}"
            )
    return Toolchain(nvcc, ninja, (version, _output(host, "--version")), cublas)


def _find_ninja() -> str | None:
    try:
        import ninja
    except ImportError:
        return shutil.which("ninja")
    return str(Path(ninja.BIN_DIR) / "ninja")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"`{' '.join(command)}` failed: {getattr(error, 'stderr', '') or error}") from error


def digest_of(parts: Iterable[str]) -> str:
    """Twenty characters that change with any of the parts, or where one ends and the next begins."""
    state = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.hexdigest()[:20]


@dataclass(frozen=True)
class Plan:
    """One library to build: its sources, architectures, compilers, and the torch it links to."""

    folder: Path
    architectures: tuple[str, ...]
    toolchain: Toolchain
    torch_folder: Path
    torch_version: str
    cxx11_abi: bool = True

    @functools.cached_property
    def ninja_text(self) -> str:
        """The build file; outputs are relative to the folder ninja runs in."""
        link = [
            "-shared --cudart shared",
            f"-L{_in_command(self.torch_folder / 'lib')}",
            "-lc10 -lc10_cuda -ltorch_cpu -ldl",
        ]
        lines = [
            "ninja_required_version = 1.5",
            f"nvcc = {_in_command(self.toolchain.nvcc)}",
            "rule compile",
            "  command = $nvcc $flags -c $in -o $out",
            "  description = $in",
            "rule link",
            f"  command = $nvcc {' '.join(link)} $in -o $out",
            "  description = $out",
        ]
        objects = []
        # The slowest file first.
        for source in [*sources(self.folder, ".cpp"), *sources(self.folder, ".cu")]:
            if source.suffix == ".cu":
                flags = device_flags(source, self.architectures)
            else:
                flags = host_flags(source, self.torch_folder, self.cxx11_abi, self.toolchain.cublas)
            objects.append(f"{source.name}.o")
            lines += [
                f"build {objects[-1]}: compile {_in_build_line(source)}",
                f"  flags = {' '.join(map(_in_command, flags))}",
            ]
        lines += [f"build {LIBRARY}: link {' '.join(objects)}", f"default {LIBRARY}", ""]
        return "\n".join(lines)

    @functools.cached_property
    def digest(self) -> str:
        """Changes with anything that can change the library."""
        parts = [self.ninja_text, self.torch_version, *self.toolchain.versions]
        parts.append((self.toolchain.cublas / CUBLAS_HEADER).read_text())
        for suffix in _SUFFIXES:
            for source in sources(self.folder, suffix):
                parts += [source.name, source.read_text()]
        return digest_of(parts)

    @property
    def name(self) -> str:
        """Name of the cache folder."""
        return "-".join([f"torch{self.torch_version}", *self.architectures, self.digest])


def _in_build_line(path: Path) -> str:
    """A path as ninja reads it back; ninja quotes it for the shell."""
    return re.sub(r"([$: ])", r"$\1", str(path))


def _in_command(path: str | Path) -> str:
    """A path as the shell reads it back from a command in the build file."""
    return shlex.quote(str(path)).replace("$", "$$")


def make_plan() -> Plan:
    """The plan for the GPUs this process sees."""
    import torch

    if torch.version.cuda is None:
        raise BuildError(f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch")
    names = architectures(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    return Plan(
        source_folder(),
        names,
        find_toolchain(names, torch.version.cuda),
        Path(torch.__file__).parent,
        torch.__version__,
        torch.compiled_with_cxx11_abi(),
    )


def build(plan: Plan | None = None, root: Path | None = None) -> Path:
    """The library's path; compiles it if no process of this user has before.

    plan: what to build, make_plan() where not given. root: cache folder, cache_root() where not given.

    Raises BuildError when it cannot be built. Prints progress on stderr only while it compiles or waits.
    """
    plan, root = plan or make_plan(), root or cache_root()
    folder = root / plan.name
    library = folder / LIBRARY
    if library.is_file():
        return library
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{plan.name}.lock"):
            if not library.is_file():
                _build_into(folder, plan)
    except OSError as error:
        raise BuildError(f"the cache folder {root} cannot be used: {error}") from error
    return library


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock; says on stderr that it waits when another process has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("openjev-fast: waiting for another process that is compiling the CUDA kernels\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_into(folder: Path, plan: Plan) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".building", dir=folder.parent))
    try:
        (scratch / "build.ninja").write_text(plan.ninja_text)
        _run_ninja(scratch, plan)
        if folder.exists():
            # Without a library in it: the leftovers of somebody's clean-up.
            shutil.rmtree(folder)
        scratch.chmod(0o755)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_ninja(scratch: Path, plan: Plan) -> None:
    """Run ninja with a progress line; BuildError with its output where it fails."""
    start = time.monotonic()
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    process = subprocess.Popen(
        [plan.toolchain.ninja],
        cwd=scratch,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    output: list[str] = []
    reader = threading.Thread(target=_collect, args=(process.stdout, output), daemon=True)
    reader.start()
    with _Progress(plan.architectures, start) as progress:
        # In any case once, however quick ninja is.
        progress.show("")
        while reader.is_alive():
            progress.show(_finished(output))
            reader.join(timeout=1.0)
        code = process.wait()
    if code != 0:
        raise BuildError(
            f"compiling the CUDA kernels failed (ninja exit {code}; {NO_COMPILER}):\n{''.join(output)}"
        )
    seconds = time.monotonic() - start
    _say(f"openjev-fast: CUDA kernels compiled in {seconds:.0f} s, kept in {scratch.parent}\n")


def _collect(stream: TextIO, output: list[str]) -> None:
    output.extend(iter(stream.readline, ""))


def _finished(output: list[str]) -> str:
    """Files done of all (3/9) by the last status line; empty before the first."""
    for line in reversed(output):
        match = _FINISHED.match(line)
        if match:
            return f"{match.group(1)}/{match.group(2)}"
    return ""


class _Progress:
    """One line on stderr: rewritten each second on a terminal, repeated every ten seconds elsewhere."""

    def __init__(self, names: tuple[str, ...], start: float):
        self._what = f"openjev-fast: compiling CUDA kernels for {', '.join(names)} (first start only)"
        self._start = start
        self._terminal = bool(sys.stderr and sys.stderr.isatty())
        self._shown = float("-inf")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            _say("\n")

    def show(self, finished: str) -> None:
        now = time.monotonic()
        if not self._terminal and now - self._shown < 10:
            return
        self._shown = now
        line = f"{self._what}: {finished + ' files, ' if finished else ''}{now - self._start:.0f} s"
        _say(f"\r{line}" if self._terminal else f"{line}\n")


def _say(text: str) -> None:
    if sys.stderr:
        sys.stderr.write(text)
        sys.stderr.flush()
