"""The ops benchmark on the CPU: what it compares, what it calls of others, how it times, and how it fails."""

import json
import sys
import types
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import op_baselines
import ops_bench
import pytest
import torch
from comparison import relative_l2
from op_inputs import PROFILES, delta_rule, exact_delta_rule
from op_problems import OPS, OURS, Setting, layout_of
from op_registry import Prepared, Problem, Variant, Way, bytes_of, copies, measure
from op_timer import GraphTimer, HostTimer, Recording, replay_in_turn
from prompt_cases import prompts
from torch.nn.attention import SDPBackend
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.ops._choices import Heads
from openjev_fast_plugin.tables import AttentionFacts, Store, TileEntry

CPU = torch.device("cpu")
SETTING = Setting(PROFILES["narrow"], CPU, cache_bytes=0)
TREES = ["example", "noul_9", "choice_3x40", "root_70_tails_3"]


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    cp_context=None,
    **kwargs,
):
    """A stand-in with the arguments of fla-core 0.5.2, and its checks of what the benchmark passes."""
    assert not use_qk_l2norm_in_kernel and not kwargs and q.shape[2] == v.shape[2]
    assert q.dtype == k.dtype == v.dtype == beta.dtype == torch.bfloat16 and g.dtype == torch.float32
    if cu_seqlens is None:
        bounds = None
    else:
        assert q.shape[0] == 1 and cu_seqlens.dtype == torch.long and torch.equal(cu_seqlens, cu_seqlens_cpu)
        assert int(cu_seqlens[-1]) == q.shape[1]
        bounds = list(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False))
        assert initial_state is None or len(initial_state) == len(bounds)
    outputs, states = [], []
    for index, (first, end) in enumerate(bounds or [(0, q.shape[1])]):
        state = initial_state if bounds is None or initial_state is None else initial_state[index : index + 1]
        output, final = torch_chunk_gated_delta_rule(
            *(x[:, first:end].float() for x in (q, k, v)),
            g=g[:, first:end],
            beta=beta[:, first:end].float(),
            initial_state=state,
            output_final_state=True,
        )
        outputs.append(output)
        states.append(final)
    return torch.cat(outputs, 1).to(q.dtype), torch.cat(states) if output_final_state else None


@pytest.fixture
def fla(monkeypatch):
    names = ("fla", "fla.ops", "fla.ops.gated_delta_rule")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].chunk_gated_delta_rule = chunk_gated_delta_rule


class ScriptedTimer:
    """Makes the calls once when it records; a replay takes what the script says for the recording's place."""

    cache_bytes = 0

    def __init__(self, *us: list[float]):
        self.scripts = [iter(script) for script in us]
        self.order: list[int] = []
        self.recorded = 0

    def record(self, calls):
        for call in calls:
            call()
        place = self.recorded
        self.recorded += 1

        def replay() -> float:
            self.order.append(place)
            return next(self.scripts[place])

        return Recording(len(calls), replay)

    def release(self):
        pass


def variant(name: str, *ways: tuple[str, object], **options) -> Variant:
    """Ways by name and what they do: a number they return, or an exception they raise."""

    def call(result):
        if isinstance(result, Exception):
            raise result
        return torch.tensor([result])

    def prepare(result):
        return Prepared([lambda: call(result)], lambda output: [(output, torch.tensor([2.0]))], rows=7)

    return Variant(name, [Way(how, lambda r=result: prepare(r)) for how, result in ways], **options)


def problem(*variants: Variant, **options) -> Problem:
    return Problem("op", "case", "two", list(variants), **options)


def slow(us: float) -> list[float]:
    """A way that takes so long that one replay decides about it."""
    return [us] * 9


SECOND = 1e6


def test_median_of_replays_and_bytes_over_it():
    timer = ScriptedTimer([30.0] * 5 + [10.0, 40.0, 20.0])
    (row,) = measure(problem(variant("ours", ("only", 2.0)), moved=4000), timer, 3)
    assert (row["us"], row["min_us"], row["max_us"], row["replays"], row["calls"]) == (20.0, 10.0, 40.0, 3, 1)
    assert (row["gb_s"], row["rel_l2"], row["how"], row["rows"], row["error"]) == (0.2, 0.0, "only", 7, None)


