"""The import hook: what an interpreter start costs, every way to start Open-Jev, and what stays as it was."""

import json
import sys
from pathlib import Path

import pytest
from hosts import (
    ROOT,
    add_backend,
    get,
    make_python,
    post,
    run,
    serving,
    site_of,
    write_checkpoint,
    write_host,
)

REQUEST = {"records": [{"id": "a"}, {"id": "b", "kind": "noul"}] * 20}
OURS = "one-by-one"
FLAVOURS = ("pinned", "later", "later-everywhere", "changed")


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    interpreter = make_python(tmp_path_factory.mktemp("with_plugin") / "venv")
    add_backend(site_of(interpreter))
    return interpreter


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> Path:
    return make_python(tmp_path_factory.mktemp("without_plugin") / "venv", plugin=False)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hosts")
    return {flavour: write_host(folder / flavour, flavour) for flavour in FLAVOURS}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "plain")


def server(checkpoint, *arguments, start=("-m", "jev.server")):
    return (*start, "--checkpoint", checkpoint, "--port", 0, *arguments)


# The start of an interpreter


def test_a_start_imports_two_small_modules_and_nothing_else(python, bare_python):
    code = "import sys; print('\\n'.join(sys.modules))"
    added = set(run(python, "-c", code).stdout.split()) - set(run(bare_python, "-c", code).stdout.split())
    assert added == {"openjev_fast_plugin", "openjev_fast_plugin.bootstrap"}


def test_a_start_costs_less_than_a_millisecond(python):
    (line,) = (ROOT / "openjev_fast_plugin.pth").read_text().splitlines()
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); start = time.perf_counter(); exec(sys.argv[2]); "
        "print(time.perf_counter() - start); assert 'openjev_fast_plugin.bootstrap' in sys.modules"
    )
    seconds = [float(run(python, "-S", "-c", code, site_of(python), line).stdout) for _ in range(7)]
    assert min(seconds) < 1e-3


@pytest.mark.parametrize(
    "damage",
    [
        lambda package: (package / "bootstrap.py").unlink(),
        lambda package: (package / "bootstrap.py").write_text("def install(:\n"),
        lambda package: (package / "bootstrap.py").write_text("raise RuntimeError('broken')\n"),
        lambda package: (package / "__init__.py").write_text("import no_such_module\n"),
        lambda package: [file.unlink() for file in package.glob("*.py")],
    ],
    ids=["no-bootstrap", "syntax-error", "raises", "broken-package", "empty-package"],
)
def test_a_broken_plugin_is_silent(tmp_path, hosts, checkpoint, damage):
    interpreter = make_python(tmp_path / "venv")
    damage(site_of(interpreter) / "openjev_fast_plugin")
    result = run(interpreter, "-m", "jev.predict", "--checkpoint", checkpoint, path=(hosts["pinned"],))
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["stats"] is None


def test_the_startup_files_are_one_line_each_and_name_the_same_function():
    (start,) = (ROOT / "openjev_fast_plugin.start").read_text("utf-8").splitlines()
    assert start == "openjev_fast_plugin.bootstrap:install"
    (pth,) = (ROOT / "openjev_fast_plugin.pth").read_text("utf-8").splitlines()
    assert pth.startswith("import ")
    # site reads the files in order, and an editable install has to have made the package importable.
    assert "openjev_fast_plugin.pth" > "__editable__.openjev_fast_plugin-0.1.0.pth"


def test_install_twice_uninstall_once(python):
    code = """
        import argparse, sys
        from openjev_fast_plugin import bootstrap
        parse = argparse.ArgumentParser.parse_known_args
        bootstrap.install(); bootstrap.install()
        assert [type(finder) for finder in sys.meta_path].count(bootstrap._Finder) == 1
        import jev.serving, jev.model, jev.server
        wrapped = jev.serving.load_predictor
        assert wrapped is jev.server.load_predictor
        assert argparse.ArgumentParser.parse_known_args is not parse
        bootstrap.uninstall()
        assert jev.serving.load_predictor is wrapped.__wrapped__ is jev.server.load_predictor
        assert not hasattr(jev.model.DecisionModel.load, "openjev_fast")
        assert argparse.ArgumentParser.parse_known_args is parse
        assert not any(isinstance(finder, bootstrap._Finder) for finder in sys.meta_path)
    """
    check(python, code)


