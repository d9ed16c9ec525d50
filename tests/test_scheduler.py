"""The scheduler on a device that computes when the test says so."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openjev_fast_plugin import scheduler as scheduler_module
from openjev_fast_plugin.exchange import ClientGone, Unavailable, answering
from openjev_fast_plugin.forest import count_rows
from openjev_fast_plugin.metrics import Metrics
from openjev_fast_plugin.scheduler import DeviceBroken, Outcome, Place, Scheduler, Scored, Ticket, choose

SECONDS = 10.0


class NoMemory(RuntimeError):
    pass


class Lost(RuntimeError):
    pass


def score_of(sequence: np.ndarray) -> float:
    """What the fake device answers for a sequence: another number for every sequence of these tests."""
    return float(sequence.astype(np.float64) @ np.arange(1, len(sequence) + 1))


class Run:
    """One forward that was started and waits for the test."""

    def __init__(self, sequences: list[np.ndarray]):
        self.sequences = sequences
        self.thread = threading.get_ident()
        self.scores = np.array([score_of(each) for each in sequences], dtype=np.float32)
        self.error: BaseException | None = None
        self._ends = threading.Event()

    def first_tokens(self) -> set[int]:
        return {int(sequence[0]) for sequence in self.sequences}

    def end(self, error: BaseException | None = None, reused: int = 0) -> None:
        self.error, self.reused = error, reused
        self._ends.set()

    def wait(self) -> Outcome:
        assert self._ends.wait(SECONDS), "the test never ended this forward"
        if self.error is not None:
            raise self.error
        return Outcome(self.scores, count_rows(self.sequences) - self.reused, False, self.reused)


class FakeDevice:
    """Every forward started is put into `runs`; prepare and start can be made to fail."""

    def __init__(self) -> None:
        self.runs: queue.Queue[Run] = queue.Queue()
        self.prepared: queue.Queue[set[int]] = queue.Queue()
        self.shared: list[bool] = []
        self.running = 0
        self.released = 0
        self.fail_prepare: Callable[[list[np.ndarray]], None] = lambda sequences: None
        self.fail_start: Callable[[list[np.ndarray]], None] = lambda sequences: None
        # Of every forward; None: one at a time.
        self.same_kind: str | None = None

    def kind(self, prepared: list[np.ndarray]) -> str | None:
        return self.same_kind

    def prepare(self, sequences: list[np.ndarray], roots: None, *, shared: bool) -> list[np.ndarray]:
        assert roots is None
        self.shared.append(shared)
        self.prepared.put({int(sequence[0]) for sequence in sequences})
        self.fail_prepare(sequences)
        return sequences

    def start(self, prepared: list[np.ndarray]) -> Callable[[], Outcome]:
        self.fail_start(prepared)
        assert self.running < (1 if self.same_kind is None else 2), "too many forwards at once"
        self.running += 1
        run = Run(prepared)
        self.runs.put(run)

        def wait() -> Outcome:
            try:
                return run.wait()
            finally:
                self.running -= 1

        return wait

    def release_memory(self) -> None:
        self.released += 1

    def diagnose(self, error: BaseException) -> Any:
        return "memory" if isinstance(error, NoMemory) else "broken" if isinstance(error, Lost) else "request"

    def next(self) -> Run:
        return self.runs.get(timeout=SECONDS)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tokens(first: int, length: int = 3) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)


class CountingQueue(deque[Ticket]):
    """The scheduler's queue, and how many have joined it at its end."""

    joined = 0

    def append(self, ticket: Ticket) -> None:
        super().append(ticket)
        self.joined += 1


class Bench:
    """A scheduler, its device, and threads that ask it."""

    def __init__(self, **options: Any) -> None:
        self.device, self.metrics = FakeDevice(), Metrics()
        options = {
            "max_rows": lambda: 10**6,
            "share_rows": 1000,
            "most_requests": 10**6,
            "most_rows": 10**9,
            **options,
        }
        self.scheduler = Scheduler(self.device, self.metrics, **options)
        self.queue = self.scheduler._queue = CountingQueue()
        self._pool = ThreadPoolExecutor(64)

    def ask(self, *sequences: np.ndarray, gone: Callable[[], bool] | None = None) -> Future[Scored]:
        """Scores in the background; the request has joined the queue, or failed before, when this returns."""
        asked = list(sequences)

        def score() -> Scored:
            with self.scheduler.place() as place:
                rows = count_rows(asked)
                self.scheduler.claim(place, rows)
                return self.scheduler.score(place, asked, rows)

        def call() -> Scored:
            if gone is None:
                return score()
            with answering(SimpleNamespace(client_gone=gone)):
                return score()

        before = self.queue.joined
        future = self._pool.submit(call)
        self.until(lambda: self.queue.joined > before or future.done())
        return future

    def until(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.0005)

    def end_until(
        self,
        condition: Callable[[], bool],
        end: Callable[[Run], None] = Run.end,
        seconds: float = SECONDS,
    ) -> None:
        """End every forward that is started, until the condition holds."""

        def ended() -> bool:
            while not self.device.runs.empty():
                end(self.device.next())
            return condition()

        self.until(ended, seconds)

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"openjev_fast_{name}", labels)

    def close(self) -> None:
        """Ends what runs for those who have left."""
        self.end_until(lambda: not self.scheduler._in_flight and self.scheduler._leader is None)
        self._pool.shutdown()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def good(future: Future[Scored], *sequences: np.ndarray) -> Scored:
    """The answer, which must be that of these sequences."""
    scored = future.result(SECONDS)
    assert scored.scores.tolist() == [np.float32(score_of(each)) for each in sequences]
    return scored


# Who runs what


def test_a_lone_request_runs_on_its_own_thread_at_once(bench):
    found = []

    def ask() -> None:
        with bench.scheduler.place() as place:
            bench.scheduler.claim(place, 3)
            found.append(bench.scheduler.score(place, [tokens(5)], 3))

    thread = threading.Thread(target=ask)
    thread.start()
    run = bench.device.next()
    assert run.thread == thread.ident
    run.end()
    thread.join()
    (scored,) = found
    assert scored.scores.tolist() == [score_of(tokens(5))] and scored.requests == 1 and scored.rows == 3
    assert bench.device.prepared.qsize() == 1 and bench.scheduler.inside == 0


