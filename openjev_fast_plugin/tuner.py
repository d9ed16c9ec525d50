"""Finds the fastest way to compute each product of a model on its device, and keeps what it found.

Candidates for a product are `F.linear`, at once or in bands of the weight's rows, our kernel's tiles, and cuBLASLt's
algorithms: what its heuristics propose for either order of the operands, each of the first with its columns in 2 to 4
parts, and, before a residual add, partial sums left to the norm. What bands leave is tried with a few algorithms too.
They are timed together with the op that reads the product, on weights of the model in turn, so that nothing is in the
cache that a forward would not find there and no weight is allocated.

A screening sorts them, a few at a time beside the default way; from the best on they are held against a float32 product
and must repeat their own bits; the first that pass take turns in a final. The default stays unless it is beaten
clearly. All of it is cut into pieces of some milliseconds, so that a server can tune while it is idle.
"""

from __future__ import annotations

import logging
import re
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from openjev_fast_plugin import tables
from openjev_fast_plugin.layout import Layout
from openjev_fast_plugin.ops import _choices, _cuda, add_rms_norm
from openjev_fast_plugin.ops._choices import PYTORCH, Choice, Choices, Heads, Product
from openjev_fast_plugin.ops.linear import (
    FORMS,
    KERNEL_ROWS,
    PARTIALS,
    bands,
    default_choice,
    kernel_tiles,
)
from openjev_fast_plugin.ops.tree_attention import KERNEL_DIMS
from openjev_fast_plugin.packed_layout import PackedLayout
from openjev_fast_plugin.replay_timer import (
    BEATEN_BELOW,
    LEAST_CALLS,
    WARM_ROUNDS,
    GraphTimer,
    Recording,
    Timer,
    calls_for,
)
from openjev_fast_plugin.tables import AttentionFacts, Entry, Facts, Store, TileEntry
from openjev_fast_plugin.tile_tuner import TileTuner, TileTuning
from openjev_fast_plugin.weights import Weights, last_layer_parts, multiplied

# A candidate may err this much more than `F.linear`, in the whole and in its worst element.
LARGEST_RATIO = 1.05
# Candidates of one piece of the screening, and those that come to the final: the best that agree with the product, none
# of which took longer than this share of the default's time.
_GROUP, _FINALISTS, _WORTH_A_FINAL = 6, 6, 1.02
_SCREENING_ROUNDS, _FINAL_ROUNDS = 2, 11
# How far up the fastest number of rows is looked for, and what a further row costs beside the products, of their time.
_ROWS_AHEAD, _COST_OF_A_ROW = 16, 1e-3
# Larger forwards run eagerly, for so long that choosing better is no use; nothing is tuned for them when idle.
MOST_ROWS = 4096
# Algorithms asked of cuBLASLt for one form of a product; fewer for partial sums, which are seldom best, and for what
# bands leave, of which there are several; the first of each come in 2 to 4 parts as well.
_PROPOSALS, _PARTIAL_PROPOSALS, _REST_PROPOSALS = 32, 12, 2
# Elements of a float32 product computed at once for comparison.
_EXACT_ELEMENTS = 1 << 24
_EPS = 1e-6

_log = logging.getLogger("openjev_fast")


class Weight(NamedTuple):
    """What products are computed with: an op of `ops.linear` and a weight's size."""

    op: str
    features: int
    columns: int


class NoWeight(LookupError):
    """A product was asked for with a weight of a size that the model does not have."""


