"""Requests that wait at the same time share one forward. Knows no torch, no kernels and no HTTP.

There is no thread of its own. A request that finds the device free runs its forward on the thread it came in on; what
arrives meanwhile waits, tokenized already, and the thread of the oldest one packs the next forward while the device
works on the last. What the device can take while it works on another forward is launched shortly before that one is
expected to end, so that the device does not wait for Python. Otherwise that thread launches when the device is free and
then lets the answers of the forward before go out: answering takes Python's one lock, for which the launch would wait.
So an answer that has somebody behind it may wait for the launch of a forward, milliseconds where it is no replay.

A few clients who ask again as soon as they are answered would take turns, each alone in a forward that reads every
weight for it. Where the device may stay free for a moment (`wait_seconds`), it does for those just answered, if one
forward of them and of those who wait saves more than that moment, and if they lately came back within it.

Who goes into a forward: the request that waits longest, and of the others, in order of arrival, whatever adds at most
`share_rows` rows to it, up to about half of those who wait and those being answered (`choose`). So a request that
finds n waiting is in one of the next n + 1 forwards, whatever arrives after it; one of few rows is in one of the next
two however large those before it are, unless other small ones before it fill `share_rows`; and sharing adds at most
`share_rows` rows to a forward.

A forward that fails is run again for each of its requests alone, and so are requests whose scores are not finite: no
answer depends on who shared its forward.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from openjev_fast_plugin.exchange import ClientGone, Exchange, Unavailable, current
from openjev_fast_plugin.forest import RowCount
from openjev_fast_plugin.metrics import Metrics

_log = logging.getLogger("openjev_fast")

_MOST_RETRY_SECONDS = 30


# A forward of so many rows takes about as long as one of a few: the weights are read for any number.
_FREE_ROWS = 128

# How long before a forward is expected to end the next one is launched: longer than waking a thread and launching take,
# and at most a part of the forward. Until then whoever arrives may still join the next one.
_AHEAD_SECONDS, _AHEAD_PART = 1e-3, 1 / 8
# Kinds of forwards whose duration is remembered.
_MOST_KINDS = 4096
# The device stays free for those just answered if at least this part of them lately came back in time, each forward
# weighing so much in the average.
_MOSTLY, _LATEST = 1 / 2, 1 / 4


class DeviceBroken(RuntimeError):
    """The device failed in a way that only a new process recovers from; nothing is computed any more."""


@dataclass(frozen=True)
class Outcome:
    """What one forward gave.

    scores: [C] float32, one per sequence in the order they were prepared in.
    rows: packed rows it computed. replayed: whether it was a captured graph. reused: rows of kept prefixes it read.
    """

    scores: np.ndarray
    rows: int
    replayed: bool
    reused: int = 0


class Device(Protocol):
    """Runs forwards one after the other."""

    def prepare(
        self,
        sequences: list[np.ndarray],
        roots: list[np.ndarray | None] | None = None,
        *,
        shared: bool = False,
    ) -> Any:
        """Everything of a forward that needs no device; another forward may be running.

        roots: of each sequence, where any request gave them. shared: they are several requests'.
        """

    def kind(self, prepared: Any) -> Hashable | None:
        """What forwards that take equally long have in common, where `start` may be called before the last has ended.

        None: it has to wait until then.
        """

    def start(self, prepared: Any) -> Callable[[], Outcome]:
        """Launch what can be launched at once; the function returned waits for the scores."""

    def release_memory(self) -> None:
        """Let go of every cache: a forward found no memory."""

    def diagnose(self, error: BaseException) -> Literal["memory", "broken", "request"]:
        """Why preparing, starting or waiting raised: no memory, a device lost for good, or what was asked."""


@dataclass(eq=False)
class Place:
    """What one request holds of the bounded queue, from before it is tokenized until it is answered."""

    # The HTTP request it is for, if there is one.
    about: Exchange | None
    rows: int = 0
    held: bool = True


@dataclass(eq=False)
class Ticket:
    """What one forward has to score for one request.

    rows: packed rows of the sequences by themselves. alone: it shares no forward any more.
    roots: of each sequence what it begins with that may be kept for other requests, None for nothing.
    """

    place: Place
    sequences: list[np.ndarray]
    rows: int
    arrived: float = 0.0
    alone: bool = False
    roots: list[np.ndarray | None] | None = None
    # Set when the ticket is settled, or is to run the next forward.
    woken: threading.Event = field(default_factory=threading.Event)
    scored: Scored | None = None
    error: BaseException | None = None

    @property
    def settled(self) -> bool:
        return self.scored is not None or self.error is not None


@dataclass(frozen=True)
class Scored:
    """A ticket's scores [C] float32, and the forward they are from.

    rows: packed rows of the whole forward. requests: how many shared it. waited, took: seconds before it began, and
    from then to its scores. reused: rows of kept prefixes that the whole forward read.
    """

    scores: np.ndarray
    rows: int
    replayed: bool
    requests: int
    waited: float
    took: float
    reused: int = 0


@dataclass(frozen=True, eq=False)
class _Packed:
    """A forward that is ready to start.

    waiting: who waited when it was packed. last: it is not packed again for those who arrived since. kind: as the
    device says.
    """

    tickets: list[Ticket]
    waiting: list[Ticket]
    last: bool
    prepared: Any = None
    kind: Hashable | None = None
    error: Exception | None = None


def choose(waiting: Sequence[Ticket], share_rows: int, max_rows: int, running: int) -> list[Ticket]:
    """Who of those waiting, oldest first, goes into the next forward, oldest first.

    share_rows: how many rows others may add to the oldest one's. max_rows: packed rows of the forward. running: how
    many requests the forward before it has. Clients ask again once they are answered, so the next two forwards are
    made of those waiting and those running. They are made even: all who wait now would leave a forward of few, which
    takes nearly as long as one of many. Whoever shares a long text with those chosen is not left for another forward,
    which would compute it again.
    """
    oldest, *others = waiting
    if oldest.alone or not others:
        return [oldest]
    room, rows = min(share_rows, max_rows - oldest.rows), oldest.rows
    half = (len(waiting) + running + 1) // 2
    chosen, begun = [oldest], RowCount()
    begun.add(oldest.sequences[0])
    for ticket in others:
        # At least what its first sequence shares is computed once: an upper bound that needs no whole forest.
        shared = begun.shared(ticket.sequences[0])
        further = ticket.rows - shared
        even = len(chosen) < half or rows + further <= _FREE_ROWS or shared >= _FREE_ROWS
        if not ticket.alone and further <= room and even:
            chosen.append(ticket)
            begun.add(ticket.sequences[0])
            room -= further
            rows += further
    return chosen


class Scheduler:
    """Shares one device between the threads that score.

    max_rows: packed rows of one forward. share_rows: as for `choose`; 0 shares nothing but rows already there.
    most_requests, most_rows: how many requests may be inside, and the rows they may ask for together; one request
        alone may ask for more. wait_seconds: how long the device may stay free after a forward for those just answered
        to ask again (`_pays`); a lone client's request is never kept. clock: seconds.
    """

    def __init__(
        self,
        device: Device,
        metrics: Metrics,
        *,
        max_rows: Callable[[], int],
        share_rows: int,
        most_requests: int,
        most_rows: int,
        wait_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._device, self._metrics, self._clock = device, metrics, clock
        self._max_rows, self._share_rows = max_rows, share_rows
        self._most_requests, self._most_rows = most_requests, most_rows
        self._wait_seconds = wait_seconds
        # Guards everything below; whoever packs the next forward waits on it.
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[Ticket] = deque()
        # Forwards that were started and have not ended; a second one where it was launched ahead.
        self._in_flight: list[_Packed] = []
        # When the first of them began to run, and the last that ended did so.
        self._began = self._ended = -math.inf
        # Seconds that the last forward of a kind took.
        self._took: dict[Hashable, float] = {}
        # Requests of the forward that runs, or ran last.
        self._running = 0
        # Whose thread packs and runs the next forward; there is one whenever somebody waits.
        self._leader: Ticket | None = None
        # The leader waits for the device with everybody packed; then the answers below may wait for its launch.
        self._ready = False
        self._unanswered: list[Ticket] = []
        # Until when the device stays free for those just answered, unless that many have come before; who waits then
        # goes into one forward.
        self._hold_until, self._awaited, self._gathered = -math.inf, 0, False
        # Of the forward that ended last: how many were answered, and how many came within `wait_seconds` of its end.
        self._answered = self._came = 0
        # The part of them that did, lately, and seconds that a forward of few rows takes by the last one.
        self._returning = self._few_seconds = 0.0
        self._inside = self._rows_inside = 0
        self._rows_per_second: float | None = None
        self._broken: str | None = None
        self._callbacks: list[Callable[[str], None]] = []

    # What a request calls

    @contextlib.contextmanager
    def place(self) -> Iterator[Place]:
        """A place in the queue for one request. Raises Unavailable when there is none, DeviceBroken."""
        place = Place(current())
        with self._changed:
            self._check()
            if self._inside >= self._most_requests:
                self._drop_gone()
            if self._inside >= self._most_requests:
                self._refuse(f"{self._inside} requests are waiting already")
            self._inside += 1
        try:
            yield place
        finally:
            with self._changed:
                self._release(place)

    def claim(self, place: Place, rows: int) -> None:
        """Say how many rows a request asks for. Raises Unavailable where they are too many beside the others'."""
        with self._changed:
            if self._over(rows):
                self._drop_gone()
            if self._over(rows):
                self._refuse(f"{self._rows_inside} rows are waiting already, too many for {rows} more")
            place.rows = rows
            self._rows_inside += rows

    def score(
        self,
        place: Place,
        sequences: list[np.ndarray],
        rows: int,
        roots: list[np.ndarray | None] | None = None,
    ) -> Scored:
        """Scores of one part of a request, from a forward shared with whoever waits too.

        sequences: as for `build_forest`. rows: what they take by themselves, at most `max_rows`. roots: as for
            `Ticket`, where prefixes are kept.
        Raises what the forward raised for this part alone, ClientGone when the client hung up before, DeviceBroken.
        """
        ticket = Ticket(place, sequences, rows, self._clock(), roots=roots)
        with self._changed:
            self._check()
            self._queue.append(ticket)
            self._note_arrival(ticket.arrived)
            if self._leader is None:
                self._leader = ticket
                ticket.woken.set()
            else:
                self._changed.notify()
        try:
            while True:
                ticket.woken.wait()
                ticket.woken.clear()
                if ticket.settled:
                    break
                # Whoever leads already may have been woken once more.
                if self._leader is ticket:
                    self._lead()
        finally:
            self._leave(ticket)
        if ticket.error is not None:
            raise ticket.error
        assert ticket.scored is not None
        return ticket.scored

    # What a server asks

    @property
    def broken(self) -> str | None:
        """Why nothing is computed any more, None while the device works."""
        return self._broken

    def on_broken(self, callback: Callable[[str], None]) -> None:
        """Have `callback(reason)` called once, on a request's thread, when the device is lost."""
        with self._changed:
            self._callbacks.append(callback)
            reason = self._broken
        if reason is not None:
            callback(reason)

    @property
    def inside(self) -> int:
        """Requests that hold a place."""
        return self._inside

    # Running forwards

    def _lead(self) -> None:
        """Pack and run one forward; called by the leader's thread."""
        wait: Callable[[], Outcome] | None = None
        outcome: Outcome | None = None
        error: BaseException | None = None
        try:
            packed = self._pack()
            if packed is None:
                return
            started = self._clock()
            error = packed.error
            if error is None:
                try:
                    wait = self._device.start(packed.prepared)
                except BaseException as raised:
                    error = raised
        finally:
            self._answer_and_pass_on()
        if wait is not None:
            try:
                outcome = wait()
            except BaseException as raised:
                error = raised
        self._settle(packed, outcome, error, started)
        if error is not None and not isinstance(error, Exception):
            raise error

    def _pack(self) -> _Packed | None:
        """Pack a forward, wait until it may be started and take the device; None when nobody waits any more.

        Packs again when somebody arrives while the device works, and at most once more when it is free.
        """
        packed: _Packed | None = None
        while True:
            with self._changed:
                until = None if packed is None else self._until_start(packed)
                due = until is not None and until <= 0
                if packed is None or due or not self._in_flight:
                    self._drop_gone()
                waiting = list(self._queue)
                if not waiting:
                    self._leader = None
                    return None
                if packed is not None and (packed.last or packed.waiting == waiting):
                    if due:
                        self._take(packed)
                        return packed
                    self._ready = bool(self._in_flight)
                    try:
                        self._changed.wait(until)
                    finally:
                        self._ready = False
                    continue
                last = not self._in_flight and self._hold_until <= self._clock()
                answers = self._take_unanswered()
                # All of those for whom the device was free are here.
                running = len(waiting) if self._gathered else self._running
            _wake(answers)
            tickets = choose(waiting, self._share_rows, self._max_rows(), running)
            if packed is not None and packed.tickets == tickets:
                # Whoever came is for a later one.
                packed = replace(packed, waiting=waiting, last=last)
                continue
            sequences = [sequence for ticket in tickets for sequence in ticket.sequences]
            try:
                prepared = self._device.prepare(sequences, _roots(tickets), shared=len(tickets) > 1)
                packed = _Packed(tickets, waiting, last, prepared, self._device.kind(prepared))
            except Exception as error:
                packed = _Packed(tickets, waiting, last, error=error)

    def _take(self, packed: _Packed) -> None:
        """The device is ours, and the next in the queue has the lead; called with the lock held."""
        if not self._in_flight:
            self._began = self._clock()
        self._in_flight.append(packed)
        self._running, self._gathered = len(packed.tickets), False
        taken = set(packed.tickets)
        left = [ticket for ticket in self._queue if ticket not in taken]
        self._queue.clear()
        self._queue.extend(left)
        self._leader = self._queue[0] if self._queue else None

    def _until_start(self, packed: _Packed) -> float | None:
        """Seconds until a forward is to be started; None: not before one that runs has ended.

        Called with the lock held.
        """
        if not self._in_flight:
            return self._hold_until - self._clock()
        if len(self._in_flight) != 1 or packed.kind is None or self._pays(self._in_flight[0].tickets):
            return None
        took = self._took.get(self._in_flight[0].kind)
        if took is None:
            return None
        return self._began + took - min(_AHEAD_SECONDS, took * _AHEAD_PART) - self._clock()

    def _answer_and_pass_on(self) -> None:
        """Now that the device works: let waiting answers out, and the next leader begin."""
        with self._changed:
            answers, leader = self._take_unanswered(), self._leader
        _wake(answers)
        if leader is not None:
            leader.woken.set()

    def _settle(
        self, packed: _Packed, outcome: Outcome | None, error: BaseException | None, started: float
    ) -> None:
        """Give each ticket its scores or its error, or put it back to run alone; this forward has ended."""
        ended, tickets = self._clock(), packed.tickets
        # One that was launched ahead began when the one before it ended.
        began = min(max(started, self._ended), ended)
        lost_before = self._broken is not None
        if lost_before:
            # What was launched before that was known is of a broken device too.
            outcome, error = None, self._lost()
        shared = len(tickets) > 1
        again: list[Ticket] = []
        verdict: str | None = None
        if outcome is not None:
            offset = 0
            for ticket in tickets:
                scores = outcome.scores[offset : offset + len(ticket.sequences)]
                offset += len(scores)
                if ticket.settled:
                    # Its client hung up after it was packed.
                    continue
                if shared and not np.isfinite(scores).all():
                    # Values that are not finite spread to others of the same forward.
                    again.append(ticket)
                else:
                    waited, took = began - ticket.arrived, ended - began
                    ticket.scored = Scored(
                        scores, outcome.rows, outcome.replayed, len(tickets), waited, took, outcome.reused
                    )
                    self._metrics.waited(waited)
            self._metrics.forward(len(tickets), outcome.rows, outcome.replayed, ended - began)
            if again:
                self._metrics.ran_again("not_finite", len(again))
        else:
            assert error is not None
            verdict = "broken" if lost_before else self._device.diagnose(error)
            if verdict == "memory":
                # The frames it went through still hold what they had allocated.
                traceback.clear_frames(error.__traceback__)
                self._device.release_memory()
            if verdict == "broken" and not lost_before:
                # From the answer of every request, and once from here with where it happened.
                _log.critical("openjev-fast: the device is lost: %s", error, exc_info=error)
            elif verdict != "broken" and shared:
                again = list(tickets)
                self._metrics.ran_again("no_memory" if verdict == "memory" else "failed", len(again))
                _log.warning(
                    "openjev-fast: a forward of %d requests failed, each runs alone: %s: %s",
                    len(tickets),
                    type(error).__name__,
                    error,
                )
            else:
                tickets[0].error = error

        callbacks: list[Callable[[str], None]] = []
        with self._changed:
            if packed is self._in_flight[0]:
                # The one behind it, if any, begins. It may be settled first: it could not start, or a thread was slow.
                self._began = self._ended = ended
            self._in_flight.remove(packed)
            if outcome is not None:
                self._note_rate(outcome.rows + outcome.reused, ended - began)
                self._few_seconds = (ended - began) * _FREE_ROWS / max(_FREE_ROWS, outcome.rows)
                if packed.kind is not None:
                    if len(self._took) >= _MOST_KINDS:
                        self._took.clear()
                    self._took[packed.kind] = ended - began
            if verdict == "broken":
                again = []
                if self._broken is None:
                    self._broken = f"{type(error).__name__}: {error}"
                    callbacks = self._callbacks
                tickets = [*tickets, *self._queue]
                self._queue.clear()
                for ticket in tickets:
                    ticket.error = self._lost()
            for ticket in reversed(again):
                # Who has left meanwhile has nobody to run it.
                if not ticket.settled:
                    ticket.alone = True
                    self._queue.appendleft(ticket)
            settled = [ticket for ticket in tickets if ticket.settled]
            gathered = self._hold([ticket for ticket in settled if ticket.scored is not None], ended)
            leader = None
            if self._leader is None and self._queue:
                leader = self._leader = self._queue[0]
            if self._ready and not again and not gathered and not self._in_flight:
                self._unanswered += settled
                settled = []
            self._changed.notify()
        if leader is not None:
            leader.woken.set()
        _wake(settled)
        for callback in callbacks:
            callback(str(self._broken))

    # With the lock held

    def _check(self) -> None:
        if self._broken is not None:
            raise self._lost()

    def _lost(self) -> DeviceBroken:
        return DeviceBroken(f"the device is lost until the server is started again: {self._broken}")

    def _over(self, rows: int) -> bool:
        return self._rows_inside > 0 and self._rows_inside + rows > self._most_rows

    def _refuse(self, why: str) -> None:
        rate = self._rows_per_second
        seconds = 1 if rate is None else math.ceil(self._rows_inside / rate)
        self._metrics.refused()
        raise Unavailable(
            f"the server is busy: {why}; ask again later", max(1, min(seconds, _MOST_RETRY_SECONDS))
        )

    def _release(self, place: Place) -> None:
        if place.held:
            place.held = False
            self._inside -= 1
            self._rows_inside -= place.rows

    def _drop_gone(self) -> None:
        """Take out of the queue whose client has hung up."""
        for ticket in list(self._queue):
            about = ticket.place.about
            if about is not None and about.client_gone():
                self._queue.remove(ticket)
                self._release(ticket.place)
                self._metrics.dropped()
                ticket.error = ClientGone("the client hung up while its request waited")
                ticket.woken.set()

    def _hold(self, answered: Sequence[Ticket], ended: float) -> bool:
        """Whether the device stays free for those just answered, now that a forward has ended."""
        if self._answered:
            part = min(self._came / self._answered, 1.0)
            self._returning += _LATEST * (part - self._returning)
        self._answered, self._came = len(answered), 0
        self._gathered = not self._in_flight and self._pays(answered)
        self._awaited = len(answered) if self._gathered else 0
        self._hold_until = ended + self._wait_seconds if self._gathered else -math.inf
        return self._gathered

    def _pays(self, answered: Sequence[Ticket]) -> bool:
        """Whether to wait for those just answered saves more than it takes.

        One forward of them and of those who wait is compared with one of each. Beyond two forwards of few rows those
        who wait fill the next one without them.
        """
        if not self._wait_seconds or self._returning < _MOSTLY:
            return False
        waiting, returning = (sum(ticket.rows for ticket in each) for each in (self._queue, answered))
        if answered and not waiting:
            # The first to come back would have a forward of its own.
            waiting = answered[0].rows
            returning -= waiting
        if not returning or waiting + returning > 2 * _FREE_ROWS:
            return False
        one = max(waiting + returning, _FREE_ROWS)
        saved = max(waiting, _FREE_ROWS) + max(returning, _FREE_ROWS) - one
        return self._few_seconds * saved / _FREE_ROWS > self._wait_seconds

    def _note_arrival(self, arrived: float) -> None:
        if arrived - self._ended <= self._wait_seconds:
            self._came += 1
        if self._awaited:
            self._awaited -= 1
            if not self._awaited:
                # Everybody has come.
                self._hold_until = -math.inf

    def _take_unanswered(self) -> list[Ticket]:
        answers, self._unanswered = self._unanswered, []
        return answers

    def _note_rate(self, rows: int, seconds: float) -> None:
        rate = rows / max(seconds, 1e-6)
        before = self._rows_per_second
        self._rows_per_second = rate if before is None else 0.8 * before + 0.2 * rate

    # Without it

    def _leave(self, ticket: Ticket) -> None:
        """A ticket's thread goes: it neither waits nor leads any more."""
        with self._changed:
            if not ticket.settled:
                # Its thread was interrupted.
                ticket.error = ClientGone("nobody waits for this any more")
                if ticket in self._queue:
                    self._queue.remove(ticket)
            if self._leader is not ticket:
                return
            leader = self._leader = self._queue[0] if self._queue else None
        if leader is not None:
            leader.woken.set()


def _wake(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.woken.set()


def _roots(tickets: list[Ticket]) -> list[np.ndarray | None] | None:
    """Of each sequence, None where no ticket has any."""
    if all(ticket.roots is None for ticket in tickets):
        return None
    return [root for each in tickets for root in each.roots or [None] * len(each.sequences)]