def test_who_arrives_during_a_forward_shares_the_next(bench):
    first = bench.ask(tokens(0))
    running = bench.device.next()
    others = [bench.ask(tokens(100 * n), tokens(100 * n, 5)) for n in (1, 2, 3)]
    # Packed while the device still works on the first.
    while bench.device.prepared.get(timeout=SECONDS) != {100, 200, 300}:
        pass
    assert bench.device.runs.empty() and not first.done()
    running.end()
    shared = bench.device.next()
    # The first is answered although nobody has ended the second forward.
    assert good(first, tokens(0)).requests == 1
    assert shared.first_tokens() == {100, 200, 300} and len(shared.sequences) == 6
    assert bench.device.shared[:2] == [False, False] and bench.device.shared[-1] is True
    shared.end()
    for n, future in enumerate(others, 1):
        scored = good(future, tokens(100 * n), tokens(100 * n, 5))
        assert scored.requests == 3 and scored.rows == 15
    assert bench.scheduler.inside == 0
    assert bench.sample("forwards_total", replayed="no") == 2
    assert bench.sample("rows_computed_total") == 18
    assert bench.sample("forward_requests_sum") == 4 and bench.sample("queue_seconds_count") == 4


def test_half_of_those_who_ask_go_into_the_next_forward(bench):
    first = bench.ask(tokens(0, 70))
    running = bench.device.next()
    others = [bench.ask(tokens(100 * n, 70)) for n in range(1, 8)]
    running.end()
    good(first, tokens(0, 70))
    for requests in (4, 3):
        shared = bench.device.next()
        assert len(shared.sequences) == requests
        shared.end()
    for n, future in enumerate(others, 1):
        good(future, tokens(100 * n, 70))


def test_a_forward_starts_before_the_answers_of_the_last_go_out(bench):
    first = bench.ask(tokens(0))
    running = bench.device.next()
    second = bench.ask(tokens(100))
    assert bench.device.prepared.get(timeout=SECONDS) == {0}
    assert bench.device.prepared.get(timeout=SECONDS) == {100}
    bench.until(lambda: bench.scheduler._ready)
    seen = []
    bench.device.fail_start = lambda sequences: seen.append(first.done())
    running.end()
    run = bench.device.next()
    assert seen == [False]
    good(first, tokens(0))
    run.end()
    good(second, tokens(100))


def test_nobody_waits_for_a_packing_that_is_not_done(bench):
    first = bench.ask(tokens(0))
    running = bench.device.next()
    packing, go_on = threading.Event(), threading.Event()

    def slow(sequences: list[np.ndarray]) -> None:
        packing.set()
        assert go_on.wait(SECONDS)

    bench.device.fail_prepare = slow
    second = bench.ask(tokens(100))
    assert packing.wait(SECONDS)
    running.end()
    good(first, tokens(0))
    go_on.set()
    bench.device.next().end()
    good(second, tokens(100))


def test_who_arrives_while_the_device_is_free_waits_for_one_packing_only(bench):
    arrived: list[Future[Scored]] = []

    def arrive(sequences: list[np.ndarray]) -> None:
        if len(arrived) < 5:
            arrived.append(bench.ask(tokens(100 * (len(arrived) + 1))))

    bench.device.fail_prepare = arrive
    first = bench.ask(tokens(0))
    run = bench.device.next()
    assert run.first_tokens() == {0}
    run.end()
    good(first, tokens(0))
    bench.end_until(lambda: len(arrived) == 5 and all(future.done() for future in arrived))
    for n, future in enumerate(arrived, 1):
        good(future, tokens(100 * n))


def test_who_does_not_fit_causes_no_new_packing():
    bench = Bench(share_rows=3)
    first = bench.ask(tokens(0))
    running = bench.device.next()
    others = [bench.ask(tokens(100 * n)) for n in (1, 2, 3, 4, 5)]
    bench.until(lambda: bench.scheduler._ready)
    running.end()
    for expected in ({100, 200}, {300, 400}, {500}):
        run = bench.device.next()
        assert run.first_tokens() == expected
        run.end()
    for n, future in enumerate(others, 1):
        good(future, tokens(100 * n))
    good(first, tokens(0))
    packed = [bench.device.prepared.get() for _ in range(bench.device.prepared.qsize())]
    # The first one of them may have been packed before the second came.
    assert [each for each in packed if each != {100}] == [{0}, {100, 200}, {300, 400}, {500}]
    assert packed.count({100}) <= 1
    bench.close()


def test_many_threads_get_their_own_scores():
    bench = Bench(share_rows=40)
    draw = np.random.default_rng(0)
    requests = [
        [draw.integers(0, 4, draw.integers(1, 12)).astype(np.int32) for _ in range(draw.integers(1, 6))]
        for _ in range(400)
    ]

    def ask(sequences: list[np.ndarray]) -> Scored:
        with bench.scheduler.place() as place:
            return bench.scheduler.score(place, sequences, count_rows(sequences))

    with ThreadPoolExecutor(32) as pool:
        futures = [pool.submit(ask, request) for request in requests]
        bench.end_until(lambda: all(future.done() for future in futures))
    answers = [future.result() for future in futures]
    for sequences, scored in zip(requests, answers, strict=True):
        assert scored.scores.tolist() == [np.float32(score_of(each)) for each in sequences]
    assert max(scored.requests for scored in answers) > 1
    assert sum(1 / scored.requests for scored in answers) == pytest.approx(
        bench.sample("forwards_total", replayed="no")
    )
    bench.close()


# Who goes first


def ticket(sequences: list[np.ndarray], alone: bool = False) -> Ticket:
    return Ticket(Place(None), sequences, count_rows(sequences), alone=alone)


SEQUENCES = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=30).map(lambda ids: np.array(ids, dtype=np.int32)),
    min_size=1,
    max_size=4,
)


