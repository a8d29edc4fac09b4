"""`Queues`: which collectives wait for one another, so that a device has room for all that are in flight."""

from __future__ import annotations

from typing import get_args

from .ops import Caller, Launch, Op, Purpose, Slot, Stream
from .program import COMPUTES, Program

# Note [Queues of collectives]
# With `Policy.communicators` there are so many queues, and a launch waits for the launch before it in its queue: no
# more collectives than queues are in flight. If there are fewer queues than streams, the last streams of this list
# share one: the caller's own collectives, gathers, reduce-scatters, all-reduces. The first two hold up compute;
# reductions are needed at the end of a backward only. The order in a queue is the order of issue, in which the gathers
# of the next units come before the reductions of the last one: what can be hidden stays hidden.
#
# The caller's collectives are events, not ops. If they share the only queue, a `Caller` before each one waits for the
# queue. One that follows a compute event may be called inside of the unit, so before the ops after that event are
# issued. So the first launch of these waits for all that the caller has launched; and the `Caller` waits for the last
# launch before that event, and for the last one after it: the executor does not wait for what is not issued.


def _has_calls(program: Program) -> bool:
    return any(event.kind == "collective" for event in program.events)


def calls_share_queue(program: Program, communicators: int | None) -> bool:
    """Returns whether the caller has collectives, and they share the only queue."""
    return communicators == 1 and _has_calls(program)


def may_call_inside(program: Program, event: int) -> bool:
    """Returns whether a collective that follows a compute event may be called inside of its unit."""
    following = program.events[event + 1 : event + 2]
    return program.events[event].kind in COMPUTES and any(each.kind == "collective" for each in following)


def _unit_around(program: Program, event: int) -> int | None:
    """Returns the compute event in whose unit a collective of the caller may be called, None if there is none."""
    while event >= 0 and program.events[event].kind == "collective":
        event -= 1
    return event if event >= 0 and program.events[event].kind in COMPUTES else None


class Queues:
    """The launches issued so far, by queue, as indices of ops. See Note [Queues of collectives]."""

    def __init__(self, program: Program, communicators: int | None) -> None:
        streams: tuple[Stream, ...] = (*(("compute",) if _has_calls(program) else ()), *get_args(Purpose))
        self._of = {stream: min(place, (communicators or len(streams)) - 1) for place, stream in enumerate(streams)}
        self._program = program
        self._shares = calls_share_queue(program, communicators)
        self._last: dict[int, int] = {}
        self._earlier: int | None = None  # the last launch before ops that calls may precede
        self._is_call = self._follows_calls = False
        self._slot = self._slot_of_last = Slot(-1, "before", ())  # the last: of the latest launch

    def enter(self, slot: Slot) -> None:
        """The ops of a slot follow."""
        self._slot = slot
        if self._shares:
            self._is_call = self._program.events[slot.event].kind == "collective"
            inside = slot.when == "after" and may_call_inside(self._program, slot.event)
            if inside:
                self._earlier = self._last.get(0)
            self._follows_calls |= inside or self._is_call

    def before(self, op: Op) -> list[int]:
        """Returns the launches that an op waits for, whatever other waits imply."""
        if isinstance(op, Launch):
            return [self._last[queue]] if (queue := self._of[op.stream]) in self._last else []
        if isinstance(op, Caller) and self._is_call:
            return [index for index in (self._earlier, self._last.get(0)) if index is not None]
        return []

    def missed(self, op: Op) -> int | None:
        """Returns the launch that an op does not wait for if it is called inside of a unit, None if there is none."""
        if not (isinstance(op, Caller) and self._is_call and self._slot_of_last.when == "after"):
            return None
        around = _unit_around(self._program, self._slot.event)
        return self._last[0] if around == self._slot_of_last.event else None

    def follows_calls(self, op: Op) -> bool:
        """Returns whether an op waits for collectives of the caller."""
        return isinstance(op, Launch) and self._follows_calls

    def issued(self, op: Op, index: int) -> None:
        """An op was issued."""
        if isinstance(op, Launch):
            self._last[self._of[op.stream]] = index
            self._follows_calls = False
            self._slot_of_last = self._slot
