"""jev.server: the lock that `make_server` holds around `predictor.predict` lets everybody in.

For an engine that takes several requests at once (`Takeover.concurrent`). Knows that the handler's methods close over
that one lock; where there is none, or several, it stays and a log line says so.
"""

from __future__ import annotations

import contextlib
import threading
import types

from . import log


class _OpenLock:
    """Has what a lock has, and never waits."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return True

    def release(self) -> None:
        pass

    def locked(self) -> bool:
        return False

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *error: object) -> None:
        pass


def lift(handler: type) -> None:
    """Open the lock of a handler class that `make_server` has just made."""
    locks: dict[int, types.CellType] = {}
    for function in vars(handler).values():
        for cell in getattr(function, "__closure__", None) or ():
            # An empty cell has no contents.
            with contextlib.suppress(ValueError):
                if isinstance(cell.cell_contents, type(threading.Lock())):
                    locks[id(cell)] = cell
    if len(locks) != 1:
        log.warning(
            "openjev-fast: requests are answered one at a time: expected one lock in the handler of jev.server, "
            "found %d",
            len(locks),
        )
        return
    (cell,) = locks.values()
    cell.cell_contents = _OpenLock()