@settings(derandomize=True, deadline=None)
@given(
    waiting=st.lists(st.builds(ticket, SEQUENCES, st.booleans()), min_size=1, max_size=12),
    share_rows=st.integers(0, 60),
    more_rows=st.integers(0, 60),
    running=st.integers(0, 12),
    free_rows=st.integers(0, 60),
)
def test_choose(waiting, share_rows, more_rows, running, free_rows):
    max_rows = waiting[0].rows + more_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "_FREE_ROWS", free_rows)
        chosen = choose(waiting, share_rows, max_rows, running)
    assert chosen[0] is waiting[0]
    order = [waiting.index(each) for each in chosen]
    assert order == sorted(set(order))
    assert len(chosen) == 1 or not any(each.alone for each in chosen)
    rows = count_rows([sequence for each in chosen for sequence in each.sequences])
    assert rows <= min(waiting[0].rows + share_rows, max_rows)
    half = math.ceil((len(waiting) + running) / 2)
    # More than half of those who ask are taken only where that costs nothing, or another forward would cost more.
    for number, each in enumerate(chosen[1:], 1):
        before = [sequence for other in chosen[:number] for sequence in other.sequences]
        added = count_rows([*before, *each.sequences]) - count_rows(before)
        assert number < half or rows <= free_rows or each.rows - added >= free_rows
    if not waiting[0].alone and len(chosen) < half:
        # Who is small enough and was not taken found others of its kind, or older ones, in its place.
        for each in waiting[1:]:
            older = [other for other in chosen[1:] if waiting.index(other) < waiting.index(each)]
            taken = sum(other.rows for other in older)
            if not each.alone and each.rows + taken <= min(share_rows, more_rows):
                assert each in chosen


def test_what_is_shared_takes_no_room():
    state = np.arange(500, dtype=np.int32)
    waiting = [ticket([np.append(state, [n]).astype(np.int32)]) for n in range(1000, 1020)]
    assert len(choose(waiting, 10, 10**6, running=20)) == 11
    assert len(choose(waiting, 19, 10**6, running=20)) == 20


def test_forwards_become_even():
    """Eight clients, each of which asks again while the next forward runs."""
    clients = [ticket([np.full(70, n, dtype=np.int32)]) for n in range(8)]
    waiting, running = clients[1:], clients[:1]
    sizes = []
    for _ in range(4):
        chosen = choose(waiting, 1024, 10**6, len(running))
        sizes.append(len(chosen))
        waiting = [each for each in waiting if each not in chosen] + running
        running = chosen
    assert sizes == [4, 4, 4, 4]
    # Questions about a long text stay together.
    state = np.arange(200, dtype=np.int32)
    waiting = [ticket([np.append(state, np.full(40, n)).astype(np.int32)]) for n in range(1000, 1007)]
    assert len(choose(waiting, 1024, 10**6, 1)) == 7
    # Rows that cost nothing are not divided: two of 64 rows, which leave nobody behind.
    small = [ticket([np.full(64, n, dtype=np.int32)]) for n in range(3)]
    assert len(choose(small[:2], 1024, 10**6, 0)) == 2 and len(choose(small, 1024, 10**6, 0)) == 2


ROWS = st.one_of(st.integers(1, 100), st.integers(1000, 10_000))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 3), ROWS), min_size=1, max_size=40),
    share_rows=st.integers(100, 1000),
)
def test_nobody_starves(arrivals, share_rows):
    """A device of 10,000 rows a second, in a time of its own: the bounds that the module promises."""
    numbers = itertools.count()

    def arrival(rows: int) -> Ticket:
        return Ticket(Place(None), [np.full(1, next(numbers), dtype=np.int32)], rows)

    coming = sorted(((at, arrival(rows)) for at, rows in arrivals), key=lambda each: each[0])
    now, waiting, forward, running = 0.0, [], 0, 0
    # Of each who waits: the last forward that may begin without having it.
    bound: dict[Ticket, int] = {}
    while coming or waiting:
        if not waiting:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            _, new = coming.pop(0)
            small = sum(other.rows for other in waiting if other.rows <= share_rows)
            bound[new] = forward + (2 if new.rows + small <= share_rows else len(waiting) + 1)
            waiting.append(new)
        chosen = choose(waiting, share_rows, 10**6, running)
        forward, running = forward + 1, len(chosen)
        rows = sum(each.rows for each in chosen)
        assert rows <= waiting[0].rows + share_rows
        for each in chosen:
            assert forward <= bound[each]
        waiting = [each for each in waiting if each not in chosen]
        now += rows / 10_000


def test_small_ones_ride_along_with_the_first_of_several_large(bench):
    running = bench.ask(tokens(0))
    first = bench.device.next()
    large = [bench.ask(tokens(10_000 * n, 10_000)) for n in (1, 2, 3)]
    small = [bench.ask(tokens(100 * n)) for n in (1, 2)]
    first.end()
    run = bench.device.next()
    assert run.first_tokens() == {10_000, 100, 200}
    run.end()
    for n in (2, 3):
        run = bench.device.next()
        assert run.first_tokens() == {10_000 * n}
        run.end()
    for future in (running, *large, *small):
        future.result(SECONDS)


def test_a_request_is_kept_within_the_rows_of_a_forward():
    bench = Bench(max_rows=lambda: 12, share_rows=1000)
    bench.ask(tokens(0))
    first = bench.device.next()
    others = [bench.ask(tokens(100 * n, 5)) for n in (1, 2, 3)]
    first.end()
    assert (run := bench.device.next()).first_tokens() == {100, 200}
    run.end()
    assert (run := bench.device.next()).first_tokens() == {300}
    run.end()
    for n, future in enumerate(others, 1):
        good(future, tokens(100 * n, 5))
    bench.close()


# The wait


