"""The compiled loop over the layers against the forward op by op: the same bits, in every way of the products."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from small_models import CASES, DEVICE, fused, layout_of

from openjev_fast_plugin import forward as forward_module
from openjev_fast_plugin.compiled_layers import compiles, layer_tensors, products
from openjev_fast_plugin.forward import forward, forward_by_ops
from openjev_fast_plugin.graphs import GraphedForward
from openjev_fast_plugin.layout import Layout
from openjev_fast_plugin.ops import _choices, _cuda
from openjev_fast_plugin.ops._choices import PYTORCH, Choice, Choices, Product
from openjev_fast_plugin.ops.linear import FORMS, KERNEL_ROWS, kernel_tiles
from openjev_fast_plugin.weights import Weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The residual stream, the last update to it, and the scores.
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def no_choices_left():
    _choices.install(DEVICE.index, None)
    yield
    _choices.install(DEVICE.index, None)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return fused("2b", 4)


def on_device(case: str, seed: int = 0) -> Layout:
    return layout_of(case, seed).to(DEVICE)


@torch.inference_mode()
def found_by(run, weights: Weights, layout: Layout, monkeypatch) -> Found:
    """What a forward hands to the head, and its scores."""
    given, real = [], forward_module.head_score

    def head_score(residual, update, *rest):
        given.extend((residual, update))
        return real(residual, update, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(forward_module, "head_score", head_score)
        scores = run(weights, layout)
    residual, update = given
    return residual, update, scores


def same(one: Found, other: Found) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def check(weights: Weights, layout: Layout, monkeypatch) -> Found:
    """The compiled forward, which has the bits of the one op by op."""
    assert compiles(weights, layout)
    compiled = found_by(forward, weights, layout, monkeypatch)
    by_ops = found_by(forward_by_ops, weights, layout, monkeypatch)
    assert compiled[1].shape == by_ops[1].shape
    assert all(torch.isfinite(one).all() for one in by_ops)
    assert same(compiled, by_ops)
    return compiled


@pytest.mark.parametrize("profile, layers", [("2b", 4), ("2b", 3), ("2b", 1), ("9b", 5), ("27b", 4)])
def test_the_compiled_forward_has_the_bits_of_the_one_op_by_op(profile, layers, monkeypatch):
    weights = fused(profile, layers)
    for case in CASES:
        check(weights, on_device(case), monkeypatch)


# Ways that products may be computed in, and for which there are tables below.
KINDS = ("kernel", "cublaslt", "partials", "bands", "rest", "mixed")


def algorithms(product: Product, features: int, partials: int = 1, out_stride: int = 0) -> Iterator[Choice]:
    """cuBLASLt's for a product with so many features; rows first where there are such, from its end on."""
    propose = _cuda.load()["cublaslt_algorithms"]
    if features % 8 or product.columns % (8 * partials):
        return
    for form in reversed(range(FORMS)):
        sizes = (product.rows, features, product.columns)
        for *words, workspace in reversed(propose(0, *sizes, form, partials, 4, out_stride).tolist()):
            yield Choice(
                "cublaslt", form=form, partials=partials, workspace=workspace, algorithm=tuple(words)
            )


def computable(product: Product, choices: Iterator[Choice]) -> Choice | None:
    """The first choice that the device does not refuse, as the tuner would not choose it then."""
    x, weight = (
        torch.randn(size, product.columns, device=DEVICE).bfloat16()
        for size in (product.rows, product.features)
    )
    for choice in choices:
        try:
            _cuda.compute(product.op, choice, x, weight)
        except RuntimeError:
            continue
        return choice
    return None


