"""The patch modules: signatures, all or nothing, undo, and what happens when Open-Jev is not as known."""

import importlib
import json
import sys
import types
from pathlib import Path

import pytest
from hosts import get, make_python, post, run, serving, site_of, write_checkpoint, write_host

torch = pytest.importorskip("torch")

from openjev_fast_plugin import bootstrap, patches  # noqa: E402
from openjev_fast_plugin.patches import jev_model, jev_server, jev_serving, transformers_masks  # noqa: E402

REQUEST = {"records": [{"id": "a"}, {"id": "b", "kind": "noul"}] * 20}


# Signatures


def functions(text):
    space: dict = {}
    exec(f"def f{text}: pass", space)
    return space["f"]


GROWS = patches.Known("m.f", ("a", "b|c"), ("k", "l"), {"l": None}, grows=True)
EXACT = patches.Known("m.f", ("a", "b"), ("k",), {"b": 1})
STARRED = patches.Known("m.f", ("a", "b"), defaults={"b": 1}, starred=("**rest",))


@pytest.mark.parametrize(
    ("known", "signature", "accepted"),
    [
        (EXACT, "(a, b=1, *, k)", True),
        (EXACT, "(a, b=2, *, k)", False),
        (EXACT, "(a, b, *, k)", False),
        (EXACT, "(a, b=1, *, k=3)", False),
        (EXACT, "(a, b=1, *, k, z=0)", False),
        (EXACT, "(b, a=1, *, k)", False),
        (EXACT, "(a, b=1, k=3)", False),
        (EXACT, "(a, b=1, *rest, k)", False),
        (EXACT, "(a, b=1, *, k, **rest)", False),
        (STARRED, "(a, b=1, **rest)", True),
        (STARRED, "(a, b=1, **more)", False),
        (STARRED, "(a, b=1, *rest)", False),
        (STARRED, "(a, b=1)", False),
        (GROWS, "(a, b, *, k, l=None)", True),
        (GROWS, "(a, c=9, *, l, k=4)", True),
        (GROWS, "(a, b, z=0, *, k, l, y=1)", True),
        (GROWS, "(a, b, z, *, k, l)", False),
        (GROWS, "(a, b, *, k, l, y)", False),
        (GROWS, "(a, b, *, k)", False),
        (GROWS, "(a, d, *, k, l)", False),
        (GROWS, "(a, *, k, l)", False),
        (GROWS, "(a, b, *, k, l, **rest)", False),
        (GROWS, "(*, a, b, k, l)", False),
    ],
)
def test_signatures(known, signature, accepted):
    function = functions(signature)
    if accepted:
        return known.verify(function)
    with pytest.raises(patches.UnknownUpstream) as caught:
        known.verify(function)
    assert str(caught.value) == f"m.f: expected {known}, found {signature}"


def test_one_of_several_signatures():
    forms = (EXACT, STARRED)
    for signature in ("(a, b=1, *, k)", "(a, b=1, **rest)"):
        patches.verify_any(forms, functions(signature))
    with pytest.raises(patches.UnknownUpstream) as caught:
        patches.verify_any(forms, functions("(a, *, k)"))
    assert str(caught.value) == f"m.f: expected {EXACT} or {STARRED}, found (a, *, k)"


@pytest.mark.parametrize("what", [None, print, functions.__call__, type("C", (), {})])
def test_what_is_no_plain_function_is_unknown(what):
    with pytest.raises(patches.UnknownUpstream, match="m.f: expected .*, found "):
        EXACT.verify(what)


def test_changes_are_undone_last_first_and_after_an_error():
    module = types.SimpleNamespace(a=1, b=2)
    with pytest.raises(ZeroDivisionError), patches.Changes() as changes:
        changes.replace(module, "a", 10)
        changes.replace(module, "a", 11)
        changes.replace(module, "b", 20)
        _ = 1 / 0
    assert vars(module) == {"a": 1, "b": 2}


def test_what_somebody_else_replaced_is_left_to_them(caplog):
    module = types.ModuleType("theirs")
    module.a = module.b = 1
    with patches.Changes() as changes:
        changes.replace(module, "a", 10)
        changes.replace(module, "b", 20)
    module.a = "theirs"
    changes.undo()
    assert (module.a, module.b) == ("theirs", 1)
    assert "somebody else replaced theirs.a" in caplog.text


# Each patch: applied, seen to act, undone


