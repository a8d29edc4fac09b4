"""A device on which only so many collectives have room at a time: can ranks get stuck on it?

The checker and the machine of `planning.checking.interpreter` give each stream a device of its own. On a real one a
collective occupies its place until all its ranks have come, so collectives of several communicators can keep each
other out, although each communicator has the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpfunc.planning.ops import Launch
from hpfunc.planning.schedule import Schedule
from tests.museum.pieces import happens_before


@dataclass(frozen=True, slots=True)
class Device:
    """How a device takes collectives.

    Attributes:
        room: how many are on it at a time.
        in_order: it takes them in the order in which the host has issued them, whatever their streams are.
    """

    room: int
    in_order: bool


State = tuple[tuple[frozenset[str], ...], frozenset[str]]  # by rank what it has started, and what is complete


def can_hang(issued: Sequence[Schedule], device: Device) -> bool:
    """Returns whether some choice of the devices gets stuck: ``issued[rank]`` is what that rank's host issues.

    All communicators have all ranks. Every state that can be reached is looked at.
    """
    orders = [[op.name for op in schedule.ops if isinstance(op, Launch)] for schedule in issued]
    needs = [launches_before(schedule) for schedule in issued]
    start: State = (tuple(frozenset() for _ in issued), frozenset())
    seen, ahead = {start}, [start]
    while ahead:
        started, complete = ahead.pop()
        following = []
        for rank, order in enumerate(orders):
            for name in _startable(order, needs[rank], started[rank], complete, device):
                mine = (*started[:rank], started[rank] | {name}, *started[rank + 1 :])
                following.append((mine, complete | {name} if all(name in one for one in mine) else complete))
        if not following and len(complete) < len(orders[0]):
            return True
        ahead += [state for state in following if state not in seen]
        seen |= set(following)
    return False


def _startable(
    order: list[str], needs: dict[str, set[str]], started: frozenset[str], complete: frozenset[str], device: Device
) -> list[str]:
    if len(started - complete) >= device.room:
        return []
    waiting = [name for name in order if name not in started]
    found = [name for name in waiting if needs[name] <= complete]
    return [name for name in found if name == waiting[0]] if device.in_order else found


def launches_before(schedule: Schedule) -> dict[str, set[str]]:
    """Returns for each launch those that happen before it."""
    before = happens_before(schedule)
    launches = {op.name for op in schedule.ops if isinstance(op, Launch)}
    return {name: before[name] & launches for name in launches}