def choice_of(kind: str, product: Product) -> Choice | None:
    """A choice of some kind for a product; None where it has none."""
    op, rows, features, columns = product
    band = features * 3 // 8 // 128 * 128
    if kind == "kernel":
        silu = op == "linear_silu_mul"
        tiles = kernel_tiles(rows, features, columns, silu)
        return Choice("kernel", tile=tiles[-1][0], parts=tiles[-1][1], fused=silu) if tiles else None
    if kind == "bands":
        return Choice("pytorch", band=band) if band else None
    if kind == "rest":
        found = algorithms(product, features % band, out_stride=features) if band and features % band else []
        rest = (
            Choice("pytorch", band=band, form=one.form, workspace=one.workspace, algorithm=one.algorithm)
            for one in found
        )
        return computable(product, rest)
    if kind == "partials":
        return computable(product, algorithms(product, features, 2)) if op == "linear_update" else None
    return computable(product, algorithms(product, features))


def table_of(kind: str, asked: list[Product]) -> Choices:
    """Choices of one kind for all products that have one, or of every kind in turn; PyTorch's for the others."""
    found: dict[Product, Choice] = {}
    for index, product in enumerate(asked):
        if kind == "mixed":
            kinds = KINDS[index % 5 : 5] + KINDS[: index % 5]
            tried = (choice_of(one, product) for one in kinds)
            found[product] = next((choice for choice in tried if choice is not None), PYTORCH)
        else:
            found[product] = choice_of(kind, product) or PYTORCH
    return Choices(found)


def holds(kind: str, choice: Choice) -> bool:
    """Whether a choice is of a kind."""
    return {
        "kernel": choice.way == "kernel",
        "cublaslt": choice.way == "cublaslt" and choice.partials == 1,
        "partials": choice.partials == 2,
        "bands": choice.band > 0 and not choice.algorithm,
        "rest": choice.band > 0 and len(choice.algorithm) == 8,
        "mixed": choice != PYTORCH,
    }[kind]


