"""The packed forward on the kernels: against the original in float32, in graphs, and on padded layouts."""

import time
from functools import partial

import pytest
import torch
from models import head, prompts, text_config, text_model, use_delta_rule
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from openjev_fast_plugin import forward as forward_module
from openjev_fast_plugin.engine import CUDA_BUCKET
from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.forward import forward
from openjev_fast_plugin.graphs import GraphedForward
from openjev_fast_plugin.layout import Layout, build_layout
from openjev_fast_plugin.ops import add_rms_norm_ref
from openjev_fast_plugin.weights import Weights, take_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
VOCABULARY = 2048
CASES = ("example", "noul_70", "noul_1500", "choice_8x200")


def fused(profile: str, layers: int) -> Weights:
    config = text_config(profile, layers, VOCABULARY)
    return take_weights(text_model(config, DEVICE, 0), head(config.hidden_size, DEVICE, 0))


@pytest.fixture(scope="module")
def weights() -> Weights:
    return fused("2b", 4)


def layout_of(case: str, seed: int = 0) -> Layout:
    return build_layout(build_forest(prompts(case, VOCABULARY, seed)), CUDA_BUCKET)


def rows_read(weights: Weights, layout: Layout, monkeypatch) -> torch.Tensor:
    """What the head multiplies, float64 [candidates, hidden]."""
    seen = []
    real = forward_module.head_score

    def spy(residual, update, rows, norm_weight, *rest):
        normed = add_rms_norm_ref(residual, update, norm_weight, rest[-1])[1]
        seen.append(normed[rows.long()].double())
        return real(residual, update, rows, norm_weight, *rest)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(forward_module, "head_score", spy)
        forward(weights, layout.to(DEVICE))
    return seen[0][layout.candidate_read.long()]


def rows_read_by_original(model, sequences) -> torch.Tensor:
    with torch.inference_mode():
        return torch.stack(
            [
                model(input_ids=torch.from_numpy(sequence).long()[None].to(DEVICE), use_cache=False)
                .last_hidden_state[0, -1]
                .double()
                for sequence in sequences
            ]
        )


@pytest.mark.parametrize("profile, layers", [("2b", 8), ("9b", 8), ("27b", 8)])
def test_distance_to_float32_is_no_larger_than_the_originals(profile, layers, monkeypatch):
    config = text_config(profile, layers, VOCABULARY)
    original, weights = text_model(config, DEVICE, 0), fused(profile, layers)
    # Lengths differ little between the sets: Triton compiles FLA's kernels anew for some.
    sets = [prompts("example", VOCABULARY, seed) for seed in range(6)] + [prompts("noul_300", VOCABULARY)]
    baselines = {"torch": 0.0}
    if upstream.chunk_gated_delta_rule is not None:
        baselines["fla"] = 0.0
    rounded = {}
    for mode in baselines:
        use_delta_rule(original, mode)
        rounded[mode] = [rows_read_by_original(original, sequences) for sequences in sets]
    # Float32 throughout: the PyTorch path, since FLA's kernels multiply float32 as tf32.
    use_delta_rule(original, "torch")
    golden_model = original.float()
    ours = norm = 0.0
    for index, sequences in enumerate(sets):
        golden = rows_read_by_original(golden_model, sequences)
        layout = build_layout(build_forest(sequences), CUDA_BUCKET)
        found = rows_read(weights, layout, monkeypatch)[: len(sequences)]
        ours += (found - golden).pow(2).sum().item()
        norm += golden.pow(2).sum().item()
        for mode in baselines:
            baselines[mode] += (rounded[mode][index] - golden).pow(2).sum().item()
    distances = {mode: (theirs / norm) ** 0.5 for mode, theirs in baselines.items()}
    ratios = {mode: (ours / theirs) ** 0.5 for mode, theirs in baselines.items()}
    print(f"{profile}, {layers} layers: relative L2 {(ours / norm) ** 0.5:.4f}, {distances}, ratios {ratios}")
    assert norm > 0 and min(baselines.values()) > 0
    assert max(ratios.values()) <= 1.05


