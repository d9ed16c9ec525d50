"""Tokenized prompts to scores on a random-weight model built on the device: what the computation costs."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from forward_work import packed_work, padded_work
from harness import row
from prompt_cases import prompts

from openjev_fast_plugin.console import say, step
from openjev_fast_plugin.engine import CUDA_BUCKET
from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.forward import forward
from openjev_fast_plugin.graphs import CapturedAtOnce, GraphedForward
from openjev_fast_plugin.layout import build_layout
from openjev_fast_plugin.measurement import budget
from openjev_fast_plugin.measurement.originals import ORIGINALS, best_delta_rule, use_delta_rule
from openjev_fast_plugin.measurement.timing import summary
from openjev_fast_plugin.ops import _cuda, linear
from openjev_fast_plugin.ops._choices import OPS, Choice, Product
from openjev_fast_plugin.ops.tree_attention import few_queries_for
from openjev_fast_plugin.packed_layout import pack_layout
from openjev_fast_plugin.padded import PaddedBatch, padded_forward
from openjev_fast_plugin.random_models import VOCABULARY, head, text_config, text_model
from openjev_fast_plugin.tuner import Tuning
from openjev_fast_plugin.weights import Shapes, Weights, take_weights

CASES = ("example", "noul_70", "noul_1500", "choice_8x1000", "choice_32x1056")
MODES = ("fla", "graph", "fast")
# A slow baseline gets fewer rounds: as many as fit.
_SECONDS_PER_CASE = 5.0
# Calls timed with a rest before each.
_RESTED = 20
# Nor is a formulation of the matmul floor timed for long, once it has been timed.
_MS_PER_FORMULATION = 500.0


class Original:
    """The Transformers modules as Open-Jev calls them, every prompt padded to the longest."""

    def __init__(self, profile: str, layers: int | None, device: torch.device, seed: int):
        config = text_config(profile, layers)
        self.model = text_model(config, device, seed)
        self.head = head(config.hidden_size, device, seed)

    def scorer(self, sequences: list[np.ndarray]) -> Callable[[], torch.Tensor]:
        """A call that scores these prompts; padding and the copy to the device are done before."""
        device = self.head.weight.device
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
        ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
        for index, sequence in enumerate(sequences):
            ids[index, : len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
        ids = ids.to(device)
        mask = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()
        each = torch.arange(len(sequences), device=device)

        def run() -> torch.Tensor:
            hidden = self.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            return self.head(hidden[each, lengths - 1].float()).squeeze(-1).cpu()

        return run


class Graph:
    """The graph backend on the modules of an `Original`, which may run as something else once a graph is captured."""

    def __init__(self, original: Original):
        self._model = original.model
        self.graphs = CapturedAtOnce(
            partial(padded_forward, original.model, original.head), original.head.weight.device
        )

    def scorer(self, sequences: list[np.ndarray]) -> Callable[[], torch.Tensor]:
        """A call that pads the prompts, runs them and brings the scores to the host."""
        use_delta_rule(self._model, best_delta_rule())

        def run() -> torch.Tensor:
            return self.graphs(PaddedBatch.of(sequences, pad=0))[0].cpu()

        return run


class Fast:
    """The packed forward; a call starts from token sequences on the host."""

    def __init__(self, profile: str, layers: int | None, device: torch.device, seed: int):
        config = text_config(profile, layers)
        model = text_model(config, device, seed)
        built = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        self.weights = take_weights(model, head(config.hidden_size, device, seed))
        del model
        self.peak_while_fusing = torch.cuda.max_memory_allocated(device) / built
        # As a server does: with the choices there are, and making none.
        self.tuning = Tuning.of(self.weights)
        self.graphs = GraphedForward(partial(forward, self.weights), device)

    def scorer(self, sequences: list[np.ndarray]) -> Callable[[], torch.Tensor]:
        """A call that lays the prompts out, runs them and brings the scores to the host."""

        def run() -> torch.Tensor:
            few = few_queries_for(self.weights.device, self.weights.shapes.heads)
            layout = pack_layout(sequences, CUDA_BUCKET, few, pinned=True)
            return self.graphs(layout)[0][: len(sequences)].cpu()

        return run

    def memory(self, sequences: list[np.ndarray]) -> dict[str, float]:
        """GiB at the most allocated, and in use on the device, over a first answer, its capture and a replay."""
        run = self.scorer(sequences)
        torch.cuda.reset_peak_memory_stats(self.weights.device)
        run()
        self.graphs.wait_until_captured()
        run()
        free, whole = torch.cuda.mem_get_info(self.weights.device)
        peak = torch.cuda.max_memory_allocated(self.weights.device)
        return {"peak_gib": round(peak / 2**30, 2), "used_gib": round((whole - free) / 2**30, 2)}


def timed(
    run: Callable[[], torch.Tensor],
    repeats: int,
    warmups: int,
    between: Callable[[], None] | None = None,
    rest_seconds: float = 0.0,
) -> list[float]:
    """Milliseconds of each call, which ends with its scores on the host; at least one warm-up and three timed.

    between: done untimed after every call, the warm-ups too. rest_seconds: slept before every call of either.
    """

    def calls(most: int, least: int, seconds: float) -> list[float]:
        times: list[float] = []
        while len(times) < least or (len(times) < most and sum(times) < 1e3 * seconds):
            time.sleep(rest_seconds)
            before = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - before))
            if between is not None:
                time.sleep(rest_seconds)
                between()
        return times

    calls(warmups, 1, _SECONDS_PER_CASE / 4)
    return calls(repeats, 3, _SECONDS_PER_CASE)


def _rested(
    run: Callable[[], torch.Tensor], args: argparse.Namespace, floor: MatmulFloor | None
) -> dict[str, float | None]:
    """Medians of a few calls, and of the floor in turn with them, each after a rest; None where none was asked for."""
    if not args.rest_ms:
        return {"rest_ms": None, "rested_p50_ms": None, "rested_floor_ms": None}
    measure = None if floor is None else floor.measure
    times = timed(run, min(args.repeats, _RESTED), args.warmups, measure, args.rest_ms / 1e3)
    return {
        "rest_ms": args.rest_ms,
        "rested_p50_ms": round(statistics.median(times), 3),
        "rested_floor_ms": None if floor is None else round(statistics.median(floor.times[-len(times) :]), 3),
    }


class MatmulFloor:
    """All matmuls of a forward at this many rows and nothing else, each shape at the best of several formulations.

    Four are fixed, further ones are the ways that a table of choices has for the shape; alone, without the op that
    reads a product. Every layer's own weight is read, so none is warm; the last layer counts like the others. They
    are one graph, in the order of the layers: a card at its power limit is slower the longer it works, so the floor
    of a forward is measured in turn with it.
    """

    def __init__(self, weights: Weights, tuning: Tuning, rows: int, repeats: int = 10):
        every = [
            weight
            for layer in weights.layers
            for weight in (layer.mixer.project, layer.mixer.output, layer.gate_up, layer.down)
        ]
        # Kept, since they hold the inputs that the graph reads.
        self._best = best = dict[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]()
        for shape in dict.fromkeys(weight.shape for weight in every):
            members = [weight for weight in every if weight.shape == shape]
            formulations = _formulations(tuning, rows, members[0])
            graphs = [_captured([partial(call, weight) for weight in members]) for call in formulations]
            spans = [_median_replay_ms(graph, repeats) for graph in graphs]
            best[shape] = formulations[spans.index(min(spans))]
        self._graph = _captured([partial(best[weight.shape], weight) for weight in every])
        self.times: list[float] = []

    def measure(self) -> None:
        """Compute them once and note the milliseconds."""
        self.times.append(_replay_ms(self._graph))


def _formulations(
    tuning: Tuning, rows: int, weight: torch.Tensor
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Ways to multiply so many random rows with a weight of this size."""
    features, width = weight.shape
    x = torch.randn(rows, width, device=weight.device).to(weight.dtype)
    x_t = x.t().contiguous().t()
    found: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda w: F.linear(x, w),
        lambda w: linear(x, w),
        lambda w: torch.mm(w, x.t()),
        lambda w: torch.mm(w, x_t.t()),
    ]
    for op in OPS:
        entry = tuning.entries.get(Product(op, rows, features, width))
        if entry is not None and not entry.choice.fused:
            found.append(partial(_product, entry.choice, x))
    return found


