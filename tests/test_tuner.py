"""The tuner on a device that takes as long as a test says, with ways that are right, wrong and refused."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.nn.functional as F
from pieces import finished
from prompt_cases import prompts
from recorded import record_instead_of_capture

from openjev_fast_plugin import forward as forward_module
from openjev_fast_plugin import tables, tuner
from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.graphs import CapturedGraphs, GraphedForward
from openjev_fast_plugin.layout import Bucket, build_layout
from openjev_fast_plugin.ops import _choices, _cuda, silu_mul
from openjev_fast_plugin.ops._choices import PYTORCH, Choice, Choices, Product
from openjev_fast_plugin.ops.linear import TILES, _choice, _partials, bands
from openjev_fast_plugin.random_models import head, text_config, text_model
from openjev_fast_plugin.replay_timer import Recording
from openjev_fast_plugin.tables import Entry, Facts, Store
from openjev_fast_plugin.tuner import (
    IdleTuning,
    NoWeight,
    Tuner,
    Tuning,
    Weight,
    forward_counts,
    model_weights,
)
from openjev_fast_plugin.weights import take_weights

CPU = torch.device("cpu")
FACTS = Facts("a device", "1.2", "130100", "abc")
PRODUCT = Product("linear", 16, 48, 64)


def way(number: int, **values) -> Choice:
    """A way that is told from others by its number."""
    return Choice("cublaslt", algorithm=(number, 0, 0, 0, 0, 0, 0, 0), **values)


def right(op: str, choice: Choice, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a way should compute: rounded once, or partial sums."""
    if choice.partials > 1:
        return torch.ops.openjev_fast.linear_update(x, weight, choice.partials)
    # Summed in another order than PyTorch's own product.
    product = (x.float().flip(1) @ weight.float().flip(1).t()).bfloat16()
    return silu_mul(product) if op == "linear_silu_mul" else product


