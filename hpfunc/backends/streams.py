"""Streams of an accelerator, the same for every framework that has streams and events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from .protocol import Poll

Stream = Any


@dataclass(slots=True)
class DevicePending:
    """A point on a stream of a device."""

    label: str
    event: Any

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls back once the device has reached this point. The host waits for it, so it is used for pictures only."""
        self.event.synchronize()
        callback()


@dataclass
class DeviceStreams:
    """See `Streams`: every op is enqueued on a stream, waits are edges between streams, the host never blocks.

    Memory needs no `record_stream`: a buffer is allocated under its own stream, and freed behind waits of that stream.

    Attributes:
        current: returns the caller's stream.
        stream: makes a stream.
        event: makes an event.
        on: returns a context whose work goes to a stream.
        span: returns a context whose work has a name in profiles.
    """

    current: Callable[[], Stream]
    stream: Callable[[], Stream]
    event: Callable[[], Any]
    on: Callable[[Stream], AbstractContextManager[Any]]
    span: Callable[[str], AbstractContextManager[Any]] = lambda label: nullcontext()
    _made: dict[str, Stream] = field(default_factory=dict, init=False)
    _caller: Stream = field(default=None, init=False)  # the caller's stream, while an op is issued on another one

    def _named(self, name: str) -> Stream:
        if name == "compute":
            return self._caller or self.current()
        if name not in self._made:
            self._made[name] = self.stream()
        return self._made[name]

    def issue(
        self, label: str, stream: str, waits: Iterable[Any], work: Callable[[], Any], poll: Poll
    ) -> DevicePending:
        """Enqueues `work` on a stream, behind `waits`, and then a wait for the collectives that it returns."""
        target, self._caller = self._named(stream), self._named("compute")
        try:
            with self.on(target), self.span(label):
                for pending in waits:
                    target.wait_event(pending.event)
                for collective in work() or ():
                    collective.wait()  # an edge from the communicator's own stream; the host goes on
                event = self.event()
                event.record(target)
        finally:
            self._caller = None
        return DevicePending(label, event)

    def wait(self, pending: Any, poll: Poll) -> None:
        """Makes the compute stream wait."""
        self._named("compute").wait_event(pending.event)

    def runs_at_once(self) -> bool:
        """Returns False: a call only enqueues work."""
        return False

    def memory(self, stream: str) -> AbstractContextManager[Any]:
        """Returns a context in which tensors are allocated out of the memory of a stream."""
        return self.on(self._named(stream))
