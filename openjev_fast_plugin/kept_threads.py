"""Daemon threads that are kept for a while after a call, since starting one takes longer than waking one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_Call = Callable[[], object]


class KeptThreads:
    """Runs each call at once on a thread of its own: one that has nothing to do, else a new one.

    name: of the threads. most: how many without a call are kept. seconds: for how long. The interpreter's exit waits
    for none of them.
    """

    def __init__(self, name: str, most: int, seconds: float):
        self._name, self._most, self._seconds = name, most, seconds
        self._lock = threading.Lock()
        # Of each thread without a call: where it waits for one. The last to have worked is the first to be woken.
        self._idle: list[queue.SimpleQueue[_Call | None]] = []
        self._closed = False

    def run(self, call: _Call) -> None:
        """Returns once the call is on its way. Raises RuntimeError where no thread can be started."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is not None:
            inbox.put(call)
            return
        inbox = queue.SimpleQueue()
        # Not as an argument, which a thread holds until it ends.
        inbox.put(call)
        threading.Thread(target=self._work, args=(inbox,), name=self._name, daemon=True).start()

    def close(self) -> None:
        """End the threads without a call; the others end after theirs."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _work(self, inbox: queue.SimpleQueue[_Call | None]) -> None:
        call = inbox.get()
        while call is not None:
            call()
            # What it held may be freed while this thread waits.
            call = None
            with self._lock:
                if self._closed or len(self._idle) >= self._most:
                    return
                self._idle.append(inbox)
            try:
                call = inbox.get(timeout=self._seconds)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                # Somebody took it meanwhile, and is about to put something in.
                call = inbox.get()