def test_variants_take_turns_and_slow_ones_sit_out_evenly():
    order = []
    recordings = {name: Recording(1, lambda name=name: order.append(name) or 1.0) for name in "abc"}
    times = replay_in_turn(recordings, {"a": 6, "b": 6, "c": 2})
    assert "".join(order) == "ab" * 2 + "abc" + "ab" * 2 + "abc"
    assert [len(times[name]) for name in "abc"] == [6, 6, 2]


def test_a_slow_variant_gets_three_replays():
    timer = ScriptedTimer(slow(SECOND), [5.0] * 99)
    slow_row, fast_row = measure(problem(variant("slow", ("", 2.0)), variant("fast", ("", 2.0))), timer, 20)
    assert (slow_row["replays"], fast_row["replays"]) == (3, 20)


def test_the_fastest_way_stands_for_a_variant():
    timer = ScriptedTimer(slow(3 * SECOND), slow(SECOND), slow(2 * SECOND))
    (row,) = measure(problem(variant("v", ("x", 2.0), ("y", 2.0), ("z", 2.0))), timer, 3)
    assert (row["how"], row["us"]) == ("y", SECOND)


def test_the_first_way_that_runs_stands_for_a_variant_that_asks_for_it():
    timer = ScriptedTimer(slow(3 * SECOND), slow(SECOND))
    (row,) = measure(problem(variant("v", ("x", 2.0), ("y", 2.0), first=True)), timer, 3)
    assert (row["how"], row["error"], timer.recorded) == ("x", None, 1)


def test_a_failing_variant_loses_nothing_of_the_others():
    rows = measure(
        problem(variant("bad", ("x", ValueError("broken\nmore"))), variant("good", ("x", 2.0))),
        ScriptedTimer([1.0] * 99),
        3,
    )
    assert rows[0]["us"] is None and rows[0]["error"] == "x: ValueError: broken"
    assert rows[1]["us"] == 1.0 and rows[1]["error"] is None


def test_a_way_that_fails_is_an_error_beside_the_one_that_runs():
    (row,) = measure(
        problem(variant("v", ("x", RuntimeError("no")), ("y", 2.0), first=True)), ScriptedTimer([1.0] * 99), 3
    )
    assert (row["how"], row["us"], row["error"], row["refused"]) == ("y", 1.0, "x: RuntimeError: no", [])


def test_a_backend_may_refuse_but_not_break():
    refusing = variant("v", ("x", RuntimeError("No kernel")), ("y", 2.0), may_refuse=True)
    (row,) = measure(problem(refusing), ScriptedTimer([1.0] * 99), 3)
    assert (row["how"], row["error"], row["refused"]) == ("y", None, ["x: No kernel"])
    broken = variant("v", ("x", TypeError("bug")), ("y", 2.0), may_refuse=True)
    (row,) = measure(problem(broken), ScriptedTimer([1.0] * 99), 3)
    assert row["error"] == "x: TypeError: bug"
    nobody = variant("v", ("x", RuntimeError("No kernel")), may_refuse=True)
    (row,) = measure(problem(nobody), ScriptedTimer(), 3)
    assert row["us"] is None and row["error"] == "no way runs: x: No kernel"


@pytest.mark.parametrize("value, rel_l2", [(2.5, 0.25), (float("nan"), None)])
def test_a_wrong_result_is_an_error(value, rel_l2):
    (row,) = measure(problem(variant("v", ("x", value))), ScriptedTimer([1.0] * 99), 3)
    assert row["rel_l2"] == rel_l2 and "is rounding" in row["error"]


def test_a_replay_that_fails_is_every_variants_error():
    rows = measure(
        problem(variant("a", ("x", 2.0)), variant("b", ("x", 2.0))),
        ScriptedTimer([1.0] * 99, [1.0] * 6),
        30,
    )
    assert [row["us"] for row in rows] == [None, None]
    assert all(row["error"].startswith("replay: ") for row in rows)


