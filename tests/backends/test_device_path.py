"""The path of accelerators, on a device that takes notes: which op goes to which stream, and what waits for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

import hpfunc as hp
from hpfunc._running import link_probe as _probe
from hpfunc.backends import get
from hpfunc.backends.torch import backend as _torch
from hpfunc.backends.torch import collectives as _torch_collectives
from hpfunc.backends.torch import private
from hpfunc.backends.torch import streams as _torch_streams
from hpfunc.planning.ops import Compute
from tests.helpers.chain import data, layers, step
from tests.helpers.leaves import assert_same_bits, local_leaves
from tests.helpers.models import P
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes


class Notes:
    """Stands in for ``torch.cuda``: streams and events write down what they are asked."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, Any]] = []
        self.current = "compute"
        notes = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.is_timed = enable_timing

            def query(self) -> bool:
                return True

            def elapsed_time(self, later: Any) -> float:
                assert self.is_timed
                assert later.is_timed
                return later.time - self.time

            def record(self, stream: Any) -> None:
                self.stream, self.time = stream.name, len(notes.log)
                notes.log.append((stream.name, "record", self))

            def synchronize(self) -> None:
                notes.log.append(("host", "synchronize", self))

        class Stream:
            def __init__(self, device: Any, name: str | None = None, priority: int = 0) -> None:
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
    notes = Notes()
    streams = _torch_streams.device_streams(torch.device("cpu"), pytest.fail, notes)
    issue, issued = streams.issue, []

    def watch(label: str, stream: str, waits: Any, work: Any, poll: Any, **marks: bool) -> Any:
        begin = len(notes.log)
        pending = issue(label, stream, waits, work, poll, **marks)
        waited = [event.op for _, kind, event in notes.log[begin:] if kind == "wait"]
        if pending.event is not None:
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
        assert any("sum layer.2 on all_reduce waits for ['reduce_scatter layer.2']" in line for line in issued), issued


def test_memory_of_the_compute_stream_is_allocated_on_it_within_an_op_of_another() -> None:
    notes = Notes()
    streams = _torch_streams.device_streams(torch.device("cpu"), pytest.fail, notes)
    current: list[str] = []

    def work() -> None:
        current.append(notes.current)
        with streams.memory("compute"):
            current.append(notes.current)
        current.append(notes.current)

    streams.issue("zero", "all_reduce", (), work, lambda label, elapsed_s: None)
    with streams.memory("compute"):
        current.append(notes.current)
    own, compute, again, outside = current
    assert own == again != compute == outside == "compute"


def probe_on_notes(rank: int) -> list[str]:
    mesh, backend = mesh_of((2,), ("shard",), None, 18.0), cast(Any, get("torch"))
    _probe._links.pop((mesh, ("shard",)), None)
    notes = Notes()
    streams = _torch_streams.device_streams(torch.device("cpu"), pytest.fail, notes)
    # The control group is of the host, on a device too: its waits are looked at by their own streams.
    host, exchange = backend.streams("cpu"), backend.exchange

    def on_host(*args: Any) -> Any:
        backend._streams["cpu"] = host
        try:
            return exchange(*args)
        finally:
            backend._streams["cpu"] = streams

    backend.exchange = on_host
    backend._streams["cpu"] = streams
    try:
        hp.probe(mesh, "shard")
    finally:
        del backend.exchange
        backend._streams["cpu"] = host
    return [kind for _, kind, _ in notes.log if kind != "new"]


def test_a_probe_waits_on_the_host_for_each_message(pool: Callable[[int], Pool]) -> None:
    """On a device an awaited collective is only enqueued; a time that is taken then says nothing."""
    assert pool(2).run(probe_on_notes) == [["record", "record", "wait", "synchronize"] * 16] * 2


# --- grouped launches -----------------------------------------------------------------------------------------------
class TwoRanks:
    """Stands in for a process group."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("collective", "device", "count", "grouped"),
    [
        ("all_gather", "meta", 3, True),
        ("reduce_scatter", "meta", 2, True),
        ("all_gather", "meta", 1, False),
        ("all_gather", "cpu", 3, False),
        ("all_to_all", "meta", 2, False),  # the library groups none of these
    ],
)
def test_on_a_device_the_messages_of_a_launch_go_out_together(
    monkeypatch: pytest.MonkeyPatch, collective: Any, device: str, count: int, grouped: bool
) -> None:
    """``meta`` stands for a device here: what matters is that it is not the CPU."""
    calls: list[str] = []

    @contextmanager
    def group_of(group: Any) -> Iterator[None]:
        calls.append("begin")
        yield
        calls.append("end")

    def start(*args: Any, async_op: bool) -> None:
        calls.append("on a stream of the library" if async_op else "on the current stream")

    monkeypatch.setattr(private, "coalescing", group_of)
    monkeypatch.setattr(_torch_collectives, "start", start)
    sends, receives = ([torch.empty(n, device=device) for _ in range(count)] for n in (4, 8))
    works = _torch.TorchBackend().launch(collective, TwoRanks(), sends, receives)
    on_host = device == "cpu"
    wanted = ["on a stream of the library" if on_host else "on the current stream"] * count
    assert calls == (["begin", *wanted, "end"] if grouped else wanted)
    assert len(works) == (count if on_host else 0)


def started_together(rank: int) -> list[bool]:
    """The group call itself, with real data: gloo has it too, though hpfunc does not take it there."""
    mesh = mesh_of((2,), ("shard",))
    group = get("torch").group(mesh.ranks, "user", "cpu", mesh.timeout_s)
    mine = [torch.full((n,), float(10 * rank + n)) for n in (2, 3)]
    gathered = [torch.zeros(2 * n) for n in (2, 3)]
    _torch_collectives.start_on_stream("all_gather", group, list(zip(mine, gathered, strict=True)))
    terms, sums = [torch.arange(2.0 * n) + rank for n in (2, 3)], [torch.zeros(n) for n in (2, 3)]
    _torch_collectives.start_on_stream("reduce_scatter", group, list(zip(terms, sums, strict=True)))
    wholes = [torch.cat([torch.full((n,), float(10 * r + n)) for r in range(2)]) for n in (2, 3)]
    totals = [(2 * torch.arange(2.0 * n) + 1)[n * rank : n * (rank + 1)] for n in (2, 3)]
    return [torch.equal(a, b) for a, b in zip(gathered + sums, wholes + totals, strict=True)]


def test_messages_that_go_out_together_arrive(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(started_together) == [[True] * 4] * 2