class Returning:
    """Two clients who asked in turn and came back 1 ms after each answer, on a device that takes 20 ms.

    One forward runs, of `running`; `waiting` waits for the next.
    """

    def __init__(self, rounds: int = 3, back: float = 0.001, took: float = 0.02, length: int = 3) -> None:
        self.clock, self._took, self._length = Clock(), took, length
        self.bench = Bench(wait_seconds=0.004, clock=self.clock)
        self._next = 0
        self.running, self.waiting = self.ask(), None
        self.run = self.bench.device.next()
        self.waiting = self.ask()
        for _ in range(rounds):
            self.end()
            self.run = self.bench.device.next()
            self.clock.now += back
            self.running, self.waiting = self.waiting, self.ask()

    def ask(self) -> Future[Scored]:
        self._next += 1000
        return self.bench.ask(tokens(self._next, self._length))

    def end(self) -> None:
        """The forward that runs ends, and its answers go out."""
        self.clock.now += self._took
        self.run.end()
        self.running.result(SECONDS)

    def started(self) -> set[int] | None:
        """The first tokens of the forward that is started, None where the device stays free for a long time."""
        try:
            self.run = self.bench.device.runs.get(timeout=0.2)
        except queue.Empty:
            return None
        return self.run.first_tokens()

    def close(self) -> None:
        self.clock.now += 1
        self.bench.close()


def test_the_device_stays_free_for_those_who_come_back():
    two = Returning()
    waiting = two.waiting
    two.end()
    assert two.started() is None
    two.clock.now += 0.001
    # As many as were answered: nobody else is waited for.
    back = two.ask()
    assert two.started() == {two._next - 1000, two._next}
    two.clock.now += 0.02
    two.run.end()
    assert waiting.result(SECONDS).requests == back.result(SECONDS).requests == 2
    # The first of the two to come back is not alone either.
    two.clock.now += 0.001
    first = two.ask()
    assert two.started() is None
    second = two.ask()
    assert two.started() == {two._next - 1000, two._next}
    two.run.end()
    assert first.result(SECONDS).waited == second.result(SECONDS).waited == 0
    two.close()


def test_who_does_not_come_back_is_waited_for_no_longer_than_said():
    two = Returning()
    two.end()
    two.clock.now += 0.0039
    with two.bench.scheduler._changed:
        two.bench.scheduler._changed.notify()
    assert two.started() is None
    two.clock.now += 0.0002
    assert two.started() == {two._next}
    two.run.end()
    assert two.waiting.result(SECONDS).waited == pytest.approx(0.0241)
    two.close()


def test_a_client_alone_is_never_kept():
    clock = Clock()
    bench = Bench(wait_seconds=0.004, clock=clock)
    for number in range(10):
        asked = bench.ask(tokens(100 * number))
        run = bench.device.next()
        clock.now += 0.02
        run.end()
        assert good(asked, tokens(100 * number)).waited == 0
        clock.now += 0.001
    assert bench.scheduler._returning > 0.9
    bench.close()


@pytest.mark.parametrize(
    "options",
    [
        # Clients who ask for the first time are not known to come back,
        {"rounds": 1},
        # or come back later than the device would stay free.
        {"back": 0.005},
        # A forward saved takes less than the wait.
        {"took": 0.002},
        # Two forwards in one take about as long as the two.
        {"length": 127},
        {"length": 200},
    ],
    ids=lambda options: "_".join(map(str, *options.items())),
)
def test_the_device_stays_free_only_where_that_pays(options):
    two = Returning(**options)
    two.end()
    assert two.started() == {two._next}
    two.run.end()
    two.close()


@pytest.mark.parametrize(
    ("waiting", "answered", "pays"),
    [
        ([70], [70], True),
        ([], [70, 70], True),
        ([70, 70], [70], True),
        # Nobody, or one client alone.
        ([70], [], False),
        ([], [70], False),
        # The first to come back fills a forward of its own.
        ([], [127, 127], False),
        ([127], [127], False),
        # Those who wait fill the next forward without the one who comes back.
        ([200], [70], False),
    ],
)
def test_when_waiting_for_those_answered_pays(waiting, answered, pays):
    bench = Bench(wait_seconds=0.004)
    scheduler = bench.scheduler
    scheduler._returning, scheduler._few_seconds = 1.0, 0.02
    scheduler._queue.extend(ticket([tokens(0, rows)]) for rows in waiting)
    assert scheduler._pays([ticket([tokens(0, rows)]) for rows in answered]) is pays
    scheduler._queue.clear()
    bench.close()


def test_all_who_are_waited_for_go_into_one_forward():
    """Not into two even ones, as where others are still running."""
    two = Returning(length=70)
    third = two.bench.ask(tokens(500, 70))
    two.end()
    assert two.started() is None
    two.ask()
    assert two.started() == {500, two._next - 1000, two._next}
    two.run.end()
    assert third.result(SECONDS).requests == 3
    two.close()


def test_who_came_back_before_and_no_longer_does_is_not_waited_for_again():
    two = Returning()
    kept = 0
    for _ in range(6):
        # The one answered leaves; another asks for the first time while the next forward runs.
        two.end()
        if two.started() is None:
            kept += 1
            two.clock.now += 0.005
            assert two.started() == {two._next}
        two.clock.now += 0.01
        two.running, two.waiting = two.waiting, two.ask()
    assert kept == 1
    two.end()
    assert two.started() == {two._next}
    two.run.end()
    two.close()


# What fails


@pytest.mark.parametrize("where", ["prepare", "start", "wait"])
def test_only_the_request_at_fault_fails(bench, where):
    first = bench.ask(tokens(0))
    running = bench.device.next()

    def fail(sequences: list[np.ndarray]) -> None:
        if any(sequence[0] == 200 for sequence in sequences):
            raise RuntimeError("the second one is at fault")

    if where == "prepare":
        bench.device.fail_prepare = fail
    if where == "start":
        bench.device.fail_start = fail
    others = [bench.ask(tokens(100 * n)) for n in (1, 2, 3)]
    running.end()
    good(first, tokens(0))
    seen = []

    def end(run: Run) -> None:
        seen.append(run.first_tokens())
        bad = where == "wait" and 200 in run.first_tokens()
        run.end(RuntimeError("the second one is at fault") if bad else None)

    bench.end_until(lambda: all(future.done() for future in others), end)
    alone = [{100}, {200}, {300}]
    assert seen == ([{100, 200, 300}, *alone] if where == "wait" else [{100}, {300}])
    assert good(others[0], tokens(100)).requests == 1
    good(others[2], tokens(300))
    with pytest.raises(RuntimeError, match="the second one is at fault"):
        others[1].result(SECONDS)
    assert bench.sample("requests_run_again_total", reason="failed") == 3
    later = bench.ask(tokens(400))
    bench.device.next().end()
    good(later, tokens(400))
    assert bench.scheduler.inside == 0


