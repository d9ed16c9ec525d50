"""Prefixes kept from one forward to the next: the same scores as without, what is found, kept and let go of."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decisions import question, text
from hypothesis import given, settings
from hypothesis import strategies as st
from jev.api import compile_request
from jev.model import DecisionModel
from schedulers import scheduler_of
from text_models import smallest_text_model

from openjev_fast_plugin import engine as engine_module
from openjev_fast_plugin import forward as forward_module
from openjev_fast_plugin.engine import FastEngine, PackedForward
from openjev_fast_plugin.layout import Layout
from openjev_fast_plugin.ops import add_rms_norm_ref
from openjev_fast_plugin.prefixes import Capacity, KeptStates, Planned, PrefixCache
from openjev_fast_plugin.settings import Settings
from openjev_fast_plugin.takeover import accelerate
from openjev_fast_plugin.weights import Weights, take_weights

# Of a probability, in float32.
BOUND = 1e-5
PLENTY = 4 << 20
LEAST_ROWS = 8
VOCABULARY = 64

Sequences = list[np.ndarray]
Roots = list[np.ndarray | None]


@pytest.fixture(scope="module")
def weights() -> Weights:
    model = smallest_text_model()
    with torch.no_grad():
        # Prompts that differ far back differ in their scores: states decay slowly.
        for name, parameter in model.named_parameters():
            parameter.fill_(-3.0) if name.endswith("A_log") else parameter.mul_(4.0)
    torch.manual_seed(1)
    return take_weights(model, torch.nn.Linear(32, 1))


def cache_of(weights: Weights, **changed: int) -> PrefixCache:
    """A cache of prefixes of `LEAST_ROWS` and more; slots and rows as given."""
    capacity = Capacity.of(weights.shapes, weights.dtype, PLENTY, LEAST_ROWS)
    return PrefixCache(
        weights.shapes, weights.dtype, weights.device, replace(capacity, **changed), LEAST_ROWS
    )


def packed_of(weights: Weights, **changed: int) -> PackedForward:
    return PackedForward(weights, ["all"], prefixes=cache_of(weights, **changed))


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def about(root: np.ndarray, *rests: tuple[int, int]) -> tuple[Sequences, Roots]:
    """Prompts that begin with a root and go on with (seed, length) each."""
    return [np.concatenate([root, tokens(*rest)]) for rest in rests], [root] * len(rests)


def together(*requests: tuple[Sequences, Roots]) -> tuple[Sequences, Roots]:
    return [each for sequences, _ in requests for each in sequences], [
        each for _, roots in requests for each in roots
    ]


def plain_scores(weights: Weights, sequences: Sequences) -> np.ndarray:
    plain = PackedForward(weights, ["all"])
    return plain.start(plain.prepare(sequences))().scores


def ask(packed: PackedForward, request: tuple[Sequences, Roots]) -> int:
    """Scores a request as without kept prefixes; the rows it reused."""
    outcome = packed.start(packed.prepare(*request))()
    np.testing.assert_allclose(
        outcome.scores, plain_scores(packed.weights, request[0]), rtol=BOUND, atol=BOUND
    )
    return outcome.reused


STATES = [tokens(1, 100), tokens(2, 61), np.concatenate([tokens(1, 100), tokens(3, 33)]), tokens(4, 3)]


@pytest.mark.parametrize("length", [9, 15, 16, 17, 63, 64, 65, 200])
def test_what_was_just_sent_is_not_computed_again(weights, length):
    packed, root = packed_of(weights), tokens(length, length)
    assert ask(packed, about(root, (1, 7), (2, 5))) == 0
    for rest in ((1, 7), (3, 1), (4, 2), (5, 3), (6, 70)):
        prepared = packed.prepare(*about(root, rest))
        # Three rows stand for the last ones of the prefix.
        assert prepared.rows == rest[1] + 3
        assert ask(packed, about(root, rest, (7, 4))) == length
    assert packed.prefixes.held == 1
    assert packed.prefixes.counts == {"hits": 5, "rows_reused": 5 * length, "kept": 1, "evictions": 0}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mix_of_requests_has_the_scores_of_fresh_ones(weights, data):
    packed = packed_of(weights)
    for turn in range(4):
        chosen = data.draw(st.lists(st.integers(-1, 3), min_size=1, max_size=4))
        requests = []
        for index, state in enumerate(chosen):
            rests = [(50 * turn + 5 * index + at, 1 + (7 * index + at) % 9) for at in range(1 + index % 3)]
            sequences, roots = about(tokens(9, 5) if state < 0 else STATES[state], *rests)
            requests.append((sequences, roots if state >= 0 else [None] * len(roots)))
        ask(packed, together(*requests))


def test_the_longest_prefix_wins_and_a_longer_one_is_kept_from_it(weights):
    packed = packed_of(weights)
    root, deeper = STATES[0], STATES[2]
    assert ask(packed, about(root, (1, 5))) == 0
    assert ask(packed, about(deeper, (2, 5))) == len(root)
    assert ask(packed, about(deeper, (3, 5), (4, 6))) == len(deeper)
    assert ask(packed, together(about(root, (5, 5)), about(deeper, (6, 5)))) == len(root) + len(deeper)
    assert packed.prefixes.held == 2
    # Both are prefixes of this one, which is too little longer to be kept itself.
    assert ask(packed, about(np.concatenate([deeper, tokens(8, 4)]), (7, 5))) == len(deeper)


@pytest.mark.parametrize("part", ["states", "conv", "keys", "values"])
def test_scores_depend_on_everything_that_is_kept(weights, part):
    packed, root = packed_of(weights), STATES[0]
    assert ask(packed, about(root, (1, 5))) == 0
    for layer in packed.prefixes.layers:
        if part in layer._fields:
            getattr(layer, part).mul_(0.5)
    request = about(root, (2, 5), (3, 6))
    outcome = packed.start(packed.prepare(*request))()
    assert np.abs(outcome.scores - plain_scores(weights, request[0])).max() > 100 * BOUND


def test_bfloat16_is_no_further_from_float32_than_without(weights, monkeypatch):
    """Distance of what the head reads, pooled over requests: at most 1.05 times as large as without."""

    def rounded(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.bfloat16()
        if isinstance(value, list):
            return [rounded(each) for each in value]
        if hasattr(value, "__dataclass_fields__") and not hasattr(value, "vocabulary"):
            made = {name: rounded(getattr(value, name)) for name in value.__dataclass_fields__}
            return type(value)(**made)
        return value

    narrow = rounded(weights)
    narrow.head_weight, narrow.head_bias = weights.head_weight, weights.head_bias
    packed, plain, exact = packed_of(narrow), PackedForward(narrow, ["all"]), PackedForward(weights, ["all"])
    read: list[torch.Tensor] = []
    real = forward_module.head_score

    def head_score(residual: Any, update: Any, rows: Any, norm_weight: Any, *rest: Any) -> torch.Tensor:
        read.append(add_rms_norm_ref(residual, update, norm_weight, rest[-1])[1].double())
        return real(residual, update, rows, norm_weight, *rest)

    monkeypatch.setattr(forward_module, "head_score", head_score)

    def rows_read(of: PackedForward, prepared: Any) -> tuple[torch.Tensor, int]:
        """What the head multiplies for each candidate, and the rows reused."""
        outcome = of.start(prepared)()
        layout = prepared.layout if isinstance(prepared, Planned) else prepared
        return read.pop()[layout.candidate_read.long()], outcome.reused

    ours = theirs = 0.0
    for seed in range(40):
        root = tokens(1000 + seed, 40 + seed)
        rows_read(packed, packed.prepare(*about(root, (seed, 6))))
        request = about(root, (100 + seed, 6), (500 + seed, 9))
        found, reused = rows_read(packed, packed.prepare(*request))
        assert reused == len(root)
        golden, _ = rows_read(exact, exact.prepare(request[0]))
        fresh, _ = rows_read(plain, plain.prepare(request[0]))
        ours += float((found - golden).square().sum())
        theirs += float((fresh - golden).square().sum())
    assert theirs > 0 and ours <= 1.05**2 * theirs, (ours / theirs) ** 0.5


# What is found


def test_only_whole_prefixes_of_the_same_ids_are_found(weights):
    packed, root = packed_of(weights), STATES[0]
    ask(packed, about(root, (1, 5)))
    for at in (0, 50, len(root) - 1):
        other = root.copy()
        other[at] = (other[at] + 1) % VOCABULARY
        assert ask(packed, about(other, (2, 5))) == 0
    assert ask(packed, about(root[:-1], (3, 5))) == 0
    # The ids of a prompt are compared, whatever is said of its root.
    sequences, _ = about(STATES[1], (4, 5))
    assert ask(packed, (sequences, [root])) == 0
    # Nothing is left to compute after a prefix that is the whole prompt.
    assert ask(packed, ([root.copy()], [root])) == 0


def test_short_prefixes_and_prompts_without_one_are_left_alone(weights):
    packed = packed_of(weights)
    request = about(tokens(1, 7), (1, 5))
    assert isinstance(packed.prepare(*request), Layout)
    assert isinstance(packed.prepare(request[0], [None]), Layout)
    assert isinstance(packed.prepare(request[0]), Layout)
    ask(packed, request)
    # No more than a few rows further than one that is kept already.
    ask(packed, about(STATES[0], (1, 5)))
    ask(packed, about(np.concatenate([STATES[0], tokens(5, 7)]), (2, 5)))
    assert packed.prefixes.counts["kept"] == 1


# Memory


def held_tensors(cache: PrefixCache) -> int:
    return sum(table.nbytes for layer in cache.layers for table in layer)


@pytest.mark.parametrize("slots, rows", [(1, 300), (3, 300), (4, 1000)])
def test_the_bound_in_bytes_is_never_passed(weights, slots, rows):
    packed = packed_of(weights, slots=slots, rows=rows)
    cache = packed.prefixes
    tables = [table.data_ptr() for layer in cache.layers for table in layer]
    for seed in range(12):
        ask(packed, about(tokens(seed, 20 + 17 * seed), (1, 3)))
        assert cache.held_bytes <= cache.total_bytes == held_tensors(cache)
        assert sum(len(prefix.rows) for prefix in cache._prefixes.values()) <= cache.capacity.rows
        assert cache.held <= cache.capacity.slots
    assert tables == [table.data_ptr() for layer in cache.layers for table in layer]
    assert cache.counts["kept"] == 12 and cache.counts["evictions"] == 12 - cache.held


def check_places(cache: PrefixCache) -> None:
    """Every place and every row belongs to one prefix or to nobody."""
    prefixes = cache._prefixes.values()
    places = [prefix.place for prefix in prefixes] + cache._free_places
    rows = [row for prefix in prefixes for row in prefix.rows] + cache._free_rows.tolist()
    assert sorted(places) == list(range(1, cache.capacity.slots + 1))
    assert sorted(rows) == list(range(1, cache.capacity.rows + 1))


def test_the_least_recently_used_goes_first(weights):
    packed = packed_of(weights, slots=3, rows=300)
    first, second, third, fourth = (tokens(10 + index, 30) for index in range(4))
    for root in (first, second, third):
        assert ask(packed, about(root, (1, 5))) == 0
    assert ask(packed, about(first, (2, 5))) == 30
    assert ask(packed, about(fourth, (1, 5))) == 0
    assert packed.prefixes.counts["evictions"] == 1
    assert [ask(packed, about(root, (3, 5))) for root in (first, third, fourth)] == [30, 30, 30]
    assert ask(packed, about(second, (3, 5))) == 0
    check_places(packed.prefixes)


def test_as_many_go_as_a_long_one_needs_and_none_in_vain(weights):
    packed = packed_of(weights, slots=8, rows=300)
    rows = packed.prefixes.capacity.rows
    parts = [tokens(20 + index, rows // 4) for index in range(4)]
    for root in parts:
        ask(packed, about(root, (1, 5)))
    assert packed.prefixes.held == 4
    assert ask(packed, about(tokens(30, rows + 1), (1, 5))) == 0
    assert packed.prefixes.held == 4 and packed.prefixes.counts["evictions"] == 0
    long = tokens(31, rows // 2)
    assert ask(packed, about(long, (1, 5))) == 0
    assert packed.prefixes.counts["evictions"] == 2
    assert ask(packed, about(long, (2, 5))) == len(long)
    check_places(packed.prefixes)


def test_what_a_forward_reads_is_not_let_go_of_for_what_it_keeps(weights):
    packed = packed_of(weights, slots=1, rows=300)
    root, deeper = STATES[0], STATES[2]
    ask(packed, about(root, (1, 5)))
    assert ask(packed, about(deeper, (2, 5))) == len(root)
    assert ask(packed, together(about(root, (3, 5)), about(STATES[1], (4, 5)))) == len(root)
    assert packed.prefixes.held == 1 and packed.prefixes.counts["evictions"] == 0


def test_a_prefix_let_go_of_before_the_forward_starts_is_computed(weights):
    packed = packed_of(weights, slots=1, rows=300)
    root = STATES[0]
    ask(packed, about(root, (1, 5)))
    request = about(root, (2, 5), (3, 6))
    prepared = packed.prepare(*request)
    assert isinstance(prepared, Planned) and prepared.plan.rows_reused == len(root)
    ask(packed, about(STATES[1], (4, 5)))
    assert packed.prefixes.counts["evictions"] == 1
    outcome = packed.start(prepared)()
    assert outcome.reused == 0
    np.testing.assert_allclose(outcome.scores, plain_scores(weights, request[0]), rtol=BOUND, atol=BOUND)
    check_places(packed.prefixes)


def test_two_forwards_prepared_at_once_keep_a_prefix_once(weights):
    packed, root = packed_of(weights), STATES[0]
    requests = [about(root, (seed, 5)) for seed in range(2)]
    prepared = [packed.prepare(*request) for request in requests]
    for each, (sequences, _), reused in zip(prepared, requests, (0, len(root)), strict=True):
        outcome = packed.start(each)()
        assert outcome.reused == reused
        np.testing.assert_allclose(outcome.scores, plain_scores(weights, sequences), rtol=BOUND, atol=BOUND)
    assert packed.prefixes.counts["kept"] == packed.prefixes.held == 1
    check_places(packed.prefixes)


def test_too_few_bytes_are_refused_with_what_is_needed(weights):
    def capacity(most_bytes: int) -> Capacity:
        return Capacity.of(weights.shapes, weights.dtype, most_bytes, 256)

    with pytest.raises(ValueError, match="1000 bytes hold no prefix of this model, of which") as caught:
        capacity(1000)
    least = int(str(caught.value).split(" bytes hold the first")[0].rsplit(" ", 1)[1])
    assert capacity(least).slots >= 1 and capacity(least).rows == 256
    with pytest.raises(ValueError):
        capacity(least - 2)


@pytest.mark.parametrize("most_bytes", [200_000, 1 << 20, (1 << 22) + 12345])
def test_a_number_of_bytes_is_used_and_never_passed(weights, most_bytes):
    capacity = Capacity.of(weights.shapes, weights.dtype, most_bytes, LEAST_ROWS)
    cache = PrefixCache(weights.shapes, weights.dtype, weights.device, capacity, LEAST_ROWS)
    assert held_tensors(cache) == capacity.total_bytes
    # One piece of memory, which no allocator rounds up for each layer, and no two tables share a byte.
    tables = [table for layer in cache.layers for table in layer]
    assert {table.untyped_storage().data_ptr() for table in tables} == {
        tables[0].untyped_storage().data_ptr()
    }
    assert tables[0].untyped_storage().nbytes() == capacity.total_bytes
    bounds = sorted((table.data_ptr(), table.data_ptr() + table.nbytes) for table in tables)
    assert all(end <= start for (_, end), (start, _) in pairwise(bounds))
    assert all(table.is_contiguous() for table in tables)
    assert all(layer.states.data_ptr() % 16 == 0 for layer in cache.layers if isinstance(layer, KeptStates))
    unused = most_bytes - held_tensors(cache)
    assert 0 <= unused < capacity.slot_bytes + capacity.row_bytes + 1


# What fails


def test_a_forward_that_fails_keeps_nothing_and_drops_the_rest(weights, monkeypatch):
    packed, root = packed_of(weights), STATES[0]
    ask(packed, about(root, (1, 5)))
    with monkeypatch.context() as patched:

        def fails(*_: Any) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        patched.setattr(engine_module, "forward", fails)
        for request in (about(root, (2, 5)), about(STATES[1], (3, 5))):
            prepared = packed.prepare(*request)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                packed.start(prepared)()
            assert packed.prefixes.held == 0
            check_places(packed.prefixes)
    assert ask(packed, about(root, (4, 5))) == 0
    assert ask(packed, about(root, (5, 5))) == len(root)


def test_a_forward_that_cannot_be_planned_to_the_end_loses_no_room(weights, monkeypatch):
    packed = packed_of(weights)

    def fails(*_: Any) -> Any:
        raise MemoryError("of the test")

    prepared = packed.prepare(*about(STATES[0], (1, 5)))
    with monkeypatch.context() as patched:
        patched.setattr(Layout, "keeping", fails)
        with pytest.raises(MemoryError):
            packed.start(prepared)
    check_places(packed.prefixes)
    assert ask(packed, about(STATES[0], (2, 5))) == 0
    assert ask(packed, about(STATES[0], (3, 5))) == len(STATES[0])


def test_scores_that_are_not_finite_keep_nothing(weights, monkeypatch):
    packed, root = packed_of(weights), STATES[0]
    real = engine_module.forward
    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "forward", lambda *given: real(*given) * torch.nan)
        assert np.isnan(packed.start(packed.prepare(*about(root, (1, 5))))().scores).all()
    assert packed.prefixes.held == 0
    check_places(packed.prefixes)
    assert ask(packed, about(root, (2, 5))) == 0


def test_memory_is_given_back_for_good_when_a_forward_finds_none(weights, caplog):
    packed, root = packed_of(weights), STATES[0]
    ask(packed, about(root, (1, 5)))
    prepared = [packed.prepare(*about(each, (2, 5))) for each in (root, STATES[1])]
    with caplog.at_level(logging.WARNING):
        packed.release_memory()
        packed.release_memory()
    assert caplog.text.count("no prefixes are kept any more") == 1
    assert packed.prefixes.layers is None and packed.prefixes.held_bytes == packed.prefixes.total_bytes == 0
    # What was prepared before is prepared again.
    for each, state in zip(prepared, (root, STATES[1]), strict=True):
        outcome = packed.start(each)()
        expected = plain_scores(weights, about(state, (2, 5))[0])
        np.testing.assert_allclose(outcome.scores, expected, rtol=BOUND, atol=BOUND)
        assert outcome.reused == 0
    assert ask(packed, about(root, (3, 5))) == 0
    assert packed.counts()[1]["prefix_memory_bytes"] == 0


def test_graphs_are_dropped_once_no_other_can_read_what_was_kept(weights):
    packed = packed_of(weights)
    kept_at_drop = []

    class Dropped:
        def drop(self) -> None:
            kept_at_drop.append(packed.prefixes.layers)

    packed.graphs = Dropped()
    packed.release_memory()
    assert kept_at_drop == [None]


# Graphs


class Graphs:
    """Stands for `GraphedForward`: notes what it is given."""

    def __init__(self, weights: Weights, held: bool) -> None:
        self._weights, self._held, self.taken = weights, held, False
        self.given: list[tuple[Layout, Layout | None]] = []

    def holds(self, layout: Layout) -> bool:
        return self._held

    def __call__(self, layout: Layout, example: Layout | None = None) -> tuple[torch.Tensor, bool]:
        self.given.append((layout, example))
        return torch.zeros(len(layout.candidate_read)), self._held


@pytest.mark.parametrize("held", [True, False], ids=["captured", "new_shape"])
def test_what_is_captured_keeps_nothing(weights, held, monkeypatch):
    # Compiled code lays out what has no prefixes.
    compiled = SimpleNamespace(rows=8)
    monkeypatch.setattr(engine_module.packed_layout, "pack_layout", lambda *given, **_: compiled)
    packed = packed_of(weights)
    packed.graphs, packed._thread = Graphs(weights, held), None
    packed.start(packed.prepare(*about(STATES[0], (1, 5))))()
    packed.start(packed.prepare(*about(STATES[0], (2, 5))))()
    assert packed.prepare(*about(tokens(1, 3), (2, 5))) is compiled
    (keeps, example), (reads, other) = packed.graphs.given
    assert keeps.shape_key() == example.shape_key() and reads is other
    assert keeps.delta.node[:, 6].max() > 0 < keeps.reuse.keep_place.min()
    assert set(keeps.reuse.keep_row.tolist()) == set(packed.prefixes._prefixes.popitem()[1].rows.tolist())
    assert not example.delta.node[:, 6].any() and not example.reuse.keep_place.any()
    assert not example.reuse.keep_row.any()
    assert not len(reads.reuse.keep_place) and reads.delta.node[:, 5].max() > 0


def test_what_a_warm_up_observes_keeps_nothing(weights):
    packed, root = packed_of(weights), STATES[0]
    with packed.observed() as layouts:
        ask(packed, about(root, (1, 5)))
        ask(packed, about(root, (2, 5)))
    keeps, reads = layouts
    assert not keeps.delta.node[:, 6].any() and not keeps.delta.kept_target[:, 1].ge(0).any()
    assert not keeps.reuse.keep_place.any() and not keeps.reuse.keep_row.any()
    assert reads.delta.node[:, 5].any() and packed.prefixes.counts["hits"] == 1


def test_prefixes_of_near_lengths_share_a_shape(weights):
    packed = packed_of(weights)
    packed.graphs = Graphs(weights, False)
    keys = set()
    for length in (130, 137, 145, 153):
        packed.start(packed.prepare(*about(tokens(length, length), (1, 5))))()
        keys.add(packed.prepare(*about(tokens(length, length), (2, 5))).layout.shape_key())
    assert len(keys) == 1


# Several requests at once


def test_requests_at_the_same_time_share_forwards_and_prefixes(weights):
    packed = packed_of(weights, slots=2, rows=300)
    scheduler = scheduler_of(packed, share_rows=400, max_rows=4096)
    requests = [
        about(
            tokens(40 + seed % 5, 50 + 10 * (seed % 5)),
            *[(seed + at, 3 + seed % 7) for at in range(1 + seed % 3)],
        )
        for seed in range(60)
    ]
    expected = [plain_scores(weights, sequences) for sequences, _ in requests]

    def score(request: tuple[Sequences, Roots]) -> Any:
        with scheduler.place() as place:
            sequences, roots = request
            return scheduler.score(place, sequences, sum(map(len, sequences)), roots)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for found, wanted in zip(pool.map(score, requests), expected, strict=True):
                np.testing.assert_allclose(found.scores, wanted, rtol=BOUND, atol=BOUND)
    counts = packed.prefixes.counts
    assert counts["hits"] > 0 and counts["evictions"] > 0
    check_places(packed.prefixes)


# Through the engine


def engine_of(checkpoint, **given: Any) -> FastEngine:
    model = DecisionModel.load(checkpoint, "cpu").float()
    engine = FastEngine(model, Settings(**given))
    engine.model = model
    return engine


def records_about(state: Any, seed: int, kind: str = "noul") -> list[dict[str, Any]]:
    return compile_request(state, {"q": question(kind, 3, seed)})


@pytest.fixture(scope="module")
def plain_engine(tiny_checkpoint) -> FastEngine:
    return engine_of(tiny_checkpoint)


def same_probabilities(found: Any, expected: Any) -> None:
    for got, wanted in zip(found.logits, expected.logits, strict=True):
        assert (got.double().softmax(0) - wanted.double().softmax(0)).abs().max() <= BOUND


@pytest.mark.parametrize("kind", ["noul", "choice", "score"])
def test_asking_again_about_a_state_computes_the_question(tiny_checkpoint, plain_engine, kind):
    engine = engine_of(tiny_checkpoint, prefix_bytes=256 << 20)
    state = text(400, 5)
    first = engine.score(records_about(state, 1))
    assert first.stats["rows_reused"] == 0
    same_probabilities(first, plain_engine.score(records_about(state, 1)))
    for seed in (2, 3):
        records = records_about(state, seed, kind)
        found, expected = engine.score(records), plain_engine.score(records)
        same_probabilities(found, expected)
        assert found.input_tokens == expected.input_tokens
        assert found.stats["rows_asked"] == expected.stats["rows_asked"]
        reused = found.stats["rows_reused"]
        assert reused > 500
        assert found.stats["rows_computed"] == expected.stats["rows_computed"] - reused + 3
    # A part of the prompt that only seems to be the question is as good.
    odd = f"{text(300, 6)}\n\nQuestion: {records_about('', 4)[0]['question']}\n{text(20, 7)}"
    for _ in range(2):
        same_probabilities(engine.score(records_about(odd, 4)), plain_engine.score(records_about(odd, 4)))


def test_states_of_fewer_rows_are_kept_where_it_is_asked(tiny_checkpoint, plain_engine):
    reused = {}
    for least in (256, 32):
        engine = engine_of(tiny_checkpoint, prefix_bytes=256 << 20, prefix_rows=least)
        for seed in range(2):
            records = records_about(text(60, 5), seed)
            found = engine.score(records)
            same_probabilities(found, plain_engine.score(records))
        reused[least] = found.stats["rows_reused"]
    assert reused[256] == 0 and 32 <= reused[32] < 256


def test_a_state_that_grows_by_a_paragraph_is_computed_from_there(tiny_checkpoint, plain_engine):
    engine = engine_of(tiny_checkpoint, prefix_bytes=256 << 20)
    state = text(400, 5)
    engine.score(records_about(state, 1))
    for joint, grown in (("\n\n", True), (" ", False)):
        records = records_about(f"{state}{joint}And {text(200, 6)}", 2)
        found = engine.score(records)
        same_probabilities(found, plain_engine.score(records))
        assert (found.stats["rows_reused"] > 500) == grown


def test_a_request_in_parts_reuses_what_its_first_part_kept(tiny_checkpoint, plain_engine):
    engine = engine_of(tiny_checkpoint, prefix_bytes=256 << 20, max_rows=900)
    records = compile_request(text(350, 8), {"q": question("choice", 40, 1), "r": question("noul", 1, 2)})
    found = engine.score(records)
    assert found.stats["forwards"] > 1 and found.stats["rows_reused"] > 0
    same_probabilities(found, plain_engine.score(records))


def test_without_memory_a_request_runs_on_without_prefixes(tiny_checkpoint, plain_engine, monkeypatch):
    engine = engine_of(tiny_checkpoint, prefix_bytes=256 << 20)
    state = text(400, 9)
    engine.score(records_about(state, 1))
    real, failed = engine_module.forward, []

    def once(*given: Any) -> Any:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("of the test")
        return real(*given)

    monkeypatch.setattr(engine_module, "forward", once)
    records = records_about(state, 2, "choice")
    found = engine.score(records)
    same_probabilities(found, plain_engine.score(records))
    assert failed and engine._packed.prefixes.layers is None and found.stats["rows_reused"] == 0


def test_metrics_and_metadata_say_what_was_reused(tiny_checkpoint):
    model = accelerate(DecisionModel.load(tiny_checkpoint, "cpu"), settings=Settings(prefix_bytes=256 << 20))
    taken, state = model.openjev_fast, text(400, 5)
    for seed in range(3):
        model(records_about(state, seed))
    reused = model.last_stats["rows_reused"]
    assert reused > 500 and 0 < taken.describe()["prefix_bytes"] <= 256 << 20
    sample = taken.engine.metrics.registry.get_sample_value
    assert sample("openjev_fast_prefix_hits_total") == 2
    assert sample("openjev_fast_prefix_rows_reused_total") == 2 * reused
    assert sample("openjev_fast_prefix_kept_total") == sample("openjev_fast_prefixes_held") == 1
    assert sample("openjev_fast_prefix_evictions_total") == 0
    assert 0 < sample("openjev_fast_prefix_held_bytes") < sample("openjev_fast_prefix_memory_bytes")
    assert b"openjev_fast_prefix_hits_total 2.0" in taken.metrics()[0]


def test_off_by_default_nothing_of_it_runs(tiny_checkpoint, monkeypatch):
    def fails(*_: Any, **__: Any) -> Any:
        raise AssertionError("ran")

    engine = engine_of(tiny_checkpoint)
    assert engine._packed.prefixes is None
    for owner, name in (
        (PrefixCache, "__init__"),
        (PrefixCache, "plan"),
        (type(engine._encoder), "state_lengths"),
        (engine_module, "Planned"),
    ):
        if name != "Planned":
            monkeypatch.setattr(owner, name, fails)
    seen = []
    real = engine_module.forward

    def forward(*given: Any) -> Any:
        seen.append(given)
        return real(*given)

    monkeypatch.setattr(engine_module, "forward", forward)
    for seed in range(2):
        stats = engine.score(records_about(text(400, 5), seed)).stats
        assert "rows_reused" not in stats
    # The forward is called as without the feature, and its layout has the shape it would have without.
    assert all(len(given) == 2 and given[1].reuse is None for given in seen)
    assert not any("prefix" in name for counts in engine._counts() for name in counts)
    assert "prefix_bytes" not in engine.describe()


def test_a_setting_that_holds_nothing_stops_the_start(tiny_checkpoint):
    model = DecisionModel.load(tiny_checkpoint, "cpu")
    before = model.backbone
    with pytest.raises(ValueError, match="OPENJEV_FAST_PREFIX_BYTES: 1024 bytes hold no prefix"):
        FastEngine(model, Settings(prefix_bytes=1024))
    assert model.backbone is before


def test_a_setting_of_more_memory_than_there_is_stops_the_start(tiny_checkpoint, monkeypatch):
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("of the test")

    monkeypatch.setattr(Capacity, "allocate", fails)
    message = r"OPENJEV_FAST_PREFIX_BYTES: no memory for \d+ bytes beside the model: of the test"
    with pytest.raises(ValueError, match=message):
        FastEngine(DecisionModel.load(tiny_checkpoint, "cpu"), Settings(prefix_bytes=256 << 20))
