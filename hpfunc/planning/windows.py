"""`Windows`: which units should be whole at an event. A function of the program and the policy only."""

from __future__ import annotations

from functools import cache
from itertools import takewhile
from typing import cast

from .._errors import PolicyError, message
from .messages import gathered_messages, is_received_in_place
from .ops import itemsize
from .policy import Policy, Release
from .program import Program

# Note [The units near an event]
# The units *near* event i are the first `depth + 1` different units that are used from i on. Units that need no gather
# do not count. Before event i all near units are gathered, in the order of their use. Units that become near when event
# i - 1 ends are gathered right after it, so that they are in flight while event i waits for its own unit. After event
# i, its unit is released unless it is near event i + 1.
#
# So every unit that is whole or in flight is near the current event, and there are at most `depth + 1` of them: the
# units near i + 1 include all units near i except that of i, because removing one use never brings another unit's next
# use closer. This is Belady's rule: release the unit whose next use is farthest away, or that has none. No choice of
# the same size gathers less. At the turn from forward to backward the last `depth + 1` units stay whole. If the unit of
# event i needs no gather, one unit fewer is gathered ahead, because the depth does not change.
#
# A bound in bytes ends the list of near units early, never before the first, and preserves the inclusion above. If the
# depth is smaller in backward, units that were gathered with the larger depth stay until they are used.
#
# Units that are kept (released after their backward, or never) count like others. Their bytes are reserved from the
# bound from the beginning.


class Windows:
    """See Note [The units near an event].

    Attributes:
        releases: for each unit, when its whole weights are dropped.
        in_place: for each unit, whether it needs no gather.
        messages: for each unit, the weights of each message of its gather.
    """

    def __init__(self, program: Program, policy: Policy) -> None:
        self._program, self._policy = program, policy
        self.releases: tuple[Release, ...] = tuple(_release(program, policy, u) for u in range(len(program.units)))
        self.in_place = [all(program.weights[w].shard_is_whole for w in unit.weights) for unit in program.units]
        self.messages = [gathered_messages(program, u, policy) for u in range(len(program.units))]
        self._costs = [self._cost(u) for u in range(len(program.units))]
        self._reserved = sum(cost for u, cost in enumerate(self._costs) if self.releases[u] != "forward")
        self._budget = policy.gather_budget_bytes - self._reserved
        self.near = cache(self._near)

    def _cost(self, unit: int) -> int:
        """Returns the bytes of a unit's whole weights, plus those of the messages that they are unpacked from."""
        weights = self._program.weights
        wholes = [w for w in dict.fromkeys(self._program.units[unit].weights) if not weights[w].shard_is_whole]
        packed = [w for m in self.messages[unit] if not is_received_in_place(self._program, m) for w in m]
        return sum(weights[w].whole_numel * itemsize(weights[w].dtype) for w in [*wholes, *packed])

    def is_last_of_backward(self, unit: int, event: int) -> bool:
        """Returns whether a unit is not used between an event and the end of its backward."""
        later = takewhile(lambda each: each.kind != "end_backward", self._program.events[event + 1 :])
        return all(each.unit != unit for each in later)

    def _near(self, event: int) -> tuple[int, ...]:
        """Returns the units near an event, in the order of their use."""
        units: list[int] = []
        left, depth = self._budget, None
        for later in self._program.events[event:]:
            if (unit := later.unit) is None:
                continue
            if depth is None:
                depth = self._policy.depth(later.kind)
            if unit in units or self.in_place[unit]:
                continue
            left -= self._costs[unit] if self.releases[unit] == "forward" else 0
            if units and left < 0:
                break
            units.append(unit)
            if len(units) > depth:
                break
        return tuple(units)

    @property
    def least_budget_bytes(self) -> int:
        """The least bytes of units that must be whole at one time: all kept units, and the largest of the others."""
        passing = (cost for u, cost in enumerate(self._costs) if self.releases[u] == "forward")
        return self._reserved + max(passing, default=0)

    def check_budget(self) -> None:
        """Raises PolicyError if `Policy.gather_budget_bytes` is too small for the program."""
        budget, least = self._policy.gather_budget_bytes, self.least_budget_bytes
        if budget >= least:
            return
        units = zip(self._program.units, self._costs, self.releases, strict=True)
        names = [f"{unit.name}: {cost} bytes, released {_WHEN[release]}" for unit, cost, release in units]
        rule = f"gather_budget_bytes={budget:g}, but units of {least} bytes have to be whole at one time"
        hint = "raise the budget, release more units after forward, or make smaller units"
        raise PolicyError(message("hpfunc.Policy", rule, names, hint=hint))


_WHEN = {"forward": "after forward", "backward": "after backward", "never": "never"}


def _release(program: Program, policy: Policy, unit: int) -> Release:
    for pattern, release in _overrides(policy):
        if program.matches(unit, pattern):
            return release
    return policy.release


def _overrides(policy: Policy) -> tuple[tuple[str, Release], ...]:
    return cast(tuple[tuple[str, Release], ...], policy.release_overrides)  # a policy converts them


def unmatched(program: Program, policy: Policy) -> list[str]:
    """Returns the patterns of `Policy.release_overrides` that match no unit of a program."""
    units = range(len(program.units))
    patterns = (pattern for pattern, _ in _overrides(policy))
    return [pattern for pattern in patterns if not any(program.matches(unit, pattern) for unit in units)]