def test_scores_that_are_not_finite_are_computed_again_alone(bench):
    first = bench.ask(tokens(0))
    running = bench.device.next()
    others = [bench.ask(tokens(100 * n), tokens(100 * n, 4)) for n in (1, 2, 3)]
    running.end()
    good(first, tokens(0))
    shared = bench.device.next()
    assert shared.first_tokens() == {100, 200, 300}
    starts = [int(each[0]) for each in shared.sequences]
    shared.scores[starts.index(200) + 1] = math.nan
    shared.scores[starts.index(300)] = math.inf
    shared.end()
    good(others[0], tokens(100), tokens(100, 4))
    again = bench.device.next()
    assert again.first_tokens() == {200}
    again.end()
    scored = good(others[1], tokens(200), tokens(200, 4))
    assert scored.requests == 1
    last = bench.device.next()
    assert last.first_tokens() == {300}
    # Its own: this is its answer, whoever it shares a forward with.
    last.scores[:] = math.nan
    last.end()
    assert np.isnan(others[2].result(SECONDS).scores).all()
    assert bench.sample("requests_run_again_total", reason="not_finite") == 2


def test_without_memory_caches_are_let_go_and_each_runs_alone(bench):
    first = bench.ask(tokens(0))
    running = bench.device.next()
    others = [bench.ask(tokens(100 * n)) for n in (1, 2)]
    running.end()
    good(first, tokens(0))
    bench.device.next().end(NoMemory("of the test"))
    run = bench.device.next()
    assert bench.device.released == 1 and run.first_tokens() == {100}
    run.end()
    good(others[0], tokens(100))
    bench.device.next().end(NoMemory("of the test"))
    with pytest.raises(NoMemory):
        others[1].result(SECONDS)
    assert bench.device.released == 2 and bench.scheduler.broken is None
    assert bench.sample("requests_run_again_total", reason="no_memory") == 2


def test_without_memory_nothing_is_kept_by_the_error(bench):
    """The frames of a failed forward hold its activations; they must be gone when the next one allocates."""

    class Activations:
        pass

    held = []

    def fail(sequences: list[np.ndarray]) -> None:
        activations = Activations()
        held.append(weakref.ref(activations))
        raise NoMemory("of the test")

    bench.device.fail_start = fail
    seen = []
    bench.device.release_memory = lambda: seen.append(held[-1]())
    future = bench.ask(tokens(0))
    assert isinstance(future.exception(SECONDS), NoMemory)
    assert seen == [None]


@pytest.mark.parametrize("where", ["start", "wait"])
def test_a_lost_device_answers_nothing_any_more(bench, where, caplog):
    reasons: list[str] = []
    bench.scheduler.on_broken(reasons.append)
    first = bench.ask(tokens(0))
    running = bench.device.next()
    others = [bench.ask(tokens(100 * n)) for n in (1, 2)]
    if where == "start":

        def fail(sequences: list[np.ndarray]) -> None:
            raise Lost("an illegal memory access")

        bench.device.fail_start = fail
        running.end()
        good(first, tokens(0))
    else:
        running.end(Lost("an illegal memory access"))
    for future in others if where == "start" else (first, *others):
        with pytest.raises(DeviceBroken, match="an illegal memory access"):
            future.result(SECONDS)
    assert bench.scheduler.broken == "Lost: an illegal memory access"
    assert reasons == ["Lost: an illegal memory access"]
    assert "the device is lost" in caplog.text
    bench.device.fail_start = lambda sequences: None
    with pytest.raises(DeviceBroken), bench.scheduler.place():
        raise AssertionError("a place on a lost device")
    with pytest.raises(DeviceBroken):
        bench.scheduler.score(Place(None), [tokens(0)], 3)
    bench.scheduler.on_broken(reasons.append)
    assert len(reasons) == 2
    assert bench.device.runs.empty() and bench.scheduler.inside == 0


def test_an_interrupted_forward_stops_nobody_else(bench):
    interrupted = bench.ask(tokens(0))
    running = bench.device.next()
    other = bench.ask(tokens(100))
    running.end(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        interrupted.result(SECONDS)
    bench.device.next().end()
    good(other, tokens(100))
    assert bench.scheduler.inside == 0


# A full queue


def test_a_full_queue_refuses():
    bench = Bench(most_requests=3)
    futures = [bench.ask(tokens(100 * n)) for n in range(3)]
    running = bench.device.next()
    with pytest.raises(Unavailable, match="3 requests are waiting") as caught, bench.scheduler.place():
        raise AssertionError("a place in a full queue")
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})
    assert bench.sample("refused_total") == 1
    running.end()
    bench.device.next().end()
    for n, future in enumerate(futures):
        good(future, tokens(100 * n))
    assert bench.scheduler.inside == 0
    again = bench.ask(tokens(0))
    bench.device.next().end()
    good(again, tokens(0))
    bench.close()