@pytest.mark.parametrize("case", CASES)
def test_replay_equals_eager_with_changed_inputs(weights, case):
    graphs = GraphedForward(partial(forward, weights), DEVICE)
    layouts = [layout_of(case, seed) for seed in range(3)]
    assert len({layout.shape_key() for layout in layouts}) == 1
    with torch.inference_mode():
        eager = [forward(weights, layout.to(DEVICE)) for layout in layouts]
    graphs.capture(layouts[0])
    for _ in range(2):
        for layout, expected in zip(layouts, eager, strict=True):
            scores, replayed = graphs(layout)
            assert replayed
            assert torch.equal(scores, expected)
    assert not torch.equal(eager[0], eager[1])


def test_a_new_shape_is_answered_eagerly_and_captured_when_idle(weights):
    graphs = GraphedForward(partial(forward, weights), DEVICE, idle_seconds=0.2)
    layout = layout_of("example")
    with torch.inference_mode():
        assert graphs(layout)[1] is False
        assert graphs(layout)[1] is False
        graphs.wait_until_captured()
        assert graphs(layout)[1] is True
    assert graphs.counts == {"replays": 1, "eager": 2, "captures": 1, "evictions": 0}


def test_a_busy_device_captures_what_is_asked_for_often(weights):
    graphs = GraphedForward(partial(forward, weights), DEVICE, idle_seconds=1000.0, often=5)
    often, seldom = layout_of("noul_70"), layout_of("example")
    end = time.monotonic() + 20.0
    with torch.inference_mode():
        expected = forward(weights, often.to(DEVICE))
        assert not graphs(seldom)[1]
        for _ in range(5):
            assert not graphs(often)[1]
        while not graphs(often)[1]:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert torch.equal(graphs(often)[0], expected)
        assert not graphs(seldom)[1]
    assert graphs.counts["captures"] == 1


def test_dropped_graphs_are_gone_and_come_again(weights):
    graphs = GraphedForward(partial(forward, weights), DEVICE, idle_seconds=1000.0)
    layout = layout_of("noul_70")
    with torch.inference_mode():
        graphs.capture(layout)
        assert graphs.holds(layout) and graphs.held_bytes >= 0
        graphs.drop()
        assert not graphs.holds(layout) and graphs.held_bytes == 0 and not graphs(layout)[1]
        graphs.capture(layout)
        assert graphs(layout)[1]


def test_a_busy_device_captures_nothing_asked_for_seldom(weights):
    graphs = GraphedForward(partial(forward, weights), DEVICE, idle_seconds=0.5, often=10**9)
    layout = layout_of("noul_70")
    end = time.monotonic() + 1.0
    with torch.inference_mode():
        while time.monotonic() < end:
            assert graphs(layout)[1] is False
    assert graphs.counts["captures"] == 0
    graphs.wait_until_captured()


def test_least_recently_used_graphs_go_first_by_count(weights):
    graphs = GraphedForward(partial(forward, weights), DEVICE, most_graphs=2)
    first, second, third = (layout_of(case) for case in ("noul_70", "example", "choice_8x200"))
    with torch.inference_mode():
        graphs.capture(first)
        graphs.capture(second)
        assert graphs(first)[1]
        graphs.capture(third)
        assert graphs(first)[1] and graphs(third)[1] and not graphs(second)[1]
        graphs.wait_until_captured()
    assert graphs.counts["evictions"] >= 1


def test_graphs_go_by_memory(weights):
    graphs = GraphedForward(partial(forward, weights), DEVICE, most_bytes=1)
    with torch.inference_mode():
        for case in ("noul_70", "noul_1500", "choice_8x200"):
            graphs.capture(layout_of(case))
        assert graphs.held_bytes > 0
        assert graphs.counts["evictions"] == 2
        assert graphs(layout_of("choice_8x200"))[1]


def test_large_layouts_are_never_captured(weights):
    graphs = GraphedForward(partial(forward, weights), DEVICE, most_rows=64, idle_seconds=0.0)
    with torch.inference_mode():
        graphs(layout_of("noul_70"))
        graphs.wait_until_captured()
    assert graphs.counts["captures"] == 0


def test_float32_runs_the_portable_ops(monkeypatch):
    config = text_config("2b", 4, VOCABULARY)
    model = text_model(config, DEVICE, 0).float()
    use_delta_rule(model, "torch")
    sequences = prompts("example", VOCABULARY)
    golden = rows_read_by_original(model, sequences)
    weights = take_weights(model, head(config.hidden_size, DEVICE, 0))
    found = rows_read(weights, build_layout(build_forest(sequences)), monkeypatch)
    assert ((found - golden).norm() / golden.norm()).item() < 1e-4
