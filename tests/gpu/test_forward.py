"""The packed forward on the kernels: against the original in float32, in graphs, and on padded layouts."""

import time
from functools import partial

import pytest
import torch
from prompt_cases import prompts
from small_models import CASES, DEVICE, FEW_QUERIES, VOCABULARY, fused, layout_of
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from openjev_fast_plugin import forward as forward_module
from openjev_fast_plugin.engine import CUDA_BUCKET
from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.forward import forward, forward_by_ops
from openjev_fast_plugin.graphs import GraphedForward
from openjev_fast_plugin.layout import Layout, build_layout
from openjev_fast_plugin.measurement.originals import use_delta_rule
from openjev_fast_plugin.ops import add_rms_norm_ref
from openjev_fast_plugin.packed_layout import pack_layout
from openjev_fast_plugin.random_models import head, text_config, text_model
from openjev_fast_plugin.weights import Weights, take_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return fused("2b", 4)


@pytest.mark.parametrize("case", CASES)
def test_the_compiled_layout_computes_the_same_bits(weights, case):
    sequences = prompts(case, VOCABULARY)
    graphs = GraphedForward(partial(forward, weights), DEVICE, idle_seconds=0.0)
    compiled = pack_layout(sequences, CUDA_BUCKET, FEW_QUERIES, pinned=True)
    assert compiled.pack().is_pinned()
    expected = graphs.eager(layout_of(case))
    assert torch.equal(graphs.eager(compiled), expected)
    # Captured from the one, replayed with the other, of other tokens.
    graphs.capture(compiled)
    other = pack_layout(prompts(case, VOCABULARY, 1), CUDA_BUCKET, FEW_QUERIES, pinned=True)
    for layout in (layout_of(case, 1), other):
        scores, replayed = graphs(layout)
        assert replayed and torch.equal(scores, graphs.eager(other))
    assert not torch.equal(scores, expected)


def states_of(weights: Weights, layout: Layout, monkeypatch) -> list[torch.Tensor]:
    """Float64 residual stream after every layer but the last, [rows, hidden], then what the head multiplies,
    [candidates, hidden]."""
    residuals, read = [], []
    real_norm, real_score = forward_module.add_rms_norm, forward_module.head_score

    def norm(*arguments):
        found = real_norm(*arguments)
        residuals.append(found[0])
        return found

    def score(residual, update, rows, norm_weight, *rest):
        normed = add_rms_norm_ref(residual, update, norm_weight, rest[-1])[1]
        read.append(normed[rows.long()])
        return real_score(residual, update, rows, norm_weight, *rest)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(forward_module, "add_rms_norm", norm)
        patch.setattr(forward_module, "head_score", score)
        forward_by_ops(weights, layout.to(DEVICE))
    # A layer adds its input's update first, then its mixer's.
    states = [*residuals[2::2], read[0][layout.candidate_read.long()]]
    return [state.double() for state in states]


def path_rows(layout: Layout, candidate: int) -> torch.Tensor:
    """Packed rows of a candidate's tokens, first to last."""
    before = layout.predecessor[:, 0].tolist()
    row, path = int(layout.read_row[layout.candidate_read[candidate]]), []
    while row >= 0:
        path.append(row)
        row = before[row]
    return torch.tensor(path[::-1], device=DEVICE)