def check(interpreter, code, *arguments, host=None, options=(), **variables):
    host = host or HOSTS["pinned"]
    lines = "\n".join(line[8:] for line in code.splitlines())
    result = run(interpreter, *options, "-c", lines, *arguments, path=(host,), **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


HOSTS: dict[str, Path] = {}


@pytest.fixture(autouse=True)
def _hosts(hosts):
    HOSTS.update(hosts)


# The hook


def test_modules_keep_their_own_loader(python):
    code = """
        import importlib.machinery, importlib.util, inspect
        import jev.serving
        for loader in (jev.serving.__loader__, jev.serving.__spec__.loader):
            assert type(loader) is importlib.machinery.SourceFileLoader
        assert "class Predictor" in inspect.getsource(jev.serving)
        assert hasattr(jev.serving.load_predictor, "openjev_fast")
        importlib.reload(jev.serving)
        assert hasattr(jev.serving.load_predictor, "openjev_fast")
        spec = importlib.util.find_spec("jev.model")
        assert spec.loader.get_source("jev.model") and spec.origin == spec.loader.path
    """
    check(python, code)


def test_reloading(python, checkpoint):
    code = f"""
        import importlib, logging
        logging.basicConfig()
        import jev.model, jev.serving, jev.server, jev.predict
        from jev.model import DecisionModel as early
        from openjev_fast_plugin import bootstrap
        first = jev.server.load_predictor.__wrapped__
        length = len(bootstrap._undo)
        for _ in range(3):
            for module in (jev.model, jev.serving, jev.predict):
                importlib.reload(module)
        assert len(bootstrap._undo) == length
        # Who imported them before goes on with those, and with the plugin.
        assert jev.server.load_predictor.__wrapped__ is first is not jev.serving.load_predictor.__wrapped__
        assert early is not jev.model.DecisionModel
        for load in (jev.server.load_predictor, jev.serving.load_predictor, early.load, jev.model.DecisionModel.load):
            assert load.openjev_fast
        # Every load of a backend patches the server, once.
        for _ in range(2):
            jev.server.load_predictor(checkpoint={str(checkpoint)!r}, backend={OURS!r})
            importlib.reload(jev.server)
        assert jev.server.make_server.openjev_fast and len(bootstrap._undo) == length + 1
        bootstrap.uninstall()
        for function in (jev.server.load_predictor, jev.serving.load_predictor, jev.server.make_server,
                         early.load, jev.model.DecisionModel.load):
            assert not hasattr(function, "openjev_fast")
    """
    result = run(python, "-c", "\n".join(line[8:] for line in code.splitlines()), path=(HOSTS["pinned"],))
    assert result.stderr == "" and result.returncode == 0


def test_a_reload_that_fails_keeps_the_patch(python, tmp_path):
    host = write_host(tmp_path / "host")
    code = f"""
        import importlib, pathlib, sys
        sys.dont_write_bytecode = True
        import jev.serving
        before = jev.serving.load_predictor.__wrapped__
        file = pathlib.Path({str(host)!r}, "jev", "serving.py")
        text = file.read_text()
        file.write_text("1 / 0")
        try:
            importlib.reload(jev.serving)
        except ZeroDivisionError:
            assert jev.serving.load_predictor.__wrapped__ is before
            # A patch that fails is forgotten when the next one does not.
            file.write_text(text.replace("def load_predictor(*, ", "def load_predictor("))
            importlib.reload(jev.serving)
            from openjev_fast_plugin import backend_flag, bootstrap
            assert list(backend_flag.failures) == ["jev.serving"]
            file.write_text(text + "# whole again")
            importlib.reload(jev.serving)
            assert not backend_flag.failures and jev.serving.load_predictor.openjev_fast
            bootstrap.uninstall()
            assert not hasattr(jev.serving.load_predictor, "__wrapped__")
            print("done")
    """
    assert check(python, code, host=host) == "done\n"


def test_another_hook_that_asks_every_other_finder(python):
    code = """
        import sys
        class Curious:
            def find_spec(self, name, path=None, target=None):
                for finder in sys.meta_path:
                    if finder is not self:
                        spec = finder.find_spec(name, path, target)
                        if spec is not None:
                            return spec
        sys.meta_path.insert(0, Curious())
        import jev.serving
        assert hasattr(jev.serving.load_predictor, "openjev_fast")
    """
    check(python, code)


def test_programs_imported_before_the_hook(python, checkpoint):
    code = f"""
        import sys
        sys.path += {[str(site_of(python)), *sys.path]!r}
        import jev.server, jev.predict
        from jev.serving import load_predictor as early
        from openjev_fast_plugin import bootstrap
        bootstrap.install()
        assert jev.server.load_predictor is jev.serving.load_predictor is early.__globals__["load_predictor"]
        sys.argv = ["jev-predict", "--checkpoint", {str(checkpoint)!r}, "--backend", {OURS!r}]
        jev.predict.main()
    """
    assert json.loads(check(python, code, options=("-S",)))["stats"]["forwards"] == 2


def test_abbreviations_keep_their_meaning(python):
    code = """
        import argparse, importlib.util
        importlib.util.find_spec("jev.server")
        parser = argparse.ArgumentParser()
        parser.add_argument("--batch-size", type=int)
        parser.add_argument("--base")
        def parsed(*arguments):
            space = {"__name__": "jev.server", "parser": parser, "arguments": arguments}
            return {key: value for key, value in vars(eval("parser.parse_args(arguments)", space)).items() if value}
        assert parsed("--bat", "16") == parsed("--bat=16") == {"batch_size": 16}
        assert parsed("--bas", "b") == {"base": "b"}
        assert parsed("--backen", "fast") == parsed("--bac=fast") == {"backend": "fast"}
        try:
            parsed("--ba", "16")
        except SystemExit as stopped:
            assert stopped.code == 2
    """
    check(python, code)


@pytest.mark.parametrize("abbreviation", ["--b", "--ba"])
def test_an_abbreviation_that_was_not_ambiguous_is_not(python, hosts, checkpoint, abbreviation):
    arguments = server(checkpoint, abbreviation, 16, "--backen", "torch")
    with serving(python, *arguments, path=(hosts["pinned"],)) as url:
        assert get(url + "/health")["backend"] == {"name": "torch", "decided_by": "flag"}


def test_only_the_programs_of_open_jev_have_the_flag(python):
    code = """
        import argparse, importlib.util, sys
        importlib.util.find_spec("jev.server")
        assert hasattr(argparse.ArgumentParser.parse_known_args, "openjev_fast")
        parser = argparse.ArgumentParser()
        parser.add_argument("--port", default="1")
        assert vars(parser.parse_args([])) == {"port": "1"}
        assert parser.parse_known_args(["--backend", "x"])[1] == ["--backend", "x"]
        assert "--backend" not in parser.format_help()

        server = {"__name__": "jev.server", "parser": parser}
        assert vars(eval("parser.parse_args([])", server)) == {"port": "1"}
        assert vars(eval("parser.parse_args(['--back', 'fast'])", server)) == {"port": "1", "backend": "fast"}
        assert vars(eval("parser.parse_args([])", server)) == {"port": "1"}
    """
    check(python, code)


# Every way to start


STARTS = {
    "module": ("-m", "jev.server"),
    "console-script": ("-c", "import sys; from jev.server import main; sys.exit(main())"),
    "runpy": ("-c", "import runpy; runpy.run_module('jev.server', run_name='__main__', alter_sys=True)"),
    "our-module": ("-m", "openjev_fast_plugin", "jev.server"),
}


@pytest.mark.parametrize("flavour", ["pinned", "later"])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_every_way_to_start_takes_the_flag(python, hosts, checkpoint, flavour, start):
    arguments = server(checkpoint, "--backend", OURS, start=start)
    with serving(python, *arguments, path=(hosts[flavour],)) as url:
        health, answer = get(url + "/health"), post(url + "/v1/systemone", REQUEST)
    backend = {"name": OURS, "decided_by": "flag", "kernels": "original"}
    assert health == {
        "status": "ready",
        "model": "toy",
        "method": "host",
        "backend": {**backend, "status": "ready"},
    }
    # Batches of 32 would be two calls; the model was handed over before its provenance was read.
    stats = {"rows_asked": 400, "rows_computed": 400, "forwards": 40}
    assert answer["metadata"]["backend"] == {**backend, **stats}
    assert answer["metadata"]["loaded_by"] == "function:forward"
    assert answer["usage"] == {"input_tokens": 400}


def test_without_site_our_module_brings_the_hook(python, hosts, checkpoint):
    path = (hosts["pinned"], site_of(python), *map(Path, sys.path[1:]))
    result = run(python, "-S", *server(checkpoint, "--backend", OURS), path=path)
    assert result.returncode == 2 and "unrecognized arguments: --backend" in result.stderr
    arguments = server(checkpoint, "--backend", OURS, start=STARTS["our-module"])
    with serving(python, "-S", *arguments, path=path) as url:
        assert get(url + "/health")["backend"]["decided_by"] == "flag"


def test_our_module_without_a_module(python):
    result = run(python, "-m", "openjev_fast_plugin")
    assert result.returncode == 1 and "usage:" in result.stderr


# Who decides


@pytest.mark.parametrize("flavour", ["pinned", "later"])
@pytest.mark.parametrize(
    ("flag", "variable", "file", "expected"),
    [
        (OURS, "torch", "torch", (OURS, "flag")),
        (None, OURS, "torch", (OURS, "environment")),
        (None, None, OURS, (OURS, "file")),
        ("torch", OURS, OURS, ("torch", "flag")),
        (None, "torch", OURS, ("torch", "environment")),
    ],
    ids=["flag", "environment", "file", "flag-torch", "environment-torch"],
)
def test_flag_then_environment_then_file(python, hosts, tmp_path, flavour, flag, variable, file, expected):
    arguments = server(write_checkpoint(tmp_path / "c", file), *(["--backend", flag] if flag else []))
    variables = {"OPENJEV_BACKEND": variable} if variable else {}
    with serving(python, *arguments, path=(hosts[flavour],), **variables) as url:
        health, answer = get(url + "/health"), post(url + "/v1/systemone", REQUEST)
    if flavour == "later" and expected[0] == "torch":
        # The host's own choice is its own business.
        assert "backend" not in health and answer["metadata"]["host_backend"] == "torch"
    else:
        assert (health["backend"]["name"], health["backend"]["decided_by"]) == expected
        assert answer["metadata"]["backend"]["decided_by"] == expected[1]
    assert answer["metadata"]["loaded_by"] == (
        "function:forward" if expected[0] == OURS else "method:forward"
    )


@pytest.mark.parametrize("variable", [None, "triton-tail"])
def test_the_host_s_other_choices_pass_through(python, hosts, checkpoint, variable):
    flag, variables = ((), {"OPENJEV_BACKEND": variable}) if variable else (("--backend", "triton-tail"), {})
    with serving(python, *server(checkpoint, *flag), path=(hosts["later"],), **variables) as url:
        health, answer = get(url + "/health"), post(url + "/v1/systemone", REQUEST)
    assert "backend" not in health
    assert answer["metadata"]["host_backend"] == "triton-tail" and "backend" not in answer["metadata"]


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_predict_with_a_choice_of_the_host_s_own(python, hosts, checkpoint, how):
    arguments = ("-m", "jev.predict", "--checkpoint", checkpoint)
    for name in ("torch", "triton-tail"):
        flag = ["--backend", name] if how == "flag" else []
        variables = {} if flag else {"OPENJEV_BACKEND": name}
        result = run(python, *arguments, *flag, path=(hosts["later-everywhere"],), **variables)
        assert result.returncode == 0, result.stderr
        answer = json.loads(result.stdout)
        assert (answer["backend"], answer["stats"]) == (name, None)
    # Where only the server has it, `jev.predict` does not say that nobody does.
    result = run(python, *arguments, *flag, path=(hosts["later"],), **variables)
    assert result.returncode == (2 if flag else 1) and result.stdout == "" and "unknown" not in result.stderr
    if not flag:
        assert (
            "OPENJEV_BACKEND=triton-tail: predict.py has no backend 'triton-tail': choose from torch, "
            in (result.stderr.replace("python -m jev.predict", "predict.py"))
        )


@pytest.mark.parametrize("how", ["flag", "environment", "file"])
def test_a_name_in_neither_list(python, hosts, tmp_path, how):
    checkpoint = write_checkpoint(tmp_path / "c", "nope" if how == "file" else None)
    flag = ["--backend", "nope"] if how == "flag" else []
    variables = {"OPENJEV_BACKEND": "nope"} if how == "environment" else {}
    result = run(python, *server(checkpoint, *flag), path=(hosts["later"],), **variables)
    assert (
        result.returncode == (2 if flag else 1) and result.stdout == "" and "Traceback" not in result.stderr
    )
    assert "torch, triton-tail, fast-cuda, fast, graph, one-by-one, auto" in result.stderr.replace("'", "")


def test_an_unknown_name_stops_before_the_weights_are_loaded(python, tmp_path):
    host, checkpoint = write_host(tmp_path / "host"), write_checkpoint(tmp_path / "c")
    model = host / "jev" / "model.py"
    model.write_text(
        model.read_text().replace("self.model_id, self.r", "print('loading'); self.model_id, self.r")
    )
    load = f"from jev.model import DecisionModel; DecisionModel.load({str(checkpoint)!r})"
    load_predictor = "from jev.serving import load_predictor; load_predictor(backend='nobody', "
    named = write_checkpoint(tmp_path / "named", "nobody")
    for start, variables in (
        (server(checkpoint), {"OPENJEV_BACKEND": "nobody"}),
        (server(checkpoint, "--backend", "nobody"), {}),
        (server(named), {}),
        (("-m", "jev.predict", "--checkpoint", named), {}),
        (("-c", load_predictor + f"checkpoint={str(checkpoint)!r})"), {}),
        (("-c", load_predictor + "model_id='m', revision='r')"), {}),
        (("-c", load), {"OPENJEV_BACKEND": "nobody"}),
    ):
        result = run(python, *start, path=(host,), **variables)
        assert result.returncode in (1, 2) and "'nobody'" in result.stderr and result.stdout == ""
    assert run(python, "-c", load, path=(host,)).stdout == "loading\n"


@pytest.mark.parametrize(
    ("flag", "variable", "file", "forwards"),
    [
        (OURS, None, None, 2),
        (None, OURS, None, 2),
        (None, None, OURS, 2),
        (None, "torch", OURS, None),
        ("torch", OURS, OURS, None),
        (None, None, None, None),
    ],
    ids=["flag", "environment", "file", "environment-torch", "flag-torch", "nothing"],
)
def test_predict(python, hosts, tmp_path, flag, variable, file, forwards):
    arguments = [
        "--checkpoint",
        write_checkpoint(tmp_path / "c", file),
        *(["--backend", flag] if flag else []),
    ]
    variables = {"OPENJEV_BACKEND": variable} if variable else {}
    result = run(python, "-m", "jev.predict", *arguments, path=(hosts["pinned"],), **variables)
    assert result.returncode == 0, result.stderr
    assert (json.loads(result.stdout)["stats"] or {}).get("forwards") == forwards


def test_load_predictor_takes_backend(python, checkpoint):
    code = f"""
        from jev.serving import load_predictor
        checkpoint = {str(checkpoint)!r}
        plain = load_predictor(checkpoint=checkpoint, backend=None)
        assert type(plain).__dict__["predict"].__get__(plain) == plain.predict and plain.batch_size == 32
        base = load_predictor(model_id="base", revision="r", backend={OURS!r}, prefix_cache=True)
        assert base.batch_size == base.max_candidates
        metadata = base.predict({REQUEST!r})["metadata"]
        assert metadata["backend"]["decided_by"] == "argument" and metadata["backend"]["forwards"] == 40
        assert metadata["prefix_cache"] == {{
            "enabled": True, "mode": "openjev_one-by-one", "logical_input_tokens": 400}}
        # The choice for the whole call also binds the load inside it.
        load_predictor(checkpoint=checkpoint, backend="torch").scorer.model.score_cached
        assert "forward" not in vars(load_predictor(checkpoint=checkpoint, backend="torch").scorer.model)
        # Servers made by name, imported before or after.
        from jev.server import make_server
        import http.client, threading
        server = make_server(base, port=0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection(*server.server_address)
        connection.request("GET", "/health?verbose=1")
        missing = connection.getresponse()
        assert (missing.status, missing.read()) == (404, b'{{"error": "not found"}}')
        connection.request("GET", "/health")
        healthy = connection.getresponse()
        body = healthy.read()
        assert len(body) == int(healthy.headers["Content-Length"]) and b'"decided_by": "argument"' in body
        assert make_server(plain, port=0).RequestHandlerClass.do_GET.__qualname__.startswith("make_server.")
    """
    check(python, code, OPENJEV_BACKEND="")


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("nobody", "has no backend 'nobody': choose from torch, fast, graph, one-by-one, auto"),
        (
            "one-by-one",
            "backend 'one-by-one' cannot take this model: max_length is 13\n"
            "OPENJEV_BACKEND=auto takes the best backend that can",
        ),
    ],
    ids=["unknown", "refused"],
)
def test_a_backend_that_cannot_be_had_stops_the_start(python, hosts, tmp_path, backend, message):
    checkpoint = write_checkpoint(tmp_path / "c")
    (checkpoint / "model.json").write_text(
        (checkpoint / "model.json").read_text().replace('"max_length": 384', '"max_length": 13')
    )
    for program in ("server", "predict"):
        result = run(
            python,
            *("-m", f"jev.{program}", "--checkpoint", checkpoint),
            path=(hosts["pinned"],),
            OPENJEV_BACKEND=backend,
        )
        assert result.returncode == 1 and "Traceback" not in result.stderr
        assert message in result.stderr and result.stdout == ""
        assert message == result.stderr.strip()[-len(message) :]


