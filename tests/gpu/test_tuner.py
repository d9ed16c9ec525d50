"""The binding to cuBLASLt and the tuner on a device: every algorithm against float64, choices in force, idle tuning."""

from __future__ import annotations

import json
import time
from functools import partial

import gemm_bench
import numpy as np
import op_inputs
import pytest
import torch
import torch.nn.functional as F

# The parent folder is on the path through its conftest.py.
from comparison import bfloat16_ulp, relative_l2
from forests import TREES
from pieces import finished
from prompt_cases import prompts
from small_models import DEVICE, VOCABULARY, fused

from openjev_fast_plugin import tables
from openjev_fast_plugin.engine import CUDA_BUCKET
from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.forward import forward
from openjev_fast_plugin.graphs import GraphedForward
from openjev_fast_plugin.layout import Layout, build_layout
from openjev_fast_plugin.ops import (
    AttentionPlan,
    _choices,
    _cuda,
    add_rms_norm,
    linear,
    linear_silu_mul,
    linear_update,
    plan_attention,
    silu_mul,
    tree_attention,
)
from openjev_fast_plugin.ops._choices import PYTORCH, Choice, Choices, Heads, Product
from openjev_fast_plugin.ops.linear import FORMS, KERNEL_ROWS, PARTIALS
from openjev_fast_plugin.ops.tree_attention import (
    LARGE_TILE,
    SMALL_TILE,
    default_few_queries,
    few_queries_for,
    multiprocessors_of,
)
from openjev_fast_plugin.replay_timer import GraphTimer
from openjev_fast_plugin.tables import Store
from openjev_fast_plugin.tuner import (
    DeviceWays,
    IdleTuning,
    Tuner,
    Tuning,
    Weight,
    attention_facts_of,
    driver_version,
    facts_of,
)
from openjev_fast_plugin.weights import Weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Attention's in the model below.
HEADS = Heads(8, 2, 256)
# Few rows and many, one and two tiles' worth of features, a width that is a multiple of 8 alone.
SHAPES = [(8, 1024, 512), (72, 5120, 6144), (280, 2048, 2048), (280, 1000, 1504), (1504, 1024, 1024)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


@pytest.fixture(autouse=True)
def no_choices_left():
    _choices.install(DEVICE.index, None)
    yield
    _choices.install(DEVICE.index, None)


@pytest.fixture(scope="module")
def ways() -> DeviceWays:
    return DeviceWays(DEVICE)


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, device=DEVICE)).bfloat16()


def algorithms(rows: int, features: int, columns: int, form: int, partials: int = 1) -> list[Choice]:
    found = _cuda.load()["cublaslt_algorithms"](0, rows, features, columns, form, partials, 64)
    assert found.dtype == torch.int64 and found.device.type == "cpu" and found.shape[1] == 9
    return [
        Choice("cublaslt", form=form, partials=partials, workspace=workspace, algorithm=tuple(words))
        for *words, workspace in found.tolist()
    ]


