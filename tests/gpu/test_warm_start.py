"""`--warmup` on a GPU: the first request of its shape is replayed, by matmuls that are tuned and kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jev import serving

from openjev_fast_plugin import checkpoint as checkpoint_module
from openjev_fast_plugin.build import BuildError
from openjev_fast_plugin.checkpoint import Profile, make_checkpoint
from openjev_fast_plugin.demo import EXAMPLE
from openjev_fast_plugin.ops import _choices, _cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Heads that the kernels take, and little else.
NARROW = Profile(1024, 8, 2048, 8, 2, 256, 64, 4, 8, 128, vocab=4096)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(checkpoint_module.PROFILES, "narrow", NARROW)
        return make_checkpoint("narrow", tmp_path_factory.mktemp("narrow") / "checkpoint")


@pytest.fixture(autouse=True)
def own_tables(tmp_path, monkeypatch) -> Iterator[None]:
    """Choices of no other test or of the package, and none left for one."""
    try:
        _cuda.load()
    except BuildError as error:
        pytest.skip(f"the kernels cannot be built: {error}")
    monkeypatch.setattr("openjev_fast_plugin.tables.stored_in", lambda: tmp_path / "matmuls")
    # The package's own knows these heads on some cards.
    shipped = tmp_path / "shipped.json"
    shipped.write_text('{"format": 1, "tables": []}', encoding="utf-8")
    monkeypatch.setattr("openjev_fast_plugin.tables.SHIPPED", shipped)
    before = _choices.installed(0)
    _choices.install(0, None)
    yield
    _choices.install(0, before)


def load(checkpoint: Path, monkeypatch, warmup: str, tuning: str = "tables"):
    monkeypatch.setenv("OPENJEV_FAST_WARMUP", warmup)
    monkeypatch.setenv("OPENJEV_FAST_TUNING", tuning)
    return serving.load_predictor(checkpoint=str(checkpoint), device="cuda:0", backend="fast")


@pytest.mark.parametrize("tuning", ["tables", "idle", "off"])
def test_the_first_request_is_replayed(checkpoint, monkeypatch, capsys, tuning):
    predictor = load(checkpoint, monkeypatch, str(EXAMPLE), tuning)
    said = capsys.readouterr().err
    assert "1 of 1 shapes captured as CUDA graphs" in said and ("matmuls tuned" in said) == (tuning != "off")
    engine = predictor.openjev_fast.engine
    before = dict(engine._packed.graphs.counts)
    assert (before["captures"], before["eager"], before["replays"]) == (1, 0, 0)
    found = predictor.predict(json.loads(EXAMPLE.read_text(encoding="utf-8")))
    backend = found["metadata"]["backend"]
    assert backend["graph_replays"] == backend["forwards"] == 1
    if tuning != "off":
        # Of this forward nothing is left to tune.
        assert backend["tuned_matmuls"] > 0 and not engine.tuning.choices.wanted
        assert backend["tuned_attention"] is True and "tile sizes of attention measured" in said


def test_a_second_start_measures_nothing(checkpoint, monkeypatch, capsys):
    first = load(checkpoint, monkeypatch, "72").openjev_fast.engine.tuning.entries
    assert len(first) > 0 and " 0 matmuls tuned" not in capsys.readouterr().err
    _choices.install(0, None)
    second = load(checkpoint, monkeypatch, "72").openjev_fast.engine.tuning.entries
    said = capsys.readouterr().err
    assert second == first and " 0 matmuls tuned" in said and "tile sizes" not in said


def test_a_size_is_captured_for_every_length_it_stands_for(checkpoint, monkeypatch):
    import numpy as np

    packed = load(checkpoint, monkeypatch, "72,280").openjev_fast.engine._packed
    for size in (72, 280):
        for length in range(size - 7, size + 1):
            assert packed.graphs.holds(packed.prepare([np.arange(length, dtype=np.int32)])), length