@pytest.mark.parametrize("reused", [0, 140])
def test_a_queue_full_of_rows_refuses_and_says_when_to_come_back(reused):
    clock = Clock()
    bench = Bench(most_rows=100, clock=clock)
    # More than fits, but nobody else is there.
    large = bench.ask(tokens(0, 150))
    running = bench.device.next()
    refused = bench.ask(tokens(1000, 1))
    error = refused.exception(SECONDS)
    assert isinstance(error, Unavailable) and error.headers == {"Retry-After": "1"}
    clock.now += 15.0
    running.end(reused=reused)
    good(large, tokens(0, 150))
    # 10 rows a second so far, computed or reused: 60 rows take 6 seconds.
    held = bench.ask(tokens(2000, 60))
    running = bench.device.next()
    fits = bench.ask(tokens(3000, 40))
    error = bench.ask(tokens(4000, 1)).exception(SECONDS)
    assert isinstance(error, Unavailable) and error.headers == {"Retry-After": "10"}
    running.end()
    bench.device.next().end()
    good(held, tokens(2000, 60))
    good(fits, tokens(3000, 40))
    assert bench.scheduler.inside == 0
    bench.close()


# A client that hangs up


def test_a_client_that_hung_up_is_not_computed(bench):
    gone = threading.Event()
    first = bench.ask(tokens(0))
    running = bench.device.next()
    left = bench.ask(tokens(100), gone=gone.is_set)
    stays = bench.ask(tokens(200), gone=lambda: False)
    gone.set()
    running.end()
    good(first, tokens(0))
    run = bench.device.next()
    assert run.first_tokens() == {200}
    run.end()
    good(stays, tokens(200))
    with pytest.raises(ClientGone):
        left.result(SECONDS)
    assert bench.sample("dropped_total") == 1 and bench.scheduler.inside == 0


def test_nobody_is_left_when_everybody_hung_up(bench):
    gone = threading.Event()
    first = bench.ask(tokens(0))
    running = bench.device.next()
    left = [bench.ask(tokens(100 * n), gone=gone.is_set) for n in (1, 2, 3)]
    bench.until(lambda: bench.scheduler._ready)
    gone.set()
    running.end()
    good(first, tokens(0))
    for future in left:
        with pytest.raises(ClientGone):
            future.result(SECONDS)
    assert bench.device.runs.empty()
    later = bench.ask(tokens(500))
    bench.device.next().end()
    good(later, tokens(500))


def test_a_client_that_hung_up_frees_its_place():
    bench = Bench(most_requests=3)
    gone = threading.Event()
    first = bench.ask(tokens(0))
    running = bench.device.next()
    left = bench.ask(tokens(100), gone=gone.is_set)
    second = bench.ask(tokens(200))
    assert isinstance(bench.ask(tokens(300)).exception(SECONDS), Unavailable)
    gone.set()
    third = bench.ask(tokens(300))
    assert not third.done()
    running.end()
    run = bench.device.next()
    assert run.first_tokens() == {200, 300}
    run.end()
    # Its thread had the lead, and ran that forward for the others.
    assert isinstance(left.exception(SECONDS), ClientGone)
    for future, start in ((first, 0), (second, 200), (third, 300)):
        good(future, tokens(start))
    assert bench.scheduler.inside == 0
    bench.close()


def test_a_leader_that_hung_up_before_it_woke_passes_the_lead_on():
    bench = Bench(share_rows=0)
    first = bench.ask(tokens(0))
    running = bench.device.next()
    gone, starting, go_on = threading.Event(), threading.Event(), threading.Event()

    def slow(sequences: list[np.ndarray]) -> None:
        starting.set()
        assert go_on.wait(SECONDS)

    bench.device.fail_start = slow
    second = bench.ask(tokens(100))
    left = bench.ask(tokens(200), gone=gone.is_set)
    running.end()
    # The one that left has the lead now, and is woken when the forward before it has started.
    assert starting.wait(SECONDS)
    gone.set()
    # As for somebody who finds the queue full.
    with bench.scheduler._changed:
        bench.scheduler._drop_gone()
    last = bench.ask(tokens(300))
    assert isinstance(left.exception(SECONDS), ClientGone)
    go_on.set()
    for future, start in ((second, 100), (last, 300)):
        bench.device.next().end()
        good(future, tokens(start))
    good(first, tokens(0))
    bench.close()


@pytest.mark.parametrize("fails", [False, True])
def test_who_hung_up_after_it_was_packed_for_a_free_device_is_not_run_again(bench, fails):
    first = bench.ask(tokens(0))
    running = bench.device.next()
    gone, packing, go_on = threading.Event(), threading.Event(), threading.Event()

    def slow(sequences: list[np.ndarray]) -> None:
        packing.set()
        assert go_on.wait(SECONDS)
        if len(sequences) == 2:
            # Packed while the device is free: it will be run as it is. Somebody finds the queue full.
            gone.set()
            with bench.scheduler._changed:
                bench.scheduler._drop_gone()

    bench.device.fail_prepare = slow
    stays = bench.ask(tokens(100))
    assert packing.wait(SECONDS)
    left = bench.ask(tokens(200), gone=gone.is_set)
    running.end()
    good(first, tokens(0))
    go_on.set()
    run = bench.device.next()
    assert run.first_tokens() == {100, 200}
    assert isinstance(left.exception(SECONDS), ClientGone)
    run.end(RuntimeError("of the test") if fails else None)
    if fails:
        run = bench.device.next()
        assert run.first_tokens() == {100}
        run.end()
    good(stays, tokens(100))
    assert bench.scheduler.inside == 0 and not bench.queue and bench.scheduler._leader is None
    assert bench.sample("dropped_total") == 1 and bench.sample("queue_seconds_count") == 2


def test_one_leads_at_a_time(bench):
    """Of two leaders one would wait for the other's news."""
    starting, go_on = threading.Event(), threading.Event()
    pack, packing, most = bench.scheduler._pack, 0, 0

    def counted() -> Any:
        nonlocal packing, most
        packing += 1
        most = max(most, packing)
        try:
            return pack()
        finally:
            packing -= 1

    bench.scheduler._pack = counted

    def slow(sequences: list[np.ndarray]) -> None:
        starting.set()
        assert go_on.wait(SECONDS)

    bench.device.fail_start = slow
    first = bench.ask(tokens(0))
    assert starting.wait(SECONDS)
    others = [bench.ask(tokens(100 * n)) for n in (1, 2)]
    bench.until(lambda: bench.scheduler._ready)
    leader = bench.queue[0]
    go_on.set()
    # The one that starts wakes the leader, which leads already.
    running = bench.device.next()
    bench.until(leader.woken.is_set)
    running.end()
    good(first, tokens(0))
    shared = bench.device.next()
    others.append(bench.ask(tokens(300)))
    bench.until(lambda: bench.scheduler._ready)
    # Time for whoever should not lead to show itself.
    bench.device.fail_prepare = lambda sequences: time.sleep(0.05)
    shared.end(RuntimeError("of the test"))
    for n, future in enumerate(others, 1):
        run = bench.device.next()
        assert run.first_tokens() == {100 * n}
        run.end()
        good(future, tokens(100 * n))
    assert most == 1


