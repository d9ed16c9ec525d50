"""The fast backend's engine: a loaded Open-Jev model in, logits of whole requests from packed forwards out."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from openjev_fast_plugin import forest, packed_layout, warmup
from openjev_fast_plugin import weights as model_weights
from openjev_fast_plugin.compiled_layers import portable_ops
from openjev_fast_plugin.console import each
from openjev_fast_plugin.forest import build_forest, split_to_fit
from openjev_fast_plugin.forward import forward
from openjev_fast_plugin.graphs import GraphedForward, IdleWork, is_out_of_memory
from openjev_fast_plugin.layout import Bucket, Layout, build_layout
from openjev_fast_plugin.metrics import Metrics
from openjev_fast_plugin.ops import _cuda
from openjev_fast_plugin.ops.tree_attention import few_queries_for
from openjev_fast_plugin.packed_layout import PackedLayout
from openjev_fast_plugin.prefixes import Capacity, Planned, PrefixCache
from openjev_fast_plugin.prompts import PromptEncoder
from openjev_fast_plugin.scheduler import Outcome, Place, Scheduler, Scored
from openjev_fast_plugin.settings import PREFIX_BYTES_VARIABLE, Settings
from openjev_fast_plugin.tuner import IdleTuning, Tuning

# Rows in eights keep cuBLAS on its fast kernels (bench/LOG.md); nodes and reads in eights let requests share graphs.
CUDA_BUCKET = Bucket(rows=8, nodes=8, reads=8)
# What several requests make together has many more sizes; a graph costs more than empty nodes (bench/LOG.md).
SHARED_BUCKET = Bucket(rows=8, nodes=16, reads=16)
MEMINFO = Path("/proc/meminfo")

# A request of more rows is cut into several forwards, between which others get their turn, where that repeats little.
CUT_ROWS = 4096
_MOST_REPEATED = 0.05

# The logit of a noul's no.
_NO = np.zeros(1, np.float32)

Part = list[tuple[int, slice]]
LayoutT = TypeVar("LayoutT", Layout, PackedLayout)

_log = logging.getLogger("openjev_fast")


@dataclass(frozen=True)
class Scores:
    """What an engine returns for one request.

    logits: one float32 tensor on the host per record, of the shape Open-Jev's `DecisionModel.forward` returns.
    input_tokens: sum of the prompts' lengths, as Open-Jev counts them.
    stats: rows_asked, rows_computed, forwards and whatever else an engine reports in an answer's metadata.
    """

    logits: list[torch.Tensor]
    input_tokens: int
    stats: dict[str, Any] = field(default_factory=dict)


def refusal(model: Any) -> str | None:
    """Why this loaded model cannot be taken, naming the value; None when it can."""
    return model_weights.refusal(model.backbone, model.head)


class PackedForward:
    """Packed forwards of one model's weights on its device, as the scheduler runs them: one after the other.

    portable: what `portable_ops` says of the weights. idle_work: done while the device is idle, where forwards are
    captured. prefixes: those kept from one forward to the next; None: none are. best_rows: of a number of rows, it or
    a larger one that is computed faster; None: it.
    """

    def __init__(
        self,
        weights: model_weights.Weights,
        portable: list[str],
        idle_work: IdleWork | None = None,
        prefixes: PrefixCache | None = None,
        best_rows: Callable[[int], int] | None = None,
    ):
        self.weights, self.prefixes = weights, prefixes
        self._best_rows = best_rows or (lambda rows: rows)
        # Of one request's forward, and of one that several share.
        self.bucket = self.shared_bucket = Bucket()
        self.graphs: GraphedForward[Layout | PackedLayout] | None = None
        if not portable:
            # No op synchronises, so a forward can be captured.
            self.bucket, self.shared_bucket = CUDA_BUCKET, SHARED_BUCKET
            run = (
                partial(forward, weights)
                if prefixes is None
                else partial(forward, weights, prefixes=prefixes)
            )
            self.graphs = GraphedForward(run, weights.device, idle_work=idle_work)
            # The thread that captures would keep the weights for as long as shapes are wanted.
            weakref.finalize(self, self.graphs.stop).atexit = False
        # The layouts of the forwards that are run, where somebody asked for them.
        self._observed: list[Layout | PackedLayout] | None = None
        self._thread: ThreadPoolExecutor | None = None
        if weights.device.type == "cpu":
            # Every thread that computes keeps a team of OpenMP threads, and a server has a thread a connection.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="openjev-fast")

    def prepare(
        self,
        sequences: list[np.ndarray],
        roots: list[np.ndarray | None] | None = None,
        *,
        shared: bool = False,
    ) -> Layout | PackedLayout | Planned:
        portable = self.graphs is None
        bucket = self.shared_bucket if shared else self.bucket
        few = few_queries_for(self.weights.device, self.weights.shapes.heads)
        plan = None if self.prefixes is None or roots is None else self.prefixes.plan(sequences, roots)
        if plan is not None and roots is not None:
            kept = [(prefix.place, prefix.rows) for prefix in plan.used]
            keep = [(node, *path) for node, path in zip(plan.node, plan.path, strict=True)]
            layout = self._at_best_rows(
                bucket, lambda bucket: build_layout(plan.forest, bucket, portable, few, kept, keep)
            )
            return Planned(sequences, roots, shared, plan, layout)
        if portable:
            forest = build_forest(sequences)
            return self._at_best_rows(bucket, lambda bucket: build_layout(forest, bucket, few_queries=few))
        pinned = self.weights.device.type == "cuda"
        return self._at_best_rows(
            bucket, lambda bucket: packed_layout.pack_layout(sequences, bucket, few, pinned)
        )

    def _at_best_rows(self, bucket: Bucket, lay_out: Callable[[Bucket], LayoutT]) -> LayoutT:
        """What `lay_out` makes, of the number of rows that is computed fastest."""
        layout = lay_out(bucket)
        best = self._best_rows(layout.rows)
        return layout if best == layout.rows else lay_out(replace(bucket, rows=best))

    def count_rows(self, sequences: list[np.ndarray]) -> int:
        """What these sequences take by themselves, not rounded up: `forest.count_rows`."""
        count = forest.count_rows if self.graphs is None else packed_layout.count_rows
        return count(sequences)

    def kind(self, prepared: Layout | PackedLayout | Planned) -> Hashable | None:
        graphs = self._free_graphs
        # A replay is put behind whatever the stream has to do.
        if graphs is None or isinstance(prepared, Planned) or not graphs.holds(prepared):
            return None
        return prepared.shape_key()

    @property
    def _free_graphs(self) -> GraphedForward[Layout | PackedLayout] | None:
        """What launches a forward that is started, where it can at once: on this thread, nobody else at it."""
        if self.graphs is None or self._thread is not None or self._observed is not None or self.graphs.taken:
            return None
        return self.graphs

    def start(self, prepared: Layout | PackedLayout | Planned) -> Callable[[], Outcome]:
        while isinstance(prepared, Planned):
            assert self.prefixes is not None
            if self.prefixes.current(prepared.plan):
                return self._start_planned(prepared, self.prefixes)
            # What it was to start from has been let go of since, or what it was to compute has been kept.
            prepared = self.prepare(prepared.sequences, prepared.roots, shared=prepared.shared)
        return self._start(prepared)

    def _start_planned(self, planned: Planned, prefixes: PrefixCache) -> Callable[[], Outcome]:
        def run(step: Callable[[], Any]) -> Any:
            try:
                return step()
            except BaseException:
                # Nothing that a failed forward may have written to is read again.
                prefixes.drop()
                raise

        layout, made = run(partial(prefixes.take, planned))
        # The layout that keeps nothing is captured: a capture runs it at a time when its places are another's.
        wait = run(partial(self._start, layout, planned.layout))

        def outcome() -> Outcome:
            found = run(wait)
            # Values that are not finite would spread to every request that begins so.
            prefixes.settle(made, bool(np.isfinite(found.scores).all()))
            return replace(found, reused=planned.plan.rows_reused)

        return outcome

    def _start(self, layout: Layout | PackedLayout, example: Layout | None = None) -> Callable[[], Outcome]:
        if self._thread is not None:
            return self._thread.submit(self._compute, layout, example, torch.get_num_threads()).result
        graphs = self._free_graphs
        # What compiled code has laid out it launches too: milliseconds, without Python's lock.
        if graphs is not None and (isinstance(layout, PackedLayout) or graphs.holds(layout)):
            with torch.inference_mode():
                scores, replayed = graphs(layout, example)
            return lambda: _outcome(scores, layout, replayed)
        # Launching it takes about as long as the device works: not before others are on their way.
        return partial(self._compute, layout, example)

    @contextlib.contextmanager
    def observed(self) -> Iterator[list[Layout | PackedLayout]]:
        """The layouts of the forwards that run inside, in order; none is replayed, or captured for having run."""
        layouts: list[Layout | PackedLayout] = []
        self._observed = layouts
        try:
            yield layouts
        finally:
            self._observed = None

    def release_memory(self) -> None:
        if self.prefixes is not None:
            self.prefixes.release()
        if self.graphs is not None:
            # After it: no graph that reads the memory of prefixes is captured any more.
            self.graphs.drop()
        if self.weights.device.type == "cuda":
            torch.cuda.empty_cache()

    def diagnose(self, error: BaseException) -> Literal["memory", "broken", "request"]:
        if is_out_of_memory(error):
            return "memory"
        if self.weights.device.type != "cuda":
            return "request"
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            return "broken"
        try:
            # After a fault every call fails, whatever the first one was reported as. To wait for the whole device
            # would break a capture that is under way, and fail for that.
            torch.cuda.current_stream(self.weights.device).synchronize()
        except RuntimeError:
            return "broken"
        return "request"

    def counts(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of graphs, kept prefixes and device memory."""
        counters: dict[str, float] = {}
        gauges: dict[str, float] = {}
        if self.graphs is not None:
            counters = {f"graph_{name}": count for name, count in self.graphs.counts.items()}
            gauges["graph_bytes"] = self.graphs.held_bytes
        if self.prefixes is not None:
            counters |= {f"prefix_{name}": count for name, count in self.prefixes.counts.items()}
            gauges["prefixes_held"] = self.prefixes.held
            gauges["prefix_held_bytes"] = self.prefixes.held_bytes
            gauges["prefix_memory_bytes"] = self.prefixes.total_bytes
        if self.weights.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.weights.device)
            gauges["device_memory_used_bytes"] = total - free
            gauges["device_memory_total_bytes"] = total
            gauges["device_memory_allocated_bytes"] = torch.cuda.memory_allocated(self.weights.device)
        return counters, gauges

    def _compute(
        self, layout: Layout | PackedLayout, example: Layout | None = None, threads: int | None = None
    ) -> Outcome:
        """example: as for `GraphedForward`. threads: what the request's thread would compute with."""
        if threads is not None and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        observed = self._observed
        if observed is not None:
            # One that keeps nothing, as they are run again.
            observed.append(layout if example is None else example)
        with torch.inference_mode():
            if self.graphs is not None:
                scores, replayed = (
                    self.graphs(layout, example) if observed is None else (self.graphs.eager(layout), False)
                )
            else:
                assert isinstance(layout, Layout)
                given = () if self.prefixes is None else (self.prefixes,)
                scores, replayed = forward(self.weights, layout.to(self.weights.device), *given), False
            return _outcome(scores, layout, replayed)


