"""Backends through pluggy: ours, somebody else's, broken ones, and a model handed over to one."""

import json
import shutil
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hosts import (
    ROOT,
    add_backend,
    get,
    make_python,
    pip,
    post,
    run,
    serving,
    site_of,
    write_checkpoint,
    write_host,
)

from openjev_fast_plugin import hookimpl, plugin, takeover
from openjev_fast_plugin.settings import BackendError, Settings

QUESTIONS = {
    "route": {
        "type": "choice",
        "instructions": "Who?",
        "criteria": {"sales": None, "billing": "money", "help": None},
    },
    "refund": {"type": "noul", "instructions": "Refund?"},
    "urgency": {"type": "score", "instructions": "How urgent?", "criteria": ["low", "middle", "high"]},
}
REQUEST = {"state": "Customer: I paid twice and want the second payment back.", "questions": QUESTIONS}


@dataclass
class Scores:
    logits: list
    input_tokens: int
    stats: dict


@dataclass
class Toy:
    """A backend and its engine in one."""

    name: str = "toy"
    summary: str = "for tests"
    reason: str | None = None
    built_with: list = field(default_factory=list)

    def refusal(self, model):
        return self.reason

    def build(self, model, settings):
        self.built_with.append(settings)
        return self

    def score(self, records):
        if any(record == "bad" for record in records):
            raise ValueError("bad record")
        return Scores(
            [[0.0]] * len(records), 7 * len(records), {"rows_computed": 3, "graph": "no", "replayed": True}
        )

    def describe(self):
        return {"kernels": "none"}


class Model:
    training = False

    def __call__(self, records):
        return self.forward(records)

    def forward(self, records):
        return "original"


@pytest.fixture
def manager():
    """The plugin manager with nobody's plugins but ours, to register on."""
    plugin.plugin_manager.cache_clear()
    manager = plugin.plugin_manager()
    for name, registered in manager.list_name_plugin():
        if registered is not plugin:
            manager.unregister(name=name)
    yield manager
    plugin.plugin_manager.cache_clear()


def register(manager, *backends):
    module = types.ModuleType(f"theirs_{len(manager.get_plugins())}")
    module.openjev_fast_backends = hookimpl(lambda: list(backends), specname="openjev_fast_backends")
    manager.register(module)


# The manager


def test_ours_first_then_the_others(manager):
    assert plugin.names() == ["torch", "fast", "graph", "auto"]
    register(manager, Toy("a"), Toy("b"))
    register(manager, Toy("c"))
    assert plugin.names() == ["torch", "fast", "graph", "a", "b", "c", "auto"]
    assert plugin.find("b").name == "b"
    with pytest.raises(
        BackendError, match="unknown backend 'd': choose from torch, fast, graph, a, b, c, auto"
    ):
        plugin.find("d")
    with pytest.raises(BackendError, match="choose from torch, theirs, fast, graph, a, b, c, auto"):
        plugin.find("d", ("torch", "theirs"))


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit("broken")])
def test_a_hook_that_fails_takes_nothing_but_its_own(manager, error):
    def fail():
        raise error

    module = types.ModuleType("failing")
    module.openjev_fast_backends = hookimpl(fail, specname="openjev_fast_backends")
    manager.register(module)
    register(manager, Toy("a"))
    assert plugin.names() == ["torch", "fast", "graph", "a", "auto"]
    with pytest.raises(
        BackendError, match=f"plugin 'failing' failed to load: {type(error).__name__}: broken"
    ):
        plugin.find("b")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fast", "two plugins register a backend named 'fast': openjev_fast_plugin.plugin.Fast and .*Toy"),
        ("torch", "Toy registers a backend under the reserved name 'torch'"),
        ("auto", "Toy registers a backend under the reserved name 'auto'"),
    ],
)
def test_names_are_unique(manager, name, message):
    register(manager, Toy(name))
    with pytest.raises(BackendError, match=message):
        plugin.backends()