@dataclass
class FakeWays:
    """Ways by choice; PyTorch's own is always there. compute: an exception is raised, a function computes."""

    computes: dict[Choice, Callable]
    first: Choice = PYTORCH

    def default(self, product: Product) -> Choice:
        return self.first

    def candidates(self, product: Product):
        yield from self.computes

    def compute(self, op: str, choice: Choice, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if choice == PYTORCH:
            product = F.linear(x, weight)
            return silu_mul(product) if op == "linear_silu_mul" else product
        return self.computes[choice](op, choice, x, weight)


class FakeTimer:
    """Makes the first call of a recording; a replay takes what `us` says for its way, times the spell of its round."""

    def __init__(self, us: dict[Choice, float], spell: Callable[[int], float] = lambda round_: 1.0):
        self.us, self.spell = us, spell
        self.rounds: list[list[Choice]] = []
        self.recorded: list[tuple[Choice, list[torch.Tensor]]] = []

    def record(self, calls):
        choice = calls[0].args[0]
        calls[0]()
        self.recorded.append((choice, [call.args[1] for call in calls]))
        return Recording(len(calls), lambda: choice)

    def round(self, recordings):
        choices = [recording.replay() for recording in recordings]
        self.rounds.append(choices)
        return [self.us[choice] * self.spell(len(self.rounds)) for choice in choices]


def weights_of(product: Product, count: int = 3) -> dict[Weight, list[torch.Tensor]]:
    torch.manual_seed(1)
    size = (product.features, product.columns)
    several = [torch.randn(size).bfloat16() for _ in range(count)]
    return {Weight(product.op, *size): several}


def tuned(
    us: dict[Choice, float],
    computes: dict[Choice, Callable] | None = None,
    product: Product = PRODUCT,
    **more,
) -> tuple[Entry, Tuner]:
    """What comes of tuning a product whose ways take so many microseconds, PyTorch's 100 where not said."""
    first = more.pop("first", PYTORCH)
    known = {choice: right for choice in us if choice != PYTORCH} | (computes or {})
    one = Tuner(weights_of(product), FakeWays(known, first), FakeTimer({PYTORCH: 100.0, **us}, **more))
    with torch.inference_mode():
        return finished(one.tune(product))[0], one


@pytest.mark.parametrize("op", _choices.OPS)
def test_the_fastest_way_is_chosen(op):
    product = PRODUCT._replace(op=op)
    entry, one = tuned({way(1): 90.0, way(2): 60.5, way(3): 70.0}, product=product)
    assert entry.choice == way(2) and one.refused == []
    assert (entry.us, entry.default_us) == (60.5, 100.0)
    # Summed in float32 either way: both err by their one rounding, or two.
    assert 0 < entry.rel_l2 <= 1.05 * entry.pytorch_rel_l2 < 0.01


def test_a_way_that_is_hardly_faster_is_not_chosen():
    assert tuned({way(1): 98.6})[0].choice == PYTORCH
    assert tuned({way(1): 98.4})[0].choice == way(1)
    assert tuned({way(1): 130.0})[0] == tuned({})[0]


def test_among_many_ways_the_fastest_is_found_wherever_it_stands():
    for place in (0, 6, 20, 39):
        us = {way(number): 90.0 + number % 7 for number in range(40)}
        us[way(place)] = 50.0
        entry, one = tuned(us)
        assert entry.choice == way(place)
        # Every way was beside the default in its screening; the final is of a few.
        screened = [choices for choices in one.timer.rounds if len(choices) > 1]
        assert all(choices[0] == PYTORCH for choices in screened)
        assert Counter(c for choices in screened[:-11] for c in choices if c != PYTORCH) == Counter(
            {choice: 2 for choice in us}
        )
        assert all(len(choices) <= 7 for choices in screened)


def test_a_slow_spell_of_the_device_meets_all_alike():
    us = {way(number): 90.0 + number for number in range(12)}
    us[way(3)] = 80.0
    # Whichever group is screened in a slow spell, the best of it comes to the final.
    for slow in range(11, 20):
        entry, _ = tuned(us, spell=lambda round_, slow=slow: 3.0 if 0 <= round_ - slow < 2 else 1.0)
        assert entry.choice == way(3) and entry.us == 80.0


def rounded_twice(op, choice, x, weight):
    half = x.shape[1] // 2
    parts = [
        (x[:, s].float() @ weight[:, s].float().t()).bfloat16() for s in (slice(half), slice(half, None))
    ]
    return parts[0] + parts[1]


def one_element_off(op, choice, x, weight):
    found = right(op, choice, x, weight)
    # Lost in the whole: far from lost in this element.
    small = found.abs().argmin()
    found.view(-1)[small] += 0.5
    return found


def small_elements_off(op, choice, x, weight):
    found = right(op, choice, x, weight)
    # By less than the largest element is rounded.
    return torch.where(
        found.abs() < found.abs().max() / 8, found.nextafter(torch.full_like(found, 9e9)), found
    )


def one_part_left_out(op, choice, x, weight):
    return right(op, choice, x[:, 8:], weight[:, 8:])


def not_a_number(op, choice, x, weight):
    found = right(op, choice, x, weight)
    found[0, 0] = torch.nan
    return found


def turned(op, choice, x, weight):
    return right(op, choice, x, weight).t().contiguous()


def another_each_time():
    # Within the error allowed, and not the same bits twice.
    calls = Counter()

    def compute(op, choice, x, weight):
        calls["made"] += 1
        found = right(op, choice, x, weight)
        small = found.abs().argmin()
        found.view(-1)[small] = -found.view(-1)[small] * calls["made"]
        return found

    return compute


FAULTS = {
    "rounded twice": (rounded_twice, "relative L2"),
    "one element off": (one_element_off, "largest error"),
    "small elements off": (small_elements_off, "relative L2"),
    "a part left out": (one_part_left_out, "relative L2"),
    "not a number": (not_a_number, "two calls on the same inputs differ|nan"),
    "turned": (turned, "relative L2 inf"),
    "not deterministic": (another_each_time(), "two calls on the same inputs differ"),
}


@pytest.mark.parametrize("fault, reason", FAULTS.values(), ids=FAULTS)
def test_a_way_that_errs_is_never_chosen_however_fast(fault, reason):
    entry, one = tuned({way(1): 10.0, way(2): 80.0}, {way(1): fault}, product=Product("linear", 64, 256, 64))
    assert entry.choice == way(2)
    ((refused, why),) = one.refused
    assert refused == way(1) and any(part in why for part in reason.split("|")), why


def test_the_error_of_the_chosen_way_is_the_one_reported():
    def nearly(op, choice, x, weight):
        # PyTorch's product with its smallest elements moved by one rounding: within the ratio.
        found = F.linear(x, weight)
        small = found.abs() < found.abs().max() / 64
        assert small.sum() > 5
        return torch.where(small, found.nextafter(torch.zeros_like(found)), found)

    entry, _ = tuned({way(1): 50.0}, {way(1): nearly})
    assert entry.choice == way(1)
    assert entry.pytorch_rel_l2 < entry.rel_l2 <= 1.05 * entry.pytorch_rel_l2


def test_wrong_ways_do_not_keep_right_ones_from_the_final():
    wrong = {way(number): one_part_left_out for number in range(9)}
    us = {**dict.fromkeys(wrong, 10.0), way(20): 80.0, way(21): 101.0, way(22): 130.0}
    entry, one = tuned(us, wrong)
    assert entry.choice == way(20) and {choice for choice, _ in one.refused} == set(wrong)
    # What is slower than the default was not even compared.
    assert one.timer.rounds[-1] == [PYTORCH, way(20), way(21)]


def refuses(op, choice, x, weight):
    raise RuntimeError("cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED\nmore")


def test_a_way_the_device_refuses_is_left_out_and_noted():
    entry, one = tuned({way(1): 10.0, way(2): 80.0, way(3): 90.0}, {way(1): refuses, way(3): refuses})
    assert entry.choice == way(2)
    assert one.refused == [(way(n), "cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED") for n in (1, 3)]
    entry, one = tuned({way(1): 10.0}, {way(1): refuses})
    assert entry.choice == PYTORCH and len(one.refused) == 1


def test_no_memory_is_no_refusal():
    def without_memory(op, choice, x, weight):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        tuned({way(1): 10.0}, {way(1): without_memory})


def test_a_default_that_errs_is_said_and_replaced(caplog):
    kernel = Choice("kernel", tile=64)
    entry, _ = tuned({kernel: 30.0, way(2): 80.0}, {kernel: one_part_left_out}, first=kernel)
    assert entry.choice == way(2) and entry.default_us == 100.0 and "errs" in caplog.text
    entry, _ = tuned({kernel: 30.0}, {kernel: one_part_left_out}, first=kernel)
    assert entry.choice == PYTORCH


def test_the_default_may_be_a_kernel_and_pytorch_a_candidate():
    kernel = Choice("kernel", tile=64)
    product = PRODUCT
    ways = FakeWays({kernel: right, PYTORCH: right, way(1): right, way(1): right}, first=kernel)
    for us, chosen in ((50.0, kernel), (150.0, PYTORCH)):
        timer = FakeTimer({kernel: us, PYTORCH: 100.0, way(1): 120.0})
        with torch.inference_mode():
            entry = finished(Tuner(weights_of(product), ways, timer).tune(product))[0]
        assert entry.choice == chosen and entry.default_us == us


def test_weights_of_the_model_are_read_in_turn():
    _, one = tuned({way(1): 90.0, way(2): 60.0})
    (several,) = one.weights.values()
    turn = [weight for _, weights in one.timer.recorded for weight in weights]
    assert len(turn) > 6
    for place, weight in enumerate(turn):
        assert weight is several[place % 3]


def test_slow_calls_are_recorded_twice_and_quick_ones_often():
    for us, calls in ((5000.0, 2), (90.0, 3), (10.0, 20), (0.4, 64)):
        _, one = tuned({PYTORCH: us, way(1): us})
        # In the screening and in the final.
        assert [len(weights) for choice, weights in one.timer.recorded if choice == way(1)] == 2 * [calls]


@pytest.mark.parametrize("op, reads", [("linear", 0), ("linear_silu_mul", 0), ("linear_update", 1)])
def test_what_reads_a_product_is_timed_with_it(op, reads, monkeypatch):
    made = Counter()
    real = tuner.add_rms_norm

    def norm(residual, update, weight, eps):
        made["norm"] += 1
        made[update.dim()] += 1
        return real(residual, update, weight, eps)

    monkeypatch.setattr(tuner, "add_rms_norm", norm)
    partial = way(2, partials=2)
    us = {way(1): 90.0, **({partial: 70.0} if op == "linear_update" else {})}
    entry, one = tuned(us, product=PRODUCT._replace(op=op))
    assert made["norm"] == reads * len(one.timer.recorded)
    if reads:
        # Partial sums are not rounded: they err less than a product does.
        assert entry.choice == partial and made[3] == 2
        assert entry.rel_l2 < 1e-5 < entry.pytorch_rel_l2


def test_partial_sums_that_are_wrong_are_refused():
    def the_same_twice(op, choice, x, weight):
        found = right(op, choice, x, weight)
        found[1] = found[0]
        return found

    partial = way(2, partials=2)
    product = PRODUCT._replace(op="linear_update")
    entry, one = tuned({partial: 10.0}, {partial: the_same_twice}, product=product)
    assert entry.choice == PYTORCH and len(one.refused) == 1


def test_the_exact_product_is_made_in_pieces(monkeypatch):
    monkeypatch.setattr(tuner, "_EXACT_ELEMENTS", 5 * PRODUCT.columns)
    for op in _choices.OPS:
        product = PRODUCT._replace(op=op)
        weights = weights_of(product)
        task = tuner._Task(product, *weights.values(), FakeWays({}), FakeTimer({}))
        exact = task._x.float() @ task._weights[0].float().t()
        if op == "linear_silu_mul":
            exact = F.silu(exact[:, :24]) * exact[:, 24:]
        torch.testing.assert_close(task._in_float32(), exact)


def test_pieces_are_small():
    product = PRODUCT
    us = {way(number): 90.0 for number in range(30)}
    one = Tuner(weights_of(product), FakeWays(dict.fromkeys(us, right)), FakeTimer({PYTORCH: 100.0, **us}))
    running = one.tune(product)
    at_most = 0
    with torch.inference_mode():
        next(running)
        before = len(one.timer.rounds), len(one.timer.recorded)
        for _ in running:
            now = len(one.timer.rounds), len(one.timer.recorded)
            at_most = max(at_most, now[0] - before[0], now[1] - before[1])
            before = now
    # Rounds of a piece, and recordings: those of a group, and the default's own.
    assert at_most <= tuner._GROUP + 1


def test_a_weight_that_is_not_there():
    with pytest.raises(NoWeight, match="no weight of the model is for .*features=40"):
        next(Tuner(weights_of(PRODUCT), FakeWays({}), FakeTimer({})).tune(PRODUCT._replace(features=40)))


# The products of a model


@pytest.mark.parametrize("layers", [7, 8], ids=["delta_last", "attention_last"])
def test_every_product_of_a_forward_has_its_weights(layers, monkeypatch):
    config = text_config("tiny", layers, vocabulary=512)
    weights = take_weights(text_model(config, CPU, 0), head(config.hidden_size, CPU, 0))
    found, asked = model_weights(weights), Counter()

    def watched(op):
        real = getattr(forward_module, op)

        def call(x, weight):
            asked[Weight(op, *weight.shape)] += 1
            same = [one for one in found[Weight(op, *weight.shape)] if one.data_ptr() == weight.data_ptr()]
            assert len(same) == 1 and same[0].is_contiguous()
            return real(x, weight)

        return call

    for op in _choices.OPS:
        monkeypatch.setattr(forward_module, op, watched(op))
    sequences = prompts("choice_3x40", 512)
    layout = build_layout(build_forest(sequences), Bucket(8, 8, 8))
    with torch.inference_mode():
        forward_module.forward(weights, layout)
    assert set(asked) == set(found)
    # The last layer's are taken in slices, as often as there is one layer's.
    counts = forward_counts(weights)
    assert sum(counts.values()) == 4 * layers and set(counts) < set(found)
    assert counts.total() - sum(min(asked[weight], counts[weight]) for weight in counts) == 1


# Tables, and what a server does


@dataclass
class Setup:
    """Tunings of one pretended device, which share a folder."""

    folder: object
    us: dict[Choice, float]

    def tuning(self, choices: Choices | None = None, takes=lambda product, choice: True, **weights) -> Tuning:
        one = Tuner(
            weights_of(PRODUCT, **weights),
            FakeWays({choice: right for choice in self.us if choice != PYTORCH}),
            FakeTimer({PYTORCH: 100.0, **self.us}),
        )
        counts = {weight: 2 for weight in one.weights}
        return Tuning(
            one, Choices() if choices is None else choices, Store(FACTS, self.folder), takes, counts
        )


@pytest.fixture
def setup(tmp_path, monkeypatch) -> Setup:
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped.json")
    tables.merge(tables.SHIPPED, FACTS._replace(kernels="other"), {})
    return Setup(tmp_path / "kept", {way(1): 90.0, way(2): 60.0})


def test_a_second_start_tunes_nothing(setup):
    first = setup.tuning()
    assert first.products([16, 32]) == [PRODUCT, PRODUCT._replace(rows=32)] and not first.entries
    with torch.inference_mode():
        entry, _ = finished(first.tune(PRODUCT))
    assert entry.choice == way(2) and first.choices.find(PRODUCT) == way(2)
    second = setup.tuning()
    assert second.entries == {PRODUCT: entry} and second.choices.find(PRODUCT) == way(2)
    assert not second.choices.wanted and not second.tuner.timer.rounds
    assert not IdleTuning(second).step()


def test_a_forward_has_the_number_of_rows_that_is_computed_fastest(setup):
    def known(**us: float) -> dict[Product, Entry]:
        return {
            PRODUCT._replace(rows=int(rows[1:])): Entry(way(1), each, 200.0, 0.1, 0.1)
            for rows, each in us.items()
        }

    # 272 rows take longer than 280; 296 are not worth 16 rows more; 400 are faster, and too far.
    times = known(r264=95.0, r272=104.0, r280=100.0, r288=105.0, r296=103.9, r304=104.5, r400=1.0)
    tables.merge(tables.SHIPPED, FACTS, times)
    tuning = setup.tuning()
    found = {rows: tuning.best_rows(rows) for rows in (200, 264, 272, 280, 288, 296, 304, 384, 390, 400)}
    assert found == {
        200: 200, 264: 264, 272: 280, 280: 280, 288: 296, 296: 296, 304: 304, 384: 384, 390: 390, 400: 400,
    }  # fmt: skip
    # Larger forwards are not captured.
    tables.merge(tables.SHIPPED, FACTS, known(r4096=100.0, r4104=50.0))
    assert setup.tuning().best_rows(4096) == 4096
    # What is tuned while the model is served changes no layout.
    faster = PRODUCT._replace(rows=272)
    with torch.inference_mode():
        finished(tuning.tune(faster))
    assert tuning.entries[faster].us == 60.0 and tuning.best_rows(272) == 280
    assert setup.tuning().best_rows(272) == 272


def test_rows_of_which_a_product_was_not_measured_stay_as_they_are(setup):
    tables.merge(
        tables.SHIPPED,
        FACTS,
        {
            PRODUCT._replace(rows=rows): Entry(way(1), us, 200.0, 0.1, 0.1)
            for rows, us in ((16, 9.0), (24, 1.0))
        },
    )
    tuning = setup.tuning()
    assert tuning.best_rows(16) == 24
    tuning.counts = {**tuning.counts, Weight("linear", 8, 8): 1}
    assert not tuning._time_of_forwards()


def test_the_shipped_table_is_in_force_and_the_users_own_goes_before_it(setup):
    other = PRODUCT._replace(rows=24)
    entries = {PRODUCT: Entry(way(1), 1.0, 2.0, 0.1, 0.1), other: Entry(way(1), 3.0, 4.0, 0.1, 0.1)}
    tables.merge(tables.SHIPPED, FACTS._replace(driver="another"), entries)
    shipped = setup.tuning()
    assert shipped.entries == entries and shipped.choices.find(other) == way(1)
    with torch.inference_mode():
        finished(shipped.tune(PRODUCT))
    own = setup.tuning()
    assert own.choices.find(PRODUCT) == way(2) and own.choices.find(other) == way(1)


def test_choices_the_device_does_not_take_are_left_out_with_a_warning(setup, caplog):
    entries = {PRODUCT._replace(rows=rows): Entry(way(rows), 1.0, 2.0, 0.1, 0.1) for rows in (8, 16)}
    Store(FACTS, setup.folder).add(entries)
    tuning = setup.tuning(takes=lambda product, choice: product.rows == 16)
    assert set(tuning.entries) == {PRODUCT} and tuning.choices.find(PRODUCT._replace(rows=8)) is None
    assert "1 tuned matmuls are left out" in caplog.text and "rows=8" in caplog.text


def test_idle_tuning_does_what_was_asked_for_piece_by_piece(setup, caplog):
    tuning = setup.tuning()
    idle = IdleTuning(tuning)
    layout = build_layout(build_forest(prompts("noul_16", 64)), Bucket(8, 8, 8))
    assert not idle.step()
    tuning.choices.find(PRODUCT)
    before, steps = idle.state(layout), 0
    with torch.inference_mode(), caplog.at_level(logging.INFO, "openjev_fast"):
        while idle.step():
            steps += 1
    assert steps > 5 and tuning.choices.find(PRODUCT) == way(2) and str(PRODUCT) in caplog.text
    assert idle.state(layout) != before and Store(FACTS, setup.folder).read() == tuning.entries


def test_what_cannot_be_tuned_when_idle_is_left_and_the_rest_is_done(setup, caplog):
    tuning = setup.tuning()
    idle = IdleTuning(tuning)
    unknown, large = PRODUCT._replace(features=40), PRODUCT._replace(rows=tuner.MOST_ROWS + 8)
    for product in (unknown, large, PRODUCT):
        tuning.choices.find(product)
    with torch.inference_mode():
        while idle.step():
            pass
    assert PRODUCT in tuning.entries and list(tuning.choices.wanted) == [unknown, large]
    assert caplog.text.count("was not tuned") == 1 and "features=40" in caplog.text
    assert not idle.step()


def test_a_choice_that_cannot_be_kept_is_in_force_and_said(setup, caplog):
    setup.folder.touch()
    tuning = setup.tuning()
    tuning.choices.find(PRODUCT)
    idle = IdleTuning(tuning)
    with torch.inference_mode():
        while idle.step():
            pass
    assert tuning.choices.find(PRODUCT) == way(2) and "not kept" in caplog.text


def test_a_graph_whose_matmul_was_tuned_is_captured_again(setup, monkeypatch):
    record_instead_of_capture(monkeypatch)
    tuning = setup.tuning()
    captured_with = []
    record = CapturedGraphs._captured

    def captured(self, inputs):
        captured_with.append(tuning.choices.find(PRODUCT._replace(rows=inputs.rows)))
        return record(self, inputs)

    def forward(layout):
        tuning.choices.find(PRODUCT._replace(rows=layout.rows))
        return layout.token.float()[:1]

    monkeypatch.setattr(CapturedGraphs, "_captured", captured)
    graphs = GraphedForward(forward, CPU, idle_seconds=0.0, idle_work=IdleTuning(tuning))
    layout = build_layout(build_forest(prompts("noul_16", 64)), Bucket(8, 8, 8))
    assert graphs(layout)[1] is False
    graphs.wait_until_captured()
    # Captured at once for the next request, then with the choice.
    assert captured_with == [None, way(2)] and graphs(layout)[1] is True
    assert graphs.counts["captures"] == 2 and len(graphs._graphs) == 1


# Where an op looks


@contextmanager
def in_force(choices: Choices):
    # The CPU has no index.
    _choices.install(None, choices)
    try:
        yield
    finally:
        _choices.install(None, None)
    assert _choices.installed(None) is None


def tensors(rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, 64).bfloat16(), torch.zeros(48, 64).bfloat16()


def test_an_op_on_the_device_takes_the_choice_of_its_size(monkeypatch):
    properties = replace(Properties(), multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    x, weight = tensors()
    choices = Choices({PRODUCT: way(5)})
    with in_force(choices):
        assert _choice("linear", x, weight) == way(5)
        # Rows may be further apart.
        assert _choice("linear", torch.zeros(16, 72).bfloat16()[:, :64], weight) == way(5)
        # Other products have the default, and are wanted.
        assert _choice("linear_silu_mul", x, weight).way == "kernel"
        assert list(choices.wanted) == [PRODUCT._replace(op="linear_silu_mul")]
        # What neither kernel nor cuBLASLt takes is PyTorch's, and nobody's wish.
        for bad_x, bad_weight in (
            (x.float(), weight.float()),
            (x, weight.float()),
            (torch.zeros(16, 65).bfloat16()[:, 1:], weight),
            (torch.zeros(16, 66).bfloat16()[:, :64], weight),
            (torch.zeros(16, 128).bfloat16()[:, ::2], weight),
            (x, torch.zeros(64, 48).bfloat16().t()),
            (torch.zeros(1025).bfloat16()[1:].view(16, 64), weight),
            (x, torch.zeros(48 * 64 + 1).bfloat16()[1:].view(48, 64)),
            (x[:0], weight),
        ):
            assert _choice("linear", bad_x, bad_weight) == PYTORCH
        assert len(choices.wanted) == 1
    assert _choice("linear", x, weight).way == "kernel"


@dataclass(frozen=True)
class Properties:
    multi_processor_count: int = 1


def test_partial_sums_are_looked_up_by_shape(monkeypatch):
    meta = [tensor.to("meta") for tensor in tensors()]
    assert _partials(*meta) == 1
    product = PRODUCT._replace(op="linear_update")

    class OnDevice:
        device = torch.device("cuda", 3)
        dtype = torch.bfloat16
        shape = (16, 64)

        def __len__(self) -> int:
            return 16

    _choices.install(3, Choices({product: way(1, partials=4)}))
    try:
        assert _partials(OnDevice(), meta[1]) == 4
        assert _partials(OnDevice(), torch.empty(40, 64, device="meta")) == 1
    finally:
        _choices.install(3, None)
    assert _partials(OnDevice(), meta[1]) == 1


def test_a_choice_is_the_numbers_that_csrc_product_cpp_reads():
    # The way, then band, tile, parts, fused, form, partials, workspace, and the algorithm behind how long it is.
    assert PYTORCH.encoded() == [0, 0, 0, 1, 0, 0, 1, 0, 0]
    assert Choice("pytorch", band=20).encoded() == [0, 20, 0, 1, 0, 0, 1, 0, 0]
    assert Choice("kernel", tile=48, parts=2, fused=True).encoded() == [1, 0, 48, 2, 1, 0, 1, 0, 0]
    words = (7, 0, 2**62, -1, 0, 0, 0, 0)
    assert Choice("cublaslt", form=1, partials=2, workspace=512, algorithm=words).encoded() == [
        *(2, 0, 0, 1, 0, 1, 2, 512, 8),
        *words,
    ]
    assert way(9, form=1).encoded()[8:] == [8, 9, 0, 0, 0, 0, 0, 0, 0]
    # A field that is added is encoded too, or said to be none of the compiled code's.
    assert len(fields(Choice)) == len(PYTORCH.encoded())


def test_what_a_choice_is_called():
    words = (7, 0, 0, 0, 0, 0, 0, 0)
    assert (
        str(PYTORCH) == "F.linear"
        and str(Choice("pytorch", band=256)) == "F.linear, 256 weight rows at a time"
    )
    alone = str(Choice("cublaslt", form=1, algorithm=words))
    assert alone.startswith("cuBLASLt ") and alone.endswith(", rows first")
    rest = str(Choice("pytorch", band=256, form=1, algorithm=words))
    assert rest == f"F.linear, 256 weight rows at a time, the rest by {alone}"


def test_products_are_computed_by_compiled_code_in_the_way_given(monkeypatch):
    x, weight = tensors()
    asked = []

    def product(x, weight, silu, numbers):
        asked.append((silu, numbers))
        return torch.empty(0)

    monkeypatch.setattr(_cuda, "load", lambda: {"product": product})
    chosen = way(7, form=1, partials=2, workspace=512)
    _cuda.compute("linear", PYTORCH, x, weight)
    _cuda.compute("linear_silu_mul", Choice("pytorch", band=40), x, weight)
    _cuda.compute("linear_update", chosen, x, weight)
    assert asked == [
        (False, PYTORCH.encoded()),
        (True, Choice("pytorch", band=40).encoded()),
        (False, chosen.encoded()),
    ]


@pytest.mark.parametrize("op", _choices.OPS)
def test_float32_needs_no_compiled_code(op, monkeypatch):
    def load():
        raise AssertionError("built for a product that PyTorch computes")

    monkeypatch.setattr(_cuda, "load", load)
    x, weight = torch.randn(16, 64), torch.randn(48, 64)
    portable = _cuda.linear._portable_silu_mul if op == "linear_silu_mul" else F.linear
    if op == "linear_update":
        assert torch.equal(_cuda._linear_update(x, weight, 1), portable(x, weight))
        assert _cuda._linear_update(x, weight, 2).shape == (2, 16, 48)
    else:
        assert torch.equal(_cuda._product(op, portable)(x, weight), portable(x, weight))


def test_another_number_of_partial_sums_than_the_choices_is_computed_by_pytorch(monkeypatch):
    x, weight = torch.randn(16, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    chosen = way(1, partials=4)

    def product(x, weight, silu, numbers):
        return torch.zeros(4, 16, 48) if numbers == chosen.encoded() else F.linear(x, weight)

    monkeypatch.setattr(_cuda, "load", lambda: {"product": product})
    with in_force(Choices({PRODUCT._replace(op="linear_update"): chosen})):
        assert not _cuda._linear_update(x, weight, 4).any()
        torch.testing.assert_close(
            _cuda._linear_update(x, weight, 2), torch.ops.openjev_fast.linear_update(x, weight, 2)
        )
        assert torch.equal(_cuda._linear_update(x, weight, 1), F.linear(x, weight))
        # As with tensors that the chosen way does not take.
        shifted = torch.randn(16, 65).bfloat16()[:, 1:]
        assert _cuda._linear_update(shifted, weight, 4).shape == (4, 16, 48)
        assert _cuda._linear_update(shifted, weight, 4).any()


# The device's own ways


class Library:
    """Stands for the loaded kernels: algorithms of cuBLASLt, and what it accepts."""

    def __init__(self):
        self.asked, self.checked = [], []

    def algorithms(self, device, rows, features, columns, form, partials, most, out_stride=0):
        self.asked.append((features, form, partials, most, out_stride))
        return torch.tensor([[form, partials, 0, 0, 0, 0, 0, 1, 256], [form, partials, 0, 0, 0, 0, 0, 2, 0]])

    def accepts(self, device, rows, features, columns, form, partials, algorithm, workspace, out_stride=0):
        if form > 1:
            raise RuntimeError("cublaslt: there is no form 2")
        if not features:
            raise RuntimeError("cublaslt: features must be positive")
        self.checked.append((features, out_stride))
        return algorithm[0] == 1


@pytest.fixture
def device_ways(monkeypatch):
    library = Library()
    loaded = {"cublaslt_algorithms": library.algorithms, "cublaslt_accepts": library.accepts}
    monkeypatch.setattr(_cuda, "load", lambda: loaded)
    found = type("Found", (), {"major": 9, "minor": 0, "multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    ways = tuner.DeviceWays(torch.device("cuda", 0))
    ways.library = library
    return ways


def test_candidates_are_of_every_kind(device_ways):
    few = Product("linear", 72, 5120, 6144)
    found = list(device_ways.candidates(few))
    assert len(set(found)) == len(found) and found[0] == PYTORCH
    assert {(c.tile, c.parts) for c in found if c.way == "kernel"} == set(TILES)
    assert {(c.form, c.partials) for c in found if c.way == "cublaslt"} == {(0, 1), (1, 1)}
    assert {c.workspace for c in found if c.way == "cublaslt"} == {256, 0}
    assert all(len(c.algorithm) == 8 for c in found if c.way == "cublaslt")
    gated = list(device_ways.candidates(few._replace(op="linear_silu_mul", features=34816, columns=5120)))
    assert {c.fused for c in gated if c.way == "kernel"} == {False, True}
    update = list(device_ways.candidates(few._replace(op="linear_update", rows=280)))
    assert not [c for c in update if c.way == "kernel"]
    # For more rows than the kernel takes, in calls of one tile a multiprocessor: 132 of 256 by half of the rows.
    many = list(device_ways.candidates(Product("linear_silu_mul", 280, 34816, 5120)))
    assert Choice("pytorch", band=66 * 256) in many
    assert {c.band for c in many} == {0, *bands(34816, 132)} and {c.band for c in gated} == {0}
    assert {(c.form, c.partials) for c in update if c.way == "cublaslt"} == {
        (form, partials) for form in (0, 1) for partials in (1, 2, 4)
    }
    # A product as a whole asks for more than what its bands leave.
    assert {most for *_, most, _ in device_ways.library.asked} == {32, 12, 2}
    # Sizes that are no multiples of 8 are PyTorch's alone.
    for odd in (few._replace(rows=280, features=5121), few._replace(rows=280, columns=6140)):
        assert {c.way for c in device_ways.candidates(odd)} == {"pytorch"}


def test_what_bands_leave_is_tried_with_algorithms_of_its_size(device_ways):
    product = Product("linear_silu_mul", 280, 34816, 5120)
    found = [c for c in device_ways.candidates(product) if c.band and c.algorithm]
    assert {c.way for c in found} == {"pytorch"} and {c.partials for c in found} == {1}
    leaves = {band: 34816 % band for band in bands(34816, 132)}
    assert all(leaves.values())
    # Both forms, two algorithms each, into columns of rows as far apart as the whole product's.
    assert Counter(c.band for c in found) == dict.fromkeys(leaves, 4)
    asked = [one for one in device_ways.library.asked if one[-1]]
    assert asked == [(rest, form, 1, 2, 34816) for rest in leaves.values() for form in (0, 1)]
    # None where the bands leave nothing, or what cuBLASLt does not take.
    even = Product("linear", 280, 2 * 5632, 5120)
    assert 5632 in bands(even.features, 132)
    assert not [c for c in device_ways.candidates(even) if c.band == 5632 and c.algorithm]
    odd = product._replace(features=34818)
    assert not [c for c in device_ways.candidates(odd) if c.algorithm]


def test_an_algorithm_of_a_file_is_held_against_what_its_bands_leave(device_ways):
    product = Product("linear", 280, 34816, 5120)
    choice = Choice("pytorch", band=16896, form=1, workspace=256, algorithm=(1,) * 8)
    assert device_ways.takes(product, choice)
    assert device_ways.library.checked == [(1024, 34816)]
    assert not device_ways.takes(product, replace(choice, algorithm=(0,) * 8))
    assert not device_ways.takes(product, replace(choice, form=2))
    # Without a rest, without a band that leaves one, and for sums that nobody takes.
    assert not device_ways.takes(product, replace(choice, band=17408))
    assert not device_ways.takes(product, replace(choice, band=34816))
    update = product._replace(op="linear_update")
    assert device_ways.takes(update, choice) and not device_ways.takes(update, replace(choice, partials=2))


def test_candidates_pass_for_what_a_file_may_hold(device_ways):
    for product in (
        Product("linear", 72, 5120, 6144),
        Product("linear_silu_mul", 72, 34816, 5120),
        Product("linear_update", 72, 5120, 6144),
        Product("linear_silu_mul", 280, 34816, 5120),
    ):
        for choice in device_ways.candidates(product):
            expected = not choice.algorithm or choice.form == 1
            assert device_ways.takes(product, choice) is expected, choice


@pytest.mark.parametrize(
    "product, choice",
    [
        (Product("linear", 72, 5120, 6144), Choice("kernel", tile=48, fused=True)),
        (Product("linear", 72, 5120, 6144), Choice("kernel", tile=99)),
        (Product("linear", 136, 5120, 6144), Choice("kernel", tile=64)),
        (Product("linear", 72, 5120, 6144), Choice("cublaslt", partials=2, algorithm=(1,) * 8)),
        (Product("linear_update", 72, 5120, 6144), Choice("cublaslt", form=2, algorithm=(1,) * 8)),
        (Product("linear", 280, 5120, 6144), Choice("pytorch", band=5120)),
        (Product("linear", 72, 5120, 6144), Choice("kernel", band=1024, tile=64)),
        (Product("linear_silu_mul", 280, 34816, 5120), Choice("pytorch", fused=True)),
        (Product("linear_silu_mul", 280, 34816, 5120), Choice("cublaslt", algorithm=(1,) * 8, fused=True)),
    ],
    ids=[
        "fused",
        "tile",
        "rows",
        "partials",
        "form",
        "all in one band",
        "bands of a kernel",
        "PyTorch fused",
        "cuBLASLt fused",
    ],
)
def test_choices_no_device_can_take(device_ways, product, choice):
    assert not device_ways.takes(product, choice)


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build", "580.159.04"),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue Jun  6\nGCC version: gcc 12.2.0",
            "535.54",
        ),
        ("nothing", "unknown"),
    ],
)
def test_the_drivers_version(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert tuner.driver_version(tmp_path / "version") == version


def test_the_drivers_version_from_its_tool(tmp_path, monkeypatch):
    def run(command, **_):
        assert command[0] == "nvidia-smi"
        return type("Done", (), {"stdout": "580.95.05\n"})

    monkeypatch.setattr(tuner.subprocess, "run", run)
    assert tuner.driver_version(tmp_path / "missing") == "580.95.05"

    def missing(command, **_):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(tuner.subprocess, "run", missing)
    assert tuner.driver_version(tmp_path / "missing") == "unknown"
