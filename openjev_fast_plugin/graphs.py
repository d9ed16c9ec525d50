"""CUDA Graphs of the packed forward: captured per shape when the device is idle, replayed, evicted by count and memory.

A graph launches a whole forward at once; run eagerly, the host takes longer to enqueue the kernels of a small
request than the device to run them. A shape seen for the first time is answered eagerly at once, so no request ever
waits for its own capture. A server that is never idle captures what is asked for often, in a small part of its time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from openjev_fast_plugin.layout import Layout

_log = logging.getLogger("openjev_fast")

# A busy device rests from capturing this many times as long as the last capture took.
_REST = 9

Forward = Callable[[Layout], torch.Tensor]


@dataclass
class _Captured:
    """A graph with the buffers it reads and writes, and the device memory it holds."""

    graph: torch.cuda.CUDAGraph
    packed: torch.Tensor
    scores: torch.Tensor
    bytes: int


class GraphedForward:
    """Runs layouts on one CUDA device, by replay where their shape has been captured.

    forward: the computation, from a layout on the device to scores [C] float32; it must not synchronise.
    device: where it runs.
    most_graphs, most_bytes: the least recently used graphs are dropped beyond either.
    most_rows: larger layouts are never captured; their kernels run longer than it takes to enqueue them.
    idle_seconds: how long no forward has run before a capture starts.
    often: how many times a shape was asked for when it is captured although the device is busy.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        *,
        most_graphs: int = 64,
        most_bytes: int = 4 << 30,
        most_rows: int = 4096,
        idle_seconds: float = 0.05,
        often: int = 3,
    ):
        self._forward = forward
        self._device = device
        self._most_graphs, self._most_bytes, self._most_rows = most_graphs, most_bytes, most_rows
        self._idle_seconds, self._often = idle_seconds, often
        self._graphs: OrderedDict[tuple[Any, ...], _Captured] = OrderedDict()
        # Shapes to capture, newest last, each with a layout on the host that has the shape, and how often it was asked.
        self._wanted: OrderedDict[tuple[Any, ...], tuple[Layout, int]] = OrderedDict()
        self._resting_until = 0.0
        # Held by whoever uses the device; the condition wakes the capturing thread.
        self._device_lock = threading.Lock()
        self._changed = threading.Condition()
        self._last_use = time.monotonic()
        self._capturing: threading.Thread | None = None
        self.counts = {"replays": 0, "eager": 0, "captures": 0, "evictions": 0}

    def __call__(self, layout: Layout) -> tuple[torch.Tensor, bool]:
        """Scores [C] of a layout on the host, and whether a graph was replayed."""
        key = layout.shape_key()
        with self._device_lock, torch.cuda.device(self._device):
            captured = self._graphs.get(key)
            if captured is not None:
                self._graphs.move_to_end(key)
                captured.packed.copy_(layout.pack().pin_memory(), non_blocking=True)
                captured.graph.replay()
                # The graph's own output is overwritten by its next replay.
                scores = captured.scores.clone()
                self.counts["replays"] += 1
            else:
                scores = self._forward(layout.to(self._device))
                self.counts["eager"] += 1
        with self._changed:
            self._last_use = time.monotonic()
            if captured is None and layout.rows <= self._most_rows:
                asked = self._wanted.pop(key, (layout, 0))[1] + 1
                self._wanted[key] = (layout, asked)
                if len(self._wanted) > self._most_graphs:
                    self._wanted.popitem(last=False)
                self._start_capturing()
        return scores, captured is not None

    def holds(self, layout: Layout) -> bool:
        """Whether this layout would be replayed at once: its shape is captured, and none other is being captured."""
        return layout.shape_key() in self._graphs and not self._device_lock.locked()

    def drop(self) -> None:
        """Let go of every graph, and capture none of the shapes asked for so far."""
        with self._changed:
            self._wanted.clear()
        with self._device_lock:
            self._graphs.clear()

    @property
    def held_bytes(self) -> int:
        """Device memory of all captured graphs."""
        return sum(captured.bytes for captured in self._graphs.values())

    def capture(self, layout: Layout) -> None:
        """Capture the shape of a layout now, unless it is captured already. Waits for the device."""
        with self._device_lock, torch.inference_mode(), torch.cuda.device(self._device):
            key = layout.shape_key()
            if key not in self._graphs:
                self._graphs[key] = self._capture(layout)
                self.counts["captures"] += 1
                self._evict()

    def wait_until_captured(self) -> None:
        """Block until no shape is waiting for its capture."""
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted and self._capturing is None)

    def _capture(self, layout: Layout) -> _Captured:
        before = torch.cuda.mem_get_info(self._device)[0]
        packed = layout.pack().to(self._device)
        on_device = layout.unpack(packed)
        # Lazy initialisation of libraries must not happen under capture.
        self._forward(on_device)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            scores = self._forward(on_device)
        torch.cuda.synchronize(self._device)
        used = before - torch.cuda.mem_get_info(self._device)[0]
        return _Captured(graph, packed, scores, max(used, 0))

    def _evict(self) -> None:
        while len(self._graphs) > 1 and (
            len(self._graphs) > self._most_graphs or self.held_bytes > self._most_bytes
        ):
            self._graphs.popitem(last=False)
            self.counts["evictions"] += 1

    def _start_capturing(self) -> None:
        """Make sure a thread is at work on the wanted shapes; called with `_changed` held."""
        if self._capturing is None:
            self._capturing = threading.Thread(target=self._capture_when_idle, daemon=True)
            self._capturing.start()

    def _capture_when_idle(self) -> None:
        while True:
            with self._changed:
                if not self._wanted:
                    self._capturing = None
                    self._changed.notify_all()
                    return
                key = self._due()
                if key is None:
                    self._changed.wait(max(self._last_use + self._idle_seconds - time.monotonic(), 1e-3))
                    continue
                layout, _ = self._wanted.pop(key)
            start = time.monotonic()
            try:
                self.capture(layout)
            except torch.OutOfMemoryError:
                _log.warning("openjev-fast: no device memory to capture a graph of %d rows", layout.rows)
            except Exception:
                _log.exception("openjev-fast: a graph of %d rows could not be captured", layout.rows)
            end = time.monotonic()
            self._resting_until = end + _REST * (end - start)

    def _due(self) -> tuple[Any, ...] | None:
        """The shape to capture now, if any; called with `_changed` held."""
        now = time.monotonic()
        if now >= self._last_use + self._idle_seconds:
            return next(reversed(self._wanted))
        if now < self._resting_until:
            return None
        often = (key for key, (_, asked) in reversed(self._wanted.items()) if asked >= self._often)
        return next(often, None)