def test_a_skipped_variant_is_a_row_without_error():
    (row,) = measure(problem(variant("v", ("x", 2.0), skipped="too big")), ScriptedTimer(), 3)
    assert (row["us"], row["skipped"], row["error"]) == (None, "too big", None)


def test_sets_exceed_the_cache_twice_and_keep_strides_and_shared_slices():
    base = torch.randn(10, 12)
    given = (base[:, :4], None, [base[:, 4:]], 3)
    size = 10 * 12 * 4
    assert bytes_of(given) == size and bytes_of((base, base)) == size
    sets = copies(given, 2 * size)
    assert len(sets) == 4 and sets[0] is given
    for one in sets[1:]:
        assert one[0].stride() == (12, 1) and torch.equal(one[0], given[0]) and one[3] == 3
        assert one[0].untyped_storage().data_ptr() == one[2][0].untyped_storage().data_ptr()
        assert one[0].data_ptr() != given[0].data_ptr()
    assert len(copies(given, 1 << 40)) == 64 and len(copies(given, 0)) == 1


@pytest.mark.parametrize(
    "case, lengths, rows",
    [
        ("example", [82, 80, 78, 69, 78, 77, 75], 277),
        ("noul_70", [70], 70),
        ("choice_8x1000", [1000] * 8, 979 + 8 * 21),
        ("root_10000", [10_000], 10_000),
        ("root_10000_tails_32", [10_021] * 32, 10_000 + 32 * 21),
    ],
)
def test_cases_have_the_rows_they_are_named_after(case, lengths, rows):
    assert list(map(len, prompts(case, 32_768))) == lengths
    assert len(layout_of(case)[0].token) == rows


@pytest.mark.parametrize(
    "case", ["root", "choice_3", "noul_", "root_5_tails", "example_2", "choice_3x4_tails_2"]
)
def test_unknown_cases_are_refused(case):
    with pytest.raises(ValueError, match="no case is named"):
        prompts(case, 100)


@pytest.mark.parametrize("case", TREES)
def test_candidates_and_levels_hold_the_rows_of_their_paths(case):
    sequences = prompts(case, 32_768)
    forest, _ = layout_of(case)
    for rows, sequence in zip(op_baselines.candidate_rows(forest), sequences, strict=True):
        assert np.array_equal(forest.token[rows], sequence)
        assert np.array_equal(forest.position[rows], np.arange(len(rows)))
    rows = len(forest.token)
    rectangle = op_baselines.Rectangle.of(op_baselines.candidate_rows(forest), rows, CPU)
    tokens = torch.from_numpy(forest.token) + 1
    laid_out = rectangle.lay_out(tokens)
    assert torch.equal(laid_out.flatten()[rectangle.place], tokens)
    assert laid_out.ne(0).sum().item() == sum(map(len, sequences))
    seen = torch.cat([level.rectangle.row.flatten() for level in op_baselines.levels(forest, CPU)])
    assert sorted(seen[seen < rows].tolist()) == list(range(rows))


def test_a_sequence_that_is_a_prefix_of_another_ends_where_it_ends():
    text = np.arange(9, dtype=np.int32)
    forest = build_forest([text, text[:4]])
    assert [rows.tolist() for rows in op_baselines.candidate_rows(forest)] == [[*range(9)], [*range(4)]]


@pytest.mark.parametrize("case", TREES)
def test_the_dense_mask_is_the_paths(case):
    forest, layout = layout_of(case)
    mask = op_baselines.dense_mask(forest, layout.rows, torch.float32, CPU)[0, 0]
    seen = torch.zeros(layout.rows, layout.rows, dtype=torch.bool)
    for path in op_baselines.candidate_rows(forest):
        for depth, row in enumerate(path):
            seen[row, path[: depth + 1]] = True
    rows = len(forest.token)
    assert torch.equal(mask[:rows] == 0, seen[:rows])
    assert torch.equal(mask[rows:] == 0, torch.eye(layout.rows, dtype=torch.bool)[rows:])
    assert mask[mask != 0].eq(-torch.inf).all()


