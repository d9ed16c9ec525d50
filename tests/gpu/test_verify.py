"""`openjev-fast verify` on a GPU: the kernels pass it, graphs are replayed, and planted faults are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from openjev_fast_plugin import checkpoint as checkpoint_module
from openjev_fast_plugin.build import BuildError
from openjev_fast_plugin.checkpoint import Profile, make_checkpoint
from openjev_fast_plugin.ops import _cuda
from openjev_fast_plugin.verification import run as run_module
from openjev_fast_plugin.verification.report import render
from openjev_fast_plugin.verification.run import LEVELS, run

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


def need_kernels() -> None:
    try:
        _cuda.load()
    except BuildError as error:
        pytest.skip(f"the kernels cannot be built: {error}")


@pytest.mark.parametrize("float32", [False, True], ids=["bfloat16", "float32"])
def test_fast_passes(checkpoint, float32):
    need_kernels()
    result = run(checkpoint, device="cuda:0", float32=float32)
    print(render(result))
    assert result["passed"] and [result["levels"][name]["passed"] for name in LEVELS] == [True] * 4
    assert result["backend"]["kernels"].startswith("pytorch" if float32 else "cuda sm_")
    assert float32 or result["levels"]["answers"]["replayed"] > 0


def test_graph_passes(checkpoint):
    result = run(checkpoint, device="cuda:0", backend="graph")
    print(render(result))
    assert result["passed"] and result["levels"]["ops"]["passed"] is None
    assert result["levels"]["answers"]["replayed"] > 0


@pytest.mark.parametrize("name", ["gated_rms_norm", "delta_rule", "tree_attention"])
def test_a_kernel_that_rounds_otherwise_is_named(checkpoint, name):
    need_kernels()
    kernel = _cuda.load()[name]

    def rounded(*arguments):
        return (kernel(*arguments).view(torch.int16) & ~1).view(torch.bfloat16)

    library = torch.library.Library("openjev_fast", "IMPL")
    library.impl(name, rounded, "CUDA", allow_override=True)
    try:
        result = run(checkpoint, device="cuda:0")
    finally:
        library._destroy()
    assert result["failed_level"] == "ops"
    # The compiled layers call the kernel itself, so they differ from the ops.
    found = {failure["place"].split(",")[0] for failure in result["levels"]["ops"]["failures"]}
    assert found == {name, "forward"}


def test_a_weight_row_is_named(checkpoint, monkeypatch):
    need_kernels()
    real = run_module.accelerate

    def accelerate(model, *arguments):
        found = real(model, *arguments)
        with torch.no_grad():
            found.openjev_fast.engine.weights.layers[2].gate_up[17].neg_()
        return found

    monkeypatch.setattr(run_module, "accelerate", accelerate)
    result = run(checkpoint, device="cuda:0")
    assert result["failed_level"] == "preparation"
    (failure,) = result["levels"]["preparation"]["failures"]
    assert failure["place"] == "weights, layers.2.mlp.gate_proj.weight" and failure["what"].endswith(": 17")
