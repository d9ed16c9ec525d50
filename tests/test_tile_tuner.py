"""How many queries have small tiles: the choice from samples, measuring with a made-up timer, and keeping."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from prompt_cases import prompts
from recorded import record_instead_of_capture

from openjev_fast_plugin import tables, tile_tuner
from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.graphs import GraphedForward
from openjev_fast_plugin.layout import Bucket, build_layout
from openjev_fast_plugin.ops import _choices
from openjev_fast_plugin.ops._choices import Choices, Heads, Product
from openjev_fast_plugin.ops.tree_attention import (
    LARGE_TILE,
    SMALL_TILE,
    default_few_queries,
    few_queries_for,
    multiprocessors_of,
)
from openjev_fast_plugin.replay_timer import Recording
from openjev_fast_plugin.tables import AttentionFacts, Facts, Sample, Store, TileEntry
from openjev_fast_plugin.tile_tuner import FORMS, QUERIES, TileTuner, TileTuning, choose_few_queries
from openjev_fast_plugin.tuner import IdleTuning, Tuner, Tuning

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 3)
HEADS = Heads(4, 2, 64)
FACTS = AttentionFacts("a device", "1.2", "abc")
# Of the 132 multiprocessors pretended below.
DEFAULT = 660


@pytest.fixture(autouse=True)
def multiprocessors(monkeypatch):
    found = type("Found", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    multiprocessors_of.cache_clear()
    yield
    multiprocessors_of.cache_clear()


# Which threshold is in force


def test_the_default_is_one_wave_of_small_tiles():
    assert default_few_queries(132, Heads(24, 4, 256)) == 330
    assert default_few_queries(132, Heads(8, 2, 256)) == 660
    assert default_few_queries(108, Heads(16, 4, 256)) == 270
    # More key heads than multiprocessors: one tile of each is more than a wave.
    assert default_few_queries(6, Heads(8, 8, 64)) == 0


def test_what_was_measured_on_the_device_for_the_heads_is_in_force():
    choices = Choices()
    choices.few_queries[HEADS] = 96
    assert few_queries_for(CUDA, HEADS) == DEFAULT
    _choices.install(CUDA.index, choices)
    try:
        assert few_queries_for(CUDA, HEADS) == 96
        assert few_queries_for(CUDA, HEADS._replace(kv_heads=4)) == 330
        assert few_queries_for(torch.device("cuda", 1), HEADS) == DEFAULT
        # 0 is a choice too.
        choices.few_queries[HEADS] = 0
        assert few_queries_for(CUDA, HEADS) == 0
    finally:
        _choices.install(CUDA.index, None)
    assert few_queries_for(CPU, HEADS) == 0


# The choice


def samples(ratios: dict[int, float], *, form: str = "root") -> list[Sample]:
    """Small tiles take so many times what large ones do, which is longer the more queries there are."""
    return [Sample(form, queries, queries * ratio, float(queries)) for queries, ratio in ratios.items()]


GRID = (64, 128, 256, 512, 1024)


@pytest.mark.parametrize("default", [0, 64, 200, 330, 5000])
@pytest.mark.parametrize("few", [0, 1, 3, 5])
def test_a_clear_crossing_is_found_wherever_it_is(few, default):
    chosen = choose_few_queries(samples({q: 0.8 if i < few else 1.3 for i, q in enumerate(GRID)}), default)
    low, high = [*([0] if not few else []), *GRID][few - 1 if few else 0], [*GRID, 10**9][few]
    # The default, where it lies between the two numbers around the crossing.
    assert chosen == (default if low <= default < high else low)


def test_a_number_counts_alike_however_long_it_takes():
    # 2 % lost at the longest, 4 % won at a shorter: by time taken alone the loss would decide.
    found = samples({64: 0.8, 128: 0.8, 256: 1.04, 512: 0.95, 1024: 0.98})
    assert choose_few_queries(found, 128) == 1024
    assert choose_few_queries(found[:3] + samples({512: 0.98, 1024: 1.0}), 128) == 128


def test_noise_does_not_move_the_default():
    for default in (0, 330, 5000):
        for seed in range(20):
            draw = np.random.default_rng(seed)
            noisy = {q: 1 + 0.002 * draw.standard_normal() for q in GRID}
            assert choose_few_queries(samples(noisy), default) == default


def test_noise_leaves_one_crossing():
    draw = np.random.default_rng(0)
    for _ in range(20):
        ratios = {q: (0.85 if q <= 256 else 1.2) + 0.02 * draw.standard_normal() for q in GRID}
        assert choose_few_queries(samples(ratios), 64) == 256
    # One number that small tiles lose is passed over, where they win more beyond it.
    assert choose_few_queries(samples({64: 0.8, 128: 1.02, 256: 0.8, 512: 1.2, 1024: 1.2}), 0) == 256


def test_ties_stay_at_the_default_or_nearest_to_it():
    assert choose_few_queries(samples(dict.fromkeys(GRID, 1.0)), 330) == 330
    flat = samples({64: 0.5, 128: 1.0, 256: 1.0, 512: 1.5, 1024: 1.5})
    assert choose_few_queries(flat, 0) == 64
    assert choose_few_queries(flat, 600) == 256
    assert choose_few_queries(flat, 200) == 200


def test_another_threshold_has_to_be_clearly_better():
    assert choose_few_queries(samples({64: 0.986, 128: 1.2}), 0) == 0
    assert choose_few_queries(samples({64: 0.984, 128: 1.2}), 0) == 64


def test_the_forms_are_averaged():
    both = samples({64: 0.8, 128: 1.3}) + samples({64: 1.1, 128: 0.9}, form="other")
    assert choose_few_queries(sorted(both, key=lambda sample: sample.queries), 0) == 64


# Measuring


class FakeTimer:
    """Makes the first call of a recording; a replay takes what `us` says of its plan, times the spell of its round."""

    def __init__(self, crossing: int, spell=lambda round_: 1.0):
        self.crossing, self.spell = crossing, spell
        self.rounds: list[list] = []
        self.outputs: dict[tuple, torch.Tensor] = {}
        self.calls: list[int] = []

    def record(self, calls):
        plan = calls[0].args[0]
        self.outputs[len(plan.query_row), len(plan.block_own), plan.tile_queries] = calls[0]()
        self.calls.append(len(calls))
        return Recording(len(calls), lambda: plan)

    def round(self, recordings):
        plans = [recording.replay() for recording in recordings]
        self.rounds.append(plans)
        return [self.us(plan) * self.spell(len(self.rounds)) for plan in plans]

    def us(self, plan) -> float:
        queries = len(plan.query_row)
        small = plan.tile_queries == SMALL_TILE
        return queries / 10 * (1.0 if small == (queries <= self.crossing) else 1.2)


def finished(running):
    pieces = 0
    while True:
        try:
            next(running)
        except StopIteration as done:
            return done.value, pieces
        pieces += 1


@torch.inference_mode()
def measured(crossing: int, **more) -> tuple[TileEntry, FakeTimer, int]:
    timer = FakeTimer(crossing, **more)
    tuner = TileTuner(HEADS, CPU, timer)
    entry, pieces = finished(tuner.measure())
    return entry, timer, pieces


@pytest.fixture
def short_grid(monkeypatch):
    monkeypatch.setattr(tile_tuner, "QUERIES", (16, 64, 128))


def test_every_number_and_form_is_timed_in_both_tiles_in_turn():
    entry, timer, pieces = measured(256)
    assert [(one.queries, one.form) for one in entry.samples] == [
        (q, form) for q in QUERIES for form in FORMS
    ]
    # Rounds are of a pair: the same queries, small tiles and large ones.
    assert all([plan.tile_queries for plan in plans] == [SMALL_TILE, LARGE_TILE] for plans in timer.rounds)
    assert all(len({len(plan.query_row) for plan in plans}) == 1 for plans in timer.rounds)
    assert entry.few_queries == 256 and entry.default == DEFAULT
    for one in entry.samples:
        assert one.small_us / one.large_us == pytest.approx(1 / 1.2 if one.queries <= 256 else 1.2, rel=1e-3)
    # A piece is at most one round, or two recordings.
    assert pieces >= len(timer.rounds) + len(timer.calls) // 2


def test_what_is_timed_is_attention_over_those_forests(short_grid):
    _, timer, _ = measured(256)
    # One block of queries for a root, more where there are tails; small and large tiles compute the same.
    assert {queries for queries, _, _ in timer.outputs} == {16, 64, 128}
    assert len(timer.outputs) == 3 * len(FORMS) * 2
    for (queries, blocks, tile), output in timer.outputs.items():
        assert output.shape == (queries, 4 * 64) and torch.isfinite(output.float()).all() and output.any()
        assert torch.equal(output, timer.outputs[queries, blocks, SMALL_TILE + LARGE_TILE - tile])
    for rows in QUERIES:
        for nodes in FORMS.values():
            assert sum(length for length, _ in nodes(rows)) == rows
    assert FORMS["root with tails"](64) == [(32, -1), (21, 0), (11, 0)]


def test_a_slow_spell_of_the_device_meets_both_sizes_alike(short_grid):
    entry, _, _ = measured(64, spell=lambda round_: 3.0 if round_ % 7 < 2 else 1.0)
    assert entry.few_queries == 64


# Keeping it


class Setup:
    """Tunings of one pretended device, which share a folder."""

    def __init__(self, folder):
        self.folder, self.timer = folder, FakeTimer(64)

    def store(self) -> Store:
        return Store(FACTS, self.folder)

    def attention(self, choices: Choices, heads: Heads = HEADS) -> TileTuning:
        return TileTuning(TileTuner(heads, CPU, self.timer), choices, self.store())

    def tuning(self, choices: Choices) -> Tuning:
        products = Store(Facts("a device", "1.2", "130100", "abc"), self.folder)
        return Tuning(Tuner({}, None, self.timer), choices, products, None, {}, self.attention(choices))


@pytest.fixture
def setup(tmp_path, monkeypatch, short_grid) -> Setup:
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped.json")
    tables.merge(tables.SHIPPED, FACTS._replace(kernels="other"), {})
    return Setup(tmp_path / "kept")


def entry(few: int) -> TileEntry:
    return TileEntry(few, DEFAULT, (Sample("root", 64, 7.5, 9.25),))


@torch.inference_mode()
def test_a_second_start_measures_nothing(setup):
    first = setup.attention(Choices())
    assert first.wanted and first.few_queries == DEFAULT and not first.entries
    found, _ = finished(first.tune())
    assert not first.wanted and first.few_queries == found.few_queries == 64
    choices, rounds = Choices(), len(setup.timer.rounds)
    second = setup.attention(choices)
    assert not second.wanted and second.entries == {HEADS: found} and choices.few_queries == {HEADS: 64}
    # Other heads have their own, beside these.
    other = setup.attention(choices, HEADS._replace(query_heads=8))
    assert other.wanted and other.few_queries == DEFAULT and len(setup.timer.rounds) == rounds
    finished(other.tune())
    assert set(setup.store().read()) == {HEADS, other.heads}


def test_another_model_on_the_device_has_measured_it(setup):
    choices = Choices()
    two = [setup.attention(choices) for _ in range(2)]
    with torch.inference_mode():
        finished(two[0].tune())
    assert not two[1].wanted and two[1].few_queries == 64


def test_a_shipped_section_is_in_force_and_the_users_own_goes_before_it(setup):
    tables.merge(tables.SHIPPED, FACTS._replace(driver="another"), {HEADS: entry(64)})
    assert setup.attention(Choices()).few_queries == 64
    setup.store().add({HEADS: entry(32)})
    assert setup.attention(Choices()).few_queries == 32


@pytest.mark.parametrize("fact", AttentionFacts._fields)
def test_what_other_facts_say_is_not_read(setup, fact):
    Store(FACTS._replace(**{fact: "other"}), setup.folder).add({HEADS: entry(64)})
    assert setup.attention(Choices()).wanted


# When a server is idle


def layout_at(few: int, case: str = "noul_16"):
    return build_layout(build_forest(prompts(case, 64)), Bucket(8, 8, 8), few_queries=few)


def test_idle_tuning_measures_it_once_and_before_any_matmul(setup, caplog):
    choices = Choices()
    idle = IdleTuning(setup.tuning(choices))
    choices.find(Product("linear", 16, 40, 64))
    with torch.inference_mode(), caplog.at_level(logging.INFO, "openjev_fast"):
        steps = 0
        while idle.step():
            steps += 1
    assert steps > 50 and choices.few_queries == {HEADS: 64}
    # The product's weight is not there, which is said after it.
    said = [record.getMessage() for record in caplog.records]
    assert "head_dim=64" in said[0] and "was not tuned" in said[1]
    assert setup.store().read()[HEADS].few_queries == 64 and not idle.step()


def test_what_cannot_be_measured_is_said_once_and_left(setup, caplog):
    class Refusing(FakeTimer):
        def record(self, calls):
            raise torch.OutOfMemoryError("no memory")

    setup.timer = Refusing(64)
    choices = Choices()
    idle = IdleTuning(setup.tuning(choices))
    with torch.inference_mode():
        # The inputs, the refusal, and nothing more.
        assert [idle.step() for _ in range(4)] == [True, True, False, False]
    assert caplog.text.count("was not tuned or not kept: no memory") == 1
    assert choices.few_queries == {} and not idle.step()


def test_a_threshold_that_cannot_be_kept_is_in_force_and_said(setup, caplog):
    setup.folder.touch()
    choices = Choices()
    idle = IdleTuning(setup.tuning(choices))
    with torch.inference_mode():
        while idle.step():
            pass
    assert choices.few_queries == {HEADS: 64} and "not kept" in caplog.text


def test_layouts_of_other_tiles_have_no_state():
    choices = Choices()
    attention = TileTuning.__new__(TileTuning)
    attention.tuner, attention._choices = TileTuner(HEADS, CPU, FakeTimer(0)), choices
    for few, rows, fits in ((16, "noul_16", {16, 24}), (0, "noul_16", {0, 7}), (8, "noul_16", {8, 15})):
        choices.few_queries[HEADS] = few
        for at in (0, 7, 8, 15, 16, 24):
            assert attention.lays_out(layout_at(at, rows)) is (at in fits), (few, at)


def test_the_graphs_of_the_old_tiles_are_let_go(setup, monkeypatch):
    record_instead_of_capture(monkeypatch)
    choices = Choices()
    graphs = GraphedForward(
        lambda layout: layout.token.float()[:1],
        CPU,
        idle_seconds=0.0,
        idle_work=IdleTuning(setup.tuning(choices)),
    )
    # 200 rows have small tiles by default and large ones by what is measured, 16 rows small ones either way.
    for case in ("noul_200", "noul_16"):
        graphs(layout_at(DEFAULT, case))
    graphs.wait_until_captured()
    assert choices.few_queries == {HEADS: 64}
    assert not graphs.holds(layout_at(DEFAULT, "noul_200")) and graphs.counts["evictions"] == 1
    assert (
        graphs.holds(layout_at(DEFAULT, "noul_16")) and layout_at(64, "noul_16").attention.tile_queries == 10
    )
    # The first request of the new shape runs eagerly, and is captured.
    assert graphs(layout_at(64, "noul_200"))[1] is False
    graphs.wait_until_captured()
    assert graphs(layout_at(64, "noul_200"))[1] is True and len(graphs._graphs) == 2


def test_an_entry_is_kept_whole(tmp_path):
    whole = replace(entry(64), samples=tuple(samples(dict.fromkeys(GRID, 0.75))))
    store = Store(FACTS, tmp_path)
    store.add({HEADS: whole})
    assert store.read() == {HEADS: whole} and store.path.name.startswith("attention-a-device-")