def into_nan(choice: Choice, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product computed into memory that held NaN."""
    _cuda.compute("linear", choice, x, weight).fill_(torch.nan)
    return _cuda.compute("linear", choice, x, weight)


# The binding


def test_the_version_is_the_librarys():
    version = _cuda.load()["cublaslt_version"]()
    assert version // 10_000 == int(torch.version.cuda.split(".")[0])


@pytest.mark.parametrize("rows, features, columns", SHAPES)
@pytest.mark.parametrize("partials", [1, *PARTIALS])
def test_every_algorithm_errs_no_more_than_pytorch_or_is_refused(rows, features, columns, partials):
    weight, wide = normal(features, columns, scale=columns**-0.5), normal(rows, columns + 64)
    # Rows further apart than they are long.
    x = wide[:, :columns]
    exact = x.double() @ weight.double().t()
    bar = relative_l2(F.linear(x, weight), exact)
    agreed, refused, differ = [], [], []
    for form in range(FORMS):
        for choice in algorithms(rows, features, columns, form, partials):
            try:
                found = into_nan(choice, x, weight)
            except RuntimeError as error:
                refused.append(str(error).splitlines()[0])
                continue
            assert found.shape == ((rows, features) if partials == 1 else (partials, rows, features))
            assert found.dtype == (torch.bfloat16 if partials == 1 else torch.float32)
            again = _cuda.compute("linear", choice, x, weight)
            if not torch.equal(found, again):
                differ.append(str(choice))
            total = found if partials == 1 else found.sum(0)
            error = relative_l2(total, exact)
            # Partial sums are not rounded.
            if error <= (1.05 * bar if partials == 1 else 1e-5):
                agreed.append(choice)
            else:
                refused.append(f"{choice} errs {error:.3g}, F.linear {bar:.3g}")
    print(
        f"\n{rows} x {features} x {columns}, {partials}: {len(agreed)} agree, {len(refused)} do not: {refused[:3]}"
    )
    # Sums of parts are added in a fixed order: the same bits every time.
    assert not differ
    assert {choice.form for choice in agreed} >= {0} and len(agreed) >= len(refused)


@pytest.mark.parametrize("features, band", [(2048, 768), (1000, 384), (34816, 16896)])
def test_bands_of_a_weight_are_one_product(features, band):
    x, weight = normal(280, 512), normal(features, 512, scale=512**-0.5)
    exact = x.double() @ weight.double().t()
    found = into_nan(Choice("pytorch", band=band), x, weight)
    assert found.is_contiguous() and found.shape == (280, features)
    assert relative_l2(found, exact) <= 1.05 * relative_l2(F.linear(x, weight), exact)
    activated = _cuda.compute("linear_silu_mul", Choice("pytorch", band=band), x, weight)
    assert torch.equal(activated, silu_mul(found))
    # Each call is PyTorch's own.
    expected = torch.empty_like(found)
    for part, columns in zip(weight.split(band), expected.split(band, dim=1), strict=True):
        torch.mm(x, part.t(), out=columns)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("form", range(FORMS))
@pytest.mark.parametrize("features, band", [(2048, 768), (1000, 384), (34816, 16896)])
def test_an_algorithm_computes_what_bands_leave(features, band, form):
    x, weight = normal(280, 576)[:, :512], normal(features, 512, scale=512**-0.5)
    exact, rest = x.double() @ weight.double().t(), features % band
    bar = relative_l2(F.linear(x, weight), exact)
    whole = _cuda.compute("linear", Choice("pytorch", band=band), x, weight)
    proposed = _cuda.load()["cublaslt_algorithms"](0, 280, rest, 512, form, 1, 2, features)
    accepts = _cuda.load()["cublaslt_accepts"]
    agreed = 0
    for *words, workspace in proposed.tolist():
        assert accepts(0, 280, rest, 512, form, 1, words, workspace, features)
        choice = Choice("pytorch", band=band, form=form, workspace=workspace, algorithm=tuple(words))
        try:
            found = into_nan(choice, x, weight)
        except RuntimeError as error:
            print(f"{choice} is refused: {error}")
            continue
        assert found.is_contiguous() and torch.isfinite(found).all()
        # The bands are as they were, and the rest is that algorithm's.
        assert torch.equal(found[:, :-rest], whole[:, :-rest])
        agreed += relative_l2(found[:, -rest:], exact[:, -rest:]) <= 1.05 * bar
        assert torch.equal(found, _cuda.compute("linear", choice, x, weight)), choice
        assert torch.equal(_cuda.compute("linear_silu_mul", choice, x, weight), silu_mul(found))
    print(f"{agreed} of {len(proposed)} agree")
    # PyTorch's own order of the operands always has one.
    assert agreed or form != 0


@pytest.mark.parametrize("rows", [72, 280])
def test_every_way_is_what_it_names(rows):
    x, weight = normal(rows, 2048), normal(4096, 2048, scale=2048**-0.5)
    loaded = _cuda.load()
    plain = _cuda.compute("linear", PYTORCH, x, weight)
    assert torch.equal(plain, F.linear(x, weight))
    assert torch.equal(_cuda.compute("linear_silu_mul", PYTORCH, x, weight), silu_mul(plain))
    for choice in (algorithms(rows, 4096, 2048, 0)[0], algorithms(rows, 4096, 2048, 0, 2)[0]):
        run = loaded["cublaslt_matmul"]
        expected = run(x, weight, choice.form, choice.partials, choice.algorithm, choice.workspace)
        assert torch.equal(_cuda.compute("linear_update", choice, x, weight), expected)
    if rows <= KERNEL_ROWS and torch.cuda.get_device_capability() == (9, 0):
        run = loaded["linear_sm90"]
        product = run(x, weight, False, 64, 2)
        chosen = Choice("kernel", tile=64, parts=2)
        assert torch.equal(_cuda.compute("linear", chosen, x, weight), product)
        # A kernel that activates is not activated again; a product is.
        assert torch.equal(_cuda.compute("linear_silu_mul", chosen, x, weight), silu_mul(product))
        fused = Choice("kernel", tile=48, fused=True)
        assert torch.equal(_cuda.compute("linear_silu_mul", fused, x, weight), run(x, weight, True, 48, 1))


@pytest.mark.parametrize(
    "numbers, message",
    [
        ([0, 0, 0, 1, 0, 0, 1, 0], "at least 9 numbers"),
        ([2, 0, 0, 1, 0, 0, 1, 0, 8, 1, 2], "before the 8 numbers of its algorithm"),
        ([0, 0, 0, 1, 0, 0, 1, 0, 0, 5], "more numbers follow"),
        ([3, 0, 0, 1, 0, 0, 1, 0, 0], "there is no way 3"),
        ([0, 1024, 0, 1, 0, 0, 1, 0, 8, *range(8)], "bands of 1024 leave nothing of 2048 rows"),
        ([0, 768, 0, 1, 0, 0, 1, 0, 7, *range(7)], "an algorithm is 8 integers"),
    ],
)
def test_numbers_that_are_no_choice_are_refused(numbers, message):
    with pytest.raises(RuntimeError, match=message):
        _cuda.load()["product"](normal(280, 512), normal(2048, 512), False, numbers)


def test_partial_sums_are_of_equal_parts():
    x, weight = normal(72, 1024), normal(512, 1024)
    for partials in PARTIALS:
        for form in range(FORMS):
            for choice in algorithms(72, 512, 1024, form, partials)[:3]:
                found = _cuda.compute("linear_update", choice, x, weight)
                expected = torch.ops.openjev_fast.linear_update(x.cpu(), weight.cpu(), partials)
                torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", range(FORMS))
def test_a_captured_product_is_the_eager_one(form):
    x, weight = normal(280, 2048), normal(1024, 2048)
    for choice in algorithms(280, 1024, 2048, form)[:8]:
        call = partial(_cuda.compute, "linear", choice, x, weight)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = call()
        for _ in range(3):
            x.normal_()
            replayed.fill_(torch.nan)
            graph.replay()
            assert torch.equal(replayed, call()), choice


def test_what_is_proposed_is_accepted_and_nothing_else():
    accepts = _cuda.load()["cublaslt_accepts"]
    for form in range(FORMS):
        for partials in (1, 2):
            for choice in algorithms(280, 1024, 2048, form, partials):
                size = (0, 280, 1024, 2048, form, partials)
                assert accepts(*size, choice.algorithm, choice.workspace)
    assert not accepts(0, 280, 1024, 2048, 0, 1, (-1,) * 8, 1 << 25)
    with pytest.raises(RuntimeError, match="multiples of 8 apart"):
        accepts(0, 280, 1024, 2048, 0, 1, (0,) * 8, 0, 1000)
    with pytest.raises(RuntimeError, match="one behind the other"):
        accepts(0, 280, 1024, 2048, 0, 2, (0,) * 8, 0, 2048)


def test_arguments_that_do_not_fit_raise_and_harm_nothing():
    x, weight = normal(280, 2048), normal(1024, 2048)
    run = _cuda.load()["cublaslt_matmul"]
    with pytest.raises(RuntimeError, match="an algorithm is 8 integers, found 7"):
        run(x, weight, 0, 1, (0,) * 7, 0)
    with pytest.raises(RuntimeError, match="there is no form 2"):
        run(x, weight, 2, 1, (0,) * 8, 0)
    with pytest.raises(RuntimeError, match="workspace"):
        run(x, weight, 0, 1, (0,) * 8, 1 << 40)
    with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
        run(normal(8 * 2049)[1 : 1 + 8 * 2048].view(8, 2048), weight, 0, 1, (0,) * 8, 0)
    assert torch.isfinite(F.linear(x, weight).float()).all()


# The timer


def test_a_round_times_what_it_replays():
    timer = GraphTimer(DEVICE)
    x, weights = normal(1024, 4096), [normal(8192, 4096) for _ in range(4)]
    once = timer.record([partial(F.linear, x, weight) for weight in weights])
    twice = timer.record([partial(F.linear, x, weight) for weight in weights * 2])
    assert (once.calls, twice.calls) == (4, 8)
    for _ in range(5):
        timer.round([once, twice])
    first, second, third = timer.round([once, twice, once])
    # 69 GFLOP: no card does more than 2 PFLOP/s, and none of ours less than 50 TFLOP/s.
    assert 30 < first < 1500
    assert first == pytest.approx(second, rel=0.15) and first == pytest.approx(third, rel=0.15)


def test_a_call_that_fails_leaves_the_timer_usable():
    timer = GraphTimer(DEVICE)
    calls = [0]

    def fails_under_capture():
        calls[0] += 1
        if calls[0] > 1:
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        timer.record([fails_under_capture])
    x = normal(64, 64)
    assert timer.round([timer.record([lambda: x @ x])])[0] > 0
    assert not torch.cuda.is_current_stream_capturing()


# The tuner


@pytest.mark.parametrize("op", _choices.OPS)
@pytest.mark.parametrize("rows", [72, 280])
@torch.inference_mode()
def test_what_is_chosen_is_no_slower_than_the_default_and_agrees(op, rows, ways):
    weights = [normal(4096, 2048, scale=2048**-0.5) for _ in range(12)]
    tuner = Tuner({Weight(op, 4096, 2048): weights}, ways, GraphTimer(DEVICE))
    product = Product(op, rows, 4096, 2048)
    entry, _ = finished(tuner.tune(product))
    print(f"\n{product}: {entry}; refused {len(tuner.refused)}: {tuner.refused[:2]}")
    assert 0 < entry.us <= entry.default_us < 1000
    assert entry.rel_l2 <= 1.05 * entry.pytorch_rel_l2 < 0.01
    assert ways.takes(product, entry.choice)
    # Measured once more, beside the default.
    again = tuner.measure(product, [ways.default(product), entry.choice], rounds=11)
    assert again[1][0] <= 1.05 * again[0][0]


@pytest.mark.parametrize("op, function", [("linear", linear), ("linear_silu_mul", linear_silu_mul)])
def test_an_op_computes_in_the_way_chosen(op, function, ways):
    x, weight = normal(280, 2048), normal(4096, 2048, scale=2048**-0.5)
    product = Product(op, 280, 4096, 2048)
    candidates = [choice for choice in ways.candidates(product) if choice.way == "cublaslt"]
    choices = Choices()
    _choices.install(0, choices)
    for choice in (candidates[0], candidates[-1]):
        choices.choose(product, choice, PYTORCH)
        expected = _cuda.compute("linear", choice, x, weight)
        assert torch.equal(function(x, weight), expected if op == "linear" else silu_mul(expected))
    assert not choices.wanted
    # Another number of rows has the default, and is wanted.
    assert torch.equal(linear(x[:272], weight), F.linear(x[:272], weight))
    assert list(choices.wanted) == [Product("linear", 272, 4096, 2048)]


def test_partial_sums_reach_the_residual():
    x, weight = normal(280, 2048), normal(1024, 2048, scale=2048**-0.5)
    residual, norm = normal(280, 1024), normal(1024)
    product = Product("linear_update", 280, 1024, 2048)
    assert linear_update(x, weight).shape == (280, 1024)
    exact = residual.double() + x.double() @ weight.double().t()
    bar = relative_l2(add_rms_norm(residual, F.linear(x, weight), norm, 1e-6)[0], exact)
    for partials in PARTIALS:
        choice = algorithms(280, 1024, 2048, 0, partials)[0]
        _choices.install(0, Choices({product: choice}))
        update = linear_update(x, weight)
        assert update.shape == (partials, 280, 1024) and update.dtype == torch.float32
        found = add_rms_norm(residual, update, norm, 1e-6)[0]
        assert relative_l2(found, exact) <= bar


def test_the_facts_are_known():
    facts = facts_of(DEVICE)
    assert facts.device == torch.cuda.get_device_name(DEVICE) and facts.kernels == tables.kernels_digest()
    assert facts.driver == driver_version() != "unknown" and int(facts.cublas) > 10_000
    assert attention_facts_of(DEVICE) == (facts.device, facts.driver, tables.attention_digest())


# A model


@pytest.fixture(scope="module")
def weights() -> Weights:
    return fused("2b")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Tables of this test alone."""
    monkeypatch.setattr(tables, "stored_in", lambda: tmp_path)
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped.json")
    tables.merge(tables.SHIPPED, facts_of(DEVICE), {})
    return tmp_path


def layout_of(case: str, few_queries: int | None = None) -> Layout:
    """As the engine lays it out where nothing is measured, or with these in small tiles."""
    if few_queries is None:
        few_queries = default_few_queries(multiprocessors_of(DEVICE), HEADS)
    forest = build_forest(prompts(case, VOCABULARY))
    return build_layout(forest, CUDA_BUCKET, portable=False, few_queries=few_queries)


def test_a_server_that_is_idle_tunes_what_it_was_asked_for_and_captures_again(weights, kept):
    tuning = Tuning.of(weights)
    graphs = GraphedForward(partial(forward, weights), DEVICE, idle_seconds=0.0, idle_work=IdleTuning(tuning))
    layout = layout_of("example")
    before = torch.cuda.memory_allocated()
    first, replayed = graphs(layout)
    assert not replayed and tuning.choices.wanted
    graphs.wait_until_captured()
    # Tile sizes came first; where they changed, so did the shape.
    assert not tuning.attention.wanted
    layout = layout_of("example", few_queries_for(DEVICE, weights.shapes.heads))
    if not graphs.holds(layout):
        graphs(layout)
        graphs.wait_until_captured()
    second, replayed = graphs(layout)
    assert replayed and not tuning.choices.wanted
    asked = {(product.rows, product.op) for product in tuning.entries}
    reads = len(layout.read_row)
    assert {(layout.rows, "linear"), (layout.rows, "linear_update"), (reads, "linear_silu_mul")} <= asked
    assert graphs.counts["captures"] >= 2
    # Other roundings, no other answer; and what is replayed is what the forward computes now.
    assert (second - first).abs().max() < 0.1
    with torch.inference_mode():
        assert torch.equal(graphs(layout)[0], forward(weights, layout.to(DEVICE)))
    # What tuning held is given back, but for its graph pool.
    assert torch.cuda.memory_allocated() - before < 512 << 20
    # A second start knows all of it.
    _choices.install(0, None)
    again = Tuning.of(weights)
    assert again.entries == tuning.entries and again.entries == Store(facts_of(DEVICE), kept).read()
    with torch.inference_mode():
        assert torch.equal(forward(weights, layout.to(DEVICE)), second)
    assert not again.choices.wanted


def test_requests_are_answered_while_it_tunes(weights, kept):
    tuning = Tuning.of(weights)
    graphs = GraphedForward(partial(forward, weights), DEVICE, idle_seconds=0.0, idle_work=IdleTuning(tuning))
    layout = layout_of("noul_70")
    expected = graphs(layout)[0]
    for _ in range(200):
        assert (graphs(layout)[0] - expected).abs().max() < 0.1
    graphs.wait_until_captured()
    assert not tuning.choices.wanted and tuning.entries


def test_tables_alone_change_nothing_while_a_server_runs(weights, kept):
    tuning = Tuning.of(weights)
    graphs = GraphedForward(partial(forward, weights), DEVICE, idle_seconds=0.0)
    layout = layout_of("noul_70")
    expected = graphs(layout)[0]
    graphs.wait_until_captured()
    assert tuning.choices.wanted and not tuning.entries
    assert all(torch.equal(graphs(layout)[0], expected) for _ in range(5))


# Attention


@torch.inference_mode()
def test_tile_sizes_are_measured_kept_and_compute_the_same(weights, kept):
    tuning = Tuning.of(weights)
    attention = tuning.attention
    heads = weights.shapes.heads
    assert heads == HEADS
    tree = TREES["example"]
    rows = np.arange(tree.rows)

    def plan(**options) -> AttentionPlan:
        return plan_attention(*tree.nodes, rows, tree.node_of_row, DEVICE, **options)

    assert attention.wanted
    before = plan(few_queries=few_queries_for(DEVICE, heads))
    assert few_queries_for(DEVICE, heads) == attention.tuner.default > 0
    entry, _ = finished(attention.tune())
    print(f"\n{heads}: {entry.few_queries} queries in small tiles, {entry.default} by default")
    for sample in entry.samples:
        print(sample)
        assert 1 < sample.small_us < 1000 and 1 < sample.large_us < 1000
        # The choice is between sizes, not between a right kernel and one that does not run.
        assert 1 / 4 < sample.small_us / sample.large_us < 4
    # Many queries on one root read each key less often in large tiles; no card gains by small ones there.
    assert entry.few_queries < 2048
    assert few_queries_for(DEVICE, heads) == entry.few_queries == attention.few_queries
    after = plan(few_queries=few_queries_for(DEVICE, heads))
    given = op_inputs.tree_attention(op_inputs.PROFILES["2b"], tree.rows, tree.rows)
    exact, magnitude = op_inputs.exact_attention(given, *tree.nodes, rows, tree.node_of_row)
    # Whatever was measured, both sizes are held to exact attention, by the bounds of an element and of the whole.
    for one in (before, after, plan(tile_queries=SMALL_TILE), plan(tile_queries=LARGE_TILE)):
        found = tree_attention(*given, one)
        assert relative_l2(found, exact) < 4e-3
        share = (found.double() - exact).abs() / (3 * bfloat16_ulp(exact) + 2**-8 * magnitude)
        assert share.max().item() <= 1
    # A second start finds it.
    _choices.install(0, None)
    assert few_queries_for(DEVICE, heads) == entry.default
    again = Tuning.of(weights).attention
    assert not again.wanted and again.entries == {heads: entry} == again.store.read()
    assert few_queries_for(DEVICE, heads) == entry.few_queries


@torch.inference_mode()
def test_pieces_of_the_measurement_are_short(weights, kept):
    attention = Tuning.of(weights).attention
    finished(attention.tune())
    spans, running = [], attention.tune()
    while True:
        start = time.perf_counter()
        try:
            next(running)
        except StopIteration:
            break
        torch.cuda.synchronize()
        spans.append(time.perf_counter() - start)
    print(f"\n{len(spans)} pieces, {sum(spans):.2f} s, the longest {1e3 * max(spans):.1f} ms")
    assert sum(spans) < 10 and np.quantile(spans, 0.95) < 0.02 and max(spans) < 0.2


# The benchmark


def test_the_benchmark_writes_results_and_a_table(tmp_path):
    output, table = tmp_path / "gemm.json", tmp_path / "table.json"
    arguments = ["--profile", "2b", "--rows", "72,280", "--repeats", "3", "--output", str(output)]
    assert gemm_bench.main([*arguments, "--write-table", str(table)]) == 0
    rows = json.loads(output.read_text())["rows"]
    shapes = gemm_bench.shapes(gemm_bench.PROFILES["2b"])
    assert len(rows) == len(shapes) * 2 * len(gemm_bench.VARIANTS)
    for row in rows:
        assert row["us"] > 0 and row["alone_us"] > 0 and row["tflops"] > 0 and 0 < row["rel_l2"] < 0.01, row
        # Nothing reads faster than memory, or multiplies faster than the card.
        assert row["gb_s"] < 8000 and row["tflops"] < 2500, row
    (entries,) = tables.read(table).values()
    assert tables.shipped(facts_of(DEVICE), table) == entries
    assert {product.rows for product in entries} == {72, 280} and len(entries) == 2 * len(shapes)
