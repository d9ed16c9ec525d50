"""The build's decisions: flags, ninja text, digests, lock, messages. One tiny compile where nvcc exists."""

import fcntl
import importlib.util
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from openjev_fast_plugin import build

ROOT = Path(__file__).resolve().parent.parent


def load_compile_kernels():
    spec = importlib.util.spec_from_file_location("compile_kernels", ROOT / ".ci" / "compile_kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "binding.cpp").write_text("// binding\n")
    (sources / build.CUBLAS_SOURCE).write_text("// needs cuBLAS\n")
    (sources / "plain.cu").write_text("// Computes: nothing.\n")
    (sources / "wide.cu").write_text("// Launcher.\n")
    (sources / "wide.cuh").write_text(
        "// Computes: more.\n// Architecture-specific targets: sm_90a, sm_100a\n"
    )
    return sources


@pytest.fixture
def cublas(tmp_path: Path) -> Path:
    include = tmp_path / "cuda" / "include"
    include.mkdir(parents=True)
    (include / build.CUBLAS_HEADER).write_text("// 13.1\n")
    return include


@pytest.fixture
def plan(folder: Path, cublas: Path) -> build.Plan:
    tools = build.Toolchain("/opt/cuda/bin/nvcc", "/usr/bin/ninja", ("nvcc 13.0", "g++ 12"), cublas)
    return build.Plan(folder, ("sm_80", "sm_90"), tools, Path("/opt/py/torch"), "2.11.0+cu130")


def stand_in_ninja(tmp_path: Path, body: str) -> str:
    script = tmp_path / "ninja"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def with_ninja(plan: build.Plan, ninja: str) -> build.Plan:
    return replace(plan, toolchain=replace(plan.toolchain, ninja=ninja))


def test_architectures_are_those_of_the_devices_each_once():
    assert build.architectures([(9, 0), (8, 0), (9, 0), (12, 0)]) == ("sm_80", "sm_90", "sm_120")


@pytest.mark.parametrize("capability", [(7, 5), (13, 0)])
def test_other_capabilities_are_refused_by_value(capability):
    with pytest.raises(build.BuildError, match=rf"compute capability {capability[0]}\.{capability[1]}"):
        build.architectures([(9, 0), capability])


def test_no_device_is_refused():
    with pytest.raises(build.BuildError, match="no CUDA device is visible"):
        build.architectures([])


def test_a_targets_only_where_the_header_asks(folder):
    names = ("sm_80", "sm_90", "sm_120")
    assert build.targets(folder / "plain.cu", names) == ["sm_80", "sm_90", "sm_120"]
    assert build.targets(folder / "wide.cu", names) == ["sm_80", "sm_90a", "sm_120"]


def test_device_flags(folder):
    flags = build.device_flags(folder / "wide.cu", ["sm_90"])
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags
    assert "-O3" in flags and "-std=c++17" in flags
    assert not any("fast_math" in flag for flag in flags)


def test_ninja_text_compiles_each_file_with_its_flags_and_links_all(plan):
    lines = plan.ninja_text.splitlines()

    def flags_of(name: str) -> str:
        (index,) = [i for i, line in enumerate(lines) if line.startswith(f"build {name}.o: compile ")]
        return lines[index + 1]

    assert "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90" in flags_of("plain.cu")
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags_of("wide.cu")
    assert "-isystem /opt/py/torch/include" in flags_of("binding.cpp")
    assert "-D_GLIBCXX_USE_CXX11_ABI=1" in flags_of("binding.cpp")
    # Device code never sees a torch header.
    assert "torch" not in flags_of("plain.cu")
    assert "cuda/include" in flags_of(build.CUBLAS_SOURCE)
    assert "cuda/include" not in flags_of("binding.cpp") + flags_of("plain.cu")
    objects = f"binding.cpp.o {build.CUBLAS_SOURCE}.o plain.cu.o wide.cu.o"
    assert f"build {build.LIBRARY}: link {objects}" in lines
    # Its functions are found in the library that torch has loaded.
    assert "cublas" not in " ".join(line for line in lines if "-shared" in line)
    assert "-L/opt/py/torch/lib" in plan.ninja_text


def test_unusual_paths_survive_ninja_and_the_shell(plan, tmp_path):
    folder = tmp_path / "my $src: 1"
    folder.mkdir()
    (folder / "binding.cpp").touch()
    text = replace(plan, folder=folder, torch_folder=Path("/opt/my torch")).ninja_text
    assert "-L'/opt/my torch/lib'" in text
    assert f"compile {tmp_path}/my$ $$src$:$ 1/binding.cpp" in text


def test_digest_changes_with_everything_that_decides_the_library(plan, folder, cublas):
    again = replace(plan)
    assert again.digest == plan.digest
    tools = plan.toolchain
    others = [
        replace(plan, architectures=("sm_80",)),
        replace(plan, torch_version="2.12.0+cu130"),
        replace(plan, cxx11_abi=False),
        replace(plan, toolchain=replace(tools, versions=("nvcc 13.1", "g++ 12"))),
        replace(plan, toolchain=replace(tools, versions=("nvcc 13.0", "g++ 13"))),
    ]
    digests = {plan.digest, *(other.digest for other in others)}
    assert len(digests) == len(others) + 1
    (folder / "wide.cuh").write_text((folder / "wide.cuh").read_text() + "// more\n")
    assert replace(plan).digest not in digests
    digests.add(replace(plan).digest)
    (cublas / build.CUBLAS_HEADER).write_text("// 13.2\n")
    assert replace(plan).digest not in digests


def test_every_source_of_the_checkout_is_found():
    # The checkout's own folder, or the copy that an install has inside the package.
    found = build.source_folder()
    for suffix in (".cu", ".cuh", ".cpp", ".h"):
        expected = {path.name: path.read_bytes() for path in build.sources(ROOT / "csrc", suffix)}
        assert expected
        assert {path.name: path.read_bytes() for path in build.sources(found, suffix)} == expected


def test_device_code_includes_no_torch_header():
    folder = build.source_folder()
    for path in (*build.sources(folder, ".cu"), *build.sources(folder, ".cuh"), folder / "launch.h"):
        assert not any(name in path.read_text() for name in ("<torch", "<ATen", "<c10")), path.name


def test_bindings_use_no_iostreams():
    folder = build.source_folder()
    for path in (*build.sources(folder, ".cpp"), folder / "check.h"):
        assert not any(name in path.read_text() for name in ("<iostream>", "<sstream>", "<regex>")), path.name


def test_one_message_lists_everything_missing(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(build, "_find_ninja", lambda: None)
    monkeypatch.setattr(build, "find_cublas", lambda nvcc, major: None)
    with pytest.raises(build.BuildError) as error:
        build.find_toolchain(["sm_90"], "13.0")
    message = str(error.value)
    assert "cublasLt.h" in message and "libcublas-dev-13-0" in message and "'nvidia-cublas==13.*'" in message
    assert "nvcc" in message and "CUDA toolkit 13.x" in message and "developer.nvidia.com" in message
    assert "g++" in message and "apt install g++" in message and "pip install ninja" in message
    assert message.endswith("or serve with --backend graph, which needs no compiler")


def test_the_header_alone_may_be_missing(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name, path=None: f"/bin/{name}")
    monkeypatch.setattr(build, "find_cublas", lambda nvcc, major: None)
    with pytest.raises(build.BuildError) as error:
        build.find_toolchain(["sm_90"], "12.8")
    (missing,) = (line for line in str(error.value).splitlines() if line.startswith("  "))
    assert missing.startswith("  cublasLt.h (looked in") and "libcublas-dev-12-8" in missing
    assert "'nvidia-cublas-cu12==12.*'" in missing


@pytest.mark.parametrize(
    "place, found",
    [
        ("toolkit/include", True),
        ("toolkit/targets/x86_64-linux/include", True),
        ("site/nvidia/cu13/include", True),
        ("site/nvidia/cublas/include", True),
        ("site/nvidia/cu12/include", False),
    ],
)
def test_the_header_is_found_in_the_toolkit_and_in_the_wheels(tmp_path, monkeypatch, place, found):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / build.CUBLAS_HEADER).touch()
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    site = SimpleNamespace(submodule_search_locations=[str(tmp_path / "site" / "nvidia")])
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: site)
    monkeypatch.setattr(build, "TOOLKIT", tmp_path / "nowhere")
    folder = build.find_cublas(str(tmp_path / "toolkit" / "bin" / "nvcc"), "13")
    assert folder == (tmp_path / place if found else None)
    # The toolkit's own comes first.
    (tmp_path / "toolkit" / "include").mkdir(exist_ok=True)
    (tmp_path / "toolkit" / "include" / build.CUBLAS_HEADER).touch()
    assert (
        build.find_cublas(str(tmp_path / "toolkit" / "bin" / "nvcc"), "13")
        == tmp_path / "toolkit" / "include"
    )