@pytest.mark.parametrize("case", ["noul_70", "choice_8x200"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_the_products_has_the_same_bits(weights, kind, case, monkeypatch):
    layout = on_device(case)
    if kind == "kernel" and (torch.cuda.get_device_capability() != (9, 0) or layout.rows > KERNEL_ROWS):
        pytest.skip("the kernel takes few rows on Hopper")
    asked = products(weights, layout.rows, layout.reads)
    choices = table_of(kind, asked)
    chosen = [choices.find(product) for product in asked]
    assert sum(choice is not None and holds(kind, choice) for choice in chosen) >= 2, chosen
    _choices.install(DEVICE.index, choices)
    residual, update, _ = check(weights, layout, monkeypatch)
    assert not choices.wanted
    last = choices.find(Product("linear_update", layout.reads, *weights.layers[-1].down.shape))
    assert update.dim() == (2 if last.partials == 1 else 3)
    # And other bits than PyTorch's own, where columns are summed in parts: the table was read.
    if kind in ("kernel", "partials"):
        _choices.install(DEVICE.index, Choices(dict.fromkeys(asked, PYTORCH)))
        assert not torch.equal(found_by(forward, weights, layout, monkeypatch)[0], residual)


@pytest.mark.parametrize("kind", ["partials", "rest", "mixed"])
def test_a_graph_of_the_compiled_forward_replays_the_bits_of_the_one_op_by_op(weights, kind):
    first = layout_of("choice_8x200")
    _choices.install(DEVICE.index, table_of(kind, products(weights, first.rows, first.reads)))
    graphs = GraphedForward(partial(forward, weights), DEVICE)
    graphs.capture(first)
    for seed in (1, 0, 2):
        layout = layout_of("choice_8x200", seed)
        assert layout.shape_key() == first.shape_key()
        scores, replayed = graphs(layout)
        with torch.inference_mode():
            assert replayed and torch.equal(scores, forward_by_ops(weights, layout.to(DEVICE)))


@pytest.mark.parametrize("layers", [3, 4])
def test_every_weight_is_read_in_its_place(layers, monkeypatch):
    """Each tensor changed on its own: what is found changes, and as op by op, so none stands for another."""
    weights, layout = fused("2b", layers), on_device("noul_70")
    before = check(weights, layout, monkeypatch)
    draw = torch.Generator(DEVICE).manual_seed(3)
    for index, tensor in enumerate(layer_tensors(weights)):
        kept = tensor.clone()
        tensor.add_(torch.randn(tensor.shape, generator=draw, device=DEVICE).to(tensor.dtype) * 0.5)
        after = check(weights, layout, monkeypatch)
        tensor.copy_(kept)
        assert not torch.equal(after[0], before[0]) or not torch.equal(after[1], before[1]), index
    assert same(check(weights, layout, monkeypatch), before)


def test_an_error_planted_in_the_compiled_forward_is_found(weights, monkeypatch):
    """One weight in the place of another, and read rows that are one off: the comparison fails."""
    layout = on_device("choice_8x200")
    check(weights, layout, monkeypatch)
    loaded = dict(_cuda.load())
    real = loaded["layers"]

    def swapped(weights, **given):
        # Both norms of the first layer have one size.
        tensors = list(weights)
        tensors[0], tensors[7] = tensors[7], tensors[0]
        return real(weights=tensors, **given)

    def shifted(read_row, **given):
        return real(read_row=torch.clamp(read_row - 1, min=0), **given)

    def scaled(eps, **given):
        return real(eps=2 * eps + 1e-2, **given)

    norm = weights.layers[0].input_norm
    assert norm.shape == weights.layers[0].post_norm.shape
    kept = norm.clone()
    norm.add_(0.25)
    by_ops = found_by(forward_by_ops, weights, layout, monkeypatch)
    try:
        for planted in (swapped, shifted, scaled):
            with monkeypatch.context() as patch:
                patch.setattr(_cuda, "load", lambda planted=planted: {**loaded, "layers": planted})
                assert not same(found_by(forward, weights, layout, monkeypatch), by_ops), planted.__name__
        assert same(found_by(forward, weights, layout, monkeypatch), by_ops)
    finally:
        norm.copy_(kept)


def test_the_same_products_are_wanted(weights, monkeypatch):
    layout = on_device("example")
    wanted = []
    for run in (forward, forward_by_ops):
        choices = Choices()
        _choices.install(DEVICE.index, choices)
        found_by(run, weights, layout, monkeypatch)
        wanted.append(list(choices.wanted))
    assert wanted[0] == wanted[1] and len(wanted[0]) > 6


def test_a_product_without_a_choice_is_refused_by_its_sizes(weights, monkeypatch):
    layout, real = on_device("noul_70"), _cuda.load()["layers"]

    def without_the_first(choices, **given):
        return real(choices=choices[len(PYTORCH.encoded()) + 4 :], **given)

    loaded = {**_cuda.load(), "layers": without_the_first}
    _choices.install(
        DEVICE.index, Choices(dict.fromkeys(products(weights, layout.rows, layout.reads), PYTORCH))
    )
    monkeypatch.setattr(_cuda, "load", lambda: loaded)
    features = weights.layers[0].mixer.project.shape[0]
    message = f"no choice is given for op 0 of {layout.rows} rows, {features} features"
    with pytest.raises(RuntimeError, match=message):
        found_by(forward, weights, layout, monkeypatch)


def test_weights_are_let_go_of(monkeypatch):
    layout = on_device("noul_70")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(DEVICE)
    weights = fused("2b", 4)
    check(weights, layout, monkeypatch)
    assert torch.cuda.memory_allocated(DEVICE) > before + (64 << 20)
    del weights
    gc.collect()
    # What cuBLAS keeps as its workspace, at most, which the first product of a process takes.
    assert torch.cuda.memory_allocated(DEVICE) <= before + (64 << 20)


@torch.inference_mode()
def test_the_host_is_done_sooner_than_op_by_op():
    weights, layout = fused("2b", 16), on_device("example")
    spans: dict[str, list[float]] = {"compiled": [], "by ops": []}
    for _ in range(12):
        for name, run in (("compiled", forward), ("by ops", forward_by_ops)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(weights, layout)
            spans[name].append(time.perf_counter() - start)
    torch.cuda.synchronize()
    fastest = {name: 1e3 * min(times) for name, times in spans.items()}
    print(f"\nmilliseconds of the host for 16 layers: {fastest}")
    assert fastest["compiled"] < 0.6 * fastest["by ops"]
