"""`openjev-fast warmup` on a pretended GPU, and on the CPU, where there is nothing to tune."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from jev.model import DecisionModel

from openjev_fast_plugin import backend_flag, cli, takeover, warmup
from openjev_fast_plugin.ops._choices import PYTORCH, Choice, Heads, Product
from openjev_fast_plugin.tables import AttentionFacts, Entry, Facts, Sample, Store, TileEntry
from openjev_fast_plugin.tuner import Weight

FAST = Choice("cublaslt", algorithm=(1,) * 8)
WIDE, NARROW = Weight("linear", 64, 32), Weight("linear_update", 32, 64)


HEADS = Heads(8, 2, 256)
TILES = TileEntry(128, 660, (Sample("root", 64, 7.5, 9.0),))


class Attention:
    """Attention whose measurement is made up."""

    heads = HEADS

    def __init__(self, folder, tuning):
        self.store = Store(AttentionFacts("NVIDIA H200", "580.1", "def"), folder)
        self.entries = self.store.read()
        self.tuning, self.measured = tuning, 0

    @property
    def wanted(self):
        return HEADS not in self.entries

    def tune(self):
        assert torch.is_inference_mode_enabled() and not self.tuning.tuned
        yield
        error = self.tuning.fails(HEADS)
        if error is not None:
            raise error
        self.measured += 1
        self.entries[HEADS] = TILES
        self.store.add({HEADS: TILES})


class Tuning:
    """Products of two weights, one of them twice in a forward; tuning halves the time of the wide one."""

    def __init__(self, folder, fails=lambda product: None):
        self.store = Store(Facts("NVIDIA H200", "580.1", "130100", "abc"), folder)
        self.entries = self.store.read()
        self.counts = {WIDE: 1, NARROW: 2}
        self.attention = Attention(folder, self)
        self.fails = fails
        self.tuned = []

    def products(self, rows):
        return [Product(w.op, count, w.features, w.columns) for count in rows for w in (WIDE, NARROW)]

    def tune(self, product):
        assert torch.is_inference_mode_enabled()
        yield
        error = self.fails(product)
        if error is not None:
            raise error
        self.tuned.append(product)
        wide = product.op == "linear"
        entry = Entry(FAST if wide else PYTORCH, 50.0 if wide else 100.0, 100.0, 0.001, 0.001)
        self.entries[product] = entry
        self.store.add({product: entry})
        return entry


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A pretended GPU: `load` and the engine are made up, everything else is real. Returns what its parts did."""
    did = SimpleNamespace(loaded=[], tunings=[], fails=lambda product: None, tuning=True)

    def load(checkpoint, device):
        # Environment and checkpoint do not choose a backend for this load.
        assert backend_flag.outer() == backend_flag.Outer(None)
        did.loaded.append((checkpoint, device))
        return SimpleNamespace()

    def accelerate(model, backend, settings):
        assert backend == "fast" and settings.tuning == "tables"
        did.tunings.append(Tuning(tmp_path / "kept", lambda product: did.fails(product)))
        tuning = did.tunings[-1] if did.tuning else None
        engine = SimpleNamespace(tuning=tuning, describe=lambda: {"dtype": "float32"})
        model.openjev_fast = SimpleNamespace(engine=engine)
        return model

    monkeypatch.setattr(DecisionModel, "load", load)
    monkeypatch.setattr(takeover, "accelerate", accelerate)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    (tmp_path / "model.json").write_text("{}")
    did.arguments = ["warmup", "--checkpoint", str(tmp_path), "--device", "cuda:0", "--rows", "72,280"]
    return did


@pytest.mark.parametrize(
    "text, rows",
    [
        ("72", [72]),
        ("70", [72]),
        ("280,72,8", [8, 72, 280]),
        ("8-32", [8, 16, 24, 32]),
        ("1-9", [8, 16]),
        ("512-640:64", [512, 576, 640]),
        (" 8 , 70-75:1", [8, 72, 80]),
        ("8-512", list(range(8, 513, 8))),
    ],
)
def test_rows(text, rows):
    assert warmup.parse_rows(text) == rows


@pytest.mark.parametrize(
    "text", ["", "many", "0", "-8", "32-8", "8-", "8-32:0", "8:8", "1e3", "8,,9", "9" * 8, "2000000"]
)
def test_rows_that_are_none(text, capsys):
    with pytest.raises(ValueError, match="rows"):
        warmup.parse_rows(text)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["warmup", "--checkpoint", "x", f"--rows={text}"])
    assert stopped.value.code == 2 and "--rows" in capsys.readouterr().err


def test_on_a_cpu_there_is_nothing_to_tune(tiny_checkpoint, capsys):
    arguments = ["warmup", "--checkpoint", str(tiny_checkpoint), "--device", "cpu"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("nothing to tune: on cpu every matmul is PyTorch's own")
    assert cli.main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"device", "nothing"} and result["device"] == "cpu"


