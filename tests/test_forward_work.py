"""What the benchmarks count as a forward's work, against PyTorch's own count of what runs."""

import pytest
import torch
import torch.nn.functional as F
from forward_work import Work, packed_work, padded_work
from prompt_cases import prompts
from torch.utils.flop_counter import FlopCounterMode

from openjev_fast_plugin import forward as forward_module
from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.forward import forward
from openjev_fast_plugin.layout import Bucket, build_layout
from openjev_fast_plugin.measurement.originals import use_delta_rule
from openjev_fast_plugin.ops import silu_mul
from openjev_fast_plugin.random_models import head, text_config, text_model
from openjev_fast_plugin.weights import Shapes, take_weights

CPU = torch.device("cpu")
CASE = "choice_3x40"


def counted(run) -> int:
    """Operations of two-dimensional matrix products: projections and MLP, as every other product is batched."""
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_flop_counts()["Global"][torch.ops.aten.mm]


# Every fourth layer is full attention: the last layer is one of either kind.
@pytest.mark.parametrize("layers", [4, 3])
def test_matmuls_are_those_that_run(layers, monkeypatch):
    config = text_config("tiny", layers, 500)
    shapes, sequences = Shapes.of(config), prompts(CASE, 500)
    model = text_model(config, CPU, 0)
    use_delta_rule(model, "torch")
    ids = torch.stack([torch.from_numpy(sequence).long() for sequence in sequences])
    expected = counted(lambda: model(input_ids=ids, use_cache=False))
    assert padded_work(shapes, 3, 40).matmul == expected
    weights = take_weights(model, head(config.hidden_size, CPU, 0))
    layout = build_layout(build_forest(sequences), Bucket(rows=8, reads=8))
    # The counter knows PyTorch's products and does not look into ours.
    monkeypatch.setattr(forward_module, "linear", F.linear)
    monkeypatch.setattr(forward_module, "linear_update", F.linear)
    monkeypatch.setattr(forward_module, "linear_silu_mul", lambda x, weight: silu_mul(F.linear(x, weight)))
    assert packed_work(shapes, layout).matmul == counted(lambda: forward(weights, layout))


def test_attention_counts_the_keys_a_query_sees():
    shapes = Shapes.of(text_config("tiny", 8, 500))
    layout = build_layout(build_forest(prompts(CASE, 500)), Bucket(rows=8))
    # 19 shared rows, 3 tails of 21, 6 padding rows; two full-attention layers, the last for the read rows alone.
    every = sum(range(1, 20)) + 3 * sum(range(20, 41)) + sum(range(1, 7))
    pairs = every + 3 * 40
    per_pair = 4 * shapes.query_heads * shapes.head_dim
    assert packed_work(shapes, layout).attention == pairs * per_pair
    assert padded_work(shapes, 3, 40).attention == 2 * 3 * sum(range(1, 41)) * per_pair


def test_the_delta_rule_counts_three_products_with_the_state():
    shapes = Shapes.of(text_config("tiny", 4, 500))
    layout = build_layout(build_forest(prompts(CASE, 500)))
    per_row = 3 * shapes.value_heads * 3 * 2 * shapes.key_dim * shapes.value_dim
    assert packed_work(shapes, layout).delta == (19 + 3 * 21) * per_row
    assert padded_work(shapes, 3, 40).delta == 120 * per_row


def test_bytes_are_the_weights_once_and_activations_twice():
    config = text_config("tiny", 4, 500)
    model = text_model(config, CPU, 0)
    projections = [w for name, w in model.named_parameters() if w.dim() == 2 and "embed" not in name]
    weights = sum(w.numel() for w in projections)
    shapes = Shapes.of(config)
    one, two = (padded_work(shapes, 1, rows).bytes for rows in (1, 2))
    assert one - (two - one) == 2 * weights
    # Four matmuls a layer; the projections of one input are one matmul.
    hidden, mlp = shapes.hidden, shapes.intermediate
    linear = shapes.conv_channels + 2 * shapes.value_heads + 2 * shapes.value_heads * shapes.value_dim
    full = (3 * shapes.query_heads + 2 * shapes.kv_heads) * shapes.head_dim
    columns = 4 * (hidden + hidden + hidden + 2 * mlp + mlp + hidden) + 3 * linear + full
    assert two - one == 2 * 2 * columns


def test_rates_at_the_size_of_the_largest_model():
    shapes = Shapes.of(text_config("27b"))
    work = padded_work(shapes, 1, 1)
    # 48.7 GB of weights, two operations for each.
    assert work.bytes == pytest.approx(48.7e9, rel=2e-3) and work.matmul == pytest.approx(48.7e9, rel=2e-3)
    assert Work(10**12, 10**12, 10**12, 5 * 10**9).tflops(1000.0) == 3.0
    assert Work(0, 0, 0, 5 * 10**9).gb_s(1000.0) == 5.0
