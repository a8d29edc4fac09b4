"""Leaving a plan: which ops of a schedule still run when the step does not follow its program to the end."""

from __future__ import annotations

from collections.abc import Sequence

from .ops import Caller, Compute, Free, Launch, Local
from .schedule import Schedule

# Note [Leaving a plan]
# Gathered weights are dropped, and no more are gathered. A reduction is in one of three states:
# - Started: await its collective, and run the ops that take its result.
# - Not started: run its ops if the gradient is complete. In a backward the plan knows this, because each use had its
#   forward by the plan. If the plan still expects a forward, the gradient is not complete: a different forward may
#   happen there and add to any gradient. Then nothing is launched, scaled or delivered. The session gets whole and
#   scattered gradients (`checking.symbolic_run.scattered`), and the next driver reduces them.
# - Delivered: the session has the gradient already. Nothing remains to be done.


def to_finish(schedule: Schedule, issued: Sequence[bool]) -> list[int]:
    """Returns the ops to issue when a plan is left, in order. See Note [Leaving a plan].

    Args:
        schedule: the plan.
        issued: for each op, whether it was issued.
    """
    found: list[int] = []
    stuck: set[int] = set()  # buffers of skipped ops; ops that touch them are skipped, too
    arrived: set[int] = set()  # buffers that hold the result of a reduce-scatter
    is_ahead = False  # whether a forward that the plan expects has been skipped
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
