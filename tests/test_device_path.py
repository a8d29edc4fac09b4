"""The path of accelerators, on a device that takes notes: which op goes to which stream, and what waits for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

import hpfunc as hp
from hpfunc._schedule import Compute
from hpfunc.backends import _torch, get
from tests.models import P
from tests.ranks import Pool, mesh_of
from tests.test_execute import data, layers, local_leaves, step
from tests.test_parity import assert_same_bits

pytestmark = pytest.mark.processes


class Notes:
    """Stands in for ``torch.cuda``: streams and events write down what they are asked."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, Any]] = []
        self.current = "compute"
        notes = self

        class Event:
            def record(self, stream: Any) -> None:
                self.stream, self.time = stream.name, len(notes.log)
                notes.log.append((stream.name, "record", self))

        class Stream:
            def __init__(self, device: Any, name: str | None = None) -> None:
                self.name = name or f"stream {sum(1 for kind in notes.log if kind[1] == 'new')}"
                notes.log.append((self.name, "new", None))

            def wait_event(self, event: Any) -> None:
                notes.log.append((self.name, "wait", event))

        self.Event, self.Stream = Event, Stream
        self.compute = Stream(None, "compute")

    def current_stream(self, device: Any) -> Any:
        return self.compute

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


def on_notes(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str], list[str], set[str]]:
    mesh, backend = mesh_of((2, 2), ("replicate", "shard")), cast(Any, get("torch"))
    params = hp.shard(layers(3), mesh, P("shard"))
    _, want = step(params, data(rank))
    run = hp.sharded(step, mesh, policy=hp.Policy(pack_below_bytes=0))
    run(params, data(rank))
    notes, streams = Notes(), _torch._DeviceStreams(torch.device("cpu"))
    streams.module = notes
    issue, issued = streams.issue, []

    def watch(label: str, stream: str, waits: Any, work: Any, poll: Any) -> Any:
        begin = len(notes.log)
        pending = issue(label, stream, waits, work, poll)
        waited = [event.op for _, kind, event in notes.log[begin:] if kind == "wait"]
        pending.event.op = label
        issued.append(f"{label} on {stream} waits for {waited}")
        return pending

    streams.issue = watch
    host, backend._streams["cpu"] = backend._streams["cpu"], streams
    try:
        _, got = run(params, data(rank))
    finally:
        backend._streams["cpu"] = host
    assert run.last_schedule is not None
    planned = [op for op in run.last_schedule.ops if not isinstance(op, Compute)]
    missing = [
        f"{op.name} does not wait for {name}"
        for op in planned
        for name in op.waits
        if not any(line.startswith(f"{op.name} on ") and f"'{name}'" in line for line in issued)
    ]
    order = [line.split(" on ")[0] for line in issued if not line.startswith(("forward", "backward"))]
    assert order == [op.name for op in planned]
    return local_leaves(got), local_leaves(want), issued, missing, {name for name, *_ in notes.log}


def test_a_device_gets_every_op_in_order_with_its_waits(pool: Callable[[int], Pool]) -> None:
    for got, want, issued, missing, streams in pool(4).run(on_notes):
        assert_same_bits(got, want)
        assert not missing
        assert len(streams) == 4, streams  # compute, gather, reduce_scatter, all_reduce
        assert any("all_reduce layer.2 on all_reduce waits for ['sum layer.2']" in line for line in issued), issued