def test_auto_keeps_the_original_and_says_why(python, hosts, checkpoint, tmp_path):
    interpreter = make_python(tmp_path / "venv")
    for engine in ("engine", "graph_engine"):
        (site_of(interpreter) / "openjev_fast_plugin" / f"{engine}.py").write_text(
            f"def refusal(model):\n    return f'model_id is {{model.model_id!r}} in {engine}'\n"
        )
    reason = "fast: model_id is 'toy' in engine; graph: model_id is 'toy' in graph_engine"
    with serving(interpreter, *server(checkpoint, "--backend", "auto"), path=(hosts["pinned"],)) as url:
        health, answer = get(url + "/health"), post(url + "/v1/systemone", REQUEST)
    assert health["backend"] == {
        "name": "torch",
        "decided_by": "flag",
        "requested": "auto",
        "reason": reason,
    }
    assert answer["metadata"]["backend"] == health["backend"]
    assert answer["metadata"]["loaded_by"] == "method:forward"
    result = run(
        interpreter,
        "-m",
        "jev.predict",
        "--checkpoint",
        checkpoint,
        path=(hosts["pinned"],),
        OPENJEV_BACKEND="auto",
    )
    assert result.stderr == f"openjev-fast: OPENJEV_BACKEND=auto chose backend torch ({reason})\n"
    result = run(interpreter, *server(checkpoint, "--backend", "graph"), path=(hosts["pinned"],))
    assert result.returncode == 1
    assert result.stderr == (
        "openjev-fast: --backend graph: backend 'graph' cannot take this model: "
        "model_id is 'toy' in graph_engine\n--backend auto takes the best backend that can\n"
    )


