"""Runs functions on ranks that have an accelerator, simulated or not, and compares them with ranks on CPUs.

    from tests.device.harness import Conditions, on_device

    def some_step(rank):                            # at module level; runs on every rank, on the device and on a CPU
        mesh = mesh_of((2,), ("shard",))
        ...
        return [tensor, tensor]

    def test_some_step():
        on_device(some_step, Conditions(delays={"gather": 2000}))

`on_device` fails if there is a race, if a task of the device raised, or if a bit differs from the CPU's. `observe` only
says what happened, for tests of what must be found. The ranks stay alive between calls (`tests.helpers.ranks.pool`).
The accelerator is the simulated one; `observe(..., framework="cuda")` is for machines with a GPU (`tests.device.cuda`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch

from tests.device import cuda, simulated
from tests.helpers.ranks import pool

STREAMS = ("gather", "reduce_scatter", "all_reduce")  # hpfunc's own; the fourth is the caller's, "compute"
Call = tuple[Callable[..., Any], tuple[Any, ...]]
Framework = Literal["simulated", "cuda"]


@dataclass(frozen=True)
class Conditions:
    """What a function meets on the device.

    Attributes:
        delays: by a part of the names of streams: by how many microseconds tasks of these are late, on average. The
            streams of communicators are named after their groups, so ``gather`` is true of two.
        faults: by their names in `simulated.FAULTS`: at each of how many occasions they happen.
        max_in_flight: how many collectives the device runs at a time; 0: any number.
        hang_s: how long the host waits for the device before it reports a deadlock.
        raises_on_sync: whether a wait of the host is an error.
        finds_races: whether races are looked for; the simulated device always does. On CUDA it costs the timing.
    """

    delays: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)
    max_in_flight: int = 0
    hang_s: float = 40.0
    raises_on_sync: bool = False
    finds_races: bool = False


@dataclass(frozen=True)
class Observed:
    """What happened on one rank. Counts are by name, and of everything since the function began."""

    result: Any
    races: list[str]
    errors: list[str]
    launches: dict[str, int]
    syncs: dict[str, int]
    events: dict[str, int]
    memory: dict[str, int]


def observe(
    fn: Callable[..., Any],
    *args: Any,
    conditions: Conditions | None = None,
    world: int = 2,
    framework: Framework = "simulated",
) -> list[Observed]:
    """Returns what happened when each rank called ``fn(rank, *args)`` on the device."""
    return pool(world, framework).run(_observed, fn, args, conditions or Conditions())


def on_device(
    fn: Callable[..., Any], conditions: Conditions | None = None, *args: Any, world: int = 2
) -> list[Observed]:
    """Calls ``fn(rank, *args)``, which returns tensors, on the device and on CPUs: clean, and the same bits."""
    observed = observe(fn, *args, conditions=conditions, world=world)
    assert_clean(observed)
    assert_same_bits([each.result for each in observed], on_host(fn, *args, world=world))
    return observed


def on_host(fn: Callable[..., Any], *args: Any, world: int = 2) -> list[list[torch.Tensor]]:
    """Returns what ``fn(rank, *args)`` returns on CPUs. Each call is made once."""
    key = f"{fn.__module__}.{fn.__qualname__}{args!r} on {world}"
    if key not in _on_host:
        _on_host[key] = pool(world).run(fn, *args)
    return _on_host[key]


_on_host: dict[str, list[list[torch.Tensor]]] = {}


def assert_clean(observed: list[Observed]) -> None:
    """No rank has found a race, and no task of the device has raised."""
    found = [f"rank {rank}: {text}" for rank, each in enumerate(observed) for text in each.races + each.errors]
    assert not found, "\n".join(found)


def assert_same_bits(got: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> None:
    """All ranks have these tensors. A NaN is not what anybody wants: the device fills fresh memory with them."""
    assert len(got) == len(want)
    for rank, (mine, right) in enumerate(zip(got, want, strict=True)):
        assert [(x.dtype, x.shape) for x in mine] == [(x.dtype, x.shape) for x in right]
        assert right, f"rank {rank} has nothing to compare"
        unequal = [i for i, (a, b) in enumerate(zip(mine, right, strict=True)) if not torch.equal(a, b)]
        assert not unequal, f"rank {rank}: tensors {unequal} of {len(right)} differ"


ON_CUDA = "HPFUNC_TEST_ON_CUDA"  # set in ranks that have a GPU: to ask torch would start its driver


# --- in the ranks ----------------------------------------------------------------------------------------------------
@cache
def device() -> Any:
    """Returns the compiled module of the device, inside a rank that has it."""
    return simulated.load(simulated.build())


def is_simulated() -> bool:
    """Returns whether this is a rank with the simulated device."""
    return torch._C._get_privateuse1_backend_name() != "privateuseone"


def has_device() -> bool:
    """Returns whether this is a rank with an accelerator, simulated or not."""
    return is_simulated() or os.environ.get(ON_CUDA) == "1"


def accelerator() -> Any:
    """Returns the module of torch for the accelerator of this rank: what ``torch.cuda`` is for CUDA."""
    return getattr(torch, torch._C._get_privateuse1_backend_name() if is_simulated() else "cuda")


@contextmanager
def never_waits() -> Iterator[None]:
    """A context in which a wait of the host for the device is an error, which says what waited."""
    if not is_simulated():
        yield
        return
    device().raise_on_sync(True)
    try:
        yield
    finally:
        device().raise_on_sync(False)


def start(framework: str, rank: int, world: int) -> str:
    """Makes a rank ready for its device, and returns the libraries by which ranks communicate."""
    if framework == "cuda":
        os.environ[ON_CUDA] = "1"
        return cuda.start(rank, world)
    device()
    return f"cpu:gloo,{torch._C._get_privateuse1_backend_name()}:simulated"


def _observed(rank: int, fn: Callable[..., Any], args: tuple[Any, ...], conditions: Conditions) -> Observed:
    if not is_simulated():
        found = cuda.observe(
            lambda: fn(rank, *args),
            delays=conditions.delays,
            forgets_waits=conditions.faults.get("forgotten_event_wait", 0),
            raises_on_sync=conditions.raises_on_sync,
            finds_races=conditions.finds_races,
        )
        return Observed(*found)
    sim = device()
    _name_streams()
    torch.accelerator.synchronize()
    sim.clear()
    try:
        _set(conditions)
        result = fn(rank, *args)
    finally:
        _set(Conditions())
    torch.accelerator.synchronize()
    return Observed(result, sim.races(), sim.errors(), sim.launches(), sim.syncs(), sim.events(), sim.memory())


def _set(conditions: Conditions) -> None:
    sim = device()
    sim.set_delay("", 0)
    for stream, delay_us in conditions.delays.items():
        sim.set_delay(stream, delay_us)
    sim.clear_faults()
    for name, every in conditions.faults.items():
        sim.set_fault(name, every)
    sim.set_max_in_flight(conditions.max_in_flight)
    sim.set_hang_s(conditions.hang_s)
    sim.raise_on_sync(conditions.raises_on_sync)


@cache
def _name_streams() -> None:
    from hpfunc.backends import get

    streams = get("torch").streams(f"{torch.accelerator.current_accelerator()}:0")
    for name in STREAMS:
        with streams.memory(name):
            device().name_stream(torch.accelerator.current_stream().stream_id, name)