class Ways(Protocol):
    """The ways there are to compute a product on a device."""

    def default(self, product: Product) -> Choice:
        """How it is computed without a choice."""

    def candidates(self, product: Product) -> Iterator[Choice]:
        """Every way that might be faster; the default may be among them."""

    def compute(self, op: str, choice: Choice, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The op in one way. RuntimeError where that way does not take such a product."""


class DeviceWays:
    """What a CUDA device has: PyTorch, our kernel, cuBLASLt."""

    def __init__(self, device: torch.device):
        properties = torch.cuda.get_device_properties(device)
        self._device = device.index
        self._capability = (properties.major, properties.minor)
        self._multiprocessors = properties.multi_processor_count
        self._kernels = _cuda.load()

    def default(self, product: Product) -> Choice:
        return default_choice(product, self._capability, self._multiprocessors)

    def candidates(self, product: Product) -> Iterator[Choice]:
        op, sizes = product.op, (product.rows, product.features, product.columns)
        yield PYTORCH
        if product.rows > KERNEL_ROWS:
            for band in bands(product.features, self._multiprocessors):
                yield Choice("pytorch", band=band)
                yield from self._bands_with_algorithms(product, band)
        if self._capability == (9, 0):
            yield from (Choice("kernel", tile=tile, parts=parts) for tile, parts in kernel_tiles(*sizes))
            if op == "linear_silu_mul":
                for tile, parts in kernel_tiles(*sizes, silu=True):
                    yield Choice("kernel", tile=tile, parts=parts, fused=True)
        for partials in (1, *PARTIALS) if op == "linear_update" else (1,):
            if product.features % 8 == 0 and product.columns % (8 * partials) == 0:
                most = _PROPOSALS if partials == 1 else _PARTIAL_PROPOSALS
                for form in range(FORMS):
                    yield from self._algorithms(sizes, form, partials, most)

    def compute(self, op: str, choice: Choice, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _cuda.compute(op, choice, x, weight)

    def takes(self, product: Product, choice: Choice) -> bool:
        """Whether a choice that comes from a file can compute a product here."""
        op, sizes = product.op, (product.rows, product.features, product.columns)
        if (choice.partials > 1 and op != "linear_update") or (choice.fused and choice.way != "kernel"):
            return False
        if choice.band:
            if choice.way != "pytorch" or choice.partials > 1 or choice.band >= product.features:
                return False
            rest = (product.rows, product.features % choice.band, product.columns)
            return not choice.algorithm or self._accepts(rest, choice, product.features)
        if choice.way == "kernel":
            tiles = kernel_tiles(*sizes, silu=choice.fused)
            fits = choice.fused <= (op == "linear_silu_mul") and (choice.tile, choice.parts) in tiles
            return fits and self._capability == (9, 0)
        return choice.way != "cublaslt" or self._accepts(sizes, choice)

    def _bands_with_algorithms(self, product: Product, band: int) -> Iterator[Choice]:
        """These bands, with what they leave computed by one algorithm into its columns of the product."""
        rest = product.features % band
        if not rest or rest % 8 or product.features % 8 or product.columns % 8:
            return
        for form in range(FORMS):
            sizes = (product.rows, rest, product.columns)
            for one in self._algorithms(sizes, form, 1, _REST_PROPOSALS, product.features):
                yield replace(one, way="pytorch", band=band)

    def _accepts(self, sizes: tuple[int, int, int], choice: Choice, out_stride: int = 0) -> bool:
        """Whether cuBLASLt has the algorithm for such a product. out_stride: as for `_algorithms`."""
        numbers = (choice.form, choice.partials, choice.algorithm, choice.workspace, out_stride)
        try:
            return self._kernels["cublaslt_accepts"](self._device, *sizes, *numbers)
        except RuntimeError:
            # Numbers that are none of a product's: a form or a size there is no such algorithm for.
            return False

    def _algorithms(
        self, sizes: tuple[int, int, int], form: int, partials: int, most: int, out_stride: int = 0
    ) -> Iterator[Choice]:
        """out_stride: elements from one row of the product to the next; 0: as many as it has features."""
        found = self._kernels["cublaslt_algorithms"](self._device, *sizes, form, partials, most, out_stride)
        for *algorithm, workspace in found.tolist():
            yield Choice(
                "cublaslt", form=form, partials=partials, workspace=workspace, algorithm=tuple(algorithm)
            )


def facts_of(device: torch.device) -> Facts:
    """What the choices made on a CUDA device depend on."""
    version = str(_cuda.load()["cublaslt_version"]())
    return Facts(torch.cuda.get_device_name(device), driver_version(), version, tables.kernels_digest())


def attention_facts_of(device: torch.device) -> AttentionFacts:
    """What the tile size of attention on a CUDA device depends on."""
    return AttentionFacts(torch.cuda.get_device_name(device), driver_version(), tables.attention_digest())


def driver_version(stated: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Version of NVIDIA's driver, "unknown" where neither its file nor nvidia-smi is there to say it."""
    try:
        text = stated.read_text()
    except OSError:
        command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        try:
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError):
            text = ""
    found = re.search(r"\b\d+\.\d+(?:\.\d+)*\b", text)
    return found.group() if found else "unknown"