# Warm-up


@pytest.mark.parametrize("flavour", ["pinned", "later"])
def test_sizes_are_not_for_every_backend_and_never_reach_the_host(python, hosts, checkpoint, flavour):
    arguments = server(checkpoint, "--backend", OURS, "--warmup", "72")
    result = run(python, *arguments, path=(hosts[flavour],))
    assert result.returncode == 1 and result.stdout == ""
    told = f"--warmup 72: backend '{OURS}' is warmed up with example requests: name a file of them"
    assert result.stderr.strip().endswith(told)
    code = """
        import sys
        import jev.server
        sys.argv = ["server", "--checkpoint", "x", "--warmup", "72"]
        jev.server.load_predictor = lambda **arguments: sys.exit(repr(sorted(arguments)))
        jev.server.main()
    """
    lines = "\n".join(line[8:] for line in code.splitlines())
    assert "warmup" not in run(python, "-c", lines, path=(hosts[flavour],)).stderr


def test_an_open_jev_that_is_not_known_is_not_warmed_up(python, hosts, checkpoint):
    result = run(python, *server(checkpoint, "--warmup", "72"), path=(hosts["changed"],))
    assert result.returncode == 2 and result.stdout == ""
    assert (
        "--warmup 72 cannot be used with this Open-Jev: jev.serving.load_predictor: expected" in result.stderr
    )


