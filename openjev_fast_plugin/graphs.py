"""CUDA Graphs of a forward: captured per shape, replayed, evicted by count and memory.

A graph launches a whole forward at once; run eagerly, the host enqueues its hundreds of kernels one by one.
`GraphedForward` answers a shape seen for the first time eagerly and captures it when the device is idle, so no request
ever waits for its own capture; a server that is never idle captures what is asked for often, in a small part of its
time. `CapturedAtOnce` captures a shape while its first request waits, and needs no thread. What else makes forwards
faster when the device is idle is `IdleWork`.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

_log = logging.getLogger("openjev_fast")


# What is due when no shape is: a piece of the idle work.
_WORK: tuple[Any, ...] = ()
# A busy device rests from capturing this many times as long as the last capture took.
_REST = 3
# How long the end of the process waits for a capture, or a piece of idle work, that is under way.
_LAST_SECONDS = 5.0


class Inputs(Protocol):
    """What a forward reads, on the host: everything that changes between two replays of a shape fits one tensor."""

    @property
    def rows(self) -> int:
        """How many rows the forward computes."""

    def shape_key(self) -> tuple[Any, ...]:
        """What a captured graph depends on."""

    def pack(self, pinned: bool = False) -> torch.Tensor:
        """Everything the device reads, in one tensor on the host; pinned: in page-locked memory."""

    def unpack(self, packed: torch.Tensor) -> Any:
        """What the forward reads, over the values in `packed`, which `pack` of inputs of the same shape filled."""


InputsT = TypeVar("InputsT", bound=Inputs)
# Computes scores [C] float32 from unpacked inputs on the device.
Forward = Callable[[Any], torch.Tensor]


class IdleWork(Protocol):
    """Work done piece by piece while the device is idle, whose results forwards read.

    Both are called by whoever holds the device, the device current, under `torch.inference_mode()`.
    """

    def step(self) -> bool:
        """Do a piece of some milliseconds; False where there was none to do."""

    def state(self, inputs: Any) -> Hashable:
        """What a forward of these inputs reads of the results: a graph captured at another state is outdated.

        None: forwards no longer have such inputs, and their graph is let go.
        """


@dataclass
class _Captured:
    """A graph with the buffers it reads and writes.

    bytes: device memory that is free again once it is let go, and the allocator's cache emptied.
    inputs, state: what it was captured for, and at which state of the idle work.
    """

    graph: torch.cuda.CUDAGraph
    packed: torch.Tensor
    scores: torch.Tensor
    bytes: int
    inputs: Any = None
    state: Hashable = None


# Held by whoever captures or waits for a whole device: each model of a process locks its device for itself alone, the
# captures of all share a stream, and a device that is synchronised meanwhile breaks a capture of whichever thread.
ONE_CAPTURE = threading.Lock()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory; CUDA itself and PyTorch's allocator say it differently."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)
    )


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Every capture's: a pool hands memory on within one stream alone, and cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)


class CapturedGraphs(Generic[InputsT]):
    """The graphs of one forward on one CUDA device; when to capture is what the classes below decide.

    forward: the computation; it must not synchronise.
    device: where it runs.
    most_graphs, most_bytes: the least recently used graphs are dropped beyond either; the newest one stays.
    most_rows: larger inputs are never captured; their kernels run longer than it takes to enqueue them.
    one_pool: what kernels write between them lies in one memory pool for all graphs, of which no two may run at a time:
        whoever replays does so on one stream of the device. Hundreds take little more than the largest where that is
        captured first; growing ones may take several times that. The memory is free again with the last of them only.
        Without, each graph has its own, which goes with it.

    Methods with an underscore are called with `_device_lock` held.
    """

    device_type = "cuda"

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        *,
        most_graphs: int = 64,
        most_bytes: int = 4 << 30,
        most_rows: int = 8192,
        one_pool: bool = False,
    ):
        self._forward = forward
        self._device = device
        self._one_pool = one_pool
        # Of the one pool: torch's handle, and device memory that captures have put into it, with what else the process
        # took meanwhile; of no use without graphs.
        self._pool: Any = None
        self._pool_bytes = 0
        self._most_graphs, self._most_bytes, self._most_rows = most_graphs, most_bytes, most_rows
        self._graphs: OrderedDict[tuple[Any, ...], _Captured] = OrderedDict()
        # Held by whoever uses the device.
        self._device_lock = threading.Lock()
        self.counts = {"replays": 0, "eager": 0, "captures": 0, "evictions": 0}

    def holds(self, inputs: InputsT) -> bool:
        """Whether these inputs would be replayed at once: their shape is captured, and none other is being captured."""
        return inputs.shape_key() in self._graphs and not self.taken

    @property
    def taken(self) -> bool:
        """Whether somebody is launching or capturing, so that a forward would wait."""
        return self._device_lock.locked()

    def drop(self) -> None:
        """Let go of every graph."""
        with self._device_lock:
            self._graphs.clear()

    @property
    def held_bytes(self) -> int:
        """Device memory of all captured graphs."""
        if not self._graphs:
            return 0
        return self._pool_bytes + sum(captured.bytes for captured in list(self._graphs.values()))

    def _replay(self, inputs: InputsT) -> torch.Tensor | None:
        """Scores by replay, None where the shape has not been captured."""
        key = inputs.shape_key()
        captured = self._graphs.get(key)
        if captured is None:
            return None
        self._graphs.move_to_end(key)
        captured.packed.copy_(self._pinned(inputs), non_blocking=True)
        captured.graph.replay()
        self.counts["replays"] += 1
        # The graph's own output is overwritten by its next replay.
        return captured.scores.clone()

    def _eager(self, inputs: InputsT) -> torch.Tensor:
        """Scores by running the forward."""
        return self._forward(inputs.unpack(self._pinned(inputs).to(self._device, non_blocking=True)))

    def _capture(self, inputs: InputsT) -> None:
        """Capture a shape that has just run eagerly: libraries and kernels are not to be initialised under capture."""
        captured = self._captured(inputs)
        if self._graphs and self._pool_bytes > self._most_bytes:
            # A pool does not shrink while one of its graphs is there.
            self.counts["evictions"] += len(self._graphs)
            self._graphs.clear()
            del captured
            captured = self._captured(inputs)
        self._graphs[inputs.shape_key()] = captured
        self.counts["captures"] += 1
        while len(self._graphs) > 1 and (
            len(self._graphs) > self._most_graphs or self.held_bytes > self._most_bytes
        ):
            self._graphs.popitem(last=False)
            self.counts["evictions"] += 1

    def _captured(self, inputs: InputsT) -> _Captured:
        """Raises torch.OutOfMemoryError, whoever had none."""
        with ONE_CAPTURE:
            if not (self._one_pool and self._graphs):
                # A pool goes with the last of its graphs, and is never taken again: its memory waits in the cache.
                torch.cuda.empty_cache()
            try:
                return self._captured_in_what_is_free(inputs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # A capture cannot take what the allocator keeps for eager forwards. Where it need not, that stays: the next
            # of them would have to ask the device for all of it again, which takes milliseconds.
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            try:
                return self._captured_in_what_is_free(inputs)
            except torch.AcceleratorError as error:
                if is_out_of_memory(error):
                    raise torch.OutOfMemoryError(str(error)) from error
                raise

    def _captured_in_what_is_free(self, inputs: InputsT) -> _Captured:
        """Called with `ONE_CAPTURE` held."""
        packed = inputs.pack().to(self._device)
        on_device = inputs.unpack(packed)
        if not (self._one_pool and self._graphs):
            self._pool, self._pool_bytes = torch.cuda.graph_pool_handle(), 0
        torch.cuda.synchronize(self._device)
        free, reserved = torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # torch.cuda.graph would empty the allocator's cache before every capture.
            with torch.cuda.stream(_capture_stream(self._device)):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    scores = self._forward(on_device)
                finally:
                    graph.capture_end()
            torch.cuda.synchronize(self._device)
        finally:
            grown = max(torch.cuda.memory_reserved(self._device) - reserved, 0)
            if self._one_pool:
                self._pool_bytes += grown
        used = max(free - torch.cuda.mem_get_info(self._device)[0], 0)
        return _Captured(graph, packed, scores, max(used - grown, 0) if self._one_pool else used)

    def _mark(self) -> Callable[[], bool]:
        """Returns what tells whether the device has done all that was launched until now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.query

    def _pinned(self, inputs: InputsT) -> torch.Tensor:
        return inputs.pack(pinned=True)

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device)