def model_weights(weights: Weights) -> dict[Weight, list[torch.Tensor]]:
    """Every weight that a forward multiplies with, by op and size; the slices its last layer takes, of every layer."""
    found: dict[Weight, list[torch.Tensor]] = {}
    last = type(weights.layers[-1].mixer)
    for layer in weights.layers:
        every = list(multiplied(layer))
        if isinstance(layer.mixer, last):
            parts = layer.mixer.project.split(last_layer_parts(weights.shapes, layer.mixer))
            every += [("linear", part) for part in parts]
        for op, weight in every:
            found.setdefault(Weight(op, *weight.shape), []).append(weight)
    return found


def forward_counts(weights: Weights) -> Counter[Weight]:
    """How often a forward multiplies with a weight of a size, its last layer counted like the others."""
    return Counter(Weight(op, *weight.shape) for layer in weights.layers for op, weight in multiplied(layer))


@dataclass
class Tuner:
    """Tunes the products of some weights.

    weights: by op and size, each list as many as there are. ways, timer: of the device they are on.
    refused: ways of the product tuned last that the device refused or that erred too much, with the reason.

    Everything runs with the device current and under `torch.inference_mode()`.
    """

    weights: Mapping[Weight, Sequence[torch.Tensor]]
    ways: Ways
    timer: Timer
    refused: list[tuple[Choice, str]] = field(default_factory=list)

    def tune(self, product: Product) -> Generator[None, None, Entry]:
        """Find the best way for a product; yields after every piece of work, at most some milliseconds each.

        Raises NoWeight where the model has no weight of that size.
        """
        task, default = self._task(product), self.ways.default(product)
        left_out, self.refused = {default}, []
        bars = task.bars()
        error = self._error(task, default, bars)
        if error is None:
            _log.error("openjev-fast: %s by %s errs: %s", product, default, self.refused[-1][1])
            # Compared with what the bars are made of, from here on.
            default, error = PYTORCH, bars.l2
        yield
        base = task.record(default, LEAST_CALLS)
        for _ in range(WARM_ROUNDS):
            (us,) = self.timer.round([base])
            yield
        calls = calls_for(us)
        base = task.record(default, calls)
        ratios: dict[Choice, float] = {}
        for group in _groups(self.ways.candidates(product), {default, *left_out}):
            ratios |= self._screen(task, base, group, calls)
            yield
        finalists, errors = {default: base}, {default: error}
        for choice in sorted(ratios, key=lambda choice: ratios[choice]):
            if len(finalists) > _FINALISTS or ratios[choice] > _WORTH_A_FINAL:
                break
            error = self._error(task, choice, bars)
            if error is not None:
                finalists[choice], errors[choice] = task.record(choice, calls), error
            yield
        times: dict[Choice, list[float]] = {choice: [] for choice in finalists}
        for _ in range(_FINAL_ROUNDS):
            for choice, us in zip(finalists, self.timer.round(list(finalists.values())), strict=True):
                times[choice].append(us)
            yield
        medians = {choice: statistics.median(spans) for choice, spans in times.items()}
        chosen = min(medians, key=lambda choice: medians[choice])
        if medians[chosen] >= BEATEN_BELOW * medians[default]:
            chosen = default
        return Entry(
            chosen,
            us=round(medians[chosen], 3),
            default_us=round(medians[default], 3),
            rel_l2=float(f"{errors[chosen]:.4g}"),
            pytorch_rel_l2=float(f"{bars.l2:.4g}"),
        )

    def measure(
        self, product: Product, choices: Sequence[Choice], rounds: int, alone: bool = False
    ) -> list[tuple[float, float]]:
        """Median microseconds and relative L2 error of each way, timed in turn; for benchmarks.

        alone: without the op that reads the product, except one that a way has fused.
        """
        task = self._task(product)
        (us,) = self.timer.round([task.record(choices[0], LEAST_CALLS, alone)])
        recordings = [task.record(choice, calls_for(us), alone) for choice in choices]
        for _ in range(WARM_ROUNDS):
            self.timer.round(recordings)
        spans = zip(*(self.timer.round(recordings) for _ in range(rounds)), strict=True)
        errors = [task.errors(task.product_by(choice))[0] for choice in choices]
        return list(zip(map(statistics.median, spans), errors, strict=True))

    def _task(self, product: Product) -> _Task:
        weight = Weight(product.op, product.features, product.columns)
        if not self.weights.get(weight):
            raise NoWeight(f"no weight of the model is for {product}")
        return _Task(product, self.weights[weight], self.ways, self.timer)

    def _screen(
        self, task: _Task, base: Recording, group: Sequence[Choice], calls: int
    ) -> dict[Choice, float]:
        """Each candidate's best time over the default's in the same round."""
        recordings: dict[Choice, Recording] = {}
        for choice in group:
            try:
                recordings[choice] = task.record(choice, calls)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.refused.append((choice, next(iter(str(error).splitlines()), "")))
        rounds = []
        for _ in range(_SCREENING_ROUNDS if recordings else 0):
            first, *others = self.timer.round([base, *recordings.values()])
            rounds.append([us / first for us in others])
        return dict(zip(recordings, map(min, zip(*rounds, strict=True)), strict=True))

    def _error(self, task: _Task, choice: Choice, bars: _Bars) -> float | None:
        """Relative L2 error of a way that agrees with the product and repeats its bits; else None, noted as refused."""
        first, second = task.product_by(choice), task.product_by(choice)
        if not torch.equal(first, second):
            self.refused.append((choice, "two calls on the same inputs differ"))
            return None
        l2, largest = task.errors(first)
        # NaN is no less than anything.
        if l2 <= LARGEST_RATIO * bars.l2 and largest <= LARGEST_RATIO * bars.largest:
            return l2
        self.refused.append(
            (
                choice,
                f"relative L2 {l2:.3g}, largest error {largest:.3g}, where F.linear has {bars.l2:.3g} and "
                f"{bars.largest:.3g}",
            )
        )
        return None


