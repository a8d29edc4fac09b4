"""`plan`: a pure function from a `Program` to a `Schedule`.

`plan` walks over the events of the program once. Two independent parts share the work: `Gathers` gathers weights before
their use, and `Reductions` reduces their gradients afterwards. `Draft` derives the waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .builder import Draft
from .gathers import Gathers
from .policy import PACK_BELOW_BYTES, Policy
from .program import COMPUTES, Program
from .reductions import Reductions
from .schedule import Schedule
from .windows import Windows


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a backend that the planner needs.

    Attributes:
        ordered_sums: sums are formed locally, in rank order, from exchanged parts. gloo needs this: its own
            reduce-scatter sends twice the bytes, and with three or more ranks the bits of its all-reduce depend on the
            position in the buffer.
        communicators: how many collectives may be in flight at one time, if `Policy.communicators` does not say it;
            None is any number.
    """

    ordered_sums: bool = False
    communicators: int | None = None


def plan(program: Program, policy: Policy, traits: Traits = Traits()) -> Schedule:
    """Plans the communication of a step: when weights are gathered and released, how their gradients are reduced.

    The result depends on the arguments only, so ranks that recorded the same program plan the same schedule.

    Args:
        program: the units that the step uses, in order.
        policy: how far ahead to gather, when to release, what to pack. `plan` does not measure: if `pack_below_bytes`
            is None, it uses 65536. The policy of the schedule has the number.
        traits: properties of the backend.

    Returns:
        A schedule that `hpfunc.planning.checking.checker.check` accepts.

    Raises:
        PolicyError: the policy contradicts itself for this program.

    >>> from hpfunc.planning.program import Event, Unit, Weight
    >>> weight = Weight("w", 64, *["float32"] * 4, ("shard",), 4, (), 1, divisor=4)
    >>> kinds = ("forward", "backward")
    >>> events = (*(Event(kind, 0) for kind in kinds), Event("end_backward"), Event("end_step"))
    >>> for op in plan(Program((weight,), (Unit("layer", (0,)),), events), Policy(pack_below_bytes=0)).ops:
    ...     print(f"{op.stream:15}{op.name:23}{', '.join(op.waits)}".rstrip())
    compute        begin
    gather         gather layer           begin
    compute        forward layer          gather layer
    compute        backward layer
    gather         free whole w           backward layer
    reduce_scatter reduce_scatter layer   backward layer
    compute        free gradient w        reduce_scatter layer
    compute        scale layer
    compute        deliver w
    compute        end
    """
    if policy.pack_below_bytes is None:
        policy = replace(policy, pack_below_bytes=PACK_BELOW_BYTES)
    if policy.communicators is None:
        policy = replace(policy, communicators=traits.communicators)
    windows = Windows(program, policy)
    windows.check_budget()
    draft = Draft(program, policy, ordered_sums=traits.ordered_sums)
    gathers = Gathers(draft, windows)
    reductions = Reductions(draft)
    for index, event in enumerate(program.events):
        draft.at(index, "before")
        if index == 0:
            draft.caller("begin", [w for w in program.used if program.weights[w].origin is not None])
        if event.kind in COMPUTES:
            reads = gathers.before(index)
            writes = reductions.gradients(index) if event.kind == "backward" else []
            draft.compute(event, index, reads, writes)
            draft.at(index, "after")
            gathers.after(index)
            if event.kind == "backward":
                reductions.after(index, writes)
        elif event.kind == "collective":
            draft.call()
        elif event.kind == "end_backward":
            reductions.end(index)
        elif event.kind == "end_step":
            gathers.end()
            draft.caller("end", draft.shards)
    return draft.schedule()
