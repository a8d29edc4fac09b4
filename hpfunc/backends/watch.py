"""Notices that a rank has failed while a device waits for it: the host does not wait, so nobody else would."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._errors import HpfuncError
from .protocol import Poll

# Note [A failed peer, seen from a device]
# The host enqueues collectives and goes on. If a peer has failed, it blocks much later, in `loss.item()`, for ever. So
# a thread looks at the board while collectives are in flight. A peer that was killed has written nothing there, so the
# thread also asks the library whether it has lost a rank. If there is an error, it raises this error in the thread
# that has issued them, as Ctrl-C does, and then aborts the communicators. The device goes on, and the host raises as
# soon as it runs Python again, before it can use what an aborted collective has left.

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Flight:
    """One collective in flight."""

    label: str
    event: Any
    poll: Poll
    thread: int


class Watch:
    """Looks at the board while collectives are in flight. See Note [A failed peer, seen from a device].

    Args:
        abort: gives up all communicators.
        failed: returns an error of a library that has lost a rank; None if there is none.
    """

    def __init__(self, abort: Callable[[], None], failed: Callable[[], Exception | None] = lambda: None) -> None:
        self._abort, self._failed = abort, failed
        self._flights: deque[_Flight] = deque()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, label: str, event: Any, poll: Poll) -> None:
        """A collective was launched; `event` follows it on its stream."""
        self._flights.append(_Flight(label, event, poll, threading.get_ident()))
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpfunc watch", daemon=True)
            self._thread.start()

    def fail(self) -> None:
        """The step has failed: nobody waits for what is in flight, and no peer may."""
        self._flights.clear()
        if threading.current_thread() is not self._thread:
            self._abort()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            since = time.perf_counter()
            while self._flights:
                time.sleep(POLL_S)
                since = self._look(since)

    def _look(self, since: float) -> float:
        """Looks at the oldest collective in flight. Returns when it became the oldest."""
        flights = self._flights
        while flights and flights[0].event.query():
            flights.popleft()
            since = time.perf_counter()
        try:
            flight = flights[0]
        except IndexError:  # done, or failed meanwhile
            return since
        try:
            flight.poll(flight.label, self._failed() or time.perf_counter() - since)
        except HpfuncError as error:
            flights.clear()
            _raise_in(flight.thread, error)
            self._abort()
        return since


def _raise_in(thread: int, error: HpfuncError) -> None:
    """Raises an error in another thread, when it next runs Python."""
    text = str(error)

    def init(self: HpfuncError) -> None:
        HpfuncError.__init__(self, text)

    def reduce(self: HpfuncError) -> tuple[type[HpfuncError], tuple[str]]:
        return type(error), (text,)

    kind = type(type(error).__name__, (type(error),), {"__init__": init, "__reduce__": reduce})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