def test_importing_the_plugins_imports_no_torch(tmp_path):
    interpreter = make_python(tmp_path / "venv")
    code = (
        "import sys; from openjev_fast_plugin import plugin, takeover, settings, hookspecs; plugin.names(); "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    assert run(interpreter, "-c", code).stdout == "[]\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys; sys.exit('not here')", "SystemExit: not here"),
    ],
    ids=["error", "exit"],
)
def test_a_plugin_that_fails_to_load_stops_nobody_else(tmp_path, line, reason):
    interpreter = make_python(tmp_path / "venv")
    add_backend(site_of(interpreter))
    (site_of(interpreter) / "openjev_one_by_one.py").write_text(f"print('loaded')\n{line}\n")
    host, checkpoint = write_host(tmp_path / "host"), write_checkpoint(tmp_path / "c")
    code = "from openjev_fast_plugin import plugin; print(plugin.names()); plugin.find('one-by-one')"
    result = run(interpreter, "-c", code)
    assert result.stdout == "loaded\n['torch', 'fast', 'graph', 'auto']\n"
    failed = f"plugin 'one_by_one' failed to load: {reason}"
    assert failed in result.stderr
    arguments = ("-m", "jev.server", "--checkpoint", checkpoint, "--port", 0)
    with serving(interpreter, *arguments, "--backend", "torch", path=(host,)) as url:
        assert get(url + "/health")["backend"] == {"name": "torch", "decided_by": "flag"}
    result = run(interpreter, *arguments, "--backend", "one-by-one", path=(host,))
    assert result.returncode == 2 and "invalid choice: 'one-by-one'" in result.stderr
    assert failed in result.stderr
    result = run(interpreter, *arguments, "--backend", "fast", path=(host,))
    # Everybody's plugins are loaded, to see that there is but one `fast`; this model is not for it.
    assert (result.returncode, result.stdout) == (1, "loaded\n") and "failed to load" not in result.stderr
    result = run(interpreter, "-m", "jev.server", "--he", path=(host,))
    assert result.returncode == 0 and "--backend {torch,fast,graph,auto}" in result.stdout
    # Nobody asked for a backend.
    for typed in (["--nonsense"], ["--batch-size", "many"], ["--b", "many"], ["--host", "h", "--port", "p"]):
        result = run(interpreter, *arguments, *typed, path=(host,))
        assert (result.returncode, result.stdout) == (2, "") and "failed to load" not in result.stderr
    with serving(interpreter, *arguments, "--batch-size", 2, "--host", "127.0.0.1", path=(host,)) as url:
        assert "backend" not in get(url + "/health")


# A model handed over


def test_accelerate(manager):
    toy = Toy()
    register(manager, toy)
    model = Model()
    assert takeover.accelerate(model, "toy", Settings(max_rows=5), "environment") is model
    assert toy.built_with == [Settings(max_rows=5)]
    assert model(["a", "b"]) == [[0.0], [0.0]] and model.last_input_tokens == 14
    assert model.last_stats == {"rows_computed": 3, "graph": "no", "replayed": True}
    assert model.score_cached(["a"], batch_size=9) == (
        [[0.0]],
        {"enabled": True, "mode": "openjev_toy", "logical_input_tokens": 7},
    )
    assert model.openjev_fast.describe() == {"name": "toy", "decided_by": "environment", "kernels": "none"}
    with pytest.raises(BackendError, match="already runs on backend 'toy'"):
        takeover.accelerate(model, "toy")


def test_a_failed_forward_answers_nothing(manager):
    register(manager, Toy())
    model = takeover.accelerate(Model(), "toy")
    model(["a"])
    with pytest.raises(ValueError, match="bad record"):
        model(["bad"])
    model.training = True
    with pytest.raises(BackendError, match="inference only"):
        model(["a"])


def test_a_refusal_changes_nothing(manager):
    toy = Toy(reason="model_type is 'llama'")
    register(manager, toy)
    model = Model()
    with pytest.raises(
        BackendError,
        match="^backend='toy': backend 'toy' cannot take this model: model_type is 'llama'\n"
        "backend='auto' takes the best backend that can$",
    ):
        takeover.accelerate(model, "toy")
    assert vars(model) == {} and toy.built_with == []


@pytest.mark.parametrize("reason", [None, "dtype is float64"])
def test_auto(manager, monkeypatch, caplog, reason):
    register(manager, Toy(reason=reason))
    monkeypatch.setattr(plugin, "AUTO_ORDER", ("toy",))
    model = takeover.accelerate(Model(), "auto", decided_by="file")
    about = model.openjev_fast.describe()
    assert (about["name"], about["requested"], about["decided_by"]) == (
        "torch" if reason else "toy",
        "auto",
        "file",
    )
    assert model(["a"]) == ("original" if reason else [[0.0]])
    (line,) = [record.getMessage() for record in caplog.records]
    assert '"backend": "auto" in model.json chose backend ' + about["name"] in line
    assert about["reason"] in line and (reason is None or f"toy: {reason}" == about["reason"])