# Launched ahead


class Ahead:
    """A forward of requests about 100 runs since 0 seconds on the clock, on a device that takes 0.02 for it.

    Forwards are replays: the next one may be launched from 0.019 on.
    """

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.bench = Bench(clock=self.clock, **options)
        self.bench.device.same_kind = "replay"
        first = self.bench.ask(tokens(0))
        run = self.bench.device.next()
        self.clock.now += 0.02
        run.end()
        good(first, tokens(0))
        self.running = self.bench.ask(tokens(100))
        self.run = self.bench.device.next()

    def launches(self) -> bool:
        """Whether a forward is launched within a time that is long for a thread."""
        try:
            self.next = self.bench.device.runs.get(timeout=0.2)
        except queue.Empty:
            return False
        return True


def test_a_replay_is_launched_before_the_one_that_runs_has_ended():
    ahead = Ahead()
    bench, clock = ahead.bench, ahead.clock
    clock.now += 0.010
    second = bench.ask(tokens(200))
    clock.now += 0.005
    third = bench.ask(tokens(300))
    assert not ahead.launches()
    # Until a millisecond before the end others may join.
    clock.now += 0.0045
    assert ahead.launches() and ahead.next.first_tokens() == {200, 300}
    later = bench.ask(tokens(400))
    clock.now += 0.0005
    assert not ahead.running.done() and not bench.scheduler._unanswered
    ahead.run.end()
    scored = good(ahead.running, tokens(100))
    assert (scored.waited, scored.took) == pytest.approx((0.0, 0.02))
    shared = ahead.next
    # The second began when the first had ended.
    clock.now += 0.018
    assert not ahead.launches()
    clock.now += 0.012
    assert ahead.launches() and ahead.next.first_tokens() == {400}
    shared.end()
    # It began when the device was free, and took what it took from then on.
    assert [
        (good(each, tokens(start)).waited, each.result().took)
        for each, start in ((second, 200), (third, 300))
    ] == [
        pytest.approx((0.010, 0.03)),
        pytest.approx((0.005, 0.03)),
    ]
    ahead.next.end()
    good(later, tokens(400))
    assert bench.scheduler.inside == 0 and not bench.scheduler._in_flight
    assert bench.sample("forward_seconds_sum") == pytest.approx(0.02 + 0.02 + 0.03)
    bench.close()


@pytest.mark.parametrize("why", ["no replay", "unknown", "waits for those who come back", "two already"])
def test_what_is_not_launched_ahead(why):
    ahead = Ahead(wait_seconds=0.004)
    bench = ahead.bench
    if why == "waits for those who come back":
        bench.scheduler._returning = 1.0
    if why == "no replay":
        bench.device.kind = lambda prepared: None
    if why == "unknown":
        bench.scheduler._took.clear()
    ahead.clock.now += 0.0195
    others = [bench.ask(tokens(200))]
    assert ahead.launches() == (why == "two already")
    if why == "two already":
        others.append(bench.ask(tokens(300)))
        launched = ahead.next
        assert not ahead.launches()
        launched.end()
    ahead.run.end()
    good(ahead.running, tokens(100))
    # The time for which a free device waits for others is over.
    ahead.clock.now += 1
    bench.end_until(lambda: all(each.done() for each in others))
    for number, each in enumerate(others, 2):
        good(each, tokens(100 * number))
    bench.close()


def test_nobody_is_launched_ahead_who_has_hung_up():
    ahead = Ahead()
    gone = threading.Event()
    left = ahead.bench.ask(tokens(200), gone=gone.is_set)
    stays = ahead.bench.ask(tokens(300))
    ahead.bench.until(lambda: ahead.bench.scheduler._ready)
    gone.set()
    ahead.clock.now += 0.0195
    assert ahead.launches() and ahead.next.first_tokens() == {300}
    ahead.run.end()
    ahead.next.end()
    # Its thread had the lead, and ran that forward for the other.
    assert isinstance(left.exception(SECONDS), ClientGone)
    good(ahead.running, tokens(100))
    good(stays, tokens(300))
    ahead.bench.close()


def test_what_was_launched_on_a_device_that_is_lost_is_not_answered():
    ahead = Ahead()
    reasons: list[str] = []
    ahead.bench.scheduler.on_broken(reasons.append)
    second = ahead.bench.ask(tokens(200))
    ahead.clock.now += 0.0195
    assert ahead.launches()
    ahead.run.end(Lost("an illegal memory access"))
    assert isinstance(ahead.running.exception(SECONDS), DeviceBroken)
    ahead.next.end()
    assert isinstance(second.exception(SECONDS), DeviceBroken)
    assert reasons == ["Lost: an illegal memory access"] and ahead.bench.scheduler.inside == 0
    assert ahead.bench.scheduler.broken == "Lost: an illegal memory access"
    ahead.bench.close()


def test_a_fault_of_the_one_that_runs_does_not_touch_the_one_launched_ahead():
    ahead = Ahead()
    second = ahead.bench.ask(tokens(200))
    ahead.clock.now += 0.0195
    assert ahead.launches()
    ahead.run.end(RuntimeError("of the test"))
    with pytest.raises(RuntimeError, match="of the test"):
        ahead.running.result(SECONDS)
    ahead.next.end()
    good(second, tokens(200))
    ahead.bench.close()