@pytest.mark.parametrize("case", TREES)
def test_fla_is_called_on_every_path_and_level_by_level(fla, case):
    by_name = {one.name: one for one in OPS["delta"].build(case, SETTING).variants}
    assert list(by_name) == [OURS, "fla_padded", "fla_levels"]
    ways = {(name, way.how): way for name, one in by_name.items() for way in one.ways}
    single = case == "noul_9"
    assert (("fla_levels", "cu_seqlens") in ways) is not single
    for (name, how), way in ways.items():
        prepared = way.prepare()
        ((found, expected),) = prepared.compare(prepared.calls[0]())
        # Float32 inside, one rounding.
        assert relative_l2(found, expected) < 3e-3, (name, how)


def test_a_wrong_parent_would_be_seen(fla, monkeypatch):
    real = op_baselines.levels

    def wrong(forest, device):
        return [
            one if one.parent is None else replace(one, parent=one.parent.roll(1))
            for one in real(forest, device)
        ]

    monkeypatch.setattr(op_baselines, "levels", wrong)
    (levels,) = (one for one in OPS["delta"].build("example", SETTING).variants if one.name == "fla_levels")
    rows = measure(problem(levels), HostTimer(), 1)
    assert "is rounding" in rows[0]["error"]


def test_exact_delta_rule_leaves_rows_of_no_node_alone():
    given = delta_rule(PROFILES["narrow"], 5, device="cpu")
    tables = (np.array([0]), np.array([3]), np.array([-1]))
    assert exact_delta_rule(given, *tables)[3:].eq(0).all()


@pytest.mark.parametrize("case", TREES)
def test_attention_baselines_compute_the_same_rows(case, monkeypatch):
    # The CPU has flash alone, and takes a mask there.
    monkeypatch.setattr(op_baselines, "CAUSAL_BACKENDS", {"flash": SDPBackend.FLASH_ATTENTION})
    monkeypatch.setattr(op_baselines, "MASKED_BACKENDS", {"flash": SDPBackend.FLASH_ATTENTION})
    found = OPS["attention"].build(case, SETTING)
    names = [one.name for one in found.variants]
    assert names == [
        OURS,
        "other_tiles",
        "sdpa_padded",
        "sdpa_dense",
        *(["sdpa_root"] if case.startswith("root") else []),
    ]
    for one in found.variants:
        assert len(one.ways) == (1 if one.name in (OURS, "other_tiles") else 4)
        for way in one.ways:
            prepared = way.prepare()
            ((output, expected),) = prepared.compare(prepared.calls[0]())
            assert relative_l2(output, expected) < 4e-3, (one.name, way.how)
            rows = 70 if one.name == "sdpa_root" else found_rows(case)
            assert len(output) == rows


@pytest.mark.parametrize("few_queries, tiles", [(0, (21, 10)), (10_000, (10, 21))])
def test_attention_has_the_tiles_of_the_engine_and_beside_them_the_others(few_queries, tiles):
    found = OPS["attention"].build("noul_9", replace(SETTING, few_queries=few_queries))
    for one, tile in zip(found.variants[:2], tiles, strict=True):
        (way,) = one.ways
        assert way.how.endswith(f"tiles of {tile}")
        assert way.prepare().calls[0].args[-1].tile_queries == tile


def test_tile_sizes_are_those_a_server_would_find_measured(tmp_path, monkeypatch):
    profile, device, facts = PROFILES["2b"], torch.device("cuda", 0), AttentionFacts("a card", "1", "abc")
    assert ops_bench.few_queries(profile, CPU) == 0
    monkeypatch.setattr(ops_bench, "attention_facts_of", lambda device: facts)
    monkeypatch.setattr(ops_bench, "stored_in", lambda: tmp_path)
    monkeypatch.setattr(ops_bench, "few_queries_for", lambda device, heads: 660)
    assert ops_bench.few_queries(profile, device) == 660
    Store(facts, tmp_path).add({Heads(8, 2, 256): TileEntry(96, 660, ())})
    assert ops_bench.few_queries(profile, device) == 96
    assert ops_bench.few_queries(PROFILES["9b"], device) == 660