@pytest.mark.parametrize(
    "release, codes, message",
    [
        ("release 12.8, V12.8.93", "sm_90", r"is of CUDA 12\.8, torch was built for CUDA 13\.0"),
        ("release 13.0, V13.0.88", "sm_80", "does not know sm_90"),
        ("unreadable", "sm_90", "unknown"),
    ],
    ids=["other_major", "unknown_architecture", "unreadable"],
)
def test_toolkits_that_do_not_fit_are_refused(monkeypatch, release, codes, message):
    answers = {"--version": release, "--list-gpu-code": codes}
    monkeypatch.setattr(build.shutil, "which", lambda name, path=None: f"/bin/{name}")
    monkeypatch.setattr(build, "find_cublas", lambda nvcc, major: Path("/usr/local/cuda/include"))
    monkeypatch.setattr(build, "_output", lambda program, option: answers[option])
    with pytest.raises(build.BuildError, match=message) as error:
        build.find_toolchain(["sm_90"], "13.0")
    assert str(error.value).endswith("or serve with --backend graph, which needs no compiler")


def test_build_runs_once_and_is_renamed_into_place(plan, tmp_path, capsys):
    ninja = stand_in_ninja(tmp_path, f"echo '[1/2] a.cu'; echo x >> {tmp_path}/runs; touch {build.LIBRARY}")
    plan, root = with_ninja(plan, ninja), tmp_path / "cache"
    library = build.build(plan, root)
    assert library == root / plan.name / build.LIBRARY and library.is_file()
    assert "compiling CUDA kernels for sm_80, sm_90" in capsys.readouterr().err
    assert build.build(plan, root) == library
    assert (tmp_path / "runs").read_text() == "x\n"
    # A second start says nothing and leaves no scratch folder behind.
    assert capsys.readouterr().err == ""
    assert not list(root.glob("*.building"))


