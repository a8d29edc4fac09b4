"""Where torch's work runs: on a CPU at once and in gloo's threads, on an accelerator on streams.

The device path (`device_streams`) is the same for CUDA and Ascend. It needs an accelerator, and has not run on the
machines that test this project. Tests check that it launches the same ops in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from ..protocol import Counters, Poll
from ..streams import DeviceStreams

POLL_S = 0.5


class HostPending:
    """Collectives of gloo that are in flight; empty if there is nothing to wait for."""

    __slots__ = ("label", "works")

    def __init__(self, label: str, works: Sequence[Any] = ()) -> None:
        self.label = label
        self.works = list(works)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls back once all works are complete, from a thread of gloo."""
        left = [len(self.works)]

        def done(_: Any) -> None:
            left[0] -= 1
            if not left[0]:
                callback()

        for work in self.works:
            work.get_future().add_done_callback(done)


class HostStreams:
    """CPU: local work runs on the host at once; collectives run in gloo's threads until somebody waits for them."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters

    def issue(self, label: str, stream: str, waits: Iterable[Any], work: Callable[[], Any], poll: Poll) -> HostPending:
        for pending in waits:
            self.wait(pending, poll)
        if not _profiling():
            return HostPending(label, work() or ())
        with _span(label):
            return HostPending(label, work() or ())

    def wait(self, pending: Any, poll: Poll) -> None:
        if not pending.works:
            return
        start = time.perf_counter()
        for work in pending.works:
            self._wait_work(work, pending.label, start, poll)
        pending.works.clear()
        self.counters.wait_s += time.perf_counter() - start

    def runs_at_once(self) -> bool:
        return not _profiling()

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


def device_streams(device: torch.device, module: Any = None) -> DeviceStreams:
    """Returns the streams of a device, by the module of torch that has its streams and events."""
    module = module or getattr(torch, device.type)
    return DeviceStreams(
        current=lambda: module.current_stream(device),
        stream=lambda: module.Stream(device),
        event=module.Event,
        on=module.stream,
        span=_span,
    )


def _span(label: str) -> AbstractContextManager[Any]:
    return record_function(f"hpfunc::{label}")


def _profiling() -> bool:
    return torch.autograd.profiler._is_profiler_enabled