def states_of_original(model, sequences) -> list[list[torch.Tensor]]:
    """For each sequence what `states_of` returns, its rows the sequence's tokens."""
    states: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, given, output: states.append(output[0].double()))
        for layer in model.layers[:-1]
    ]
    found = []
    with torch.inference_mode():
        for sequence in sequences:
            states.clear()
            ids = torch.from_numpy(sequence).long()[None].to(DEVICE)
            last = model(input_ids=ids, use_cache=False).last_hidden_state[0, -1].double()
            found.append([*states, last])
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("profile, layers", [("2b", 8), ("9b", 8), ("27b", 8)])
def test_distance_to_float32_is_no_larger_than_the_originals(profile, layers, monkeypatch):
    """After every layer, over all tokens of all prompts, and in what the head reads."""
    config = text_config(profile, layers, VOCABULARY)
    original, weights = text_model(config, DEVICE, 0), fused(profile, layers)
    # Lengths differ little between the sets: Triton compiles FLA's kernels anew for some.
    sets = [prompts("example", VOCABULARY, seed) for seed in range(4)] + [prompts("noul_300", VOCABULARY)]
    # Triton takes most of a minute to compile FLA's kernels for one more number of heads.
    modes = ["torch", "fla"] if profile == "27b" and upstream.chunk_gated_delta_rule else ["torch"]
    rounded = {}
    for mode in modes:
        use_delta_rule(original, mode)
        rounded[mode] = [states_of_original(original, sequences) for sequences in sets]
    # Float32 throughout: the PyTorch path, since FLA's kernels multiply float32 as tf32.
    use_delta_rule(original, "torch")
    golden_model = original.float()
    # Squares by layer.
    norm, ours = torch.zeros(2, layers)
    theirs = {mode: torch.zeros(layers) for mode in modes}
    for index, sequences in enumerate(sets):
        layout = build_layout(build_forest(sequences), CUDA_BUCKET, False, FEW_QUERIES)
        found = states_of(weights, layout, monkeypatch)
        for candidate, golden in enumerate(states_of_original(golden_model, sequences)):
            path = path_rows(layout, candidate)
            mine = [*(state[path] for state in found[:-1]), found[-1][candidate]]
            for layer in range(layers):
                norm[layer] += golden[layer].pow(2).sum().item()
                ours[layer] += (mine[layer] - golden[layer]).pow(2).sum().item()
                for mode in modes:
                    state = rounded[mode][index][candidate][layer]
                    theirs[mode][layer] += (state - golden[layer]).pow(2).sum().item()
    assert min(norm.min(), *(squares.min() for squares in theirs.values())) > 0
    ratios = {mode: (ours / squares).sqrt() for mode, squares in theirs.items()}
    print(f"{profile}, {layers} layers: relative L2 by layer {(ours / norm).sqrt().tolist()}")
    for mode, ratio in ratios.items():
        print(f"    over {mode}: {ratio.tolist()}")
    assert max(ratio.max() for ratio in ratios.values()) <= 1.05


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
    end = time.monotonic() + 120.0
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


def test_graphs_of_one_pool_share_their_memory_and_keep_their_answers(weights):
    graphs = GraphedForward(partial(forward, weights), DEVICE, idle_seconds=1000.0)
    layouts = [layout_of(case, seed) for seed in (0, 1) for case in ("choice_8x200", "noul_70", "example")]
    with torch.inference_mode():
        expected = [forward(weights, layout.to(DEVICE)) for layout in layouts]
        graphs.capture(layouts[0])
        alone = graphs.held_bytes
        graphs.drop()
        # The largest first, in whatever order they are given.
        assert graphs.capture_ahead(sorted(layouts[:3], key=lambda each: each.rows), list) == (3, 3)
        assert alone > 0 and graphs.held_bytes < 1.5 * alone + (64 << 20)
        # What one leaves in the pool another overwrites; eager forwards between have memory of their own.
        for _ in range(3):
            for layout, scores in zip(layouts, expected, strict=True):
                found, replayed = graphs(layout)
                assert replayed and torch.equal(found, scores)
                assert torch.equal(graphs.eager(layout), scores)
        graphs.drop()
        torch.cuda.empty_cache()
        assert graphs.held_bytes == 0


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
    golden = torch.stack([states[-1] for states in states_of_original(model, sequences)])
    weights = take_weights(model, head(config.hidden_size, DEVICE, 0))
    found = states_of(weights, build_layout(build_forest(sequences)), monkeypatch)[-1]
    assert ((found - golden).norm() / golden.norm()).item() < 1e-4