class _Bars(NamedTuple):
    """Errors of `F.linear` against a float32 product: relative L2, and the largest of an element."""

    l2: float
    largest: float


class _Task:
    """One product: its inputs, and calls on the model's weights in turn."""

    def __init__(self, product: Product, weights: Sequence[torch.Tensor], ways: Ways, timer: Timer):
        self._product, self._weights, self._ways, self._timer = product, weights, ways, timer
        self._next = 0
        device = weights[0].device
        draw = torch.Generator(device).manual_seed(product.rows)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=device).to(torch.bfloat16)

        self._x = normal(product.rows, product.columns)
        if product.op == "linear_update":
            self._residual = normal(product.rows, product.features)
            self._norm = normal(product.features)
        self._exact: torch.Tensor | None = None

    def record(self, choice: Choice, calls: int, alone: bool = False) -> Recording:
        """Calls of the product and of what reads it, on the weights after those of the recording before."""
        turn = [self._weights[(self._next + i) % len(self._weights)] for i in range(calls)]
        self._next += calls
        call = self._product_alone if alone else self._call
        return self._timer.record([partial(call, choice, weight) for weight in turn])

    def _call(self, choice: Choice, weight: torch.Tensor) -> Any:
        found = self._ways.compute(self._product.op, choice, self._x, weight)
        if self._product.op == "linear_update":
            return add_rms_norm(self._residual, found, self._norm, _EPS)
        return found

    def _product_alone(self, choice: Choice, weight: torch.Tensor) -> torch.Tensor:
        op = self._product.op if choice.fused else "linear"
        return self._ways.compute(op, choice, self._x, weight)

    def product_by(self, choice: Choice) -> torch.Tensor:
        """What a way computes of the first weight, float32; partial sums are added up."""
        found = self._ways.compute(self._product.op, choice, self._x, self._weights[0]).float()
        return found.sum(0) if found.dim() == 3 else found

    def bars(self) -> _Bars:
        return _Bars(*self.errors(self.product_by(PYTORCH)))

    def errors(self, found: torch.Tensor) -> tuple[float, float]:
        """Relative L2 norm and largest element of the difference to a float32 product; infinite for a wrong shape."""
        if self._exact is None:
            self._exact = self._in_float32()
        if found.shape != self._exact.shape:
            return float("inf"), float("inf")
        difference = found - self._exact
        l2 = (difference.norm() / self._exact.norm()).item()
        return l2, difference.abs().max().item()

    def _in_float32(self) -> torch.Tensor:
        """The product summed in float32 and not rounded, a piece of the weight at a time."""
        x, weight = self._x.float(), self._weights[0]
        pieces = weight.split(max(1, _EXACT_ELEMENTS // weight.shape[1]))
        exact = torch.cat([x @ piece.float().t() for piece in pieces], dim=1)
        if self._product.op != "linear_silu_mul":
            return exact
        gate, up = exact.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up


def _groups(candidates: Iterable[Choice], left_out: set[Choice]) -> Iterator[list[Choice]]:
    """Candidates, each once and some at a time, without those left out."""
    group: list[Choice] = []
    seen = set(left_out)
    for choice in candidates:
        if choice not in seen:
            seen.add(choice)
            group.append(choice)
        if len(group) == _GROUP:
            yield group
            group = []
    if group:
        yield group


class Tuning:
    """A model's products on its device: the choices in force, where they are kept, and the tuner for those to come.

    takes: whether the device takes a choice. counts: products of a forward, by op and weight. What the shipped and the
    user's own table have for this device is in force when this returns; entries: those, and what is tuned later.
    attention: the tile sizes of its attention; None where no kernel takes its heads.
    """

    def __init__(
        self,
        tuner: Tuner,
        choices: Choices,
        store: Store[Facts, Product, Entry],
        takes: Callable[[Product, Choice], bool],
        counts: Mapping[Weight, int],
        attention: TileTuning | None = None,
    ):
        self.tuner, self.choices, self.store, self.counts = tuner, choices, store, counts
        self.attention = attention
        known = store.known()
        unfit = {product: entry for product, entry in known.items() if not takes(product, entry.choice)}
        if unfit:
            _log.warning(
                "openjev-fast: %d tuned matmuls are left out, the device does not take them, such as %s in %s",
                len(unfit),
                next(iter(unfit)),
                store.path,
            )
        self.entries = {product: entry for product, entry in known.items() if product not in unfit}
        for product, entry in self.entries.items():
            choices.choose(product, entry.choice, tuner.ways.default(product))
        self._forward_us = self._time_of_forwards()

    @classmethod
    def of(cls, weights: Weights) -> Tuning:
        """The tuning of bfloat16 weights on a CUDA device; the device's ops look the choices up from now on."""
        device = weights.device
        # Models on one device share what is chosen there.
        choices = _choices.installed(device.index)
        if choices is None:
            choices = Choices()
        with torch.cuda.device(device):
            ways = DeviceWays(device)
            timer = GraphTimer(device)
            tuner = Tuner(model_weights(weights), ways, timer)
            store: Store[Facts, Product, Entry] = Store(facts_of(device), tables.stored_in())
            attention, heads = None, weights.shapes.heads
            if heads.head_dim in KERNEL_DIMS:
                kept: Store[AttentionFacts, Heads, TileEntry] = Store(
                    attention_facts_of(device), tables.stored_in()
                )
                attention = TileTuning(TileTuner(heads, device, timer), choices, kept)
            tuning = cls(tuner, choices, store, ways.takes, forward_counts(weights), attention)
        _choices.install(device.index, choices)
        return tuning

    def products(self, rows: Iterable[int]) -> list[Product]:
        """Every product of forwards with these numbers of rows, or of read rows."""
        return [
            Product(weight.op, count, weight.features, weight.columns)
            for count in rows
            for weight in self.tuner.weights
        ]

    def best_rows(self, rows: int) -> int:
        """So many rows or somewhat more, whichever a forward computes fastest by what was known at the start.

        cuBLAS is up to 4 % faster at some numbers of rows than at 8 less (bench/LOG.md). What is tuned later changes
        nothing here: a request is laid out alike as long as the model is served.
        """
        if rows not in self._forward_us or rows > MOST_ROWS:
            return rows
        near = (count for count in self._forward_us if rows <= count <= min(rows + _ROWS_AHEAD, MOST_ROWS))
        return min(near, key=lambda count: self._forward_us[count] * (1 + _COST_OF_A_ROW * (count - rows)))

    def _time_of_forwards(self) -> dict[int, float]:
        """Microseconds of all products of a forward, by number of rows, where all of them were measured."""
        found = {}
        for rows in {product.rows for product in self.entries}:
            products = {weight: Product(weight.op, rows, *weight[1:]) for weight in self.counts}
            if all(product in self.entries for product in products.values()):
                found[rows] = sum(
                    self.counts[weight] * self.entries[product].us for weight, product in products.items()
                )
        return found

    def tune(self, product: Product) -> Generator[None, None, Entry]:
        """Tune a product, put the choice in force and keep it; yields as `Tuner.tune` does.

        OSError where it could not be kept; it is in force all the same.
        """
        entry = yield from self.tuner.tune(product)
        self.entries[product] = entry
        self.choices.choose(product, entry.choice, self.tuner.ways.default(product))
        self.store.add({product: entry})
        return entry


class IdleTuning:
    """Tunes what forwards asked for and had no choice, piece by piece: `graphs.IdleWork` of a `GraphedForward`.

    Attention comes first: other tiles are other shapes, and their graphs are to be captured once.
    """

    def __init__(self, tuning: Tuning):
        self._tuning = tuning
        self._running: tuple[Product | Heads, Generator[None, None, Entry | TileEntry]] | None = None
        self._given_up: set[Product | Heads] = set()

    def step(self) -> bool:
        """Do a piece; False where there was none to do. What cannot be tuned is logged and left."""
        if self._running is None:
            wanted = self._next()
            if wanted is None:
                return False
            self._running = wanted, self._tune(wanted)
        wanted, running = self._running
        try:
            next(running)
        except StopIteration as done:
            self._running = None
            _log.info("openjev-fast: %s: %s", wanted, done.value)
        except (RuntimeError, OSError, NoWeight) as error:
            self._running = None
            self._given_up.add(wanted)
            _log.warning("openjev-fast: %s was not tuned or not kept: %s", wanted, error)
        return True

    def state(self, inputs: Layout | PackedLayout) -> tuple[int, ...] | None:
        """Changes when the way of a product of a forward of these inputs does; None: attention has other tiles now."""
        attention = self._tuning.attention
        if attention is not None and not attention.lays_out(inputs):
            return None
        return self._tuning.choices.state((inputs.rows, inputs.reads))

    def _tune(self, wanted: Product | Heads) -> Generator[None, None, Entry | TileEntry]:
        if isinstance(wanted, Heads):
            assert self._tuning.attention is not None
            return self._tuning.attention.tune()
        return self._tuning.tune(wanted)

    def _next(self) -> Product | Heads | None:
        attention = self._tuning.attention
        if attention is not None and attention.wanted and attention.heads not in self._given_up:
            return attention.heads
        wanted = list(self._tuning.choices.wanted)
        return next(
            (one for one in wanted if one not in self._given_up and one.rows <= MOST_ROWS),
            None,
        )
