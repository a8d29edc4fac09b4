"""What to do with a schedule whose program is not run to its end: which ops still make sense."""

from __future__ import annotations

from collections.abc import Sequence

from .ops import Caller, Compute, Free, Launch, Local
from .schedule import Schedule

# Note [Leaving a plan]
# Gathered weights are dropped, and no more are gathered. For a reduction there are three cases:
# - Started: its collective is awaited, and the ops run that take its result.
# - Not started: its ops run if the gradient is complete. In a backward it is complete if the plan says so, as each use
#   had its forward by the plan. Before a forward that the plan still expects it is not, because another forward may
#   take place there and add to any gradient: nothing is launched, scaled or delivered. The session gets whole and
#   scattered gradients (`checking.symbolic_run.scattered`), and the next driver reduces them.
# - Delivered: the session has the gradient already; nothing is left to do.


def to_finish(schedule: Schedule, issued: Sequence[bool]) -> list[int]:
    """Returns the ops that are to be issued when a plan is left, in order. See Note [Leaving a plan].

    Args:
        schedule: the plan.
        issued: for each op, whether it was issued.
    """
    found: list[int] = []
    stuck: set[int] = set()  # buffers that an op would have to touch before, which is not to come any more
    arrived: set[int] = set()  # buffers that hold what a reduce-scatter has brought
    is_ahead = False  # of a forward that the plan expects
    for index, (op, done) in enumerate(zip(schedule.ops, issued, strict=True)):
        buffers = {region.buffer for region in (*op.reads, *op.writes)}
        scatters = op.stream == "reduce_scatter"
        awaits = (scatters or isinstance(op, Local)) and op.stream != "compute" and bool(buffers & arrived)
        if not done:
            is_ahead |= isinstance(op, Compute) and schedule.program.events[op.event].kind == "forward"
            is_late = is_ahead and not awaits and not isinstance(op, Free)
            if isinstance(op, (Compute, Caller)) or op.stream == "gather" or buffers & stuck or is_late:
                stuck |= buffers
                continue
            found.append(index)
        if (isinstance(op, Launch) and scatters) or (isinstance(op, Local) and awaits):
            arrived |= {region.buffer for region in op.writes}
    return found
