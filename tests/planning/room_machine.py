"""A machine that has room for some collectives only: whether a schedule hangs on it, for random timings."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from hpfunc.planning.ops import Launch, Op
from hpfunc.planning.program import COMPUTES
from hpfunc.planning.schedule import Schedule


@dataclass(frozen=True)
class _Item:
    """What a stream runs: `group` has the axes along which ranks must meet, None for local work."""

    name: str
    stream: str
    waits: tuple[str, ...]
    group: tuple[str, ...] | None


@dataclass
class _Rank:
    """One rank: what is left on its streams, what is done, and what is in flight."""

    left: dict[str, list[_Item]]
    pace: dict[str, float]
    done: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)


def hangs(schedule: Schedule, sizes: Mapping[str, int], communicators: int, rng: random.Random) -> bool:
    """Returns whether a run of the schedule hangs, if each rank has room for so many collectives.

    A collective takes a place when a rank begins it, and keeps it until all ranks of its group have begun it. The
    caller's own are among all ranks. One that follows a compute event is called inside of the unit, or after it.
    """
    items = list(_in_run_order(schedule, tuple(sizes), rng))
    ranks = [_rank(items, rng) for _ in range(math.prod(sizes.values()))]
    places = list(itertools.product(*(range(size) for size in sizes.values())))
    axes = list(sizes)

    def met(item: _Item, rank: int) -> bool:
        fixed = [i for i, axis in enumerate(axes) if axis not in (item.group or ())]
        group = [r for r in range(len(ranks)) if all(places[r][i] == places[rank][i] for i in fixed)]
        return all(item.name in ranks[r].begun | ranks[r].done for r in group)

    while any(items for rank in ranks for items in rank.left.values()):
        able: list[tuple[float, int, _Item]] = []
        for r, rank in enumerate(ranks):
            for stream, items in rank.left.items():
                if items and _is_able(items[0], rank, communicators, lambda item, r=r: met(item, r)):
                    able.append((rank.pace[stream] * rng.random(), r, items[0]))
        if not able:
            return True
        _, r, item = min(able, key=lambda each: each[0])
        rank = ranks[r]
        if item.group is not None and item.name not in rank.begun:
            rank.begun.add(item.name)
        else:
            rank.begun.discard(item.name)
            rank.done.add(item.name)
            rank.left[item.stream].pop(0)
    return False


def _rank(items: list[_Item], rng: random.Random) -> _Rank:
    left: defaultdict[str, list[_Item]] = defaultdict(list)
    for item in items:
        left[item.stream].append(item)
    return _Rank(dict(left), {stream: 10 ** rng.uniform(-2, 2) for stream in left})


def _is_able(item: _Item, rank: _Rank, communicators: int, met: Callable[[_Item], bool]) -> bool:
    if item.name in rank.begun:
        return met(item)
    if not all(wait in rank.done for wait in item.waits):
        return False
    return item.group is None or len(rank.begun) < communicators


def _in_run_order(schedule: Schedule, axes: tuple[str, ...], rng: random.Random) -> Iterator[_Item]:
    """Yields the ops in the order in which the host issues them. It waits for no op that it has not issued."""
    slots = {(slot.event, slot.when): slot.ops for slot in schedule.slots}
    events, issued, called = schedule.program.events, set[str](), set[int]()

    def issue(ops: tuple[Op, ...]) -> Iterator[_Item]:
        for op in ops:
            issued.add(op.name)
            waits = tuple(wait for wait in op.waits if wait in issued)
            yield _Item(op.name, op.stream, waits, op.communicator.axes if isinstance(op, Launch) else None)

    def call(index: int) -> Iterator[_Item]:
        yield from issue(slots.get((index, "before"), ()))
        yield _Item(f"call {index}", "compute", (), axes)
        called.add(index)

    for index, event in enumerate(events):
        if event.kind == "collective":
            if index not in called:
                yield from call(index)
            continue
        yield from issue(slots.get((index, "before"), ()))
        if event.kind in COMPUTES:
            inner = list(takewhile(lambda i: events[i].kind == "collective", range(index + 1, len(events))))
            for i in inner[: rng.randint(0, len(inner))]:
                yield from call(i)
        yield from issue(slots.get((index, "after"), ()))
