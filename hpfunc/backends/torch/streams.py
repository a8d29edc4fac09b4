"""Where torch's work runs: on a CPU at once and in gloo's threads, on an accelerator on streams.

The device path (`device_streams`) is the same for CUDA and Ascend. It needs an accelerator, and has not run on the
machines that test this project. Tests check that it launches the same ops in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..protocol import Counters, Poll
from ..streams import DeviceStreams
from ..watch import POLL_S, Watch
from . import private
from .ranges import span

_HIGH_PRIORITY = -1  # a collective that is ready goes before compute that is ready


class HostMark:
    """A moment on the clock of the host."""

    __slots__ = ("_has_come", "_time_s")

    def __init__(self) -> None:
        self._has_come = threading.Event()
        self._time_s = 0.0

    def set(self) -> HostMark:
        """It is now."""
        self._time_s = time.perf_counter()
        self._has_come.set()
        return self

    def seconds_after(self, earlier: HostMark) -> float:
        """See `Mark`."""
        self._has_come.wait()
        return self._time_s - earlier._time_s


class HostPending:
    """Collectives of gloo that are in flight; empty if there is nothing to wait for."""

    __slots__ = ("begun", "completed", "label", "works")

    def __init__(self, label: str, works: Sequence[Any] = (), begun: HostMark | None = None) -> None:
        self.label = label
        self.works = list(works)
        if begun is not None:
            self.begun, self.completed = begun, _completion(self.works)


def _completion(works: Sequence[Any]) -> HostMark:
    """Returns the moment at which all works are complete, as threads of gloo report it."""
    mark, left = HostMark(), [len(works)]

    def done(_: Any) -> None:
        left[0] -= 1
        if not left[0]:
            mark.set()

    for work in works:
        work.get_future().add_done_callback(done)
    return mark if works else mark.set()


class HostStreams:
    """CPU: local work runs on the host at once; collectives run in gloo's threads until somebody waits for them."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters

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
    ) -> HostPending:
        for pending in waits:
            self.wait(pending, poll)
        begun = self.mark() if is_timed else None
        with span(label):
            return HostPending(label, work() or (), begun)

    def mark(self) -> HostMark:
        return HostMark().set()

    def wait(self, pending: Any, poll: Poll) -> None:
        if not pending.works:
            return
        start = time.perf_counter()
        for work in pending.works:
            self._wait_work(work, pending.label, start, poll)
        pending.works.clear()
        self.counters.wait_s += time.perf_counter() - start

    def runs_at_once(self) -> bool:
        return not private.is_profiling()

    def memory(self, stream: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def _wait_work(self, work: dist.Work, label: str, start: float, poll: Poll) -> None:
        # A gloo work may be waited for in slices: between two we look whether a peer has failed.
        while True:
            try:
                work.wait(timedelta(seconds=POLL_S))
                return
            except RuntimeError:
                if work.is_completed():
                    break
                poll(label, time.perf_counter() - start)
        try:
            work.wait()
        except RuntimeError as error:
            poll(label, error)  # a peer that failed gives its groups up, which ends this: the board tells why
            raise


def device_streams(
    device: torch.device,
    abort: Callable[[], None],
    module: Any = None,
    failed: Callable[[], Exception | None] = lambda: None,
) -> DeviceStreams:
    """Returns the streams of a device, by the module of torch that has its streams and events.

    Args:
        device: the device.
        abort: gives up all communicators.
        module: the module; that of the device's kind by default.
        failed: returns an error of a library that has lost a rank.
    """
    module = module or getattr(torch, device.type)
    return DeviceStreams(
        current=lambda: module.current_stream(device),
        stream=lambda: module.Stream(device, priority=_HIGH_PRIORITY),
        event=module.Event,
        on=module.stream,
        watch=Watch(abort, failed),
        span=span,
    )
