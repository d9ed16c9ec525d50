"""What pip puts where: wheel, editable, strict editable; and what uninstalling leaves."""

import csv
import pkgutil
import shutil
from pathlib import Path

import pytest
from hosts import ROOT, make_python, pip, run, site_of, write_checkpoint, write_host

STARTUP_FILES = {"openjev_fast_plugin.pth", "openjev_fast_plugin.start"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """The files that packaging reads, apart from the checkout: building writes beside its sources."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("openjev_fast_plugin", "csrc", "patches"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md", *STARTUP_FILES):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    return folder


INSTALLS = {
    "wheel": [],
    "editable": ["-e"],
    "strict-editable": ["--config-settings", "editable_mode=strict", "-e"],
}


@pytest.fixture(scope="module", params=INSTALLS)
def installed(request, checkout, tmp_path_factory):
    """(kind, interpreter) with the plugin installed by pip, without network and without its dependencies."""
    interpreter = make_python(tmp_path_factory.mktemp(request.param) / "venv", plugin=False)
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    pip(interpreter, "install", *options, *INSTALLS[request.param], ".", folder=checkout)
    return request.param, interpreter


def recorded(interpreter) -> list[str]:
    (record,) = site_of(interpreter).glob("openjev_fast_plugin-*.dist-info/RECORD")
    with record.open(newline="") as lines:
        return [row[0] for row in csv.reader(lines)]


def test_it_is_active_at_the_start(installed, tmp_path):
    _, interpreter = installed
    host, checkpoint = write_host(tmp_path / "host"), write_checkpoint(tmp_path / "c", "nobody")
    result = run(interpreter, "-m", "jev.predict", "--checkpoint", checkpoint, path=(host,))
    assert result.returncode == 1 and "unknown backend 'nobody'" in result.stderr
    code = (
        "import sys; assert 'torch' not in sys.modules; import openjev_fast_plugin.csrc; "
        "from openjev_fast_plugin.patches import jev_serving; from pathlib import Path; "
        "folder = Path(openjev_fast_plugin.csrc.__path__[0]); "
        "print(*sorted(path.name for path in folder.iterdir() if path.suffix in ('.cu', '.cuh', '.cpp', '.h')))"
    )
    result = run(interpreter, "-c", code)
    assert result.returncode == 0, result.stderr
    sources = [
        path.name for path in (ROOT / "csrc").iterdir() if path.suffix in (".cu", ".cuh", ".cpp", ".h")
    ]
    assert result.stdout.split() == sorted(sources) and "layout.cpp" in sources


def test_one_pass_over_the_startup_files_is_enough(installed):
    # A virtual environment's files are read twice, which would hide a name that sorts too early.
    _, interpreter = installed
    code = (
        "import site, sys; site.addsitedir(sys.argv[1]); "
        "print([type(finder).__module__ for finder in sys.meta_path].count('openjev_fast_plugin.bootstrap'))"
    )
    result = run(interpreter, "-S", "-c", code, site_of(interpreter))
    assert (result.stdout, result.stderr) == ("1\n", "")


def test_nothing_else_becomes_importable(installed):
    kind, interpreter = installed
    top = {Path(name).parts[0] for name in recorded(interpreter)} - {".."}
    ours = {name for name in top if not name.endswith(".dist-info") and "__editable__" not in name}
    assert ours - {"__pycache__"} == STARTUP_FILES | ({"openjev_fast_plugin"} if kind == "wheel" else set())
    result = run(
        interpreter, "-c", "import importlib.util as u; print(u.find_spec('patches'), u.find_spec('csrc'))"
    )
    assert result.stdout == "None None\n"


def test_the_wheel_holds_every_module_and_source(installed):
    kind, interpreter = installed
    if kind != "wheel":
        assert not (site_of(interpreter) / "openjev_fast_plugin").exists()
        return
    names = set(recorded(interpreter))
    for folder, inside in (("openjev_fast_plugin", ""), ("csrc", "csrc/"), ("patches", "patches/")):
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert f"openjev_fast_plugin/{inside}{file.relative_to(ROOT / folder).as_posix()}" in names


def test_the_metadata(installed):
    _, interpreter = installed
    code = (
        "from importlib import metadata; about = metadata.distribution('openjev-fast-plugin'); "
        "print(sorted((e.group, e.name, e.value) for e in about.entry_points)); "
        "print(*(line for line in about.requires if 'extra' not in line), sep='\\n')"
    )
    scripts, *requirements = run(interpreter, "-c", code).stdout.splitlines()
    assert scripts == "[('console_scripts', 'openjev-fast', 'openjev_fast_plugin.cli:main')]"
    required = {line.split("<")[0].split(">")[0].strip() for line in requirements}
    assert required >= {"torch", "transformers", "peft", "safetensors", "pluggy", "ninja", "numpy"}
    from openjev_fast_plugin import __version__

    version = "from importlib import metadata; print(metadata.version('openjev-fast-plugin'))"
    assert run(interpreter, "-c", version).stdout.strip() == __version__


def test_the_startup_files_are_installed_recorded_and_removed(installed):
    # Last: it takes the installation away.
    _, interpreter = installed
    site = site_of(interpreter)
    assert STARTUP_FILES <= set(recorded(interpreter))
    for name in STARTUP_FILES:
        assert (site / name).read_bytes() == (ROOT / name).read_bytes()
    entry_point = (site / "openjev_fast_plugin.start").read_text("utf-8").strip()
    assert callable(pkgutil.resolve_name(entry_point))
    pip(interpreter, "uninstall", "-y", "openjev-fast-plugin")
    assert [entry.name for entry in site.iterdir() if "openjev" in entry.name] == []
    result = run(interpreter, "-c", "import sys; print('openjev_fast_plugin' in sys.modules)")
    assert (result.stdout, result.stderr) == ("False\n", "")
