"""A failed peer, seen from a device: an error in the thread that waits, and the communicators aborted."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable

import pytest

from hpfunc import HpfuncError, PeerError
from hpfunc.backends.watch import Watch

TEXT = "hpfunc: rank 1 failed while rank 0 waited for 'gather block'"


class Event:
    """A point of a stream, which the device reaches when the test says so."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


class Caller:
    """A thread that launches a collective and then computes; `abort` ends the device's wait."""

    def __init__(self, poll: Callable[[str, float], None]) -> None:
        self.event, self.aborted, self.ready, self.poll = Event(), threading.Event(), threading.Event(), poll
        self.watch = Watch(self.aborted.set)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        assert self.ready.wait(10)

    def run(self) -> None:
        try:
            self.watch.add("gather block", self.event, self.poll)
            self.ready.set()
            self.aborted.wait()  # as `loss.item()` does
            self.lost = "used what an aborted collective has left"
            time.sleep(10)
        except HpfuncError as error:
            self.error = error


def test_a_failed_peer_ends_the_wait_of_the_caller_with_the_error() -> None:
    def poll(label: str, elapsed_s: float) -> None:
        assert label == "gather block"
        raise PeerError(TEXT)

    caller = Caller(poll)
    caller.thread.join(5)
    assert isinstance(caller.error, PeerError)
    assert str(caller.error) == TEXT
    assert type(caller.error).__name__ == "PeerError"
    assert isinstance(pickle.loads(pickle.dumps(caller.error)), PeerError)
    assert not hasattr(caller, "lost")


def test_the_time_that_a_collective_has_taken_is_told() -> None:
    told: list[float] = []

    def poll(label: str, elapsed_s: float) -> None:
        told.append(elapsed_s)
        if len(told) == 2:
            raise PeerError(TEXT)

    Caller(poll).thread.join(5)
    assert 0 < told[0] < told[1]


def test_what_the_device_has_done_is_not_looked_at() -> None:
    polled = threading.Event()
    caller = Caller(lambda label, elapsed_s: polled.set())
    assert polled.wait(5)
    caller.event.is_done = True
    time.sleep(1.2)  # the watch notices it
    polled.clear()
    caller.aborted.set()
    assert not polled.wait(1.2)


def test_after_a_failure_of_its_own_a_rank_gets_no_second_error() -> None:
    def poll(label: str, elapsed_s: float) -> None:
        raise PeerError(TEXT)

    event = Event()
    aborted = threading.Event()
    watch = Watch(aborted.set)
    watch.add("gather block", event, poll)
    watch.fail()
    assert aborted.is_set()
    time.sleep(1.2)  # an error would be raised here


@pytest.mark.parametrize("count", [1, 5])
def test_it_starts_one_thread(count: int) -> None:
    def threads() -> int:
        return sum(thread.name == "hpfunc watch" for thread in threading.enumerate())

    before, watch = threads(), Watch(pytest.fail)
    for _ in range(count):
        event = Event()
        event.is_done = True
        watch.add("gather block", event, lambda label, elapsed_s: None)
    assert threads() == before + 1
