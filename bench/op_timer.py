"""Device time of one op: calls on rotated inputs, recorded once, replayed in turn with those of other variants."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Calls in a recording, at least; a call slower than this many microseconds is recorded once for each set of inputs.
_LEAST_CALLS, _SLOW = 4, 10_000


@dataclass(frozen=True)
class Recording:
    """calls: how many a replay makes. replay: makes them, and returns the microseconds of one."""

    calls: int
    replay: Callable[[], float]


class Timer(Protocol):
    """cache_bytes: inputs that are not to be warm must be larger than this together."""

    cache_bytes: int

    def record(self, calls: Sequence[Callable[[], Any]]) -> Recording: ...

    def release(self) -> None: ...


class GraphTimer:
    """Records a CUDA graph; a replay is timed by events on the device, without the host.

    Before each replay a buffer of four times the L2 cache is read: nothing of the inputs is warm, what is evicted
    later needs no writing, and the graph's launch is hidden behind the reading.
    """

    def __init__(self, device: torch.device):
        self.cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._scratch = torch.zeros(self.cache_bytes, dtype=torch.float32, device=device)
        self._sum = torch.zeros((), dtype=torch.float32, device=device)

    def record(self, calls: Sequence[Callable[[], Any]]) -> Recording:
        # Libraries initialise, choose and compile at a first call, which must not happen under capture.
        for call in calls:
            call()
        once = self._timed(calls[0])
        rounds = 1 if once > _SLOW else -(-_LEAST_CALLS // len(calls))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        count = rounds * len(calls)
        return Recording(count, lambda: self._timed(graph.replay) / count)

    def release(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _timed(self, call: Callable[[], Any]) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(self._scratch, 0, out=self._sum)
        before.record()
        call()
        after.record()
        after.synchronize()
        return 1e3 * before.elapsed_time(after)


class HostTimer:
    """Records nothing: a replay makes the calls and reads the host's clock. For devices without graphs."""

    cache_bytes = 0

    def record(self, calls: Sequence[Callable[[], Any]]) -> Recording:
        def replay() -> float:
            start = time.perf_counter()
            for call in calls:
                call()
            return 1e6 * (time.perf_counter() - start) / len(calls)

        replay()
        return Recording(len(calls), replay)

    def release(self) -> None:
        pass


def replay_in_turn(recordings: Mapping[str, Recording], replays: Mapping[str, int]) -> dict[str, list[float]]:
    """Microseconds of a call, for each replay of each recording.

    Recordings take turns, replay by replay, so that a slow spell of the device meets them all; one with fewer
    replays sits out rounds, evenly.
    """
    times: dict[str, list[float]] = {name: [] for name in recordings}
    rounds = max(replays.values(), default=0)
    for round_ in range(rounds):
        for name, recording in recordings.items():
            if (round_ + 1) * replays[name] // rounds > round_ * replays[name] // rounds:
                times[name].append(recording.replay())
    return times