@pytest.mark.parametrize("abbreviation", ["--w", "--warm"])
def test_an_abbreviation_of_the_host_s_flag_is_not_ours(python, tmp_path, checkpoint, abbreviation):
    host = write_host(tmp_path / "host")
    file = host / "jev" / "server.py"
    flag = '    parser.add_argument("--warm-up-steps", type=int)\n    args = vars(parser.parse_args())\n'
    text = file.read_text().replace("    args = vars(parser.parse_args())\n", flag)
    file.write_text(text.replace("predictor = load", "raise SystemExit(repr(args)); predictor = load"))
    result = run(python, *server(checkpoint, abbreviation, 3), path=(host,))
    assert "'warm_up_steps': 3" in result.stderr


# Nothing asked for


@pytest.mark.parametrize("flavour", ["pinned", "later"])
def test_help_differs_by_the_flags_alone(python, bare_python, hosts, flavour):
    def words(interpreter):
        return run(interpreter, "-m", "jev.server", "--help", path=(hosts[flavour],)).stdout

    def without_flags(text):
        usage, _, options = text.partition("\n\n")
        usage, options = " ".join(usage.split()), options.splitlines()
        for name in ("--backend", "--warmup"):
            flag = next((index for index, line in enumerate(options) if line.strip().startswith(name)), None)
            if flag is not None:
                while flag + 1 < len(options) and options[flag + 1].startswith(" " * 10):
                    del options[flag + 1]
                del options[flag]
            head, found, tail = usage.partition(f" [{name} ")
            usage = head + (tail.partition("]")[2] if found else "")
        return usage, options

    with_plugin, without = words(python), words(bare_python)
    assert without_flags(with_plugin) == without_flags(without)
    assert "[--warmup ROWS|FILE]" in with_plugin and "--warmup" not in without
    assert (
        "{torch,fast,graph,one-by-one,auto}" in with_plugin
        or "{torch,triton-tail,fast-cuda,fast,graph,one-by-one,auto}" in with_plugin
    )


