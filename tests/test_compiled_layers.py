"""What the compiled loop over the layers is given: products, weights and names, against the forward op by op."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
import torch
from prompt_cases import prompts

from openjev_fast_plugin import build, compiled_layers
from openjev_fast_plugin import forward as forward_module
from openjev_fast_plugin.compiled_layers import compiles, layer_tensors, products
from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.layout import Bucket, Layout, Reuse, build_layout
from openjev_fast_plugin.ops import _cuda
from openjev_fast_plugin.ops._choices import OPS, PYTORCH, Choice, Product
from openjev_fast_plugin.random_models import head, text_config, text_model
from openjev_fast_plugin.weights import Weights, take_weights

CPU = torch.device("cpu")


def weights_of(layers: int) -> Weights:
    config = text_config("tiny", layers, vocabulary=512)
    return take_weights(text_model(config, CPU, 0).bfloat16(), head(config.hidden_size, CPU, 0))


@pytest.fixture
def layout() -> Layout:
    return build_layout(build_forest(prompts("choice_3x40", 512)), Bucket(8, 8, 8))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As if every op had a kernel here."""
    monkeypatch.setattr(compiled_layers, "portable_ops", lambda shapes, weight: [])


@pytest.mark.parametrize("layers", [1, 3, 4, 5, 8])
def test_products_are_those_of_the_forward_op_by_op(layers, layout, monkeypatch):
    weights, asked = weights_of(layers), dict[Product, None]()

    def watched(op):
        real = getattr(forward_module, op)

        def call(x, weight):
            assert x.is_contiguous()
            asked[Product(op, *x.shape[:1], *weight.shape)] = None
            return real(x, weight)

        return call

    for op in OPS:
        monkeypatch.setattr(forward_module, op, watched(op))
    with torch.inference_mode():
        forward_module.forward(weights, layout)
    assert layout.rows != layout.reads
    # In the order of the first time, in which an idle server tunes them.
    assert products(weights, layout.rows, layout.reads) == list(asked)


def test_weights_are_in_the_order_of_their_fields():
    weights = weights_of(4)
    found = iter(layer_tensors(weights))
    for layer in weights.layers:
        mixer = [getattr(layer.mixer, field.name) for field in fields(layer.mixer)]
        for expected in (layer.input_norm, *mixer, layer.post_norm, layer.gate_up, layer.down):
            assert next(found) is expected
    assert next(found, None) is None


def test_what_the_compiled_loop_takes(layout, on_a_gpu, monkeypatch):
    weights = weights_of(4)
    assert compiles(weights, layout)
    empty = torch.zeros(0, dtype=torch.int32)
    assert not compiles(weights, replace(layout, reuse=Reuse(*[empty] * len(Reuse._fields))))
    for bad in (
        weights.layers[1].down.t().contiguous().t(),
        torch.zeros(weights.layers[1].down.numel() + 1).bfloat16()[1:].view_as(weights.layers[1].down),
        weights.layers[1].down.float(),
        weights.layers[1].down[:, :-4].contiguous(),
    ):
        changed = replace(weights.layers[1], down=bad)
        assert not compiles(replace(weights, layers=[weights.layers[0], changed]), layout)
    monkeypatch.setattr(compiled_layers, "portable_ops", lambda shapes, weight: ["delta_rule"])
    assert not compiles(weights, layout)


def test_no_forward_on_another_device_is_compiled(layout):
    assert not compiles(weights_of(4), layout)


def given_to_the_loop(weights: Weights, layout: Layout, monkeypatch) -> dict:
    """What the op is called with; every product's choice is one of its own."""
    given = {}

    hidden = weights.shapes.hidden

    def layers(**arguments):
        given.update(arguments)
        return torch.ones(layout.reads, hidden), torch.ones(2, layout.reads, hidden)

    monkeypatch.setattr(_cuda, "load", lambda: {"layers": layers})
    monkeypatch.setattr(
        compiled_layers, "choice_of", lambda product, device: Choice("pytorch", band=product.features)
    )
    return given


def test_the_loop_is_called_by_the_names_of_its_schema(layout, on_a_gpu, monkeypatch):
    weights = weights_of(4)
    given = given_to_the_loop(weights, layout, monkeypatch)
    scored = []
    monkeypatch.setattr(
        forward_module,
        "head_score",
        lambda residual, update, rows, *_: scored.append((residual.shape, update.shape)) or rows.float(),
    )
    scores = forward_module.forward(weights, layout)
    # What it returns goes to the head as it is, partial sums too.
    size = (layout.reads, weights.shapes.hidden)
    assert scored == [(size, (2, *size))]
    assert torch.equal(scores, layout.candidate_read.float())
    text = (build.source_folder() / "layers.cpp").read_text()
    schema = "".join(re.findall(r'"([^"]*)"', text[text.index("library.def(") :]))
    arguments = schema.partition("(")[2].partition(") ->")[0]
    assert list(given) == [argument.split()[-1] for argument in arguments.split(", ")]
    assert given["linear_attention"] == [1, 1, 1, 0]
    assert given["residual"].shape == (layout.rows, weights.shapes.hidden)
    # Each table is the layout's or its plans'.
    for name in ("predecessor", "read_row"):
        assert given[name] is getattr(layout, name)
    for name in ("node", "node_chunk", "node_tiles", "node_slots"):
        assert given[name] is getattr(layout.delta, name)
    for name in ("query_row", "tile", "tile_range", "tile_queries"):
        assert given[name] is getattr(layout.attention, name)
        assert given[f"read_{name}"] is getattr(layout.read_attention, name)


def test_every_products_choice_is_given_behind_its_sizes(layout, on_a_gpu, monkeypatch):
    weights = weights_of(4)
    given = given_to_the_loop(weights, layout, monkeypatch)
    forward_module.forward(weights, layout)
    expected = []
    for product in products(weights, layout.rows, layout.reads):
        expected += [OPS.index(product.op), *product[1:]]
        expected += Choice("pytorch", band=product.features).encoded()
    assert given["choices"] == expected


def test_the_compiled_code_has_the_fields_and_the_ops_of_the_choices():
    folder = build.source_folder()
    struct = re.search(r"struct Choice \{(.*?)\n\};", (folder / "product.h").read_text(), re.DOTALL)[1]
    names = re.findall(r"^  \S+ (\w+);$", struct, re.MULTILINE)
    assert names == [field.name for field in fields(Choice)]
    assert len(names) == len(PYTORCH.encoded())
    enum = re.search(r"enum Op : int64_t \{(.*?)\}", (folder / "layers.cpp").read_text())[1]
    spelled = ["k" + "".join(map(str.capitalize, op.split("_"))) for op in OPS]
    assert [name.strip() for name in enum.split(",")] == spelled
    ways = re.search(r"enum Way : int64_t \{(.*?)\}", (folder / "product.h").read_text())[1]
    for number, name in enumerate(ways.split(",")):
        way = name.strip().removeprefix("k").lower()
        assert Choice(way).encoded()[0] == number