def fake_modules(tmp_path, monkeypatch):
    # Without the hook, where the plugin is installed.
    finders = [finder for finder in sys.meta_path if not isinstance(finder, bootstrap._Finder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.syspath_prepend(str(write_host(tmp_path / "host")))
    for name in ("jev", "jev.model", "jev.serving", "jev.server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = [importlib.import_module(f"jev.{name}") for name in ("model", "serving", "server")]
    assert Path(modules[0].__file__).is_relative_to(tmp_path)
    return modules


def test_apply_and_undo(tmp_path, monkeypatch):
    for module, patch, owner, name in zip(
        fake_modules(tmp_path, monkeypatch),
        (jev_model, jev_serving, jev_server),
        ("DecisionModel", None, None),
        ("load", "load_predictor", "make_server"),
        strict=True,
    ):
        holder = getattr(module, owner) if owner else module
        before = dict(vars(holder))
        undo = patch.apply(module)
        changed = {key for key, value in vars(holder).items() if before.get(key) is not value}
        assert changed == {name}
        assert callable(patch.apply(module)), "a second time changes nothing"
        assert getattr(vars(holder)[name], "__wrapped__", None) is not None
        undo()
        assert dict(vars(holder)) == before


# Open-Jev as no version has it


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    return make_python(tmp_path_factory.mktemp("with_plugin") / "venv")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "plain")


def edited_host(folder: Path, module: str, *edits: tuple[str, str]) -> Path:
    host = write_host(folder)
    file = host / "jev" / f"{module}.py"
    text = file.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    return host


CHANGED = {
    "load_predictor": (
        "serving",
        (
            "def load_predictor(*, checkpoint=None, model_id=None",
            "def load_predictor(checkpoint=None, model_id=None",
        ),
        "jev.serving.load_predictor: expected (*, checkpoint=None, model_id=None, revision=None, "
        "device='cuda:0', max_length=None, batch_size=32, prefix_cache=False, further=...), found "
        "(checkpoint=None, model_id=None, revision=None, device='cuda:0', max_length=None, batch_size=32, "
        "prefix_cache=False)",
    ),
    "load": (
        "model",
        ('def load(cls, output, device="cuda:0"):', 'def load(cls, output, where, device="cuda:0"):'),
        "jev.model.DecisionModel.load: expected (cls, output|path, device='cuda:0', further=...), "
        "found (cls, output, where, device='cuda:0')",
    ),
    "make_server": (
        "server",
        ('def make_server(predictor, host="127.0.0.1"', 'def make_server(host="127.0.0.1", predictor=None'),
        "jev.server.make_server: expected (predictor, host='127.0.0.1', port=8791, *, static_root=None, "
        "max_body_bytes=4194304, further=...), found (host='127.0.0.1', predictor=None, port=8791, *, "
        "static_root=None, max_body_bytes=4194304)",
    ),
}


@pytest.mark.parametrize("how", ["flag", "environment", "file"])
@pytest.mark.parametrize("changed", CHANGED)
def test_a_changed_open_jev_stops_who_asks_for_a_backend(python, tmp_path, changed, how):
    module, edit, message = CHANGED[changed]
    host = edited_host(tmp_path / "host", module, edit)
    if changed == "load":
        # Its callers have changed with it.
        serving_file = host / "jev" / "serving.py"
        serving_file.write_text(
            serving_file.read_text().replace("load(checkpoint, ", "load(checkpoint, None, ")
        )
    if changed == "make_server":
        server_file = host / "jev" / "server.py"
        server_file.write_text(
            server_file.read_text().replace(
                "make_server(predictor, host, port)", "make_server(predictor=predictor, port=port)"
            )
        )
    checkpoint = write_checkpoint(tmp_path / "c", "fast" if how == "file" else None)
    arguments = ["-m", "jev.server", "--checkpoint", checkpoint, "--port", 0]
    if how == "flag":
        arguments += ["--backend", "fast"]
    result = run(
        python, *arguments, path=(host,), **({"OPENJEV_BACKEND": "fast"} if how == "environment" else {})
    )
    assert result.returncode in (1, 2) and result.stdout == "" and "Traceback" not in result.stderr
    assert message in result.stderr

    # The original is there for whoever does not, or says so.
    for flag in ([], ["--backend", "torch"]):
        if how == "file" and not flag:
            continue
        with serving(python, *arguments[:6], *flag, path=(host,)) as url:
            assert get(url + "/health")["status"] == "ready"
            assert post(url + "/v1/systemone", REQUEST)["usage"] == {"input_tokens": 400}


def test_a_changed_open_jev_stops_callers_from_python(python, checkpoint, tmp_path):
    host = write_host(tmp_path / "host", "changed")
    code = f"""
import jev.serving, jev.model
from openjev_fast_plugin import BackendError
checkpoint = {str(checkpoint)!r}
plain = jev.serving.load_predictor(checkpoint)
assert plain.scorer.model.last_input_tokens == 0 and plain.batch_size == 32
jev.serving.load_predictor(checkpoint=checkpoint, backend="torch")
try:
    jev.serving.load_predictor(checkpoint=checkpoint, backend="fast")
except BackendError as error:
    print(error)
"""
    result = run(python, "-c", code, path=(host,))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(
        "backend='fast' cannot be used with this Open-Jev: jev.serving.load_predictor: "
    )


@pytest.mark.parametrize(
    ("module", "edit", "expected"),
    [
        ("serving", ("def load_predictor(", "def open_predictor("), "jev.serving.load_predictor: expected"),
        (
            "model",
            ("    def load(cls", "    def restore(cls"),
            "jev.model.DecisionModel.load: expected classmethod",
        ),
        (
            "model",
            ("class DecisionModel", "class Model"),
            "jev.model.DecisionModel.load: expected classmethod",
        ),
        (
            "model",
            ("    @classmethod\n", "    @staticmethod\n"),
            "jev.model.DecisionModel.load: expected classmethod",
        ),
    ],
    ids=["no-load_predictor", "no-load", "no-class", "no-classmethod"],
)
def test_a_target_that_is_gone(python, tmp_path, module, edit, expected):
    host = edited_host(tmp_path / "host", module, edit)
    code = f"import jev.{module}\n" + (
        "jev.model.DecisionModel.load(jev.model.DecisionModel, 'nowhere')"
        if edit[1].strip() == "@staticmethod"
        else ""
    )
    result = run(python, "-c", code, path=(host,), OPENJEV_BACKEND="fast")
    assert result.returncode == 1 and expected in result.stderr and "OPENJEV_BACKEND=fast" in result.stderr
    for variables in ({}, {"OPENJEV_BACKEND": "torch"}):
        assert run(python, "-c", f"import jev.{module}", path=(host,), **variables).returncode == 0


def test_a_host_that_loads_another_way_does_not_lose_the_flag(python, checkpoint, tmp_path):
    host = edited_host(tmp_path / "host", "serving", ("def load_predictor(", "def open_predictor("))
    server = host / "jev" / "server.py"
    text = server.read_text().replace("import load_predictor", "import open_predictor")
    server.write_text(text.replace("load_predictor(**args)", "open_predictor(checkpoint=args['checkpoint'])"))
    arguments = ("-m", "jev.server", "--checkpoint", checkpoint, "--port", 0)
    result = run(python, *arguments, "--backend", "fast", path=(host,))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "--backend fast cannot be used with this Open-Jev: jev.serving.load_predictor: " in result.stderr
    with serving(python, *arguments, path=(host,)) as url:
        assert post(url + "/v1/systemone", REQUEST)["usage"] == {"input_tokens": 400}


@pytest.mark.parametrize("broken", ["jev_serving", "jev_model", "__init__"])
def test_a_broken_patch_leaves_the_flag_and_says_why(tmp_path, checkpoint, broken):
    interpreter = make_python(tmp_path / "venv")
    (site_of(interpreter) / "openjev_fast_plugin" / "patches" / f"{broken}.py").write_text("def (:\n")
    host = write_host(tmp_path / "host")
    arguments = ("-m", "jev.server", "--checkpoint", checkpoint, "--port", 0)
    shown = run(interpreter, "-m", "jev.server", "--help", path=(host,)).stdout
    assert "--backend {torch,fast,graph,auto}" in shown
    for flag, variables in ((["--backend", "fast"], {}), ([], {"OPENJEV_BACKEND": "fast"})):
        result = run(interpreter, *arguments, *flag, path=(host,), **variables)
        assert result.returncode in (1, 2) and "SyntaxError" in result.stderr and result.stdout == ""
    with serving(interpreter, *arguments, path=(host,)) as url:
        assert post(url + "/v1/systemone", REQUEST)["metadata"]["loaded_by"] == "method:forward"


def test_plugins_that_cannot_be_loaded_leave_the_flag(tmp_path, checkpoint):
    interpreter = make_python(tmp_path / "venv")
    (site_of(interpreter) / "openjev_fast_plugin" / "plugin.py").write_text(
        "raise OSError('no plugins today')\n"
    )
    host = write_host(tmp_path / "host")
    arguments = ("-m", "jev.server", "--checkpoint", checkpoint, "--port", 0)
    result = run(interpreter, *arguments, "--backend", "fast", path=(host,))
    assert result.returncode == 1 and "no plugins today" in result.stderr
    with serving(interpreter, *arguments, "--backend", "torch", path=(host,)) as url:
        assert get(url + "/health")["status"] == "ready"


def test_a_predictor_of_another_shape_is_refused(python, tmp_path):
    host = edited_host(
        tmp_path / "host",
        "serving",
        ("self.scorer, self.batch_size", "self.judge, self.batch_size"),
        ("scorer.model.model_id", "self.judge.model.model_id"),
    )
    code = "from jev.serving import load_predictor as load; load(model_id='m', revision='r', backend='auto')"
    result = run(python, "-c", code, path=(host,))
    assert result.returncode == 1
    assert "jev.serving.Predictor: expected attributes scorer.model" in result.stderr
    assert result.stderr.strip().endswith("without scorer")


def test_only_the_answer_to_health_is_changed(tmp_path, monkeypatch):
    import socket
    import threading

    _, _, server_module = fake_modules(tmp_path, monkeypatch)
    plain = types.SimpleNamespace(model_name="toy", method="host")
    # Without an engine: with one, replies differ in their connection.
    taken = types.SimpleNamespace(describe=lambda: {"name": "x"}, engine=None)
    fast = types.SimpleNamespace(**vars(plain), openjev_fast=taken)

    def raw(server, path):
        server.RequestHandlerClass.date_time_string = lambda self: "today"
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with socket.create_connection(server.server_address) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        thread.join()
        return answer

    undo = jev_server.apply(server_module)
    servers = [server_module.make_server(predictor, port=0) for predictor in (plain, fast)]
    for path in ("/v1/models", "/", "/healthy", "/v1/models?of=/health", "/health/"):
        original, ours = (raw(server, path) for server in servers)
        assert original == ours
        assert (b"200 OK" in ours) == (path == "/v1/models")
    original, ours = (raw(server, "/health") for server in servers)
    assert json.loads(ours.partition(b"\r\n\r\n")[2]) == {
        **json.loads(original.partition(b"\r\n\r\n")[2]),
        "backend": {"name": "x"},
    }
    undo()
    for server in servers:
        server.server_close()


def test_where_the_original_answers_there_is_no_access_log(tmp_path, caplog):
    from openjev_fast_plugin.access_log import AccessLog
    from openjev_fast_plugin.takeover import Takeover

    log, taken = AccessLog(tmp_path / "log"), Takeover("torch", "environment")
    jev_serving._keep(log, taken)
    assert taken.observers == [] and not log._thread.is_alive()
    assert "OPENJEV_FAST_ACCESS_LOG: the original answers, and keeps no access log" in caplog.text


def test_health_that_is_not_json_is_left_alone():
    for response in (
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\n[12]",
        b"HTTP/1.0 503 Busy\r\nContent-Length: 2\r\n\r\n{}",
        b"",
    ):
        assert jev_server._with_backend(response, {"name": "x"}) == response
    changed = jev_server._with_backend(
        b"HTTP/1.1 200 OK\r\nA: b\r\ncontent-length: 2\r\n\r\n{}", {"name": "x"}
    )
    head, _, body = changed.partition(b"\r\n\r\n")
    assert json.loads(body) == {"backend": {"name": "x"}}
    assert head == b"HTTP/1.1 200 OK\r\nA: b\r\nContent-Length: %d" % len(body)


# Transformers' masks


@pytest.fixture(scope="module")
def text_model():
    from text_models import smallest_text_model

    return smallest_text_model()


BATCHES = {
    "unpadded": [9, 9, 9],
    "padded": [9, 1, 5],
    "one": [7],
    "one-token": [1],
    "over-a-chunk": [65, 64],
}


def batch(lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(0, 64, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    return ids, mask.long()


def hidden(model, ids, mask):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_masks_same_maths(text_model, lengths, side):
    ids, mask = batch(lengths)
    if side == "left":
        # Open-Jev pads on the right, where a state cannot be spoilt; on the left the mask has to do its work.
        mask = mask.flip(1)
    expected = hidden(text_model, ids, mask)
    with transformers_masks.applied():
        found = hidden(text_model, ids, mask)
    # Another attention kernel sums in another order: float32 rounding, on hidden states of about 1.
    read = mask.bool()
    torch.testing.assert_close(found[read], expected[read], atol=1e-5, rtol=1e-5)
    assert torch.equal(hidden(text_model, ids, mask), expected)


@pytest.mark.parametrize("mask", [None, "given"])
def test_masks_with_a_cache_that_goes_on(text_model, mask):
    ids, ones = batch([9, 9])
    ones = None if mask is None else ones

    def in_two_steps():
        with torch.no_grad():
            first = text_model(
                input_ids=ids[:, :8], attention_mask=None if ones is None else ones[:, :8], use_cache=True
            )
            rest = text_model(
                input_ids=ids[:, 8:], attention_mask=ones, past_key_values=first.past_key_values
            )
        return rest.last_hidden_state

    expected = in_two_steps()
    with transformers_masks.applied():
        torch.testing.assert_close(in_two_steps(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [BATCHES["unpadded"], BATCHES["padded"]], ids=["unpadded", "padded"])
def test_masks_never_look_at_a_value(text_model, lengths):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Looks(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero):
                self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    ids, mask = batch(lengths)
    with Looks() as original:
        hidden(text_model, ids, mask)
    with transformers_masks.applied(), Looks() as patched:
        hidden(text_model, ids, mask)
    assert original.seen, "the shortcuts look at values: else there is nothing to patch"
    assert patched.seen == []


def test_masks_are_built_whenever_a_padding_mask_is_given():
    from transformers import masking_utils

    shape = {"batch_size": 2, "q_length": 4, "kv_length": 4}
    ones = torch.ones(2, 4, dtype=torch.bool)
    assert masking_utils.sdpa_mask(**shape, attention_mask=ones) is None
    with transformers_masks.applied():
        assert masking_utils.sdpa_mask(**shape, attention_mask=ones) is not None
        assert masking_utils.sdpa_mask(**shape) is None


def mask_targets():
    """What is replaced, as (module or class, name), whichever form this Transformers has."""
    from transformers import masking_utils
    from transformers.models.qwen3_5 import modeling_qwen3_5

    if hasattr(modeling_qwen3_5, "create_recurrent_attention_mask"):
        linear = modeling_qwen3_5, "create_recurrent_attention_mask"
    else:
        linear = modeling_qwen3_5.Qwen3_5TextModel, "_update_linear_attn_mask"
    return (masking_utils, "_ignore_causal_mask_sdpa"), linear


def masks():
    return [vars(holder)[name] for holder, name in mask_targets()]


def test_masks_undo():
    before = masks()
    undo = transformers_masks.apply()
    assert all(old is not new for old, new in zip(before, masks(), strict=True))
    undo()
    assert all(old is new for old, new in zip(before, masks(), strict=True))


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 1)], ids=["first-first", "last-first", "twice"])
def test_masks_that_overlap(order):
    before = masks()
    undos = [transformers_masks.apply(), transformers_masks.apply()]
    for turn, which in enumerate(order):
        assert masks() != before
        undos[which]()
        assert (masks() == before) == (turn == len(order) - 1)


def test_masks_from_many_threads():
    import threading

    before, seen = masks(), []
    start = threading.Barrier(8)

    def work():
        start.wait()
        for _ in range(200):
            with transformers_masks.applied():
                seen.append(masks() == before)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert masks() == before
    assert seen == [False] * 1600


@pytest.mark.parametrize("which", ["mask", "linear", "class"])
def test_masks_all_or_nothing(monkeypatch, which):
    from transformers.models.qwen3_5 import modeling_qwen3_5

    if which == "class":
        monkeypatch.delattr(modeling_qwen3_5, "Qwen3_5TextModel")
    else:
        monkeypatch.setattr(*mask_targets()[which == "linear"], lambda padding_mask, query_length: False)
    holders = [holder for holder, _ in mask_targets()] if which != "class" else [modeling_qwen3_5]
    before = [dict(vars(holder)) for holder in holders]
    with pytest.raises(patches.UnknownUpstream, match="transformers.*expected .*, found "):
        transformers_masks.apply()
    assert [dict(vars(holder)) for holder in holders] == before


def test_masks_made_without_asking_for_tracing_are_unknown(monkeypatch):
    from transformers.models.qwen3_5 import modeling_qwen3_5

    def create(config, inputs_embeds, attention_mask, past_key_values=None, **kwargs):
        return attention_mask

    monkeypatch.setattr(modeling_qwen3_5, "create_recurrent_attention_mask", create, raising=False)
    with pytest.raises(patches.UnknownUpstream, match="expected a call of is_tracing, found none"):
        transformers_masks.apply()
