"""`Schedule`: every collective, copy, wait and free of a step, as a value that can be printed and checked.

An `Op` runs on one stream. Ops of a stream run in issue order; only `waits` order ops of different streams. A schedule
lists its ops (all slots, one after another) in the order in which every rank issues them. This list, read as a
sequential program, *is* the meaning of the schedule: `check` proves that every timing gives the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .ops import Buffer, Op, Region, Slot
from .policy import Policy
from .program import Program
from .text import lines, parsed

# Note [Whose memory]
# The allocator of a device keeps memory by stream. Memory that was allocated on a stream returns to it when the host
# drops it, and may be allocated again at once, in the order of that stream. A buffer that only ops of the schedule use
# belongs to the stream of its first write, and its `Free` waits for the other streams. But the caller may drop a
# delivered gradient at any time, while the caller's own work on the compute stream still has to read it. So delivered
# buffers are memory of the compute stream. If another stream writes such a buffer first, it waits for all earlier work
# of the compute stream, including the caller's own work between two events: for the latest op of the compute stream in
# the same slot, for the `Compute` just before it, or for a `Caller` that is inserted there.
# Every other stream begins a step by waiting for the first op of the step.


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan for one program: buffers, and ops attached to the events of the program.

    `slots` are in issue order and name each (event, when) at most once. ``str(schedule)`` is its exact text form,
    which `parse` reads.
    """

    program: Program
    policy: Policy
    buffers: tuple[Buffer, ...]
    slots: tuple[Slot, ...]

    @property
    def ops(self) -> Iterator[Op]:
        """Every op, in issue order."""
        return (op for slot in self.slots for op in slot.ops)

    @property
    def fingerprint(self) -> str:
        """A digest that is equal on two ranks exactly if they planned the same schedule."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def name(self, region: Region) -> str:
        """Returns a region for display: the name of its buffer, and elements if not all: ``reduce block[0:128]``."""
        buffer = self.buffers[region.buffer]
        whole = (region.start, region.stop) == (0, buffer.numel)
        return buffer.name if whole else f"{buffer.name}[{region.start}:{region.stop}]"

    def __str__(self) -> str:
        return "\n".join(lines(self.program, self.policy, self.buffers, self.slots))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows one line in IPython, where `repr` would show every field of every op."""
        program = self.program
        counts = {"unit": len(program.units), "event": len(program.events), "op": sum(1 for _ in self.ops)}
        shown = ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items())
        printer.text(f"<Schedule {self.fingerprint}: {shown}; print it for its text>")

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Returns the schedule of a text: ``Schedule.parse(str(schedule)) == schedule``.

        Redundant parts are not read: counts, sizes in bytes, the fingerprint, descriptions of events, and comments. It
        does not check whether the schedule is safe; `check` does.

        Args:
            text: the text of ``str(schedule)``, possibly edited by hand.

        Raises:
            ScheduleError: a line is wrong. The message has its number, and what was expected there.

        >>> from hpfunc.planning.planner import plan
        >>> from hpfunc.planning.policy import Policy
        >>> from hpfunc.planning.program import Event, Program, Unit, Weight
        >>> weight = Weight("w", 64, *["float32"] * 4, ("shard",), 4, (), 1, divisor=4)
        >>> events = (Event("forward", 0), Event("end_step"))
        >>> schedule = plan(Program((weight,), (Unit("layer", (0,)),), events), Policy())
        >>> Schedule.parse(str(schedule)) == schedule
        True
        """
        return cls(*parsed(text))