def test_one_that_cannot_be_launched_leaves_the_times_of_the_one_that_runs_alone():
    ahead = Ahead()

    def fail(sequences: list[np.ndarray]) -> None:
        raise RuntimeError("of the test")

    ahead.bench.device.fail_start = fail
    ahead.clock.now += 0.0195
    with pytest.raises(RuntimeError, match="of the test"):
        ahead.bench.ask(tokens(200)).result(SECONDS)
    ahead.clock.now += 0.0005
    ahead.run.end()
    scored = good(ahead.running, tokens(100))
    assert (scored.waited, scored.took) == pytest.approx((0.0, 0.02))
    assert ahead.bench.scheduler._took == {"replay": pytest.approx(0.02)}
    ahead.bench.close()


def test_a_thread_that_is_slow_to_see_the_end_of_the_first_of_two():
    ahead = Ahead()
    ahead.clock.now += 0.0195
    second = ahead.bench.ask(tokens(200))
    assert ahead.launches()
    ahead.clock.now += 0.0205
    ahead.next.end()
    good(second, tokens(200))
    ahead.run.end()
    scored = good(ahead.running, tokens(100))
    assert (scored.waited, scored.took) == pytest.approx((0.0, 0.04))
    assert ahead.bench.scheduler._rows_per_second < 1000
    ahead.bench.close()


# Any order of events


@settings(derandomize=True, deadline=None, max_examples=30)
@given(data=st.data())
def test_any_order_of_arrivals_ends_and_faults(data):
    """Everybody is answered once: its own scores, or a fault of its own."""
    with closing(Bench(share_rows=data.draw(st.sampled_from([0, 5, 1000])), most_requests=8)) as bench:
        bench.device.same_kind = data.draw(st.sampled_from([None, "replay"]))
        waiting: dict[int, tuple[Future[Scored], np.ndarray, str]] = {}
        fault = {0: "none", 1: "nan", 2: "fails", 3: "leaves"}
        kinds: dict[int, str] = {}
        gone: dict[int, threading.Event] = {}
        refused = 0
        for number in range(1, data.draw(st.integers(1, 14)) + 1):
            start, length = 1000 * number, data.draw(st.integers(1, 6))
            kinds[start] = kind = fault[data.draw(st.sampled_from([0, 0, 0, 1, 2, 3]))]
            gone[start] = threading.Event()
            future = bench.ask(tokens(start, length), gone=gone[start].is_set)
            waiting[start] = (future, tokens(start, length), kind)
            if kind == "leaves" and data.draw(st.booleans()):
                gone[start].set()
            if data.draw(st.booleans()) and not bench.device.runs.empty():
                _end(bench.device.next(), kinds)
        bench.end_until(
            lambda: all(future.done() for future, _, _ in waiting.values()), lambda run: _end(run, kinds)
        )
        for start, (future, sequence, kind) in waiting.items():
            error = future.exception(SECONDS)
            if isinstance(error, Unavailable):
                refused += 1
            elif isinstance(error, ClientGone):
                assert kind == "leaves" and gone[start].is_set()
            elif kind == "fails":
                assert isinstance(error, RuntimeError) and str(error) == f"fault of {start}"
            else:
                assert error is None
                scores = future.result().scores
                assert np.isnan(scores).all() if kind == "nan" else scores.tolist() == [score_of(sequence)]
        assert bench.scheduler.inside == 0 and bench.scheduler._leader is None
        assert (bench.sample("refused_total") or 0) == refused


@pytest.mark.parametrize("kind", [None, "replay"])
def test_many_threads_with_faults_leave_nobody_behind(kind):
    """Threads that ask all the time, of a full queue and a faulty device, with clients that hang up at any moment."""
    bench = Bench(share_rows=20, most_requests=10)
    bench.device.same_kind = kind
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()

    def client(number: int) -> None:
        draw = np.random.default_rng(number)
        for turn in range(60):
            start = 1000 * (100 * number + turn + 1)
            kind = ("none", "none", "nan", "fails", "leaves")[draw.integers(5)]
            kinds[start] = kind
            sequence = tokens(start, int(draw.integers(1, 9)))
            polls = itertools.count()
            patience = int(draw.integers(0, 4)) if kind == "leaves" else 10**9
            try:
                about = SimpleNamespace(client_gone=lambda: next(polls) >= patience)  # noqa: B023
                with answering(about), bench.scheduler.place() as place:
                    bench.scheduler.claim(place, len(sequence))
                    scores = bench.scheduler.score(place, [sequence], len(sequence)).scores
                good = np.isnan(scores).all() if kind == "nan" else scores.tolist() == [score_of(sequence)]
                found = "scores" if good and kind != "fails" else f"scores of {kind}"
            except Unavailable:
                found = "refused"
            except ClientGone:
                found = "dropped" if kind == "leaves" else f"dropped {kind}"
            except RuntimeError as error:
                found = (
                    "failed" if kind == "fails" and str(error) == f"fault of {start}" else f"{kind}: {error}"
                )
            with lock:
                outcomes[found] += 1

    kinds: dict[int, str] = {}
    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(16)]
    for thread in threads:
        thread.start()
    bench.end_until(
        lambda: not any(thread.is_alive() for thread in threads), lambda run: _end(run, kinds), seconds=60
    )
    assert set(outcomes) == {"scores", "refused", "dropped", "failed"}, outcomes
    assert outcomes.total() == 16 * 60
    assert bench.sample("refused_total") == outcomes["refused"]
    assert bench.sample("dropped_total") == outcomes["dropped"]
    scheduler = bench.scheduler
    assert scheduler.inside == scheduler._rows_inside == 0
    assert scheduler._leader is None and not scheduler._queue and not scheduler._unanswered
    bench.close()


def _end(run: Run, kinds: dict[int, str]) -> None:
    starts = [int(sequence[0]) for sequence in run.sequences]
    for start in starts:
        if kinds[start] == "fails":
            run.end(RuntimeError(f"fault of {start}"))
            return
    for index, start in enumerate(starts):
        if kinds[start] == "nan":
            run.scores[index] = math.nan
    run.end()
