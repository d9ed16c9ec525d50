"""Shared fixtures: the stand-in host on the path, one tiny checkpoint and the compiled layout for the whole run."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

LAYOUT_SOURCES = ("layout.cpp", "layout_binding.cpp")

if find_spec("jev") is None:
    sys.path.insert(0, str(Path(__file__).with_name("open_jev")))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path for `--checkpoint` of a tiny random-weight package."""
    from openjev_fast_plugin.checkpoint import make_checkpoint

    return make_checkpoint("tiny", tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def compiled_layout(tmp_path_factory) -> dict[str, Callable]:
    """The op that lays sequences out, built with the host's compiler; on a GPU, every op of the kernels' library."""
    import torch

    from openjev_fast_plugin import build
    from openjev_fast_plugin.ops import _cuda

    if torch.cuda.is_available():
        return _cuda.load()
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None, "a C++ compiler is needed: apt-get install g++"
    library = tmp_path_factory.mktemp("layout") / "layout.so"
    torch_folder = Path(torch.__file__).parent
    command = [
        *(compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"),
        *(
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            "-isystem",
            torch_folder / "include",
        ),
        *(build.source_folder() / name for name in LAYOUT_SOURCES),
        *("-L", torch_folder / "lib", "-ltorch_cpu", "-lc10", "-o", library),
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stderr}"
    torch.ops.load_library(str(library))
    return {"packed_layout": torch.ops.openjev_fast_cuda.packed_layout.default}
