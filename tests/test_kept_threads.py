"""kept_threads.py: every call at once, threads woken again, none that stays."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from openjev_fast_plugin import kept_threads
from openjev_fast_plugin.kept_threads import KeptThreads

NAME = "kept by a test"


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def idle(threads: KeptThreads, count: int) -> bool:
    return len(threads._idle) == count


@pytest.fixture
def threads() -> Iterator[KeptThreads]:
    made = KeptThreads(NAME, 3, 60.0)
    yield made
    made.close()
    wait_for(lambda: not alive())


def ran_on(threads: KeptThreads) -> threading.Thread:
    found: queue.Queue[threading.Thread] = queue.Queue()
    threads.run(lambda: found.put(threading.current_thread()))
    return found.get(timeout=20)


def block(threads: KeptThreads, count: int) -> Callable[[], None]:
    """So many calls that have all begun; they end when what is returned is called."""
    begun, end = threading.Barrier(count + 1), threading.Event()

    def call() -> None:
        begun.wait(20)
        assert end.wait(20)

    for _ in range(count):
        threads.run(call)
    begun.wait(20)
    return end.set


def test_one_thread_runs_calls_that_follow_each_other(threads):
    first = ran_on(threads)
    assert first.daemon
    for _ in range(20):
        wait_for(lambda: idle(threads, 1))
        assert ran_on(threads) is first
    assert alive() == [first]


def test_no_call_waits_for_another(threads):
    for _ in range(3):
        # More than are kept, and more than were there before.
        end = block(threads, 10)
        assert len(alive()) == 10
        end()
        wait_for(lambda: len(alive()) == 3 and idle(threads, 3))


def test_an_idle_thread_ends_after_a_while():
    threads = KeptThreads(NAME, 3, 0.05)
    first = ran_on(threads)
    wait_for(lambda: not alive())
    assert idle(threads, 0)
    assert ran_on(threads) is not first
    wait_for(lambda: not alive())


def test_a_call_that_comes_as_a_thread_gives_up_is_run(monkeypatch):
    threads = KeptThreads(NAME, 3, 60.0)
    called = threading.Event()

    class Late(queue.SimpleQueue):
        waits = 0

        def get(self, *args, timeout=None):
            if timeout is None:
                return super().get(timeout=20)
            Late.waits += 1
            if Late.waits == 1:
                threads.run(called.set)
                raise queue.Empty
            return super().get(timeout=timeout)

    monkeypatch.setattr(kept_threads.queue, "SimpleQueue", Late)
    first = ran_on(threads)
    assert called.wait(20)
    assert alive() == [first]
    threads.close()
    wait_for(lambda: not alive())


def test_closing_ends_idle_threads_and_later_busy_ones(threads):
    end = block(threads, 2)
    ran_on(threads)
    wait_for(lambda: idle(threads, 1))
    threads.close()
    wait_for(lambda: len(alive()) == 2)
    # Runs what still comes, on a thread that is not kept.
    ran_on(threads)
    end()
    wait_for(lambda: not alive())


def test_an_idle_thread_holds_nothing_of_its_last_call(threads):
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    threads.run(lambda kept=held: None)
    del held
    wait_for(lambda: idle(threads, 1))
    wait_for(lambda: gone() is None)


def test_a_call_that_raises_ends_its_thread_alone(threads, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda about: seen.append(about.exc_value))
    threads.run(lambda: 1 / 0)
    wait_for(lambda: not alive())
    assert isinstance(seen[0], ZeroDivisionError)
    assert ran_on(threads).name == NAME


def test_the_interpreter_does_not_wait_for_idle_threads():
    program = """
import threading
from openjev_fast_plugin.kept_threads import KeptThreads
done = threading.Event()
KeptThreads("idle", 3, 60.0).run(done.set)
assert done.wait(20)
"""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)
    assert time.monotonic() - start < 30