@pytest.mark.parametrize("flavour", ["pinned", "later", "changed"])
def test_without_a_choice_open_jev_runs_as_if_we_were_not_there(
    python, bare_python, hosts, checkpoint, flavour
):
    arguments = server(checkpoint)
    seen = []
    for interpreter in (python, bare_python):
        with serving(interpreter, *arguments, path=(hosts[flavour],)) as url:
            seen.append((get(url + "/health"), post(url + "/v1/systemone", REQUEST)))
    assert seen[0] == seen[1]

    # Every function and class is the host's own, but for wrappers around the three.
    code = f"""
        import argparse, inspect, json, sys
        import jev.model, jev.serving, jev.server
        sys.argv = ["server", "--checkpoint", {str(checkpoint)!r}]
        jev.server.make_server = lambda predictor, host, port: sys.exit(0)
        originals = [(module.__name__, name, value) for module in (jev.model, jev.serving, jev.server)
                     for name, value in vars(module).items()
                     if inspect.isfunction(value) or inspect.isclass(value)]
        inner = [(holder.__qualname__, name, getattr(value, "__func__", value)) for _, _, holder in originals
                 if inspect.isclass(holder) for name, value in vars(holder).items()]
        found = sorted({{name for _, name, value in originals + inner
                        if getattr(value, "__code__", None) and "openjev" in value.__code__.co_filename}})
        parser = vars(argparse.ArgumentParser)
        found += [name for name, value in parser.items()
                  if getattr(value, "__code__", None) and "openjev" in value.__code__.co_filename]
        try:
            jev.server.main()
        except SystemExit:
            pass
        unwanted = ("torch", "transformers", "pluggy", "openjev_one_by_one")
        print(json.dumps([found, [name for name in unwanted if name in sys.modules]]))
    """
    found, imported = json.loads(check(python, code, host=hosts[flavour]))
    assert found == ["load", "load_predictor", "parse_known_args"]
    assert imported == []
