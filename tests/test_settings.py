"""What decides which backend answers, and what a wrong value says."""

import json

import pytest

from openjev_fast_plugin.settings import BackendError, Selection, Settings, origin, resolve


def checkpoint(tmp_path, **content):
    (tmp_path / "model.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"flag": "a", "argument": "b", "environ": {"OPENJEV_BACKEND": "c"}}, Selection("a", "flag")),
        ({"argument": "b", "environ": {"OPENJEV_BACKEND": "c"}}, Selection("b", "argument")),
        ({"environ": {"OPENJEV_BACKEND": "c"}}, Selection("c", "environment")),
        ({"environ": {}}, Selection("d", "file")),
        ({"environ": {"OPENJEV_BACKEND": " "}}, Selection("d", "file")),
        ({"flag": "torch", "environ": {"OPENJEV_BACKEND": "c"}}, Selection("torch", "flag")),
    ],
    ids=["flag", "argument", "environment", "file", "blank-environment", "flag-torch"],
)
def test_flag_then_environment_then_file(tmp_path, given, expected):
    assert resolve(checkpoint=checkpoint(tmp_path, backend="d"), **given) == expected


@pytest.mark.parametrize("content", [{}, {"backend": None}], ids=["absent", "null"])
def test_nothing_asked_for(tmp_path, content):
    assert resolve(checkpoint=checkpoint(tmp_path, **content), environ={}) is None
    assert resolve(environ={}) is None


@pytest.mark.parametrize("text", [None, "{", "[1]", "\xff"], ids=["missing", "broken", "list", "not-utf8"])
def test_an_unreadable_model_json_is_left_to_open_jev(tmp_path, text):
    if text is not None:
        (tmp_path / "model.json").write_bytes(text.encode("latin-1"))
    assert resolve(checkpoint=tmp_path, environ={}) is None


@pytest.mark.parametrize("value", [7, "", ["fast"], True, False, 0])
def test_a_backend_in_model_json_that_is_no_name(tmp_path, value):
    with pytest.raises(BackendError, match="must be the name of a backend") as caught:
        resolve(checkpoint=checkpoint(tmp_path, backend=value), environ={})
    assert repr(value) in str(caught.value) and str(tmp_path) in str(caught.value)


def test_max_rows():
    assert Settings.read({}) == Settings(max_rows=None)
    assert Settings.read({"OPENJEV_FAST_MAX_ROWS": ""}).max_rows is None
    assert Settings.read({"OPENJEV_FAST_MAX_ROWS": "4096"}).max_rows == 4096


def test_access_log():
    assert Settings.read({}).access_log is None
    assert Settings.read({"OPENJEV_FAST_ACCESS_LOG": " "}).access_log is None
    assert Settings.read({"OPENJEV_FAST_ACCESS_LOG": "/tmp/a log"}) == Settings(access_log="/tmp/a log")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0", 0), ("123", 123), ("2GiB", 2 << 30), (" 512 MiB ", 512 << 20), ("1KiB", 1024), ("1TiB", 1 << 40)],
)
def test_bytes_of_kept_prefixes(value, expected):
    assert Settings.read({"OPENJEV_FAST_PREFIX_BYTES": value}) == Settings(prefix_bytes=expected)
    assert Settings.read({}).prefix_bytes == Settings().prefix_bytes == 0
    assert Settings.read({"OPENJEV_FAST_PREFIX_ROWS": "32"}) == Settings(prefix_rows=32)


@pytest.mark.parametrize("value", ["2GB", "2G", "-1", "1.5GiB", "GiB", "many", "²", "1" * 16])
def test_bytes_that_are_no_number_of_bytes(value):
    with pytest.raises(BackendError, match="OPENJEV_FAST_PREFIX_BYTES must be a whole number") as caught:
        Settings.read({"OPENJEV_FAST_PREFIX_BYTES": value})
    assert repr(value) in str(caught.value)


def test_warmup():
    assert Settings.read({}).warmup is None
    assert Settings.read({"OPENJEV_FAST_WARMUP": ""}).warmup is None
    assert Settings.read({"OPENJEV_FAST_WARMUP": " 72,280 "}) == Settings(warmup="72,280")


@pytest.mark.parametrize("value", ["0", "-1", "1e3", "many", "1.5", "²", "9" * 19])
def test_max_rows_that_is_no_positive_integer(value):
    with pytest.raises(BackendError, match="OPENJEV_FAST_MAX_ROWS must be an integer from 1 to") as caught:
        Settings.read({"OPENJEV_FAST_MAX_ROWS": value})
    assert repr(value) in str(caught.value)


def test_tuning():
    assert Settings().tuning == Settings.read({}).tuning == Settings.read({"OPENJEV_FAST_TUNING": " "}).tuning
    # Answers are decisions: nothing changes how they are computed while a server runs, unless somebody asks for it.
    assert Settings().tuning == "tables"
    for value in ("off", "tables", "idle"):
        assert Settings.read({"OPENJEV_FAST_TUNING": value, "OPENJEV_FAST_MAX_ROWS": "9"}) == Settings(
            max_rows=9, tuning=value
        )


@pytest.mark.parametrize("value", ["on", "IDLE", "1"])
def test_tuning_that_is_none_of_its_values(value):
    with pytest.raises(
        BackendError, match="OPENJEV_FAST_TUNING must be off, tables or idle, found"
    ) as caught:
        Settings.read({"OPENJEV_FAST_TUNING": value})
    assert repr(value) in str(caught.value)


def test_the_queue_and_who_shares_a_forward():
    read = Settings.read(
        {
            "OPENJEV_FAST_SHARE_ROWS": "0",
            "OPENJEV_FAST_QUEUE": "7",
            "OPENJEV_FAST_QUEUE_ROWS": "9",
            "OPENJEV_FAST_WAIT_US": "300",
        }
    )
    assert read == Settings(max_rows=None, share_rows=0, queue=7, queue_rows=9, wait_us=300)
    assert Settings.read({}) == Settings() and Settings().wait_us == 0


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("SHARE_ROWS", "-1", "from 0 to"),
        ("QUEUE", "0", "from 1 to"),
        ("QUEUE_ROWS", "0", "from 1 to"),
        ("WAIT_US", "5001", "from 0 to 5000"),
        ("PREFIX_ROWS", "2", "from 3 to"),
    ],
)
def test_limits_of_the_numbers(name, value, limits):
    with pytest.raises(BackendError, match=f"OPENJEV_FAST_{name} must be an integer {limits}.*'{value}'"):
        Settings.read({f"OPENJEV_FAST_{name}": value})


def test_a_long_value_is_shortened(tmp_path):
    with pytest.raises(BackendError, match="must be an integer from 1 to") as caught:
        Settings.read({"OPENJEV_FAST_MAX_ROWS": "9" * 5000})
    assert "found '999" in str(caught.value) and len(str(caught.value)) < 120
    with pytest.raises(BackendError, match="must be the name of a backend") as caught:
        resolve(checkpoint=checkpoint(tmp_path, backend=["fast"] * 5000), environ={})
    assert "found ['fast', " in str(caught.value) and len(str(caught.value)) < 200 + len(str(tmp_path))


@pytest.mark.parametrize("decided_by", ["flag", "argument", "environment", "file"])
def test_every_origin_is_spelled_with_the_name(decided_by):
    assert "fast" in origin(Selection("fast", decided_by))