def test_a_run_has_these_tile_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(ops_bench, "few_queries", lambda profile, device: 10_000)
    arguments = ["--op", "attention", "--case", "noul_9", "--variant", OURS, "--variant", "other_tiles"]
    assert ops_bench.main(command(tmp_path, *arguments)) == 0
    rows = json.loads((tmp_path / "ops.json").read_text())["rows"]
    assert [row["how"].rpartition(" ")[2] for row in rows] == ["10", "21"]


def found_rows(case: str) -> int:
    return len(layout_of(case)[0].token)


def test_a_large_mask_is_skipped_and_long_cases_are_sampled():
    found = OPS["attention"].build("root_10000", SETTING)
    (dense,) = (one for one in found.variants if one.name == "sdpa_dense")
    assert dense.skipped == "its mask would take 190 MiB, more than 64"
    assert found.against.endswith("1712 queries")


@pytest.mark.parametrize("name", [name for name in OPS if name not in ("delta", "attention")])
def test_elementwise_ops_agree_with_their_baselines(name):
    found = OPS[name].build("example", SETTING)
    rows = measure(found, HostTimer(), 1)
    assert [row["variant"] for row in rows] == [OURS, "torch"]
    for row in rows:
        assert row["error"] is None and row["us"] > 0 and row["gb_s"] >= 0, row
    assert rows[0]["rows"] == (8 if name == "head_score" else 280)


def test_bytes_that_an_op_must_move():
    # 280 rows of 64: read and written twice, or with an update or partial sums; the weight.
    row, weight = 280 * 64 * 2, 64 * 2
    expected = {"_none": 3 * row, "": 4 * row, "_s1": 5 * row, "_s2": 7 * row, "_s4": 11 * row}
    for end, moved in expected.items():
        assert OPS[f"add_rms_norm{end}"].build("example", SETTING).moved == moved + weight
    assert OPS["silu_mul"].build("example", SETTING).moved == 280 * 128 * 3 * 2
    # The head reads 16 rows of 64 twice, their numbers, norm and head weights and a bias, and writes 16 scores.
    moved = 2 * 16 * 64 * 2 + 16 * 4 + 64 * 2 + 64 * 4 + 4 + 16 * 4
    assert OPS["head_score"].build("choice_16x40", SETTING).moved == moved


