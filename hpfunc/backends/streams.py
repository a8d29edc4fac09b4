"""Streams of an accelerator, the same for every framework that has streams and events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from .protocol import Poll
from .watch import Watch

Stream = Any
_NO_SPAN = nullcontext()


@dataclass(frozen=True, slots=True)
class DeviceMark:
    """A point on a stream of a device, where a timed event was recorded."""

    event: Any

    def seconds_after(self, earlier: DeviceMark) -> float:
        """See `Mark`."""
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


@dataclass(slots=True)
class DevicePending:
    """Work that a stream has been given. `event` follows it, if anybody waits for it; `start` precedes timed work."""

    label: str
    event: Any
    start: Any = None

    @property
    def begun(self) -> DeviceMark:
        """See `Pending`."""
        return DeviceMark(self.start)

    @property
    def completed(self) -> DeviceMark:
        """See `Pending`."""
        return DeviceMark(self.event)


@dataclass
class DeviceStreams:
    """See `Streams`: every op is enqueued on a stream, waits are edges between streams, the host never blocks.

    Memory needs no `record_stream`: a buffer is allocated under its own stream, and freed behind waits of that stream.

    Attributes:
        current: returns the caller's stream.
        stream: makes a stream.
        event: makes an event; takes ``enable_timing``.
        on: returns a context whose work goes to a stream.
        watch: notices that a peer has failed while a collective is in flight.
        span: returns a context whose work has a name in profiles.
    """

    current: Callable[[], Stream]
    stream: Callable[[], Stream]
    event: Callable[..., Any]
    on: Callable[[Stream], AbstractContextManager[Any]]
    watch: Watch
    span: Callable[[str], AbstractContextManager[Any]] = lambda label: _NO_SPAN
    _made: dict[str, Stream] = field(default_factory=dict, init=False)
    _caller: Stream = field(default=None, init=False)  # the caller's stream, while an op is issued on another one

    def _named(self, name: str) -> Stream:
        if name == "compute":
            return self._caller or self.current()
        if name not in self._made:
            self._made[name] = self.stream()
        return self._made[name]

    def _point(self, stream: Stream, *, is_timed: bool) -> Any:
        event = self.event(enable_timing=is_timed)
        event.record(stream)
        return event

    def issue(
        self,
        label: str,
        stream: str,
        waits: Iterable[Any],
        work: Callable[[], Any],
        poll: Poll,
        *,
        is_awaited: bool = True,
        is_timed: bool = False,
    ) -> DevicePending:
        """Enqueues `work` on a stream, behind `waits`, and then a wait for the collectives that it returns."""
        target, self._caller = self._named(stream), self._named("compute")
        try:
            with self.on(target), self.span(label):
                for pending in waits:
                    target.wait_event(pending.event)
                start = self._point(target, is_timed=True) if is_timed else None
                collectives = work()
                for collective in collectives or ():
                    collective.wait()  # an edge from the communicator's own stream; the host goes on
                is_launch = collectives is not None
                event = self._point(target, is_timed=is_timed) if is_awaited or is_timed or is_launch else None
        finally:
            self._caller = None
        if is_launch:
            self.watch.add(label, event, poll)
        return DevicePending(label, event, start)

    def mark(self) -> DeviceMark:
        """Returns the present moment of the compute stream."""
        return DeviceMark(self._point(self._named("compute"), is_timed=True))

    def wait(self, pending: Any, poll: Poll) -> None:
        """Makes the compute stream wait."""
        self._named("compute").wait_event(pending.event)

    def runs_at_once(self) -> bool:
        """Returns False: a call only enqueues work."""
        return False

    def memory(self, stream: str) -> AbstractContextManager[Any]:
        """Returns a context in which tensors are allocated out of the memory of a stream."""
        return self.on(self._named(stream))