def test_a_build_is_announced_however_quick_it_is(plan, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(threading.Thread, "is_alive", lambda thread: False)
    build.build(with_ninja(plan, stand_in_ninja(tmp_path, f"touch {build.LIBRARY}")), tmp_path / "cache")
    assert "compiling CUDA kernels for sm_80, sm_90" in capsys.readouterr().err


def test_threads_that_start_together_build_once(plan, tmp_path):
    ninja = stand_in_ninja(tmp_path, f"echo x >> {tmp_path}/runs; sleep 0.3; touch {build.LIBRARY}")
    plan, root = with_ninja(plan, ninja), tmp_path / "cache"
    found = []
    threads = [threading.Thread(target=lambda: found.append(build.build(plan, root))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [root / plan.name / build.LIBRARY] * 3
    assert (tmp_path / "runs").read_text() == "x\n"


def test_another_process_that_holds_the_lock_is_waited_for(plan, tmp_path, capsys):
    plan, root = with_ninja(plan, stand_in_ninja(tmp_path, "exit 9")), tmp_path / "cache"
    root.mkdir()
    other = (root / f"{plan.name}.lock").open("w")
    fcntl.flock(other, fcntl.LOCK_EX)

    def finish():
        time.sleep(0.3)
        (root / plan.name).mkdir()
        (root / plan.name / build.LIBRARY).touch()
        other.close()

    thread = threading.Thread(target=finish)
    thread.start()
    # The library that the other process made is taken; this one's ninja, which would fail, never runs.
    assert build.build(plan, root).is_file()
    thread.join()
    assert "waiting for another process" in capsys.readouterr().err


def test_a_failed_build_shows_the_compilers_output_and_leaves_nothing(plan, tmp_path):
    ninja = stand_in_ninja(tmp_path, "echo 'wide.cu(3): error: no such thing'; exit 1")
    plan, root = with_ninja(plan, ninja), tmp_path / "cache"
    with pytest.raises(
        build.BuildError, match=r"failed \(ninja exit 1; serve with --backend graph, .*\)"
    ) as error:
        build.build(plan, root)
    assert str(error.value).endswith("wide.cu(3): error: no such thing\n")
    assert not (root / plan.name).exists() and not list(root.glob("*.building"))


def test_an_unusable_cache_folder_is_named(plan, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildError, match=f"cache folder {tmp_path}/file"):
        build.build(plan, tmp_path / "file")


PTXAS = """\
ptxas info    : Compiling entry function '_ZN12openjev_fast3oneEv' for 'sm_90a'
ptxas info    : Function properties for _ZN12openjev_fast3oneEv
    {stack} bytes stack frame, {spill} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, {stack} bytes cumulative stack size, 2048 bytes smem
"""


@pytest.mark.parametrize("stack, spill, broken", [(0, 0, False), (8, 0, True), (8, 8, True)])
def test_the_resource_report_is_read_and_held_against_the_promise(stack, spill, broken):
    module = load_compile_kernels()
    (kernel,) = module.parse(PTXAS.format(stack=stack, spill=spill), "one.cu", promised=True)
    assert (kernel.registers, kernel.shared, kernel.stack, kernel.spills) == (40, 2048, stack, spill)
    assert kernel.broken is broken
    (kernel,) = module.parse(PTXAS.format(stack=stack, spill=spill), "one.cu", promised=False)
    assert not kernel.broken


def test_the_promise_is_read_from_the_header_comment_only(tmp_path):
    promises = load_compile_kernels().promises_no_spills
    source = tmp_path / "one.cu"
    source.write_text("// Launcher.\nint no; // no spills\n")
    assert not promises(source)
    source.with_suffix(".cuh").write_text(
        "// Limits: 128 bytes of shared memory; no\n//   spills; sm_80.\nint x;\n"
    )
    assert promises(source)


PTX = """
.visible .entry first(
{first}
	griddepcontrol.wait;
	ld.global.nc.v4.u32 {{%r5}}, [%rd1];
	ret;
.visible .entry second(
	ld.param.u64 	%rd1, [second_param_0];
	st.shared.u32 	[%r1], %r2;
{second}
	st.global.u32 	[%rd1], %r1;
"""


@pytest.mark.parametrize(
    "first, second, broken",
    [
        ("", "	griddepcontrol.wait;", []),
        ("	ld.global.nc.u32 	%r1, [%rd1];", "	griddepcontrol.wait;", ["first"]),
        ("	ld.u32 	%r1, [%rd1];", "	griddepcontrol.wait;", ["first"]),
        ("	@%p1 atom.global.add.u32 	%r1, [%rd1], 1;", "	griddepcontrol.wait;", ["first"]),
        ("", "", ["second"]),
    ],
)
def test_a_kernel_that_starts_early_waits_before_it_touches_memory(first, second, broken):
    assert load_compile_kernels().touches_before_waiting(PTX.format(first=first, second=second)) == broken


@pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")
def test_nvcc_takes_the_device_flags(tmp_path):
    source = tmp_path / "tiny.cu"
    source.write_text("__global__ void tiny(float* x) { *x = 1.0f; }\n")
    flags = build.device_flags(source, ["sm_80"])
    command = [build.find_nvcc(), *flags, "-c", str(source), "-o", str(tmp_path / "tiny.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