def test_torch_is_the_model_as_it_was():
    model = takeover.accelerate(Model(), "torch")
    assert model(["a"]) == "original" and "forward" not in vars(model)


def test_stats_belong_to_the_thread_that_answers(manager):
    import threading

    register(manager, Toy())
    model = takeover.accelerate(Model(), "toy")
    with takeover.collect_stats() as mine:
        other = threading.Thread(target=model, args=(["a"],))
        other.start()
        other.join()
        assert mine == []
        model(["a"]), model(["b"])
    assert takeover.total(mine) == {"rows_computed": 6, "graph": "no", "replayed": True}
    assert takeover.total([]) == {}


# Somebody else's distribution, installed, serving a real model


@pytest.fixture(scope="module")
def python_with_backend(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("third_party")
    interpreter = make_python(folder / "venv")
    source = shutil.copytree(ROOT / "tests" / "third_party_backend", folder / "source")
    pip(interpreter, "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", source)
    return interpreter


def test_a_backend_of_another_distribution_serves(python_with_backend, tiny_checkpoint):
    host = Path(__file__).with_name("open_jev")
    arguments = ("-m", "jev.server", "--checkpoint", tiny_checkpoint, "--device", "cpu", "--port", 0)
    seen = {}
    for backend in ("torch", "one-by-one"):
        with serving(
            python_with_backend, *arguments, "--backend", backend, path=(host,), OMP_NUM_THREADS="1"
        ) as url:
            assert get(url + "/health")["backend"]["name"] == backend
            seen[backend] = post(url + "/v1/systemone", REQUEST)
    about = seen["one-by-one"]["metadata"]["backend"]
    assert (about["name"], about["decided_by"], about["forwards"]) == ("one-by-one", "flag", 3)
    assert seen["one-by-one"]["usage"] == seen["torch"]["usage"]
    for name, answer in seen["torch"]["answers"].items():
        found = seen["one-by-one"]["answers"][name]
        for key in ("noul", "score"):
            # The same bfloat16 model, padded differently.
            assert found.get(key) == pytest.approx(answer.get(key), abs=0.02)
        assert found.get("probabilities") == pytest.approx(answer.get("probabilities"), abs=0.02)


def test_graph_stops_the_start_where_there_is_no_gpu(python_with_backend, tiny_checkpoint):
    host = Path(__file__).with_name("open_jev")
    arguments = ("-m", "jev.server", "--checkpoint", tiny_checkpoint, "--device", "cpu", "--port", 0)
    result = run(python_with_backend, *arguments, "--backend", "graph", path=(host,), OMP_NUM_THREADS="1")
    assert (result.returncode, result.stdout) == (1, "")
    assert (
        "openjev-fast: --backend graph: backend 'graph' cannot take this model: the model is on cpu, CUDA Graphs need "
        in result.stderr
    )
    assert result.stderr.endswith("\n--backend auto takes the best backend that can\n")


def test_its_name_is_in_the_help(python_with_backend):
    host = Path(__file__).with_name("open_jev")
    assert (
        "{torch,fast,graph,one-by-one,auto}"
        in run(python_with_backend, "-m", "jev.server", "--help", path=(host,)).stdout
    )


# Ours, on a real model


def test_fast_by_argument(python_with_backend, tiny_checkpoint):
    host = Path(__file__).with_name("open_jev")
    code = f"""
import json
from jev.serving import load_predictor
arguments = dict(checkpoint={str(tiny_checkpoint)!r}, device="cpu")
request = {REQUEST!r}
fast = dict(arguments, backend="fast")
for choice in (arguments, fast, dict(fast, prefix_cache=True)):
    print(json.dumps(load_predictor(**choice).predict(request)))
"""
    result = run(python_with_backend, "-c", code, path=(host,), OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    plain, *ours = map(json.loads, result.stdout.splitlines())
    for fast, prefix_cache in zip(ours, (False, True), strict=True):
        about = fast["metadata"]["backend"]
        assert (about["name"], about["decided_by"]) == ("fast", "argument")
        assert about["rows_computed"] < about["rows_asked"]
        assert fast["usage"] == plain["usage"]
        assert fast["metadata"]["checkpoint_sha256"] == plain["metadata"]["checkpoint_sha256"]
        assert fast["metadata"]["prefix_cache"]["enabled"] is prefix_cache
        # The original rounds to bfloat16 elsewhere; closeness itself is tested with the forward.
        assert fast["answers"]["route"]["probabilities"] == pytest.approx(
            plain["answers"]["route"]["probabilities"], abs=0.02
        )