class FastEngine:
    """Scores requests of one model whose weights it owns; requests at the same time share forwards.

    model: a loaded `DecisionModel`; its backbone is a `ReleasedBackbone` afterwards. The model owns the engine, not
        the other way round: it has to be kept as long as the engine scores.

    Raises UnsupportedModel, with the model unchanged, where `refusal` has a reason, BuildError where the kernels cannot
    be built, and ValueError where prefixes are to be kept in less than one takes, or, the model taken over, in more
    memory than there is.
    """

    # `score` may be called by several threads at once.
    concurrent = True

    def __init__(self, model: Any, settings: Settings):
        from jev.api import candidate_prompts

        self._model = model = weakref.proxy(model)
        self._encoder = PromptEncoder(model.tokenizer, candidate_prompts)
        shapes = model_weights.check(model.backbone, model.head)
        original = model_weights.text_model(model.backbone)
        self._portable = portable_ops(shapes, original.embed_tokens.weight)
        capacity: Capacity | None = None
        if settings.prefix_bytes:
            try:
                capacity = Capacity.of(
                    shapes,
                    original.embed_tokens.weight.dtype,
                    settings.prefix_bytes,
                    settings.prefix_rows,
                )
            except ValueError as error:
                raise ValueError(f"{PREFIX_BYTES_VARIABLE}: {error}") from error
        if self._portable != ["all"]:
            _cuda.load()
        self._weights = model_weights.take_weights(model.backbone, model.head)
        self._backbone = model_weights.ReleasedBackbone(original.config, self._weights.backbone_tensors())
        model.backbone = self._backbone
        if self._weights.device.type == "cuda":
            # What loading and fusing took beside them.
            torch.cuda.empty_cache()
        # Known once, as every answer asks for them.
        self._head = [self._weights.head_weight.data_ptr(), self._weights.head_bias.data_ptr()]
        self._facts = {
            "kernels": self._kernels(),
            "device": str(self._weights.device),
            "dtype": str(self._weights.dtype).removeprefix("torch."),
        }
        # None where matmuls and attention are computed in the default way alone.
        self.tuning: Tuning | None = None
        if self._portable != ["all"] and settings.tuning != "off":
            self.tuning = Tuning.of(self._weights)
        prefixes: PrefixCache | None = None
        if capacity is not None:
            try:
                prefixes = PrefixCache(
                    shapes, self._weights.dtype, self._weights.device, capacity, settings.prefix_rows
                )
            except RuntimeError as error:
                raise ValueError(
                    f"{PREFIX_BYTES_VARIABLE}: no memory for {capacity.total_bytes} bytes beside the model: {error}"
                ) from error
        default = default_max_rows(self._weights)
        # Not a method: what the scheduler holds must not hold the engine.
        self._max_rows = lambda: settings.max_rows or max(default, model.max_length)
        idle = IdleTuning(self.tuning) if self.tuning is not None and settings.tuning == "idle" else None
        best_rows = None if self.tuning is None else self.tuning.best_rows
        self._packed = PackedForward(self._weights, self._portable, idle, prefixes, best_rows)
        if settings.tuning == "idle" and self._packed.graphs is None:
            _log.warning(
                "openjev-fast: nothing is tuned when idle: forwards are not captured, with %s in PyTorch",
                ", ".join(self._portable),
            )
        self._settings = settings
        self.metrics = Metrics()
        alive = weakref.ref(self)
        self.metrics.watch(lambda: engine._counts() if (engine := alive()) else ({}, {}))
        self.scheduler = Scheduler(
            self._packed,
            self.metrics,
            max_rows=self._max_rows,
            share_rows=settings.share_rows,
            most_requests=settings.queue,
            most_rows=settings.queue_rows,
            wait_seconds=settings.wait_us / 1e6,
        )

    @property
    def weights(self) -> model_weights.Weights:
        """What the forwards of this engine read."""
        return self._weights

    @property
    def max_rows(self) -> int:
        """Rows of one forward: the setting, else what memory allows, but never less than the longest prompt."""
        return self._max_rows()

    @property
    def broken(self) -> str | None:
        """Why nothing is computed any more, None while the device works."""
        return self.scheduler.broken

    def on_broken(self, callback: Callable[[str], None]) -> None:
        """Have `callback(reason)` called once when the device is lost."""
        self.scheduler.on_broken(callback)

    def describe(self) -> dict[str, Any]:
        """Facts for an answer's metadata and for /health; they change with the model's `max_length` and with tuning.

        kernels: what runs the ops; embedding and gathers are PyTorch's in any case. tuned_matmuls: how many products,
        of one number of rows with one size of weight, have a measured choice; tuned_attention: whether its tile sizes
        have; on a GPU only.
        """
        about = {**self._facts, "max_rows": self.max_rows, "share_rows": self._settings.share_rows}
        if self._packed.prefixes is not None:
            about["prefix_bytes"] = self._packed.prefixes.total_bytes
        if self.tuning is not None:
            about["tuned_matmuls"] = len(self.tuning.entries)
            if self.tuning.attention is not None:
                about["tuned_attention"] = not self.tuning.attention.wanted
        return about

    def score(self, records: list[dict[str, Any]]) -> Scores:
        """Logits of every record of a request, computed without autograd. Any number of threads may call it.

        records: as `jev.api.compile_request` returns them, at least one.

        Raises ValueError when a prompt is longer than the model's `max_length`, or longer than `max_rows` alone;
        RuntimeError when the model's backbone or head is no longer what was taken over; exchange.Unavailable when the
        queue is full, exchange.ClientGone when the request's client hung up while it waited, DeviceBroken when the
        device was lost.
        """
        check_unchanged(self._model, self._backbone, self._head)
        with self.scheduler.place() as place:
            sequences = encode(self._encoder, records, self._model.max_length)
            roots = self._roots(records, sequences)
            parts = self._cut(sequences)
            self.scheduler.claim(place, sum(rows for _, rows in parts))
            total = sum(len(sequence) for group in sequences for sequence in group)
            self.metrics.asked(total)
            pieces: list[list[np.ndarray]] = [[] for _ in records]
            forwards: list[Scored] = []
            for part, rows in parts:
                wanted = [sequence for group, span in part for sequence in sequences[group][span]]
                begun = roots and [
                    roots[group] for group, span in part for _ in range(*span.indices(len(sequences[group])))
                ]
                scores = self._score(place, wanted, rows, begun, forwards)
                for group, span in part:
                    count = len(sequences[group][span])
                    pieces[group].append(scores[:count])
                    scores = scores[count:]
        logits = [as_logits(record, found) for record, found in zip(records, pieces, strict=True)]
        stats: dict[str, Any] = {
            "rows_asked": total,
            "rows_computed": sum(each.rows for each in forwards),
            "forwards": len(forwards),
            "shared_with": max(each.requests for each in forwards) - 1,
            "queue_ms": round(1e3 * sum(each.waited for each in forwards), 3),
            "forward_ms": round(1e3 * sum(each.took for each in forwards), 3),
        }
        if roots is not None:
            stats["rows_reused"] = sum(each.reused for each in forwards)
        if self._packed.graphs is not None:
            stats["graph_replays"] = sum(each.replayed for each in forwards)
        return Scores(logits, total, stats)

    def _roots(
        self, records: list[dict[str, Any]], sequences: list[list[np.ndarray]]
    ) -> list[np.ndarray | None] | None:
        """Per record what its prompts say of the state; None where no prefixes are kept."""
        if self._packed.prefixes is None:
            return None
        lengths = self._encoder.state_lengths(records, sequences)
        return [
            group[0][:length] if length else None for group, length in zip(sequences, lengths, strict=True)
        ]

    def warm_up(self, ask: Callable[[], None], lengths: Sequence[int]) -> dict[str, int]:
        """Be ready for the forwards of the requests that `ask` scores, and of one prompt of each of these lengths.

        Each runs once. On a GPU, where measured choices are used, the tile sizes of attention are measured before that
        unless they are known, since layouts depend on them, and the products of at most `tuner.MOST_ROWS` rows that had
        no choice are tuned after it. The graphs of the shapes are captured last. A length stands for those it is a
        round number for. Nothing else may use the device meanwhile.

        Returns counts: forwards, and on a GPU shapes, captured, and where choices are used tuned, failed and attention:
        1 where its tile sizes were measured.
        Raises ValueError for a length of more than `max_rows`, OSError where a choice cannot be kept, and what `ask`
        raises.
        """
        longest = max(lengths, default=0)
        if longest > self.max_rows:
            raise ValueError(f"no forward has {longest} rows: max_rows is {self.max_rows}")
        packed = self._packed
        tuned = {} if self.tuning is None else warmup.tune_attention(self.tuning, self._weights.device)
        with packed.observed() as layouts:
            single = {}
            for length in lengths:
                for count in range(max(1, length - packed.bucket.rows + 1), length + 1):
                    layout = packed.prepare([np.zeros(count, np.int32)])
                    single[layout.shape_key()] = layout
            for layout in each(list(single.values()), "running sizes", "forward"):
                packed.start(layout)()
            ask()
        counts = {"forwards": len(layouts)}
        if packed.graphs is None:
            return counts
        if self.tuning is not None:
            counts |= {**tuned, **warmup.tune_wanted(self.tuning, self._weights.device)}
        bar = partial(each, message="capturing CUDA graphs", unit="shape")
        shapes, captured = packed.graphs.capture_ahead(layouts, bar)
        return {**counts, "shapes": shapes, "captured": captured}

    def _cut(self, sequences: list[list[np.ndarray]]) -> list[tuple[Part, int]]:
        """The forwards of one request, each with the rows it takes by itself."""
        every = [sequence for group in sequences for sequence in group]
        rows, max_rows = self._packed.count_rows(every), self.max_rows
        whole = [(group, slice(0, len(candidates))) for group, candidates in enumerate(sequences)]
        if rows <= min(CUT_ROWS, max_rows):
            return [(whole, rows)]

        def cut(most: int) -> list[tuple[Part, int]]:
            parts = split_to_fit(sequences, most)
            return [
                (
                    part,
                    self._packed.count_rows(
                        [each for group, span in part for each in sequences[group][span]]
                    ),
                )
                for part in parts
            ]

        if max(map(len, every)) <= CUT_ROWS < max_rows:
            parts = cut(CUT_ROWS)
            if sum(rows_of_part for _, rows_of_part in parts) <= (1 + _MOST_REPEATED) * rows:
                return parts
        return cut(max_rows)

    def _score(
        self,
        place: Place,
        sequences: list[np.ndarray],
        rows: int,
        roots: list[np.ndarray | None] | None,
        forwards: list[Scored],
    ) -> np.ndarray:
        """Scores of one part [C]; without memory for it, once more in halves. Appends the forwards it took."""
        try:
            found = [self.scheduler.score(place, sequences, rows, roots)]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found = []
        if not found:
            # Outside the handler: the error is gone, and with it what its frames held.
            half = max(rows // 2, max(map(len, sequences)))
            for ((_, span),) in split_to_fit([sequences], half):
                smaller, begun = sequences[span], roots and roots[span]
                counted = self._packed.count_rows(smaller)
                found.append(self.scheduler.score(place, smaller, counted, begun))
        forwards += found
        return np.concatenate([each.scores for each in found])

    def _counts(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges for `Metrics.watch`; a lost device is asked nothing."""
        counters, gauges = ({}, {}) if self.broken else self._packed.counts()
        return counters, {
            **gauges,
            "requests_inside": self.scheduler.inside,
            "device_lost": bool(self.broken),
        }

    def _kernels(self) -> str:
        """What runs the ops."""
        if self._portable == ["all"]:
            return "pytorch"
        major, minor = torch.cuda.get_device_capability(self._weights.device)
        return ", ".join([f"cuda sm_{major}{minor}", *(f"pytorch {op}" for op in self._portable)])


def _outcome(scores: torch.Tensor, layout: Layout | PackedLayout, replayed: bool) -> Outcome:
    """Waits for the scores of a layout's candidates."""
    return Outcome(scores.cpu().numpy(), layout.rows, replayed)


def encode(encoder: PromptEncoder, records: list[dict[str, Any]], max_length: int) -> list[list[np.ndarray]]:
    """Token sequences of every record's prompts; refuses what Open-Jev's `DecisionModel.forward` does, as it does."""
    if not records:
        raise IndexError("there are no records to score")
    sequences = encoder.encode(records)
    longest = max(len(sequence) for group in sequences for sequence in group)
    if longest > max_length:
        raise ValueError(f"Input length {longest} exceeds max_length={max_length}; no silent truncation")
    return sequences


def check_unchanged(model: Any, backbone: Any, head: list[int]) -> None:
    """RuntimeError unless a model has this backbone still, and its head's parameters are at these addresses."""
    if (
        model.backbone is not backbone
        or [parameter.data_ptr() for parameter in model.head.parameters()] != head
    ):
        raise RuntimeError(
            "the backbone or the head of this model was replaced, converted or moved after a backend took it over; "
            "change the model first, then hand it over"
        )


def as_logits(record: dict[str, Any], scores: Sequence[np.ndarray]) -> torch.Tensor:
    """One float32 logit per option, in memory of its own; a noul's no has logit 0, as Open-Jev defines it.

    scores: of the record's candidates, one array or several that follow each other. Outside inference mode what leaves
    here is an ordinary tensor.
    """
    no = [_NO] if record["kind"] == "noul" else []
    return torch.from_numpy(np.concatenate([*no, *scores]))


def default_max_rows(weights: model_weights.Weights) -> int:
    """Rows whose activations fit in a quarter of the memory there is now, between 4,096 and 262,144."""
    return rows_within(
        free_memory(weights.device) // 4, row_bytes(weights.shapes, weights.embedding.element_size())
    )


def rows_within(memory: int, bytes_per_row: int) -> int:
    """Rows that fit in so many bytes, between 4,096 and 262,144."""
    return max(4096, min(memory // bytes_per_row, 262_144))


def row_bytes(shapes: model_weights.Shapes, item: int) -> int:
    """Bytes of a row's activations at the widest point of a layer; item: bytes of one weight."""
    mixer = shapes.conv_channels + shapes.value_heads * shapes.value_dim
    attention = 2 * (shapes.query_heads + shapes.kv_heads) * shapes.head_dim
    # Live there: residual and norm, the fused projection, and float32 working copies.
    return 4 * shapes.hidden * item + max(3 * shapes.intermediate * item, max(mixer, attention) * (item + 16))


def free_memory(device: torch.device) -> int:
    """Bytes of a device's memory that nobody uses; of the host's, what is to be had without swapping."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_memory()


def _available_memory() -> int:
    """Bytes of host memory to be had without swapping, as Linux estimates them; elsewhere half of what there is."""
    if MEMINFO.exists():
        values = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return int(values["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