class GraphedForward(CapturedGraphs[InputsT]):
    """Answers a new shape eagerly, and captures it when the device is idle.

    idle_seconds: how long the device has had nothing to do before a capture, or a piece of idle work, starts.
    idle_work: done after the captures, from the next eager forward on until nothing is left. An outdated graph is
        replayed until it has been captured again.
    often: how many times a shape was asked for when it is captured although the device is busy.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        *,
        most_graphs: int = 256,
        most_bytes: int = 4 << 30,
        most_rows: int = 1024,
        idle_seconds: float = 0.05,
        often: int = 8,
        idle_work: IdleWork | None = None,
    ):
        super().__init__(
            forward,
            device,
            most_graphs=most_graphs,
            most_bytes=most_bytes,
            most_rows=most_rows,
            one_pool=True,
        )
        self._idle_seconds, self._often = idle_seconds, often
        # Shapes to capture, newest last, each with inputs on the host that have the shape, and how often it was asked.
        self._wanted: OrderedDict[tuple[Any, ...], tuple[InputsT, int]] = OrderedDict()
        self._resting_until = 0.0
        self._idle_work, self._work_left = idle_work, False
        # Wakes the capturing thread.
        self._changed = threading.Condition()
        # When the device was last seen to have something to do; callers who are at it; whether all of it is done.
        self._last_use, self._callers, self._done = time.monotonic(), 0, lambda: True
        self._capturing: threading.Thread | None = None
        self._closed = False
        _CLOSED_AT_EXIT.add(self)

    def __call__(self, inputs: InputsT, example: InputsT | None = None) -> tuple[torch.Tensor, bool]:
        """Scores [C] of inputs on the host, and whether a graph was replayed.

        example: of the same shape, to capture it with instead: a forward of it runs before, at some later time.
        """
        with self._using(), self._device_lock, torch.inference_mode(), self._on_device():
            replayed = self._replay(inputs)
            if replayed is None:
                scores = self._eager(inputs)
                self.counts["eager"] += 1
            else:
                scores = replayed
            self._done = self._mark()
        with self._changed:
            if replayed is None:
                self._work_left = self._idle_work is not None
                if inputs.rows <= self._most_rows:
                    key = inputs.shape_key()
                    asked = self._wanted.pop(key, (inputs, 0))[1] + 1
                    self._wanted[key] = (inputs if example is None else example, asked)
                    if len(self._wanted) > self._most_graphs:
                        self._wanted.popitem(last=False)
                if self._wanted or self._work_left:
                    self._start_capturing()
                    # What was asked for often is due, however long the device is not going to be idle.
                    self._changed.notify_all()
        return scores, replayed is not None

    def eager(self, inputs: InputsT) -> torch.Tensor:
        """Scores [C] by running the forward, noted for no capture. Waits for the device."""
        with self._using(), self._device_lock, torch.inference_mode(), self._on_device():
            scores = self._eager(inputs)
            self._done = self._mark()
            return scores

    @contextmanager
    def _using(self) -> Iterator[None]:
        """A capture or a piece of work that is under way when this is entered is the last until it is left."""
        with self._changed:
            self._callers += 1
        try:
            yield
        finally:
            with self._changed:
                self._callers -= 1
                self._last_use = time.monotonic()

    def capture_ahead(
        self, every: Sequence[InputsT], bar: Callable[[list[InputsT]], Iterable[InputsT]]
    ) -> tuple[int, int]:
        """Capture the shapes of these inputs, the last ones where they are more than are kept; the largest first.

        bar: shows the progress over a list. Returns how many shapes there are, and how many have their graph then.
        """
        shapes = {inputs.shape_key(): inputs for inputs in every}
        fitting = [inputs for inputs in shapes.values() if inputs.rows <= self._most_rows]
        short = False
        for inputs in bar(sorted(fitting[-self._most_graphs :], key=lambda each: -each.rows)):
            try:
                self.capture(inputs)
            except torch.OutOfMemoryError:
                # Smaller ones may fit.
                if not short:
                    _warn_of_memory(inputs)
                short = True
        return len(shapes), sum(key in self._graphs for key in shapes)

    def capture(self, inputs: InputsT) -> None:
        """Capture the shape of inputs now, unless its graph is there and not outdated. Waits for the device."""
        with self._device_lock, torch.inference_mode(), self._on_device():
            key = inputs.shape_key()
            if key in self._graphs and not self._outdated(self._graphs[key]):
                return
            # The memory of an outdated one is free for the new.
            self._graphs.pop(key, None)
            # Of before: another model may change what both read meanwhile.
            state = None if self._idle_work is None else self._idle_work.state(inputs)
            self._eager(inputs)
            self._capture(inputs)
            self._graphs[key].inputs, self._graphs[key].state = inputs, state

    def drop(self) -> None:
        """Let go of every graph, and capture none of the shapes asked for so far."""
        super().drop()
        with self._changed:
            self._wanted.clear()

    def wait_until_captured(self) -> None:
        """Block until no shape is waiting for its capture and no idle work is left."""
        with self._changed:
            self._changed.wait_for(lambda: (self._closed or not self._wanted) and self._capturing is None)

    def close(self) -> None:
        """Capture nothing any more, and wait for what is under way.

        The end of a process does this: a thread that is inside CUDA while the interpreter goes away aborts.
        """
        capturing = self.stop()
        if capturing is not None:
            capturing.join(_LAST_SECONDS)

    def stop(self) -> threading.Thread | None:
        """Capture nothing any more; returns the thread that ends with what is under way, if any."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._capturing

    def _outdated(self, captured: _Captured) -> bool:
        return self._idle_work is not None and self._idle_work.state(captured.inputs) != captured.state

    def _start_capturing(self) -> None:
        """Make sure a thread is at work on the wanted shapes; called with `_changed` held."""
        if self._capturing is None and not self._closed:
            thread = threading.Thread(target=self._capture_when_idle, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # The process may have no more; the request is answered, and the next new shape tries again.
                _log.warning("openjev-fast: nothing is captured for now: %s", error)
                self._wanted.clear()
                self._work_left = False
                return
            self._capturing = thread

    def _capture_when_idle(self) -> None:
        try:
            self._capture_wanted()
        except Exception:
            # Such as that of a lost device, which every call to it raises.
            _log.exception("openjev-fast: nothing is captured before the next forward that is not replayed")
            with self._changed:
                self._wanted.clear()
                self._work_left, self._capturing = False, None
                self._changed.notify_all()

    def _capture_wanted(self) -> None:
        while True:
            with self._changed:
                if self._closed or (not self._wanted and not self._work_left):
                    self._capturing = None
                    self._changed.notify_all()
                    return
                key = self._due()
                if key is None:
                    self._changed.wait(max(self._next_look() - time.monotonic(), 1e-3))
                    continue
                inputs = None if key is _WORK else self._wanted.pop(key)[0]
                self._work_left = self._work_left and inputs is not None
            if inputs is None:
                self._work()
                continue
            start = time.monotonic()
            try:
                self.capture(inputs)
            except torch.OutOfMemoryError:
                _warn_of_memory(inputs)
            except Exception:
                _log.exception("openjev-fast: a graph of %d rows could not be captured", inputs.rows)
            end = time.monotonic()
            self._resting_until = end + _REST * (end - start)

    def _due(self) -> tuple[Any, ...] | None:
        """The shape to capture now, or `_WORK`, if any; called with `_changed` held."""
        now = time.monotonic()
        if self._callers:
            self._last_use = now
            return None
        if not self._done():
            # A forward is launched long before it ends.
            self._last_use = now
        elif now >= self._last_use + self._idle_seconds:
            return next(reversed(self._wanted), _WORK)
        if now < self._resting_until:
            return None
        often = (key for key, (_, asked) in reversed(self._wanted.items()) if asked >= self._often)
        return next(often, None)

    def _next_look(self) -> float:
        """When something may be due of which nothing is now; called with `_changed` held."""
        idle = self._last_use + self._idle_seconds
        often = any(asked >= self._often for _, asked in self._wanted.values())
        return min(idle, self._resting_until) if often else idle

    def _work(self) -> None:
        """A piece of the idle work; the shapes whose graphs it has outdated are wanted again."""
        assert self._idle_work is not None
        with self._device_lock, torch.inference_mode(), self._on_device():
            try:
                done = self._idle_work.step()
            except Exception:
                # The thread lives on, for captures; the next eager forward tries the work again.
                _log.exception("openjev-fast: work for an idle device failed")
                done = False
            for key, graph in list(self._graphs.items()):
                if self._idle_work.state(graph.inputs) is None:
                    del self._graphs[key]
                    self.counts["evictions"] += 1
            outdated = {key: graph.inputs for key, graph in self._graphs.items() if self._outdated(graph)}
            # Before a `drop` that waits for the device forgets what is wanted.
            with self._changed:
                self._work_left |= done
                for key, inputs in outdated.items():
                    self._wanted.setdefault(key, (inputs, 0))


_CLOSED_AT_EXIT: weakref.WeakSet[GraphedForward] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for graphs in list(_CLOSED_AT_EXIT):
        graphs.close()


class CapturedAtOnce(CapturedGraphs[InputsT]):
    """Captures a new shape while its first request waits, and logs it: the first time as a warning, then as info."""

    def __call__(self, inputs: InputsT) -> tuple[torch.Tensor, Literal["replays", "captures", "eager"]]:
        """Scores [C] of inputs on the host, and what was done for them, as `counts` names it.

        "captures": run eagerly, for these scores, then captured for the requests to come. "eager": inputs of more than
        `most_rows`, or no device memory for their graph.
        """
        with self._device_lock, torch.inference_mode(), self._on_device():
            replayed = self._replay(inputs)
            if replayed is not None:
                return replayed, "replays"
            start = time.perf_counter()
            scores = self._eager(inputs)
            if inputs.rows <= self._most_rows:
                try:
                    self._capture(inputs)
                except torch.OutOfMemoryError:
                    _warn_of_memory(inputs)
                else:
                    self._tell(inputs, time.perf_counter() - start)
                    return scores, "captures"
            self.counts["eager"] += 1
            return scores, "eager"

    def _tell(self, inputs: InputsT, seconds: float) -> None:
        first = self.counts["captures"] == 1
        _log.log(
            logging.WARNING if first else logging.INFO,
            "openjev-fast: captured a CUDA graph of shape %s in %.2f s, its first run included (%d held, %.2f GiB)%s",
            "x".join(map(str, inputs.shape_key())),
            seconds,
            len(self._graphs),
            self.held_bytes / 2**30,
            "; every new shape is captured when it is first asked for, logged as info" if first else "",
        )


def _warn_of_memory(inputs: Inputs) -> None:
    _log.warning("openjev-fast: no device memory to capture a graph of %d rows", inputs.rows)