def _median_replay_ms(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Of so many replays, or of fewer where they take long."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < _MS_PER_FORMULATION:
        times.append(_replay_ms(graph))
    return statistics.median(times)


def _captured(calls: list[Callable[[], torch.Tensor]]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    graph.replay()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after)


def _product(choice: Choice, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _cuda.compute("linear", choice, x, weight)


@torch.inference_mode()
def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of every case and mode asked for. Fast has its own copy of the weights, all other modes share one.

    busy_ms, families: of one profiled call, kernels that overlap counted once. tflops and gb_s: what
    `forward_work` counts of a mode's rows, over p50. peak_gib, used_gib: of fast, measured case after case while no
    other model is on the device. first_ms: a shape's first answer. rested_p50_ms, rested_floor_ms: with `rest_ms`
    before every call.
    """
    device = torch.device(args.device)
    shapes = Shapes.of(text_config(args.profile, args.layers))
    modes = args.mode or MODES
    cases = {case: prompts(case, VOCABULARY) for case in args.case or CASES}
    fast, memory = None, {}
    if "fast" in modes:
        with step(f"building a random {args.profile} model for fast"):
            fast = Fast(args.profile, args.layers, device, 0)
        say(f"peak memory while fusing: {fast.peak_while_fusing:.3f} of what was there before")
        memory = {case: fast.memory(sequences) for case, sequences in cases.items()}
        # A shape's first answer is timed below.
        fast.graphs.drop()
    original = graph = None
    if set(modes) != {"fast"}:
        with step(f"building a random {args.profile} model for the others"):
            original = Original(args.profile, args.layers, device, 0)
            graph = Graph(original)
    found = []
    for case, sequences in cases.items():
        layout = build_layout(build_forest(sequences), CUDA_BUCKET)
        packed = layout.rows
        floor = None if fast is None else MatmulFloor(fast.weights, fast.tuning, packed)
        scores: dict[str, torch.Tensor] = {}
        for mode in modes:
            floor_ms = None
            first, graphs, replays = None, None, 0
            if mode in ORIGINALS:
                assert original is not None
                use_delta_rule(original.model, mode)
                run, computed = original.scorer(sequences), len(sequences) * max(map(len, sequences))
            else:
                chosen = graph if mode == "graph" else fast
                assert chosen is not None
                run, graphs = chosen.scorer(sequences), chosen.graphs
                computed = packed if chosen is fast else len(sequences) * max(map(len, sequences))
                torch.cuda.synchronize()
                before = time.perf_counter()
                run()
                first = 1e3 * (time.perf_counter() - before)
                if isinstance(graphs, GraphedForward):
                    graphs.wait_until_captured()
                replays = graphs.counts["replays"]
            if mode == "fast":
                assert floor is not None
                times = timed(run, args.repeats, args.warmups, floor.measure)
                floor_ms = round(statistics.median(floor.times[-len(times) :]), 3)
            else:
                times = timed(run, args.repeats, args.warmups)
            rested = _rested(run, args, floor if mode == "fast" else None)
            scores[mode] = run()
            replayed = None if graphs is None else graphs.counts["replays"] > replays
            eager = original.model if original is not None and mode in ORIGINALS else None
            spent = budget.spend(run, device, eager)
            if mode == "fast":
                work = packed_work(shapes, layout)
            else:
                work = padded_work(shapes, len(sequences), max(map(len, sequences)))
            found.append(
                row(
                    profile=args.profile,
                    case=case,
                    mode=mode,
                    scope="forward",
                    **summary(times),
                    rows_asked=sum(map(len, sequences)),
                    rows_computed=computed,
                    kernels=spent.kernels,
                    busy_ms=round(spent.busy_ms, 3),
                    floor_ms=floor_ms,
                    tflops=round(work.tflops(statistics.median(times)), 1),
                    gb_s=round(work.gb_s(statistics.median(times)), 1),
                    **(memory[case] if mode == "fast" else {"peak_gib": None, "used_gib": None}),
                    first_ms=None if first is None else round(first, 3),
                    replayed=replayed,
                    **rested,
                    families={name: round(ms, 3) for name, ms in spent.families.items()},
                    score_difference=round((scores[mode] - scores[modes[0]]).abs().max().item(), 6),
                    samples=len(times),
                )
            )
            say(f"{case} {mode}: {found[-1]}")
            for name, ms in sorted(spent.by_name.items(), key=lambda item: -item[1])[:12]:
                say(f"    {ms:8.3f} ms  {name[:100]}")
    return found