def test_what_is_no_checkpoint_is_said_before_anything_is_loaded(tmp_path, capsys):
    assert cli.main(["warmup", "--checkpoint", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert not printed.out and str(tmp_path) in printed.err and "model.json" in printed.err


def test_a_first_run_tunes_and_a_second_has_nothing_to_do(gpu, tmp_path, capsys):
    assert cli.main(gpu.arguments) == 0
    printed = capsys.readouterr()
    assert gpu.loaded == [(tmp_path, "cuda:0")]
    lines = printed.out.splitlines()
    assert lines[0].startswith("matmuls of a forward on NVIDIA H200, driver 580.1, cuBLAS 130100")
    # The wide one once, the narrow one twice: 0.3 ms by default, a sixth of it saved.
    assert [line.split() for line in lines[2:4]] == [
        ["72", "0.30", "0.25", "16.7%"],
        ["280", "0.30", "0.25", "16.7%"],
    ]
    attention, matmuls = sorted((tmp_path / "kept").iterdir())
    assert lines[-1].startswith("4 products tuned in ") and str(matmuls) in lines[-1]
    assert lines[-2].startswith(
        "attention: small tiles up to 128 rows, 660 where nothing is measured; kept in "
    )
    assert str(attention) in lines[-2] and "measuring tile sizes of attention" in printed.err
    assert "tuning" in printed.err and "4/4" in printed.err
    assert cli.main(gpu.arguments) == 0
    again = capsys.readouterr().out
    assert "known before; kept in" in again and gpu.tunings[1].attention.measured == 0
    assert gpu.tunings[1].tuned == [] and "0 products tuned in 0 s, 4 known before" in again
    assert again.splitlines()[2:4] == lines[2:4]
    assert cli.main([*gpu.arguments, "--again"]) == 0
    assert len(gpu.tunings[2].tuned) == 4 and gpu.tunings[2].attention.measured == 1


def test_json(gpu, capsys):
    assert cli.main([*gpu.arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {
        "device", "gpu", "driver", "cublas", "file", "seconds", "tuned", "known", "failed", "attention", "forwards",
        "products",
    }  # fmt: skip
    assert result["forwards"][1] == {"rows": 280, "default_ms": 0.3, "tuned_ms": 0.25}
    assert result["attention"] == {
        "query_heads": 8, "kv_heads": 2, "head_dim": 256, "few_queries": 128, "default": 660, "known": False,
        "samples": [{"form": "root", "queries": 64, "small_us": 7.5, "large_us": 9.0}],
        "file": str(gpu.tunings[0].attention.store.path),
    }  # fmt: skip
    first = result["products"][0]
    assert (first["op"], first["rows"], first["us"], first["default_us"]) == ("linear", 72, 50.0, 100.0)
    assert first["way"].startswith("cuBLASLt") and first["choice"]["algorithm"] == [1] * 8


def test_a_product_that_fails_leaves_the_others_and_is_exit_status_1(gpu, capsys):
    gpu.fails = lambda product: (
        RuntimeError("no memory\nmore") if product == Product("linear", 72, 64, 32) else None
    )
    assert cli.main(gpu.arguments) == 1
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[2].split() == ["72", "failed"] and lines[3].split()[0] == "280"
    assert "'reason': 'no memory'" in printed.out and "3 products tuned" in printed.out
    assert "1 ops could not be tuned" in printed.err
    gpu.fails = lambda product: None
    assert cli.main(gpu.arguments) == 0
    assert len(gpu.tunings[-1].tuned) == 1


def test_attention_that_fails_leaves_the_matmuls_and_is_exit_status_1(gpu, capsys):
    gpu.fails = lambda wanted: RuntimeError("no memory\nmore") if wanted == HEADS else None
    assert cli.main([*gpu.arguments, "--json"]) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["attention"] is None and result["tuned"] == 4
    assert result["failed"] == [{"op": "tree_attention", **HEADS._asdict(), "reason": "no memory"}]
    assert "1 ops could not be tuned" in printed.err


def test_heads_without_a_kernel_have_no_tile_sizes(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules[__name__], "Attention", lambda *_: None)
    assert cli.main([*gpu.arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attention"] is None
    assert cli.main(gpu.arguments) == 0
    assert "attention" not in capsys.readouterr().out


def test_a_table_that_cannot_be_kept_stops_it(gpu, tmp_path, capsys):
    (tmp_path / "kept").touch()
    assert cli.main(gpu.arguments) == 1
    assert gpu.tunings[0].attention.measured == 1 and not gpu.tunings[0].tuned
    assert "File exists" in capsys.readouterr().err
    # And so does one of matmuls, where attention is known.
    (tmp_path / "kept").unlink()
    Store(AttentionFacts("NVIDIA H200", "580.1", "def"), tmp_path / "kept").add({HEADS: TILES})
    gpu.fails = lambda product: OSError("disk full")
    assert cli.main(gpu.arguments) == 1
    assert gpu.tunings[1].attention.measured == 0 and "disk full" in capsys.readouterr().err


def test_interrupted_it_keeps_what_it_has(gpu, capsys):
    gpu.fails = lambda product: KeyboardInterrupt() if product != HEADS and product.rows == 280 else None
    assert cli.main(gpu.arguments) == 130
    gpu.fails = lambda product: None
    assert cli.main(gpu.arguments) == 0
    assert {product.rows for product in gpu.tunings[1].tuned} == {280}


def test_weights_in_float32_leave_nothing_to_tune(gpu, capsys):
    gpu.tuning = False
    assert cli.main(gpu.arguments) == 0
    assert capsys.readouterr().out == "nothing to tune: the weights are float32; tuning is for bfloat16\n"