@pytest.mark.parametrize("calls, ms, recorded", [(3, 0.5, 6), (8, 0.5, 8), (1, 0.5, 4), (2, 20.0, 2)])
def test_a_graph_holds_every_set_and_at_least_four_calls_unless_they_are_slow(
    monkeypatch, calls, ms, recorded
):
    """The device timer's logic over stand-ins for events and graphs: each thing done is noted in order."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return ms

    class Graph:
        def replay(self):
            done.append("replay")

    @contextmanager
    def capture(graph):
        done.append("begin")
        yield
        done.append("end")

    properties = types.SimpleNamespace(L2_cache_size=64)
    fakes = {"Event": Event, "CUDAGraph": Graph, "graph": capture, "synchronize": lambda: None}
    for name, fake in (fakes | {"get_device_properties": lambda device: properties}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    timer = GraphTimer(CPU)
    assert timer.cache_bytes == 64
    recording = timer.record([lambda name=str(i): done.append(name) for i in range(calls)])
    each = [str(i) for i in range(calls)]
    warm, captured = done[: done.index("begin")], done[done.index("begin") + 1 : done.index("end")]
    # Every call once before the capture, the first once more to see how long it takes.
    assert warm == [*each, "event", "0", "event"]
    assert captured == each * (recorded // calls) and recording.calls == recorded
    done.clear()
    assert recording.replay() == 1e3 * ms / recorded
    assert done == ["event", "replay", "event"]


def command(tmp_path, *more: str) -> list[str]:
    shared = ["--device", "cpu", "--profile", "narrow", "--repeats", "2"]
    return [*shared, "--output", str(tmp_path / "ops.json"), *more]


def test_a_run_prints_a_table_and_writes_rows(tmp_path, fla, capsys):
    arguments = command(tmp_path, "--op", "delta", "--op", "silu_mul", "--case", "choice_3x40")
    assert ops_bench.main(arguments) == 0
    written = json.loads((tmp_path / "ops.json").read_text())
    rows = {(row["op"], row["case"], row["variant"]): row for row in written["rows"]}
    assert [key[0] + " " + key[2] for key in rows] == [
        "delta openjev_fast",
        "delta fla_padded",
        "delta fla_levels",
        "silu_mul openjev_fast",
        "silu_mul torch",
    ]
    for row in rows.values():
        assert row["us"] > 0 and row["rel_l2"] < 5e-3 and row["error"] is None
    assert rows["delta", "choice_3x40", "fla_levels"]["how"] == "cu_seqlens"
    assert rows["delta", "choice_3x40", "fla_padded"]["rows"] == 3 * 40
    assert {"device", "torch", "commit", "command"} <= set(written["meta"])
    ours, padded = (rows["delta", "choice_3x40", name]["us"] for name in (OURS, "fla_padded"))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "fla_padded" in line)
    assert line.split()[3:5] == [str(padded), f"{padded / ours:.2f}"]


def test_a_failure_is_written_printed_and_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fla", None)
    assert ops_bench.main(command(tmp_path, "--op", "delta", "--case", "noul_9")) == 1
    rows = json.loads((tmp_path / "ops.json").read_text())["rows"]
    assert [row["us"] is None for row in rows] == [False, True, True]
    printed = capsys.readouterr()
    assert "FAILED delta noul_9 fla_levels" in printed.err and "FAILED" in printed.out


def test_variants_and_ways_can_be_chosen(tmp_path, fla):
    arguments = command(tmp_path, "--op", "delta", "--case", "choice_3x40")
    assert ops_bench.main([*arguments, "--variant", "fla_levels", "--way", "rectangles"]) == 0
    (row,) = json.loads((tmp_path / "ops.json").read_text())["rows"]
    assert (row["variant"], row["how"], row["rows"]) == ("fla_levels", "rectangles", 19 + 3 * 21)


def test_compiling_ahead_times_and_writes_nothing(tmp_path, fla):
    called = []
    sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = lambda *given, **options: (
        called.append(options) or chunk_gated_delta_rule(*given, **options)
    )
    arguments = command(tmp_path, "--op", "delta", "--case", "choice_3x40", "--variant", "fla_levels")
    assert ops_bench.main([*arguments, "--compile-only"]) == 0
    # A level each, as sequences of their own lengths.
    assert [options["output_final_state"] for options in called] == [True, False]
    assert all("cu_seqlens" in options for options in called)
    assert not (tmp_path / "ops.json").exists()


def test_compiling_ahead_starts_a_process_for_each_of_flas_variants(monkeypatch, capsys):
    started = []

    class Process:
        def __init__(self, command, env, stdout, stderr):
            started.append((command, env["FLA_CACHE_RESULTS"]))
            stdout.write("what it said")

        def wait(self):
            return len(started) - 1

    monkeypatch.setattr(ops_bench, "find_spec", lambda name: object())
    monkeypatch.setattr(ops_bench.subprocess, "Popen", Process)
    ops_bench.compile_ahead(ops_bench.parse(["--case", "noul_9"]))
    assert [command[-1] for command, _ in started] == ["fla_padded", "fla_levels"]
    for command, kept in started:
        parsed = ops_bench.parse(command[2:])
        assert parsed.compile_only and parsed.op == ["delta"] and parsed.case == ["noul_9"] and kept == "0"
    assert "compiling fla_padded ahead failed:\nwhat it said" in capsys.readouterr().err
    ops_bench.compile_ahead(ops_bench.parse(["--variant", OURS]))
    ops_bench.compile_ahead(ops_bench.parse(["--op", "attention"]))
    assert len(started) == 2
